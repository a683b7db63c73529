"""Which checkpoints stay, which shrink to weights, and which files nobody needs any more.

Order matters: a manifest goes before the files it names, so that at any moment every manifest that can be
found is whole.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rl_lab.errors import CheckpointError
from rl_lab.utils.checkpoint_load import Warn, manifest_step, manifests, named_replay, say
from rl_lab.utils.files import sync_folder, write_atomic
from rl_lab.utils.manifest import REPLAY_FOLDER, read_manifest, write_manifest
from rl_lab.utils.saveable import load_data

_STATE_FILE = re.compile(r"(step_\d+|[a-z][a-z0-9_-]*\.\d+)(\.\w+)*\.pt")


def clean(
    folder: Path,
    *,
    newest: int | None,
    keep: int,
    keep_weights: int,
    weight_keys: Sequence[str],
    on_warning: Warn | None = None,
) -> None:
    """Tidy the folder after the checkpoint of step `newest` became durable (None: after a tagged one).

    Checkpoints of later steps belong to a course of the run that was given up when it was resumed from an
    earlier point; they go.
    """
    full: list[Path] = []
    weights: list[Path] = []
    for path in manifests(folder):
        if newest is not None and manifest_step(path) > newest:
            say(f"{path.stem} is of a course of this run that was given up: deleted", on_warning)
            path.unlink()
            continue
        manifest = _read(path)
        if manifest is None:
            if len(full) >= keep:  # damaged, and older than what is kept
                path.unlink()
        elif manifest["kind"] != "full":
            weights.append(path)
        elif len(full) < keep:
            full.append(path)
        elif keep_weights == 0:
            path.unlink()
        else:
            _shrink(path, manifest, weight_keys, on_warning)
            weights.append(path)
    if keep_weights >= 0:
        for path in sorted(weights, key=manifest_step, reverse=True)[keep_weights:]:
            path.unlink()
    sync_folder(folder)
    collect(folder, replay=newest is not None)


def collect(folder: Path, needed: set[Path] | None = None, *, replay: bool = True) -> None:
    """Delete state and (replay=True) replay files that no manifest names, nor `needed`.

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
    for path in sorted((folder / REPLAY_FOLDER).rglob("*"), reverse=True) if replay else ():
        if path.is_dir():
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()
        elif path not in named:
            path.unlink()


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
