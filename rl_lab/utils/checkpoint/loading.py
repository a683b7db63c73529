"""Loading: find the newest intact checkpoint, read its state and restore its replay."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_lab.errors import CheckpointError, LabError, closest
from rl_lab.utils.checkpoint.manifest import (
    REPLAY_FOLDER,
    CheckpointVersionError,
    migrate,
    read_manifest,
    replay_files,
    replay_problems,
    state_problem,
)
from rl_lab.utils.checkpoint.saveable import load_data
from rl_lab.utils.files import absolute

Warn = Callable[[str], None]
SAFETENSORS = ".safetensors"  # weights that `rl-lab export` wrote

# What to do when replay files are damaged but the state is intact. "older": load an older intact checkpoint,
# or, if there is none, the newest without the damaged rows; "skip": load the newest without them at once;
# "stop": raise.
ON_DAMAGED_REPLAY = ("older", "skip", "stop")

_log = logging.getLogger("rl_lab.checkpoint")
_log.addHandler(logging.NullHandler())  # `emit_warning` prints already; logging would print it a second time


def emit_warning(message: str, on_warning: Warn | None) -> None:
    """Log a warning, and pass it to the callback, or to `warnings.warn` without one."""
    _log.warning(message)
    if on_warning is not None:
        on_warning(message)
    else:
        warnings.warn(message, stacklevel=3)


class ReplayDamagedError(CheckpointError):
    """The state is intact, but replay files are damaged."""


@dataclass(frozen=True)
class Loaded:
    """A checkpoint whose state was read and verified. `manifest` is None for a state file without one.

    damaged: damaged replay files, if loading without them was allowed: buffer -> file -> problem
    """

    path: Path
    state: dict[str, Any]
    manifest: dict[str, Any] | None
    damaged: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def step(self) -> int:
        return int(self.manifest["step"] if self.manifest else self.state.get("global_step", 0))

    @property
    def complete(self) -> bool:
        """Whether training can resume exactly: state and replay, not weights only."""
        return self.manifest is not None and self.manifest["kind"] == "full"

    @property
    def info(self) -> dict[str, Any]:
        return self.manifest["info"] if self.manifest else {}


def manifests(folder: Path) -> list[Path]:
    """Return the manifests of step checkpoints, newest first."""
    found = [path for path in folder.glob("step_*.json") if re.fullmatch(r"step_\d+\.json", path.name)]
    return sorted(found, key=manifest_step, reverse=True)


def manifest_step(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def load_checkpoint(
    path: Path | str,
    *,
    weights: bool = False,
    on_damaged_replay: str = "stop",
    on_warning: Warn | None = None,
) -> Loaded:
    """Load a checkpoint: a state file (.pt, .safetensors), a run folder, or a checkpoints folder.

    From a folder the newest intact checkpoint is loaded; a damaged one is reported in a warning and the one
    before it is tried. A path to a file loads that file or raises. A .pt without manifest counts as weights.
    weights: load only the weights, so replay is not checked and weights-only checkpoints are accepted.
    on_damaged_replay: see ON_DAMAGED_REPLAY; damaged files are then listed in `Loaded.damaged`.
    """
    path = absolute(path)
    if path.is_dir():
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        return _load_newest(folder, weights, on_damaged_replay, on_warning)
    name, folder = path.name, path.parent
    if path.suffix == SAFETENSORS:
        from rl_lab.utils.checkpoint.safetensors import read_state

        exported, info = read_state(path)
        facts = {"step": int(exported.get("global_step", 0)), "kind": "weights", "info": info, "buffers": {}}
        return Loaded(path, exported, facts)
    if name == "last.pt":
        if not path.is_symlink():  # a file system without links
            return _load_newest(folder, weights, on_damaged_replay, on_warning)
        name = os.readlink(path)
    manifest_path = folder / f"{name.split('.')[0]}.json"
    if not path.exists() and not manifest_path.exists():
        present = [other.name for other in (*folder.glob("*.pt"), *folder.glob("step_*.json"))]
        raise CheckpointError(f"{path}: there is no checkpoint of that name.{closest(path.name, present)}")
    if manifest_path.exists() and (manifest := read_manifest(manifest_path)):
        linked = path.is_symlink() or not path.exists() or path.suffix == ".json"
        if linked or manifest["state"]["file"] == name:
            return _load(manifest_path, manifest, weights, skip=on_damaged_replay == "skip")
    state = load_data(path, check_zip=True)
    return Loaded(path, migrate(_checked_dict(state, path), path), None)


def load_weights(
    path: Path | str,
    convert: Callable[[Mapping[str, Any]], dict[str, Any]] | None,
    on_warning: Warn | None = None,
) -> Loaded:
    """Load the weights of a checkpoint, or of a file of tensors that another code base saved.

    convert: maps such tensors by name to the state of a checkpoint; None: only our checkpoints can be loaded
    """
    file = absolute(path)
    if convert is not None and file.is_file() and not manifests(file.parent):
        data = load_data(file, check_zip=True)
        if isinstance(data, Mapping) and data and "components" not in data:
            return Loaded(file, {"global_step": 0, **convert(data)}, None)
    return load_checkpoint(path, weights=True, on_warning=on_warning)


def _load_newest(folder: Path, weights: bool, on_damaged_replay: str, on_warning: Warn | None) -> Loaded:
    for _ in range(3):
        tried: list[str] = []
        weights_only: list[str] = []
        partial: list[tuple[Path, dict[str, Any]]] = []  # intact except for their replay, newest first
        listing = manifests(folder)
        for index, manifest_path in enumerate(listing):
            try:
                manifest = read_manifest(manifest_path)
                if manifest["kind"] != "full" and not weights:
                    weights_only.append(manifest["state"]["file"])
                    continue
                try:
                    return _load(manifest_path, manifest, weights, skip=on_damaged_replay == "skip")
                except ReplayDamagedError:
                    partial.append((manifest_path, manifest))
                    raise
            except CheckpointVersionError:
                raise
            except CheckpointError as error:
                if not manifest_path.exists():
                    continue  # a running trainer has just deleted it
                tried.append(f"  {manifest_path.stem}: {error}")
                following = (
                    "trying the one before it" if index + 1 < len(listing) else "there is none before it"
                )
                emit_warning(f"CHECKPOINT DAMAGED: {error}; {following}", on_warning)
        if partial and on_damaged_replay == "older":
            return _load(*partial[0], weights, skip=True)
        if manifests(folder) == listing:
            break
    if not tried and not weights_only:
        raise CheckpointError(f"{folder} has no checkpoint")
    message = f"{folder} has no checkpoint that can be resumed"
    if tried:
        message += "; tried:\n" + "\n".join(tried)
    if partial:
        message += "\nSet training.on_damaged_replay=skip to resume from the newest without the lost rows."
    if weights_only:
        message += f"\n{', '.join(weights_only)} hold weights only: use `load:` to start a new run from them."
    raise CheckpointError(message)


def _load(manifest_path: Path, manifest: dict[str, Any], weights: bool, skip: bool = False) -> Loaded:
    """Load the checkpoint of a manifest. skip: accept damaged replay and list it in `damaged`."""
    folder = manifest_path.parent
    try:
        problem = state_problem(folder, manifest)
        damaged = {} if weights or problem else replay_problems(folder, manifest)
        path = folder / manifest["state"]["file"]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{manifest_path} is not a valid manifest ({error!r})") from None
    if problem:
        raise CheckpointError(problem)
    if damaged and not skip:
        problems = [problem for files in damaged.values() for problem in files.values()]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ReplayDamagedError(problems[0] + more)
    state = _checked_dict(load_data(path), path)
    return Loaded(path, migrate(state, path), manifest, damaged)


def _checked_dict(state: Any, path: Path) -> dict[str, Any]:
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, but a checkpoint holds a dict")
    return state


def entry_name(buffer: str, rank: int) -> str:
    """Name of a rank's buffer in the manifest, and of its folder of replay files."""
    return f"rank{rank}.{buffer}" if rank else buffer


