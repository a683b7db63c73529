"""The page, the figure and the Markdown of `rl-lab report --suite NAME`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.errors import LabError
from rl_lab.tools.published import Task
from rl_lab.tools.report.curves import Curve
from rl_lab.tools.report.figures import INK, color_of, draw_seeds, forms, legend, step_axis
from rl_lab.tools.report.page import Page, Section, Table, write_page
from rl_lab.tools.report.suite import (
    MethodReport,
    Reference,
    SuiteReport,
    TaskResult,
    absent_lines,
    count_line,
    load_report,
    method_tables,
    time_line,
    unplanned_line,
)
from rl_lab.tools.suite.definition import Method, Suite, load_suite, suite_names
from rl_lab.tools.suite.results import SuiteFolder
from rl_lab.tools.terminal import NONE, duration, number, short

ALL = "all"  # instead of names: every suite
FIGURE = "curves.png"
PANELS_ACROSS = 5
LEAST_WIDTH = 6.4  # inches: the legend needs them
MARKERS = ("D", "s", "^", "v", "o", "P", "X")  # of published agents
INTRODUCTION = (
    "Scores are mean returns unless the section names another statistic; a table has their mean over seeds, with the "
    "range. *inside*, *above*, *below*: our mean against the range of the published seeds at equal frames. Each run "
    "has a JSON file with its curve, config, command, commit and machine in the folder that the section names. "
    "[log.md](log.md) has single experiments."
)
PUBLISHED_REACH = 3  # published values at more than this many times our frames are only in the table


# --- Figure ---


def draw_curves(report: SuiteReport, path: Path) -> bool:
    """Plot one panel per task: each method's seeds with mean and 95 % interval, and the published points."""
    rows = [(method, row) for method in report.methods for row in method.tasks]
    if not rows:
        return False
    panels: dict[Task, list[tuple[MethodReport, TaskResult]]] = {}
    for method, row in rows:
        panels.setdefault(row.task, []).append((method, row))
    names = [task.name for task in panels]
    named = color_of([method.method.title for method in report.methods if method.tasks])
    agents = list(dict.fromkeys(ref.agent for _, row in rows for ref in row.references))
    markers = dict(zip(agents, itertools.cycle(MARKERS)))
    for form in forms(path):
        across = form.columns(min(PANELS_ACROSS, len(panels)))
        down = math.ceil(len(panels) / across)
        with form.figure(max(LEAST_WIDTH, 2.6 * across + 0.6), 2.2 * down + 0.5) as figure:
            grid = figure.subplots(down, across, squeeze=False)
            for axes in grid.flat[len(panels) :]:
                axes.axis("off")
            drawn: dict[str, str] = {}
            for axes, (task, members) in zip(grid.flat, panels.items()):
                for method, row in members:
                    color = named[method.method.title]
                    curves = [curve_of(result, method.method) for result in row.results]
                    draw_seeds(axes, curves, color, faint=False, label=None)
                    for ref in row.references:
                        end = row.frames if ref.frames else row.updates  # 0: trained on stored data alone
                        if _draw_reference(axes, ref, end, markers[ref.agent]):
                            drawn[ref.agent] = markers[ref.agent]
                same = names.count(task.name) > 1 and task.observe
                axes.set_title(f"{task.name} ({task.observe})" if same else task.name)
                step_axis(axes, 4)
            _suite_legend(figure, named, drawn)
    return True


def _draw_reference(axes: Any, reference: Reference, frames: int, marker: str) -> bool:
    """Plot the published points up to ours, and the nearest one unless it is far behind; bars: range over seeds."""
    points = {at: values for at, values in reference.curve.items() if at <= frames}
    if reference.frames <= PUBLISHED_REACH * max(frames, 1):
        points[reference.frames or frames] = list(reference.values)
    for at, values in points.items():
        mean = float(np.mean(values))
        reach = [[mean - min(values)], [max(values) - mean]]
        capsize = 3 if len(values) > 1 else 0
        axes.errorbar([at], [mean], reach, fmt=marker, color=INK, markersize=3.5, capsize=capsize)
    return bool(points)


