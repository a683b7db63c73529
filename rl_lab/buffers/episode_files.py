"""Episodes in .npz or .pt files, one each, as rows. Nothing in a file is ever run: no pickle is read.

An episode of K steps is a dict of arrays with time first, in the plain form (the reward that *followed*):

    observations         (K+1, …), or observations/<name> for each observation of the environment
    actions              (K, …)    indices or one-hot; continuous ones in [-1, 1]
    rewards              (K,)
    dones                (K,)      and / or `terminated`, `truncated`; `dones` alone counts as terminated

Observations may also be (K, …): what followed the last action is then unknown, and the last observation stands in
for it, so that the last reward and the end are kept. An episode that does not end in an end counts as truncated.
Other keys are not read. What comes out is K+1 rows; see plain.py for how the two forms correspond.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.trajectory import ENDS, PlainDoor
from rl_lab.errors import CheckpointError, ConfigError
from rl_lab.records import ArraySpec, Spec
from rl_lab.utils.checkpoint.saveable import load_data
from rl_lab.utils.files import crc32_of

SUFFIXES = (".npz", ".pt")
OBSERVATIONS = "observations"
KEYS = (OBSERVATIONS, "actions", "rewards", *ENDS)
ACTION_TOLERANCE = 1e-3  # beyond [-1, 1], for rounding


class EpisodeFiles:
    """Episodes one behind the other, in the order of their file names, as one stream."""

    num_streams = 1

    def __init__(self, files: Sequence[Path], spec: Spec) -> None:
        self.files = sorted(files)
        self.spec = spec
        self.without_last = 0  # episodes whose last observation had to be made up
        self.rows = [_steps(file) + 1 for file in self.files]
        facts = [f"{file.name} {file.stat().st_size} {crc32_of(file)}\n" for file in self.files]
        self.fingerprint = hashlib.blake2b("".join(facts).encode(), digest_size=16).hexdigest()

    @property
    def length(self) -> int:
        """Rows in the stream."""
        return sum(self.rows)

    def pieces(self, columns: dict[str, ArraySpec]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Position and rows (1, count, …) of each episode."""
        position = 0
        self.without_last = 0
        for file, count in zip(self.files, self.rows):
            content = _read(file)
            try:
                rows = self._episode(content)
            except ConfigError as error:
                raise ConfigError(f"episode {file}: {error}") from None
            yield position, rows
            position += count

    def notes(self) -> list[str]:
        """What a reader of the data should know."""
        if not self.without_last:
            return []
        return [
            f"in {self.without_last:,} episodes the last observation is missing and the one before is repeated"
        ]

    def _episode(self, content: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        missing = [key for key in ("actions", "rewards") if key not in content]
        if missing:
            raise ConfigError(f"it has no '{missing[0]}'; it has {sorted(content)}")
        steps = len(content["rewards"])
        ends = {key: content[key] for key in ENDS if key in content}
        if not ends:
            raise ConfigError(
                f"it has neither 'dones' nor 'terminated' and 'truncated'; it has {sorted(content)}"
            )
        if "dones" not in ends:
            ends = {key: ends.get(key, np.zeros(steps, dtype=bool)) for key in ("terminated", "truncated")}
        for name, value in {"rewards": content["rewards"], "actions": content["actions"], **ends}.items():
            if value.shape[:1] != (steps,) or (name != "actions" and value.ndim != 1):
                raise ConfigError(
                    f"'{name}' has shape {value.shape}, but there are {steps} rewards, one per step"
                )
            if value.dtype.kind not in "biuf" or not np.isfinite(value).all():
                raise ConfigError(f"'{name}' ({value.dtype}) must be finite numbers")
        early = np.flatnonzero(np.any([value[:-1].astype(bool) for value in ends.values()], axis=0))
        if len(early):
            raise ConfigError(
                f"it ends at step {early[0]} of {steps}: a file holds one episode, so split it there"
            )
        self._check_range(content["actions"])
        # One step more, whose action and outcome mean nothing, carries the last observation.
        nothing = {"rewards": np.zeros(1), **{key: np.zeros(1, dtype=bool) for key in ends}}
        trajectory: dict[str, Any] = {
            key: np.concatenate([value, nothing[key]])[None]
            for key, value in {"rewards": content["rewards"], **ends}.items()
        }
        trajectory["observations"] = self._observations(content, steps)
        trajectory["actions"] = np.concatenate([content["actions"], content["actions"][-1:]])[None]
        rows = PlainDoor(self.spec).convert(trajectory)
        assert rows is not None
        rows["truncated"][:, -1] |= ~rows["terminated"][:, -1]
        rows["action"][:, -1] = 0
        return rows

    def _observations(self, content: dict[str, np.ndarray], steps: int) -> dict[str, np.ndarray]:
        """(1, K+1, …) by name."""
        specs = self.spec.observations
        keys = {name: f"{OBSERVATIONS}/{name}" for name in specs}
        if len(specs) == 1 and OBSERVATIONS in content:
            keys = dict.fromkeys(specs, OBSERVATIONS)
        found, short = {}, False
        for name, key in keys.items():
            if key not in content:
                raise ConfigError(f"it has no '{key}', which the environment gives; it has {sorted(content)}")
            value, shape = content[key], specs[name].shape
            if value.shape not in ((steps, *shape), (steps + 1, *shape)):
                raise ConfigError(
                    f"'{key}' has shape {value.shape}, but {steps} rewards and the environment ask for "
                    f"{(steps + 1, *shape)} or {(steps, *shape)}"
                )
            if value.dtype.kind == "f" and not np.isfinite(value).all():
                raise ConfigError(f"'{key}' holds numbers that are not finite")
            if len(value) == steps:
                short, value = True, np.concatenate([value, value[-1:]])
            found[name] = value[None]
        self.without_last += short
        return found

    def _check_range(self, actions: np.ndarray) -> None:
        action = self.spec.action
        if action.kind == "continuous" and np.abs(actions).max(initial=0) > 1 + ACTION_TOLERANCE:
            raise ConfigError(
                f"actions go from {actions.min():.4g} to {actions.max():.4g}, but are stored in [-1, 1]: scale them by "
                f"2 * (action - low) / (high - low) - 1, with low {list(action.low)} and high {list(action.high)}"
            )


def _steps(file: Path) -> int:
    rewards = _read(file, ("rewards",)).get("rewards")
    if rewards is None or rewards.ndim != 1 or not len(rewards):
        have = "none" if rewards is None else f"shape {rewards.shape}"
        raise ConfigError(f"episode {file}: 'rewards' must be (steps,) with at least one step; it has {have}")
    return len(rewards)


def _read(file: Path, wanted: Sequence[str] = KEYS) -> dict[str, np.ndarray]:
    """Arrays of a file by key, nested dicts as `outer/inner`; ConfigError when it is damaged or no data."""
    try:
        if file.suffix == ".pt":
            content = _flatten(load_data(file, check_zip=True))
            return {key: _array(value) for key, value in content.items() if key.split("/")[0] in wanted}
        with np.load(file, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files if key.split("/")[0] in wanted}
    except CheckpointError as error:
        raise ConfigError(f"episode {error}") from None
    except Exception as error:  # whatever a damaged file makes of the reader
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"episode {file} cannot be read: it is damaged or holds more than numbers ({reason[0][:200]})"
        ) from None


def _flatten(content: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not a dict of arrays")
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= _flatten(value, f"{prefix}{key}/") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _array(value: Any) -> np.ndarray:
    return value.detach().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
