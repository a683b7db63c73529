"""The curves of a report: returns by task, and one little panel for every metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rl_lab.tools.figure_style import (
    COLORS,
    color_of,
    colors,
    cut,
    figure_file,
    legend,
    name_legend,
    say_nothing,
    step_axis,
    value_axis,
)
from rl_lab.tools.report.curves import Curve, combine, smooth, smoothing_window

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rl_lab.tools.report.runs import RunData


MOST_PANELS = 48  # in one picture of small multiples
TRAINING, EVALUATION = "collect/return_mean", "eval/return_mean"


def draw_learning_curve(runs: Sequence[RunData], path: Path) -> bool:
    """Returns over environment steps, a panel for each task: training as a light line, evaluation as a strong one."""
    tasks = list(dict.fromkeys(run.task.full_name for run in runs))
    named = color_of(
        list(groups_of(runs)) if len(tasks) == 1 else list(dict.fromkeys(r.method for r in runs))
    )
    if len(tasks) == 1:
        with figure_file(path, 9.0, 4.2) as figure:
            axes = figure.add_subplot()
            drawn = _draw_task(axes, runs, named)
            axes.set_xlabel("environment steps (agent decisions)")
            axes.set_ylabel("episode return")
            if drawn:
                _learning_legend(figure, axes)
        return drawn
    columns = 2 if len(tasks) == 4 else min(3, len(tasks))
    rows = math.ceil(len(tasks) / columns)
    with figure_file(path, 9.0, 2.5 * rows + 0.6) as figure:
        grid = np.atleast_1d(figure.subplots(rows, columns)).ravel()
        found = []
        for axes, task in zip(grid, tasks):
            found.append(_draw_task(axes, [run for run in runs if run.task.full_name == task], named))
            axes.set_title(cut(task, 40), loc="left")
            axes.tick_params(labelsize=7)
            step_axis(axes, ticks=4)
        for axes in grid[len(tasks) :]:
            axes.set_visible(False)
        figure.supxlabel("environment steps (agent decisions)", fontsize=9, color="#4a4f55")
        figure.supylabel("episode return", fontsize=9, color="#4a4f55")
        name_legend(figure, named)
    return any(found)


def _draw_task(axes: Axes, runs: Sequence[RunData], named: dict[str, str]) -> bool:
    """Runs of one task; each group in its own colour, or in its method's."""
    drawn = False
    for group, members in groups_of(runs).items():
        color = named[group] if group in named else named[members[0].method]
        several = len(members) > 1
        training = [smoothed(run.metrics.curve(TRAINING)) for run in members]
        evaluation = [run.metrics.curve(EVALUATION).finite() for run in members]
        evaluated = any(len(curve) for curve in evaluation)
        drawn = drawn or evaluated or any(len(curve) for curve in training)
        name = f"{group} ({len(members)} seeds)" if several else group
        if not several:
            raw = members[0].metrics.curve(TRAINING).finite()
            axes.plot(raw.x, raw.y, color=color, alpha=0.22, linewidth=0.8)
        draw_seeds(axes, training, color, faint=evaluated, label=None if evaluated else f"{name}, training")
        if evaluated:
            spread = members[0].metrics.curve("eval/return_std").finite() if not several else None
            _draw_evaluation(axes, evaluation, spread, color, name)
    if not drawn:
        say_nothing(axes, "no finished episode yet")
    step_axis(axes)
    return drawn


def draw_seeds(axes: Axes, curves: Sequence[Curve], color: str, *, faint: bool, label: str | None) -> None:
    """Each seed thin, and their mean with its 95 % interval."""
    curves = [curve for curve in curves if len(curve)]
    if len(curves) > 1:
        for curve in curves:
            axes.plot(curve.x, curve.y, color=color, alpha=0.25, linewidth=0.7)
    band = combine(curves)
    if band is None:
        return
    if band.count > 1 and not faint:
        axes.fill_between(band.x, band.low, band.high, color=color, alpha=0.15, linewidth=0)
    axes.plot(
        band.x,
        band.mean,
        color=color,
        alpha=0.55 if faint else 1.0,
        linewidth=1.2 if faint else 1.8,
        label=label,
    )


def _draw_evaluation(
    axes: Axes, curves: Sequence[Curve], spread: Curve | None, color: str, label: str
) -> None:
    """Seeds: mean and its 95 % interval. One run: its mean and the standard deviation over episodes."""
    curves = [curve for curve in curves if len(curve)]
    band = combine(curves)
    if band is None:  # seeds that never overlap
        for curve in curves:
            axes.plot(curve.x, curve.y, color=color, linewidth=1.8)
        return
    marker = "o" if len(band.x) <= 60 else None
    axes.plot(
        band.x,
        band.mean,
        color=color,
        linewidth=2.0,
        marker=marker,
        markersize=3.5,
        label=f"{label}, evaluation",
    )
    low, high = band.low, band.high
    if spread is not None and len(spread):
        deviation = np.interp(band.x, spread.x, spread.y)
        low, high = band.mean - deviation, band.mean + deviation
    axes.fill_between(band.x, low, high, color=color, alpha=0.15, linewidth=0)


def _learning_legend(figure: Figure, axes: Axes) -> None:
    from matplotlib.lines import Line2D

    handles, labels = axes.get_legend_handles_labels()
    if any(label.endswith(", evaluation") for label in labels):
        handles.append(Line2D([], [], color="#808080", alpha=0.6, linewidth=1.2))
        labels.append("training, smoothed")
    # Below the picture: a learning curve ends in the top right and starts in the bottom left.
    legend(figure, handles, labels, "outside lower left")


