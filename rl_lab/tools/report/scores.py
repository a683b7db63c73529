"""Scores of methods over seeds and tasks: one per run, aggregates, and comparison with published results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rl_lab.tools import statistics
from rl_lab.tools.published import Task, benchmarks, normalisation, published
from rl_lab.tools.report.curves import common_steps, values_at
from rl_lab.tools.report.figures import (
    EVALUATION,
    TRAINING,
    color_of,
    cut,
    forms,
    name_legend,
    step_axis,
)
from rl_lab.tools.report.page import Table
from rl_lab.tools.statistics import Interval
from rl_lab.tools.terminal import NONE, bounds, count, interval, number, short

if TYPE_CHECKING:
    from rl_lab.tools.report.runs import RunData


WINDOW = 0.1  # a run's score is the mean over this last part of the run
FEW_TASKS = 2  # up to this number per suite, every published score gets a row with its source
TITLES = {"mean": "mean", "median": "median", "iqm": "IQM", "optimality_gap": "optimality gap"}


@dataclass
class MethodScores:
    """Returns of one method by task, and normalised scores if every task has a normalisation."""

    method: str
    tasks: dict[Task, np.ndarray]  # task -> (runs,)
    frames: dict[Task, int]  # maximum over the runs of the task
    aggregates: dict[str, Interval] = field(default_factory=dict)  # of normalised scores

    @property
    def normalised(self) -> dict[Task, np.ndarray] | None:
        scales = {task: normalisation(task) for task in self.tasks}
        if not all(scales.values()):
            return None
        return {task: scales[task](values) for task, values in self.tasks.items()}  # type: ignore[misc]


def final_score(run: RunData) -> float | None:
    """Return the mean evaluation return over the last tenth of a run (training return without evaluations)."""
    for key in (EVALUATION, TRAINING):
        curve = run.metrics.curve(key).finite()
        if len(curve):
            late = curve.x >= (1.0 - WINDOW) * max(float(curve.x[-1]), run.metrics.last("step") or 0.0)
            return float(curve.y[late].mean()) if late.any() else float(curve.y[-1])
    return None


def method_scores(runs: Sequence[RunData]) -> list[MethodScores]:
    """Return the methods in the order of the runs; runs without a finished episode are skipped."""
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
    """Return the name of the normalised score; "" if a task has no normalisation."""
    scales = [normalisation(task) for scores in methods for task in scores.tasks]
    if not scales or any(scale is None for scale in scales):
        return ""
    names = {scale.name for scale in scales if scale is not None}
    return names.pop() if len(names) == 1 else "normalised"


def task_table(methods: Sequence[MethodScores]) -> Table:
    """Build one row per method and task: its return over seeds."""
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
    return Table(header, rows, right=range(2, len(header)))


def aggregate_table(methods: Sequence[MethodScores]) -> Table | None:
    """Build the table of normalised scores over all tasks; None if a task has no normalisation."""
    if not scale_name(methods):
        return None
    rows = []
    for scores in methods:
        runs = sum(len(values) for values in scores.tasks.values())
        cells = [interval(scores.aggregates[name]) for name in TITLES]
        rows.append((scores.method, str(len(scores.tasks)), str(runs), *cells))
    header = ("method", "tasks", "runs", *TITLES.values())
    return Table(header, rows, right=range(1, len(header)))


def improvement_table(methods: Sequence[MethodScores]) -> Table | None:
    """Build the table of the probability that a run of one method beats one of another on common tasks."""
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
    return Table(header, rows, right=range(1, len(header)))


# --- Published results ---


def published_tables(methods: Sequence[MethodScores]) -> list[Table]:
    """Build tables of our and published returns per suite.

    They have one row per score, or one row per task for many tasks.
    """
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
    return Table(header, rows, right=range(2, 6), strong=strong)


def _by_task(methods: Sequence[MethodScores], tasks: Sequence[Task]) -> Table:
    """Build a matrix of returns, tasks × agents; the sources are in `published_sources`."""
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
    return Table(header, rows, right=range(1, len(header)), title="returns; published ones with their frames")


def published_sources(methods: Sequence[MethodScores]) -> list[str]:
    """Return one line per published agent in the tables."""
    tasks = dict.fromkeys(task for scores in methods for task in scores.tasks)
    return list(dict.fromkeys(f"{row.agent}: {row.source}" for task in tasks for row in published(task)))


def published_aggregates(methods: Sequence[MethodScores]) -> Table | None:
    """Build the table of mean and median over common tasks, ours and published.

    None without several tasks.
    """
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
    header = ("ours / published", "common tasks", "mean", "median", "frames")
    return Table(header, rows, right=range(1, len(header))) if rows else None


def _scaled(scale: object, value: float) -> str:
    return NONE if scale is None else number(float(scale(value)))  # type: ignore[operator]


# --- Figures ---

MOST_METHODS = 12  # bars in one panel


def draw_aggregates(methods: Sequence[MethodScores], path: Path) -> bool:
    """Plot mean, median, IQM and optimality gap with their intervals: one panel each, one bar per method.

    Uses normalised scores over all tasks, or returns for a single task.
    """
    methods = methods[:MOST_METHODS]
    name = scale_name(methods)
    if not name and len({task for scores in methods for task in scores.tasks}) != 1:
        return False
    found = {
        scores.method: scores.aggregates
        if name
        else statistics.intervals(list(scores.tasks.values()), statistics.OF_ONE_TASK)
        for scores in methods
    }
    if not any(one.bounded for aggregates in found.values() for one in aggregates.values()):
        return False  # single runs: the bars would show no more than the table
    named = color_of(list(found))
    keys = [key for key in TITLES if key in next(iter(found.values()))]
    for form in forms(path):
        shape = (len(keys), 1) if form.narrow else (1, len(keys))
        with form.figure(9.0, 0.4 + shape[0] * (0.55 + 0.34 * len(found))) as figure:
            panels = np.atleast_1d(figure.subplots(*shape, sharey=True)).ravel()
            for axes, key in zip(panels, keys):
                for row, (method, aggregates) in enumerate(found.items()):
                    one = aggregates[key]
                    low, high = (one.low, one.high) if one.bounded else (one.value, one.value)
                    axes.barh(row, high - low, left=low, height=0.55, color=named[method], alpha=0.45)
                    axes.plot(
                        [one.value, one.value], [row - 0.275, row + 0.275], color=named[method], linewidth=2.4
                    )
                axes.set_title(
                    TITLES[key] + (" ↓" if key == "optimality_gap" else " ↑"), loc="left", fontsize=9
                )
                axes.set_yticks(
                    range(len(found)), [cut(method, 20 if form.narrow else 34) for method in found]
                )
                axes.tick_params(labelsize=8)
                axes.locator_params(axis="x", nbins=4)
                axes.grid(axis="y", visible=False)
                axes.margins(x=0.08)
            panels[0].set_ylim(len(found) - 0.5, -0.5)
            figure.supxlabel(
                f"{name or 'return'}; bars are 95 % bootstrap intervals", fontsize=8, color="#4a4f55"
            )
    return True


def draw_profiles(methods: Sequence[MethodScores], path: Path) -> bool:
    """Plot the share of runs above τ over τ, for normalised scores, or for returns of a single task."""
    name = scale_name(methods)
    if not name and len({task for scores in methods for task in scores.tasks}) != 1:
        return False
    scored = {
        scores.method: list(((scores.normalised or {}) if name else scores.tasks).values())
        for scores in methods
    }
    everything = np.concatenate([values for tasks in scored.values() for values in tasks])
    if len(everything) < 3:
        return False
    low, high = float(everything.min()), float(everything.max())
    margin = 0.05 * (high - low) or 0.5
    thresholds = np.linspace(min(0.0, low - margin) if name else low - margin, high + margin, 201)
    named = color_of(list(scored))
    found = {method: statistics.performance_profile(tasks, thresholds) for method, tasks in scored.items()}
    for form in forms(path):
        with form.figure(9.0, 3.2) as figure:
            axes = figure.add_subplot()
            for method, (share, under, over) in found.items():
                axes.plot(thresholds, share, color=named[method], linewidth=1.8)
                axes.fill_between(thresholds, under, over, color=named[method], alpha=0.15, linewidth=0)
            axes.set_xlabel(f"{name or 'return'} score τ" if name else "return τ")
            axes.set_ylabel("share of runs above τ")
            axes.set_ylim(-0.02, 1.02)
            axes.margins(x=0.01)
            name_legend(figure, named)
    return True


def draw_efficiency(runs: Sequence[RunData], path: Path) -> bool:
    """Plot the IQM of normalised evaluation scores over steps, over all tasks; only for several tasks."""
    methods: dict[str, dict[str, list[RunData]]] = {}
    for run in runs:
        if normalisation(run.task) is None:
            return False
        methods.setdefault(run.method, {}).setdefault(run.task.full_name, []).append(run)
    if max((len(tasks) for tasks in methods.values()), default=0) < 2:
        return False
    named = color_of(list(methods))
    found = {}
    for method, tasks in methods.items():
        curves = {
            task: [run.metrics.curve(EVALUATION).finite() for run in members]
            for task, members in tasks.items()
        }
        x = common_steps([curve for members in curves.values() for curve in members])
        if x is None or not all(any(len(c) for c in members) for members in curves.values()):
            continue
        scaled = []
        for task, members in curves.items():
            scale = normalisation(tasks[task][0].task)
            assert scale is not None
            scaled.append(scale(values_at(members, x)))
        found[method] = x, *statistics.band(scaled, statistics.iqm)
    for form in forms(path):
        with form.figure(9.0, 3.4) as figure:
            axes = figure.add_subplot()
            for method, (x, value, low, high) in found.items():
                axes.plot(x, value, color=named[method], linewidth=1.8)
                axes.fill_between(x, low, high, color=named[method], alpha=0.15, linewidth=0)
            axes.set_xlabel("environment steps (agent decisions)")
            axes.set_ylabel("IQM of normalised scores")
            step_axis(axes)
            name_legend(figure, named)
    return bool(found)
