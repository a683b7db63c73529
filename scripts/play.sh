#!/usr/bin/env bash
# Watch a run's agent or play in its dream (the newest run under ./outputs when none is given):
#   scripts/play.sh [RUN] [-w|-a|-e] [-r] [-h] [-s] [--web]     -h is the header here; --help lists everything
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m rl_lab.tools.play.shell "$@"
