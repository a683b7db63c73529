"""`PlaySession`: the state of play without a user interface (control, mode, speed, recordings).

A front end (browser, desktop window, video) calls `do(command)` for user input, `wait_seconds()` for the time
until the next step, `advance()` to step, and `panels()`, `header()` and `status()` to display. All calls must
come from one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.errors import LabError
from rl_lab.records import Spec
from rl_lab.tools.play.commands import FASTEST, LONGEST, MODES, SHORTEST, SLOWEST, Command
from rl_lab.tools.play.dream_commands import NO_DREAM, DreamCommands
from rl_lab.tools.play.episodes import EpisodesSource
from rl_lab.tools.play.frame import UNKNOWN, Frame, Panel, Source, compose, number
from rl_lab.tools.play.history import History, Past
from rl_lab.tools.play.keyboard import CHOICE_KEYS, CONTROLS, REPLAY_CONTROLS, Keyboard, Keymap, show
from rl_lab.tools.play.library import Library
from rl_lab.tools.play.pictures import Pictures
from rl_lab.tools.play.recording import Clip, Recordings, new_name
from rl_lab.tools.play.sources import BothSource, DreamSource, RealSource
from rl_lab.tools.play.starts import Starts

NEVER = 3600.0
CLIP_SECONDS = 10.0  # of a GIF, if none are given
UNAVAILABLE = {
    "real": "the real environment cannot be created on this machine",
    "dream": NO_DREAM,
    "both": "side by side needs the real environment and a world model with a decoder",
    "episodes": "this run has no recorded episodes",
}


@dataclass
class Options:
    """Initial settings of a session; most of them can be changed while it runs."""

    mode: str = "real"
    control: str = "agent"
    fps: float = 15.0  # as in IRIS
    horizon: int = 200
    parts: bool = False
    header: bool = False
    save: bool = False  # ask at the end of each episode whether to keep it
    wait: bool | None = None  # step only on a key press; None: if the keymap has no idle action
    end_hold: float = 0.8  # seconds for which the last frame of an episode is shown
    dream_end_hold: float = 4.0  # if you play a dream, so that it can be rewound


@dataclass
class Sources:
    """What one agent can be played with. A missing source (model, environment, recordings) is None."""

    spec: Spec
    keymap: Keymap
    recordings: Path
    real: RealSource | None = None
    dream: DreamSource | None = None
    both: BothSource | None = None
    episodes: Callable[[], EpisodesSource] | None = None
    starts: Starts | None = None
    context: int = 8  # rows before a dream that starts from an episode
    pictures: Pictures | None = None  # closed with the sources
    about: dict[str, str] = field(default_factory=dict)  # names of run, task, weights, …

    def close(self) -> None:
        if self.real is not None:
            self.real.close()
        if self.pictures is not None:
            self.pictures.close()


class PlaySession(DreamCommands):
    """One session of play. library: the checkpoints that it can switch to."""

    def __init__(
        self,
        sources: Sources,
        *,
        library: Library | None = None,
        options: Options | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options = options or Options()
        self.library = library
        self.mode = ""
        self.control = options.control
        self.fps = options.fps
        self.parts = options.parts
        self.show_header = options.header
        self.paused = self.paused_by_rewind = False
        self.message = ""
        self.changes = 0  # incremented whenever `status()` may have changed
        self.acknowledged = 0  # highest id of a command whose effect is visible
        self.keyboard = Keyboard()
        self.step = 0
        self.episode_return: float | None = 0.0
        self.current = Frame({})
        self.policy_values: dict[str, float] = {}
        self.history = History()
        self.clip = Clip()
        self.picks, self.pick_kind, self.rounds = [], "", 0
        self._clock = clock
        self._last_step = -NEVER
        self._received = 0  # highest id of a command
        self._shown: list[Panel] | None = None
        self._use(sources)
        self.horizon = 0
        self._set_horizon(options.horizon)
        self._set_mode(options.mode)
        self.message = ""

    def _use(self, sources: Sources) -> None:
        """Play with these sources from now on."""
        self.sources = sources
        self.spec, self.keymap = sources.spec, sources.keymap
        self.real, self.dream, self.both = sources.real, sources.dream, sources.both
        self.starts, self.context = sources.starts, sources.context
        self.episodes: EpisodesSource | None = None
        self.wait = self.keymap.idle is None if self.options.wait is None else self.options.wait
        self.recordings = Recordings(sources.recordings, self.spec, ask=self.options.save)

    # --- Stepping ---

    @property
    def source(self) -> Source:
        found: Source = getattr(self, self.mode)
        return found

    @property
    def asking(self) -> bool:
        """Whether the session waits for an answer to "keep this episode?"."""
        return self.recordings.asking

    @property
    def waits_for_keys(self) -> bool:
        plays = self.control == "human" and self.mode != "episodes"
        return plays and (self.wait or self.keymap.idle is None)

    def modes(self) -> list[str]:
        """Return the available modes."""
        sources: dict[str, Any] = {"real": self.real, "dream": self.dream, "both": self.both}
        sources["episodes"] = self.sources.episodes
        return [mode for mode in MODES if sources[mode] is not None]

    def wait_seconds(self) -> float:
        """Return the seconds until the next step is due; NEVER if it needs user input."""
        if self.paused or self.asking or self.picks:
            return NEVER
        now = self._clock()
        if self.current.done:
            played = self.mode == "dream" and self.control == "human"
            hold = self.options.dream_end_hold if played else self.options.end_hold
            return max(0.0, hold - (now - self._last_step))
        due = max(0.0, 1.0 / self.fps - (now - self._last_step))
        if not self.waits_for_keys:
            return due
        key_due = self.keyboard.seconds_until_due(now)
        return NEVER if key_due is None else max(due, key_due)

    def advance(self) -> bool:
        """Make one step if possible; returns whether it was made."""
        if self.asking:
            return False
        if self.current.done:
            self._begin_episode()
            return True
        action = self._action()
        if action is None:
            return False
        self._set_frame(self.source.step(action))
        return True

    def _action(self) -> np.ndarray | None:
        if self.control == "agent" or self.mode == "episodes":
            return self.source.agent_action()
        if not self.waits_for_keys:
            return self.keymap.action(self.keyboard.held())
        keys = self.keyboard.due(self._clock())
        return self.keymap.action(keys) if keys else None

    def _set_frame(self, frame: Frame) -> None:
        self._show_frame(frame)
        if frame.is_first:
            self.step, self.episode_return = 0, 0.0
            if self.paused_by_rewind:
                self.paused = self.paused_by_rewind = False
        else:
            self.step += 1
            self.episode_return = (self.episode_return or 0.0) + frame.reward
        if self.mode == "episodes" and self.episodes is not None:
            self.step, self.episode_return = self.episodes.position, self.episodes.return_so_far()
        if self.mode == "dream" and self.dream is not None:
            if frame.is_first:
                self.history.clear()
            self.history.add(Past(self.dream.moment(), frame, self.step, self.episode_return))
        self._after_frame(frame)
        if frame.done and self.mode == "dream" and self.control == "human" and not self.asking:
            self._changed("the dream ended: Enter starts a new one, Backspace goes back a step")
        elif self.message.startswith("the dream ended"):
            self._changed("")

    def _show_frame(self, frame: Frame) -> None:
        self.current = frame
        self._shown = None
        self._last_step = self._clock()
        self.keyboard.clear_taps()
        self.acknowledged = self._received

    def _after_frame(self, frame: Frame) -> None:
        self.policy_values = {} if frame.done else self.source.inspect()
        self.recordings.add(frame, self.image)
        self.clip.add(self.panels(), self.header() if self.show_header else ())
        if self.asking:
            self._changed("keep this episode?")

    def _begin_episode(self) -> None:
        self.recordings.begin_episode(fps=self.fps, label=self.mode)
        self._set_frame(self.source.reset())

    # --- Display ---

    def panels(self) -> list[Panel]:
        if self._shown is None:
            self._shown = self.source.panels(self.parts)
        return self._shown

    def image(self) -> np.ndarray:
        """Return (H, W, 3) uint8: panels and, if enabled, the header as one image."""
        return compose(self.panels(), self.header() if self.show_header else ())

    def header(self) -> list[tuple[str, str]]:
        """Return (name, value as text) in display order."""
        frame = self.current
        fields = {
            "step": str(self.step),
            "action": UNKNOWN if frame.action is None else self.keymap.name(frame.action),
            "reward": number(frame.reward),
            "return": UNKNOWN if self.episode_return is None else number(self.episode_return),
        }
        more = {**self.policy_values, **frame.extra}
        for name in ("value", "entropy"):
            fields[name] = number(more.pop(name)) if name in more else UNKNOWN
        fields["done"] = "terminated" if frame.terminated else "truncated" if frame.truncated else "no"
        return [*fields.items(), *((name, number(value)) for name, value in more.items())]

    def status(self) -> dict[str, Any]:
        """Return the state of the session except the frame, for JSON."""
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
            "recording": self.recordings.recording is not None,
            "files": [file.name for file in self.recordings.files],
            "message": self.message,
            "episodes": self.episodes.status() if self.mode == "episodes" and self.episodes else None,
            "dream": self.dream_status(),
            "temperature": self.temperature,
            "prompt": self.prompt(),
            "starts": self._starts_status(),
            "weights": None
            if self.library is None
            else {
                "current": self.library.current,
                "entries": [entry.to_dict() for entry in self.library.entries],
            },
        }

    def prompt(self) -> str:
        """Return which keys to press, if play waits for one; else ""."""
        if self.picks:
            return f"choose a start: {CHOICE_KEYS[0]} to {CHOICE_KEYS[len(self.picks) - 1]}, or / to go back"
        if not self.waits_for_keys or self.asking or self.current.done:
            return ""
        keys = list(dict.fromkeys(show(key) for key in self.keymap.main_keys()))
        return f"press {' '.join(keys[:6])} to play: one step per key"

    # --- Commands ---

    def do(self, command: Command) -> None:
        """Execute a command. A LabError is shown in `message` and not raised."""
        self._received = max(self._received, command.id or 0)
        self._try(command.name, command.value)
        if not self.keyboard.tapped:  # no later step is needed to show its effect
            self.acknowledged = self._received

    def _try(self, name: str, value: Any) -> None:
        try:
            getattr(self, f"_do_{name}")(value)
        except LabError as error:
            self._changed(str(error))

    def _do_key_down(self, key: str) -> None:
        if self.asking and key in ("y", "n", "Enter"):
            self._do_answer(key != "n")
        elif self.picks and key in CHOICE_KEYS:
            self._try("choose", CHOICE_KEYS.index(key))
        elif self.mode == "episodes" and key in REPLAY_CONTROLS:
            self._try(*REPLAY_CONTROLS[key][:2])
        elif key in CONTROLS:
            self._try(*CONTROLS[key][:2])
        elif key in self.keymap.known_keys() and self.control == "human":
            self.keyboard.press(key, self._clock())
            if self.paused or self.asking or self.picks:
                self.keyboard.clear_taps()  # the held key is used by a single step only
            elif self.waits_for_keys and self.keyboard.tapped and not self.current.done:
                self.advance()  # one step per tap, even for fast taps

    def _do_key_up(self, key: str) -> None:
        self.keyboard.release(key)

    def _do_release(self, _: None) -> None:
        self.keyboard.clear()

    def _do_control(self, who: str | None) -> None:
        self.control = who or ("agent" if self.control == "human" else "human")
        self.keyboard.clear()
        self._stop_picking()
        self._changed("you play" if self.control == "human" else "the agent plays")

    def _do_mode(self, mode: str | None) -> None:
        if mode is None:  # the next mode that can be played
            modes = [name for name in self.modes() if name != "episodes"] or [self.mode]
            mode = modes[(modes.index(self.mode) + 1) % len(modes)] if self.mode in modes else modes[0]
        self._set_mode(mode)

    def _do_pause(self, paused: bool | None) -> None:
        self.paused = not self.paused if paused is None else paused
        self.paused_by_rewind = False
        self._changed("paused" if self.paused else "")

    def _do_step_once(self, _: None) -> None:
        self.paused = True
        stepped = self.advance()
        if not stepped and self.keyboard.held() and not self.asking:  # use the held key as the action
            self._set_frame(self.source.step(self.keymap.action(self.keyboard.held())))  # type: ignore[arg-type]
        self._changed(
            "" if stepped or self.keyboard.held() else "hold a key to choose the action of the step"
        )

    def _do_reset(self, _: None) -> None:
        self._stop_picking()
        if self.mode == "episodes" and self.episodes is not None:
            self._set_frame(self.episodes.rewind())
        else:
            self._begin_episode()

    def _do_speed(self, fps: float) -> None:
        self.fps = min(max(fps, SLOWEST), FASTEST)
        self._changed(f"{self.fps:.3g} steps per second")

    def _do_faster(self, sign: int) -> None:
        self._do_speed(self.fps * 1.5**sign)

    def _do_horizon(self, steps: int) -> None:
        self._set_horizon(min(max(steps, SHORTEST), LONGEST))
        self._changed(f"dreams of {self.horizon} steps")

    def _do_longer(self, sign: int) -> None:
        self._do_horizon(self.horizon * 2 if sign > 0 else self.horizon // 2)

    def _do_parts(self, on: bool | None) -> None:
        self.parts = not self.parts if on is None else on
        self._shown = None
        self._changed("")

    def _do_header(self, on: bool | None) -> None:
        self.show_header = not self.show_header if on is None else on
        self._changed("")

    def _do_wait(self, on: bool | None) -> None:
        self.wait = not self.wait if on is None else on
        self._changed("one step per key press" if self.wait or self.keymap.idle is None else "steps by time")

    def _do_record(self, on: bool | None) -> None:
        recording = self.recordings.recording is not None
        on = not recording if on is None else on
        if on and not recording:
            self.recordings.start(self.current, self.image(), fps=self.fps, label=self.mode)
            self._changed("recording")
        elif recording and not on:
            self._saved(self.recordings.stop())

    def _do_answer(self, keep: bool) -> None:
        if self.asking:
            self._saved(self.recordings.answer(keep))

    def _do_seek(self, by: int) -> None:
        if self.mode == "episodes" and self.episodes is not None:
            self._set_frame(self.episodes.seek(by))
            self._changed("")

    def _do_episode(self, by: int) -> None:
        if self.mode == "episodes" and self.episodes is not None:
            self._set_frame(self.episodes.move(by))
            self._changed("")

    def _do_split(self, split: str) -> None:
        if self.mode == "episodes" and self.episodes is not None:
            self._set_frame(self.episodes.choose(split))
            self._changed("")

    # --- Commands of weights and files ---

    def _do_weights(self, index: int | None) -> None:
        if self.library is None:
            raise LabError("this session has no other checkpoints")
        self._switch(self.library.next_in_run() if index is None else index)

    def _do_run(self, _: None) -> None:
        if self.library is None:
            raise LabError("this session has no other runs")
        self._switch(self.library.next_run())

    def _switch(self, index: int) -> None:
        """Play with other weights; the open ones stay if they cannot be loaded."""
        assert self.library is not None
        opened: Sources = self.library.open(index)
        self.recordings.close()
        self.sources.close()
        mode, temperature = self.mode, self.temperature
        self._stop_picking()
        self.keyboard.clear()
        self.clip.clear()
        self._use(opened)
        self._set_horizon(self.horizon)
        self._do_temperature(temperature)
        self.mode = ""
        modes = self.modes()
        self._set_mode(mode if mode in modes else modes[0])
        self._changed(f"now playing {self.sources.about.get('weights', 'other weights')}")

    def _do_clip(self, seconds: float | None) -> None:
        path = self.sources.recordings / new_name(self.mode)
        file = self.clip.save(path, seconds or CLIP_SECONDS, self.fps)
        if file is not None:
            self.recordings.files = [file]
        self._changed(f"saved {file.name}" if file is not None else "nothing was shown yet")

    # --- Private methods ---

    def _set_mode(self, mode: str) -> None:
        if mode not in self.modes():
            raise LabError(UNAVAILABLE[mode])
        if mode == self.mode:
            return
        self._stop_picking()
        frame = self._first_frame(mode)
        self.mode = mode
        self.keyboard.clear()
        self.recordings.begin_episode(fps=self.fps, label=mode)
        self._set_frame(frame)
        self._changed("")

    def _first_frame(self, mode: str) -> Frame:
        """Return the first frame of a mode.

        A dream continues from the real environment if an episode is running.
        """
        if mode == "episodes":
            assert self.sources.episodes is not None
            self.episodes = self.episodes or self.sources.episodes()
            return self.episodes.frame()
        real = self.real
        if real is not None and real.rows and not real.ended:
            if mode == "real":
                return Frame(real.observation())
            if mode == "dream" and self.dream is not None:
                return self.dream.start_from(real.batch())
            if mode == "both" and self.both is not None:
                return self.both.restart_prediction()
        found: Source = getattr(self, mode)
        return found.reset()

    def _set_horizon(self, steps: int) -> None:
        self.horizon = steps
        if self.dream is not None:
            self.dream.imagined.horizon = steps
        if self.both is not None:
            self.both.horizon = steps

    def _saved(self, files: list[Path]) -> None:
        self._changed(f"saved {', '.join(file.name for file in files)}" if files else "not saved")

    def _changed(self, message: str) -> None:
        self.message = message
        self.changes += 1

    def close(self) -> None:
        """Finish an open recording and close the environment."""
        self.recordings.close()
        self.sources.close()
