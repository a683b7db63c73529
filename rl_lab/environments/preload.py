"""Imported once by the fork server, never by the trainer: what every worker process then has at birth."""

import os

# Read when numpy loads. Workers are many and their matrices small; threads would only fight for cores.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import rl_lab.environments.make  # noqa: E402, F401
