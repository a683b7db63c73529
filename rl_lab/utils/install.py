"""The name this project has for pip, where its code is, and the line that installs a part of it."""

from __future__ import annotations

import shlex
from pathlib import Path

DISTRIBUTION = "rl-lab-wm"  # the command stays `rl-lab`, the import `rl_lab`
FORMER_NAME = "rl-lab"  # on the package index this is another project, whose import name is rl_lab too
PACKAGE = Path(__file__).resolve().parents[1]


def checkout() -> Path | None:
    """Root of the source tree that rl_lab is imported from; None when it is installed without one."""
    root = PACKAGE.parent
    try:
        text = (root / "pyproject.toml").read_text()
    except OSError:
        return None
    return root if f'name = "{DISTRIBUTION}"' in text else None


def install_line(extra: str = "", again: bool = False) -> str:
    """The command that installs RL Lab, or an extra of it, from where rl_lab came.

    again: also where pip takes it for installed, because files of it are gone or are another package's
    """
    root = checkout()
    wanted = f"[{extra}]" if extra else ""
    if root is None:
        flags = "--force-reinstall --no-deps " if again else ""
        return f"pip install {flags}{shlex.quote(DISTRIBUTION + wanted)}"
    # pip installs an editable project anew each time.
    return f"pip install -e {shlex.quote(('.' if _is_current(root) else str(root)) + wanted)}"


def _is_current(folder: Path) -> bool:
    try:
        return Path.cwd() == folder
    except OSError:  # the current folder was deleted
        return False
