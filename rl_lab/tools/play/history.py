"""The steps of a dream, so that it can be rewound and continued otherwise."""

from __future__ import annotations

from dataclasses import dataclass

from rl_lab.tools.play.frame import Frame
from rl_lab.tools.play.sources import Moment

MOST_BYTES = 256 * 1024**2  # of the model's states; the oldest steps are forgotten beyond it


@dataclass(frozen=True)
class Past:
    """One step of the current dream."""

    moment: Moment
    frame: Frame
    step: int
    episode_return: float | None


class History:
    """The steps of one dream in order; `position` is the shown one."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self.branches = 0  # continuations of the current dream from an earlier step
        self.position = -1
        self._steps: list[Past] = []
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def first(self) -> int:
        """Number of the oldest step that is kept."""
        return self._steps[0].step if self._steps else 0

    @property
    def last(self) -> int:
        return self._steps[-1].step if self._steps else 0

    def clear(self) -> None:
        self._steps, self._bytes, self.position, self.branches = [], 0, -1, 0

    def add(self, past: Past) -> None:
        """Append a step after the shown one. Steps that followed it are dropped: the dream has branched."""
        if self.position < len(self._steps) - 1:
            self._bytes -= sum(step.moment.nbytes for step in self._steps[self.position + 1 :])
            del self._steps[self.position + 1 :]
            self.branches += 1
        self._steps.append(past)
        self._bytes += past.moment.nbytes
        while self._bytes > self.most_bytes and len(self._steps) > 1:
            self._bytes -= self._steps.pop(0).moment.nbytes
        self.position = len(self._steps) - 1

    def move(self, by: int) -> Past | None:
        """Move back (negative) or forward; return the step there, or None if it is the same."""
        target = min(max(0, self.position + by), len(self._steps) - 1)
        if target == self.position or not self._steps:
            return None
        self.position = target
        return self._steps[target]
