"""Output of a dream report: table, figure, HTML page, JSON and CSV."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_lab.tools.dream_report.errors import Curve, Prediction, worst_segments
from rl_lab.tools.report.figures import DASHED, INK, SOFT, Form, color_of, forms, name_legend
from rl_lab.tools.report.page import Page, Section, Table, write_page
from rl_lab.tools.terminal import NONE
from rl_lab.utils.files import write_atomic, write_json_atomic
from rl_lab.utils.media import to_frames

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rl_lab.tools.dream_report import DreamReport
    from rl_lab.tools.dream_report.errors import Segments


# --- Figure: errors over the horizon on top, the worst predictions as frame strips below ---

FRAMES = 11  # columns of a strip: the last context frame and ten predicted frames
NARROW_FRAMES = 5  # of the picture for a phone
UNITS = {"psnr": "dB"}
BETTER = {"psnr": "↑", "ssim": "↑", "accuracy": "↑"}
PANEL_COLUMNS = 3
PANEL_HEIGHT = 2.0
WIDTH = 9.6
TRUTH = "ground truth"
BASELINE = "repeat last"  # name of the baseline: `repeat_last`
LINES = 4  # components of a vector that are plotted if there is no image


@dataclass
class Strip:
    """One segment: ground truth and the prediction of every model."""

    segment: int
    title: str


def draw_overview(
    found: Mapping[str, Mapping[str, Curve]],  # model -> metric -> curve
    baseline: Mapping[str, Curve],
    predictions: Mapping[str, Prediction],
    segments: Segments,
    strips: Sequence[Strip],
    path: Path,
) -> None:
    """Draw one panel per metric, then one strip of frames per entry of `strips`."""
    metrics = [name for name in baseline if any(name in curves for curves in found.values())]
    named = color_of(list(found))
    for form in forms(path):
        columns = form.columns(PANEL_COLUMNS)
        rows = -(-len(metrics) // columns)
        heights = [PANEL_HEIGHT * rows + 0.4, *[_strip_height(predictions, segments, form)] * len(strips)]
        with form.figure(WIDTH, sum(heights)) as figure:
            top, *below = _parts(figure, heights)
            grid = np.atleast_1d(top.subplots(rows, columns)).ravel()
            for axes, metric in zip(grid, metrics):
                own = {name: curves[metric] for name, curves in found.items() if metric in curves}
                _draw_metric(axes, metric, own, baseline[metric], named)
            for axes in grid[len(metrics) :]:
                axes.set_visible(False)
            name_legend(top, {**named, BASELINE: SOFT}, dashed=[BASELINE])
            _draw_strips(below, predictions, segments, strips, form)


def draw_strips(
    predictions: Mapping[str, Prediction], segments: Segments, strips: Sequence[Strip], path: Path
) -> None:
    """Draw only the strips."""
    for form in forms(path):
        height = _strip_height(predictions, segments, form)
        with form.figure(WIDTH, height * len(strips)) as figure:
            _draw_strips(_parts(figure, [height] * len(strips)), predictions, segments, strips, form)


def _parts(figure: Figure, heights: Sequence[float]) -> list[Any]:
    """Return subfigures stacked vertically."""
    found: Any = figure.subfigures(len(heights), 1, height_ratios=list(heights))
    return list(np.atleast_1d(found))


def _strip_height(predictions: Mapping[str, Prediction], segments: Segments, form: Form) -> float:
    key = image_key(segments, predictions)
    if not key:
        return 3.4 if form.narrow else 1.75
    height, width = segments.obs[key].shape[-2:]
    title, frame = (0.7, 0.55) if form.narrow else (0.5, 0.78)
    return title + frame * min(2.0, height / width) * (len(predictions) + 1)


def _draw_strips(
    parts: Sequence[Any],
    predictions: Mapping[str, Prediction],
    segments: Segments,
    strips: Sequence[Strip],
    form: Form,
) -> None:
    key = image_key(segments, predictions)
    named = color_of(list(predictions))
    for part, strip in zip(parts, strips):
        if key:
            _draw_strip(part, key, predictions, segments, strip, named, form)
        else:
            _draw_lines(part, predictions, segments, strip, named, form)
        title = textwrap.fill(strip.title, 48) if form.narrow else strip.title
        part.suptitle(title, x=0.01, ha="left", fontsize=9, color=INK)


def image_key(segments: Segments, predictions: Mapping[str, Prediction]) -> str:
    """Return the first image observation that a model decodes; "" if there is none."""
    for name, truth in segments.obs.items():
        if (
            truth.ndim == 5
            and str(truth.dtype) == "torch.uint8"
            and any(name in own.obs for own in predictions.values())
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
    axes.set_xlabel("predicted steps", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if kind in ("mse", "error"):
        axes.set_ylim(bottom=0)


def _shown_name(metric: str) -> str:
    """Return the metric as in a panel title: image MSE."""
    name, _, kind = metric.rpartition(" ")
    return f"{name} {kind.upper()}" if kind in ("mse", "psnr", "ssim") else metric


def _draw_strip(
    part: Any,
    key: str,
    predictions: Mapping[str, Prediction],
    segments: Segments,
    strip: Strip,
    named: Mapping[str, str],
    form: Form,
) -> None:
    """Draw rows: ground truth, then each model; columns: the last context frame, then predicted frames."""
    index = strip.segment
    valid = int(segments.mask[index].sum())
    count = NARROW_FRAMES if form.narrow else FRAMES
    steps = np.unique(np.linspace(0, valid - 1, count - 1).round().astype(int))
    last = segments.context.obs[key][index, -1].numpy()
    videos = {TRUTH: segments.obs[key][index].numpy()}
    videos |= {name: own.obs[key][index] for name, own in predictions.items() if key in own.obs}
    height, width = last.shape[-2:]
    gap = max(1, width // 16)
    # One image of all frames: the layout of one axes per frame would take matplotlib seconds.
    sheet = np.full((len(videos) * (height + gap) - gap, count * (width + gap) - gap, 3), 255, np.uint8)
    axes = part.subplots(1, 1)
    for row, (name, frames) in enumerate(videos.items()):
        images = to_frames(np.concatenate([last[None], frames[steps]]), key)
        top = row * (height + gap)
        for column in range(1 if row else 0, len(images)):
            left = column * (width + gap)
            sheet[top : top + height, left : left + width] = images[column]
        words = "\n".join(textwrap.wrap(name, 14 if form.narrow else 20)[:4])
        ink = named.get(name, INK)
        axes.text(-gap, top + height / 2, words, fontsize=7, ha="right", va="center", color=ink)
    for column, words in enumerate(["context", *(f"+{step + 1}" for step in steps)]):
        axes.text(
            column * (width + gap) + width / 2, -gap, words, fontsize=7, ha="center", va="bottom", color=SOFT
        )
    axes.imshow(sheet, interpolation="nearest")
    axes.set_axis_off()


def _draw_lines(
    part: Any,
    predictions: Mapping[str, Prediction],
    segments: Segments,
    strip: Strip,
    named: Mapping[str, str],
    form: Form,
) -> None:
    """Plot the vector components with the largest variation, true and predicted, if there are no images."""
    keys = [
        name for name in segments.obs if any(name in prediction.obs for prediction in predictions.values())
    ]
    index = strip.segment
    valid = int(segments.mask[index].sum())
    steps = np.arange(1, valid + 1)
    if not keys:  # no decoder: only rewards can be compared
        axes = part.subplots(1, 1)
        axes.plot(steps, segments.reward[index, :valid], color=INK, linewidth=1.4)
        for name, prediction in predictions.items():
            axes.plot(steps, prediction.reward[index, :valid], color=named[name], linewidth=1.2)
        axes.set_title(f"reward, black: {TRUTH}", loc="left", fontsize=7)
        axes.tick_params(labelsize=6)
        return
    key = keys[0]
    truth = segments.obs[key][index, :valid].numpy().reshape(valid, -1)
    parts = np.argsort(-truth.std(0), kind="stable")[:LINES]
    grid = np.ravel(part.subplots(*((2, LINES // 2) if form.narrow else (1, LINES))))
    for axes, column in zip(grid, parts):
        axes.plot(steps, truth[:, column], color=INK, linewidth=1.4)
        for name, prediction in predictions.items():
            if key in prediction.obs:
                axes.plot(
                    steps,
                    prediction.obs[key][index, :valid].reshape(valid, -1)[:, column],
                    color=named[name],
                    linewidth=1.2,
                )
        axes.set_title(f"{key}[{column}], black: {TRUTH}", loc="left", fontsize=7)
        axes.tick_params(labelsize=6)
    for axes in grid[len(parts) :]:
        axes.set_visible(False)


# --- Page, JSON, CSV and table ---

STRIPS = 3  # worst predictions of each model on the page; the figure has one


def write_dream_report(found: DreamReport, folder: Path | str) -> dict[str, Path]:
    """Write all files; returns type -> path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = {kind: folder / f"dream.{kind}" for kind in ("json", "csv", "png")}
    write_json_atomic(files["json"], content(found))
    text = lines(found)
    write_atomic(files["csv"], lambda file: file.write(text.encode()))
    strips = worst_strips(found)
    draw_overview(
        found.curves,
        found.baseline,
        found.predictions,
        found.segments,
        [own[0] for own in strips.values()],
        files["png"],
    )
    header, rows = table(found)
    page = Page("Dream report", subtitle=", ".join(model.label for model in found.models))
    page.sections.append(Section("Errors over the horizon", note=_how(found), plots=[files["png"]]))
    note = (
        "Means over all steps. Images are compared in [0, 1]. A termination counts as found if its probability at that "
        "step is above 0.5; false ends are the share of other steps with a probability above 0.5."
    )
    page.sections.append(
        Section("Table", note=note, tables=[Table(header, rows, right=range(1, len(header)))])
    )
    for number, (label, own) in enumerate(strips.items()):
        if len(own) > 1:
            draw_strips(found.predictions, found.segments, own, folder / f"worst_{number}.png")
            page.sections.append(
                Section(f"Worst predictions of {label}", plots=[folder / f"worst_{number}.png"])
            )
    if found.notes:
        page.sections.append(Section("Notes", texts=[("runs left out, and why", "\n".join(found.notes))]))
    if image_key(found.segments, found.predictions):
        from rl_lab.tools.dream_report.animation import dream_gif

        files["gif"] = dream_gif(found, folder / "dream.gif")
    files["html"] = write_page(page, folder / "index.html")
    return files


