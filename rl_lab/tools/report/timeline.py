"""Which phase of a run was active when: from training.phases of its config and the lines `workflow/phase` of its log."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rl_lab.orchestration.run_log import PHASE
from rl_lab.tools.report.figures import COLORS, INK, Form, color_of, forms, legend, step_axis
from rl_lab.tools.report.runs import RunData
from rl_lab.tools.terminal import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COUNTERS = ("step", "frames", "updates", "seconds")
DURATIONS = ("duration_steps", "duration_updates", "duration_cycles")
MOST_SEPARATE = 24  # bars of one repeated group; of more, the group is one bar
MOST_ROWS = 40  # runs in one picture
THIN = 0.006  # least width of a bar, as a share of the axis: offline phases take no environment steps
GAP = 0.002  # of the axis, between two bars


# ---------------------------------------------------------------- the phases of a config


@dataclass(frozen=True)
class Phase:
    """One phase of a config, in words."""

    name: str
    type: str
    hooks: tuple[str, ...]  # with their rates
    size: str  # its duration
    times: int = 1  # of its group

    @property
    def duration(self) -> str:
        return f"{self.times:,} × {self.size}" if self.times > 1 else self.size


def phases_of(nodes: Sequence[Mapping[str, Any]], times: int = 1) -> Iterator[Phase]:
    """Yield each phase of `training.phases` once, in order; those of a group with how often it is repeated."""
    for node in nodes:
        if "phases" in node:
            yield from phases_of(node["phases"], times * _repeat(node))
        elif not _skipped(node):
            hooks = tuple(_hook(item) for item in node.get("workflow_hooks") or ())
            yield Phase(str(node.get("name", "")), node.get("type", "online"), hooks, _size(node), times)


def _repeat(group: Mapping[str, Any]) -> int:
    return int(group.get("repeat", 1))


def _skipped(node: Mapping[str, Any]) -> bool:
    return any(node.get(key) == 0 for key in DURATIONS)


def _size(node: Mapping[str, Any]) -> str:
    found = [(key.removeprefix("duration_"), node.get(key)) for key in DURATIONS]
    limits = [_counted(value, unit) for unit, value in found if value is not None]
    unlimited = {"offline": "until it is done", "eval_only": "once"}
    return " or ".join(limits) or unlimited.get(str(node.get("type")), "to the end")


def _hook(item: Any) -> str:
    """`{update: {repeat: 200}}` -> "200 × update"."""
    if not isinstance(item, Mapping):
        return str(item)
    ((name, settings),) = item.items()
    text, rest = str(name), dict(settings or {})
    if (repeat := rest.pop("repeat", 1)) != 1:
        text = f"{_amount(repeat)} × {text}"
    words = []
    for key, value in rest.items():
        if value is None:
            continue
        if key.startswith("every_"):
            words.append(f"every {_counted(value, key.removeprefix('every_'))}")
        elif key.endswith("_per_env_step"):
            words.append(f"{_counted(value, key.removesuffix('_per_env_step'))} per environment step")
        elif key in ("env_steps", "episodes"):
            words.append(_counted(value, key))
        else:
            words.append(f"{key.replace('_', ' ')} {_amount(value)}")
    return f"{text} ({', '.join(words)})" if words else text


def _counted(value: Any, unit: str) -> str:
    unit = unit.replace("env_", "").replace("_", " ")
    return f"{_amount(value)} {unit.removesuffix('s') if value == 1 else unit}"


def _amount(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def _count(nodes: Sequence[Mapping[str, Any]]) -> int:
    """Return how many phases run, one after the other."""
    return sum(
        _repeat(node) * _count(node["phases"]) if "phases" in node else not _skipped(node) for node in nodes
    )


def _place(nodes: Sequence[Mapping[str, Any]], index: int) -> tuple[int, int]:
    """Return the places of the index-th phase that runs: in the list, and among what `phases_of` yields."""
    before = 0
    for place, node in enumerate(nodes if index >= 0 else ()):
        own, inside = 0 if "phases" in node else int(not _skipped(node)), node.get("phases", ())
        count = _repeat(node) * _count(inside) if inside else own
        if index < count:
            return place, before + (_place(inside, index % _count(inside))[1] if inside else 0)
        index -= count
        before += sum(1 for _ in phases_of(inside)) if inside else own
    raise ValueError("the config has no such phase")


# ---------------------------------------------------------------- the phases of a run


@dataclass(frozen=True)
class Span:
    """One bar: a phase, or the phases of a group that take turns."""

    phases: tuple[Phase, ...]
    times: int  # how often they ran
    begin: Mapping[str, float]  # counter -> value; NaN where it was not logged
    end: Mapping[str, float]

    @property
    def label(self) -> str:
        return self.phases[0].name if len(self.phases) == 1 else f"{self.times:,} × {len(self.phases)} phases"

    def facts(self) -> list[str]:
        """Return what the picture's bar stands for, a line each."""
        lines = []
        for phase in self.phases:
            lines += [f"{phase.name}: {phase.type}, {phase.duration}", *(f"  {hook}" for hook in phase.hooks)]
        for counter in ("step", "updates"):
            unit = counter.removesuffix("s")
            if np.isfinite([self.begin[counter], self.end[counter]]).all():
                lines.append(f"{unit} {self.begin[counter]:,.0f} to {self.end[counter]:,.0f}")
        took = self.end["seconds"] - self.begin["seconds"]
        return [*lines, f"wall time {duration(took)}"] if np.isfinite(took) else lines


