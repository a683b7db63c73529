"""EpisodeFiles: rows from .npz or .pt files with one episode each. Pickled objects are never loaded.

An episode of K steps is a dict of arrays with time as the first dimension; `rewards[k]` follows `actions[k]`:

    observations         (K+1, …), or observations/<name> for each observation of the environment
    actions              (K, …)    indices or one-hot; continuous ones in [-1, 1]
    rewards              (K,)
    dones                (K,)      and / or `terminated`, `truncated`; `dones` alone counts as terminated;
                                   `ends` (IRIS, Δ-IRIS) is another name of `dones`

Observations may also be (K, …): then the last observation is repeated, so that the last reward and the end
are kept. An episode without an end counts as truncated. Other keys are ignored. The result is K+1 rows;
trajectory.py describes how steps and rows correspond.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.trajectory import ENDS, TrajectoryAdapter
from rl_lab.errors import CheckpointError, ConfigError
from rl_lab.records import ArraySpec, Spec
from rl_lab.utils.checkpoint.saveable import load_data
from rl_lab.utils.files import crc32_of

SUFFIXES = (".npz", ".pt")
OBSERVATIONS = "observations"
OTHER_ENDS = "ends"  # `dones` in the episode files of IRIS and Δ-IRIS
KEYS = (OBSERVATIONS, "actions", "rewards", *ENDS, OTHER_ENDS)
ACTION_TOLERANCE = 1e-3  # outside [-1, 1], for rounding errors


class MissingKeyError(ConfigError):
    """An episode has no array of a name; the reader adds the names that its file has."""


class EpisodeFiles:
    """Episodes as the rows of one stream, sorted by file name; a RowSource of offline.py."""

    num_streams = 1

    def __init__(self, files: Sequence[Path], spec: Spec) -> None:
        self.files = sorted(files)
        self.spec = spec
        self.without_last = 0  # episodes without their last observation
        self.rows = [_steps(file) + 1 for file in self.files]
        facts = [f"{file.name} {file.stat().st_size} {crc32_of(file)}\n" for file in self.files]
        self.fingerprint = hashlib.blake2b("".join(facts).encode(), digest_size=16).hexdigest()

    @property
    def length(self) -> int:
        """Rows of the stream."""
        return sum(self.rows)

    def pieces(self, columns: dict[str, ArraySpec]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield position and rows (1, count, …) of each episode."""
        position = 0
        self.without_last = 0
        for file, count in zip(self.files, self.rows):
            content = _read(file)
            if OTHER_ENDS in content and not any(key in content for key in ENDS):
                content["dones"] = content.pop(OTHER_ENDS)
            try:
                rows = self._episode(content)
            except MissingKeyError as error:
                raise ConfigError(f"episode {file}: {error}; the keys are {_names(file)}") from None
            except ConfigError as error:
                raise ConfigError(f"episode {file}: {error}") from None
            yield position, rows
            position += count

    def notes(self) -> list[str]:
        """Return remarks about the data for `describe`."""
        if not self.without_last:
            return []
        return [
            f"in {self.without_last:,} episodes the last observation is missing and the previous one is repeated"
        ]

    def _episode(self, content: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        missing = [key for key in ("actions", "rewards") if key not in content]
        if missing:
            raise MissingKeyError(f"key '{missing[0]}' is missing")
        steps = len(content["rewards"])
        ends = {key: content[key] for key in ENDS if key in content}
        if not ends:
            raise MissingKeyError("keys 'dones', 'terminated', 'truncated' and 'ends' are missing")
        if "dones" not in ends:
            ends = {key: ends.get(key, np.zeros(steps, dtype=bool)) for key in ("terminated", "truncated")}
        for name, value in {"rewards": content["rewards"], "actions": content["actions"], **ends}.items():
            if value.shape[:1] != (steps,) or (name != "actions" and value.ndim != 1):
                raise ConfigError(
                    f"'{name}' has shape {value.shape}, but there are {steps} rewards, one per step"
                )
            if value.dtype.kind not in "biuf" or not np.isfinite(value).all():
                raise ConfigError(f"'{name}' ({value.dtype}) must be finite and numeric")
        early = np.flatnonzero(np.any([value[:-1].astype(bool) for value in ends.values()], axis=0))
        if len(early):
            raise ConfigError(
                f"the episode ends at step {early[0]} of {steps}: split the file there, it must hold one episode"
            )
        self._check_range(content["actions"])
        # An additional step holds the last observation; its action, reward and end are ignored.
        padding = {"rewards": np.zeros(1), **{key: np.zeros(1, dtype=bool) for key in ends}}
        trajectory: dict[str, Any] = {
            key: np.concatenate([value, padding[key]])[None]
            for key, value in {"rewards": content["rewards"], **ends}.items()
        }
        trajectory["observations"] = self._observations(content, steps)
        trajectory["actions"] = np.concatenate([content["actions"], content["actions"][-1:]])[None]
        rows = TrajectoryAdapter(self.spec).convert(trajectory)
        assert rows is not None
        rows["truncated"][:, -1] |= ~rows["terminated"][:, -1]
        rows["action"][:, -1] = 0
        return rows

    def _observations(self, content: dict[str, np.ndarray], steps: int) -> dict[str, np.ndarray]:
        """Return observations (1, K+1, …) by name."""
        specs = self.spec.observations
        keys = {name: f"{OBSERVATIONS}/{name}" for name in specs}
        if len(specs) == 1 and OBSERVATIONS in content:
            keys = dict.fromkeys(specs, OBSERVATIONS)
        found, short = {}, False
        for name, key in keys.items():
            if key not in content:
                raise MissingKeyError(f"key '{key}', an observation of the environment, is missing")
            value, shape = content[key], specs[name].shape
            if value.shape not in ((steps, *shape), (steps + 1, *shape)):
                raise ConfigError(
                    f"'{key}' has shape {value.shape}, but {steps} rewards and the environment need "
                    f"{(steps + 1, *shape)} or {(steps, *shape)}"
                )
            if value.dtype.kind == "f" and not np.isfinite(value).all():
                raise ConfigError(f"'{key}' has values that are not finite")
            if len(value) == steps:
                short, value = True, np.concatenate([value, value[-1:]])
            found[name] = value[None]
        self.without_last += short
        return found

    def _check_range(self, actions: np.ndarray) -> None:
        action = self.spec.action
        if action.kind == "continuous" and np.abs(actions).max(initial=0) > 1 + ACTION_TOLERANCE:
            raise ConfigError(
                f"actions range from {actions.min():.4g} to {actions.max():.4g}, but must be in [-1, 1]: scale them by "
                f"2 * (action - low) / (high - low) - 1, with low {list(action.low)} and high {list(action.high)}"
            )


def _steps(file: Path) -> int:
    rewards = _read(file, ("rewards",)).get("rewards")
    if rewards is None or rewards.ndim != 1 or not len(rewards):
        have = "none" if rewards is None else f"shape {rewards.shape}"
        raise ConfigError(f"episode {file}: 'rewards' must be (steps,) with at least one step, not {have}")
    return len(rewards)


def _read(file: Path, wanted: Sequence[str] = KEYS) -> dict[str, np.ndarray]:
    """Return the arrays of a file by key, nested dicts as `outer/inner`; ConfigError if it is unreadable."""
    try:
        if file.suffix == ".pt":
            content = _flatten(load_data(file, check_zip=True))
            return {key: _array(value) for key, value in content.items() if key.split("/")[0] in wanted}
        with np.load(file, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files if key.split("/")[0] in wanted}
    except CheckpointError as error:
        raise ConfigError(f"episode {error}") from None
    except Exception as error:  # the readers raise many types for damaged files
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"episode {file} cannot be read: it is damaged or holds other objects than arrays ({reason[0][:200]})"
        ) from None


def _names(file: Path) -> list[str]:
    """Return all keys of a file, also those that are not read."""
    if file.suffix == ".pt":
        return sorted(_flatten(load_data(file, check_zip=True)))
    with np.load(file, allow_pickle=False) as archive:
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