def _how(found: DreamReport) -> str:
    return (
        f"{len(found.segments)} segments of {found.episodes} episodes of {found.environment}, {found.source}; "
        f"{found.settings['context']} context rows, {found.settings['horizon']} steps predicted from the actions alone. "
        "Bands are 95 % bootstrap intervals over episodes. The dashed line is a baseline that repeats the last "
        "observation and predicts the mean reward and no termination."
    )


def table(found: DreamReport) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: means over the complete horizon, one row per model, and the baseline."""
    metrics = [name for name in found.baseline if any(name in curves for curves in found.curves.values())]
    rows = []
    for model in found.models:
        own, ends = found.curves[model.label], found.ends[model.label]
        cells = [_precise(own[name].overall) if name in own else NONE for name in metrics]
        hits = NONE if ends["found"] is None else f"{ends['found']:.0%} of {ends['ends']}"
        false_ends = NONE if ends["false"] is None else f"{ends['false']:.2%}"
        rows.append([model.label, f"{model.agent.step:,}", *cells, hits, false_ends])
    baseline = [_precise(found.baseline[name].overall) for name in metrics]
    rows.append([BASELINE, NONE, *baseline, NONE, NONE])
    return ["model", "step", *metrics, "ends found", "false ends"], rows


def _precise(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"


def content(found: DreamReport) -> dict[str, Any]:
    """Return all results for JSON; deterministic for the same runs, episodes and seed."""
    return {
        "environment": found.environment,
        "episodes": {"count": found.episodes, "source": found.source},
        "cuts": len(found.segments),
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
        "nothing_changes": {name: _plain(curve) for name, curve in found.baseline.items()},
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


def lines(found: DreamReport) -> str:
    """Format as CSV: one line per model, metric and step."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["model", "metric", "step", "value", "low", "high"])
    for label, curves in {**found.curves, "nothing_changes": found.baseline}.items():
        for metric, curve in curves.items():
            for step, values in enumerate(zip(curve.value, curve.low, curve.high), start=1):
                writer.writerow([label, metric, step, *("" if v != v else f"{v:.6g}" for v in values)])
    return text.getvalue()


def worst_strips(found: DreamReport) -> dict[str, list[Strip]]:
    """Return the worst segments of each model by image error, else vector error, else reward error."""
    shown = image_key(found.segments, found.predictions)
    strips: dict[str, list[Strip]] = {}
    for label, prediction in found.predictions.items():
        metric = f"{shown} mse" if f"{shown} mse" in prediction.errors else next(iter(prediction.errors))
        strips[label] = []
        for index in worst_segments(prediction, found.segments, metric, STRIPS):
            error = float(prediction.errors[metric][index][found.segments.mask[index].numpy()].mean())
            where = f"episode {found.segments.episode[index]}, row {found.segments.start[index]}"
            strips[label].append(Strip(index, f"worst of {label}: {metric} {error:.3g} ({where})"))
    return strips
