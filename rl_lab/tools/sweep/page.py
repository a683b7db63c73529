"""The page of a sweep: the best trial, importances, each parameter against the value, all trials."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_lab.tools.report.figures import (
    COLORS,
    SOFT,
    cut,
    forms,
    name_legend,
    show_placeholder,
    step_axis,
)
from rl_lab.tools.report.page import Page, Section, Table, write_page
from rl_lab.tools.sweep.definition import Definition, Parameter, word_of
from rl_lab.tools.sweep.study import SweepFolder, Trials
from rl_lab.tools.terminal import duration, number
from rl_lab.utils.files import make_folder

COMPLETE, PRUNED, FAIL, RUNNING = "complete", "pruned", "failed", "running"
_STATES = {"COMPLETE": COMPLETE, "PRUNED": PRUNED, "FAIL": FAIL, "RUNNING": RUNNING, "WAITING": RUNNING}
_COLOR = {COMPLETE: COLORS[0], PRUNED: COLORS[4], RUNNING: COLORS[2]}
BEST = COLORS[1]
COLUMNS = 3  # panels in a row


def write_sweep_page(folder: SweepFolder, trials: Trials) -> Path:
    """Write FOLDER/index.html and its figures; return the page's path."""
    definition, rows, best = trials.definition, trials.all(), trials.best
    figures = folder.path / "figures"
    make_folder(figures)
    shares = trials.importances()
    draw_history(rows, definition.direction, definition.metric, best, figures / "history.png")
    draw_importances(shares, figures / "importances.png")
    draw_parameters(rows, definition.search, definition.metric, best, figures / "parameters.png")
    draw_curves(rows, definition.metric, best, figures / "curves.png")
    page = Page(
        title=f"Sweep: {folder.path.name}",
        subtitle=" ".join(definition.overrides),
        facts=_facts(rows, best, definition),
        sections=[
            *_best_section(trials, best),
            Section(
                "Trials in order",
                f"{definition.metric} of each trial and the best complete one until then. "
                "A pruned or running trial is shown with its last evaluation.",
                plots=[figures / "history.png"],
            ),
            Section(
                "Importances",
                "How much each parameter separates the best tenth of the complete trials from all of them, in shares "
                "of 100 % (PED-ANOVA, arXiv 2304.10255). Optuna recommends five trials in that tenth, so 50: with "
                "fewer, the shares change with each further trial.",
                plots=[figures / "importances.png"],
            ),
            Section(
                "Each parameter against the value",
                "One point for each trial. Filled: complete, the best one in another color. Hollow: pruned or still "
                "running, with its last evaluation.",
                plots=[figures / "parameters.png"],
            ),
            Section(
                "Evaluations of all trials",
                "A line that ends early is that of a pruned or running trial.",
                plots=[figures / "curves.png"],
            ),
            Section("All trials", tables=[_table(rows, definition, best)]),
            Section("What was searched", tables=[_search_table(definition.search, shares)]),
        ],
    )
    return write_page(page, folder.page)


def _facts(rows: Sequence[Any], best: Any, definition: Any) -> list[tuple[str, str, str]]:
    states = [_STATES[trial.state.name] for trial in rows]
    counts = [f"{states.count(state)} {state}" for state in (PRUNED, FAIL, RUNNING) if state in states]
    facts = [("trials", str(states.count(COMPLETE)), "complete" + "".join(f", {text}" for text in counts))]
    if best is not None:
        facts.insert(
            0,
            (
                f"best {definition.metric}",
                number(best.value),
                f"trial {best.number}, {definition.value} evaluation",
            ),
        )
    seconds = sum(_seconds(trial) or 0.0 for trial in rows)
    return [*facts, ("time", duration(seconds), "of all trials"), ("pruner", definition.pruner, "")]


def _seconds(trial: Any) -> float | None:
    if trial.datetime_start is None or trial.datetime_complete is None:
        return None
    return float((trial.datetime_complete - trial.datetime_start).total_seconds())


def _value(trial: Any) -> float:
    """Return the value of a trial, of an incomplete one its last evaluation; NaN without any."""
    if trial.value is not None:
        return float(trial.value)
    return (
        float(trial.intermediate_values[max(trial.intermediate_values)])
        if trial.intermediate_values
        else math.nan
    )


def _rank(trial: Any, up: bool) -> float:
    """Return what complete trials are sorted by, the best first; the others are in the order of their numbers."""
    return 0.0 if trial.state.name != "COMPLETE" else trial.value * (-1.0 if up else 1.0)


def _table(rows: Sequence[Any], definition: Definition, best: Any) -> Table:
    search = definition.search
    up = definition.direction == "maximize"
    order = sorted(rows, key=lambda trial: (trial.state.name != "COMPLETE", _rank(trial, up), trial.number))
    cells = [
        [
            str(trial.number),
            _STATES[trial.state.name],
            number(_value(trial)),
            str(max(trial.intermediate_values, default=0)),
            duration(_seconds(trial)),
            *(_shown(trial.params.get(item.name)) for item in search),
        ]
        for trial in order
    ]
    strong = [index for index, trial in enumerate(order) if best is not None and trial.number == best.number]
    header = ["trial", "state", "value", "steps", "time", *(item.name for item in search)]
    return Table(header, cells, right=(0, 2, 3, 4), strong=strong)


def _search_table(search: Sequence[Parameter], shares: dict[str, float]) -> Table:
    rows = [
        [item.name, item.describe(), f"{shares[item.name]:.0%}" if item.name in shares else ""]
        for item in search
    ]
    return Table(["key", "range", "importance"], rows, right=(2,))


