"""PlainEpisode: the form in which every format gives and takes an episode, and its conversion to stored rows.

`rewards[k]`, `terminated[k]` and `truncated[k]` follow `actions[k]`; the K+1 observations include the one after the
last action. trajectory.py describes how steps and rows correspond.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_lab.buffers.trajectory import TrajectoryAdapter
from rl_lab.errors import ConfigError
from rl_lab.records import OBS_PREFIX, ActionSpec, ArraySpec, Spec

ACTION_TOLERANCE = 1e-3  # outside [-1, 1], for rounding errors
SINGLE = "observations"  # key of the only observation in formats that do not name it


class MissingKeyError(ConfigError):
    """An episode has no array of a name; the reader adds the names that its file has."""


@dataclass
class PlainEpisode:
    """One episode of K steps. Images are uint8, channels first; continuous actions are in [-1, 1]."""

    observations: dict[str, np.ndarray]  # name -> (K+1, …)
    actions: np.ndarray  # (K, …): as ActionSpec says, or one-hot
    rewards: np.ndarray  # (K,)
    terminated: np.ndarray  # (K,) bool
    truncated: np.ndarray  # (K,) bool; the last step of an episode without an end is truncated
    last_repeated: bool = False  # the format has no last observation, so the one before is repeated
    facts: dict[str, Any] = field(default_factory=dict)  # such as seed and success: JSON values

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def total_reward(self) -> float:
        return float(np.asarray(self.rewards, dtype=np.float64).sum())


def make_episode(
    observations: Mapping[str, np.ndarray],
    actions: np.ndarray,
    rewards: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    facts: Mapping[str, Any] | None = None,
) -> PlainEpisode:
    """Check the arrays of one episode and return it; ConfigError with one sentence for the first fault.

    Observations may be (K, …): then the last one is repeated.
    """
    steps = len(rewards) if np.ndim(rewards) else 0
    if not steps:
        raise ConfigError("'rewards' must be (steps,) with at least one step")
    flat = {"rewards": rewards, "terminated": terminated, "truncated": truncated}
    for name, value in {**flat, "actions": actions}.items():
        check_array(name, value, steps, flat=name != "actions")
    ended = np.asarray(terminated).astype(bool) | np.asarray(truncated).astype(bool)
    early = np.flatnonzero(ended[:-1])
    if len(early):
        raise ConfigError(
            f"the episode ends at step {early[0]} of {steps}: split it there, it must hold one episode"
        )
    found, repeated = {}, False
    for name, value in observations.items():
        if value.shape[:1] not in ((steps,), (steps + 1,)):
            raise ConfigError(
                f"observation '{name}' has shape {value.shape}, but {steps} rewards need {steps + 1} or {steps} of it"
            )
        check_finite(f"observation '{name}'", value)
        if len(value) == steps:
            repeated, value = True, np.concatenate([value, value[-1:]])
        found[name] = value
    if not found:
        raise MissingKeyError("the observations are missing")
    terminated = np.array(terminated, dtype=bool)
    truncated = np.array(truncated, dtype=bool)
    truncated[-1] |= not terminated[-1]
    return PlainEpisode(found, actions, rewards, terminated, truncated, repeated, dict(facts or {}))


def check_array(name: str, value: np.ndarray, steps: int, *, flat: bool) -> None:
    """ConfigError unless an array has one finite entry per step. flat: one number per step"""
    if value.shape[:1] != (steps,) or (flat and value.ndim != 1):
        raise ConfigError(f"'{name}' has shape {value.shape}, but there are {steps} rewards, one per step")
    if value.dtype.kind not in "biuf" or not np.isfinite(value).all():
        raise ConfigError(f"'{name}' ({value.dtype}) must be finite and numeric")


def check_finite(what: str, value: np.ndarray) -> None:
    if value.dtype.kind not in "biuf":
        raise ConfigError(f"{what} ({value.dtype}) must be numeric")
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        row = int(np.flatnonzero(~np.isfinite(value.reshape(len(value), -1)).all(axis=1))[0])
        raise ConfigError(f"{what} has values that are not finite, first at step {row}")


# --- Stored rows --------------------------------------------------------------------------------


def to_rows(episode: PlainEpisode, spec: Spec) -> dict[str, np.ndarray]:
    """Return the K+1 rows of an episode, column -> (1, K+1, …); ConfigError if it does not fit the spec."""
    steps = len(episode)
    observations = {}
    for name, key in match_names(episode.observations, spec).items():
        value, shape = episode.observations[key], spec.observations[name].shape
        if value.shape != (steps + 1, *shape):
            raise ConfigError(
                f"'{key}' has shape {value.shape}, but {steps} rewards and the environment need "
                f"{(steps + 1, *shape)} or {(steps, *shape)}"
            )
        observations[name] = value[None]
    check_range(episode.actions, spec.action)
    # An additional step holds the last observation; its action, reward and end are ignored.
    none = np.zeros(1, dtype=bool)
    rows = TrajectoryAdapter(spec).convert(
        {
            "observations": observations,
            "actions": np.concatenate([episode.actions, episode.actions[-1:]])[None],
            "rewards": np.concatenate([episode.rewards, np.zeros(1, episode.rewards.dtype)])[None],
            "terminated": np.concatenate([episode.terminated, none])[None],
            "truncated": np.concatenate([episode.truncated, none])[None],
        }
    )
    assert rows is not None
    rows["action"][:, -1] = 0
    return rows


def from_rows(rows: Mapping[str, np.ndarray], facts: Mapping[str, Any] | None = None) -> PlainEpisode:
    """Return the episode of K+1 stored rows, column -> (K+1, …)."""
    terminated, truncated = rows["terminated"][1:].astype(bool), rows["truncated"][1:].astype(bool)
    if len(terminated) and not terminated[-1]:
        truncated = truncated.copy()
        truncated[-1] = True
    return PlainEpisode(
        {name.removeprefix(OBS_PREFIX): rows[name] for name in rows if name.startswith(OBS_PREFIX)},
        rows["action"][:-1],
        rows["reward"][1:],
        terminated,
        truncated,
        facts=dict(facts or {}),
    )


def match_names(names: Mapping[str, Any], spec: Spec) -> dict[str, str]:
    """Return observation of the environment -> observation of the data. A single one needs no equal name."""
    if len(spec.observations) == 1 and len(names) == 1:
        return {next(iter(spec.observations)): next(iter(names))}
    missing = [name for name in spec.observations if name not in names]
    if missing:
        raise MissingKeyError(f"key '{SINGLE}/{missing[0]}', an observation of the environment, is missing")
    return {name: name for name in spec.observations}


def check_range(actions: np.ndarray, action: ActionSpec) -> None:
    if action.kind == "continuous" and np.abs(actions).max(initial=0) > 1 + ACTION_TOLERANCE:
        raise ConfigError(
            f"actions range from {actions.min():.4g} to {actions.max():.4g}, but must be in [-1, 1]: scale them by "
            f"2 * (action - low) / (high - low) - 1, with low {list(action.low)} and high {list(action.high)}"
        )


# --- Images and units ---------------------------------------------------------------------------


def is_image(spec: ArraySpec) -> bool:
    return spec.dtype == "uint8" and len(spec.shape) == 3


def channels_last(value: np.ndarray) -> np.ndarray:
    """(T, C, H, W) -> (T, H, W, C), as other formats store images."""
    return np.ascontiguousarray(np.moveaxis(value, 1, -1))


def channels_first(value: np.ndarray) -> np.ndarray:
    """(T, H, W, C) -> (T, C, H, W)"""
    return np.ascontiguousarray(np.moveaxis(value, -1, 1))


def looks_channels_last(shape: tuple[int, ...]) -> bool:
    """Return whether the shape of a uint8 array is (H, W, C): few channels last, and not first."""
    return len(shape) == 3 and shape[-1] in (1, 3, 4) and shape[0] not in (1, 3, 4)


def scaled_actions(actions: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return actions in the environment's units as values in [-1, 1], float32."""
    if np.all(low == -1) and np.all(high == 1):
        return actions.astype(np.float32, copy=False)
    span = np.asarray(high, np.float64) - low
    scaled: np.ndarray = 2 * (actions - np.asarray(low, np.float64)) / span - 1
    return np.asarray(np.clip(scaled, -1, 1), dtype=np.float32)


def unscaled_actions(actions: np.ndarray, action: ActionSpec) -> np.ndarray:
    """Return actions in [-1, 1] in the environment's units, float32."""
    low, high = np.asarray(action.low, np.float64), np.asarray(action.high, np.float64)
    return np.asarray(low + (actions.astype(np.float64) + 1) / 2 * (high - low), dtype=np.float32)
