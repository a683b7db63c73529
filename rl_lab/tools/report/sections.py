"""The sections of a report's page: tables, figures and texts about the runs."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.errors import LabError, closest
from rl_lab.orchestration.run_log import PHASE
from rl_lab.tools.report.figures import (
    MOST_PANELS,
    cut,
    draw_small_multiples,
    draw_time,
    groups_of,
    mean_shares,
    panel_title,
    time_shares,
)
from rl_lab.tools.report.interactive import Chart
from rl_lab.tools.report.page import Section, Table
from rl_lab.tools.report.runs import OF_ONE_RUN, RunData, Summary, config_differences, newest_media
from rl_lab.tools.report.scores import (
    aggregate_table,
    draw_aggregates,
    draw_efficiency,
    draw_profiles,
    improvement_table,
    method_scores,
    published_aggregates,
    published_sources,
    published_tables,
    scale_name,
    task_table,
)
from rl_lab.tools.report.timeline import MOST_ROWS, Timeline, draw_phases, with_phases
from rl_lab.tools.terminal import NONE, bounds, count, duration, number
from rl_lab.utils.files import read_json
from rl_lab.utils.progress import point_of

MEDIA_SHOWN = 12  # files in the gallery, over all runs
# Figures of small multiples: key prefix -> heading. Other prefixes follow with their own name.
HEADINGS = {
    "train": "Training",
    "controller": "Controller",
    "eval": "Evaluation",
    "collect": "Collection",
    "workflow": "Workflow",
    "report": "Held-out batch",
    "time": "Milliseconds per call",
    "other": "Other metrics",
}
MOST_CURRICULA = 6  # with a table of their phases
FEW = 3  # a prefix with fewer metrics gets no figure of its own
LEARNING = ("train", "controller")  # with however few metrics: what a small algorithm logs
# Already plotted in the learning curve and the timing figure.
DRAWN_ELSEWHERE = (
    "collect/return_mean",
    "eval/return_mean",
    "time/*_share",
    "time/*_per_second",
    "time/run_done",
    "time/seconds_left",
    PHASE,
)


def title(runs: Sequence[RunData]) -> str:
    names = list(dict.fromkeys(run.name for run in runs))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def subtitle(runs: Sequence[RunData]) -> str:
    tasks = list(dict.fromkeys(run.task.full_name for run in runs if "environment.task" in run.config))
    counted = f"{len(runs)} runs" if len(runs) > 1 else str(runs[0].folder.path)
    more = f" and {len(tasks) - 4} more tasks" if len(tasks) > 4 else ""
    return " · ".join(
        [
            *([", ".join(tasks[:4]) + more] if tasks else []),
            counted,
            f"report of {datetime.now():%Y-%m-%d %H:%M}",
        ]
    )


def left_out_section(sentences: Sequence[str]) -> list[Section]:
    """List the runs that could not be plotted, with the reasons; no section if there are none."""
    if not sentences:
        return []
    rows = [(sentence,) for sentence in sentences]
    return [Section("Left out", tables=[Table(("runs that could not be plotted",), rows)])]


def facts(summary: Summary) -> list[tuple[str, str, str]]:
    """Return the summary values above the curve of a single run."""
    found = []
    if summary.eval_last is not None:
        spread = f"± {number(summary.eval_last_std)}" if summary.eval_last_std is not None else ""
        found.append(("last evaluation", number(summary.eval_last), spread))
    if summary.eval_best is not None:
        value, *where = summary.eval_best
        found.append(("best evaluation", number(value), f"at {point_of(*where)}"))
    if summary.train_last is not None:
        found.append(("last training return", number(summary.train_last), ""))
    total = f"of {summary.total_steps:,}" if summary.total_steps else ""
    found.append(("environment steps", f"{summary.steps:,}", total))
    found.append(("updates", f"{summary.updates:,}", f"{summary.frames:,} frames"))
    if summary.seconds is not None:
        found.append(("wall time", duration(summary.seconds), ""))
    if summary.steps_per_second is not None:
        found.append(("steps per second", number(summary.steps_per_second), ""))
    return found


def headline(runs: Sequence[RunData], summaries: Sequence[Summary]) -> Table:
    """Build the table of runs, one row each."""
    header = (
        "run",
        "seed",
        "steps",
        "frames",
        "updates",
        "eval last",
        "eval best",
        "train last",
        "wall time",
        "steps/s",
    )
    rows = []
    for run, summary in zip(runs, summaries):
        best = summary.eval_best
        spread = "" if summary.eval_last_std is None else f" ± {number(summary.eval_last_std)}"
        rows.append(
            (
                run.label,
                str(run.seed if run.seed is not None else NONE),
                count(summary.steps),
                count(summary.frames),
                count(summary.updates),
                NONE if summary.eval_last is None else number(summary.eval_last) + spread,
                NONE if best is None else f"{number(best[0])} at {point_of(*best[1:]).removeprefix('step ')}",
                number(summary.train_last),
                duration(summary.seconds),
                number(summary.steps_per_second),
            )
        )
    return Table(header, rows, right=range(1, len(header)))


def phase_section(runs: Sequence[RunData], folder: Path, pictures: bool = True) -> list[Section]:
    """Show when each phase was active, in a row for each run of several phases; no section without such a run."""
    found = with_phases(runs)
    if not found:
        return []
    path = folder / "phases.png"
    if pictures:
        draw_phases(found, path)
    alike: dict[tuple[Any, ...], list[tuple[RunData, Timeline]]] = {}
    for run, timeline in found:
        alike.setdefault(tuple(timeline.phases), []).append((run, timeline))
    tables = [_phase_table(members, len(alike) > 1) for members in list(alike.values())[:MOST_CURRICULA]]
    spans = [span for _, timeline in found for span in timeline.spans]
    notes = []
    if any(len(span.phases) > 1 for span in spans):
        notes.append("Phases that take turns more often than can be shown lie above each other in one bar.")
    if any(span.begin["step"] == span.end["step"] for span in spans):
        notes.append(
            "A phase that takes no environment steps is a thin line over steps, and a bar over wall time."
        )
    if pictures and len(found) > MOST_ROWS:
        notes.append(f"{path.name} has the first {MOST_ROWS} of {len(found)} runs.")
    if len(alike) > MOST_CURRICULA:
        notes.append(f"{len(alike) - MOST_CURRICULA} more lists of phases: see the configs.")
    charts = [Chart("phases", (PHASE,), large=True, kind="phases")]
    return [Section("Phases", " ".join(notes), [path] if pictures else [], tables, charts=charts)]


def _phase_table(members: Sequence[tuple[RunData, Timeline]], named: bool) -> Table:
    """Build the table of the phases of one config, with what each took: the mean over its runs."""
    timelines = [timeline for _, timeline in members]
    rows = []
    for place, phase in enumerate(timelines[0].phases):
        took = {
            key: float(np.mean([timeline.totals[place][key] for timeline in timelines]))
            for key in ("step", "updates", "seconds")
        }
        counts = [f"{took[key]:,.0f}" if np.isfinite(took[key]) else NONE for key in ("step", "updates")]
        time = duration(took["seconds"]) if np.isfinite(took["seconds"]) else NONE
        rows.append((phase.name, phase.type, ", ".join(phase.hooks), phase.duration, *counts, time))
    what = "" if len(members) == 1 else f"mean of {len(members)} runs"
    runs = ", ".join(dict.fromkeys(run.group for run, _ in members)) if named else ""
    title = ": ".join(part for part in (cut(runs, 160), what) if part)
    return Table(
        ("phase", "type", "hooks", "duration", "steps", "updates", "wall time"), rows, range(4, 7), title
    )


def score_section(runs: Sequence[RunData], folder: Path) -> list[Section]:
    """Build the section of scores over seeds and tasks.

    None for a single run, whose values are at the top.
    """
    methods = method_scores(runs)
    if len(runs) < 2 or not methods:
        return []
    plots = []
    for name, draw in (("aggregates", draw_aggregates), ("profiles", draw_profiles)):
        if draw(methods, folder / f"{name}.png"):
            plots.append(folder / f"{name}.png")
    if draw_efficiency(runs, folder / "efficiency.png"):
        plots.append(folder / "efficiency.png")
    tables = [task_table(methods)]
    if over_tasks := aggregate_table(methods):
        over_tasks.title = f"{scale_name(methods)} scores over tasks, with 95 % intervals"
        tables.append(over_tasks)
    if improvement := improvement_table(methods):
        improvement.title = "probability of improvement"
        tables.append(improvement)
    note = (
        "A run's score is its mean evaluation return over the last tenth of its steps (training return without any). "
        "Intervals are percentiles of the stratified bootstrap over runs (Agarwal et al. 2021)."
    )
    if len({run.task.full_name for run in runs}) > 1 and not scale_name(methods):
        note += " At least one task has no published normalisation, so there are no aggregates over tasks."
    return [Section("Scores", note=note, plots=plots, tables=tables)]


def published_section(runs: Sequence[RunData]) -> list[Section]:
    """Compare our scores with published ones, if the suite has any."""
    methods = method_scores(runs)
    tables = published_tables(methods)
    if not tables:
        return []
    if together := published_aggregates(methods):
        tables.insert(0, together)
    note = (
        "Scores are comparable only with the same number of frames and the same evaluation protocol. "
        "Normalised: Atari by human and random scores, DeepMind Control by 1,000."
    )
    sources = [("sources of the published scores", "\n".join(published_sources(methods)))]
    return [Section("Published", note=note, tables=tables, texts=sources)]


def evaluation_section(runs: Sequence[RunData]) -> list[Section]:
    """The results of `rl-lab eval` on these runs, newest weights first."""
    rows = []
    for run in runs:
        files = sorted(run.folder.report.glob("eval_[0-9]*_seed*.json"), reverse=True)
        for file in files[:MOST_EVALUATIONS]:
            try:
                result = read_json(file)
                span = result["return_intervals"]["mean"]
                rows.append(
                    (
                        run.label,
                        point_of(result["step"], result.get("updates")).removeprefix("step "),
                        str(result["episodes"]),
                        number(result["return_mean"]),
                        number(result["return_std"]),
                        bounds(*span) if span else NONE,
                        "sampled" if result["sample"] else "deterministic",
                        str(result["seed"]),
                    )
                )
            except (OSError, LabError, KeyError, TypeError, ValueError):
                continue  # not written by this version
    header = ("run", "weights of step", "episodes", "return", "std", "95 % of the mean", "actions", "seed")
    note = "New episodes of saved weights, by rl-lab eval."
    return (
        [Section("Evaluations", note=note, tables=[Table(header, rows, right=range(1, 6))])] if rows else []
    )


def metric_sections(
    runs: Sequence[RunData], patterns: Sequence[str] | None, folder: Path, pictures: bool = True
) -> list[Section]:
    """Plot small multiples of all metrics, or of those matching the patterns; one section per key prefix.

    pictures: False: only interactive plots, and no files
    """
    known = list(dict.fromkeys(key for run in runs for key in run.metrics.names()))
    if patterns is None:
        keys = [key for key in known if not any(fnmatch.fnmatchcase(key, drawn) for drawn in DRAWN_ELSEWHERE)]
    else:
        for pattern in patterns:
            if not fnmatch.filter(known, pattern):
                raise LabError(f"--keys {pattern}: no such metric was logged.{closest(pattern, known)}")
        keys = [key for key in known if any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)]
    by_prefix: dict[str, list[str]] = {}
    for key in sorted(keys, key=_metric_order):
        by_prefix.setdefault(key.partition("/")[0], []).append(key)
    own = LEARNING if patterns is None else ()
    few = [prefix for prefix, members in by_prefix.items() if len(members) < FEW and prefix not in own]
    # One figure per prefix with many metrics, and one for the others.
    families = {prefix: by_prefix[prefix] for prefix in _in_order(by_prefix) if prefix not in few}
    if few:
        families["other"] = [key for prefix in _in_order(few) for key in by_prefix[prefix]]
    sections = []
    for name, members in families.items():
        path = folder / f"metrics_{re.sub(r'[^A-Za-z0-9_-]+', '_', name)}.png"
        flat = {} if patterns is not None else constants(runs, members)
        if len(flat) == len(members):
            flat = {}
        moving = [key for key in members if key not in flat]
        charts = [Chart(key if name == "other" else panel_title(key), (key,)) for key in moving]
        plots = [path] if pictures else []
        notes = []
        if pictures:
            shown = draw_small_multiples(runs, moving, path, full_names=name == "other")
            if len(shown) < len(moving):
                more = len(moving) - len(shown)
                notes = [f"{more} more metrics than the {MOST_PANELS} of {path.name}: choose with --keys"]
        if flat:
            notes.append("Constant: " + ", ".join(f"{key} {number(value)}" for key, value in flat.items()))
        sections.append(Section(HEADINGS.get(name, name), note=". ".join(notes), plots=plots, charts=charts))
    return sections


def constants(runs: Sequence[RunData], keys: Sequence[str]) -> dict[str, float]:
    """Return the metrics that have one and the same value in all log lines of all runs: a flat panel says little."""
    found = {}
    for key in keys:
        values = {float(value) for run in runs for value in run.metrics.curve(key).y}
        if len(values) == 1 and sum(len(run.metrics.curve(key)) for run in runs) > 1:
            found[key] = values.pop()
    return found


def speed_section(runs: Sequence[RunData], folder: Path, pictures: bool = True) -> list[Section]:
    """Show steps and updates per second, and the share of wall time by section of the loop."""
    path = folder / "speed.png"
    shares = {
        group: mean_shares([time_shares(run) for run in members])
        for group, members in groups_of(runs).items()
    }
    rates = ("time/env_steps_per_second", "time/updates_per_second")
    charts = [
        Chart(panel_title(key).replace("_", " "), (key,))
        for key in rates
        if any(len(run.metrics.curve(key)) for run in runs)
    ]
    if (not charts and not any(shares.values())) or (pictures and not draw_time(runs, path)):
        return []
    names = list(dict.fromkeys(name for share in shares.values() for name in share))
    rows = [
        (
            name.replace("_", " "),
            *(f"{share.get(name, 0.0):.1%}" if share else NONE for share in shares.values()),
        )
        for name in sorted(
            names, key=lambda name: (name == "other", -max(s.get(name, 0.0) for s in shares.values()))
        )
    ]
    table = Table(("share of wall time", *shares), rows, right=range(1, len(shares) + 1))
    return [Section("Speed", plots=[path] if pictures else [], charts=charts, tables=[table] if rows else [])]


def _metric_order(key: str) -> tuple[int, str]:
    """Sort key of the metrics of one heading: the totals, then losses, then the others."""
    name = key.partition("/")[2]
    return (0 if name == "loss" or name.endswith("return_mean") else 1 if "loss" in name else 2, key)


def _in_order(prefixes: Iterable[str]) -> list[str]:
    order = list(HEADINGS)
    return sorted(prefixes, key=lambda name: (order.index(name) if name in order else len(order), name))


def config_section(runs: Sequence[RunData], summaries: Sequence[Summary]) -> Section:
    """Show config differences between groups, one config per group, and the folder of each run."""
    firsts = list({run.group: run for run in reversed(runs)}.values())[::-1]
    differences = config_differences(firsts).items()
    rows = [(path, *map(_value, row)) for path, row in sorted(differences) if not path.startswith(OF_ONE_RUN)]
    tables = [Table(("difference", *(run.group for run in firsts)), rows)] if rows else []
    texts = [
        (
            f"config of {run.label}" if len(runs) > 1 else "config",
            run.folder.config_file.read_text(encoding="utf-8", errors="replace"),
        )
        for run in firsts
    ]
    for run, summary in zip(runs, summaries):
        about = [str(run.folder.path), summary.code, *summary.checkpoints]
        whose = f" of {run.label}" if len(runs) > 1 else ""
        texts.append((f"folder, code and checkpoints{whose}", "\n".join(line for line in about if line)))
    return Section("Config", tables=tables, texts=texts)


MOST_EVALUATIONS = 12  # of one run
# Part of a file's name -> what it shows.
MEANINGS = {
    "open_loop": "truth | model | difference; framed green while the model observes, red while it dreams",
    "imagination": "rollouts that the policy is trained on, dreamed from replayed states, side by side",
    "reconstruction": "truth | model",
    "eval_best": "the best of the evaluated episodes",
    "eval_median": "the median of the evaluated episodes",
    "eval_worst": "the worst of the evaluated episodes",
}

VALUES = "one sequence over time; grey: the truth; green: the model observes it; red: it predicts from actions alone"


def media(runs: Sequence[RunData]) -> list[tuple[Path, str]]:
    """Return the newest videos and images of every run, with captions."""
    each = max(2, MEDIA_SHOWN // len(runs))
    found = []
    for run in runs:
        for file in newest_media(run, each):
            words = _caption(file.relative_to(run.folder.media))
            found.append((file, f"{run.label}: {words}" if len(runs) > 1 else words))
    return found[: 2 * MEDIA_SHOWN]


def _caption(file: Path) -> str:
    """episodes/test/eval_episode_000020000.mp4 -> "eval episode, step 20,000 (episodes/test)"."""
    name, _, step = file.stem.rpartition("_")
    if not name or not step.isdigit():
        name, step = file.stem, ""
    words = name.replace("_", " ") + (f", step {int(step):,}" if step else "")
    meaning = next((f": {text}" for part, text in MEANINGS.items() if part in name), "")
    if "open_loop" in name and file.suffix == ".png":
        meaning = f": {VALUES}"
    return f"{words.removeprefix('report ')} ({file.parent.as_posix()}){meaning}"


def _value(value: Any) -> str:
    return NONE if value is None else str(value)
