"""Folders of .npz or .pt files with one episode each. Pickled objects are never loaded.

An episode of K steps is a dict of arrays with time as the first dimension; `rewards[k]` follows `actions[k]`:

    observations         (K+1, …), or observations/<name> for each observation of the environment
    actions              (K, …)    indices or one-hot; continuous ones in [-1, 1]
    rewards              (K,)
    dones                (K,)      and / or `terminated`, `truncated`; `dones` alone counts as terminated;
                                   `ends` (IRIS, Δ-IRIS) is another name of `dones`

Observations may also be (K, …): then the last observation is repeated, so that the last reward and the end
are kept. An episode without an end counts as truncated. Other keys are ignored.

Written .npz files have all of it, so they are read back as they were. Written .pt files have the five keys of IRIS'
and Δ-IRIS' own loaders and no others: K observations, `ends` for both kinds of ends, and `mask_padding`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.formats.dataset import (
    Dataset,
    DatasetWriter,
    default_name,
    spec_of_episode,
)
from rl_lab.buffers.formats.episode import (
    SINGLE,
    MissingKeyError,
    PlainEpisode,
    check_array,
    make_episode,
)
from rl_lab.buffers.trajectory import ENDS
from rl_lab.errors import CheckpointError, ConfigError
from rl_lab.records import Spec
from rl_lab.utils.checkpoint.saveable import load_data
from rl_lab.utils.files import crc32_of, read_json, write_atomic, write_json_atomic
from rl_lab.utils.untrusted import open_regular

SUFFIXES = (".npz", ".pt")
LARGEST_EPISODE = 4 << 30  # bytes, unpacked
OTHER_ENDS = "ends"  # `dones` in the episode files of IRIS and Δ-IRIS
KEYS = (SINGLE, "actions", "rewards", *ENDS, OTHER_ENDS)
DESCRIPTION = "dataset.json"


class EpisodeFiles(Dataset):
    """Episodes of files, sorted by name."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = sorted(files)
        self.path = self.files[0] if len(self.files) == 1 else self.files[0].parent
        self.format = self.files[0].suffix.removeprefix(".")
        self.lengths = np.array([_steps(file) for file in self.files], dtype=np.int64)
        description = self.files[0].parent / DESCRIPTION
        self.metadata: dict[str, Any] = _description(description) if description.is_file() else {}

    def episode(self, index: int) -> PlainEpisode:
        file = self.files[index]
        content = read_arrays(file)
        if OTHER_ENDS in content and not any(key in content for key in ENDS):
            content["dones"] = content.pop(OTHER_ENDS)
        try:
            return _episode(content)
        except MissingKeyError as error:
            raise ConfigError(f"episode {file}: {error}; the keys are {keys_of(file)}") from None
        except ConfigError as error:
            raise ConfigError(f"episode {file}: {error}") from None

    def fault(self, index: int, problem: object) -> ConfigError:
        file = self.files[index]
        keys = f"; the keys are {keys_of(file)}" if isinstance(problem, MissingKeyError) else ""
        return ConfigError(f"episode {file}: {problem}{keys}")

    @cached_property
    def spec(self) -> Spec:
        if "spec" in self.metadata:
            return Spec.from_dict(self.metadata["spec"])
        choices = 0
        first = self.episode(0)
        if first.actions.dtype.kind in "biu":
            choices = 1 + max(int(self._actions(index).max(initial=0)) for index in range(len(self.files)))
        return spec_of_episode(first, self.path.name, choices=choices)

    def _actions(self, index: int) -> np.ndarray:
        found = read_arrays(self.files[index], ("actions",))
        if "actions" not in found:
            raise self.fault(index, MissingKeyError("key 'actions' is missing"))
        return found["actions"]

    def fingerprint(self) -> str:
        facts = [f"{file.name} {file.stat().st_size} {crc32_of(file)}\n" for file in self.files]
        return hashlib.blake2b("".join(facts).encode(), digest_size=16).hexdigest()


def Reader(path: Path) -> EpisodeFiles:
    """Open a file or a folder of files."""
    if path.is_file():
        return EpisodeFiles([path])
    files = [file for file in path.iterdir() if file.suffix in SUFFIXES and not file.name.startswith(".")]
    if not files:
        raise ConfigError(f"{path} has no .npz or .pt files")
    return EpisodeFiles(files)


