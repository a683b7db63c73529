"""RunLog: metrics, returns, rates and timings between two log lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rl_lab.records import Episode, return_statistics
from rl_lab.utils import ranks
from rl_lab.utils.metrics import Stopwatch, prefixed

TICK_SECONDS = 0.2  # between two drawings of the progress display
# Metrics of runs of several phases, whose end cannot be told from the number of steps.
DONE, SECONDS_LEFT = "time/run_done", "time/seconds_left"
PHASE = "workflow/phase"  # its number, from 1; on a line of its own when a phase begins
ENDED_EARLY = "workflow/ended_early"  # on the last line of a run that a callback ended
STOP_WHEN = "training.stop_when"  # name of the callback that this key makes
SHORT = 0.2  # a last interval with less of the usual work than this has no rates and no training metrics


class RunLog:
    """Accumulates metrics; `write` sends them to the logger and the progress display."""

    def __init__(
        self,
        logger: Any,  # ExperimentLogger
        *,
        progress: Any = None,
        stopwatch: Stopwatch | None = None,
        frames_per_step: int = 1,
        total_steps: int | None = None,
        gauges: Callable[[], Mapping[str, float]] = dict,  # further metrics, read at every log line
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.logger = logger
        self.progress = progress
        self.stopwatch = stopwatch or Stopwatch()
        self.frames_per_step = frames_per_step
        self.total_steps = total_steps
        self.gauges = gauges
        self.clock = clock
        self.last_return: float | None = None
        self.last_evaluation: float | None = None
        self._episodes: list[Episode] = []
        self._collect: dict[str, list[float]] = {}  # key -> [sum, count]
        self._since = (clock(), 0, 0)
        self._ticked = 0.0
        self._phase = 0  # number of the phase that began last
        self._interval = 0  # environment steps and updates between the last two lines
        self._line: int | None = None  # environment steps and updates at the last line

    def begin(self, totals: Mapping[str, int]) -> None:
        """Start measuring rates at these counters (a resumed run does not start at 0)."""
        if self._line is None:
            self._line = totals["env_steps"] + totals["updates"]
        self._since = (self.clock(), totals["env_steps"], totals["updates"])

    def tick(self, totals: Mapping[str, int], headline: Callable[[], Mapping[str, Any]]) -> None:
        """Show the counters, at most every TICK_SECONDS; headline: what else is shown."""
        if self.progress is None:
            return
        now = self.clock()
        if now - self._ticked < TICK_SECONDS:
            return
        self._ticked = now
        counters = {"step": totals["env_steps"], "updates": totals["updates"], "episodes": totals["episodes"]}
        self.progress.tick({"total": self.total_steps, **counters, **headline()})

    def collected(self, metrics: Mapping[str, float], episodes: list[Episode]) -> None:
        self._episodes += episodes
        for key, value in metrics.items():
            entry = self._collect.setdefault(key, [0.0, 0.0])
            entry[0] += float(value)
            entry[1] += 1.0

    def get_state(self) -> dict[str, Any]:
        """Return what the next log line will average, for a checkpoint between two lines."""
        episodes = [
            [episode.episode_return, episode.length, episode.env, dict(episode.log)]
            for episode in self._episodes
        ]
        return {
            "collect": {key: list(entry) for key, entry in self._collect.items()},
            "episodes": episodes,
            "line": self._line or 0,
            "interval": self._interval,
            "phase": self._phase,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._line, self._interval = int(state["line"]), int(state["interval"])
        self._phase = int(state.get("phase", 0))  # in checkpoints since 2026-11-19
        self._collect = {key: [float(value) for value in entry] for key, entry in state["collect"].items()}
        self._episodes = [
            Episode(float(total), int(length), int(env), dict(log))
            for total, length, env, log in state["episodes"]
        ]

    def counters(self, totals: Mapping[str, int]) -> dict[str, int]:
        """Return agent steps, environment frames and updates: they are part of every log line."""
        steps = totals["env_steps"]
        return {"step": steps, "frames": steps * self.frames_per_step, "updates": totals["updates"]}

    def begin_phase(self, totals: Mapping[str, int], headline: Mapping[str, Any]) -> None:
        """Write that a phase of a run of several begins; a resumed run does not write it again."""
        number = headline.get("phase_number")
        if number is None or number == self._phase:
            return
        self._phase = number
        self.logger.scalars({PHASE: number, **_of_run(headline)}, **self.counters(totals))

    def write(
        self,
        totals: Mapping[str, int],
        meters: Iterable[tuple[str, Any]],
        *,
        phase: str,
        progress: float,
        failures: Mapping[str, float] | None = None,
        guard: AbstractContextManager[None] | None = None,
        last: bool = False,
        headline: Mapping[str, Any] | None = None,
    ) -> dict[str, float]:
        """Write one log line and return it.

        meters:   (prefix, MetricMeter) of each hook
        failures: of side jobs
        guard:    around the outputs
        last:     the run ends: a short last interval would be an outlier of every curve, so its rates and training
                  metrics are left out
        headline: further values for the progress display; `share` and `seconds_left` are logged, too
        """
        metrics: dict[str, float] = {}
        done = totals["env_steps"] + totals["updates"]
        work = done - (self._line or 0)
        short = last and work < SHORT * self._interval
        self._interval, self._line = max(work, 0), done
        for prefix, meter in meters:
            drained = meter.drain()
            kept = {key: value for key, value in drained.items() if not short or key == "nonfinite"}
            metrics |= prefixed(kept, prefix)
        collected = {key: total / count for key, (total, count) in self._collect.items()}
        metrics |= prefixed(collected, "collect")
        statistics = return_statistics([episode for each in ranks.gather(self._episodes) for episode in each])
        metrics |= prefixed({key.removeprefix("log/"): value for key, value in statistics.items()}, "collect")
        self.last_return = statistics.get("return_mean", self.last_return)
        metrics["collect/episodes"] = totals["episodes"]
        metrics |= self.gauges()
        rates, timings = self._rates(totals), self.stopwatch.drain()
        metrics |= {} if short else {**rates, **timings}
        metrics["workflow/phase_progress"] = progress
        metrics |= _of_run(headline or {})
        metrics |= failures or {}
        metrics = ranks.mean_of_dicts(metrics)
        metrics |= prefixed({key.removeprefix("log/"): value for key, value in statistics.items()}, "collect")
        self._episodes, self._collect = [], {}
        with guard or nullcontext():
            with self.stopwatch("log"):
                self.logger.scalars(metrics, **self.counters(totals))
            if self.progress is not None:
                shown = {**self._headline(totals, rates, phase, progress), **(headline or {})}
                hidden = {"env_steps_per_second": None, "updates_per_second": None} if short else {}
                self.progress.update(shown | hidden)
        return metrics

    def evaluation(self, metrics: Mapping[str, float], totals: Mapping[str, int]) -> None:
        self.last_evaluation = metrics.get("eval/return_mean", self.last_evaluation)
        self.logger.scalars(prefixed(metrics, "eval"), **self.counters(totals))

    def _rates(self, totals: Mapping[str, int]) -> dict[str, float]:
        then, steps, updates = self._since
        now = self.clock()
        seconds = max(now - then, 1e-9)
        self._since = (now, totals["env_steps"], totals["updates"])
        return {
            "time/env_steps_per_second": (totals["env_steps"] - steps) / seconds,
            "time/updates_per_second": (totals["updates"] - updates) / seconds,
        }

    def _headline(
        self, totals: Mapping[str, int], rates: Mapping[str, float], phase: str, progress: float
    ) -> dict[str, Any]:
        return {
            "phase": phase,
            "phase_progress": progress,
            "step": totals["env_steps"],
            "total": self.total_steps,
            "updates": totals["updates"],
            "episodes": totals["episodes"],
            "env_steps_per_second": rates["time/env_steps_per_second"],
            "updates_per_second": rates["time/updates_per_second"],
            "return": self.last_return,
            "eval_return": self.last_evaluation,
        }


def _of_run(headline: Mapping[str, Any]) -> dict[str, float]:
    """Return how much of a run of several phases is done, and the seconds left, if they are known."""
    named = {DONE: headline.get("share"), SECONDS_LEFT: headline.get("seconds_left")}
    return {key: float(value) for key, value in named.items() if value is not None}
