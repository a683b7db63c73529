"""CMA-ES with the package `cma` (Hansen's pycma), in a form that checkpoints can store.

A checkpoint does not hold the strategy's arrays, which depend on the version of the package, but its start,
its seed and the fitness of every candidate. A resumed run replays this history (hundredths to tenths of a
second per generation with 867 parameters) and reaches the same state bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rl_lab.errors import CheckpointError, ConfigError, MissingPackageError, install_line


class CMAES:
    """Ask-and-tell interface; higher fitness is better.

    population: candidates per generation
    sigma:      initial standard deviation of the candidates
    diagonal:   diagonal covariance matrix: for many parameters and few generations
    """

    def __init__(self, *, population: int = 64, sigma: float = 0.1, diagonal: bool = False) -> None:
        if population < 2 or not sigma > 0.0:
            raise ConfigError(
                f"population={population} and sigma={sigma} of CMA-ES must be at least 2 and above 0"
            )
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
        """Start a new search around `mean` (D,)."""
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
        """Candidates of the next generation, (population, D) float32. Repeated calls return the same ones."""
        if self._asked is None:
            self._asked = self._running().ask()
        return torch.from_numpy(np.stack(self._asked)).float()

    def tell(self, fitness: torch.Tensor) -> None:
        """fitness: (population,) of the last `ask`; non-finite values count as the worst."""
        values = fitness.detach().cpu().double().numpy()
        if values.shape != (self._start["population"],):
            raise ValueError(f"fitness of {values.shape} for {self._start['population']} candidates")
        self.ask()
        finite = np.isfinite(values)
        values = np.where(finite, values, values[finite].min() if finite.any() else 0.0)
        self._advance(values)

    @property
    def mean(self) -> torch.Tensor:
        """Mean of the distribution, (D,) float32: the current best estimate."""
        return torch.from_numpy(np.array(self._running().mean)).float()

    @property
    def step_size(self) -> float:
        """The current overall standard deviation."""
        return float(self._running().sigma)

    # ---------------------------------------------------------------- checkpoint

    def get_state(self) -> dict[str, Any]:
        """The start, and the fitness of all generations (G, population)."""
        told = torch.from_numpy(np.stack(self._fitness)) if self._fitness else None
        return {**self._start, "fitness": told}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of `get_state`; the history is replayed when the strategy is first needed."""
        self._start = {key: value for key, value in state.items() if key != "fitness"}
        told = state["fitness"]
        self._fitness = [] if told is None else list(told.double().numpy())
        self._strategy = self._asked = None

    # ---------------------------------------------------------------- internals

    def _running(self) -> Any:
        """The strategy of the package, after replaying the history."""
        if self._strategy is None:
            if not self._start:
                raise CheckpointError("CMA-ES has no start: call `start` or `set_state` first")
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
            # Its own generator, so that numpy's global one is not used.
            "randn": lambda *shape: generator.standard_normal(shape),
            "seed": np.nan,
            "verbose": -9,
            "verb_log": 0,
        }
        return cma.CMAEvolutionStrategy(self._start["mean"].numpy(), self._start["sigma"], options)
