#!/usr/bin/env bash
# Install MineRL 0.4.4 and Java 8 for environment=minecraft, in an interpreter of its own. Not run where RL Lab is tested:
# it downloads from GitHub, and Minecraft itself from Mojang at the first start. See docs/howto/minecraft_dmlab.md.
#
#     bash scripts/setup/minecraft.sh                 venv in ~/.cache/rl_lab/minecraft
#     PYTHON=python3.11 VENV=/data/minecraft bash scripts/setup/minecraft.sh
set -euo pipefail
PYTHON="${PYTHON:-python3.11}"
VENV="${VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/rl_lab/minecraft}"
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
# The authors of DreamerV3 build MineRL 0.4.4 for Python 3.11 (danijar/dreamerv3 @ e3f0224, Dockerfile).
WHEEL="${WHEEL:-https://github.com/danijar/minerl/releases/download/v0.4.4-patched/minerl_mirror-0.4.4-cp311-cp311-linux_x86_64.whl}"

fail() { echo "minecraft.sh: $1" >&2; exit 1; }

command -v "$PYTHON" >/dev/null || fail "$PYTHON is not there: install Python 3.11, or set PYTHON"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || fail "the wheel is for Python 3.11, and $PYTHON is another: set PYTHON"
command -v java >/dev/null || fail "there is no java: install a JDK 8 (Debian and Ubuntu: openjdk-8-jdk, or temurin-8-jdk of Adoptium)"
java -version 2>&1 | grep -q '"1\.8' || fail "Minecraft 1.11.2 needs Java 8, and java is $(java -version 2>&1 | head -1): put a JDK 8 first in PATH"
if [ -z "${DISPLAY:-}" ]; then
    command -v Xvfb >/dev/null || fail "there is no display and no Xvfb: install xvfb"
fi

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
"$VENV/bin/python" -m pip install -q --upgrade pip
"$VENV/bin/python" -m pip install -q "$WHEEL"
"$VENV/bin/python" -m pip install -q -e "$ROOT"
echo "installed in $VENV; the first world takes some minutes"
run=()
[ -n "${DISPLAY:-}" ] || run=(xvfb-run -a)
"${run[@]}" "$VENV/bin/python" - <<'CHECK'
from rl_lab import make_env

with make_env("minecraft/diamond", 1, workers=0, timeout=None) as env:
    obs, _ = env.reset()
    for _ in range(10):
        obs, *_ = env.step(env.action_space.sample())
    print(f"minecraft/diamond: image {obs['image'].shape[1:]}, {env.spec.num_actions} actions: ready")
CHECK
