"""`rl-lab report RUN…`: curves as PNG and one self-contained HTML page, from what lies in the run folders."""

from __future__ import annotations

import argparse
import fnmatch
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rl_lab.errors import LabError, closest
from rl_lab.tools.report_figures import MOST_PANELS, draw_learning_curve, draw_small_multiples, draw_time
from rl_lab.tools.report_page import Page, Section, Table, write_page
from rl_lab.tools.report_runs import (
    OF_ONE_RUN,
    RunData,
    Summary,
    config_differences,
    find_runs,
    load_runs,
    newest_media,
    summarize,
)

MEDIA_SHOWN = 12  # files in the gallery, over all runs
# Pictures of small multiples: prefix of the keys -> heading. Any other prefix follows under its own name.
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
FEW = 3  # metrics of one prefix that get no picture of their own
# Drawn by the learning curve and the time picture already.
DRAWN_ELSEWHERE = ("collect/return_mean", "eval/return_mean", "time/*_share", "time/*_per_second")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="run folders, or a folder above several (default: the newest run)",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="where to write (default: RUN/report; ./report for several runs)",
    )
    parser.add_argument(
        "--keys",
        nargs="+",
        metavar="KEY",
        help="draw these metrics only; patterns such as 'train/*' are allowed",
    )
    parser.add_argument("--output-root", metavar="DIR", help="where to look for the newest run")


def main(args: argparse.Namespace) -> int:
    for path in write_report(args.runs, out=args.out, keys=args.keys, output_root=args.output_root):
        print(path)
    return 0


def write_report(
    runs: Sequence[str | Path],
    *,
    out: Path | str | None = None,
    keys: Sequence[str] | None = None,
    output_root: str | None = None,
) -> list[Path]:
    """Write pictures and page; returns their paths, the page first and the learning curve second."""
    loaded = load_runs(find_runs(runs, output_root))
    single = loaded[0].folder if len(loaded) == 1 else None
    folder = Path(out) if out is not None else (single.report if single else Path("report"))
    folder.mkdir(parents=True, exist_ok=True)
    curve = folder / "curve.png"
    drawn = draw_learning_curve(loaded, curve)
    multiples = _small_multiples(loaded, keys, folder)
    speed = folder / "speed.png"
    timed = draw_time(loaded, speed)

    summaries = [summarize(run) for run in loaded]
    page = Page(
        title=_title(loaded), subtitle=_subtitle(loaded), facts=_facts(summaries[0]) if single else ()
    )
    note = "" if drawn else "No episode has ended yet."
    page.sections.append(Section("Learning curve", note=note, plots=[curve]))
    page.sections.append(Section("Runs", tables=[_headline(loaded, summaries)]))
    if media := _media(loaded):
        page.sections.append(Section("Media", media=media))
    page.sections += multiples
    if timed:
        page.sections.append(Section("Speed", plots=[speed]))
    page.sections.append(_config(loaded, summaries))
    index = write_page(page, folder / "index.html")
    plots = [plot for section in page.sections for plot in section.plots]
    return [index, *plots]


def _small_multiples(runs: Sequence[RunData], patterns: Sequence[str] | None, folder: Path) -> list[Section]:
    known = list(dict.fromkeys(key for run in runs for key in run.metrics.names()))
    if patterns is None:
        keys = [key for key in known if not any(fnmatch.fnmatchcase(key, drawn) for drawn in DRAWN_ELSEWHERE)]
    else:
        for pattern in patterns:
            if not fnmatch.filter(known, pattern):
                raise LabError(f"--keys {pattern}: no such metric was logged.{closest(pattern, known)}")
        keys = [key for key in known if any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)]
    by_prefix: dict[str, list[str]] = {}
    for key in sorted(keys):
        by_prefix.setdefault(key.partition("/")[0], []).append(key)
    few = [prefix for prefix, members in by_prefix.items() if len(members) < FEW]
    # One picture for each large family, and one for all that is left.
    families = {prefix: by_prefix[prefix] for prefix in _in_order(by_prefix) if prefix not in few}
    if few:
        families["other"] = [key for prefix in _in_order(few) for key in by_prefix[prefix]]
    sections = []
    for name, members in families.items():
        path = folder / f"metrics_{re.sub(r'[^A-Za-z0-9_-]+', '_', name)}.png"
        shown = draw_small_multiples(runs, members, path, full_names=name == "other")
        left_out = len(members) - len(shown)
        note = f"{left_out} more than the {MOST_PANELS} shown: choose with --keys" if left_out else ""
        sections.append(Section(HEADINGS.get(name, name), note=note, plots=[path]))
    return sections


