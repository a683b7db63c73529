"""Published scores by task and the normalisation of returns.

The data and their sources are in published.yaml, and the returns of single seeds in published_curves.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rl_lab.environments.task_names import with_suite

DATA = Path(__file__).with_name("published.yaml")
CURVES = Path(__file__).with_name("published_curves.yaml")
ATARI = ("atari", "atari100k")
RETURN = "return_mean"


@dataclass(frozen=True)
class Normalisation:
    """Maps a return to a score: `low` (random agent) becomes 0, `high` (human, or the maximum) becomes 1."""

    low: float
    high: float
    name: str  # name of the score: human-normalised, …
    source: str

    def __call__(self, value: Any) -> Any:
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Published:
    """One agent's published score on one task."""

    agent: str
    score: float
    frames: int
    source: str
    seeds: int | None = None


@dataclass(frozen=True)
class Task:
    """The task of a run's config with RL Lab's names; suite is "" for a plain Gymnasium id."""

    suite: str
    name: str
    observe: str = ""

    @property
    def full_name(self) -> str:
        return f"{self.suite}/{self.name}" if self.suite else self.name

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Task:
        """config: flat, dotted path -> value."""
        task = config.get("environment.task")
        if not isinstance(task, str):
            return cls("", str(task or "unknown"))
        suite, slash, name = with_suite(task, config.get("environment.suite")).partition("/")
        if not slash or ":" in suite:
            return cls("", task)
        if suite in ATARI:
            name = _games().get(_plain(name), name)
        if suite == "dmc":
            name = name.replace("-", "_")
            name = f"ball_in_{name}" if name.startswith("cup_") else name
        return cls(suite, name, str(config.get("environment.observe") or ""))


@dataclass(frozen=True)
class Benchmark:
    """Published results of one agent over the tasks of a suite."""

    suite: str
    agent: str
    frames: int
    source: str
    scores: dict[str, float]
    observe: str = ""
    seeds: int | None = None
    metric: str = RETURN  # what the scores are: a mean return, or another statistic of episodes
    aggregates: dict[str, float] = field(default_factory=dict)  # of normalised scores


def normalisation(task: Task) -> Normalisation | None:
    """Return the normalisation of a task; None if nothing is published."""
    suite = "atari" if task.suite in ATARI else task.suite
    table = _data()["normalisation"].get(suite)
    if table is None:
        return None
    bounds = table["every_task"] if "every_task" in table else table["scores"].get(task.name)
    if bounds is None:
        return None
    name = "human-normalised" if suite == "atari" else "normalised"
    return Normalisation(float(bounds[0]), float(bounds[1]), name, table["source"])


def published(task: Task, metric: str = RETURN) -> list[Published]:
    """Return the published scores of a task, fewest frames first. metric: returns, or another statistic by name."""
    found = [
        Published(block.agent, block.scores[task.name], block.frames, block.source, block.seeds)
        for block in benchmarks()
        if block.suite == task.suite
        and block.metric == metric
        and task.name in block.scores
        and (not block.observe or block.observe == task.observe)
    ]
    return sorted(found, key=lambda row: (row.frames, -row.score))


@cache
def benchmarks() -> tuple[Benchmark, ...]:
    return tuple(Benchmark(**block) for block in _data()["results"])


@dataclass(frozen=True)
class PublishedCurve:
    """Returns of every published seed of one agent on one task, at several numbers of frames."""

    agent: str
    source: str
    points: dict[int, list[float]]  # frames -> one value per seed


def published_curves(task: Task) -> list[PublishedCurve]:
    """Return the published returns of single seeds on a task."""
    return [
        PublishedCurve(block["agent"], block["source"], block["points"][task.name])
        for block in _curves()
        if block["suite"] == task.suite
        and task.name in block["points"]
        and block.get("observe", "") in ("", task.observe)
    ]


@cache
def _curves() -> list[dict[str, Any]]:
    content = yaml.safe_load(CURVES.read_text(encoding="utf-8"))
    blocks: list[dict[str, Any]] = content["curves"]
    return blocks


@cache
def _data() -> dict[str, Any]:
    content = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


@cache
def _games() -> dict[str, str]:
    return {_plain(game): game for game in _data()["normalisation"]["atari"]["scores"]}


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(" ", "")
