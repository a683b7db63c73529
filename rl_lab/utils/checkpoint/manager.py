"""Checkpoints: whole, checked, and loadable as data.

    checkpoints/
      step_000012000.pt      one dict, loadable with torch.load(weights_only=True)
      step_000012000.json    manifest, written last: sizes and checksums of the state and of every replay file
      last.pt                link to the newest
      best.pt, best.json     weights only: `save(tag="best")`; so is epoch_12.pt
      replay/<buffer>/…      files of buffers, shared between manifests

A checkpoint exists when its manifest does, and nothing that a kept manifest names is ever changed or deleted.
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
from rl_lab.utils.checkpoint.loading import (
    ON_DAMAGED_REPLAY,
    Loaded,
    Warn,
    load_checkpoint,
    manifest_step,
    manifests,
    named_replay,
    restore_buffers,
    say,
)
from rl_lab.utils.checkpoint.manifest import (
    CHECKPOINT_VERSION,
    REPLAY_FOLDER,
    read_manifest,
    write_manifest,
)
from rl_lab.utils.checkpoint.saveable import load_data, to_saveable
from rl_lab.utils.files import crc32_of, free_bytes, remove_temporary, sync_folder, write_atomic

# --------------------
# Which checkpoints stay, which shrink to weights, and which files nobody needs any more.
#
# Order matters: a manifest goes before the files it names, so that at any moment every manifest that can be
# found is whole.


_STATE_FILE = re.compile(r"(step_\d+|[a-z][a-z0-9_-]*\.\d+)(\.\w+)*\.pt")
# The names that buffers give to the files of a checkpoint. Other files in the replay folder are not ours.
_REPLAY_FILE = re.compile(r"(chunk|tail|mutable|index|memory)-\d+(-\d+)?\.(pt|episodes|log)")


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
    """Tidy the folder after the checkpoint of step `newest` became durable (None: after a tagged one).

    Checkpoints of later steps belong to a course of the run that was given up when it was resumed from an
    earlier point; they go.

    written: replay files of this process
    """
    full: list[Path] = []
    weights: list[Path] = []
    released = set(written)  # and replay files of checkpoints that are no longer complete
    for path in manifests(folder):
        manifest = _read(path)
        files = named_replay(folder, manifest or {})
        if newest is not None and manifest_step(path) > newest:
            say(f"{path.stem} is of a course of this run that was given up: deleted", on_warning)
            path.unlink()
            released |= files
            continue
        if manifest is None:
            if len(full) >= keep:  # damaged, and older than what is kept
                path.unlink()
        elif manifest["kind"] != "full":
            weights.append(path)
        elif len(full) < keep:
            full.append(path)
        elif keep_weights == 0:
            path.unlink()
            released |= files
        else:
            _shrink(path, manifest, weight_keys, on_warning)
            weights.append(path)
            released |= files
    if keep_weights >= 0:
        for path in sorted(weights, key=manifest_step, reverse=True)[keep_weights:]:
            path.unlink()
    sync_folder(folder)
    collect(folder, replay=newest is not None, released=released)


def collect(
    folder: Path,
    needed: set[Path] | None = None,
    *,
    replay: bool = True,
    released: Collection[Path] = (),
) -> None:
    """Delete state and (replay=True) replay files that no manifest names, nor `needed`.

    Only files of ours are deleted: those in `released`, which this process wrote or a manifest named until now, and
    those with a name that our buffers write. Nothing behind a link is deleted.

    Only a save of the buffers may collect replay: between restoring another run's and the first save here, its
    files are in use though no manifest names them yet. While a manifest cannot be read, what it names is
    unknown, and nothing is deleted.
    """
    named = set(needed or ())
    for path in folder.glob("*.json"):
        manifest = _read(path)
        if manifest is None:
            if path.stem.startswith("step_") or path.with_suffix(".pt").is_symlink():
                return
            continue  # not ours
        named.add(folder / manifest["state"]["file"])
        named |= named_replay(folder, manifest)
    for path in folder.glob("*.pt"):
        if path not in named and not path.is_symlink() and _STATE_FILE.fullmatch(path.name):
            path.unlink()
    if replay:
        _collect_replay(folder / REPLAY_FOLDER, named, released)


def _collect_replay(replay: Path, named: set[Path], released: Collection[Path]) -> None:
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
    """Point `name` at a file beside it, in one step. Only a convenience: manifests say what is newest."""
    temporary = folder / f".{name}.tmp"
    try:
        temporary.unlink(missing_ok=True)
        os.symlink(target, temporary)
        os.replace(temporary, folder / name)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        say(
            f"{folder / name} could not be linked to {target} ({error}); loading does not need it", on_warning
        )


def _shrink(
    path: Path, manifest: dict[str, Any], weight_keys: Sequence[str], on_warning: Warn | None
) -> None:
    """Make a complete checkpoint one of weights: new file, new manifest; the old file is collected later."""
    folder = path.parent
    try:
        state = load_data(folder / manifest["state"]["file"])
        kept = {key: value for key, value in state.items() if key in weight_keys}
        target = folder / f"{path.stem}.weights.pt"
        size, crc = write_atomic(target, lambda file: torch.save(kept, file))
        entry = {"file": target.name, "bytes": size, "crc32": crc}
        write_manifest(path, {**manifest, "kind": "weights", "state": entry, "buffers": {}})
    except (OSError, RuntimeError, CheckpointError) as error:
        say(f"{path.stem} could not be cut down to weights ({error}): deleted", on_warning)
        path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return read_manifest(path)
    except CheckpointError:
        return None


# What remains of a state in a checkpoint that is weights only: enough to act and to look.
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
    """What the manager asks of a buffer; see the module docstring for the folder it is given."""

    def checkpoint(self, folder: Path) -> dict[str, Any]: ...

    def restore(self, folder: Path, entry: dict[str, Any]) -> Any: ...


class CheckpointManager:
    """Saves, cleans up and loads the checkpoints of one run. `folder` is the run's `checkpoints/`.

    keep: newest checkpoints that stay complete, with replay. keep_weights: how many older ones stay as weights
    (-1: all). on_damaged_replay: "older", "skip" or "stop", see `load_checkpoint`. Only the holder of the run's lock
    may save; anyone may load.
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
            raise CheckpointError(f"at least one checkpoint must be kept, not {keep}")
        if on_damaged_replay not in ON_DAMAGED_REPLAY:
            raise ConfigError(
                f"training.on_damaged_replay is '{on_damaged_replay}'.{closest(on_damaged_replay, ON_DAMAGED_REPLAY)}"
            )
        self.folder = Path(folder)
        self.keep = keep
        self.keep_weights = keep_weights
        self.weight_keys = tuple(weight_keys)
        self.on_damaged_replay = on_damaged_replay
        self.on_warning = on_warning
        self._swept = False
        self._seen: dict[Path, tuple[int, int]] = {}  # replay file -> size and time of its last change

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, oldest first; whether it is whole shows when it is loaded."""
        return [manifest_step(path) for path in reversed(manifests(self.folder))]

    def has_any(self) -> bool:
        """Whether this run has a checkpoint to go on from, damaged or not."""
        return bool(manifests(self.folder))

    @staticmethod
    def load_file(
        path: Path | str, *, weights: bool = False, on_warning: Callable[[str], None] | None = None
    ) -> Loaded:
        """Load without a run of one's own: `load_checkpoint`, where it is looked for."""
        return load_checkpoint(path, weights=weights, on_warning=on_warning)

    def load(self, path: Path | str | None = None, *, weights: bool = False) -> Loaded:
        """The newest good checkpoint of this run, or that of a file, run folder or checkpoints folder."""
        source = self.folder if path is None else path
        return load_checkpoint(
            source,
            weights=weights,
            on_damaged_replay=self.on_damaged_replay,
            on_warning=self.on_warning,
        )

    def restore_buffers(self, loaded: Loaded, buffers: Mapping[str, Buffer]) -> list[str]:
        """Fill the buffers; returns the names of those whose rows are not all there, each said with a warning.

        Replay of another run is brought into this run's folder first, so that the next checkpoint here, which
        writes only what is new, stands on its own.
        """
        return restore_buffers(loaded, buffers, into=self.folder, on_warning=self.on_warning)

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        buffers: Mapping[str, Buffer] | None = None,
        *,
        info: Mapping[str, Any] | None = None,
        tag: str | None = None,
    ) -> Path:
        """Write a checkpoint and clean up behind it; returns the state file.

        tag: save weights only, under that name ("best"), in place of the earlier one of that name.
        CheckpointError when something in the state cannot be saved (it names the key) or the disk refuses;
        earlier checkpoints stay whole.
        """
        if tag is not None:
            ours = tag in ("last", "replay") or tag.startswith("step_")
            if ours or not re.fullmatch(r"[a-z][a-z0-9_-]*", tag):
                raise CheckpointError(f"'{tag}' cannot be the name of a checkpoint; 'best' or 'final' can")
            state = {key: value for key, value in state.items() if key in self.weight_keys}
            buffers = None
        data = to_saveable({"version": CHECKPOINT_VERSION, **state})
        self._sweep()
        name = tag or f"step_{step:09d}"
        with self._explained(step, "replay"):
            self.folder.mkdir(parents=True, exist_ok=True)
            entries = {key: self._save_buffer(key, buffer) for key, buffer in (buffers or {}).items()}
            # Files of saves that failed half-way must not pile up, least of all on a full disk.
            collect(self.folder, named_replay(self.folder, {"buffers": entries}), replay=tag is None)
        path = self._unused_state_file(name, step if tag else None)
        with self._explained(step, "state", path):
            size, crc = write_atomic(path, lambda file: torch.save(data, file))
        with self._explained(step, "manifest", path):
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

    def _save_buffer(self, name: str, buffer: Buffer) -> dict[str, Any]:
        folder = self.folder / REPLAY_FOLDER / name
        folder.mkdir(parents=True, exist_ok=True)
        entry = buffer.checkpoint(folder)
        changed = self._changed_files(folder, entry)
        if changed:
            # The rows are still in memory: without the file, most buffers write it again.
            say(f"{', '.join(changed)} in {folder} changed since written: written again", self.on_warning)
            for file in changed:
                (folder / file).unlink(missing_ok=True)
            entry = buffer.checkpoint(folder)
            changed = self._changed_files(folder, entry)
        for file in changed:
            path, size = folder / file, entry["files"][file]["bytes"]
            if not path.is_file() or path.stat().st_size != size:
                raise CheckpointError(f"{path} should have {size} bytes and has not")
            say(
                f"{path} is damaged and cannot be written again: its rows will be lost on resume",
                self.on_warning,
            )
        return entry

    def _changed_files(self, folder: Path, entry: Mapping[str, Any]) -> list[str]:
        """Replay files that are no longer what was written.

        Chunks written long ago are not written again, and reading all of them at every save would take too long:
        the checksum is compared where size or time of change are not as they were.
        """
        changed = []
        for name, facts in entry.get("files", {}).items():
            path = folder / name
            try:
                status = path.stat()
                now = (status.st_size, status.st_mtime_ns)
                whole = status.st_size == facts["bytes"] and (
                    self._seen.get(path, now) == now or crc32_of(path) == facts["crc32"]
                )
            except OSError:
                whole = False
            if whole:
                self._seen[path] = now
            else:
                changed.append(name)
        return changed

    def _unused_state_file(self, name: str, step: int | None) -> Path:
        """A file that the manifest of that name does not speak of: it must stay true until it is replaced."""
        stem = name if step is None else f"{name}.{step:09d}"
        try:
            taken = read_manifest(self.folder / f"{name}.json")["state"]["file"]
        except (CheckpointError, KeyError, TypeError):
            taken = None
        return self.folder / (f"{stem}.again.pt" if taken == f"{stem}.pt" else f"{stem}.pt")

    @contextlib.contextmanager
    def _explained(self, step: int, what: str, state_file: Path | None = None) -> Iterator[None]:
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
                f"the checkpoint of step {step} was not saved: writing its {what} in {self.folder} failed ({cause}); "
                f"{free_bytes(self.folder):,} bytes are free there. Earlier checkpoints are whole."
            ) from error

    def _sweep(self) -> None:
        """Once: what a killed process left half written."""
        if not self._swept:
            remove_temporary(self.folder)
            self._swept = True

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
            say(
                f"cleaning up in {self.folder} failed ({error}); the checkpoint itself is saved",
                self.on_warning,
            )
