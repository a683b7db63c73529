"""Evaluate a run from a checkout: python scripts/eval.py RUN (the same as `rl-lab eval`)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl_lab.cli import main

sys.exit(main(["eval", *sys.argv[1:]]))
