"""Callbacks: your own code during training, from `callbacks:` of a config or `rl_lab.train(callbacks=[…])`.

StopWhen is the callback of `training.stop_when`: it ends training early by a logged metric. This module is imported if a
run has any of them.

A callback is an object with any of the methods of `Callback`. It is called on the first rank only, after log lines,
evaluations and checkpoints. A failure does not end training (`training.on_side_failure`), and torch's random numbers are
those of a run without callbacks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_lab.errors import ConfigError, LabError, closest, reject_unknown, unexpected
from rl_lab.orchestration.run_log import STOP_WHEN
from rl_lab.utils import ranks
from rl_lab.utils.progress import point_of

if TYPE_CHECKING:
    from rl_lab.orchestration.orchestrator import Orchestrator
    from rl_lab.orchestration.side_jobs import SideJobs


class Callback:
    """Base class for editors; any object with some of these methods will do.

    metrics: of one line of metrics.jsonl, with full names such as "train/loss/actor" or "eval/return_mean"
    """

    def on_begin(self, run: RunView) -> None:
        """Training begins or, after a resume, continues. An error here ends the run."""

    def on_log(self, metrics: Mapping[str, float], run: RunView) -> None:
        """A log line was written (`training.log`)."""

    def on_evaluation(self, metrics: Mapping[str, float], run: RunView) -> None:
        """An evaluation has finished (`training.evaluate`)."""

    def on_save(self, path: Path, run: RunView) -> None:
        """A checkpoint was written; its last weights are in `path`."""

    def on_end(self, run: RunView) -> None:
        """Training ends: all steps are done, a callback stopped it, or a signal did. Not after an error."""

    def get_state(self) -> dict[str, Any]:
        """Tensors, numbers, strings, lists and dicts for the checkpoint."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a checkpoint; called before `on_begin`."""


METHODS = ("on_begin", "on_log", "on_evaluation", "on_save", "on_end")


class RunView:
    """What a callback sees of the run, and what it can do."""

    def __init__(self, orchestrator: Orchestrator, name: str) -> None:
        self._orchestrator, self._name = orchestrator, name

    @property
    def counters(self) -> dict[str, int]:
        """env_steps, updates, episodes and cycles so far."""
        return dict(self._orchestrator.scheduler.totals)

    @property
    def step(self) -> int:
        """Environment steps so far."""
        return self._orchestrator.scheduler.totals["env_steps"]

    @property
    def phase(self) -> str:
        phase = self._orchestrator.scheduler.current_phase()
        return phase.name if phase else "done"

    @property
    def path(self) -> Path | None:
        """The run folder."""
        checkpoints = self._orchestrator.checkpoints
        return None if checkpoints is None else checkpoints.folder.parent

    @property
    def workflow(self) -> Any:
        """The algorithm, with its parts and `act`. What you change in it changes training."""
        return self._orchestrator.workflow

    @property
    def best(self) -> tuple[float, int | None] | None:
        """Return and step of the best evaluation so far."""
        return self._orchestrator.best

    def stop(self, reason: str) -> None:
        """End training after the current action, with a last checkpoint, as if all steps were done."""
        self._orchestrator.end_early(self._name, reason)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Write numbers as a line of metrics.jsonl and to TensorBoard and the trackers; a name has its group: my/loss."""
        counters = self._orchestrator.log.counters(self._orchestrator.scheduler.totals)
        self._orchestrator.log.logger.scalars(metrics, **counters)

    def image(self, name: str, image: Any) -> None:
        """Log an image (C, H, W) uint8; a PNG is in media/callbacks/."""
        self._orchestrator.log.logger.image(name, image, step=self.step, folder="callbacks")

    def video(self, name: str, frames: Any, fps: float = 15) -> None:
        """Log a video (T, C, H, W) uint8; the file is in media/callbacks/."""
        self._orchestrator.log.logger.video(name, frames, step=self.step, fps=fps, folder="callbacks")

    def say(self, text: str) -> None:
        """Print a line without disturbing the progress display."""
        self._orchestrator.say(text)


def named(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Name callbacks given as objects by their class; a second one of a class is called Class_2."""
    found: dict[str, Any] = {}
    for callback in callbacks:
        if isinstance(callback, type):
            raise ConfigError(
                f"callbacks: {callback.__name__} is a class: pass an object, {callback.__name__}()"
            )
        base = type(callback).__name__
        count = sum(name == base or name.startswith(f"{base}_") for name in found)
        found[base if not count else f"{base}_{count + 1}"] = callback
    return found


