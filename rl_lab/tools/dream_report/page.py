"""What a dream report says: one table, one picture, and a page, JSON and CSV that hold them all."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_lab.tools.dream_report.errors import Curve, Dream, worst
from rl_lab.tools.figure_style import DASHED, INK, SOFT, color_of, figure_file, name_legend
from rl_lab.tools.report.page import Page, Section, Table, write_page
from rl_lab.tools.terminal import NONE
from rl_lab.utils.files import write_atomic, write_json_atomic
from rl_lab.utils.media import film

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rl_lab.tools.dream_report.command import Dreams
    from rl_lab.tools.dream_report.errors import Segments


# --------------------
# The picture of a dream report: errors over the horizon on top, the worst predictions as film strips below.


FRAMES = 11  # columns of a film strip: the last frame that was seen, and ten that were dreamed
UNITS = {"psnr": "dB"}
BETTER = {"psnr": "↑", "ssim": "↑", "accuracy": "↑"}
PANEL_COLUMNS = 3
PANEL_HEIGHT = 2.0
WIDTH = 9.6
TRUTH = "what happened"
NOTHING_CHANGES = "nothing changes"  # the floor: what was seen last, again and again
LINES = 4  # parts of a vector that are drawn where there is no picture


@dataclass
class Strip:
    """One segment, as it was and as every model dreamed it."""

    segment: int
    title: str


def draw_dreams(
    found: Mapping[str, Mapping[str, Curve]],  # model -> metric -> curve
    baseline: Mapping[str, Curve],
    dreams: Mapping[str, Dream],
    segments: Segments,
    strips: Sequence[Strip],
    path: Path,
) -> None:
    """One picture of everything: a panel for each metric, then one film strip for each of `strips`."""
    metrics = [name for name in baseline if any(name in curves for curves in found.values())]
    named = color_of(list(found))
    rows = -(-len(metrics) // PANEL_COLUMNS)
    heights = [PANEL_HEIGHT * rows + 0.4, *[_strip_height(dreams, segments)] * len(strips)]
    with figure_file(path, WIDTH, sum(heights)) as figure:
        top, *below = _parts(figure, heights)
        grid = np.atleast_1d(top.subplots(rows, PANEL_COLUMNS)).ravel()
        for axes, metric in zip(grid, metrics):
            own = {name: curves[metric] for name, curves in found.items() if metric in curves}
            _draw_metric(axes, metric, own, baseline[metric], named)
        for axes in grid[len(metrics) :]:
            axes.set_visible(False)
        name_legend(top, {**named, NOTHING_CHANGES: SOFT}, dashed=[NOTHING_CHANGES])
        _draw_strips(below, dreams, segments, strips)


def draw_strips(dreams: Mapping[str, Dream], segments: Segments, strips: Sequence[Strip], path: Path) -> None:
    """Film strips alone."""
    height = _strip_height(dreams, segments)
    with figure_file(path, WIDTH, height * len(strips)) as figure:
        _draw_strips(_parts(figure, [height] * len(strips)), dreams, segments, strips)


def _parts(figure: Figure, heights: Sequence[float]) -> list[Any]:
    """Subfigures under one another."""
    found: Any = figure.subfigures(len(heights), 1, height_ratios=list(heights))
    return list(np.atleast_1d(found))


def _strip_height(dreams: Mapping[str, Dream], segments: Segments) -> float:
    key = pictured(segments, dreams)
    if not key:
        return 1.75
    height, width = segments.obs[key].shape[-2:]
    return 0.5 + 0.78 * min(2.0, height / width) * (len(dreams) + 1)


def _draw_strips(
    parts: Sequence[Any], dreams: Mapping[str, Dream], segments: Segments, strips: Sequence[Strip]
) -> None:
    key = pictured(segments, dreams)
    named = color_of(list(dreams))
    for part, strip in zip(parts, strips):
        if key:
            _draw_strip(part, key, dreams, segments, strip, named)
        else:
            _draw_lines(part, dreams, segments, strip, named)


def pictured(segments: Segments, dreams: Mapping[str, Dream]) -> str:
    """The observation that film strips show: the first that is a picture and that some model decodes; else ""."""
    for name, truth in segments.obs.items():
        if (
            truth.ndim == 5
            and str(truth.dtype) == "torch.uint8"
            and any(name in d.obs for d in dreams.values())
        ):
            return name
    return ""


def _draw_metric(
    axes: Axes, metric: str, curves: Mapping[str, Curve], baseline: Curve, named: Mapping[str, str]
) -> None:
    from matplotlib.ticker import MaxNLocator

    steps = np.arange(1, len(baseline.value) + 1)
    axes.plot(steps, baseline.value, color=SOFT, linewidth=1.2, linestyle=DASHED)
    for name, curve in curves.items():
        axes.plot(steps, curve.value, color=named[name], linewidth=1.8)
        axes.fill_between(steps, curve.low, curve.high, color=named[name], alpha=0.15, linewidth=0)
    kind = metric.rpartition(" ")[2]
    unit = f", {UNITS[kind]}" if kind in UNITS else ""
    axes.set_title(f"{_shown_name(metric)}{unit} {BETTER.get(kind, '↓')}", loc="left", fontsize=9)
    axes.set_xlabel("steps dreamed", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if kind in ("mse", "error"):
        axes.set_ylim(bottom=0)


def _shown_name(metric: str) -> str:
    """The metric as a panel is titled: image MSE."""
    name, _, kind = metric.rpartition(" ")
    return f"{name} {kind.upper()}" if kind in ("mse", "psnr", "ssim") else metric


def _draw_strip(
    part: Any,
    key: str,
    dreams: Mapping[str, Dream],
    segments: Segments,
    strip: Strip,
    named: Mapping[str, str],
) -> None:
    """Rows: truth, then each model; columns: the last frame seen, then dreamed ones."""
    index = strip.segment
    valid = int(segments.mask[index].sum())
    steps = np.unique(np.linspace(0, valid - 1, FRAMES - 1).round().astype(int))
    last = segments.context.obs[key][index, -1].numpy()
    films = {TRUTH: segments.obs[key][index].numpy()}
    films |= {name: dream.obs[key][index] for name, dream in dreams.items() if key in dream.obs}
    height, width = last.shape[-2:]
    gap = max(1, width // 16)
    # One picture of all frames: an axes for each would take matplotlib seconds to lay out.
    sheet = np.full((len(films) * (height + gap) - gap, FRAMES * (width + gap) - gap, 3), 255, np.uint8)
    axes = part.subplots(1, 1)
    for row, (name, frames) in enumerate(films.items()):
        pictures = film(np.concatenate([last[None], frames[steps]]), key)
        top = row * (height + gap)
        for column in range(1 if row else 0, len(pictures)):
            left = column * (width + gap)
            sheet[top : top + height, left : left + width] = pictures[column]
        words = "\n".join(textwrap.wrap(name, 20)[:4])
        ink = named.get(name, INK)
        axes.text(-gap, top + height / 2, words, fontsize=7, ha="right", va="center", color=ink)
    for column, words in enumerate(["seen", *(f"+{step + 1}" for step in steps)]):
        axes.text(
            column * (width + gap) + width / 2, -gap, words, fontsize=7, ha="center", va="bottom", color=SOFT
        )
    axes.imshow(sheet, interpolation="nearest")
    axes.set_axis_off()
    part.suptitle(strip.title, x=0.01, ha="left", fontsize=9, color=INK)


def _draw_lines(
    part: Any, dreams: Mapping[str, Dream], segments: Segments, strip: Strip, named: Mapping[str, str]
) -> None:
    """For models without pictures: the parts of the vector that move most, as they were and as they were dreamed."""
    keys = [name for name in segments.obs if any(name in dream.obs for dream in dreams.values())]
    index = strip.segment
    valid = int(segments.mask[index].sum())
    steps = np.arange(1, valid + 1)
    part.suptitle(strip.title, x=0.01, ha="left", fontsize=9, color=INK)
    if not keys:  # no decoder: rewards are what can be seen
        axes = part.subplots(1, 1)
        axes.plot(steps, segments.reward[index, :valid], color=INK, linewidth=1.4)
        for name, dream in dreams.items():
            axes.plot(steps, dream.reward[index, :valid], color=named[name], linewidth=1.2)
        axes.set_title("reward, black: what happened", loc="left", fontsize=7)
        axes.tick_params(labelsize=6)
        return
    key = keys[0]
    truth = segments.obs[key][index, :valid].numpy().reshape(valid, -1)
    parts = np.argsort(-truth.std(0), kind="stable")[:LINES]
    grid = np.atleast_1d(part.subplots(1, LINES))
    for axes, column in zip(grid, parts):
        axes.plot(steps, truth[:, column], color=INK, linewidth=1.4)
        for name, dream in dreams.items():
            if key in dream.obs:
                axes.plot(
                    steps,
                    dream.obs[key][index, :valid].reshape(valid, -1)[:, column],
                    color=named[name],
                    linewidth=1.2,
                )
        axes.set_title(f"{key}[{column}], black: what happened", loc="left", fontsize=7)
        axes.tick_params(labelsize=6)
    for axes in grid[len(parts) :]:
        axes.set_visible(False)


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