@dataclass
class Timeline:
    """When each phase of a run was active. Empty for a run of one phase, or of a version that did not log it."""

    phases: list[Phase] = field(default_factory=list)  # of the config
    spans: list[Span] = field(default_factory=list)
    totals: list[dict[str, float]] = field(
        default_factory=list
    )  # of each phase: counter -> how much it took; NaN: not begun


def timeline_of(run: RunData) -> Timeline:
    """Read the phases of a run; the last of them ends with its last log line."""
    nodes = run.config.get("training.phases")
    lines = [row for row in run.metrics.rows if _finite(row.get("step"))]
    at = [place for place, row in enumerate(lines) if _finite(row.get(PHASE))]
    try:
        if not at or not isinstance(nodes, list) or _count(nodes) < 2:
            return Timeline()
        phases = list(phases_of(nodes))
        places = [_place(nodes, int(lines[place][PHASE]) - 1) for place in at]
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return Timeline()  # another version's phases
    seconds = run.metrics.elapsed(lines)
    counts = [_counters(lines[place], seconds[place]) for place in [*at, len(lines) - 1]]
    entries = [_Entry(*place, *ends) for place, ends in zip(places, pairwise(counts))]
    totals = [dict.fromkeys(COUNTERS, float("nan")) for _ in phases]
    for entry in entries:
        for counter, before in totals[entry.phase].items():
            totals[entry.phase][counter] = _known(before) + entry.end[counter] - entry.begin[counter]
    spans: list[Span] = []
    for _, group in groupby(entries, key=lambda entry: entry.place):
        found = list(group)
        kinds = tuple(dict.fromkeys(phases[entry.phase] for entry in found))
        if len(kinds) == 1 or len(found) > MOST_SEPARATE:
            spans.append(Span(kinds, -(-len(found) // len(kinds)), found[0].begin, found[-1].end))
        else:
            spans += [Span((phases[entry.phase],), 1, entry.begin, entry.end) for entry in found]
    return Timeline(phases, spans, totals)


class _Entry(NamedTuple):
    place: int  # in the list of the config: phases of one group have the same
    phase: int  # among all phases of the config
    begin: Mapping[str, float]
    end: Mapping[str, float]


def _counters(row: Mapping[str, Any], seconds: float) -> dict[str, float]:
    counts: dict[str, Any] = {**row, "seconds": float(seconds)}
    return {key: float(counts[key]) if _finite(counts.get(key)) else float("nan") for key in COUNTERS}


def with_phases(runs: Sequence[RunData]) -> list[tuple[RunData, Timeline]]:
    """Return the runs of several phases."""
    found = [(run, timeline_of(run)) for run in runs]
    return [(run, timeline) for run, timeline in found if timeline.spans]


def phase_colors(timelines: Sequence[Timeline]) -> dict[str, str]:
    """Phase -> colour, the same in every run; paler ones when the palette is used up."""
    names = list(dict.fromkeys(phase.name for timeline in timelines for phase in timeline.phases))
    return {
        name: _paler(color, at // len(COLORS)) for at, (name, color) in enumerate(color_of(names).items())
    }


def _paler(color: str, times: int) -> str:
    if not times:
        return color
    white = 1 - 0.55**times
    mixed = [round((1 - white) * int(color[at : at + 2], 16) + white * 255) for at in (1, 3, 5)]
    return "#" + "".join(f"{part:02x}" for part in mixed)


def ink_on(color: str) -> str:
    """Return the colour of a text on a bar: white, or INK where white would be too faint."""
    red, green, blue = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return "#ffffff" if 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 < 0.27 else INK


def bars(timelines: Sequence[Timeline], counter: str) -> list[list[tuple[float, float]]]:
    """Return begin and width of every bar, for each run.

    A phase that took next to nothing has the width THIN, and the next one begins where it ends.
    """
    whole = whole_of(timelines, counter)
    rows = []
    for timeline in timelines:
        row, reached = [], 0.0
        for span in timeline.spans:
            begin = max(_known(span.begin[counter]), reached)
            reached = max(_known(span.end[counter]), begin + THIN * whole)
            row.append((begin, reached - begin))
        rows.append(row)
    return rows


def whole_of(timelines: Sequence[Timeline], counter: str) -> float:
    """Return the largest value of a counter; 1 if there is none above 0."""
    return max((_known(timeline.spans[-1].end[counter]) for timeline in timelines), default=0.0) or 1.0


def _known(value: float) -> float:
    return value if np.isfinite(value) else 0.0


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))


def bars_for_page(timelines: Sequence[Timeline]) -> list[list[dict[str, Any]]]:
    """Return the bars of every run, for the script of an interactive page."""
    placed = {counter: bars(timelines, counter) for counter in COUNTERS}
    return [
        [
            {
                "names": [phase.name for phase in span.phases],
                "facts": "<br>".join(html.escape(line) for line in span.facts()),
                "x": {
                    counter: [round(value, 3) for value in placed[counter][row][at]] for counter in COUNTERS
                },
            }
            for at, span in enumerate(timeline.spans)
        ]
        for row, timeline in enumerate(timelines)
    ]


# ---------------------------------------------------------------- the picture


TIME_UNITS = (("seconds", 1, 180), ("minutes", 60, 180 * 60), ("hours", 3600, float("inf")))


def draw_phases(found: Sequence[tuple[RunData, Timeline]], path: Path) -> None:
    """Draw a row for each run over environment steps, and over wall time if a phase took no steps."""
    labels = [run.label if len(found) > 1 else "" for run, _ in found[:MOST_ROWS]]
    timelines = [timeline for _, timeline in found[:MOST_ROWS]]
    spans = [span for timeline in timelines for span in timeline.spans]
    counters = ["step"]
    if any(span.begin["step"] == span.end["step"] for span in spans) and all(
        np.isfinite(span.end["seconds"]) for span in spans
    ):
        counters.append("seconds")
    colors = phase_colors(timelines)
    height = sum(map(_row_height, timelines)) + LABEL * sum(map(bool, labels))
    for form in forms(path):
        # On a phone two names fit in a line of the legend.
        names = 0.1 * len(colors) if form.narrow else 0.03 * len(colors)
        with form.figure(9.0, len(counters) * (height + 0.6) + 0.3 + names) as figure:
            panels = np.atleast_1d(figure.subplots(len(counters), 1))
            for axes, counter in zip(panels, counters):
                _draw_rows(axes, timelines, counter, labels, colors, form)
            legend(figure, [_patch(color) for color in colors.values()], list(colors), "outside upper left")


LABEL = 0.24  # inches of the name of a run


def _row_height(timeline: Timeline) -> float:
    return max(0.36, 0.19 * max(len(span.phases) for span in timeline.spans)) + 0.06


def _draw_rows(
    axes: Axes,
    timelines: Sequence[Timeline],
    counter: str,
    labels: Sequence[str],
    colors: Mapping[str, str],
    form: Form,
) -> None:
    """Draw the bars of every run; y is in inches."""
    whole = whole_of(timelines, counter)
    unit, size = "environment steps (agent decisions)", 1
    if counter == "seconds":
        name, size = next((name, size) for name, size, limit in TIME_UNITS if whole < limit)
        unit = f"wall time, {name}"
    inches = (3.5 if form.narrow else 8.6) / whole  # of the axis, for one count
    top = 0.0
    for timeline, label, placed in zip(timelines, labels, bars(timelines, counter)):
        if label:
            top += LABEL
            axes.text(0, top - 0.04, form.cut(label, 100), fontsize=8, color="#4a4f55")
        tall = _row_height(timeline) - 0.06
        for span, (begin, width) in zip(timeline.spans, placed):
            height = tall / len(span.phases)
            for at, phase in enumerate(span.phases):
                y, color = top + (at + 0.5) * height, colors[phase.name]
                drawn = max(width - GAP * whole, 0.5 * THIN * whole)
                thick = height - (0.012 if len(span.phases) > 1 else 0)
                axes.barh(y, drawn / size, left=begin / size, height=thick, color=color)
                if width * inches > 0.075 * len(phase.name) + 0.08:
                    middle, ink = (begin + drawn / 2) / size, ink_on(color)
                    axes.text(middle, y, phase.name, ha="center", va="center", fontsize=8, color=ink)
        top += tall + 0.06
    axes.set_ylim(top, 0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(unit)
    if counter == "step":
        step_axis(axes, 4 if form.narrow else 8)
    axes.set_xlim(0, 1.01 * whole / size)


def _patch(color: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=color)
