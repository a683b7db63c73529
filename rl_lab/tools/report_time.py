"""The picture of a report that says how fast runs were and what their time went to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rl_lab.tools.figure_style import COLORS, colors, cut, figure_file, name_legend, step_axis
from rl_lab.tools.report_figures import draw_seeds, groups_of, panel_title, smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from rl_lab.tools.report_runs import RunData


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
