"""Episodes that lie on disk, to train on as they are: read where they are, whatever their size, never changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rl_lab.buffers.columns import Array
from rl_lab.buffers.episode_checkpoint import KIND, fingerprint
from rl_lab.buffers.episode_store import EpisodeStore
from rl_lab.buffers.episodes import EpisodeBuffer, SamplerFactory
from rl_lab.buffers.row_layout import FORMAT, LAYOUT, RowLayout, check_row, read_layout
from rl_lab.buffers.salvage import Lost, find_damaged
from rl_lab.errors import CheckpointError, ConfigError, LabError, closest
from rl_lab.records import ArraySpec, Spec
from rl_lab.utils.files import write_atomic
from rl_lab.utils.saveable import load_data


def episode_folder(path: Path, buffer: str) -> Path | None:
    """The folder of episodes that is meant by a path: itself, or that of a buffer of the run there; None: neither."""
    return next((f for f in (path, path / "buffers" / buffer) if (f / LAYOUT).is_file()), None)


class StoredEpisodes(EpisodeBuffer):
    """EpisodeBuffer over episodes that another run stored. Only mutable columns (latents) change, in memory.

    path:    the folder of a buffer of episodes, or a run that has one
    buffer:  which buffer of that run
    spec:    of the environment that the data must fit
    cache_bytes, written_bytes, readers, verify, mutable, samplers: see EpisodeBuffer
    """

    read_only = True

    def __init__(
        self,
        columns: Mapping[str, ArraySpec],
        *,
        path: Path | str,
        spec: Spec,
        buffer: str = "replay",
        cache_bytes: int = 256 << 20,
        written_bytes: int = 256 << 20,
        readers: int = 0,
        verify: bool = False,
        device: torch.device | str = "cpu",
        mutable: Sequence[str] = (),
        samplers: Mapping[str, SamplerFactory] | None = None,
        on_warning: Callable[[str], None] | None = None,
    ) -> None:
        self.path = Path(path).expanduser().absolute()
        folder = episode_folder(self.path, buffer)
        if folder is None:
            there = [found.parent.name for found in self.path.glob(f"buffers/*/{LAYOUT}")]
            hint = closest(buffer, there) if there else " buffer=offline reads other data."
            raise ConfigError(f"there are no episodes of a buffer '{buffer}' at {self.path}.{hint}")
        self._spec = spec
        super().__init__(
            columns,
            num_streams=1,
            spec=spec,
            folder=folder,
            open_episodes=False,
            cache_bytes=cache_bytes,
            written_bytes=written_bytes,
            readers=readers,
            verify=verify,
            device=device,
            mutable=mutable,
            samplers=samplers,
            on_warning=on_warning,
        )
        self.fingerprint = fingerprint(self._store)

    def _open_store(self, folder: Path, layout: RowLayout, **options: Any) -> EpisodeStore:
        there = read_layout(folder)
        self._zero = check_row(there, self._spec, self.columns, folder)
        return EpisodeStore(folder, there, **{**options, "read_only": True, "fresh": False})

    def describe(self) -> str:
        notes = (
            f"; {', '.join(self._zero)} begin as zeros, because they are not stored in this form"
            if self._zero
            else ""
        )
        return super().describe() + notes

    def add(self, rows: Mapping[str, Array]) -> None:
        raise LabError(
            f"the episodes in {self.folder} are read-only: collected rows need a buffer of their own, named first in the "
            "phase's `buffer` (such as {replay: 0.5, offline: 0.5})"
        )

    def checkpoint(self, folder: Path) -> dict[str, Any]:
        """Save what was written back; of the data itself only where it is and its fingerprint."""
        self._late.settle()
        self._saves += 1
        folder.mkdir(parents=True, exist_ok=True)
        name = f"memory-{self._saves:08d}.pt"
        facts = write_atomic(folder / name, lambda f: torch.save({"written": self._written.get_state()}, f))
        source = {"path": str(self.folder), "fingerprint": self.fingerprint}
        meta = {"kind": KIND, "format": FORMAT, "memory": name, "saves": self._saves, "source": source}
        return {"files": {name: dict(zip(("bytes", "crc32"), facts))}, "meta": meta}

    def restore(self, folder: Path, entry: Mapping[str, Any], *, skip_corrupt: bool = False) -> list[Lost]:
        """Take back what was written back; CheckpointError when the data has changed since."""
        meta = entry["meta"]
        saved = meta.get("source", {})
        if saved.get("fingerprint") != self.fingerprint:
            raise CheckpointError(
                f"the episodes in {self.folder} are not what this run was training on (from {saved.get('path')}): bring that "
                "data back, or start a new run"
            )
        self._saves = int(meta["saves"])
        damaged = find_damaged(folder, entry) if skip_corrupt else {}
        if damaged:
            self._written.clear()
            return [Lost(name, 0, f"{reason}: what was written back") for name, reason in damaged.items()]
        self._written.set_state(load_data(folder / Path(meta["memory"]).name, check_zip=True)["written"])
        return []
