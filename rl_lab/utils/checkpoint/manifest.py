"""Manifests: the list of a checkpoint's files with sizes and checksums, and the checks against it.

A manifest is written last, and contains a checksum of itself.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_lab.errors import CheckpointError, ConfigError
from rl_lab.utils.files import crc32_of, inside, json_safe, read_json, write_json_atomic

CHECKPOINT_VERSION = 1
REPLAY_FOLDER = "replay"
_FIELDS = {"step": int, "kind": str, "state": dict, "buffers": dict, "info": dict}

# version -> function that converts a state to the next version; applied in order up to CHECKPOINT_VERSION.
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}


class CheckpointVersionError(CheckpointError):
    """A checkpoint of a version that this code cannot read.

    It is not damage: no other checkpoint is tried.
    """


def check_version(version: Any, source: Path) -> int:
    """Return the version if this code can read it, directly or through migrations."""
    if not isinstance(version, int) or isinstance(version, bool):
        raise CheckpointError(f"{source} has no checkpoint version: RL Lab did not write it")
    if version > CHECKPOINT_VERSION:
        raise CheckpointVersionError(
            f"{source} has checkpoint version {version}, written by a newer RL Lab, and this one reads up to "
            f"{CHECKPOINT_VERSION}: update rl-lab to load it"
        )
    missing = [step for step in range(version, CHECKPOINT_VERSION) if step not in MIGRATIONS]
    if missing:
        raise CheckpointVersionError(
            f"{source} has checkpoint version {version}, and no migration from version {missing[0]} to "
            f"{CHECKPOINT_VERSION} exists: load it with the RL Lab that wrote it"
        )
    return version


def migrate(state: dict[str, Any], source: Path) -> dict[str, Any]:
    """Convert a state to CHECKPOINT_VERSION."""
    for version in range(check_version(state.get("version"), source), CHECKPOINT_VERSION):
        state = {**MIGRATIONS[version](state), "version": version + 1}
    return state


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    content = json_safe(manifest)
    write_json_atomic(path, {**content, "check": _check(content)})


def read_manifest(path: Path) -> dict[str, Any]:
    """Read and verify a manifest; CheckpointError if it is damaged or of an unsupported version."""
    manifest = read_json(path)
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{path} is damaged: not a manifest")
    check = manifest.pop("check", None)
    if check != _check(manifest):
        raise CheckpointError(f"{path} is damaged: its content does not match its own checksum")
    check_version(manifest.get("version"), path)
    for name, kind in _FIELDS.items():
        if not isinstance(manifest.get(name), kind):
            raise CheckpointError(
                f"{path} is not a valid manifest: '{name}' is missing or has the wrong type"
            )
    _check_names(path, manifest)
    return manifest


def _check_names(path: Path, manifest: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a manifest names a file in another folder than its own."""
    try:
        names = [manifest["state"]["file"], *manifest["buffers"]]
        names += [name for _, name, _ in replay_files(manifest)]
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a valid manifest ({error!r})") from None
    for name in names:
        if not isinstance(name, str) or not name or name in (".", "..") or any(c in name for c in "/\\\0"):
            raise CheckpointError(
                f"{path} names {ascii(name)[:100]}, which is not the name of a file beside it"
            )


def _check(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def replay_files(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, int]]]:
    """Yield (buffer, file name, {bytes, crc32}) for every replay file that the manifest names."""
    for buffer, entry in manifest.get("buffers", {}).items():
        for name, facts in entry.get("files", {}).items():
            yield buffer, name, facts


def state_problem(folder: Path, manifest: Mapping[str, Any]) -> str:
    """Describe what is wrong with the state file of a manifest; "" if it is intact."""
    return _file_problem(folder, folder / manifest["state"]["file"], manifest["state"])


def replay_problems(folder: Path, manifest: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the replay files that differ from the manifest: buffer -> file -> problem."""
    problems: dict[str, dict[str, str]] = {}
    for buffer, name, facts in replay_files(manifest):
        problem = _file_problem(folder, folder / REPLAY_FOLDER / buffer / name, facts)
        if problem:
            problems.setdefault(buffer, {})[name] = problem
    return problems


def _file_problem(folder: Path, path: Path, facts: Mapping[str, int]) -> str:
    try:
        path = inside(folder, path.absolute())
        size = path.stat().st_size
        if size != facts["bytes"]:
            return f"{path} has {size} bytes instead of {facts['bytes']}"
        if crc32_of(path) != facts["crc32"]:
            return f"{path} has changed since it was written (checksum)"
    except FileNotFoundError:
        return f"{path} is missing"
    except (OSError, ConfigError) as error:
        return f"{path} cannot be read ({error})"
    return ""
