"""What a dream report says: one table, one picture, and a page, JSON and CSV that hold them all."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_lab.tools.dream_errors import Curve, worst
from rl_lab.tools.dream_figures import NOTHING_CHANGES, Strip, draw_dreams, draw_strips, pictured
from rl_lab.tools.report_page import Page, Section, Table, write_page
from rl_lab.tools.words import NONE
from rl_lab.utils.files import write_atomic, write_json_atomic

if TYPE_CHECKING:
    from rl_lab.tools.dream_report import Dreams

STRIPS = 3  # worst predictions of each model on the page; the picture has one


def write_dreams(found: Dreams, folder: Path | str) -> dict[str, Path]:
    """Write everything; kind of file -> where it is."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = {kind: folder / f"dream.{kind}" for kind in ("json", "csv", "png")}
    write_json_atomic(files["json"], content(found))
    text = lines(found)
    write_atomic(files["csv"], lambda file: file.write(text.encode()))
    strips = worst_strips(found)
    draw_dreams(
        found.curves, found.floor, found.dreams, found.cuts, [own[0] for own in strips.values()], files["png"]
    )
    header, rows = table(found)
    page = Page("Dream report", subtitle=", ".join(model.label for model in found.models))
    page.sections.append(Section("Errors over the horizon", note=_how(found), plots=[files["png"]]))
    note = (
        "Means over all steps. Pictures are compared in [0, 1]. An end counts as found when its probability at that "
        "very step is above a half; false ends are the share of steps for which one was foretold that did not come."
    )
    page.sections.append(
        Section("Table", note=note, tables=[Table(header, rows, numbers=range(1, len(header)))])
    )
    for number, (label, own) in enumerate(strips.items()):
        if len(own) > 1:
            draw_strips(found.dreams, found.cuts, own, folder / f"worst_{number}.png")
            page.sections.append(
                Section(f"Worst predictions of {label}", plots=[folder / f"worst_{number}.png"])
            )
    if found.notes:
        page.sections.append(Section("Notes", texts=[("what was left out, and why", "\n".join(found.notes))]))
    files["html"] = write_page(page, folder / "index.html")
    return files


def _how(found: Dreams) -> str:
    return (
        f"{len(found.cuts)} segments of {found.episodes} episodes of {found.environment}, {found.source}; "
        f"{found.settings['context']} rows seen, {found.settings['horizon']} steps dreamed from the actions alone. Bands "
        "are 95 % bootstrap intervals over episodes. The dashed line is a model for which nothing changes: it repeats what "
        "it saw last, expects the mean reward, and no end."
    )


def table(found: Dreams) -> tuple[list[str], list[list[str]]]:
    """Header and rows: means over the whole horizon, one row a model, and the floor that any should beat."""
    metrics = [name for name in found.floor if any(name in curves for curves in found.curves.values())]
    rows = []
    for model in found.models:
        own, told = found.curves[model.label], found.ends[model.label]
        cells = [_precise(own[name].overall) if name in own else NONE for name in metrics]
        hits = NONE if told["found"] is None else f"{told['found']:.0%} of {told['ends']}"
        imagined = NONE if told["false"] is None else f"{told['false']:.2%}"
        rows.append([model.label, f"{model.agent.step:,}", *cells, hits, imagined])
    floor = [_precise(found.floor[name].overall) for name in metrics]
    rows.append([NOTHING_CHANGES, NONE, *floor, NONE, NONE])
    return ["model", "step", *metrics, "ends found", "false ends"], rows


def _precise(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"


def content(found: Dreams) -> dict[str, Any]:
    """All numbers, for JSON; the same runs, episodes and seed give the same."""
    return {
        "environment": found.environment,
        "episodes": {"count": found.episodes, "source": found.source},
        "cuts": len(found.cuts),
        **found.settings,
        "models": [
            {
                "label": model.label,
                "experiment": str(model.agent.config.experiment.name),
                "workflow": type(model.agent.workflow).__name__,
                "step": model.agent.step,
                "checkpoint": model.agent.checkpoint.name if model.agent.checkpoint else None,
                "ends": found.ends[model.label],
                "metrics": {name: _plain(curve) for name, curve in found.curves[model.label].items()},
            }
            for model in found.models
        ],
        "nothing_changes": {name: _plain(curve) for name, curve in found.floor.items()},
        "notes": found.notes,
    }


def _plain(curve: Curve) -> dict[str, Any]:
    def listed(values: Any) -> list[float | None]:
        return [None if value != value else float(value) for value in values]

    return {
        "overall": curve.overall,
        "value": listed(curve.value),
        "low": listed(curve.low),
        "high": listed(curve.high),
    }


def lines(found: Dreams) -> str:
    """CSV: one line for each model, metric and step."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["model", "metric", "step", "value", "low", "high"])
    for label, curves in {**found.curves, "nothing_changes": found.floor}.items():
        for metric, curve in curves.items():
            for step, values in enumerate(zip(curve.value, curve.low, curve.high), start=1):
                writer.writerow([label, metric, step, *("" if v != v else f"{v:.6g}" for v in values)])
    return text.getvalue()


def worst_strips(found: Dreams) -> dict[str, list[Strip]]:
    """For each model its worst segments, by its pictures, else its numbers, else its rewards."""
    shown = pictured(found.cuts, found.dreams)
    strips: dict[str, list[Strip]] = {}
    for label, dream in found.dreams.items():
        metric = f"{shown} mse" if f"{shown} mse" in dream.errors else next(iter(dream.errors))
        strips[label] = []
        for index in worst(dream, found.cuts, metric, STRIPS):
            error = float(dream.errors[metric][index][found.cuts.mask[index].numpy()].mean())
            where = f"episode {found.cuts.episode[index]}, row {found.cuts.start[index]}"
            strips[label].append(Strip(index, f"worst of {label}: {metric} {error:.3g} ({where})"))
    return strips
