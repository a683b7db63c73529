"""The data sets of experiments that read one: made by the command in the comment of their YAML file."""

from __future__ import annotations

import shlex
from pathlib import Path

from rl_lab.cli import main
from rl_lab.config.checks import CONFIG_FOLDER


def command_of(name: str) -> list[str] | None:
    """Return the words of `# rl-lab collect …` in an experiment's file; None without one."""
    lines = (CONFIG_FOLDER / "experiment" / f"{name}.yaml").read_text().splitlines()
    found = [line.removeprefix("# rl-lab ") for line in lines if line.startswith("# rl-lab collect ")]
    return shlex.split(found[0]) if found else None


def stored_data(name: str, folder: Path) -> list[str]:
    """Make a small data set for an experiment; return the override with its path."""
    words = command_of(name)
    if words is None:
        return []
    words[words.index("--episodes") + 1] = "12"
    words[words.index("--out") + 1] = str(folder / "data")
    assert main([*words, "--env", "time_limit=20", "--workers", "0"]) == 0
    return [f"buffers.offline.path={folder / 'data'}"]
