"""Frames and panels of play, the protocol of their sources, and the drawing of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from rl_lab.utils.media import to_image


class Panel(NamedTuple):
    """One image with its title."""

    title: str
    image: np.ndarray  # (H, W, 3) uint8


@dataclass
class Frame:
    """One step of an episode: observation, reward and flags, and the action that led to them."""

    obs: dict[str, np.ndarray]  # name -> (…) as stored; empty for a recorded video
    action: np.ndarray | None = None  # None: first frame of an episode
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    extra: dict[str, float] = field(default_factory=dict)  # more values for the header

    @property
    def is_first(self) -> bool:
        return self.action is None

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


class Source(Protocol):
    """A source of frames: the real environment, the world model, both, or recorded episodes."""

    def reset(self) -> Frame:
        """Start a new episode."""

    def step(self, action: np.ndarray) -> Frame:
        """Step with an action."""

    def agent_action(self) -> np.ndarray:
        """Return the agent's action for the current frame."""

    def inspect(self) -> dict[str, float]:
        """Return values of the policy for the current frame (value, entropy), if it has any.

        Updates its state.
        """

    def panels(self, parts: bool) -> list[Panel]:
        """Return the current panels; `parts` adds the model's input and output."""


# --- Drawing ---

UNKNOWN = "–"
HEIGHT = 320  # of a panel in a video; smaller images are enlarged by integer factors up to it
FIELD = 80, 36  # smallest width and height of a field of the header, in pixels
SIDE_BY_SIDE = 4  # fields in one line below the narrowest image
BARS = 24  # longest vector drawn as bars; longer ones are drawn as a grid of cells
GROUND, INK, DIM, TICK = (13, 17, 23), (230, 237, 243), (125, 133, 144), (38, 46, 58)
PLAIN = str.maketrans(
    {"–": "-", "·": "|", "×": "x", "←": "<", "→": ">", "↑": "^", "↓": "v"}
)  # Pillow's font has none
PLUS, MINUS = (88, 166, 255), (247, 129, 102)


def observation_image(obs: Mapping[str, np.ndarray], names: Sequence[str] = ()) -> np.ndarray:
    """Return (H, W, 3) uint8: the images of an observation side by side, or its vectors as bars with `names`."""
    images = [to_image(value) for value in obs.values() if value.dtype == np.uint8 and value.ndim == 3]
    if images:
        height = max(image.shape[0] for image in images)
        return np.concatenate([_padded(image, height) for image in images], axis=1)
    if not obs:
        return notice("no image")
    return vector_image(vector(obs), names)


def has_image(obs: Mapping[str, np.ndarray]) -> bool:
    return any(value.dtype == np.uint8 and value.ndim == 3 for value in obs.values())


