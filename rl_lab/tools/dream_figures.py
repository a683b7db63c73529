"""The picture of a dream report: errors over the horizon on top, the worst predictions as film strips below."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_lab.tools.dream_errors import Curve, Dream
from rl_lab.tools.figure_style import DASHED, INK, SOFT, color_of, figure_file, name_legend
from rl_lab.utils.media import film

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rl_lab.tools.dream_episodes import Segments

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
