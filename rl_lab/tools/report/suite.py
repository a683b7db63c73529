"""`rl-lab report --suite NAME`: our results of a suite beside the published ones, as a page and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.errors import LabError
from rl_lab.tools.published import RETURN, Normalisation, Task, normalisation, published, published_curves
from rl_lab.tools.report.curves import Curve
from rl_lab.tools.report.figures import color_of, draw_seeds, forms, name_legend, step_axis
from rl_lab.tools.report.page import Page, Section, Table, write_page
from rl_lab.tools.report.runs import flatten
from rl_lab.tools.statistics import Interval, intervals
from rl_lab.tools.suite.definition import Method, Suite, load_suite
from rl_lab.tools.suite.results import DONE, FAILED, MISSING, PARTIAL, SuiteFolder, status_of
from rl_lab.tools.terminal import NONE, duration, interval, number, short

AGGREGATES = ("mean", "median", "iqm")
SAME_FRAMES = 0.02  # a published value at frames that differ by less counts as at equal frames
PANELS_ACROSS = 5
FIGURE = "curves.png"
CRAFTER_SCORE = "crafter_score"  # in the results of Crafter's runs
NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class Reference:
    """What one agent published for a task, at the frames nearest to ours."""

    agent: str
    frames: int
    values: tuple[float, ...]  # one per seed, or the mean alone
    source: str
    single_seeds: bool = True
    curve: dict[int, list[float]] = field(default_factory=dict)  # frames -> one value per seed

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))


@dataclass(frozen=True)
class TaskResult:
    """Our runs of one method on one task, and the published values."""

    task: Task
    name: str  # in the suite
    results: tuple[dict[str, Any], ...]  # with a score; done ones, or if there are none, unfinished ones
    status: str
    references: tuple[Reference, ...] = ()

    @property
    def scores(self) -> np.ndarray:
        """(seeds,)"""
        return np.array([result["score"] for result in self.results], dtype=np.float64)

    @property
    def frames(self) -> int:
        return int(max((result.get("score_frames") or 0 for result in self.results), default=0))


@dataclass
class MethodReport:
    """Results of one method of a suite."""

    method: Method
    tasks: list[TaskResult] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)  # status -> runs
    absent: dict[str, list[str]] = field(default_factory=dict)  # reason -> runs without a score

    @property
    def finished(self) -> list[TaskResult]:
        return [row for row in self.tasks if row.status == DONE]


@dataclass
class SuiteReport:
    """Everything that the page and the Markdown show about a suite."""

    suite: Suite
    folder: SuiteFolder
    methods: list[MethodReport]
    results: list[dict[str, Any]]
    damaged: list[str] = field(default_factory=list)

    @property
    def sources(self) -> list[str]:
        found = {
            f"{reference.agent}: {reference.source}": None
            for method in self.methods
            for row in method.tasks
            for reference in (*row.references, *crafter_references(row, method.method))
        }
        return list(found)


def load_report(suite: Suite, folder: SuiteFolder) -> SuiteReport:
    """Read the results of a suite and find what is published for its tasks."""
    results, damaged = folder.read_all()
    if not results:
        raise LabError(
            f"{folder.path} has no results: run rl-lab suite {suite.name} first, or pass --results"
        )
    methods = [_method_report(method, results) for method in suite.methods]
    return SuiteReport(suite, folder, methods, results, damaged)


def _method_report(method: Method, results: Sequence[dict[str, Any]]) -> MethodReport:
    report = MethodReport(method)
    own = [result for result in results if result["method"] == method.name]
    planned = {run.name: run for run in method.runs()}
    for run in planned.values():
        result = next((item for item in own if item["name"] == run.name), None)
        status = status_of(run, result)
        report.counts[status] = report.counts.get(status, 0) + 1
        if result is None or result.get("score") is None:
            why = str((result or {}).get("error") or status)
            report.absent.setdefault(why, []).append(f"{run.task} seed {run.seed}")
    task_names = list(dict.fromkeys([*method.tasks, *(str(result["task"]) for result in own)]))
    kinds = _environment(method) if own else {}
    for name in task_names:
        scored = [r for r in own if r["task"] == name and r.get("score") is not None]
        complete = [r for r in scored if _is_done(r, planned)]
        chosen = complete or scored
        if not chosen:
            continue
        task = Task.from_config({**kinds, "environment.task": name})
        row = TaskResult(task, name, tuple(chosen), DONE if complete else PARTIAL)
        found = tuple(references(task, method.published, row.frames))
        report.tasks.append(TaskResult(task, name, tuple(chosen), row.status, found))
    return report


def _is_done(result: dict[str, Any], planned: dict[str, Any]) -> bool:
    run = planned.get(result["name"])
    return (status_of(run, result) if run is not None else result["status"]) == DONE


def _environment(method: Method) -> dict[str, Any]:
    """Return suite and kind of observation of a method's experiment, by which published values are found."""
    from rl_lab.config.compose import compose_config, to_plain

    config = compose_config([f"experiment={method.experiment}", *method.overrides])
    return flatten({"environment": to_plain(config.environment)})