def _in_order(prefixes: Iterable[str]) -> list[str]:
    order = list(HEADINGS)
    return sorted(prefixes, key=lambda name: (order.index(name) if name in order else len(order), name))


def _title(runs: Sequence[RunData]) -> str:
    names = list(dict.fromkeys(run.name for run in runs))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _subtitle(runs: Sequence[RunData]) -> str:
    tasks = list(
        dict.fromkeys(str(run.config["environment.task"]) for run in runs if "environment.task" in run.config)
    )
    count = f"{len(runs)} runs" if len(runs) > 1 else str(runs[0].folder.path)
    return " · ".join(
        [*([", ".join(tasks[:4])] if tasks else []), count, f"report of {datetime.now():%Y-%m-%d %H:%M}"]
    )


def _facts(summary: Summary) -> list[tuple[str, str, str]]:
    """The big numbers above the curve of a single run."""
    facts = []
    if summary.eval_last is not None:
        spread = f"± {_number(summary.eval_last_std)}" if summary.eval_last_std is not None else ""
        facts.append(("last evaluation", _number(summary.eval_last), spread))
    if summary.eval_best is not None:
        value, step = summary.eval_best
        facts.append(("best evaluation", _number(value), f"at step {step:,.0f}"))
    if summary.train_last is not None:
        facts.append(("last training return", _number(summary.train_last), ""))
    total = f"of {summary.total_steps:,}" if summary.total_steps else ""
    facts.append(("environment steps", f"{summary.steps:,}", total))
    facts.append(("updates", f"{summary.updates:,}", f"{summary.frames:,} frames"))
    if summary.seconds is not None:
        facts.append(("wall time", _duration(summary.seconds), ""))
    if summary.steps_per_second is not None:
        facts.append(("steps per second", _number(summary.steps_per_second), ""))
    return facts


def _headline(runs: Sequence[RunData], summaries: Sequence[Summary]) -> Table:
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
        spread = "" if summary.eval_last_std is None else f" ± {_number(summary.eval_last_std)}"
        rows.append(
            (
                run.label,
                str(run.seed if run.seed is not None else "–"),
                f"{summary.steps:,}",
                f"{summary.frames:,}",
                f"{summary.updates:,}",
                "–" if summary.eval_last is None else _number(summary.eval_last) + spread,
                "–" if best is None else f"{_number(best[0])} at {best[1]:,.0f}",
                _number(summary.train_last),
                "–" if summary.seconds is None else _duration(summary.seconds),
                _number(summary.steps_per_second),
            )
        )
    return Table(header, rows, numbers=range(1, len(header)))


def _config(runs: Sequence[RunData], summaries: Sequence[Summary]) -> Section:
    """What differs between groups (seeds are in the table of runs), one config per group, and where each run lies."""
    firsts = list({run.group: run for run in reversed(runs)}.values())[::-1]
    differences = config_differences(firsts).items()
    rows = [(path, *map(_value, row)) for path, row in sorted(differences) if not path.startswith(OF_ONE_RUN)]
    tables = [Table(("what differs", *(run.group for run in firsts)), rows)] if rows else []
    texts = [
        (f"config of {run.label}" if len(runs) > 1 else "config", run.folder.config_file.read_text())
        for run in firsts
    ]
    for run, summary in zip(runs, summaries):
        about = [str(run.folder.path), summary.code, *summary.checkpoints]
        whose = f" of {run.label}" if len(runs) > 1 else ""
        texts.append((f"folder, code and checkpoints{whose}", "\n".join(line for line in about if line)))
    return Section("Config", tables=tables, texts=texts)


def _media(runs: Sequence[RunData]) -> list[tuple[Path, str]]:
    each = max(2, MEDIA_SHOWN // len(runs))
    media = []
    for run in runs:
        for file in newest_media(run, each):
            caption = _caption(file.relative_to(run.folder.media))
            media.append((file, f"{run.label}: {caption}" if len(runs) > 1 else caption))
    return media[: 2 * MEDIA_SHOWN]


def _caption(file: Path) -> str:
    """episodes/test/eval_episode_000020000.mp4 -> "eval episode, step 20,000 (episodes/test)"."""
    name, _, number = file.stem.rpartition("_")
    if not name or not number.isdigit():
        name, number = file.stem, ""
    words = name.replace("_", " ") + (f", step {int(number):,}" if number else "")
    return f"{words} ({file.parent.as_posix()})"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _value(value: Any) -> str:
    return "–" if value is None else str(value)