def _suite_legend(figure: Any, named: dict[str, str], drawn: dict[str, str]) -> None:
    """Add a legend: our methods by colour, published agents by marker."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=color, linewidth=2) for color in named.values()]
    handles += [Line2D([], [], color=INK, marker=mark, linestyle="", markersize=4) for mark in drawn.values()]
    labels = [*named, *(f"{agent}, published" for agent in drawn)]
    legend(figure, handles, labels, "outside upper left")


def curve_of(result: dict[str, Any], method: Method) -> Curve:
    """Return the learning curve of a run over frames (stored data alone: updates): what its score is made of."""
    first, second = ("training_episodes", "evaluations")
    if method.score.source == "eval":
        first, second = second, first
    metric = method.score.metric
    points = [point for point in result.get(first) or result.get(second) or [] if metric in point]
    frames = any(point["frames"] for point in points)
    return Curve(
        np.array([point["frames" if frames else "updates"] for point in points], dtype=np.float64),
        np.array([point[metric] for point in points], dtype=np.float64),
    )


# --- Page and Markdown ---


def build_page(report: SuiteReport, folder: Path) -> Page:
    """Assemble the HTML page."""
    page = Page(title=f"Suite {report.suite.name}", subtitle=report.suite.text)
    figure = folder / FIGURE
    if draw_curves(report, figure):
        note = (
            "Thin lines: single seeds; thick lines: their mean; bands: its 95 % bootstrap interval; marks: published "
            "means, with the range over seeds."
        )
        page.sections.append(Section("Curves", note=note, plots=[figure]))
    for method in report.methods:
        tables = method_tables(method)
        note = f"{count_line(method)}. A run's score: {method.method.score.describe()}."
        texts = [("runs without a score", "\n".join(absent_lines(method)))] if method.absent else []
        texts += [("not planned", unplanned_line(method))] if method.unplanned else []
        page.sections.append(Section(method.method.title, note=note, tables=tables, texts=texts))
    page.sections.append(
        Section(
            "Published values",
            note="At the frames nearest to ours. inside, above, below: our mean over seeds against their range.",
            texts=[("sources", "\n".join(report.sources))] if report.sources else [],
        )
    )
    rows = [
        [
            r["name"],
            r["status"],
            short(r.get("frames") or 0),
            number(r.get("score")),
            duration(r.get("seconds")),
            str(r.get("commit") or NONE)[:12],
            str((r.get("machine") or {}).get("gpu") or NONE),
        ]
        for r in report.results
    ]
    table = Table(("run", "status", "frames", "score", "time", "commit", "GPU"), rows, right=(2, 3, 4))
    commands = "\n".join(f"{r['name']}: {r.get('command')}" for r in report.results)
    page.sections.append(
        Section("Runs", note=time_line(report.results), tables=[table], texts=[("commands", commands)])
    )
    if report.damaged:
        page.sections.insert(0, Section("Left out", note=" ".join(report.damaged)))
    return page


def markdown(reports: Sequence[SuiteReport], place: Path, command: str) -> str:
    """Return the results page: the tables of every suite, with links relative to the folder of `place`."""
    lines = [
        "# Results by suite",
        "",
        f"Made by `{command}`; not edited by hand.",
        *_wrapped(INTRODUCTION),
    ]
    for report in reports:
        folder = _relative(report.folder.results, place)
        lines += ["", f"## {report.suite.name}", "", *_wrapped(f"{report.suite.text}.")]
        files = f"Files: [{folder}]({folder}). " if report.results else ""
        lines += _wrapped(f"{files}{time_line(report.results)}.")
        taken = _taken_links(report, place)
        if taken:
            lines += ["", *_wrapped(f"Taken in from single experiments: {', '.join(taken)}.")]
        if (report.folder.path / FIGURE).is_file():
            file = _relative(report.folder.path / FIGURE, place)
            lines += ["", f"![learning curves of suite {report.suite.name}]({file})"]
        for method in report.methods:
            lines += ["", f"### {report.suite.name}: {method.method.title}", ""]
            lines += _wrapped(f"{count_line(method)}. A run's score: {method.method.score.describe()}.")
            for table in method_tables(method):
                lines += ["", *markdown_table(table)]
            if method.absent:
                lines += ["", *_wrapped("Without a score: " + "; ".join(absent_lines(method)) + ".")]
            if method.unplanned:
                lines += ["", *_wrapped(unplanned_line(method) + ".")]
        if report.sources:
            lines += ["", "Published values:", ""]
            for source in report.sources:
                first, *rest = _wrapped(source, 116)
                lines += [f"- {first}", *(f"  {line}" for line in rest)]
    return "\n".join(lines) + "\n"


def markdown_table(table: Table) -> list[str]:
    align = ["---:" if column in table.right else "---" for column in range(len(table.header))]
    rows = [table.header, align, *table.rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def _taken_links(report: SuiteReport, place: Path) -> list[str]:
    """Return links to the kept results that were taken in, if they are in the folder above the suites' folders."""
    names = sorted({str(result["taken_from"]) for result in report.results if result.get("taken_from")})
    files = {name: report.folder.path.parent.parent / Path(name).name for name in names}
    return [f"[{name}]({_relative(file, place)})" if file.is_file() else name for name, file in files.items()]