def check_callback(path: str, callback: Any) -> None:
    """Raise ConfigError for an object that would never be called, and for a method name that is a typo."""
    own = [
        name for name in dir(callback) if name.startswith("on_") and callable(getattr(callback, name, None))
    ]
    for name in own:
        if name not in METHODS:
            raise ConfigError(
                f"{path}: {type(callback).__name__}.{name} would never be called.{closest(name, METHODS)}"
            )
    if not own:
        raise ConfigError(f"{path}: {type(callback).__name__} has none of the methods {', '.join(METHODS)}")
    if hasattr(callback, "get_state") != hasattr(callback, "set_state"):
        raise ConfigError(
            f"{path}: {type(callback).__name__} must have both get_state and set_state, or neither"
        )


class Callbacks:
    """The callbacks of a run, in their order. Only the first rank has any."""

    def __init__(self, callbacks: Mapping[str, Any] | None = None) -> None:
        for name, callback in (callbacks or {}).items():
            check_callback(_key(name), callback)
        self.callbacks = dict(callbacks or {}) if ranks.is_first() else {}
        self._unclaimed: dict[str, Any] = {}  # states of callbacks that this process was not given

    def call(self, orchestrator: Orchestrator, method: str, *arguments: Any) -> None:
        """Call a method of each callback that has it; an error in `on_begin` is raised."""
        for name, callback in self.callbacks.items():
            function = getattr(callback, method, None)
            if function is None:
                continue
            with _unchanged_randomness():
                if method == "on_begin":
                    _begin(name, function, RunView(orchestrator, name))
                else:
                    with orchestrator.side_jobs.guard(
                        f"callback {name}", orchestrator.scheduler.totals["env_steps"]
                    ):
                        function(*arguments, RunView(orchestrator, name))

    def get_state(self, side_jobs: SideJobs, step: int) -> dict[str, Any]:
        states = dict(self._unclaimed)
        for name, callback in self.callbacks.items():
            if hasattr(callback, "get_state"):
                with side_jobs.guard(f"state of callback {name}", step):
                    states[name] = callback.get_state()
        return states

    def set_state(self, states: Mapping[str, Any]) -> None:
        self._unclaimed = {
            name: state for name, state in states.items() if name not in (*self.callbacks, STOP_WHEN)
        }
        for name, callback in self.callbacks.items():
            if name in states and hasattr(callback, "set_state"):
                try:
                    callback.set_state(states[name])
                except LabError:
                    raise
                except Exception as error:
                    raise ConfigError(
                        f"{_key(name)}: its state in the checkpoint cannot be restored: {unexpected(error)}"
                    ) from error


def _key(name: str) -> str:
    return name if name == STOP_WHEN else f"callbacks.{name}"


def _begin(name: str, function: Any, view: RunView) -> None:
    try:
        function(view)
    except LabError:
        raise
    except Exception as error:
        raise ConfigError(f"{_key(name)}: on_begin failed: {unexpected(error)}") from error


@contextmanager
def _unchanged_randomness() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


# ---------------------------------------------------------------- training.stop_when

LARGER, SMALLER = "larger", "smaller"
MISSED_LINES = 3  # log lines without the metric, before it is reported


@dataclass(frozen=True)
class StopRule:
    """The keys of `training.stop_when`."""

    metric: str = "eval/return_mean"
    at_least: float | None = None
    at_most: float | None = None
    times: int = 1  # values in a row that reach the threshold
    patience: int | None = None  # values in a row that are no better than the best before them
    better: str = LARGER
    after_env_steps: int = 0  # values before this step do not count

    @classmethod
    def from_config(cls, node: Any) -> StopRule | None:
        """Return the rule, or None if no threshold and no patience switch it on."""
        if node is None:
            return None
        reject_unknown(STOP_WHEN, node, set(cls.__dataclass_fields__))
        rule = cls(**{key: value for key, value in node.items()})
        return rule if rule.thresholds or rule.patience is not None else None

    @property
    def thresholds(self) -> str:
        """The thresholds in words, "" without one."""
        parts = [("at least", self.at_least), ("at most", self.at_most)]
        return " and ".join(f"{words} {value:g}" for words, value in parts if value is not None)

    def reached(self, value: float) -> bool:
        low = -math.inf if self.at_least is None else self.at_least
        high = math.inf if self.at_most is None else self.at_most
        return bool(self.thresholds) and low <= value <= high  # False for NaN

    def improves(self, value: float, best: float | None) -> bool:
        if math.isnan(value):
            return False
        return best is None or (value > best if self.better == LARGER else value < best)


