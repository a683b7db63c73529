"""`python -m rl_lab …` is the same as the command `rl-lab`."""

import sys

from rl_lab.cli import main

sys.exit(main())
