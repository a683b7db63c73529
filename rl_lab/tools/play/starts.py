"""Start states of dreams: new episodes, the run's replay, or recorded episodes; and the choice among some of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from rl_lab.records import Batch
from rl_lab.tools.play.pictures import Pictures
from rl_lab.tools.play.sources import last_observation
from rl_lab.utils.media import png

SHOWN = 8  # start states to choose among
SIDE = 200  # pixels of their pictures, about
LABELS = {"real": "new episodes", "replay": "replay", "episodes": "recorded episodes"}


@dataclass(frozen=True)
class StartPicture:
    """A start state that can be chosen."""

    rows: Batch
    image: np.ndarray  # (H, W, 3) uint8
    png: bytes = field(repr=False, default=b"")


class Starts:
    """Where dreams start. Called without a choice it draws from `kind`.

    draw: name of a source -> function that returns rows (1, T, …); those that this run does not have are left out
    """

    def __init__(self, draw: Mapping[str, Callable[[], Batch]], kind: str) -> None:
        self.draw = draw
        self.kind = kind

    def __call__(self) -> Batch:
        return self.draw[self.kind]()

    @property
    def kinds(self) -> list[str]:
        return list(self.draw)

    def pictures(self, kind: str, pictures: Pictures, count: int = SHOWN) -> list[StartPicture]:
        """Draw start states with their pictures; LabError if the run has none of this kind."""
        found = []
        for _ in range(count):
            rows = self.draw[kind]()
            image = reduced(pictures.show(last_observation(rows)), SIDE)
            found.append(StartPicture(rows, image, png(image)))
        return found


def reduced(image: np.ndarray, side: int) -> np.ndarray:
    """Return the image, reduced by an integer factor so that no side is longer than about `side`."""
    factor = max(image.shape[:2]) // side
    if factor <= 1:
        return image
    from PIL import Image

    return np.asarray(Image.fromarray(np.ascontiguousarray(image)).reduce(factor))
