"""Desktop window of a session with pygame, in one thread. F1 shows the keys, Escape closes it. Gamepads press keys."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import numpy as np

from rl_lab.errors import LabError, MissingPackageError, install_line
from rl_lab.tools.play.commands import Command
from rl_lab.tools.play.frame import Panel, compose
from rl_lab.tools.play.keyboard import control_legend, normalise
from rl_lab.tools.play.keymaps import pad_keys
from rl_lab.tools.play.session import PlaySession

LINE = 30  # pixels of the status line
NAMES = {
    **{"left": "ArrowLeft", "right": "ArrowRight", "up": "ArrowUp", "down": "ArrowDown", "space": " "},
    **{"return": "Enter", "enter": "Enter", "tab": "Tab", "page up": "PageUp", "page down": "PageDown"},
    **{
        "backspace": "Backspace",
        "delete": "Delete",
        **{f"f{number}": f"F{number}" for number in range(2, 13)},
    },
}
# Buttons of a joystick in the order of an Xbox pad, as SDL numbers them: index -> name in `keymaps.pad_keys`.
PAD_BUTTONS = ("a", "b", "x", "y", "lb", "rb", "select", "start")
STICK = 0.5  # of the way, from which a stick presses a direction
ARROWS = str.maketrans(
    {"←": "<", "→": ">", "↑": "^", "↓": "v", "…": "-", "⌫": "Bksp"}
)  # not in pygame's font
MAX_SLEEP = 0.02  # seconds between two reads of the keyboard


class Window:
    """Draws a session and passes key presses to it."""

    def __init__(self, session: PlaySession, title: str) -> None:
        try:
            import pygame
        except ModuleNotFoundError as error:
            raise MissingPackageError(
                f"the window needs pygame: {install_line('play')} (or use --web or --video)"
            ) from error
        self.pygame: Any = pygame
        self.session = session
        self.help = False
        self.open = True
        try:
            pygame.display.init()
            check_driver(pygame.display.get_driver())
            pygame.font.init()
            height, width = session.image().shape[:2]
            info = pygame.display.Info()
            most = max(480, int(0.95 * info.current_w)), max(320, int(0.9 * info.current_h))
            share = min(1.0, most[0] / width, (most[1] - LINE) / height)
            size = max(int(width * share), 480), int(height * share) + LINE
            self.screen = pygame.display.set_mode(size, pygame.RESIZABLE)
        except pygame.error as error:
            raise LabError(f"the window cannot be opened ({error}): use --web or --video") from error
        pygame.display.set_caption(title)
        self.font = pygame.font.Font(None, 22)
        self._joysticks: dict[int, Any] = {}
        self._pad_held: dict[str, str] = {}  # axis, cross or button -> key that it holds
        with contextlib.suppress(pygame.error):  # no access to input devices
            pygame.joystick.init()

    def run(self) -> None:
        """Run until the window is closed."""
        self.draw()
        while self.open:
            pressed = self.read_events()
            stepped = self.session.wait_seconds() <= 0.0 and self.session.advance()
            if pressed or stepped:
                self.draw()
            time.sleep(min(self.session.wait_seconds(), MAX_SLEEP))

    def read_events(self) -> bool:
        """Pass keyboard events to the session; returns whether there were any."""
        pygame, session = self.pygame, self.session
        events = pygame.event.get()
        for event in events:
            if event.type == pygame.QUIT or (event.type == pygame.KEYDOWN and event.key == pygame.K_ESCAPE):
                self.open = False
            elif event.type == pygame.KEYDOWN and event.key == pygame.K_F1:
                self.help = not self.help
            elif event.type == pygame.KEYDOWN:
                session.do(Command("key_down", self._name(event.key)))
            elif event.type == pygame.KEYUP:
                session.do(Command("key_up", self._name(event.key)))
            elif event.type == getattr(pygame, "WINDOWFOCUSLOST", None):
                session.do(Command("release"))
                self._pad_held.clear()
            else:
                self._read_joystick(event)
        return bool(events)

    def _read_joystick(self, event: Any) -> None:
        """Press and release keys for a joystick's buttons, cross and left stick."""
        pygame = self.pygame
        if event.type == pygame.JOYDEVICEADDED:
            with contextlib.suppress(pygame.error):
                joystick = pygame.joystick.Joystick(event.device_index)
                self._joysticks[joystick.get_instance_id()] = joystick  # events come only while it is held
        elif event.type == pygame.JOYDEVICEREMOVED:
            self._joysticks.pop(event.instance_id, None)
        elif event.type in (pygame.JOYBUTTONDOWN, pygame.JOYBUTTONUP):
            name = PAD_BUTTONS[event.button] if event.button < len(PAD_BUTTONS) else ""
            self._hold(f"button {event.button}", name if event.type == pygame.JOYBUTTONDOWN else "")
        elif event.type == pygame.JOYHATMOTION:
            x, y = event.value
            self._hold("hat x", {1: "right", -1: "left"}.get(x, ""))
            self._hold("hat y", {1: "up", -1: "down"}.get(y, ""))
        elif event.type == pygame.JOYAXISMOTION and event.axis in (0, 1):
            low, high = (("left", "right"), ("up", "down"))[event.axis]
            direction = low if event.value < -STICK else high if event.value > STICK else ""
            self._hold(f"axis {event.axis}", direction)

    def _hold(self, part: str, name: str) -> None:
        """A part of the joystick now presses the key of a direction or button; "": none."""
        key = pad_keys(self.session.keymap).get(name, "")
        before = self._pad_held.get(part, "")
        if key == before:
            return
        if before:
            self.session.do(Command("key_up", before))
        if key:
            self.session.do(Command("key_down", key))
        self._pad_held[part] = key

    def draw(self) -> None:
        pygame, screen = self.pygame, self.screen
        screen.fill((13, 17, 23))
        width, height = screen.get_size()
        session = self.session
        picks = [Panel(f"start {number}", pick.image) for number, pick in enumerate(session.picks, start=1)]
        image = picker(picks) if picks else session.image()
        self._draw_image(image, width, height - LINE)
        hint = self.font.render("F1 keys", True, (139, 151, 171))
        line = self.font.render(self._line(), True, (139, 151, 171))
        space = max(0, width - hint.get_width() - 30)
        screen.blit(line, (10, height - LINE + 7), (0, 0, space, LINE))
        screen.blit(hint, (width - hint.get_width() - 10, height - LINE + 7))
        if self.help:
            self._draw_help()
        pygame.display.flip()

    def close(self) -> None:
        self.pygame.display.quit()

    def _name(self, key: int) -> str:
        name = self.pygame.key.name(key)
        return normalise(NAMES.get(name, name))

    def _draw_image(self, image: np.ndarray, width: int, height: int) -> None:
        """Draw the image centred and as large as fits."""
        surface = self.pygame.surfarray.make_surface(np.ascontiguousarray(image.swapaxes(0, 1)))
        scale = min(width / image.shape[1], height / image.shape[0])
        size = max(1, int(image.shape[1] * scale)), max(1, int(image.shape[0] * scale))
        if size != surface.get_size():
            surface = self.pygame.transform.scale(surface, size)
        self.screen.blit(surface, ((width - size[0]) // 2, (height - size[1]) // 2))

    def _line(self) -> str:
        status = self.session.status()
        who = "you play" if status["control"] == "human" else "the agent plays"
        mode = {"real": "real environment", "both": "side by side", "episodes": "recorded"}.get(
            status["mode"], status["mode"]
        )
        parts = [mode] if status["mode"] == "episodes" else [f"{mode}, {who}"]
        parts += [f"{status['speed']:.3g} steps/s"]
        parts += ["paused"] if status["paused"] else []
        parts += ["REC"] if status["recording"] else []
        if status["asking"]:
            parts.append("keep this episode? Y / N")
        elif status["message"] or status["prompt"]:
            parts.append((status["message"] or status["prompt"]).translate(ARROWS))
        return "   ".join(parts)

    def _draw_help(self) -> None:
        rows = [
            *self.session.keymap.legend,
            *control_legend(self.session.mode),
            ("F1", "these keys"),
            ("Esc", "close"),
        ]
        shade = self.pygame.Surface(self.screen.get_size(), self.pygame.SRCALPHA)
        shade.fill((5, 7, 11, 225))
        self.screen.blit(shade, (0, 0))
        for index, (keys, text) in enumerate(rows):
            column, row = divmod(index, 14)
            x, y = 14 + 300 * column, 16 + 23 * row
            self.screen.blit(self.font.render(keys.translate(ARROWS), True, (232, 237, 245)), (x, y))
            self.screen.blit(self.font.render(text, True, (139, 151, 171)), (x + 96, y))


def picker(panels: list[Panel], columns: int = 4) -> np.ndarray:
    """Return (H, W, 3) uint8: the start states to choose among, in rows."""
    rows = [compose(panels[at : at + columns]) for at in range(0, len(panels), columns)]
    width = max(row.shape[1] for row in rows)
    return np.concatenate([np.pad(row, [(0, 0), (0, width - row.shape[1]), (0, 0)]) for row in rows])


def check_driver(driver: str) -> None:
    """Raise LabError if SDL chose a driver without a window, as it does if DISPLAY names no running server."""
    if driver in ("dummy", "offscreen") and os.environ.get("SDL_VIDEODRIVER") != driver:
        display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or ""
        raise LabError(f"DISPLAY={display}: no display server answers there; use --web or --video")


def run_window(session: PlaySession, title: str) -> int:
    window = Window(session, title)
    try:
        window.run()
    finally:
        window.close()
    return 0
