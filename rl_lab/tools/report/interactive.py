"""Interactive plots of a report: what the page draws with plotly.js, which is taken from the installed package plotly.

The repository has no JavaScript of others. `library` finds plotly's file when a page is written, and the page embeds
it compressed, beside the curves, so that it works from a file and without a network. charts.js draws them.
"""

from __future__ import annotations

import base64
import gzip
import html
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.errors import LabError, install_line
from rl_lab.tools.report.curves import Metrics
from rl_lab.tools.report.figures import EVALUATION, LOG_RANGE, TRAINING, color_of, groups_of
from rl_lab.tools.report.runs import RunData
from rl_lab.tools.report.timeline import GAP, bars_for_page, ink_on, phase_colors, with_phases
from rl_lab.utils.files import read_json

MOST_POINTS = 2000  # of one curve; of more lines, neighbours are averaged
DIGITS = 6  # significant digits of a value
SCRIPT = Path(__file__).with_name("charts.js")
AXES = {"step": "steps", "frames": "frames", "updates": "updates", "seconds": "wall time"}


@dataclass(frozen=True)
class Chart:
    """One plot of the page: metrics that share its axes, over all runs or over those of one task."""

    title: str
    keys: Sequence[str]
    task: str | None = None
    unit: str = ""  # label of the y axis
    large: bool = False
    kind: str = "curves"  # or "phases": a bar for each phase, a row for each run


@dataclass
class Charts:
    """The curves of a page, ready to be written into it."""

    data: dict[str, Any] = field(default_factory=dict)

    def packed(self) -> str:
        return pack(json.dumps(self.data, separators=(",", ":"), allow_nan=False).encode())


def library() -> Path | None:
    """Return the file of plotly.js in the installed package plotly, which is not imported; None without it."""
    try:
        found = importlib.util.find_spec("plotly")
    except (ImportError, ValueError):
        return None
    for folder in (found and found.submodule_search_locations) or ():
        file = Path(folder, "package_data", "plotly.min.js")
        if file.is_file():
            return file
    return None


def available() -> bool:
    return library() is not None


def missing() -> str:
    """Return the sentence for a page whose plots are pictures."""
    return f"The plots are pictures; for plots with zoom, values and switches: {install_line('report')}"


def pack(content: bytes) -> str:
    """Compress for a page; the browser has DecompressionStream."""
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()


@lru_cache(maxsize=1)
def _packed_library(file: Path, changed: float) -> str:
    return pack(file.read_bytes())


def scripts(charts: Charts, nonce: str = "", with_library: bool = True) -> str:
    """Return the elements at the end of the page: curves, plotly.js, and the script that draws.

    with_library: False for the part of a served page that is fetched again
    """
    mark = f' nonce="{html.escape(nonce)}"' if nonce else ""
    parts = [f'<script type="text/plain" id="chart-data">{charts.packed()}</script>']
    file = library()
    if with_library and file is not None:
        packed = _packed_library(file, file.stat().st_mtime)
        parts.append(f'<script type="text/plain" id="chart-library">{packed}</script>')
        parts.append(f"<script{mark}>\n{SCRIPT.read_text(encoding='utf-8')}</script>")
    return "\n".join(parts)


def charts_of(runs: Sequence[RunData]) -> Charts:
    """Gather every curve of the runs."""
    named = color_of(list(groups_of(runs)))
    several = {group for group, members in groups_of(runs).items() if len(members) > 1}
    alone = color_of([run.label for run in runs])
    phased = with_phases(runs)
    timelines = [timeline for _, timeline in phased]
    phases = {run.label: bars for (run, _), bars in zip(phased, bars_for_page(timelines))}
    rows = []
    for run in runs:
        x, y = curves(run.metrics)
        rows.append(
            {
                "label": run.label,
                "group": run.group,
                "task": run.task.full_name,
                "color": named[run.group] if several else alone[run.label],
                "x": x,
                "y": y,
                "evaluated": evaluated(run),
                "phases": phases.get(run.label, []),
            }
        )
    inks = {name: [color, ink_on(color)] for name, color in phase_colors(timelines).items()}
    facts = {
        "axes": AXES,
        "several": bool(several),
        "logRange": LOG_RANGE,
        "phaseColors": inks,
        "phaseGap": GAP,
    }
    return Charts({"runs": rows, **facts})


def learning_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Return the returns of each task."""
    tasks = list(dict.fromkeys(run.task.full_name for run in runs))
    title = "episode return" if len(tasks) == 1 else ""
    return [
        Chart(
            title or task,
            (TRAINING, EVALUATION),
            None if len(tasks) == 1 else task,
            "episode return",
            len(tasks) < 3,
        )
        for task in tasks
    ]


def curves(metrics: Metrics) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Return counter -> value of each line, and metric -> (lines, values).

    Of more than MOST_POINTS lines, as many neighbours as necessary are averaged. Values that are not finite are
    left out.
    """
    lines = [row for row in metrics.rows if _finite(row.get("step"))]
    bucket = max(1, -(-len(lines) // MOST_POINTS))
    counters = {key: _column(lines, key) for key in ("step", "frames", "updates")}
    counters["seconds"] = metrics.elapsed(lines)
    last = (
        np.append(np.arange(bucket - 1, len(lines) - 1, bucket), len(lines) - 1)
        if lines
        else np.zeros(0, int)
    )
    x = {key: [_short(value) for value in column[last]] for key, column in counters.items()}
    y: dict[str, Any] = {}
    for key in metrics.names():
        column = _column(lines, key)
        at = np.flatnonzero(np.isfinite(column))
        if not len(at):
            continue
        places, inverse = np.unique(at // bucket, return_inverse=True)
        values = np.bincount(inverse, column[at]) / np.bincount(inverse)
        y[key] = [None if len(places) == len(last) else places.tolist(), [_short(value) for value in values]]
    return x, y


def evaluated(run: RunData) -> list[dict[str, Any]]:
    """Return the results of `rl-lab eval` on a run, for the learning curve."""
    found = []
    for file in sorted(run.folder.report.glob("eval_[0-9]*_seed*.json")):
        try:
            result = read_json(file)
            low, high = result["return_intervals"]["mean"] or (None, None)
            point = {
                "step": float(result["step"]),
                "mean": float(result["return_mean"]),
                "low": None if low is None else float(low),
                "high": None if high is None else float(high),
                "episodes": int(result["episodes"]),
            }
        except (OSError, LabError, KeyError, TypeError, ValueError):
            continue  # not written by this version
        if all(value is None or np.isfinite(value) for value in point.values()):
            found.append(point)
    return found


def _column(lines: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    return np.array([float(row[key]) if _finite(row.get(key)) else np.nan for row in lines])


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))


def _short(value: float) -> float | int | None:
    if not np.isfinite(value):
        return None
    short = float(f"{value:.{DIGITS}g}") if abs(value) < 10**DIGITS else round(float(value))
    return int(short) if short == int(short) and abs(short) < 1e15 else short
