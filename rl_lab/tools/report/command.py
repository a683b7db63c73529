"""`rl-lab report RUN…`: figures and one self-contained HTML page from run folders."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rl_lab.errors import LabError
from rl_lab.run_folder import RunFolder
from rl_lab.tools.report.figures import draw_learning_curve, has_returns
from rl_lab.tools.report.interactive import Chart, available, charts_of, learning_charts, missing
from rl_lab.tools.report.page import Page, Section, write_page
from rl_lab.tools.report.runs import RunData, find_runs, load_readable, plot_problem
from rl_lab.tools.report.sections import (
    config_section,
    evaluation_section,
    facts,
    headline,
    left_out_section,
    media,
    metric_sections,
    phase_section,
    published_section,
    score_section,
    speed_section,
    subtitle,
    title,
)
from rl_lab.tools.terminal import WorkProgress

PARTS = 4  # of a page that take time

EPILOG = """examples:
  rl-lab report                                     the newest run, or the newest sweep
  rl-lab report outputs/multirun/2026-11-15/14-30-05   every seed of a sweep, with bands
  rl-lab report RUN RUN RUN --by workflow           runs of one workflow count as seeds of one method
  rl-lab report --serve --port 8000 outputs         a live page over all runs below a folder
  rl-lab report --dream RUN RUN --horizon 30        compare the predictions of their world models
  rl-lab report --suite dmc_proprio                 a suite's tables beside published values
  rl-lab report --suite all --markdown FILE         every suite, with what is missing"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from rl_lab.tools.dream_report import add_arguments as add_dream_arguments

    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="run folders, or a parent folder of several (default: the newest run)",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="output folder (default: RUN/report, or that of the folder of all runs; ./report for several words)",
    )
    parser.add_argument(
        "--by",
        choices=("config", "experiment", "workflow"),
        default="config",
        help="what runs must share to count as seeds of one method (default: the complete config)",
    )
    parser.add_argument(
        "--keys",
        nargs="+",
        metavar="KEY",
        help="plot only these metrics; patterns such as 'train/*' are allowed",
    )
    parser.add_argument(
        "--static", action="store_true", help="pictures instead of interactive plots: a smaller page"
    )
    parser.add_argument("--output-root", metavar="DIR", help="folder in which the newest run is searched")
    served = parser.add_argument_group("live page")
    served.add_argument("--serve", action="store_true", help="serve the page and update it")
    served.add_argument("--port", type=int, default=8000)
    served.add_argument(
        "--host", default="127.0.0.1", help="address to serve on; any but loopback needs a token"
    )
    served.add_argument("--token", help="your own token (default: generated and printed if one is needed)")
    suites = parser.add_argument_group("suite report")
    suites.add_argument(
        "--suite", nargs="+", metavar="NAME", help="report on the results of these suites (rl-lab suite); all"
    )
    suites.add_argument(
        "--results",
        type=Path,
        metavar="DIR",
        help="folder of their results folders (default: outputs/suites)",
    )
    suites.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables as Markdown instead")
    add_dream_arguments(parser.add_argument_group("dream report"))


def main(args: argparse.Namespace) -> int:
    if args.dream and args.serve:
        raise LabError("--dream cannot be combined with --serve: a dream report is a static page")
    if args.suite:
        return _suite_report(args)
    if args.results or args.markdown:
        raise LabError("--results and --markdown need --suite NAME")
    if args.dream:
        from rl_lab.tools.dream_report import run as dream_report

        return dream_report(args)
    if args.serve:
        from rl_lab.tools.report.serve import serve

        return serve(
            args.runs,
            host=args.host,
            port=args.port,
            token=args.token,
            by=args.by,
            output_root=args.output_root,
        )
    for path in write_report(
        args.runs,
        out=args.out,
        keys=args.keys,
        output_root=args.output_root,
        by=args.by,
        interactive=not args.static,
    ):
        print(path)
    if not args.static and not available():
        _print_error(missing())
    return 0


def _suite_report(args: argparse.Namespace) -> int:
    from rl_lab.tools.report.suite_page import write_suite_report

    if args.dream or args.serve or args.runs:
        raise LabError(
            "--suite cannot be combined with --dream, --serve or run folders: it reports on results files"
        )
    files = write_suite_report(args.suite, results=args.results, out=args.out, markdown_file=args.markdown)
    for path in files:
        print(path)
    return 0


def write_report(
    runs: Sequence[str | Path],
    *,
    out: Path | str | None = None,
    keys: Sequence[str] | None = None,
    output_root: str | None = None,
    by: str = "config",
    say: Callable[[str], None] | None = None,  # called for runs that cannot be plotted; None: print to stderr
    interactive: bool = True,
) -> list[Path]:
    """Write figures and page; returns their paths, the page first and the learning curve second.

    interactive: draw plots with zoom and values, if the package plotly is installed
    """
    found = find_runs(runs, output_root)
    folder = Path(out) if out is not None else _default_folder(runs, found)
    with WorkProgress("drawing the report", PARTS) as progress:
        page, left_out = page_of_runs(found, folder, by, keys, interactive=interactive, tick=progress.step)
    for sentence in left_out:
        (say or _print_error)(f"left out: {sentence}")
    index = write_page(page, folder / "index.html")
    return [index, *(plot for section in page.sections for plot in section.plots)]


