"""Held and tapped keys: a tap between two steps is not lost, and a held key repeats."""

from __future__ import annotations

REPEAT_AFTER = 0.3  # seconds that a key is held before it repeats, where play waits for keys


class Keyboard:
    """Keys that mean actions, in the order they were pressed."""

    def __init__(self) -> None:
        self._held: dict[str, float] = {}  # key -> since when
        self._tapped: dict[str, None] = {}  # pressed since the last step, held or not

    @property
    def tapped(self) -> bool:
        return bool(self._tapped)

    def press(self, key: str, now: float) -> None:
        if key not in self._held:  # a browser sends a held key again and again
            self._held[key] = now
            self._tapped[key] = None

    def lift(self, key: str) -> None:
        self._held.pop(key, None)

    def clear(self) -> None:
        self._held.clear()
        self._tapped.clear()

    def stepped(self) -> None:
        """A step has answered what was tapped."""
        self._tapped.clear()

    def down(self) -> list[str]:
        """Keys for a step by the clock: all that are held or were tapped, the newest last."""
        return [*self._held, *(key for key in self._tapped if key not in self._held)]

    def struck(self, now: float) -> list[str]:
        """Keys for a step by the key: those tapped, and those held long enough to repeat."""
        repeating = [key for key, begun in self._held.items() if now - begun >= REPEAT_AFTER]
        return [*repeating, *(key for key in self._tapped if key not in repeating)]

    def seconds_to_strike(self, now: float) -> float | None:
        """Until `struck` gives something; None when nothing is pressed."""
        if self._tapped:
            return 0.0
        oldest = min(self._held.values(), default=None)
        return None if oldest is None else max(0.0, REPEAT_AFTER - (now - oldest))