def references(task: Task, agents: Iterable[str], frames: int, metric: str = RETURN) -> Iterator[Reference]:
    """Yield the published values of each agent at the frames nearest to ours."""
    for agent in agents:
        curves = [curve for curve in published_curves(task) if curve.agent == agent and metric == RETURN]
        if curves:
            at = min(curves[0].points, key=lambda point: abs(point - frames))
            points = curves[0].points
            yield Reference(agent, at, tuple(points[at]), curves[0].source, curve=points)
            continue
        known = [row for row in published(task, metric) if row.agent == agent]
        if known:
            row = min(known, key=lambda row: abs(row.frames - frames))
            yield Reference(agent, row.frames, (row.score,), row.source, single_seeds=False)


# --- Tables ---


def verdict(scores: np.ndarray, reference: Reference, frames: int) -> str:
    """Return where our mean over seeds is relative to the published seeds, at equal frames only."""
    if not reference.single_seeds or abs(reference.frames - frames) > SAME_FRAMES * reference.frames:
        return NONE
    low, high, ours = min(reference.values), max(reference.values), float(np.mean(scores))
    return "below" if ours < low else "above" if ours > high else "inside"


def spread(values: Sequence[float]) -> str:
    """Format a mean, with the range over seeds if there are several."""
    text = number(float(np.mean(values)))
    return (
        f"{text} ({number(float(min(values)))} to {number(float(max(values)))})" if len(values) > 1 else text
    )


def task_table(report: MethodReport) -> Table:
    """Build one row per task: our scores, the published ones at the nearest frames, time."""
    agents = list(dict.fromkeys(ref.agent for row in report.tasks for ref in row.references))
    header = ["task", "seeds", "frames", report.method.title]
    for agent in agents:
        header += [f"{agent}, published", "ours is"]
    final = any(result.get("final_evaluation") for row in report.tasks for result in row.results)
    header += (["new episodes"] if final else []) + ["minutes a run", "GPU hours"]
    rows = []
    for row in report.tasks:
        cells = [
            row.name,
            str(len(row.results)),
            short(row.frames) + ("" if row.status == DONE else " (partial)"),
        ]
        cells.append(spread(list(row.scores)))
        for agent in agents:
            found = next((ref for ref in row.references if ref.agent == agent), None)
            if found is None:
                cells += [NONE, NONE]
                continue
            place = verdict(row.scores, found, row.frames)
            at = (
                ""
                if abs(found.frames - row.frames) <= SAME_FRAMES * found.frames
                else f" at {short(found.frames)}"
            )
            cells += [spread(found.values) + at, place]
        if final:
            means = [r["final_evaluation"]["return_mean"] for r in row.results if r.get("final_evaluation")]
            cells.append(spread(means) if means else NONE)
        seconds = [result["seconds"] for result in row.results if result.get("seconds")]
        hours = [result["gpu_hours"] for result in row.results if result.get("gpu_hours")]
        cells += [f"{np.mean(seconds) / 60:.1f}" if seconds else NONE, f"{sum(hours):.2f}" if hours else NONE]
        rows.append(cells)
    return Table(header, rows, right=range(1, len(header)))


def crafter_references(row: TaskResult, method: Method) -> list[Reference]:
    """Return the published crafter_score of each agent at the frames nearest to ours."""
    return list(references(row.task, method.published, row.frames, CRAFTER_SCORE))


