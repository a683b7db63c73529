"""One session of play, without a window: who steers, where, how fast, what is recorded.

A front end (browser, desktop window, video) calls `do(command)` for what a person asks, `wait_seconds()` for when the
next step is due, `advance()` to make it, and `panels()`, `header()` and `status()` for what to show. All of it from one
thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.errors import LabError
from rl_lab.records import Spec
from rl_lab.tools.play.commands import FASTEST, LONGEST, MODES, SHORTEST, SLOWEST, Command
from rl_lab.tools.play.frame import Moment, Panel, Source, compose, number
from rl_lab.tools.play.keyboard import CONTROLS, REPLAY_CONTROLS, Keyboard, Keymap
from rl_lab.tools.play.recording import Keeping
from rl_lab.tools.play.sources import BothSource, DreamSource, EpisodesSource, RealSource

NEVER = 3600.0
UNABLE = {
    "real": "the real environment cannot be made here",
    "dream": "this run has no world model with a decoder to dream with",
    "both": "side by side needs the real environment and a world model with a decoder",
    "episodes": "this run has no recorded episodes",
}


@dataclass
class Options:
    """How a session begins; nearly all of it can be changed while it runs."""

    mode: str = "real"
    control: str = "agent"
    fps: float = 15.0  # as IRIS' play
    horizon: int = 200
    parts: bool = False
    header: bool = False
    save: bool = False  # ask at each episode's end whether to keep it
    wait: bool | None = None  # step only when a key is pressed; None: where no action means "do nothing"
    end_hold: float = 0.8  # seconds that an episode's last frame stays


class PlaySession:
    """Sources that there are not (no model, no environment, no recordings) are None, and so are their modes."""

    def __init__(
        self,
        spec: Spec,
        keymap: Keymap,
        recordings: Path,
        *,
        real: RealSource | None = None,
        dream: DreamSource | None = None,
        both: BothSource | None = None,
        episodes: Callable[[], EpisodesSource] | None = None,
        options: Options | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options = options or Options()
        self.spec = spec
        self.keymap = keymap
        self.real, self.dream, self.both = real, dream, both
        self.episodes: EpisodesSource | None = None
        self._open_episodes = episodes
        self.mode = ""
        self.control = options.control
        self.fps = options.fps
        self.parts = options.parts
        self.show_header = options.header
        self.wait = keymap.rest is None if options.wait is None else options.wait
        self.paused = False
        self.message = ""
        self.changes = 0  # grows whenever `status()` may have changed
        self.acknowledged = 0  # the highest id of a command that has had its effect
        self.keyboard = Keyboard()
        self.keeping = Keeping(recordings, spec, ask=options.save)
        self.step = 0
        self.episode_return: float | None = 0.0
        self.moment = Moment({})
        self.numbers: dict[str, float] = {}
        self._clock = clock
        self._last_step = -NEVER
        self._heard = 0
        self.horizon = 0
        self._set_horizon(options.horizon)
        self._go(options.mode)

    # ---------------------------------------------------------------- stepping

    @property
    def source(self) -> Source:
        found: Source = getattr(self, self.mode)
        return found

    @property
    def asking(self) -> bool:
        """Whether the session waits for an answer: keep the episode that has just ended?"""
        return self.keeping.asking

    @property
    def waits_for_keys(self) -> bool:
        plays = self.control == "human" and self.mode != "episodes"
        return plays and (self.wait or self.keymap.rest is None)

    def modes(self) -> list[str]:
        """Those that this run can do."""
        able = {"real": self.real, "dream": self.dream, "both": self.both, "episodes": self._open_episodes}
        return [mode for mode in MODES if able[mode] is not None]

    def wait_seconds(self) -> float:
        """Until the next step is due: 0 for now, much where nothing will happen by itself."""
        if self.paused or self.asking:
            return NEVER
        now = self._clock()
        if self.moment.done:
            return max(0.0, self.options.end_hold - (now - self._last_step))
        due = max(0.0, 1.0 / self.fps - (now - self._last_step))
        if not self.waits_for_keys:
            return due
        strike = self.keyboard.seconds_to_strike(now)
        return NEVER if strike is None else max(due, strike)

    def advance(self) -> bool:
        """Make one step if there is one to make; whether there was."""
        if self.asking:
            return False
        if self.moment.done:
            self._begin_episode()
            return True
        action = self._action()
        if action is None:
            return False
        self._arrive(self.source.step(action))
        return True

    def _action(self) -> np.ndarray | None:
        if self.control == "agent" or self.mode == "episodes":
            return self.source.agent_action()
        if not self.waits_for_keys:
            return self.keymap.action(self.keyboard.down())
        struck = self.keyboard.struck(self._clock())
        return self.keymap.action(struck) if struck else None

    def _arrive(self, moment: Moment) -> None:
        self.moment = moment
        self._last_step = self._clock()
        self.keyboard.stepped()
        self.acknowledged = self._heard
        if moment.is_first:
            self.step, self.episode_return = 0, 0.0
        else:
            self.step += 1
            self.episode_return = (self.episode_return or 0.0) + moment.reward
        if self.mode == "episodes" and self.episodes is not None:
            self.step, self.episode_return = self.episodes.position, self.episodes.return_so_far()
        self.numbers = {} if moment.done else self.source.think()
        self.keeping.add(moment, self.frame)
        if self.asking:
            self._changed("keep this episode?")

    def _begin_episode(self) -> None:
        self.keeping.begin_episode(fps=self.fps, label=self.mode)
        self._arrive(self.source.reset())

    # ---------------------------------------------------------------- what to show

    def panels(self) -> list[Panel]:
        return self.source.panels(self.parts)

    def frame(self) -> np.ndarray:
        """(H, W, 3) uint8: panels and, if it is on, the header, as one picture."""
        return compose(self.panels(), self.header() if self.show_header else ())

    def header(self) -> list[tuple[str, str]]:
        """Name and value as text, in the order to show them."""
        moment = self.moment
        fields = {
            "step": str(self.step),
            "action": "–" if moment.action is None else self.keymap.name(moment.action),
            "reward": number(moment.reward),
            "return": "–" if self.episode_return is None else number(self.episode_return),
        }
        more = {**self.numbers, **moment.extra}
        for name in ("value", "entropy"):
            fields[name] = number(more.pop(name)) if name in more else "–"
        fields["done"] = "terminated" if moment.terminated else "truncated" if moment.truncated else "no"
        return [*fields.items(), *((name, number(value)) for name, value in more.items())]

    def status(self) -> dict[str, Any]:
        """Everything about the session that is not a frame."""
        return {
            "mode": self.mode,
            "modes": self.modes(),
            "control": self.control,
            "paused": self.paused,
            "asking": self.asking,
            "speed": self.fps,
            "horizon": self.horizon,
            "parts": self.parts,
            "header": self.show_header,
            "wait": self.waits_for_keys,
            "save": self.options.save,
            "recording": self.keeping.recording is not None,
            "files": [file.name for file in self.keeping.files],
            "message": self.message,
            "episodes": self.episodes.status() if self.mode == "episodes" and self.episodes else None,
        }

    # ---------------------------------------------------------------- requests

    def do(self, command: Command) -> None:
        """Carry out a request. What cannot be done is said in `message`; nothing is raised for it."""
        self._heard = max(self._heard, command.id or 0)
        self._try(command.name, command.value)
        if not self.keyboard.tapped:  # no step will answer for it
            self.acknowledged = self._heard

    def _try(self, name: str, value: Any) -> None:
        try:
            getattr(self, f"_do_{name}")(value)
        except LabError as error:
            self._changed(str(error))

    def _do_key_down(self, key: str) -> None:
        if self.asking and key in ("y", "n", "Enter"):
            self._do_answer(key != "n")
        elif self.mode == "episodes" and key in REPLAY_CONTROLS:
            self._try(*REPLAY_CONTROLS[key][:2])
        elif key in CONTROLS:
            self._try(*CONTROLS[key][:2])
        elif key in self.keymap.known() and self.control == "human":
            self.keyboard.press(key, self._clock())
            if self.paused or self.asking:
                self.keyboard.stepped()  # it is held for a single step, and nothing more
            elif self.waits_for_keys and self.keyboard.tapped and not self.moment.done:
                self.advance()  # a step for each tap, however quickly they come

    def _do_key_up(self, key: str) -> None:
        self.keyboard.lift(key)

    def _do_release(self, _: None) -> None:
        self.keyboard.clear()

    def _do_control(self, who: str | None) -> None:
        self.control = who or ("agent" if self.control == "human" else "human")
        self.keyboard.clear()
        self._changed("you play" if self.control == "human" else "the agent plays")

    def _do_mode(self, mode: str | None) -> None:
        if mode is None:  # the next of those that can be played
            able = [name for name in self.modes() if name != "episodes"] or [self.mode]
            mode = able[(able.index(self.mode) + 1) % len(able)] if self.mode in able else able[0]
        self._go(mode)

    def _do_pause(self, paused: bool | None) -> None:
        self.paused = not self.paused if paused is None else paused
        self._changed("paused" if self.paused else "")

    def _do_step_once(self, _: None) -> None:
        self.paused = True
        moved = self.advance()
        if not moved and self.keyboard.down() and not self.asking:  # a key is held: it is the action
            self._arrive(self.source.step(self.keymap.action(self.keyboard.down())))  # type: ignore[arg-type]
        self._changed("" if moved or self.keyboard.down() else "hold a key: it is the action of the step")

    def _do_reset(self, _: None) -> None:
        if self.mode == "episodes" and self.episodes is not None:
            self._arrive(self.episodes.rewind())
        else:
            self._begin_episode()

    def _do_speed(self, fps: float) -> None:
        self.fps = min(max(fps, SLOWEST), FASTEST)
        self._changed(f"{self.fps:.3g} steps a second")

    def _do_faster(self, sign: int) -> None:
        self._do_speed(self.fps * 1.5**sign)

    def _do_horizon(self, steps: int) -> None:
        self._set_horizon(min(max(steps, SHORTEST), LONGEST))
        self._changed(f"dreams of {self.horizon} steps")

    def _do_longer(self, sign: int) -> None:
        self._do_horizon(self.horizon * 2 if sign > 0 else self.horizon // 2)

    def _do_parts(self, on: bool | None) -> None:
        self.parts = not self.parts if on is None else on
        self._changed("")

    def _do_header(self, on: bool | None) -> None:
        self.show_header = not self.show_header if on is None else on
        self._changed("")

    def _do_wait(self, on: bool | None) -> None:
        self.wait = not self.wait if on is None else on
        self._changed(
            "a step for each key" if self.wait or self.keymap.rest is None else "time runs by itself"
        )

    def _do_record(self, on: bool | None) -> None:
        recording = self.keeping.recording is not None
        on = not recording if on is None else on
        if on and not recording:
            self.keeping.start(self.moment, self.frame(), fps=self.fps, label=self.mode)
            self._changed("recording")
        elif recording and not on:
            self._saved(self.keeping.stop())

    def _do_answer(self, keep: bool) -> None:
        if self.asking:
            self._saved(self.keeping.answer(keep))

    def _do_seek(self, by: int) -> None:
        if self.mode == "episodes" and self.episodes is not None:
            self._arrive(self.episodes.seek(by))
            self._changed("")

    def _do_episode(self, by: int) -> None:
        if self.mode == "episodes" and self.episodes is not None:
            self._arrive(self.episodes.move(by))
            self._changed("")

    def _do_split(self, split: str) -> None:
        if self.mode == "episodes" and self.episodes is not None:
            self._arrive(self.episodes.choose(split))
            self._changed("")

    # ---------------------------------------------------------------- inside

    def _go(self, mode: str) -> None:
        if mode not in self.modes():
            raise LabError(UNABLE[mode])
        if mode == self.mode:
            return
        moment = self._enter(mode)
        self.mode = mode
        self.keyboard.clear()
        self.keeping.begin_episode(fps=self.fps, label=mode)
        self._arrive(moment)
        self._changed({"both": "side by side"}.get(mode, mode))

    def _enter(self, mode: str) -> Moment:
        """The first moment there. A dream goes on from where the real environment stands, if it stands anywhere."""
        if mode == "episodes":
            assert self._open_episodes is not None
            self.episodes = self.episodes or self._open_episodes()
            return self.episodes.look()
        real = self.real
        if real is not None and real.rows and not real.ended:
            if mode == "real":
                return Moment(real.observation())
            if mode == "dream" and self.dream is not None:
                return self.dream.begin(real.batch())
            if mode == "both" and self.both is not None:
                return self.both.join()
        found: Source = getattr(self, mode)
        return found.reset()

    def _set_horizon(self, steps: int) -> None:
        self.horizon = steps
        if self.dream is not None:
            self.dream.dreams.horizon = steps
        if self.both is not None:
            self.both.horizon = steps

    def _saved(self, files: list[Path]) -> None:
        self._changed(f"saved {', '.join(file.name for file in files)}" if files else "not kept")

    def _changed(self, message: str) -> None:
        self.message = message
        self.changes += 1

    def close(self) -> None:
        """Finish an open recording and end the environment."""
        self.keeping.close()
        if self.real is not None:
            self.real.close()
