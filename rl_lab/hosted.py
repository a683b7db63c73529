"""Notebooks on Kaggle and Colab: where files stay, and a replay that fits into the machine's memory.

    settings = rl_lab.hosted.settings("dreamer_catch", replay_gigabytes=2)
    run = rl_lab.train("dreamer_catch", settings)

Both set what a user could set, as words of the command line, so that it can be read and changed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rl_lab.errors import ConfigError

KAGGLE_ROOT = Path("/kaggle/working")  # kept with the notebook's version
COLAB_DRIVE = Path("/content/drive/MyDrive")  # kept, once `google.colab.drive.mount` was called


def place() -> str | None:
    """Return "kaggle", "colab" or None: the hosted notebook that this process runs in."""
    if KAGGLE_ROOT.is_dir():
        return "kaggle"
    return "colab" if "COLAB_RELEASE_TAG" in os.environ else None


def persistent_folder() -> Path | None:
    """Return the folder of this hosted notebook whose files stay when the machine is given back; None: there is none."""
    if KAGGLE_ROOT.is_dir():
        return KAGGLE_ROOT
    if place() == "colab" and COLAB_DRIVE.is_dir():
        return COLAB_DRIVE
    return None


def settings(
    experiment: str | None = None, overrides: Sequence[str] = (), *, replay_gigabytes: float | None = None
) -> list[str]:
    """Return the overrides with which an experiment fits here: those given, and a smaller replay if it is too large.

    replay_gigabytes: for all rows of the replay; None: a quarter of the memory that is free
    """
    from rl_lab.buffers.ring import row_bytes
    from rl_lab.config.compose import compose_config
    from rl_lab.run_environments import probe_environment

    if replay_gigabytes is None:
        import psutil

        replay_gigabytes = psutil.virtual_memory().available / 4e9
    if not replay_gigabytes > 0:
        raise ConfigError(f"replay_gigabytes must be above 0, not {replay_gigabytes}")
    words = [f"experiment={experiment}"] if experiment else []
    config = compose_config([*words, *overrides])
    chosen = list(overrides)
    replay = config.buffers.get("replay")
    budget = int(replay_gigabytes * 1e9)
    if replay is None:
        return chosen
    if "max_bytes" in replay:  # complete episodes, in files
        if replay.max_bytes is None or replay.max_bytes > budget:
            chosen.append(f"buffers.replay.max_bytes={budget}")
    elif replay.get("capacity") is not None:
        spec, _ = probe_environment(config)
        row = sum(row_bytes(column) for column in spec.row_columns().values())
        if budget // row < int(replay.capacity):
            chosen.append(f"buffers.replay.capacity={budget // row}")
    return chosen