def crafter_table(report: MethodReport) -> Table | None:
    """Build the table of crafter_score, ours above the published ones at the nearest frames; None without Crafter."""
    ours = [row for row in report.tasks if row.task.suite == "crafter"]
    if not ours:
        return None
    rows = []
    for row in ours:
        scores = [result[CRAFTER_SCORE] for result in row.results if result.get(CRAFTER_SCORE) is not None]
        shown = f"{report.method.title}, {row.name}" if len(ours) > 1 else report.method.title
        rows.append([shown, short(row.frames), spread(scores) if scores else NOT_RECORDED])
        rows += [
            [f"{ref.agent}, published", short(ref.frames), spread(ref.values)]
            for ref in crafter_references(row, report.method)
        ]
    return Table(["crafter_score, % (all training episodes)", "frames", "score"], rows, right=(1, 2))


def aggregates(report: MethodReport) -> dict[str, tuple[int, dict[str, Interval]]]:
    """Return name -> (runs, aggregates of normalised scores) of ours and of each published agent.

    All are over the same tasks: those with a finished run of ours, a normalisation, and a published value of the
    agent at equal frames.
    """
    rows = [(row, normalisation(row.task)) for row in report.finished]
    scaled = [(row, scale) for row, scale in rows if scale is not None]
    found: dict[str, tuple[int, dict[str, Interval]]] = {}
    agents = list(dict.fromkeys(ref.agent for row, _ in scaled for ref in row.references))
    for agent in agents or [""]:
        pairs: list[tuple[TaskResult, Normalisation, Reference | None]] = []
        for row, scale in scaled:
            ref = next((ref for ref in row.references if ref.agent == agent), None)
            if not agent or (ref is not None and abs(ref.frames - row.frames) <= SAME_FRAMES * ref.frames):
                pairs.append((row, scale, ref))
        if not pairs:
            continue
        ours = [scale(row.scores) for row, scale, _ in pairs]
        suffix = f" ({len(pairs)} tasks)"
        found[report.method.title + suffix] = (sum(map(len, ours)), intervals(ours))
        theirs = [scale(np.array(ref.values)) for _, scale, ref in pairs if ref is not None]
        if theirs:
            found[f"{agent}, published" + suffix] = (sum(map(len, theirs)), intervals(theirs))
    return found


def aggregate_table(report: MethodReport) -> Table | None:
    """Build the table of normalised scores over tasks; None if there are none."""
    found = aggregates(report)
    if not found:
        return None
    scale = next(s for row in report.finished if (s := normalisation(row.task)) is not None)
    rows = [
        [name, str(runs), *(interval(values[key]) for key in AGGREGATES)]
        for name, (runs, values) in found.items()
    ]
    header = [f"{scale.name} score", "runs", "mean", "median", "IQM"]
    return Table(header, rows, right=range(1, len(header)))


def method_tables(report: MethodReport) -> list[Table]:
    """Return the tables of one method: over all tasks, by task, and crafter_score; without results none."""
    if not report.tasks:
        return []
    tables = [aggregate_table(report), task_table(report), crafter_table(report)]
    return [table for table in tables if table is not None]


def count_line(report: MethodReport) -> str:
    """Return how many runs are done, partial, failed and missing."""
    order = (DONE, PARTIAL, FAILED, MISSING)
    parts = [f"{report.counts[status]} {status}" for status in order if report.counts.get(status)]
    return f"{report.method.title}: {', '.join(parts)} of {sum(report.counts.values())} runs"


def absent_lines(report: MethodReport) -> list[str]:
    """Return one line per reason: "missing: walker_walk seed 1, …"."""
    return [f"{why}: {', '.join(runs)}" for why, runs in report.absent.items()]


def time_line(results: Sequence[dict[str, Any]]) -> str:
    """Return the sums of wall-clock time and GPU hours."""
    seconds = sum(result.get("seconds") or 0.0 for result in results)
    hours = sum(result.get("gpu_hours") or 0.0 for result in results)
    text = f"{duration(seconds)} of training in {len(results)} runs"
    return f"{text}, {hours:.2f} GPU hours" if hours else text


# --- Figure ---


