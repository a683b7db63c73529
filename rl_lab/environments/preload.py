"""Imports for worker processes: the fork server imports this module once, the trainer never does."""

import os

# numpy reads these on import. There are many workers with small matrices; threads would compete for cores.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import rl_lab.environments.make  # noqa: E402, F401
