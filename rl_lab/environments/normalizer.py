"""Normalization of observations by their running mean and variance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rl_lab.environments.spec import FLOAT32_MAX
from rl_lab.errors import CheckpointError, ConfigError
from rl_lab.records import ArraySpec, Spec

EPSILON = 1e-8  # added to the variance: a constant value becomes 0


class ObservationNormalizer:
    """Normalizes each element by the mean and standard deviation of all previous observations, then clips.

    It applies to float observations of any shape; images (uint8) are returned unchanged. Batches are merged
    into the running statistics in float64, with the update formula of Chan, Golub and LeVeque (1979).

    clip:   bound of the absolute value of the result; None: no bound
    frozen: do not update the statistics (evaluation)
    """

    def __init__(
        self, observations: Mapping[str, ArraySpec], *, clip: float | None = 10.0, frozen: bool = False
    ) -> None:
        self.clip = clip
        self.frozen = frozen
        self.count = 0
        floats = {name: spec for name, spec in observations.items() if np.dtype(spec.dtype).kind == "f"}
        self.mean = {name: np.zeros(spec.shape) for name, spec in floats.items()}
        self._squares = {name: np.zeros(spec.shape) for name, spec in floats.items()}  # sum of (x - mean)²
        self._scale: dict[str, np.ndarray] = {}  # 1 / standard deviation, computed on demand

    def variance(self, name: str) -> np.ndarray:
        """Return the variance, in the shape of one observation."""
        return self._squares[name] / max(self.count, 1)

    def update(self, obs: Mapping[str, np.ndarray], rows: np.ndarray | None = None) -> None:
        """Update the statistics with observations, name -> (N, …); `rows` (N,) bool selects the new ones."""
        if self.frozen:
            return
        added = 0
        for name in self.mean:
            batch = np.asarray(obs[name], np.float64)
            batch = batch if rows is None else batch[rows]
            added = len(batch)
            if added == 0:
                return
            total = self.count + added
            mean = batch.mean(0)
            change = mean - self.mean[name]
            self._squares[name] += ((batch - mean) ** 2).sum(0) + change**2 * (self.count * added / total)
            self.mean[name] += change * (added / total)
        self.count += added
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

    def get_state(self) -> dict[str, Any]:
        import torch

        def tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
            return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}

        return {"count": self.count, "mean": tensors(self.mean), "squares": tensors(self._squares)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `get_state`, from this or another environment of the same task."""
        saved = {name: np.array(value, np.float64) for name, value in state["mean"].items()}
        if {n: a.shape for n, a in saved.items()} != {n: a.shape for n, a in self.mean.items()}:
            raise CheckpointError(
                f"observation statistics of {sorted(saved)} do not match this environment, which has {sorted(self.mean)}: "
                "names and shapes must be the same"
            )
        self.count = int(state["count"])
        self.mean = saved
        self._squares = {name: np.array(value, np.float64) for name, value in state["squares"].items()}
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
