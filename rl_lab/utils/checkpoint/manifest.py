"""Manifests: what a checkpoint consists of, and whether it is all there.

A manifest is written last. It names every file with size and checksum, and carries a checksum of itself.
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

# From a version to the next one: state -> state. Old checkpoints walk this table up to CHECKPOINT_VERSION.
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}


class CheckpointVersionError(CheckpointError):
    """A checkpoint of another version than this code can read. Not damage: no other one is tried instead."""


def check_version(version: Any, source: Path) -> int:
    """The version, if it can be read here, migrations included."""
    if not isinstance(version, int) or isinstance(version, bool):
        raise CheckpointError(f"{source} states no checkpoint version: it is not one of ours")
    if version > CHECKPOINT_VERSION:
        raise CheckpointVersionError(
            f"{source} has checkpoint version {version}, written by a newer RL Lab; this one reads up to "
            f"{CHECKPOINT_VERSION}. Update rl-lab to load it."
        )
    lacking = [step for step in range(version, CHECKPOINT_VERSION) if step not in MIGRATIONS]
    if lacking:
        raise CheckpointVersionError(
            f"{source} has checkpoint version {version}, and there is no way from version {lacking[0]} to "
            f"{CHECKPOINT_VERSION}. Load it with the RL Lab that wrote it."
        )
    return version


def migrate(state: dict[str, Any], source: Path) -> dict[str, Any]:
    """The state as this version has it."""
    for version in range(check_version(state.get("version"), source), CHECKPOINT_VERSION):
        state = {**MIGRATIONS[version](state), "version": version + 1}
    return state


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    content = json_safe(manifest)
    write_json_atomic(path, {**content, "check": _check(content)})


def read_manifest(path: Path) -> dict[str, Any]:
    """A manifest that is whole and of a version we read; CheckpointError otherwise."""
    manifest = read_json(path)
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{path} is damaged: not a manifest")
    check = manifest.pop("check", None)
    if check != _check(manifest):
        raise CheckpointError(f"{path} is damaged: its content does not match its own checksum")
    check_version(manifest.get("version"), path)
    for name, kind in _FIELDS.items():
        if not isinstance(manifest.get(name), kind):
            raise CheckpointError(f"{path} lacks what a manifest has: '{name}'")
    return manifest


def _check(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def replay_files(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, int]]]:
    """(buffer, file name, {bytes, crc32}) of every replay file that the manifest names."""
    for buffer, entry in manifest.get("buffers", {}).items():
        for name, facts in entry.get("files", {}).items():
            yield buffer, name, facts


def state_problem(folder: Path, manifest: Mapping[str, Any]) -> str:
    """What is wrong with the state file of a manifest, in a sentence; "" when it is whole."""
    return _file_problem(folder, folder / manifest["state"]["file"], manifest["state"])


def replay_problems(folder: Path, manifest: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Replay files that are not what the manifest says: buffer -> file -> what is wrong with it."""
    problems: dict[str, dict[str, str]] = {}
    for buffer, name, facts in replay_files(manifest):
        problem = _file_problem(folder, folder / REPLAY_FOLDER / buffer / name, facts)
        if problem:
            problems.setdefault(buffer, {})[name] = problem
    return problems


def _file_problem(folder: Path, path: Path, facts: Mapping[str, int]) -> str:
    try:
        path = inside(folder, path)
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