class Writer(DatasetWriter):
    """suffix_of_files: ".npz", or ".pt" for the layout of IRIS"""

    def __init__(
        self,
        path: Path,
        spec: Spec,
        metadata: Mapping[str, Any] | None = None,
        *,
        suffix_of_files: str = ".npz",
    ) -> None:
        self.format = suffix_of_files.removeprefix(".")
        if self.format == "pt" and len(spec.observations) > 1:
            raise ConfigError(
                f"format 'pt' has one observation, but the data has {', '.join(spec.observations)}: keep one of them "
                "(--keep), or write another format"
            )
        super().__init__(path, spec, metadata)

    def write(self, episode: PlainEpisode) -> None:
        file = self.temporary / f"{self.episodes:06d}.{self.format}"
        if self.format == "pt":
            content = {name: torch.from_numpy(np.ascontiguousarray(v)) for name, v in _as_pt(episode).items()}
            write_atomic(file, lambda target: torch.save(content, target))
            return
        names = {
            name: SINGLE if len(episode.observations) == 1 else f"{SINGLE}/{name}"
            for name in episode.observations
        }
        arrays = {names[name]: value for name, value in episode.observations.items()}
        arrays |= {key: getattr(episode, key) for key in ("actions", "rewards", "terminated", "truncated")}
        write_atomic(file, lambda target: np.savez_compressed(target, **arrays))  # type: ignore[arg-type]

    def complete(self) -> None:
        if self.format == "npz":
            write_json_atomic(self.temporary / DESCRIPTION, {**self.metadata, "spec": self.spec.to_dict()})


def _as_pt(episode: PlainEpisode) -> dict[str, np.ndarray]:
    steps = len(episode)
    return {
        "observations": next(iter(episode.observations.values()))[:steps],
        "actions": episode.actions,
        "rewards": episode.rewards,
        "ends": (episode.terminated | episode.truncated).astype(np.int64),
        "mask_padding": np.ones(steps, dtype=bool),
    }


def _episode(content: dict[str, np.ndarray]) -> PlainEpisode:
    missing = [key for key in ("actions", "rewards") if key not in content]
    if missing:
        raise MissingKeyError(f"key '{missing[0]}' is missing")
    steps = len(content["rewards"])
    ends = {key: content[key] for key in ENDS if key in content}
    if not ends:
        raise MissingKeyError("keys 'dones', 'terminated', 'truncated' and 'ends' are missing")
    for name, value in ends.items():
        check_array(name, value, steps, flat=True)
    observations = {
        key.removeprefix(f"{SINGLE}/"): value for key, value in content.items() if key.split("/")[0] == SINGLE
    }
    if not observations:
        raise MissingKeyError(f"key '{SINGLE}' is missing")
    if list(observations) == [SINGLE]:
        value = observations.pop(SINGLE)
        observations = {default_name(value.shape[1:], value.dtype): value}
    terminated, truncated = split_ends(ends, steps)
    return make_episode(observations, content["actions"], content["rewards"], terminated, truncated)


def split_ends(ends: Mapping[str, np.ndarray], steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return terminated and truncated (K,); `dones` alone counts as terminated."""
    given = {name: value.astype(bool) for name, value in ends.items()}
    none = np.zeros(steps, dtype=bool)
    dones = given.get("dones")
    if "terminated" in given and "truncated" in given:
        if dones is not None and np.any(dones != (given["terminated"] | given["truncated"])):
            raise ConfigError("'dones' differs from 'terminated' or 'truncated'; remove 'dones'")
        return given["terminated"], given["truncated"]
    if dones is None:
        return given.get("terminated", none), given.get("truncated", none)
    if "terminated" in given:
        return given["terminated"], dones & ~given["terminated"]
    truncated = given.get("truncated", none)
    return dones & ~truncated, truncated


def _description(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
        Spec.from_dict(content["spec"])
    except (CheckpointError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged ({error}): restore it, or delete it") from None
    return dict(content)


def _steps(file: Path) -> int:
    rewards = read_arrays(file, ("rewards",)).get("rewards")
    if rewards is None or rewards.ndim != 1 or not len(rewards):
        have = "none" if rewards is None else f"shape {rewards.shape}"
        raise ConfigError(f"episode {file}: 'rewards' must be (steps,) with at least one step, not {have}")
    return len(rewards)


def read_arrays(file: Path, wanted: Sequence[str] = KEYS) -> dict[str, np.ndarray]:
    """Return the arrays of a file by key, nested dicts as `outer/inner`; ConfigError if it is unreadable."""
    try:
        if file.suffix == ".pt":
            content = _flatten(load_data(file, check_zip=True))
            return {key: _array(value) for key, value in content.items() if key.split("/")[0] in wanted}
        with open_regular(file) as opened, np.load(opened, allow_pickle=False) as archive:
            unpacked = sum(info.file_size for info in archive.zip.infolist())
            if unpacked > LARGEST_EPISODE:
                raise ValueError(f"it unpacks to {unpacked:,} bytes, more than {LARGEST_EPISODE:,}")
            return {key: archive[key] for key in archive.files if key.split("/")[0] in wanted}
    except CheckpointError as error:
        raise ConfigError(f"episode {error}") from None
    except Exception as error:  # the readers raise many types for damaged files
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"episode {file} cannot be read: it is damaged or holds other objects than arrays ({reason[0][:200]})"
        ) from None


def keys_of(file: Path) -> list[str]:
    """Return all keys of a file, also those that are not read."""
    if file.suffix == ".pt":
        return sorted(_flatten(load_data(file, check_zip=True)))
    with open_regular(file) as opened, np.load(opened, allow_pickle=False) as archive:
        return sorted(archive.files)


def _flatten(content: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not a dict of arrays")
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= _flatten(value, f"{prefix}{key}/") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _array(value: Any) -> np.ndarray:
    return value.detach().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
