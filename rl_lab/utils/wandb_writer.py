"""Weights & Biases, only when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_lab.errors import ConfigError, MissingPackageError, closest
from rl_lab.utils.install import install_line

MODES = ("online", "offline", "disabled")
ID_FILE = "wandb_id.txt"  # so that a resumed run goes on in the same place


class WandbWriter:
    """Sends the scalars and videos that the other outputs get. `options` go to `wandb.init`."""

    def __init__(self, run_dir: Path, mode: str, options: Mapping[str, Any]) -> None:
        if mode not in MODES:
            raise ConfigError(f"wandb.mode cannot be '{mode}'.{closest(mode, MODES)}")
        try:
            import wandb
        except ImportError:
            raise MissingPackageError(
                f"wandb.mode={mode} needs the package wandb: {install_line('track')}, or set wandb.mode=disabled"
            ) from None
        self._wandb = wandb
        id_file = run_dir / ID_FILE
        known = id_file.read_text().strip() if id_file.is_file() else None
        settings = {key: value for key, value in options.items() if value is not None}
        settings.setdefault("id", known)
        self._run = wandb.init(dir=str(run_dir), mode=mode, resume="allow", **settings)
        id_file.write_text(f"{self._run.id}\n")

    def scalars(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def image(self, name: str, image: Any, step: int) -> None:
        self._run.log({name: self._wandb.Image(image)}, step=step)

    def video(self, name: str, file: Path, step: int) -> None:
        self._run.log({name: self._wandb.Video(str(file))}, step=step)

    def close(self) -> None:
        self._run.finish()
