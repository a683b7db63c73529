"""Train from a checkout: python scripts/train.py +experiment=NAME key=value … (the same as `rl-lab train`)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl_lab.cli import main

sys.exit(main(["train", *sys.argv[1:]]))
