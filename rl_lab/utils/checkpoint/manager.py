"""`CheckpointManager`: saves, verifies, cleans up and loads the checkpoints of a run.

    checkpoints/
      step_000012000.pt      one dict, loadable with torch.load(weights_only=True)
      step_000012000.json    manifest, written last: sizes and checksums of the state and of every replay file
      last.pt                link to the newest
      best.pt, best.json     weights only, from `save(tag="best")`; the same holds for epoch_12.pt
      replay/<buffer>/…      files of the buffers, shared between manifests

A checkpoint exists if its manifest exists. A file that a kept manifest names is never changed or deleted.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from rl_lab.errors import CheckpointError, ConfigError, closest
from rl_lab.utils import ranks
from rl_lab.utils.checkpoint.loading import (
    ON_DAMAGED_REPLAY,
    Loaded,
    Warn,
    emit_warning,
    entry_name,
    load_checkpoint,
    manifest_step,
    manifests,
    named_replay,
    restore_buffers,
)
from rl_lab.utils.checkpoint.manifest import (
    CHECKPOINT_VERSION,
    REPLAY_FOLDER,
    read_manifest,
    write_manifest,
)
from rl_lab.utils.checkpoint.saveable import load_data, to_saveable
from rl_lab.utils.files import crc32_of, free_bytes, make_folder, remove_temporary, sync_folder, write_atomic

# --- Retention ---

# A manifest is deleted before the files it names, so that every manifest on disk is complete at any time.

_STATE_FILE = re.compile(r"(step_\d{9,}|[a-z][a-z0-9_-]*\.\d{9,})(\.again|\.weights)*\.pt")
# Names that buffers give to replay files. Other files in the replay folder are never deleted.
_REPLAY_FILE = re.compile(r"(chunk|tail|mutable|index|memory)-\d{8,}(-\d{8,})?\.(pt|episodes|log)")


def clean(
    folder: Path,
    *,
    newest: int | None,
    keep: int,
    keep_weights: int,
    weight_keys: Sequence[str],
    written: Iterable[Path] = (),
    on_warning: Warn | None = None,
) -> None:
    """Delete old checkpoints after the checkpoint of step `newest` was saved (None: after a tagged one).

    The `keep` newest stay complete and `keep_weights` older ones keep their weights. Checkpoints of later
    steps are
    deleted: the run was resumed from an earlier step.

    written: replay files written by this process
    """
    full: list[Path] = []
    weights: list[Path] = []
    released = set(written)  # and replay files of checkpoints that are deleted or reduced to weights
    for path in manifests(folder):
        manifest = _read(path)
        files = named_replay(folder, manifest or {})
        if newest is not None and manifest_step(path) > newest:
            emit_warning(
                f"{path.stem} is from a later step than this save, so the run was resumed before it: deleted",
                on_warning,
            )
            path.unlink()
            released |= files
            continue
        if manifest is None:
            if len(full) >= keep:  # damaged, and older than the kept ones
                path.unlink()
        elif manifest["kind"] != "full":
            weights.append(path)
        elif len(full) < keep:
            full.append(path)
        elif keep_weights == 0:
            path.unlink()
            released |= files
        else:
            _reduce_to_weights(path, manifest, weight_keys, on_warning)
            weights.append(path)
            released |= files
    if keep_weights >= 0:
        for path in sorted(weights, key=manifest_step, reverse=True)[keep_weights:]:
            path.unlink()
    sync_folder(folder)
    delete_unused(folder, replay=newest is not None, released=released)


def delete_unused(
    folder: Path,
    needed: set[Path] | None = None,
    *,
    replay: bool = True,
    released: Collection[Path] = (),
) -> None:
    """Delete state files and (replay=True) replay files that neither a manifest nor `needed` names.

    Only RL Lab's own files are deleted: those in `released` (written by this process, or named by a manifest
    until now) and those whose name matches a buffer's. Nothing behind a link is deleted.

    Only a save of the buffers may delete replay: after another run's replay was restored and before the first
    save, its files are in use but no manifest names them yet. While a manifest is unreadable, the files it
    names are unknown, and nothing is deleted.
    """
    named = set(needed or ())
    for path in folder.glob("*.json"):
        manifest = _read(path)
        if manifest is None:
            if path.stem.startswith("step_") or path.with_suffix(".pt").is_symlink():
                return
            continue  # not a manifest of RL Lab
        named.add(folder / manifest["state"]["file"])
        named |= named_replay(folder, manifest)
    for path in folder.glob("*.pt"):
        if path not in named and not path.is_symlink() and _STATE_FILE.fullmatch(path.name):
            path.unlink()
    if replay:
        _delete_unused_replay(folder / REPLAY_FOLDER, named, released)


def _delete_unused_replay(replay: Path, named: set[Path], released: Collection[Path]) -> None:
    if replay.is_symlink():
        return
    for parent, _, names in os.walk(replay, topdown=False):  # links to folders are not entered
        for path in (Path(parent, name) for name in names):
            ours = path in released or _REPLAY_FILE.fullmatch(path.name)
            if ours and path not in named and not path.is_symlink():
                path.unlink()
        with contextlib.suppress(OSError):  # not empty
            os.rmdir(parent)


def link(folder: Path, name: str, target: str, on_warning: Warn | None = None) -> None:
    """Atomically point the link `name` at a file in the same folder.

    Loading uses the manifests, not the link.
    """
    temporary = folder / f".{name}.tmp"
    try:
        temporary.unlink(missing_ok=True)
        os.symlink(target, temporary)
        os.replace(temporary, folder / name)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        emit_warning(
            f"{folder / name} could not be linked to {target} ({error}); loading does not need it", on_warning
        )


def _reduce_to_weights(
    path: Path, manifest: dict[str, Any], weight_keys: Sequence[str], on_warning: Warn | None
) -> None:
    """Replace a complete checkpoint by its weights: new file, new manifest; the old file is deleted later."""
    folder = path.parent
    try:
        state = load_data(folder / manifest["state"]["file"])
        kept = {key: value for key, value in state.items() if key in weight_keys}
        target = folder / f"{path.stem}.weights.pt"
        size, crc = write_atomic(target, lambda file: torch.save(kept, file))
        entry = {"file": target.name, "bytes": size, "crc32": crc}
        write_manifest(path, {**manifest, "kind": "weights", "state": entry, "buffers": {}})
    except (OSError, RuntimeError, CheckpointError) as error:
        emit_warning(f"{path.stem} could not be reduced to weights ({error}): deleted", on_warning)
        path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return read_manifest(path)
    except CheckpointError:
        return None


# --- Manager ---

# Keys of the state that a weights-only checkpoint keeps: enough to act and to evaluate.
WEIGHT_KEYS = (
    "version",
    "global_step",
    "workflow_name",
    "components",
    "controllers",
    "workflow_custom",
    "observation_statistics",
)


class Buffer(Protocol):
    """Methods that the manager calls on a buffer; `folder` is replay/<buffer>/ (see the module docstring)."""

    def checkpoint(self, folder: Path) -> dict[str, Any]: ...

    def restore(self, folder: Path, entry: dict[str, Any]) -> Any: ...


class CheckpointManager:
    """Saves, cleans up and loads the checkpoints of one run. `folder` is the run's `checkpoints/`.

    keep: number of newest checkpoints kept complete, with replay. keep_weights: number of older ones kept as
    weights (-1: all). on_damaged_replay: "older", "skip" or "stop", see `load_checkpoint`. Only the holder of
    the run's lock may save; any process may load.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        keep: int = 2,
        keep_weights: int = 0,
        weight_keys: Sequence[str] = WEIGHT_KEYS,
        on_damaged_replay: str = "stop",
        on_warning: Callable[[str], None] | None = None,
    ) -> None:
        if keep < 1:
            raise CheckpointError(f"training.checkpoint.keep must be at least one, not {keep}")
        if on_damaged_replay not in ON_DAMAGED_REPLAY:
            hint = closest(on_damaged_replay, ON_DAMAGED_REPLAY)
            raise ConfigError(f"training.on_damaged_replay is '{on_damaged_replay}'.{hint}")
        self.folder = Path(folder)
        self.keep = keep
        self.keep_weights = keep_weights
        self.weight_keys = tuple(weight_keys)
        self.on_damaged_replay = on_damaged_replay
        self.on_warning = on_warning
        self._leftovers_removed = False
        self._seen: dict[Path, tuple[int, int]] = {}  # replay file -> size and modification time

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, oldest first; `load` verifies them."""
        return [manifest_step(path) for path in reversed(manifests(self.folder))]

    def has_any(self) -> bool:
        """Return whether this run has a checkpoint, intact or damaged."""
        return bool(manifests(self.folder))

    @staticmethod
    def load_file(
        path: Path | str, *, weights: bool = False, on_warning: Callable[[str], None] | None = None
    ) -> Loaded:
        """Load without a manager: the same as `load_checkpoint`."""
        return load_checkpoint(path, weights=weights, on_warning=on_warning)

    def load(self, path: Path | str | None = None, *, weights: bool = False) -> Loaded:
        """Load the newest intact checkpoint of this run, or of a file, run folder or checkpoints folder."""
        source = self.folder if path is None else path
        return load_checkpoint(
            source,
            weights=weights,
            on_damaged_replay=self.on_damaged_replay,
            on_warning=self.on_warning,
        )

    def restore_buffers(self, loaded: Loaded, buffers: Mapping[str, Buffer]) -> list[str]:
        """Restore the buffers; returns the names of those with missing rows, and warns about each.

        Each rank restores its own, or, if the saved run had fewer ranks, a copy of that of another.

        Replay of another run is first linked or copied into this run's folder: the next checkpoint writes
        only new rows and must not depend on the other run.
        """
        saved_rank = ranks.rank() % (1 + len(loaded.state.get("ranks", ())))
        return restore_buffers(
            loaded,
            buffers,
            into=self.folder,
            on_warning=self.on_warning,
            rank=ranks.rank(),
            saved_rank=saved_rank,
        )

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        buffers: Mapping[str, Buffer] | None = None,
        *,
        info: Mapping[str, Any] | None = None,
        tag: str | None = None,
    ) -> Path:
        """Write a checkpoint and delete old ones; returns the state file.

        tag: save weights only, under that name ("best"), replacing the earlier one of that name.
        CheckpointError if a value of the state cannot be saved (the message has its key) or writing fails;
        earlier checkpoints stay intact.
        """
        if tag is not None:
            ours = tag in ("last", "replay") or tag.startswith("step_")
            if ours or not re.fullmatch(r"[a-z][a-z0-9_-]*", tag):
                raise CheckpointError(
                    f"'{tag}' cannot be the name of a checkpoint: use a name such as 'best'"
                )
            state = {key: value for key, value in state.items() if key in self.weight_keys}
            buffers = None
        data: dict[str, Any] = {}

        def write_own() -> dict[str, dict[str, Any]]:
            if ranks.is_first():
                data.update(to_saveable({"version": CHECKPOINT_VERSION, **state}))
            return self._save_buffers(step, buffers or {})

        name = tag or f"step_{step:09d}"
        if tag is None:  # the replay of all ranks is written before the first one writes the rest
            ranks.from_first(self._remove_leftovers)
            parts = ranks.together(write_own)
        else:  # only the first rank is here
            self._remove_leftovers()
            parts = [write_own()]
        entries = {key: entry for part in parts for key, entry in part.items()}
        if not ranks.is_first():
            return self.folder / f"{name}.pt"
        with self._as_checkpoint_error(step, "replay"):
            # Files of failed saves must not accumulate, above all on a full disk.
            delete_unused(self.folder, named_replay(self.folder, {"buffers": entries}), replay=tag is None)
        path = self._unused_state_file(name, step if tag else None)
        with self._as_checkpoint_error(step, "state", path):
            size, crc = write_atomic(path, lambda file: torch.save(data, file))
        with self._as_checkpoint_error(step, "manifest", path):
            manifest = {
                "version": CHECKPOINT_VERSION,
                "step": step,
                "kind": "weights" if tag else "full",
                "state": {"file": path.name, "bytes": size, "crc32": crc},
                "buffers": entries,
                "info": info or {},
                "time": time.time(),
                "torch": str(torch.__version__),
            }
            write_manifest(self.folder / f"{name}.json", manifest)
        link(self.folder, f"{tag or 'last'}.pt", path.name, self.on_warning)
        self._clean(None if tag else step)
        return path

    def _save_buffers(self, step: int, buffers: Mapping[str, Buffer]) -> dict[str, dict[str, Any]]:
        with self._as_checkpoint_error(step, "replay"):
            make_folder(self.folder)
            named = {entry_name(key, ranks.rank()): buffer for key, buffer in buffers.items()}
            return {name: self._save_buffer(name, buffer) for name, buffer in named.items()}

    def _save_buffer(self, name: str, buffer: Buffer) -> dict[str, Any]:
        folder = self.folder / REPLAY_FOLDER / name
        make_folder(folder)
        entry = buffer.checkpoint(folder)
        changed = self._changed_files(folder, entry)
        if changed:
            # The rows are still in memory: if the file is missing, most buffers write it again.
            emit_warning(
                f"{folder}: {', '.join(changed)} changed after writing: written again", self.on_warning
            )
            for file in changed:
                (folder / file).unlink(missing_ok=True)
            entry = buffer.checkpoint(folder)
            changed = self._changed_files(folder, entry)
        for file in changed:
            path, size = folder / file, entry["files"][file]["bytes"]
            if not path.is_file() or path.stat().st_size != size:
                raise CheckpointError(f"{path} should have {size} bytes but does not")
            emit_warning(
                f"{path} is damaged and cannot be written again: its rows will be lost on resume",
                self.on_warning,
            )
        return entry

    def _changed_files(self, folder: Path, entry: Mapping[str, Any]) -> list[str]:
        """Return the replay files whose content differs from what was written.

        Old chunks are not written again, and reading all of them at every save would take too long: the
        checksum is compared only if size or modification time changed.
        """
        changed = []
        for name, record in entry.get("files", {}).items():
            path = folder / name
            try:
                status = path.stat()
                now = (status.st_size, status.st_mtime_ns)
                intact = status.st_size == record["bytes"] and (
                    self._seen.get(path, now) == now or crc32_of(path) == record["crc32"]
                )
            except OSError:
                intact = False
            if intact:
                self._seen[path] = now
            else:
                changed.append(name)
        return changed

    def _unused_state_file(self, name: str, step: int | None) -> Path:
        """Return a file that the existing manifest does not use, so that it stays valid until replaced."""
        stem = name if step is None else f"{name}.{step:09d}"
        try:
            taken = read_manifest(self.folder / f"{name}.json")["state"]["file"]
        except (CheckpointError, KeyError, TypeError):
            taken = None
        return self.folder / (f"{stem}.again.pt" if taken == f"{stem}.pt" else f"{stem}.pt")

    @contextlib.contextmanager
    def _as_checkpoint_error(self, step: int, what: str, state_file: Path | None = None) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except (OSError, RuntimeError) as error:  # RuntimeError: torch's zip writer on a full disk
            if state_file is not None:
                with contextlib.suppress(OSError):
                    state_file.unlink(missing_ok=True)
            cause: BaseException = error
            while not isinstance(cause, OSError) and cause.__context__ is not None:
                cause = cause.__context__
            raise CheckpointError(
                f"{self.folder}: the checkpoint of step {step} was not saved, because writing its {what} "
                f"failed ({cause}); {free_bytes(self.folder):,} bytes are free, and earlier checkpoints are intact"
            ) from error

    def _remove_leftovers(self) -> None:
        """Delete temporary files of a killed process, once."""
        if not self._leftovers_removed:
            remove_temporary(self.folder)
            self._leftovers_removed = True

    def _clean(self, newest: int | None) -> None:
        try:
            clean(
                self.folder,
                newest=newest,
                keep=self.keep,
                keep_weights=self.keep_weights,
                weight_keys=self.weight_keys,
                written=self._seen,
                on_warning=self.on_warning,
            )
        except OSError as error:
            emit_warning(
                f"{self.folder} could not be cleaned up ({error}); the checkpoint itself is saved",
                self.on_warning,
            )
