"""Normalization of observations by their running mean and variance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl_lab.environments.spec import FLOAT32_MAX
from rl_lab.errors import CheckpointError, ConfigError
from rl_lab.records import ArraySpec, Spec

EPSILON = 1e-8  # added to the variance: a constant value becomes 0


class Moments:
    """Count, mean and sum of squared deviations of arrays, by name, in float64.

    Batches are merged with the update formula of Chan, Golub and LeVeque (1979).
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.count = 0
        self.mean = {name: np.zeros(shape) for name, shape in shapes.items()}
        self._squares = {name: np.zeros(shape) for name, shape in shapes.items()}  # sum of (x - mean)²

    def add(self, batches: Mapping[str, np.ndarray]) -> None:
        """Add name -> (M, …) with the same M."""
        added = 0
        for name in self.mean:
            batch = batches[name]
            added = len(batch)
            if added == 0:
                return
            mean = batch.mean(0)
            self._merge(name, added, mean, ((batch - mean) ** 2).sum(0))
        self.count += added

    def combine(self, other: Moments) -> None:
        """Add all that another one has counted."""
        if other.count:
            for name in self.mean:
                self._merge(name, other.count, other.mean[name], other._squares[name])
            self.count += other.count

    def _merge(self, name: str, added: int, mean: np.ndarray, squares: np.ndarray) -> None:
        total = self.count + added
        change = mean - self.mean[name]
        self._squares[name] += squares + change**2 * (self.count * added / total)
        self.mean[name] += change * (added / total)

    def copy_from(self, other: Moments) -> None:
        self.count = other.count
        self.mean = {name: array.copy() for name, array in other.mean.items()}
        self._squares = {name: array.copy() for name, array in other._squares.items()}

    def to_state(self) -> dict[str, Any]:
        import torch

        def tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
            return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}

        return {"count": self.count, "mean": tensors(self.mean), "squares": tensors(self._squares)}

    def from_state(self, state: Mapping[str, Any]) -> None:
        """Restore `to_state`; CheckpointError if names or shapes differ."""
        saved = {name: np.array(value, np.float64) for name, value in state["mean"].items()}
        if {n: a.shape for n, a in saved.items()} != {n: a.shape for n, a in self.mean.items()}:
            raise CheckpointError(
                f"observation statistics of {sorted(saved)} do not match this environment, which has {sorted(self.mean)}: "
                "names and shapes must be the same"
            )
        self.count = int(state["count"])
        self.mean = saved
        self._squares = {name: np.array(value, np.float64) for name, value in state["squares"].items()}


class ObservationNormalizer(Moments):
    """Normalizes each element by the mean and standard deviation of all previous observations, then clips.

    It applies to float observations of any shape; images (uint8) are returned unchanged. With several ranks
    (utils/ranks.py) the statistics are those of all ranks up to the last `merge`, and of this rank since.

    clip:   bound of the absolute value of the result; None: no bound
    frozen: do not update the statistics (evaluation)
    """

    def __init__(
        self, observations: Mapping[str, ArraySpec], *, clip: float | None = 10.0, frozen: bool = False
    ) -> None:
        shapes = {n: spec.shape for n, spec in observations.items() if np.dtype(spec.dtype).kind == "f"}
        super().__init__(shapes)
        self.clip = clip
        self.frozen = frozen
        self._scale: dict[str, np.ndarray] = {}  # 1 / standard deviation, computed on demand
        self._base: Moments | None = None
        self._added: Moments | None = None

    def variance(self, name: str) -> np.ndarray:
        """Return the variance, in the shape of one observation."""
        return self._squares[name] / max(self.count, 1)

    def update(self, obs: Mapping[str, np.ndarray], rows: np.ndarray | None = None) -> None:
        """Update the statistics with observations, name -> (N, …); `rows` (N,) bool selects the new ones."""
        if self.frozen:
            return
        batches = {name: np.asarray(obs[name], np.float64) for name in self.mean}
        if rows is not None:
            batches = {name: batch[rows] for name, batch in batches.items()}
        self.add(batches)
        if self._added is not None:
            self._added.add(batches)
        self._scale = {}

    def __call__(self, obs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return normalized observations (…) in new arrays; other dtypes than float are not copied."""
        if not self._scale:
            self._scale = {name: 1.0 / np.sqrt(self.variance(name) + EPSILON) for name in self.mean}
        result = dict(obs)
        for name, mean in self.mean.items():
            scaled = (obs[name] - mean) * self._scale[name]
            bound = (
                FLOAT32_MAX if self.clip is None else self.clip
            )  # a tiny deviation must not lead to infinity
            np.clip(scaled, -bound, bound, out=scaled)
            result[name] = scaled.astype(np.float32)
        return result

    def inverse(self, obs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the observations (…) whose normalized values these are; clipped values stay at the bound."""
        result = dict(obs)
        for name, mean in self.mean.items():
            if name in result:
                scaled = np.asarray(result[name], np.float64) * np.sqrt(self.variance(name) + EPSILON) + mean
                result[name] = scaled.astype(np.float32)
        return result

    def share(self) -> None:
        """Keep apart what is counted from now on, for `merge`."""
        shapes = {name: array.shape for name, array in self.mean.items()}
        self._base, self._added = Moments(shapes), Moments(shapes)
        self._base.copy_from(self)

    def take_added(self) -> Moments | None:
        """What this rank has counted since the last `merge`."""
        return self._added

    def merge(self, added: Sequence[Moments | None]) -> None:
        """Count what every rank has added, in their order: all have the same statistics afterwards."""
        if self._base is None or self._added is None:
            return
        for moments in added:
            assert moments is not None
            self._base.combine(moments)
        self.copy_from(self._base)
        self._added = Moments({name: array.shape for name, array in self.mean.items()})
        self._scale = {}

    def get_state(self) -> dict[str, Any]:
        state = self.to_state()
        if self._base is not None and self._added is not None:
            state |= {"base": self._base.to_state(), "added": self._added.to_state()}
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `get_state`, from this or another environment of the same task."""
        self.from_state(state)
        if self._base is not None and self._added is not None:
            self._added = Moments({name: array.shape for name, array in self.mean.items()})
            self._base.from_state(state.get("base", state))
            if "added" in state:
                self._added.from_state(state["added"])
        self._scale = {}


def make_normalizer(
    spec: Spec, enabled: bool, clip: float | None, statistics: Mapping[str, Any] | None = None
) -> ObservationNormalizer | None:
    """Return a normalizer, frozen if `statistics` are given; None if not enabled."""
    if not isinstance(enabled, bool) or (
        clip is not None and not (isinstance(clip, int | float) and clip > 0)
    ):
        raise ConfigError(
            f"environment.normalize_observations={enabled!r} must be true or false, and normalize_clip={clip!r} must be "
            "above 0, or null for no clipping"
        )
    if not enabled:
        return None
    normalizer = ObservationNormalizer(spec.observations, clip=clip, frozen=statistics is not None)
    if statistics is not None:
        normalizer.set_state(statistics)
    return normalizer
