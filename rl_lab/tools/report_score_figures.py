"""Pictures of scores: intervals of aggregates, performance profiles, and one curve over all tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rl_lab.tools import statistics
from rl_lab.tools.curves import common_steps, values_at
from rl_lab.tools.figure_style import color_of, cut, figure_file, name_legend, step_axis
from rl_lab.tools.published import normalisation
from rl_lab.tools.report_figures import EVALUATION
from rl_lab.tools.report_scores import TITLES, MethodScores, scale_name

if TYPE_CHECKING:
    from rl_lab.tools.report_runs import RunData

MOST_METHODS = 12  # bars under one another


def draw_aggregates(methods: Sequence[MethodScores], path: Path) -> bool:
    """Mean, median, IQM and optimality gap with their intervals: one panel each, one bar a method.

    Of normalised scores over all tasks, or of the returns where there is a single task.
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
        return False  # single runs: their bars would say nothing that the table does not
    named = color_of(list(found))
    keys = [key for key in TITLES if key in next(iter(found.values()))]
    with figure_file(path, 9.0, 0.95 + 0.34 * len(found)) as figure:
        panels = np.atleast_1d(figure.subplots(1, len(keys), sharey=True))
        for axes, key in zip(panels, keys):
            for row, (method, aggregates) in enumerate(found.items()):
                one = aggregates[key]
                low, high = (one.low, one.high) if one.bounded else (one.value, one.value)
                axes.barh(row, high - low, left=low, height=0.55, color=named[method], alpha=0.45)
                axes.plot(
                    [one.value, one.value], [row - 0.275, row + 0.275], color=named[method], linewidth=2.4
                )
            axes.set_title(TITLES[key] + (" ↓" if key == "optimality_gap" else " ↑"), loc="left", fontsize=9)
            axes.set_yticks(range(len(found)), [cut(method, 34) for method in found])
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
    """The share of runs that score more than τ, over τ. Normalised, or of returns where there is a single task."""
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
    with figure_file(path, 9.0, 3.2) as figure:
        axes = figure.add_subplot()
        for method, tasks in scored.items():
            share, under, over = statistics.performance_profile(tasks, thresholds)
            axes.plot(thresholds, share, color=named[method], linewidth=1.8)
            axes.fill_between(thresholds, under, over, color=named[method], alpha=0.15, linewidth=0)
        axes.set_xlabel(f"{name or 'return'} score τ" if name else "return τ")
        axes.set_ylabel("share of runs above τ")
        axes.set_ylim(-0.02, 1.02)
        axes.margins(x=0.01)
        name_legend(figure, named)
    return True


def draw_efficiency(runs: Sequence[RunData], path: Path) -> bool:
    """IQM of normalised evaluation scores over steps, all tasks together; only where there are several."""
    methods: dict[str, dict[str, list[RunData]]] = {}
    for run in runs:
        if normalisation(run.task) is None:
            return False
        methods.setdefault(run.method, {}).setdefault(run.task.full_name, []).append(run)
    if max((len(tasks) for tasks in methods.values()), default=0) < 2:
        return False
    named = color_of(list(methods))
    drawn = False
    with figure_file(path, 9.0, 3.4) as figure:
        axes = figure.add_subplot()
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
            value, low, high = statistics.band(scaled, statistics.iqm)
            axes.plot(x, value, color=named[method], linewidth=1.8)
            axes.fill_between(x, low, high, color=named[method], alpha=0.15, linewidth=0)
            drawn = True
        axes.set_xlabel("environment steps (agent decisions)")
        axes.set_ylabel("IQM of normalised scores")
        step_axis(axes)
        name_legend(figure, named)
    return drawn
