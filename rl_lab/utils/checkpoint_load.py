"""Finding a checkpoint that is whole, and reading it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_lab.errors import CheckpointError, LabError, closest
from rl_lab.utils.manifest import (
    REPLAY_FOLDER,
    CheckpointVersionError,
    migrate,
    read_manifest,
    replay_files,
    verify,
)
from rl_lab.utils.saveable import load_data

Warn = Callable[[str], None]

_log = logging.getLogger("rl_lab.checkpoint")
_log.addHandler(logging.NullHandler())  # `say` speaks for itself; without this, logging would print it twice


def say(message: str, on_warning: Warn | None) -> None:
    """A warning that is seen: in the log, and through the callback or as a Python warning."""
    _log.warning(message)
    if on_warning is not None:
        on_warning(message)
    else:
        warnings.warn(message, stacklevel=3)


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was read and found whole. `manifest` is None for a lone state file."""

    path: Path
    state: dict[str, Any]
    manifest: dict[str, Any] | None

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def step(self) -> int:
        return int(self.manifest["step"] if self.manifest else self.state.get("global_step", 0))

    @property
    def complete(self) -> bool:
        """Whether training can go on from here exactly: state and replay, not weights alone."""
        return self.manifest is not None and self.manifest["kind"] == "full"

    @property
    def info(self) -> dict[str, Any]:
        return self.manifest["info"] if self.manifest else {}


def manifests(folder: Path) -> list[Path]:
    """Manifests of step checkpoints, newest first."""
    found = [path for path in folder.glob("step_*.json") if re.fullmatch(r"step_\d+\.json", path.name)]
    return sorted(found, key=manifest_step, reverse=True)


def manifest_step(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def load_checkpoint(path: Path | str, *, weights: bool = False, on_warning: Warn | None = None) -> Loaded:
    """Load a checkpoint: a state file (.pt), a run folder, or a checkpoints folder.

    From a folder the newest good one is taken; a damaged one is named in a warning and the one before it
    tried. A file named outright is that one or an error. A lone .pt without manifest is taken as weights.
    weights: only the weights are wanted, so replay is not checked and weights-only checkpoints will do.
    """
    path = Path(path)
    if path.is_dir():
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        return _load_newest(folder, weights, on_warning)
    name, folder = path.name, path.parent
    if name == "last.pt":
        if not path.is_symlink():  # a file system without links
            return _load_newest(folder, weights, on_warning)
        name = os.readlink(path)
    manifest_path = folder / f"{name.split('.')[0]}.json"
    if not path.exists() and not manifest_path.exists():
        there = [other.name for other in (*folder.glob("*.pt"), *folder.glob("step_*.json"))]
        raise CheckpointError(f"there is no checkpoint {path}.{closest(path.name, there)}")
    if manifest_path.exists() and (manifest := read_manifest(manifest_path)):
        linked = path.is_symlink() or not path.exists() or path.suffix == ".json"
        if linked or manifest["state"]["file"] == name:
            return _load(manifest_path, manifest, weights)
    state = load_data(path, check_zip=True)
    return Loaded(path, migrate(_checked_dict(state, path), path), None)


def _load_newest(folder: Path, weights: bool, on_warning: Warn | None) -> Loaded:
    for _ in range(3):
        tried: list[str] = []
        lesser: list[str] = []
        listing = manifests(folder)
        for index, manifest_path in enumerate(listing):
            try:
                manifest = read_manifest(manifest_path)
                if manifest["kind"] != "full" and not weights:
                    lesser.append(manifest["state"]["file"])
                    continue
                return _load(manifest_path, manifest, weights)
            except CheckpointVersionError:
                raise
            except CheckpointError as error:
                if not manifest_path.exists():
                    continue  # a running trainer has just cleaned it away
                tried.append(f"  {manifest_path.stem}: {error}")
                following = (
                    "trying the one before it" if index + 1 < len(listing) else "there is none before it"
                )
                say(f"CHECKPOINT DAMAGED: {error}; {following}", on_warning)
        if manifests(folder) == listing:
            break
    if not tried and not lesser:
        raise CheckpointError(f"there is no checkpoint in {folder}")
    message = f"no checkpoint in {folder} can be resumed"
    if tried:
        message += "; tried:\n" + "\n".join(tried)
    if lesser:
        message += f"\nWeights alone are in {', '.join(lesser)}: load: takes them, to start again from them."
    raise CheckpointError(message)


def _load(manifest_path: Path, manifest: dict[str, Any], weights: bool) -> Loaded:
    folder = manifest_path.parent
    try:
        problems = verify(folder, manifest, replay=not weights)
        path = folder / manifest["state"]["file"]
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{manifest_path} lacks what a manifest has ({error!r})") from None
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise CheckpointError(problems[0] + more)
    state = _checked_dict(load_data(path), path)
    return Loaded(path, migrate(state, path), manifest)


def _checked_dict(state: Any, path: Path) -> dict[str, Any]:
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, where a checkpoint holds a dict")
    return state


def restore_buffers(
    loaded: Loaded,
    buffers: Mapping[str, Any],
    *,
    into: Path | None = None,
    on_warning: Warn | None = None,
) -> list[str]:
    """Fill buffers from a checkpoint's replay; returns the names of those that stay empty.

    into: the checkpoints folder that the run will save to. When the replay lies elsewhere it is linked (or
    copied) there first.
    """
    entries = loaded.manifest["buffers"] if loaded.manifest and loaded.complete else {}
    source = loaded.folder / REPLAY_FOLDER
    target = source if into is None else Path(into) / REPLAY_FOLDER
    empty = []
    for name, buffer in buffers.items():
        if name not in entries:
            empty.append(name)
            say(f"{loaded.path} carries no replay for buffer '{name}': it starts empty", on_warning)
            continue
        try:
            if target.resolve() != source.resolve():
                for file in entries[name].get("files", {}):
                    _bring(source / name / file, target / name / file)
            buffer.restore(target / name, entries[name])
        except LabError:
            raise
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"replay of buffer '{name}' in {target / name} cannot be restored ({type(error).__name__}: {error})"
            ) from error
    return empty


def _bring(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # another disk, or no hard links
        os.link(source, target)
        return
    shutil.copyfile(source, target)


def named_replay(folder: Path, manifest: Mapping[str, Any]) -> set[Path]:
    """Paths of the replay files that a manifest names."""
    return {folder / REPLAY_FOLDER / buffer / name for buffer, name, _ in replay_files(manifest)}
