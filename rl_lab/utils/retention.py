"""Which checkpoints stay, which shrink to weights, and which files nobody needs any more.

Order matters: a manifest goes before the files it names, so that at any moment every manifest that can be
found is whole.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from rl_lab.errors import CheckpointError
from rl_lab.utils.checkpoint_load import Warn, manifest_step, manifests, named_replay, say
from rl_lab.utils.files import sync_folder, write_atomic
from rl_lab.utils.manifest import REPLAY_FOLDER, read_manifest, write_manifest
from rl_lab.utils.saveable import load_data

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
