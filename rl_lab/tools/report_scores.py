"""How well methods did, over seeds and tasks: one score a run, and what they come to together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rl_lab.tools import statistics
from rl_lab.tools.published import Task, benchmarks, normalisation, published
from rl_lab.tools.report_figures import EVALUATION, TRAINING
from rl_lab.tools.report_page import Table
from rl_lab.tools.statistics import Interval
from rl_lab.tools.words import NONE, bounds, count, interval, number, short

if TYPE_CHECKING:
    from rl_lab.tools.report_runs import RunData

WINDOW = 0.1  # the share of a run, at its end, that its score is the mean of
FEW_TASKS = 2  # of a suite, up to which every published score gets a line with its source
TITLES = {"mean": "mean", "median": "median", "iqm": "IQM", "optimality_gap": "optimality gap"}


@dataclass
class MethodScores:
    """The runs of one method: return by task, and the same as normalised scores where every task has them."""

    method: str
    tasks: dict[Task, np.ndarray]  # task -> (runs,)
    frames: dict[Task, int]  # the most that a run of the task has seen
    aggregates: dict[str, Interval] = field(default_factory=dict)  # of normalised scores

    @property
    def normalised(self) -> dict[Task, np.ndarray] | None:
        scales = {task: normalisation(task) for task in self.tasks}
        if not all(scales.values()):
            return None
        return {task: scales[task](values) for task, values in self.tasks.items()}  # type: ignore[misc]


def final_score(run: RunData) -> float | None:
    """The mean return over the last tenth of a run's steps: of evaluations, or of training where there were none."""
    for key in (EVALUATION, TRAINING):
        curve = run.metrics.curve(key).finite()
        if len(curve):
            late = curve.x >= (1.0 - WINDOW) * max(float(curve.x[-1]), run.metrics.last("step") or 0.0)
            return float(curve.y[late].mean()) if late.any() else float(curve.y[-1])
    return None


def method_scores(runs: Sequence[RunData]) -> list[MethodScores]:
    """Methods in the order of the runs; runs without a finished episode are left out."""
    found: dict[str, dict[Task, list[float]]] = {}
    frames: dict[tuple[str, Task], int] = {}
    for run in runs:
        score = final_score(run)
        if score is not None:
            found.setdefault(run.method, {}).setdefault(run.task, []).append(score)
            seen = int(run.metrics.last("frames") or run.metrics.last("step") or 0)
            frames[run.method, run.task] = max(seen, frames.get((run.method, run.task), 0))
    methods = []
    for method, tasks in found.items():
        scores = MethodScores(
            method,
            {task: np.array(values) for task, values in tasks.items()},
            {task: frames[method, task] for task in tasks},
        )
        normalised = scores.normalised
        if normalised is not None:
            scores.aggregates = statistics.intervals(list(normalised.values()), statistics.NORMALISED)
        methods.append(scores)
    return methods


def scale_name(methods: Sequence[MethodScores]) -> str:
    """What the scores that can be compared over tasks are called; "" where some task has none."""
    scales = [normalisation(task) for scores in methods for task in scores.tasks]
    if not scales or any(scale is None for scale in scales):
        return ""
    names = {scale.name for scale in scales if scale is not None}
    return names.pop() if len(names) == 1 else "normalised"


def task_table(methods: Sequence[MethodScores]) -> Table:
    """One row for each method on each task: its return over seeds."""
    rows = []
    for scores in methods:
        for task, values in scores.tasks.items():
            found = statistics.intervals([values], {"mean": statistics.mean, "iqm": statistics.iqm})
            scale = normalisation(task)
            rows.append(
                (
                    scores.method,
                    task.full_name,
                    str(len(values)),
                    count(scores.frames[task]),
                    number(found["mean"].value),
                    bounds(found["mean"].low, found["mean"].high),
                    number(float(np.median(values))),
                    number(found["iqm"].value),
                    f"{number(float(values.min()))} to {number(float(values.max()))}",
                    NONE if scale is None else number(float(scale(values.mean()))),
                )
            )
    header = ("method", "task", "seeds", "frames", "mean", "95 %", "median", "IQM", "range", "normalised")
    return Table(header, rows, numbers=range(2, len(header)))


def aggregate_table(methods: Sequence[MethodScores]) -> Table | None:
    """Normalised scores over all tasks, with intervals; None where some task has no normalisation."""
    if not scale_name(methods):
        return None
    rows = []
    for scores in methods:
        runs = sum(len(values) for values in scores.tasks.values())
        cells = [interval(scores.aggregates[name]) for name in TITLES]
        rows.append((scores.method, str(len(scores.tasks)), str(runs), *cells))
    header = ("method", "tasks", "runs", *TITLES.values())
    return Table(header, rows, numbers=range(1, len(header)))