class StopWhen:
    """A callback that counts the values of one metric and stops the run by a StopRule."""

    def __init__(self, rule: StopRule, *, evaluates: bool = True) -> None:
        """evaluates: whether this run has evaluations"""
        if rule.metric.startswith("eval/") and not evaluates:
            raise ConfigError(
                f"training.stop_when.metric={rule.metric} is measured by evaluations, and this run has none: set "
                "training.evaluate.every_env_steps, or another metric such as collect/return_mean"
            )
        self.rule = rule
        self.in_a_row = 0  # values that reach the threshold
        self.best: float | None = None
        self.best_step = 0
        self.best_updates: int | None = None
        self.waited = 0  # values since the best
        self.reason = ""  # of the stop
        self._missed, self._known = 0, set[str]()

    def on_begin(self, run: RunView) -> None:
        if self.reason:  # resumed with the same rule
            run.stop(self.reason)

    def on_log(self, metrics: Mapping[str, float], run: RunView) -> None:
        if self.rule.metric.startswith("eval/"):
            return
        self._known |= set(metrics)
        self._missed = -1 if self.rule.metric in metrics or self._missed < 0 else self._missed + 1
        if self._missed == MISSED_LINES:
            run.say(
                f"training.stop_when.metric={self.rule.metric} has not been logged so far."
                f"{closest(self.rule.metric, sorted(self._known))}"
            )
        self._watch(metrics, run)

    def on_evaluation(self, metrics: Mapping[str, float], run: RunView) -> None:
        if self.rule.metric.startswith("eval/") and self.rule.metric not in metrics:
            run.say(
                f"training.stop_when.metric={self.rule.metric} is not measured by evaluations."
                f"{closest(self.rule.metric, sorted(metrics))}"
            )
        self._watch(metrics, run)

    def _watch(self, metrics: Mapping[str, float], run: RunView) -> None:
        if self.rule.metric not in metrics or run.step < self.rule.after_env_steps or self.reason:
            return
        value = float(metrics[self.rule.metric])
        self.in_a_row = self.in_a_row + 1 if self.rule.reached(value) else 0
        if self.rule.improves(value, self.best):
            self.best, self.best_step, self.waited = value, run.step, 0
            self.best_updates = run.counters["updates"]
        else:
            self.waited += 1
        self.reason = self._why(value)
        if self.reason:
            run.stop(self.reason)

    def _why(self, value: float) -> str:
        rule = self.rule
        if rule.thresholds and self.in_a_row >= rule.times:
            times = f", {rule.times} times in a row" if rule.times > 1 else ""
            return f"{rule.metric} is {value:g}, {rule.thresholds}{times}"
        if rule.patience is not None and self.waited >= rule.patience:
            at = point_of(self.best_step, self.best_updates)
            found = "never a number" if self.best is None else f"{self.best:g} at {at}"
            return f"{rule.metric} has not improved {rule.patience} times in a row (best: {found})"
        return ""

    def get_state(self) -> dict[str, Any]:
        return {
            "rule": asdict(self.rule),
            "in_a_row": self.in_a_row,
            "best": self.best,
            "best_step": self.best_step,
            "best_updates": self.best_updates,
            "waited": self.waited,
            "reason": self.reason,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue the counts; under another rule, values count from now on, and an earlier stop is void."""
        if dict(state["rule"]) != asdict(self.rule):
            return
        self.in_a_row, self.waited = int(state["in_a_row"]), int(state["waited"])
        self.best = None if state["best"] is None else float(state["best"])
        self.best_step, self.reason = int(state["best_step"]), str(state["reason"])
        self.best_updates = state.get("best_updates")
