#!/usr/bin/env bash
# Install the Atari suites and see that a game starts. The ROMs ship with ale-py: nothing is downloaded besides, and no
# licence has to be accepted on the way. ale-py itself is under GPL-2.0; RL Lab only imports it when you ask for Atari.
set -euo pipefail
PYTHON="${PYTHON:-python3}"
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

if ! "$PYTHON" -c "import ale_py" 2>/dev/null; then
    "$PYTHON" -m pip install -e "$ROOT[atari]"
fi
"$PYTHON" - <<'CHECK'
import ale_py.roms

from rl_lab import make_env

print(f"ale-py {ale_py.__version__} with {len(ale_py.roms.get_all_rom_ids())} ROMs")
with make_env("atari100k/pong", 1, workers=0) as env:
    obs, _ = env.reset()
    print(f"atari100k/pong: image {obs['image'].shape[1:]}, {env.spec.num_actions} actions: ready")
CHECK
