"""CMA-ES, through the package `cma` (Hansen's pycma), as something that a checkpoint can hold.

What is kept is not the strategy's inner arrays, which belong to a version of the package, but what made them: the
start, the seed of its normal numbers, and the fitness of every candidate. A resumed run asks and tells through that
history once more (hundredths to tenths of a second a generation at 867 parameters) and stands where it stood, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rl_lab.errors import CheckpointError, ConfigError, MissingPackageError
from rl_lab.utils.install import install_line


class CMAES:
    """Ask for candidates, tell their fitness (higher is better).

    population: candidates of a generation
    sigma:      their deviation at the start
    diagonal:   only variances, no covariances: for many parameters and few generations
    """

    def __init__(self, *, population: int = 64, sigma: float = 0.1, diagonal: bool = False) -> None:
        if population < 2 or not sigma > 0.0:
            raise ConfigError(f"CMA-ES needs population >= 2 and sigma > 0, not {population} and {sigma}")
        self.population = population
        self.sigma = sigma
        self.diagonal = diagonal
        self._start: dict[str, Any] = {}
        self._fitness: list[np.ndarray] = []
        self._strategy: Any = None
        self._asked: list[np.ndarray] | None = None

    @property
    def generation(self) -> int:
        """Generations told so far."""
        return len(self._fitness)

    def start(self, mean: torch.Tensor, seed: int) -> None:
        """Begin anew around `mean` (D,)."""
        self._start = {
            "mean": mean.detach().to("cpu", torch.float64, copy=True),
            "seed": seed,
            "population": self.population,
            "sigma": self.sigma,
            "diagonal": self.diagonal,
        }
        self._fitness = []
        self._strategy = self._asked = None

    def ask(self) -> torch.Tensor:
        """Candidates of the next generation, (population, D) float32. Asked twice, they are the same."""
        if self._asked is None:
            self._asked = self._running().ask()
        return torch.from_numpy(np.stack(self._asked)).float()

    def tell(self, fitness: torch.Tensor) -> None:
        """fitness: (population,) of the candidates last asked for. One that is not a number counts as the worst."""
        values = fitness.detach().cpu().double().numpy()
        if values.shape != (self._start["population"],):
            raise ValueError(f"fitness of {values.shape} for {self._start['population']} candidates")
        self.ask()
        finite = np.isfinite(values)
        values = np.where(finite, values, values[finite].min() if finite.any() else 0.0)
        self._advance(values)

    @property
    def mean(self) -> torch.Tensor:
        """Centre of the distribution, (D,) float32: the best guess so far."""
        return torch.from_numpy(np.array(self._running().mean)).float()

    @property
    def step_size(self) -> float:
        """The overall deviation now."""
        return float(self._running().sigma)

    # ---------------------------------------------------------------- checkpoint

    def get_state(self) -> dict[str, Any]:
        """How it began and every fitness since, (G, population)."""
        told = torch.from_numpy(np.stack(self._fitness)) if self._fitness else None
        return {**self._start, "fitness": told}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `get_state` gave; the history is gone through when it is first needed."""
        self._start = {key: value for key, value in state.items() if key != "fitness"}
        told = state["fitness"]
        self._fitness = [] if told is None else list(told.double().numpy())
        self._strategy = self._asked = None

    # ---------------------------------------------------------------- inside

    def _running(self) -> Any:
        """The package's strategy, brought to where the history ends."""
        if self._strategy is None:
            if not self._start:
                raise CheckpointError("CMA-ES was asked before it was started")
            history, self._fitness = self._fitness, []
            self._strategy = self._make()
            for fitness in history:
                self._asked = self._strategy.ask()
                self._advance(fitness)
        return self._strategy

    def _advance(self, fitness: np.ndarray) -> None:
        self._strategy.tell(self._asked, (-fitness).tolist())  # the package minimises
        self._fitness.append(fitness)
        self._asked = None

    def _make(self) -> Any:
        try:
            import cma
        except ModuleNotFoundError as error:
            raise MissingPackageError(
                f"CMA-ES needs the package 'cma', which is not installed: {install_line('evolution')}"
            ) from error
        generator = np.random.default_rng(self._start["seed"])
        options = {
            "popsize": self._start["population"],
            "CMA_diagonal": self._start["diagonal"],
            # Its own numbers: numpy's global generator stays as it is.
            "randn": lambda *shape: generator.standard_normal(shape),
            "seed": np.nan,
            "verbose": -9,
            "verb_log": 0,
        }
        return cma.CMAEvolutionStrategy(self._start["mean"].numpy(), self._start["sigma"], options)
