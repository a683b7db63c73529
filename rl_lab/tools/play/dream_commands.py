"""The commands of a session that concern dreams: rewind and branch, start states, temperature."""

from __future__ import annotations

from typing import Any

from rl_lab.errors import LabError
from rl_lab.records import Batch
from rl_lab.tools.play.commands import HOTTEST
from rl_lab.tools.play.episodes import EpisodesSource
from rl_lab.tools.play.frame import Frame
from rl_lab.tools.play.history import History
from rl_lab.tools.play.keyboard import Keyboard
from rl_lab.tools.play.recording import Recordings
from rl_lab.tools.play.sources import DreamSource, RealSource
from rl_lab.tools.play.starts import StartPicture, Starts

NO_DREAM = "this run has no world model with a decoder"


class DreamCommands:
    """The part of `PlaySession` that rewinds dreams and chooses where they start."""

    mode: str
    real: RealSource | None
    dream: DreamSource | None
    episodes: EpisodesSource | None
    starts: Starts | None
    context: int  # rows before a dream that starts from an episode
    keyboard: Keyboard
    recordings: Recordings
    history: History
    fps: float
    step: int
    episode_return: float | None
    paused: bool
    paused_by_rewind: bool  # until the next episode, dream or mode
    picks: list[StartPicture]  # start states to choose among; empty: none are shown
    pick_kind: str
    rounds: int  # of start states, so that a page can tell their pictures apart

    @property
    def waits_for_keys(self) -> bool:
        raise NotImplementedError

    def _set_mode(self, mode: str) -> None:
        raise NotImplementedError

    def _set_frame(self, frame: Frame) -> None:
        raise NotImplementedError

    def _show_frame(self, frame: Frame) -> None:
        raise NotImplementedError

    def _after_frame(self, frame: Frame) -> None:
        raise NotImplementedError

    def _changed(self, message: str) -> None:
        raise NotImplementedError

    # --- Commands ---

    def _do_rewind(self, by: int) -> None:
        """Move to an earlier step of the dream, or forward again. The next step continues from there."""
        if self.mode != "dream" or self.dream is None:
            raise LabError("only a dream can be rewound: the real environment keeps no earlier states")
        past = self.history.move(by)
        if past is None:
            return
        self.dream.return_to(past.moment)
        self._show_frame(past.frame)
        self.step, self.episode_return = past.step, past.episode_return
        self.recordings.cut()
        self._after_frame(past.frame)
        self.keyboard.clear()
        if not self.waits_for_keys and not self.paused:
            self.paused = self.paused_by_rewind = True
        behind = f"step {past.step} of {self.history.last}: "
        go_on = "the next key continues from here" if self.waits_for_keys else "resume continues from here"
        self._changed(behind + go_on if self.history.position < len(self.history) - 1 else "")

    def _do_again(self, _: None) -> None:
        dream = self.dream
        if self.mode != "dream" or dream is None or dream.start is None:
            raise LabError("only a dream can start again from the same state")
        self._begin_dream(dream.start)
        self._changed("the same start again")

    def _do_dream_here(self, _: None) -> None:
        if self.mode != "episodes" or self.episodes is None:
            raise LabError("show a recorded episode first: a dream then starts from the shown step")
        rows = self.episodes.rows_until_here(self.context)
        self._begin_dream(rows)
        self._changed("a dream from the recorded step")

    def _do_starts(self, kind: str | None) -> None:
        """Show start states to choose among; again: stop showing them."""
        if self.picks and kind is None:
            self._stop_picking()
            self._changed("")
            return
        starts = self.starts
        if starts is None or self.dream is None:
            raise LabError(NO_DREAM)
        kind = kind or starts.kind
        if kind not in starts.draw:
            raise LabError(f"this run has no start states of that kind: choose {' or '.join(starts.kinds)}")
        self._set_mode("dream")  # drawing them may play the real environment
        self.picks = starts.pictures(kind, self.dream.pictures)
        starts.kind = self.pick_kind = kind
        self.rounds += 1
        self._changed("")

    def _do_choose(self, index: int | None) -> None:
        picks = self.picks
        self._stop_picking()
        if index is None:
            self._changed("")
        elif index < len(picks):
            self._begin_dream(picks[index].rows)
            self._changed("")

    def _do_temperature(self, value: float) -> None:
        for source in (self.real, self.dream):
            if source is not None:
                source.acting.temperature = round(value, 2)
        shown = self.temperature
        self._changed(f"temperature {shown:g}" if shown else "temperature 0: the most likely action")

    def _do_warmer(self, sign: int) -> None:
        self._do_temperature(min(max(self.temperature + 0.25 * sign, 0.0), HOTTEST))

    def _do_dream_temperature(self, value: float) -> None:
        if self.dream is None or self.dream.temperature is None:
            raise LabError("this world model's dreams have no temperature")
        self.dream.temperature = round(value, 2)
        self._changed(f"dream temperature {self.dream.temperature:g}")

    # --- State ---

    @property
    def temperature(self) -> float:
        """Temperature of the agent's actions; 0: the most likely ones."""
        source = self.dream or self.real
        return 0.0 if source is None else source.acting.temperature

    def _stop_picking(self) -> None:
        self.picks, self.pick_kind = [], ""

    def _begin_dream(self, rows: Batch) -> None:
        """Start a dream after these rows."""
        if self.dream is None:
            raise LabError(NO_DREAM)
        frame = self.dream.start_from(rows)
        self.mode = "dream"
        self.keyboard.clear()
        self.recordings.begin_episode(fps=self.fps, label="dream")
        self._set_frame(frame)

    def dream_status(self) -> dict[str, Any] | None:
        if self.mode != "dream":
            return None
        history = self.history
        return {
            "first": history.first,
            "last": history.last,
            "step": self.step,
            "branches": history.branches,
            "temperature": None if self.dream is None else self.dream.temperature,
        }

    def _starts_status(self) -> dict[str, Any] | None:
        if self.starts is None:
            return None
        return {
            "kinds": self.starts.kinds,
            "kind": self.pick_kind or self.starts.kind,
            "round": self.rounds,
            "count": len(self.picks),
        }
