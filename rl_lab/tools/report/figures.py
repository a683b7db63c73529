"""Figures of a report: learning curves by task, small multiples of all metrics, and timing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_lab.tools.report.curves import Curve, combine, smooth, smoothing_window
from rl_lab.utils.media import png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rl_lab.tools.report.runs import RunData


# --- Style of all figures ---
# Style and helpers shared by all figures; uses matplotlib's object interface, so no window is opened.


# Okabe and Ito's palette (2008), which is safe for colour-blind readers, darkest first.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5A5A5A")
DPI = 144
NARROW = 3.8  # inches: the width of a figure that a phone shows
INK, SOFT = "#24292e", "#6a7077"
DASHED = (0, (3, 1.5))
LOG_RANGE = 1e3  # a positive metric with a larger range is drawn on a logarithmic axis

_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#9aa0a6",
    "axes.grid": True,
    "axes.labelcolor": "#4a4f55",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "font.size": 9,
    "grid.color": "#e6e8eb",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "lines.solid_capstyle": "round",
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


@contextmanager
def figure_file(path: Path, width: float, height: float) -> Iterator[Figure]:
    """Create a figure of `width` × `height` inches; the context writes it to `path` as PNG on exit."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
        yield figure
        canvas = FigureCanvasAgg(figure)
        canvas.draw()  # `savefig` would draw twice
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(np.asarray(canvas.buffer_rgba())[..., :3]))


@dataclass(frozen=True)
class Form:
    """One of the two pictures of a figure: for a page, or for a phone, with its panels in one column."""

    path: Path
    narrow: bool = False

    def figure(self, width: float, height: float) -> AbstractContextManager[Figure]:
        """Return `figure_file` of this picture; `width` is that of the wide one."""
        return figure_file(self.path, NARROW if self.narrow else width, height)

    def columns(self, wide: int) -> int:
        return 1 if self.narrow else wide

    def cut(self, text: str, length: int) -> str:
        """Return `cut` of a text; `length` is that of the wide picture."""
        return cut(text, min(length, 36) if self.narrow else length)


def forms(path: Path) -> tuple[Form, Form]:
    """Return the two pictures of a figure, which are drawn one after the other."""
    return Form(path), Form(narrow_file(path), narrow=True)


def narrow_file(path: Path) -> Path:
    """Return the file of a figure's picture for a phone."""
    return path.parent / "narrow" / path.name


def colors() -> Iterator[str]:
    """Cycle through the palette."""
    while True:
        yield from COLORS


def color_of(names: Sequence[str]) -> dict[str, str]:
    return dict(zip(names, colors()))


def cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def step_axis(axes: Axes, ticks: int = 6) -> None:
    """Label the x axis with 20k and 1M."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(ticks))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.margins(x=0.02)


def value_axis(axes: Axes, values: Sequence[np.ndarray]) -> None:
    """Make the y axis logarithmic if all values are positive and their range exceeds LOG_RANGE."""
    together: Any = np.concatenate(values) if values else np.ones(1)
    if together.min() > 0 and together.max() / together.min() > LOG_RANGE:
        axes.set_yscale("log")
    elif not values:
        show_placeholder(axes, "no finite value")


def show_placeholder(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color=SOFT)
    axes.tick_params(labelbottom=False, labelleft=False)
    axes.grid(False)


def name_legend(
    figure: Figure, named: dict[str, str], place: Any = "outside upper left", dashed: Sequence[str] = ()
) -> None:
    """Add a legend of names by colour; names in `dashed` get a dashed line."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=color, linewidth=2, linestyle=DASHED if name in dashed else "-")
        for name, color in named.items()
    ]
    legend(figure, handles, list(named), place)


def legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str], place: Any) -> None:
    """Add a legend with as many columns as fit: one wider than the figure would squeeze the axes."""
    letters = 14 * figure.bbox.width / figure.figure.dpi  # that fit in one line at this font size
    labels = [cut(label, min(100, int(letters) - 8)) for label in labels]
    columns = max(1, int(letters // (max(map(len, labels), default=1) + 8)))
    figure.legend(handles, labels, loc=place, ncols=min(columns, len(labels)), fontsize=8)


MOST_PANELS = 48  # in one figure of small multiples
TRAINING, EVALUATION = "collect/return_mean", "eval/return_mean"


def draw_learning_curve(runs: Sequence[RunData], path: Path) -> bool:
    """Plot returns over environment steps, one panel per task: training thin, evaluation thick."""
    tasks = list(dict.fromkeys(run.task.full_name for run in runs))
    named = color_of(
        list(groups_of(runs)) if len(tasks) == 1 else list(dict.fromkeys(r.method for r in runs))
    )
    found = []
    for form in forms(path):
        if len(tasks) == 1:
            with form.figure(9.0, 4.2) as figure:
                axes = figure.add_subplot()
                found.append(_draw_task(axes, runs, named))
                axes.set_xlabel("environment steps (agent decisions)")
                axes.set_ylabel("episode return")
                axes.set_title(form.cut(tasks[0], 60), loc="left")
                if found[-1]:
                    _learning_legend(figure, axes, runs, named)
            continue
        columns = form.columns(2 if len(tasks) == 4 else min(3, len(tasks)))
        rows = math.ceil(len(tasks) / columns)
        with form.figure(9.0, 2.5 * rows + 0.6) as figure:
            grid = np.atleast_1d(figure.subplots(rows, columns)).ravel()
            for axes, task in zip(grid, tasks):
                found.append(_draw_task(axes, [run for run in runs if run.task.full_name == task], named))
                axes.set_title(form.cut(task, 40), loc="left")
                axes.tick_params(labelsize=7)
                step_axis(axes, ticks=4)
            for axes in grid[len(tasks) :]:
                axes.set_visible(False)
            figure.supxlabel("environment steps (agent decisions)", fontsize=9, color="#4a4f55")
            figure.supylabel("episode return", fontsize=9, color="#4a4f55")
            name_legend(figure, named)
    return any(found)


def _draw_task(axes: Axes, runs: Sequence[RunData], named: dict[str, str]) -> bool:
    """Plot the runs of one task; each group in its own colour, or in that of its method."""
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
            _draw_evaluation(axes, evaluation, spread, color, name, _extremes(members[0]))
    if not drawn:
        show_placeholder(axes, "no finished episode yet")
    step_axis(axes)
    return drawn


def draw_seeds(axes: Axes, curves: Sequence[Curve], color: str, *, faint: bool, label: str | None) -> None:
    """Plot each seed as a thin line, and the mean with its 95 % interval."""
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


def _extremes(run: RunData) -> Sequence[Callable[[np.ndarray], np.ndarray]] | None:
    """Return the smallest and the largest return of each evaluation, as functions of the step; None if not logged."""
    found = [run.metrics.curve(f"eval/return_{name}").finite() for name in ("min", "max")]
    if not all(len(curve) for curve in found):
        return None

    def of(curve: Curve) -> Callable[[np.ndarray], np.ndarray]:
        return lambda x: np.interp(x, curve.x, curve.y)

    return [of(curve) for curve in found]


def _draw_evaluation(
    axes: Axes,
    curves: Sequence[Curve],
    spread: Curve | None,
    color: str,
    label: str,
    extremes: Sequence[Callable[[np.ndarray], np.ndarray]] | None = None,
) -> None:
    """Plot the mean over seeds with its 95 % interval, or one run with its standard deviation."""
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
        if extremes is not None:  # no return was outside
            low, high = np.maximum(low, extremes[0](band.x)), np.minimum(high, extremes[1](band.x))
    axes.fill_between(band.x, low, high, color=color, alpha=0.15, linewidth=0)


def _learning_legend(figure: Figure, axes: Axes, runs: Sequence[RunData], named: Mapping[str, str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles, labels = axes.get_legend_handles_labels()
    if any(label.endswith(", evaluation") for label in labels):
        color = next(iter(named.values())) if len(named) == 1 else "#808080"
        handles += [Line2D([], [], color=color, alpha=0.55, linewidth=1.2), Patch(color=color, alpha=0.15)]
        several = len({run.group for run in runs}) < len(runs)
        labels += [
            "training, smoothed",
            "95 % of the mean" if several else "± standard deviation over episodes",
        ]
    # Below the axes: a learning curve starts in the bottom left and ends in the top right.
    legend(figure, handles, labels, "outside lower left")


def draw_small_multiples(
    runs: Sequence[RunData], keys: Sequence[str], path: Path, *, full_names: bool = False
) -> list[str]:
    """Plot one small panel per metric, titled without its prefix; returns the plotted keys."""
    keys = keys[:MOST_PANELS]
    groups = groups_of(runs)
    named = color_of(list(groups))
    for form in forms(path):
        columns = form.columns(4)  # also for fewer keys, so that panels have one size on the page
        rows = math.ceil(len(keys) / columns)
        names = 0.1 if len(groups) == 1 else 0.17 * len(groups) if form.narrow else 0.35
        with form.figure(2.6 * columns + 0.2, 1.75 * rows + names) as figure:
            _draw_panels(figure, (rows, columns), keys, groups, named, full_names)
    return list(keys)


def _draw_panels(
    figure: Figure,
    shape: tuple[int, int],
    keys: Sequence[str],
    groups: Mapping[str, Sequence[RunData]],
    named: dict[str, str],
    full_names: bool,
) -> None:
    grid = np.atleast_1d(figure.subplots(*shape)).ravel()
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


def has_returns(run: RunData) -> bool:
    return any(len(run.metrics.curve(key)) for key in (TRAINING, EVALUATION))


def groups_of(runs: Sequence[RunData]) -> dict[str, list[RunData]]:
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    return groups


def smoothed(curve: Curve) -> Curve:
    return smooth(curve, smoothing_window(len(curve.finite())))


def panel_title(key: str) -> str:
    return cut(key.partition("/")[2] or key, 34)


# --- Timing ---


def draw_time(runs: Sequence[RunData], path: Path) -> bool:
    """Plot environment steps and updates per second, and the share of wall time by section.

    Seeds are averaged.
    """
    groups = groups_of(runs)
    shares = {group: mean_shares([time_shares(run) for run in members]) for group, members in groups.items()}
    timed = [run for run in runs if len(run.metrics.curve("time/env_steps_per_second").finite())]
    if not timed and not any(shares.values()):
        return False
    bars = max(2.6, 1.2 + 0.55 * len(groups))
    for form in forms(path):
        with form.figure(9.0, bars + 2 * 1.75 if form.narrow else bars) as figure:
            if form.narrow:
                panels = figure.subplots(3, 1, height_ratios=(1.75, 1.75, bars))
            else:
                panels = figure.subplots(1, 3, width_ratios=(1, 1, 1.7))
            _draw_time(figure, panels, groups, shares)
    return True


def _draw_time(
    figure: Figure,
    panels: Sequence[Axes],
    groups: Mapping[str, Sequence[RunData]],
    shares: Mapping[str, Mapping[str, float]],
) -> None:
    left, middle, right = panels
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


def time_shares(run: RunData) -> dict[str, float]:
    """Return section -> mean share of the wall time over the run; unmeasured time is "other"."""
    keys = [key for key in run.metrics.names() if key.startswith("time/") and key.endswith("_share")]
    lines = [row for row in run.metrics.rows if "time/env_steps_per_second" in row]
    if not keys or not lines:
        return {}
    # A section that did not run before a log line is missing in it: it took no time.
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
    """Draw one bar per group, from its largest section to "other", and a legend of the sections."""
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
    axes.set_title("share of wall time", loc="left", fontsize=9)
    # A single bar would fill the complete height.
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