def draw_small_multiples(
    runs: Sequence[RunData], keys: Sequence[str], path: Path, *, full_names: bool = False
) -> list[str]:
    """One little panel per metric, named without its prefix; returns the keys that were drawn."""
    keys = keys[:MOST_PANELS]
    columns = 4  # also for fewer keys, so that panels have one size on the page
    rows = math.ceil(len(keys) / columns)
    groups = groups_of(runs)
    named = color_of(list(groups))
    with figure_file(path, 2.6 * columns + 0.2, 1.75 * rows + (0.35 if len(groups) > 1 else 0.1)) as figure:
        grid = np.atleast_1d(figure.subplots(rows, columns)).ravel()
        for axes, key in zip(grid, keys):
            drawn = []
            for group, members in groups.items():
                curves = [run.metrics.curve(key).finite() for run in members]
                drawn += [curve.y for curve in curves if len(curve)]
                if len(members) == 1:
                    axes.plot(curves[0].x, curves[0].y, color=named[group], alpha=0.25, linewidth=0.7)
                draw_seeds(axes, [smoothed(curve) for curve in curves], named[group], faint=False, label=None)
            axes.set_title(cut(key, 34) if full_names else panel_title(key), loc="left", fontsize=8)
            axes.tick_params(labelsize=7)
            value_axis(axes, drawn)
            step_axis(axes, ticks=3)
        for axes in grid[len(keys) :]:
            axes.set_visible(False)
        if len(groups) > 1:
            name_legend(figure, named)
    return list(keys)


def groups_of(runs: Sequence[RunData]) -> dict[str, list[RunData]]:
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    return groups


def smoothed(curve: Curve) -> Curve:
    return smooth(curve, smoothing_window(len(curve.finite())))


def panel_title(key: str) -> str:
    return cut(key.partition("/")[2] or key, 34)


# --------------------
# The picture of a report that says how fast runs were and what their time went to.


def draw_time(runs: Sequence[RunData], path: Path) -> bool:
    """How fast, over the run, and what the wall time went to; seeds together."""
    groups = groups_of(runs)
    shares = {group: mean_shares([time_shares(run) for run in members]) for group, members in groups.items()}
    timed = [run for run in runs if len(run.metrics.curve("time/env_steps_per_second").finite())]
    if not timed and not any(shares.values()):
        return False
    with figure_file(path, 9.0, max(2.6, 1.2 + 0.55 * len(groups))) as figure:
        left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 1.7))
        for axes, key in ((left, "time/env_steps_per_second"), (middle, "time/updates_per_second")):
            for color, members in zip(colors(), groups.values()):
                curves = [run.metrics.curve(key).finite() for run in members]
                if len(members) == 1:
                    axes.plot(curves[0].x, curves[0].y, color=color, alpha=0.22, linewidth=0.7)
                draw_seeds(axes, [smoothed(curve) for curve in curves], color, faint=False, label=None)
            axes.set_title(panel_title(key).replace("_", " "), loc="left", fontsize=9)
            axes.set_ylim(bottom=0)
            axes.tick_params(labelsize=7)
            step_axis(axes, ticks=3)
        _draw_shares(right, shares)
        if len(groups) > 1:
            name_legend(figure, dict(zip(groups, colors())))
    return True


def time_shares(run: RunData) -> dict[str, float]:
    """Section -> mean share of the wall time over the run; what no section measured is "other"."""
    keys = [key for key in run.metrics.names() if key.startswith("time/") and key.endswith("_share")]
    lines = [row for row in run.metrics.rows if "time/env_steps_per_second" in row]
    if not keys or not lines:
        return {}
    # A section that did not run between two lines is not in the second one: it took no time there.
    means = {
        key.removeprefix("time/").removesuffix("_share"): float(
            np.mean([float(row.get(key) or 0.0) for row in lines])
        )
        for key in keys
    }
    means = dict(sorted(means.items(), key=lambda item: -item[1]))
    rest = 1.0 - sum(means.values())
    return {**means, "other": rest} if rest > 0 else means


def mean_shares(shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for share in shares for name in share)
    return {name: float(np.mean([share.get(name, 0.0) for share in shares if share])) for name in names}


def _draw_shares(axes: Axes, shares: Mapping[str, Mapping[str, float]]) -> None:
    """One bar per group, from its greatest section to "other"; a legend names the sections."""
    sections = list(
        dict.fromkeys(section for share in shares.values() for section in share if section != "other")
    )
    names = [*sections, "other"]
    shades = {name: "#c9cdd2" if name == "other" else COLORS[i % len(COLORS)] for i, name in enumerate(names)}
    for row, (group, share) in enumerate(shares.items()):
        start = 0.0
        for name in names:
            value = share.get(name, 0.0)
            label = name.replace("_", " ") if row == 0 else None
            axes.barh(row, value, left=start, height=0.5, color=shades[name], label=label)
            if value > 0.06:
                ink = "#24292e" if name == "other" else "white"
                axes.text(
                    start + value / 2, row, f"{value:.0%}", ha="center", va="center", color=ink, fontsize=7
                )
            start += value
        if len(shares) > 1:
            axes.text(0, row - 0.29, cut(group, 60), fontsize=7, va="bottom", color="#4a4f55")
    axes.set_title("where the wall time went", loc="left", fontsize=9)
    # A lone bar would fill the whole height.
    axes.set_ylim(max(len(shares), 2) - 0.4, -0.7 if len(shares) > 1 else -0.4)
    axes.set_xlim(0, max([1.0, *(sum(share.values()) for share in shares.values())]))
    axes.set_axis_off()
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(-0.02, 0.58 if len(shares) == 1 else 0.02),
        ncols=4,
        fontsize=7,
        handlelength=1,
    )