def vector(obs: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return all values of an observation as one vector."""
    return np.concatenate([np.ravel(value).astype(np.float32) for value in obs.values()])


def vector_image(values: np.ndarray, names: Sequence[str] = (), width: int = 480) -> np.ndarray:
    """Return (H, width, 3): a vector as bars with names, numbers and a scale; a long one as a grid of cells.

    The scale is a symmetric logarithm, the same for every vector and frame: 0 in the centre, 10 near the border.
    """
    scaled = np.nan_to_num(_on_scale(values), nan=0.0)
    if len(values) > BARS:
        return _cells(scaled, len(values))
    line, top = 32 if len(values) <= 10 else 20, 30
    image, draw = _canvas(width, top + line * len(values) + 8)
    font, small = _font(15), _font(12)
    labels = list(names) if len(names) == len(values) else [str(index) for index in range(len(values))]
    left = 10 + min(int(max(font.getlength(label) for label in labels)), width // 3)
    right = width - 78
    middle, half = (left + 8 + right) // 2, (right - left - 8) // 2
    for tick in (-10, -1, 0, 1, 10):
        x = middle + int(_on_scale(np.float32(tick)) * half)
        draw.line((x, top - 5, x, image.height - 6), fill=DIM if tick == 0 else TICK)
        draw.text((x, 14), str(tick), fill=DIM, font=small, anchor="mm")
    for index, (label, value, share) in enumerate(zip(labels, values, scaled)):
        y = top + line * index + line // 2
        end = middle + int(share * half)
        space = left - 8
        draw.text((8, y), _shortened(label, font, space), fill=INK, font=font, anchor="lm")
        low, high = sorted((middle, end))
        draw.rectangle((low, y - line // 4, high, y + line // 4), fill=PLUS if value >= 0 else MINUS)
        draw.text((width - 8, y), number(float(value)), fill=INK, font=font, anchor="rm")
    return np.asarray(image)


def _on_scale(values: Any) -> Any:
    """Return values in [-1, 1]: 0 stays 0, ±10 is near ±1."""
    return np.clip(np.sign(values) * np.log1p(np.abs(values)) / np.log(12.0), -1.0, 1.0)


def _cells(scaled: np.ndarray, count: int, size: int = 256) -> np.ndarray:
    """Return a grid of cells, positive blue and negative red, with their number below."""
    side = int(np.ceil(np.sqrt(count)))
    cells = np.zeros(side * side, np.float32)
    cells[:count] = scaled
    share = np.abs(cells).reshape(side, side, 1)
    color = np.where(cells.reshape(side, side, 1) >= 0, PLUS, MINUS)
    dots = (np.asarray(GROUND) * (1 - share) + color * share).astype(np.uint8)
    factor = max(1, size // side)
    grid = dots.repeat(factor, 0).repeat(factor, 1)
    image, draw = _canvas(grid.shape[1], grid.shape[0] + 20)
    image.paste(_image(grid), (0, 0))
    draw.text((4, grid.shape[0] + 10), f"{count} values, row by row", fill=DIM, font=_font(11), anchor="lm")
    return np.asarray(image)


def number(value: float) -> str:
    """Format a number with stable width: three decimals, fewer for large values; nan is unknown."""
    if isinstance(value, int):
        return str(value)
    if np.isnan(value):
        return UNKNOWN
    if not np.isfinite(value) or abs(value) >= 1e6:
        return f"{value:.3g}"
    text = f"{value:.{3 if abs(value) < 100 else 1}f}"
    return text.lstrip("-") if float(text) == 0 else text


def notice(text: str, size: int = 256) -> np.ndarray:
    """Return a dark square with a text."""
    image, draw = _canvas(size, size)
    draw.text((size // 2, size // 2), text, fill=DIM, font=_font(14), anchor="mm")
    return np.asarray(image)


def difference(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the absolute difference of two images, or a notice if their sizes differ."""
    if one.shape != other.shape:
        return notice("sizes differ")
    absolute = np.abs(one.astype(np.int16) - other.astype(np.int16)).clip(0, 255)
    return absolute.astype(np.uint8)


def compose(
    panels: Sequence[Panel], header: Sequence[tuple[str, str]] = (), *, above: bool = False
) -> np.ndarray:
    """Return (H, W, 3) uint8 with even sides: panels with titles side by side, header fields below them.

    above: the header is above the panels, where a player's controls do not cover it
    """
    shown = [(panel.title, enlarged(panel.image)) for panel in panels]
    gap, title = 8, 24
    used = sum(image.shape[1] for _, image in shown) + gap * (len(shown) + 1)
    # A narrow image gets margins, so that some fields fit side by side; the others continue in further lines.
    width = max(used, gap + FIELD[0] * min(len(header), SIDE_BY_SIDE))
    height = max(image.shape[0] for _, image in shown) + title + gap
    columns = max(1, min(len(header), (width - gap) // FIELD[0]))
    fields = 8 + FIELD[1] * -(-len(header) // columns) if header else 0
    canvas, draw = _canvas(width + width % 2, height + fields + (height + fields) % 2)
    left, top = gap + (width - used) // 2, fields if above else 0
    for text, image in shown:
        x = left if len(shown) > 1 else gap  # one title may be as long as the header
        draw.text((x, top + title // 2), text.translate(PLAIN), fill=DIM, font=_font(13), anchor="lm")
        canvas.paste(_image(image), (left, top + title))
        left += image.shape[1] + gap
    for index, (name, value) in enumerate(header):
        line, column = divmod(index, columns)
        x = gap + column * (width - gap) // columns
        y = 8 + line * FIELD[1] + (0 if above else height)
        space = (width - gap) // columns - gap
        draw.text((x, y), _shortened(name, _font(11), space), fill=DIM, font=_font(11))
        draw.text((x, y + 14), _shortened(value, _font(14), space), fill=INK, font=_font(14))
    return np.asarray(canvas)


def _shortened(text: str, font: Any, width: int) -> str:
    """Return the text, cut to a width in pixels: "make stone pickaxe" becomes "make sto…"."""
    text = text.translate(PLAIN)
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"


def enlarged(image: np.ndarray, height: int = HEIGHT) -> np.ndarray:
    """Enlarge by an integer factor, so that pixels stay sharp."""
    factor = max(1, height // max(image.shape[:2]))
    return image.repeat(factor, 0).repeat(factor, 1) if factor > 1 else image


def _padded(image: np.ndarray, height: int) -> np.ndarray:
    return np.pad(image, [(0, height - image.shape[0]), (0, 0), (0, 0)])


def _canvas(width: int, height: int) -> tuple[Any, Any]:
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (width, height), GROUND)
    return image, ImageDraw.Draw(image)


def _image(array: np.ndarray) -> Any:
    from PIL import Image

    return Image.fromarray(array)


@lru_cache(maxsize=8)
def _font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size=size)