def _default_folder(runs: Sequence[str | Path], found: Sequence[RunFolder]) -> Path:
    """Return the report folder of one run, of the one folder that has all runs, such as a sweep, or ./report."""
    if len(found) == 1:
        return found[0].output().report
    parents = {folder.path.parent for folder in found}
    parent = Path(runs[0]) if len(runs) == 1 else parents.pop() if not runs and len(parents) == 1 else None
    writable = parent is not None and parent.is_dir() and os.access(parent, os.W_OK)
    return parent / "report" if parent is not None and writable else Path("report")


def _print_error(text: str) -> None:
    print(text, file=sys.stderr)


def page_of_runs(
    folders: Sequence[RunFolder],
    folder: Path,
    by: str = "config",
    keys: Sequence[str] | None = None,
    *,
    interactive: bool = True,
    pictures: bool = True,
    tick: Callable[[str], None] = lambda part: None,
) -> tuple[Page, list[str]]:
    """Return the page of all runs that can be plotted, and one sentence about each of the others.

    pictures: False: draw no picture of what is plotted interactively
    tick:     called with the name of each part of the page, PARTS in all, before it is drawn

    LabError if no run can be plotted.
    """

    def build(runs: Sequence[RunData]) -> Page:
        return build_page(runs, folder, keys, interactive=interactive, pictures=pictures, tick=tick)

    runs, left_out = load_readable(folders, by)
    page = None
    if runs:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            page = build(runs)
        except LabError:  # about --keys, not about a run
            raise
        except Exception:
            drawable, bad = _plot_each(runs)
            if not bad:
                raise
            left_out |= bad
            runs, _ = load_readable(drawable, by)
            page = build(runs) if runs else None
    if page is None:
        sentence, cause = next(iter(left_out.items()))
        more = f"; {len(left_out) - 1} more runs cannot be plotted either" if len(left_out) > 1 else ""
        raise LabError(sentence + more) from cause
    page.sections[:0] = left_out_section(list(left_out))
    return page, list(left_out)


def _plot_each(runs: Sequence[RunData]) -> tuple[list[RunFolder], dict[str, Exception]]:
    """Plot every run separately; returns the runs that can be plotted, and sentence -> error of the others."""
    drawable, bad = [], {}
    with tempfile.TemporaryDirectory(prefix="rl_lab_report_") as scratch:
        for run in runs:
            try:
                build_page([run], Path(scratch))
                drawable.append(run.folder)
            except Exception as error:
                bad[plot_problem(run.folder, error)] = error
    return drawable, bad


def build_page(
    runs: Sequence[RunData],
    folder: Path,
    keys: Sequence[str] | None = None,
    *,
    interactive: bool = True,
    pictures: bool = True,
    tick: Callable[[str], None] = lambda part: None,
) -> Page:
    """Draw every figure into `folder` and assemble the page; the arguments are those of `page_of_runs`."""
    summaries = [run.summary for run in runs]
    page = Page(
        title=title(runs), subtitle=subtitle(runs), facts=facts(summaries[0]) if len(runs) == 1 else ()
    )
    if interactive and available():
        page.charts = charts_of(runs)
    elif interactive:
        page.hint = missing()
    pictures = pictures or page.charts is None
    tick("learning curve")
    page.sections.append(_learning_section(runs, folder, pictures))
    page.sections += phase_section(runs, folder, pictures)
    page.sections.append(Section("Runs", tables=[headline(runs, summaries)]))
    page.sections += evaluation_section(runs)
    tick("scores")
    page.sections += score_section(runs, folder)
    page.sections += published_section(runs)
    if shown := media(runs):
        page.sections.append(Section("Media", media=shown))
    tick("metrics")
    page.sections += metric_sections(runs, keys, folder, pictures)
    tick("speed")
    page.sections += speed_section(runs, folder, pictures)
    page.sections.append(config_section(runs, summaries))
    return page


def _learning_section(runs: Sequence[RunData], folder: Path, pictures: bool) -> Section:
    curve = folder / "curve.png"
    drawn = draw_learning_curve(runs, curve) if pictures else any(has_returns(run) for run in runs)
    note = "" if drawn else "No episode has ended yet."
    if drawn and len({run.group for run in runs}) < len(runs):
        note = "Thick lines: mean over seeds; bands: its 95 % bootstrap interval; thin lines: single seeds."
    elif drawn:
        note = "Band: the standard deviation over the episodes of an evaluation."
    charts: list[Chart] = learning_charts(runs)
    return Section("Learning curve", note=note, plots=[curve] if pictures else [], charts=charts)
