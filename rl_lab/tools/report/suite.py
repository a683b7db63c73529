"""Our results of a suite beside the published ones: what `rl-lab report --suite NAME` shows, as tables.

suite_page.py makes a page and Markdown of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_lab.tools.published import RETURN, Normalisation, Task, normalisation, published, published_curves
from rl_lab.tools.report.page import Table
from rl_lab.tools.report.runs import flatten
from rl_lab.tools.statistics import Interval, intervals
from rl_lab.tools.suite.definition import Method, Suite
from rl_lab.tools.suite.results import DONE, FAILED, MISSING, PARTIAL, SuiteFolder, status_of
from rl_lab.tools.terminal import NONE, duration, interval, number, short

AGGREGATES = ("mean", "median", "iqm")
SAME_FRAMES = 0.02  # a published value at frames that differ by less counts as at equal frames
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

    @property
    def updates(self) -> int:
        return int(max((result.get("updates") or 0 for result in self.results), default=0))

    @property
    def shown_frames(self) -> str:
        """The frames, or their range where the runs differ; the updates of runs on stored data alone."""
        if not self.frames and self.updates:
            return f"{short(self.updates)} updates"
        fewest = int(min((result.get("score_frames") or 0 for result in self.results), default=0))
        same = self.frames - fewest <= SAME_FRAMES * self.frames
        return short(self.frames) if same else f"{short(fewest)} to {short(self.frames)}"


@dataclass
class MethodReport:
    """Results of one method of a suite."""

    method: Method
    tasks: list[TaskResult] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)  # status -> runs
    absent: dict[str, dict[str, list[int]]] = field(
        default_factory=dict
    )  # reason -> task -> seeds without a score
    unplanned: list[dict[str, Any]] = field(
        default_factory=list
    )  # results of tasks and seeds beside the suite's

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
        found: dict[str, None] = {}
        for method in self.methods:
            for row in method.tasks:
                found |= dict.fromkeys(f"{ref.agent}: {ref.source}" for ref in row.references)
                scores = crafter_references(row, method.method)
                found |= dict.fromkeys(f"{ref.agent}, {CRAFTER_SCORE}: {ref.source}" for ref in scores)
        return list(found)


def load_report(suite: Suite, folder: SuiteFolder) -> SuiteReport:
    """Read the results of a suite and find what is published for its tasks; without results all runs are missing."""
    results, damaged = folder.read_all()
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
            report.absent.setdefault(why, {}).setdefault(run.task, []).append(run.seed)
    report.unplanned = [result for result in own if result["name"] not in planned]
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
        found = tuple(references(task, method.published, row.frames, method.score.metric))
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
            row.shown_frames + ("" if row.status == DONE else " (partial)"),
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
            metric = report.method.score.metric
            finals = [r["final_evaluation"] for r in row.results if r.get("final_evaluation")]
            means = [found[metric] for found in finals if metric in found]
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
    return f"{report.method.title}: {', '.join(parts)} of {_runs(sum(report.counts.values()))}"


def absent_lines(report: MethodReport) -> list[str]:
    """Return one line per reason and seeds: "missing: seeds 1, 2 of dog_run, walker_walk"."""
    lines = []
    for why, tasks in report.absent.items():
        by_seeds: dict[tuple[int, ...], list[str]] = {}
        for task, seeds in tasks.items():
            by_seeds.setdefault(tuple(seeds), []).append(task)
        lines += [f"{why}: {_seeds(seeds)} of {', '.join(names)}" for seeds, names in by_seeds.items()]
    return lines


def unplanned_line(report: MethodReport) -> str:
    """Return which results are not of the suite's tasks and seeds, or ""."""
    found = [f"seed {r['seed']} of {r['task']} ({r['status']})" for r in report.unplanned]
    return f"In the tables, but not planned by the suite: {', '.join(found)}" if found else ""


def _runs(count: int) -> str:
    return f"{count} run{'' if count == 1 else 's'}"


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def time_line(results: Sequence[dict[str, Any]]) -> str:
    """Return the sums of wall-clock time and GPU hours."""
    if not results:
        return "No results yet"
    seconds = sum(result.get("seconds") or 0.0 for result in results)
    hours = sum(result.get("gpu_hours") or 0.0 for result in results)
    text = f"{duration(seconds)} of training in {_runs(len(results))}"
    return f"{text}, {hours:.2f} GPU hours" if hours else text
