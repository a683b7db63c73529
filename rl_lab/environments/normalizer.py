"""Running mean and variance of observations, and observations in units of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rl_lab.environments.spec import FLOAT32_MAX
from rl_lab.errors import CheckpointError, ConfigError
from rl_lab.records import ArraySpec, Spec

EPSILON = 1e-8  # on the variance: a number that never changed becomes 0


class ObservationNormalizer:
    """Subtracts the mean and divides by the deviation of all observations seen, number by number; then clips.

    It concerns float observations of any shape; images (uint8) pass as they are. Batches are merged into the running
    sums as Chan, Golub and LeVeque (1979) merge two samples, in float64.

    clip:   bound of the result; None: no bound
    frozen: the statistics stay as they are (evaluation)
    """

    def __init__(
        self, observations: Mapping[str, ArraySpec], *, clip: float | None = 10.0, frozen: bool = False
    ) -> None:
        self.clip = clip
        self.frozen = frozen
        self.count = 0
        floats = {name: spec for name, spec in observations.items() if np.dtype(spec.dtype).kind == "f"}
        self.mean = {name: np.zeros(spec.shape) for name, spec in floats.items()}
        self._squares = {name: np.zeros(spec.shape) for name, spec in floats.items()}  # summed (x - mean)²
        self._scale: dict[str, np.ndarray] = {}  # 1 / deviation, made when asked for

    def variance(self, name: str) -> np.ndarray:
        """The mean squared distance from the mean, in the shape of one observation."""
        return self._squares[name] / max(self.count, 1)

    def update(self, obs: Mapping[str, np.ndarray], rows: np.ndarray | None = None) -> None:
        """Count observations, name -> (N, …); `rows` (N,) bool: those of them that are new."""
        if self.frozen:
            return
        number = 0
        for name in self.mean:
            batch = np.asarray(obs[name], np.float64)
            batch = batch if rows is None else batch[rows]
            number = len(batch)
            if number == 0:
                return
            total = self.count + number
            mean = batch.mean(0)
            change = mean - self.mean[name]
            self._squares[name] += ((batch - mean) ** 2).sum(0) + change**2 * (self.count * number / total)
            self.mean[name] += change * (number / total)
        self.count += number
        self._scale = {}

    def __call__(self, obs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """(…) observations as they are given to the agent; fresh arrays for those that changed."""
        if not self._scale:
            self._scale = {name: 1.0 / np.sqrt(self.variance(name) + EPSILON) for name in self.mean}
        result = dict(obs)
        for name, mean in self.mean.items():
            scaled = (obs[name] - mean) * self._scale[name]
            bound = FLOAT32_MAX if self.clip is None else self.clip  # a tiny deviation may not give infinity
            np.clip(scaled, -bound, bound, out=scaled)
            result[name] = scaled.astype(np.float32)
        return result

    def get_state(self) -> dict[str, Any]:
        import torch

        def tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
            return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}

        return {"count": self.count, "mean": tensors(self.mean), "squares": tensors(self._squares)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `get_state` gave, of this or another environment of the task."""
        known = {name: np.array(value, np.float64) for name, value in state["mean"].items()}
        if {n: a.shape for n, a in known.items()} != {n: a.shape for n, a in self.mean.items()}:
            raise CheckpointError(
                f"the observation statistics are of {sorted(known)}, this environment has {sorted(self.mean)}, or "
                "their shapes differ"
            )
        self.count = int(state["count"])
        self.mean = known
        self._squares = {name: np.array(value, np.float64) for name, value in state["squares"].items()}
        self._scale = {}


def make_normalizer(
    spec: Spec, wanted: bool, clip: float | None, statistics: Mapping[str, Any] | None = None
) -> ObservationNormalizer | None:
    """A running one; with `statistics` one that stays as it is; None where none is wanted."""
    if not isinstance(wanted, bool) or (clip is not None and not clip > 0):
        raise ConfigError(
            f"environment.normalize_observations={wanted!r} must be true or false, and normalize_clip={clip!r} a number "
            "above 0, or null for none"
        )
    if not wanted:
        return None
    normalizer = ObservationNormalizer(spec.observations, clip=clip, frozen=statistics is not None)
    if statistics is not None:
        normalizer.set_state(statistics)
    return normalizer