def _best_section(trials: Trials, best: Any) -> list[Section]:
    if best is None:
        return []
    words = trials.definition.words(best.params)
    text = "rl-lab train " + " ".join(shlex.quote(word) for word in words)
    note = (
        "The best of many trials is partly luck. Train it with new seeds before you compare it: add "
        "--multirun experiment.seed=1,2,3."
    )
    values = [[item.name, _shown(best.params.get(item.name))] for item in trials.definition.search]
    table = Table(["key", "value"], values)
    return [Section(f"The best: trial {best.number}", note, tables=[table], texts=[("its command", text)])]


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else word_of(value)


# --- Figures ---


def draw_history(rows: Sequence[Any], direction: str, metric: str, best: Any, path: Path) -> None:
    from matplotlib.ticker import MaxNLocator

    for form in forms(path):
        with form.figure(9.0, 3.6) as figure:
            axes = figure.add_subplot()
            shown: dict[str, str] = {}
            for trial in rows:
                state, value = _STATES[trial.state.name], _value(trial)
                if state in _COLOR and math.isfinite(value):
                    shown[state] = _COLOR[state]
                    _point(axes, trial.number, value, state)
            if best is not None:
                shown[f"best: trial {best.number}"] = BEST
                _point(axes, best.number, best.value, COMPLETE, BEST)
            done = [trial for trial in rows if trial.state.name == "COMPLETE"]
            better = max if direction == "maximize" else min
            until = [better(trial.value for trial in done[: index + 1]) for index in range(len(done))]
            if until:
                places = [trial.number for trial in done] + [rows[-1].number]
                axes.step(places, [*until, until[-1]], where="post", color=SOFT, linewidth=1.5)
                shown["best so far"] = SOFT
            if not shown:
                show_placeholder(axes, "no value yet")
            axes.set_xlabel("trial")
            axes.set_ylabel(metric)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            if shown:
                name_legend(figure, shown)


def _point(axes: Any, x: float, y: float, state: str, color: str = "") -> None:
    color = color or _COLOR[state]
    face = color if state == COMPLETE else "white"
    axes.plot([x], [y], "o", color=color, markerfacecolor=face, markersize=6, markeredgewidth=1.4)


def draw_importances(shares: dict[str, float], path: Path) -> None:
    for form in forms(path):
        with form.figure(9.0, max(1.6, 0.5 + 0.38 * len(shares))) as figure:
            axes = figure.add_subplot()
            if not shares:
                show_placeholder(axes, "importances need two parameters\nand four complete trials")
                continue
            names = list(shares)[::-1]
            bars = axes.barh(
                [cut(name, 32 if form.narrow else 60) for name in names],
                [shares[name] for name in names],
                color=COLORS[0],
            )
            axes.bar_label(bars, [f"{shares[name]:.0%}" for name in names], padding=4, color=SOFT)
            axes.set_xlim(0, max(shares.values()) * 1.12 or 1)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
            axes.grid(axis="y", visible=False)


def draw_parameters(
    rows: Sequence[Any], search: Sequence[Parameter], metric: str, best: Any, path: Path
) -> None:
    from matplotlib.ticker import NullFormatter

    for form in forms(path):
        columns = form.columns(min(COLUMNS, len(search)))
        lines = math.ceil(len(search) / columns)
        with form.figure(9.0, 2.6 * lines) as figure:
            panels = figure.subplots(lines, columns, squeeze=False)
            for axes in panels.flat[len(search) :]:
                axes.set_visible(False)
            for item, axes in zip(search, panels.flat):
                axes.set_title(form.cut(item.name, 42))
                places = {word_of(choice): place for place, choice in enumerate(item.choices)}
                for trial in sorted(rows, key=lambda trial: best is not None and trial.number == best.number):
                    state, value = _STATES[trial.state.name], _value(trial)
                    if state not in _COLOR or item.name not in trial.params or not math.isfinite(value):
                        continue
                    given = trial.params[item.name]
                    strong = best is not None and trial.number == best.number
                    place = places[word_of(given)] if places else given
                    _point(axes, place, value, state, BEST if strong else "")
                if places:
                    axes.set_xticks(list(places.values()), [cut(name, 14) for name in places])
                    axes.set_xlim(-0.5, len(places) - 0.5)
                elif item.log:
                    axes.set_xscale("log")
                    axes.set_xlim(item.low / 1.2, item.high * 1.2)
                    if item.high / item.low >= 100:  # enough powers of ten; labels between them would overlap
                        axes.xaxis.set_minor_formatter(NullFormatter())
            for line in panels:
                line[0].set_ylabel(metric)


def draw_curves(rows: Sequence[Any], metric: str, best: Any, path: Path) -> None:
    for form in forms(path):
        with form.figure(9.0, 3.6) as figure:
            axes = figure.add_subplot()
            shown: dict[str, str] = {}
            for trial in rows:
                points = sorted(trial.intermediate_values.items())
                state = _STATES[trial.state.name]
                if not points or state not in _COLOR:
                    continue
                strong = best is not None and trial.number == best.number
                color = BEST if strong else _COLOR[state]
                shown[f"best: trial {trial.number}" if strong else state] = color
                axes.plot(
                    *zip(*points),
                    color=color,
                    linewidth=2.2 if strong else 1.0,
                    alpha=1.0 if strong else 0.55,
                )
            if not shown:
                show_placeholder(axes, "no evaluation yet")
                continue
            step_axis(axes)
            axes.set_xlabel("environment steps (agent decisions)")
            axes.set_ylabel(metric)
            name_legend(figure, shown)
