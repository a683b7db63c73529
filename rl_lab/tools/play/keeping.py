"""What a session keeps: recordings that a person starts and stops, and episodes that they are asked about."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from rl_lab.records import Spec
from rl_lab.tools.play.moment import Moment
from rl_lab.tools.play.recorder import Recorder


class Keeping:
    """ask: at each episode's end, whether to keep it"""

    def __init__(self, folder: Path, spec: Spec, *, ask: bool) -> None:
        self.folder = folder
        self.spec = spec
        self.ask = ask
        self.asking = False  # an answer is waited for
        self.files: list[Path] = []  # of the last recording
        self._recording: Recorder | None = None
        self._episode: Recorder | None = None

    @property
    def recording(self) -> int | None:
        """Frames of the open recording."""
        return None if self._recording is None else self._recording.frames

    def start(self, moment: Moment, frame: np.ndarray, *, fps: float, label: str) -> None:
        self._recording = Recorder(self.folder, self.spec, fps=fps, label=label)
        self._recording.add(moment, frame)

    def stop(self) -> list[Path]:
        if self._recording is not None:
            self.files = self._recording.keep()
            self._recording = None
        return self.files

    def begin_episode(self, *, fps: float, label: str) -> None:
        """A new episode begins; one that nobody was asked about is left behind. Replayed ones are kept already."""
        self.asking = False
        if self._episode is not None:
            self._episode.discard()
            self._episode = None
        if self.ask and label != "episodes":
            self._episode = Recorder(self.folder, self.spec, fps=fps, label=f"{label}_episode")

    def add(self, moment: Moment, frame: Callable[[], np.ndarray]) -> None:
        """A moment has come; the frame is drawn only if someone keeps it."""
        wanted = [recorder for recorder in (self._recording, self._episode) if recorder is not None]
        drawn = frame() if wanted else None
        for recorder in wanted:
            assert drawn is not None
            recorder.add(moment, drawn)
        self.asking = moment.done and self._episode is not None

    def answer(self, keep: bool) -> list[Path]:
        """The files that were kept."""
        self.asking = False
        episode, self._episode = self._episode, None
        if episode is None:
            return []
        if not keep:
            episode.discard()
            return []
        self.files = episode.keep()
        return self.files

    def close(self) -> None:
        self.stop()
        if self._episode is not None:
            self._episode.discard()
