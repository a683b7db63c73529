"""How an evolution is going: generation, best, mean, spread, evaluations per second, time left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from rl_lab.utils.progress import clock_time

SAY_SECONDS = 10.0  # at most one line in that time, and one about a generation that takes longer
RECENT = 20  # generations that the time left is reckoned from


class EvolutionProgress:
    """Counts one hook's generations; `say` gets a line about each, unless they are quicker than lines can be read."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self.say = say
        self.clock = clock
        self._said = clock()
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._began = 0.0
        self._number = 0
        self._total: int | None = None
        self._rollouts = 0
        self._played = 0
        self._stopped = 0

    def begin(self, number: int, total: int | None, rollouts: int) -> None:
        """A generation begins; `number` counts from 1."""
        if number <= self._number:  # another phase
            self._seconds.clear()
        self._number, self._total, self._rollouts = number, total, rollouts
        self._played = self._stopped = 0
        self._began = self.clock()

    def played(self, item: Any) -> None:
        """One rollout has ended."""
        self._played += 1
        self._stopped += int(item.stopped)
        now = self.clock()
        if now - max(self._said, self._began) >= SAY_SECONDS:
            rate = self._played / (now - self._began)
            left = (self._rollouts - self._played) / rate
            self._say(
                f"{self._name()}: {self._played} of {self._rollouts} rollouts · {rate:.2f} evaluations/s · "
                f"{clock_time(left)} left of it"
            )

    def end(self, fitness: torch.Tensor, steps: int) -> dict[str, float]:
        """The generation is through; returns its metrics. fitness: (P,); steps: played or dreamed."""
        seconds = max(self.clock() - self._began, 1e-9)
        self._seconds.append(seconds)
        metrics = {
            "generation": float(self._number),
            "best": float(fitness.max()),
            "mean": float(fitness.mean()),
            "worst": float(fitness.min()),
            "spread": float(fitness.std(correction=0)),
            "evaluations_per_second": self._rollouts / seconds,
            "steps_per_second": steps / seconds,
            "steps_per_evaluation": steps / self._rollouts,
            "stopped_early": self._stopped / self._rollouts,
        }
        left = self.seconds_left()
        if left is not None:
            metrics["seconds_left"] = left
        if self.clock() - self._said >= SAY_SECONDS or self._number in (1, self._total):
            self._say(
                f"{self._name()}: best {metrics['best']:.1f} · mean {metrics['mean']:.1f} ± {metrics['spread']:.1f} · "
                f"{metrics['evaluations_per_second']:.2f} evaluations/s · {metrics['steps_per_second']:,.0f} steps/s"
                + ("" if left is None else f" · ETA {clock_time(left)}")
            )
        return metrics

    def seconds_left(self) -> float | None:
        """Until the phase's last generation, at the recent pace."""
        if self._total is None or not self._seconds:
            return None
        return max(0, self._total - self._number) * sum(self._seconds) / len(self._seconds)

    def _name(self) -> str:
        return f"generation {self._number}" + (f"/{self._total}" if self._total else "")

    def _say(self, line: str) -> None:
        self._said = self.clock()
        self.say(line)
