"""A session in a thread of its own, so that a server can go on serving while a model thinks."""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable

from rl_lab.errors import LabError
from rl_lab.tools.play.commands import Command
from rl_lab.tools.play.session import PlaySession

MOST_WAITING = 256  # requests; beyond them the oldest are forgotten


class Runner(threading.Thread):
    """Steps a session when it is due and tells `on_change` after every step and request.

    It rests while `active` is off: nobody is looking. Only this thread touches the session.
    """

    def __init__(self, session: PlaySession, on_change: Callable[[PlaySession], None]) -> None:
        super().__init__(name="play", daemon=True)
        self.session = session
        self.on_change = on_change
        self.active = False
        self._commands: deque[Command] = deque(maxlen=MOST_WAITING)
        self._wake = threading.Condition()
        self._stopping = False
        self._dirty = False

    def submit(self, command: Command) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def set_active(self, active: bool) -> None:
        with self._wake:
            self.active = active
            self._wake.notify()

    def refresh(self) -> None:
        """Tell `on_change` once more: somebody new is looking."""
        with self._wake:
            self._dirty = True
            self._wake.notify()

    def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        while True:
            with self._wake:
                if not self._commands and not self._dirty and not self._stopping:
                    self._wake.wait(self.session.wait_seconds() if self.active else None)
                if self._stopping:
                    return
                commands = list(self._commands)
                self._commands.clear()
                dirty, self._dirty = self._dirty, False
            if self._turn(commands) or commands or dirty:
                self.on_change(self.session)

    def _turn(self, commands: list[Command]) -> bool:
        """What was asked, then a step if one is due. A failure pauses and is shown; it does not end the session."""
        session = self.session
        try:
            for command in commands:
                session.do(command)
            return self.active and session.wait_seconds() <= 0.0 and session.advance()
        except LabError as error:
            self._failed(str(error))
        except Exception as error:
            traceback.print_exc()
            self._failed(f"{type(error).__name__}: {error}")
            time.sleep(0.05)
        return True

    def _failed(self, message: str) -> None:
        self.session.paused = True
        self.session.message = message
        self.session.changes += 1