def restore_buffers(
    loaded: Loaded,
    buffers: Mapping[str, Any],
    *,
    into: Path | None = None,
    on_warning: Warn | None = None,
    rank: int = 0,
    saved_rank: int = 0,
) -> list[str]:
    """Restore buffers from a checkpoint's replay; returns the names of buffers with missing rows.

    The sampler state of those buffers must not be restored: it would refer to missing rows.

    into: the checkpoints folder that the run will save to. Replay stored elsewhere is first linked (or
    copied) there.
    saved_rank: the rank whose replay this `rank` restores
    """
    entries = loaded.manifest["buffers"] if loaded.manifest and loaded.complete else {}
    source = loaded.folder / REPLAY_FOLDER
    target = source if into is None else Path(into) / REPLAY_FOLDER
    incomplete = []
    for name, buffer in buffers.items():
        saved, own = entry_name(name, saved_rank), entry_name(name, rank)
        if saved not in entries:
            incomplete.append(name)
            emit_warning(f"{loaded.path} has no replay for buffer '{name}': it starts empty", on_warning)
            continue
        damaged = loaded.damaged.get(saved, {})
        try:
            if (target / own).resolve() != (source / saved).resolve():
                for file in entries[saved].get("files", {}):
                    if file not in damaged:
                        _link_or_copy(source / saved / file, target / own / file)
            if damaged:
                incomplete.append(name)
                _restore_partially(loaded, saved, buffer, target / own, on_warning)
            else:
                buffer.restore(target / own, entries[saved])
        except LabError:
            raise
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
            raise CheckpointError(
                f"{target / own}: replay of buffer '{name}' cannot be restored "
                f"({type(error).__name__}: {error})"
            ) from error
    return incomplete


def _restore_partially(loaded: Loaded, name: str, buffer: Any, folder: Path, on_warning: Warn | None) -> None:
    """Restore the intact rows of a buffer and warn about the lost ones.

    State and counters are not affected.
    """
    assert loaded.manifest is not None
    if "skip_corrupt" in inspect.signature(buffer.restore).parameters:
        lost = buffer.restore(folder, loaded.manifest["buffers"][name], skip_corrupt=True)
        what = "; ".join(map(str, lost)) or "nothing"
    else:
        what = (
            f"all rows, because it cannot be restored partially: {'; '.join(loaded.damaged[name].values())}"
        )
    emit_warning(
        f"REPLAY DAMAGED: buffer '{name}' lost {what}. "
        f"Weights, optimizers and counters are exactly those of step {loaded.step}.",
        on_warning,
    )


def _link_or_copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # another disk, or no hard links
        os.link(source, target)
        return
    shutil.copyfile(source, target)


def named_replay(folder: Path, manifest: Mapping[str, Any]) -> set[Path]:
    """Return the paths of the replay files that a manifest names."""
    return {folder / REPLAY_FOLDER / buffer / name for buffer, name, _ in replay_files(manifest)}