def improvement_table(methods: Sequence[MethodScores]) -> Table | None:
    """How often a run of one method beats one of another, on the tasks that both have."""
    rows = []
    for first in methods:
        cells = []
        for second in methods:
            shared = [task for task in first.tasks if task in second.tasks]
            if first is second or not shared:
                cells.append(NONE)
                continue
            ours, theirs = ([scores.tasks[task] for task in shared] for scores in (first, second))
            cells.append(f"{statistics.probability_of_improvement(ours, theirs):.0%}")
        rows.append((first.method, *cells))
    if len(methods) < 2 or not any(cell != NONE for row in rows for cell in row[1:]):
        return None
    header = ("a run of … beats", *(scores.method for scores in methods))
    return Table(header, rows, numbers=range(1, len(header)))


# ---------------------------------------------------------------- beside published numbers


def published_tables(methods: Sequence[MethodScores]) -> list[Table]:
    """Ours and theirs by task, where something is published: one line each, or one line a task where there are many."""
    suites: dict[str, list[Task]] = {}
    for task in dict.fromkeys(task for scores in methods for task in scores.tasks):
        if published(task):
            suites.setdefault(task.suite, []).append(task)
    return [
        _by_agent(methods, tasks) if len(tasks) <= FEW_TASKS else _by_task(methods, tasks)
        for tasks in suites.values()
    ]


def _by_agent(methods: Sequence[MethodScores], tasks: Sequence[Task]) -> Table:
    rows: list[tuple[str, ...]] = []

    def add(task: Task, agent: str, score: float, frames: int, seeds: int | None, source: str) -> None:
        cells = (number(score), _scaled(normalisation(task), score), count(frames), str(seeds or NONE))
        rows.append((task.full_name, agent, *cells, source))

    for task in tasks:
        for scores in methods:
            if task in scores.tasks:
                values = scores.tasks[task]
                ours = f"ours: {scores.method}"
                add(task, ours, float(values.mean()), scores.frames[task], len(values), "this report")
        for row in published(task):
            add(task, row.agent, row.score, row.frames, row.seeds, row.source)
    header = ("task", "agent", "return", "normalised", "frames", "seeds", "source")
    strong = [index for index, row in enumerate(rows) if row[1].startswith("ours: ")]
    return Table(header, rows, numbers=range(2, 6), strong=strong)


def _by_task(methods: Sequence[MethodScores], tasks: Sequence[Task]) -> Table:
    """The same as a matrix of returns; sources are in `published_sources`."""
    theirs = list(dict.fromkeys((row.agent, row.frames) for task in tasks for row in published(task)))
    ours = [scores for scores in methods if any(task in scores.tasks for task in tasks)]
    rows = []
    for task in tasks:
        cells = [
            number(float(scores.tasks[task].mean())) if task in scores.tasks else NONE for scores in ours
        ]
        by_agent = {(row.agent, row.frames): row.score for row in published(task)}
        rows.append((task.name, *cells, *(number(by_agent.get(agent)) for agent in theirs)))
    header = (
        tasks[0].suite,
        *(f"ours: {scores.method}" for scores in ours),
        *(f"{agent} ({short(frames)})" for agent, frames in theirs),
    )
    return Table(
        header, rows, numbers=range(1, len(header)), title="returns; published ones after as many frames"
    )


def published_sources(methods: Sequence[MethodScores]) -> list[str]:
    """A line for each published agent that the tables show."""
    tasks = dict.fromkeys(task for scores in methods for task in scores.tasks)
    return list(dict.fromkeys(f"{row.agent}: {row.source}" for task in tasks for row in published(task)))


def published_aggregates(methods: Sequence[MethodScores]) -> Table | None:
    """Mean and median over the tasks that a method has, ours and published, where there are several."""
    rows = []
    for scores in methods:
        for block in benchmarks():
            tasks = [
                task
                for task in scores.tasks
                if task.suite == block.suite
                and task.name in block.scores
                and block.observe in ("", task.observe)
            ]
            scales = [normalisation(task) for task in tasks]
            if len(tasks) < 2 or not all(scales):
                continue
            ours = [scale(scores.tasks[task]) for scale, task in zip(scales, tasks)]  # type: ignore[misc]
            theirs = [np.array([scale(block.scores[t.name])]) for scale, t in zip(scales, tasks)]  # type: ignore[misc]
            cells = [
                f"{number(float(aggregate(ours)))} / {number(float(aggregate(theirs)))}"
                for aggregate in (statistics.mean, statistics.median)
            ]
            most = max(scores.frames[task] for task in tasks)
            rows.append(
                (
                    f"{scores.method} / {block.agent}",
                    str(len(tasks)),
                    *cells,
                    f"{count(most)} / {count(block.frames)}",
                )
            )
    header = ("ours / published", "tasks of both", "mean", "median", "frames")
    return Table(header, rows, numbers=range(1, len(header))) if rows else None


def _scaled(scale: object, value: float) -> str:
    return NONE if scale is None else number(float(scale(value)))  # type: ignore[operator]