def _wrapped(text: str, width: int = 118) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _relative(path: Path, place: Path) -> str:
    import os

    return Path(os.path.relpath(path, place.resolve().parent)).as_posix()


# --- Command ---


def suite_folders(names: Sequence[str], results: Path | None) -> list[tuple[Suite, SuiteFolder]]:
    """Return the suites ("all": every one by name) and their results folders.

    The folder is DIR/NAME below `results`, or DIR itself for one suite.
    """
    from rl_lab.tools.suite.command import default_folder

    found = []
    for name in sorted(suite_names()) if list(names) == [ALL] else names:
        suite = load_suite(name)
        if results is None:
            path = default_folder(name)
        else:
            direct = len(names) == 1 and (results / "results").is_dir()
            path = results if direct else results / suite.name
        found.append((suite, SuiteFolder(path)))
    return found


def write_suite_report(
    names: Sequence[str],
    *,
    results: Path | None = None,
    out: Path | None = None,
    markdown_file: Path | None = None,
) -> list[Path]:
    """Write one page per suite, and with `markdown_file` one Markdown file with all of them; return the paths."""
    written = []
    reports = [load_report(suite, folder) for suite, folder in suite_folders(names, results)]
    if not any(report.results or report.damaged for report in reports):
        places = ", ".join(str(report.folder.path) for report in reports)
        raise LabError(
            f"{places}: no results: run rl-lab suite {reports[0].suite.name} first, or pass --results"
        )
    for report in reports:
        suite, folder = report.suite, report.folder
        if markdown_file is None or out is not None:
            target = (out / suite.name if out and len(names) > 1 else out) or folder.path / "report"
            target.mkdir(parents=True, exist_ok=True)
            written.append(write_page(build_page(report, target), target / "index.html"))
        elif report.results:
            draw_curves(report, folder.path / FIGURE)
    if markdown_file is not None:
        where = f" --results {results.as_posix()}" if results else ""
        command = f"rl-lab report --suite {' '.join(names)}{where} --markdown {markdown_file.as_posix()}"
        markdown_file.parent.mkdir(parents=True, exist_ok=True)
        markdown_file.write_text(markdown(reports, markdown_file, command), encoding="utf-8")
        written.append(markdown_file)
    return written
