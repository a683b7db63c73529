#!/usr/bin/env bash
# Go on with a run (the newest under ./outputs when none is given): scripts/resume.sh [RUN] [key=value …]
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m rl_lab resume "$@"
