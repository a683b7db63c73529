"""`rl-lab suite NAME`: run what is missing of a benchmark, list what is done, take finished runs in."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rl_lab.tools.suite.definition import Suite, load_suite, suite_names
from rl_lab.tools.suite.results import DONE, MISSING, SuiteFolder, status_of
from rl_lab.tools.terminal import duration, number, plain_table, print_table, short

EPILOG = """examples:
  rl-lab suite                                     the suites by name
  rl-lab suite dmc_proprio                         run everything that is missing
  rl-lab suite dmc_proprio --minutes 25            stop cleanly after 25 minutes; the same command continues
  rl-lab suite dmc_proprio --list                  what is done, partial, failed and missing
  rl-lab suite dmc_proprio --tasks walker_walk --seeds 1 debug=tiny --folder /tmp/try
  rl-lab suite own.yaml --folder /shared/results   several machines may share one folder
  rl-lab report --suite dmc_proprio                the table, beside published values"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("name", nargs="?", help="a suite by name, or a YAML file (default: list the suites)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of every run")
    parser.add_argument("--folder", type=Path, help="results folder (default: outputs/suites/NAME)")
    parser.add_argument("--runs", type=Path, help="folder of the run folders (default: FOLDER/runs)")
    parser.add_argument("--minutes", type=float, help="stop cleanly after this time (default: no limit)")
    parser.add_argument("--list", action="store_true", help="show what is done, and run nothing")
    parser.add_argument("--methods", nargs="+", default=[], help="only these methods of the suite")
    parser.add_argument("--tasks", nargs="+", default=[], help="only these tasks")
    parser.add_argument("--seeds", nargs="+", type=int, default=[], help="only these seeds")
    parser.add_argument(
        "--at-once", type=int, metavar="N", help="runs at a time on each GPU (default: as many as fit)"
    )
    parser.add_argument(
        "--mps", choices=("auto", "on", "off"), default="auto", help="NVIDIA's Multi-Process Service"
    )
    parser.add_argument(
        "--weights", action="store_true", help="keep weights of finished runs, as bfloat16 in parts of 15 MiB"
    )
    parser.add_argument("--commit", help="recorded with the results where the code is no git checkout")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two progress lines")
    parser.add_argument(
        "--import",
        dest="take_in",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="take finished runs in: results of another folder, or JSON files of scripts/dev/keep_result.py",
    )
    parser.add_argument("--config-dir", action="append", default=[], help="a folder of your own configs")


def default_folder(name: str) -> Path:
    from rl_lab.run_folder import output_root

    return output_root(None) / "suites" / Path(name).stem


def main(args: argparse.Namespace) -> int:
    if args.name is None:
        print_suites(args.config_dir)
        return 0
    suite = load_suite(args.name, args.overrides, args.config_dir)
    folder = SuiteFolder(args.folder or default_folder(args.name), args.runs)
    planned = suite.select(args.methods, args.tasks, args.seeds)
    if args.take_in:
        from rl_lab.tools.suite.take_in import take_in

        for line in take_in(suite, folder, args.take_in):
            print(line)
        return 0
    if args.list:
        print(list_text(suite, folder, [run.name for run in planned]))
        return 0
    from rl_lab.tools.suite.runner import SuiteRunner

    runner = SuiteRunner(
        suite,
        planned,
        folder,
        minutes=args.minutes,
        at_once=args.at_once,
        mps=args.mps,
        weights=args.weights,
        commit=args.commit,
        every=args.every,
    )
    summary = runner.run()
    parts = [f"{len(summary.finished)} finished"]
    parts += [f"{len(summary.stopped)} stopped and saved"] if summary.stopped else []
    parts += [f"{len(summary.waiting)} not started"] if summary.waiting else []
    parts += [f"{len(summary.elsewhere)} on other machines"] if summary.elsewhere else []
    parts += [f"{len(summary.failed)} failed"] if summary.failed else []
    print(f"suite {suite.name}: {', '.join(parts)}; the same command continues")
    for name, error in summary.failed.items():
        print(f"failed: {name}: {error} (output: {folder.log(name)})")
    return 1 if summary.failed else 0


def print_suites(config_dirs: Sequence[str] = ()) -> None:
    rows = []
    for name in suite_names(config_dirs):
        suite = load_suite(name, config_dirs=config_dirs)
        rows.append((name, f"{len(suite.runs())} runs", suite.text))
    print_table(rows, title="suites: rl-lab suite NAME")


def list_text(suite: Suite, folder: SuiteFolder, names: Sequence[str]) -> str:
    """Return a table of the planned runs and of other results in the folder, and the counts."""
    results, bad = folder.read_all()
    by_name = {result["name"]: result for result in results}
    planned = {run.name: run for run in suite.runs() if run.name in names}
    rows, counts = [], dict.fromkeys((DONE, "partial", "failed", MISSING), 0)
    for name, run in planned.items():
        result = by_name.get(name)
        status = status_of(run, result)
        counts[status] += 1
        rows.append(_row(run.method.name, run.task, run.seed, status, result, run.frames))
    rows += [
        _row(
            result["method"],
            result["task"],
            result["seed"],
            f"{result['status']} (not in the suite)",
            result,
            None,
        )
        for name, result in by_name.items()
        if name not in {run.name for run in suite.runs()}
    ]
    header = ("method", "task", "seed", "status", "frames", "score", "time", "")
    text = plain_table(rows, header=header, right=(2, 4, 5, 6))
    total = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return "\n".join(
        [text, f"{suite.name}: {total or 'no runs'} of {len(planned)}; results in {folder.path}", *bad]
    )


def _row(
    method: str, task: str, seed: int, status: str, result: dict | None, budget: int | None
) -> tuple[str, ...]:
    result = result or {}
    frames = short(result.get("frames") or 0) + (f" of {short(budget)}" if budget else "")
    note = result.get("error") or ""
    seconds = result.get("seconds")
    return (
        method,
        task,
        str(seed),
        status,
        frames,
        number(result.get("score")),
        duration(seconds),
        str(note)[:100],
    )
