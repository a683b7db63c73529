"""A dream beside the environment as a GIF: environment | dream | difference, from the same actions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rl_lab.errors import LabError
from rl_lab.tools.dream_report.page import image_key
from rl_lab.utils.files import write_atomic
from rl_lab.utils.media import gif, to_frames

if TYPE_CHECKING:
    from rl_lab.tools.dream_report import DreamReport

PANEL_SIDE = 160  # pixels; smaller frames are enlarged by an integer factor
CAPTION = 18  # pixels above each panel
GAP = 8
BACKGROUND, INK = 245, 40  # grey values
NAMES = ("environment", "dream", "difference")


def dream_gif(found: DreamReport, path: Path, *, episodes: int = 3, fps: float = 8.0) -> Path:
    """Write the longest segments of the first model, one after the other; LabError without images."""
    label = found.models[0].label
    key = image_key(found.segments, {label: found.predictions[label]})
    if not key:
        raise LabError(f"{label} predicts no images, so there is no GIF of its dreams")
    mask = found.segments.mask.numpy()
    order = np.lexsort((np.arange(len(mask)), -mask.sum(1)))
    chosen: list[int] = []
    for index in order:
        if len(chosen) < episodes and found.segments.episode[index] not in found.segments.episode[chosen]:
            chosen.append(int(index))
    frames = []
    for index in chosen:
        steps = int(mask[index].sum())
        truth = to_frames(found.segments.obs[key][index, :steps], key)
        dream = to_frames(found.predictions[label].obs[key][index, :steps], key)
        frames += [side_by_side(real, imagined) for real, imagined in zip(truth, dream)]
    write_atomic(path, lambda file: file.write(gif(np.stack(frames), fps)))
    return path


def side_by_side(truth: np.ndarray, dream: np.ndarray) -> np.ndarray:
    """Two (H, W, 3) uint8 frames -> one image with both and the absolute difference, each with its name."""
    from PIL import Image, ImageDraw

    difference = np.abs(truth.astype(np.int16) - dream.astype(np.int16)).astype(np.uint8)
    factor = max(1, PANEL_SIDE // max(truth.shape[:2]))
    height, width = (factor * side for side in truth.shape[:2])
    image = np.full((CAPTION + height + GAP, 3 * width + 4 * GAP, 3), BACKGROUND, np.uint8)
    for number, panel in enumerate((truth, dream, difference)):
        left = GAP + number * (width + GAP)
        image[CAPTION : CAPTION + height, left : left + width] = panel.repeat(factor, 0).repeat(factor, 1)
    drawn = Image.fromarray(image)
    draw = ImageDraw.Draw(drawn)
    for number, name in enumerate(NAMES):
        draw.text((GAP + number * (width + GAP), 3), name, fill=(INK, INK, INK))
    return np.asarray(drawn)