def draw_curves(report: SuiteReport, path: Path) -> bool:
    """Plot one panel per task: each method's seeds with mean and 95 % interval, and the published points."""
    panels = list(dict.fromkeys(row.name for method in report.methods for row in method.tasks))
    if not panels:
        return False
    named = color_of([method.method.title for method in report.methods])
    for form in forms(path):
        across = form.columns(min(PANELS_ACROSS, len(panels)))
        down = math.ceil(len(panels) / across)
        with form.figure(2.6 * across + 0.6, 2.2 * down + 0.5) as figure:
            grid = figure.subplots(down, across, squeeze=False)
            for axes in grid.flat[len(panels) :]:
                axes.axis("off")
            agents: dict[str, None] = {}
            for axes, name in zip(grid.flat, panels):
                for method in report.methods:
                    row = next((row for row in method.tasks if row.name == name), None)
                    if row is None:
                        continue
                    draw_seeds(
                        axes,
                        [curve_of(result, method.method) for result in row.results],
                        named[method.method.title],
                        faint=False,
                        label=None,
                    )
                    for reference in row.references:
                        agents[f"{reference.agent}, published: mean and range over seeds"] = None
                        _draw_reference(axes, reference, row.frames)
                axes.set_title(name)
                step_axis(axes, 4)
            name_legend(figure, {**named, **dict.fromkeys(agents, "#24292e")})
    return True


def _draw_reference(axes: Any, reference: Reference, frames: int) -> None:
    """Plot the published points up to ours, and the nearest one, with their range over seeds."""
    points = {reference.frames: list(reference.values)}
    points |= {at: values for at, values in reference.curve.items() if at <= frames}
    for at, values in points.items():
        mean = float(np.mean(values))
        reach = [[mean - min(values)], [max(values) - mean]]
        axes.errorbar([at], [mean], reach, fmt="D", color="#24292e", markersize=3.5, capsize=3)


def curve_of(result: dict[str, Any], method: Method) -> Curve:
    """Return the learning curve of a run: the episodes that its score is made of."""
    first, second = ("training_episodes", "evaluations")
    if method.score.source == "eval":
        first, second = second, first
    points = result.get(first) or result.get(second) or []
    return Curve(
        np.array([point["frames"] for point in points], dtype=np.float64),
        np.array([point["return_mean"] for point in points], dtype=np.float64),
    )


# --- Page and Markdown ---


def build_page(report: SuiteReport, folder: Path) -> Page:
    """Assemble the HTML page."""
    page = Page(title=f"Suite {report.suite.name}", subtitle=report.suite.text)
    figure = folder / FIGURE
    if draw_curves(report, figure):
        note = "Thin lines: single seeds; thick lines: their mean; bands: its 95 % bootstrap interval."
        page.sections.append(Section("Curves", note=note, plots=[figure]))
    for method in report.methods:
        tables = method_tables(method)
        note = f"{count_line(method)}. A run's score: {method.method.score.describe()}."
        texts = [("runs without a score", "\n".join(absent_lines(method)))] if method.absent else []
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
        "Scores are returns: the mean over seeds, with the range over seeds. *inside*, *above*, *below*: our mean against",
        "the range of the published seeds at equal frames. Each run has a JSON file with its curve, config, command,",
        "commit and machine in the folder that the section names. [log.md](log.md) has single experiments.",
    ]
    for report in reports:
        folder = _relative(report.folder.results, place)
        lines += ["", f"## {report.suite.name}", "", *_wrapped(f"{report.suite.text}.")]
        lines += [f"Files: [{folder}]({folder}). {time_line(report.results)}."]
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


def _wrapped(text: str, width: int = 118) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _relative(path: Path, place: Path) -> str:
    import os

    return Path(os.path.relpath(path, place.resolve().parent)).as_posix()


# --- Command ---


def suite_folders(names: Sequence[str], results: Path | None) -> list[tuple[Suite, SuiteFolder]]:
    """Return the suites and their results folders: DIR/NAME below `results`, or DIR itself for one suite."""
    from rl_lab.tools.suite.command import default_folder

    found = []
    for name in names:
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
    written, reports = [], []
    for suite, folder in suite_folders(names, results):
        report = load_report(suite, folder)
        reports.append(report)
        if markdown_file is None or out is not None:
            target = (out / suite.name if out and len(names) > 1 else out) or folder.path / "report"
            target.mkdir(parents=True, exist_ok=True)
            written.append(write_page(build_page(report, target), target / "index.html"))
        else:
            draw_curves(report, folder.path / FIGURE)
    if markdown_file is not None:
        where = f" --results {results.as_posix()}" if results else ""
        command = f"rl-lab report --suite {' '.join(names)}{where} --markdown {markdown_file.as_posix()}"
        markdown_file.parent.mkdir(parents=True, exist_ok=True)
        markdown_file.write_text(markdown(reports, markdown_file, command), encoding="utf-8")
        written.append(markdown_file)
    return written
