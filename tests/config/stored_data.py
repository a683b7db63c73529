"""The data sets of experiments that read one: made by the command in the comment of their YAML file, or written here."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np

from rl_lab.cli import main
from rl_lab.config.checks import CONFIG_FOLDER
from tests.buffers.test_zarr_layout import write_array


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


def dmc_demonstrations(folder: Path) -> Path:
    """Two short episodes of random actions on cartpole_swingup."""
    words = ["collect", "random", "--task", "dmc/cartpole_swingup", "--episodes", "2", "--out", str(folder)]
    assert main([*words, "--env", "time_limit=20", "--envs", "2", "--workers", "0"]) == 0
    return folder


def pusht_demonstrations(path: Path) -> Path:
    """Two short episodes in the zarr layout of the published ones, not compressed."""
    rows = np.linspace(1, 500, 24, dtype=np.float32)
    write_array(path / "data" / "state", np.stack([rows] * 5, axis=1), (24, 5))
    write_array(path / "data" / "keypoint", np.stack([rows] * 18, axis=1).reshape(24, 9, 2), (24, 9, 2))
    write_array(path / "data" / "action", np.stack([rows] * 2, axis=1), (24, 2))
    images = np.arange(24 * 96 * 96 * 3).reshape(24, 96, 96, 3) % 251
    write_array(path / "data" / "img", images.astype(np.float32), (24, 96, 96, 3))
    write_array(path / "meta" / "episode_ends", np.array([11, 24]), (2,))
    (path / ".zgroup").write_text('{"zarr_format": 2}')
    return path
