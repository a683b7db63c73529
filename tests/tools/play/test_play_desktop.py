"""The window: with SDL's dummy driver everywhere, and under a virtual display where Xvfb is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rl_lab.errors import LabError
from rl_lab.tools.play.session import PlaySession

pygame = pytest.importorskip("pygame")


def post(kind: int, key: int) -> None:
    pygame.event.post(pygame.event.Event(kind, key=key))


def tap(key: int) -> None:
    post(pygame.KEYDOWN, key)
    post(pygame.KEYUP, key)


def test_window_draws_and_passes_keys(make_session: Callable[..., PlaySession], monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    from rl_lab.tools.play.desktop import Window

    session = make_session(mode="dream", control="human", header=True, ends=None)
    window = Window(session, "test")
    try:
        pygame.event.clear()
        for _ in range(50):
            tap(pygame.K_RIGHT)
        window.read_events()
        assert session.step == 50
        tap(pygame.K_v)
        tap(pygame.K_COMMA)
        tap(pygame.K_m)
        window.read_events()
        assert session.mode == "both" and session.control == "agent" and session.status()["recording"]
        session.advance()
        window.draw()
        image = pygame.surfarray.array3d(window.screen)
        assert len(np.unique(image.reshape(-1, 3), axis=0)) > 20  # text, panels, ground
        tap(pygame.K_F1)
        tap(pygame.K_COMMA)
        window.read_events()
        window.draw()
        assert window.help and len(session.recordings.files) == 2
        tap(pygame.K_ESCAPE)
        window.run()
        assert not window.open
    finally:
        window.close()


def test_gamepad_and_start_states_in_the_window(make_session: Callable[..., PlaySession], monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    from rl_lab.tools.play.desktop import Window

    session = make_session(mode="dream", control="human", ends=None)
    window = Window(session, "test")

    def joystick(kind: int, **fields: object) -> None:
        pygame.event.post(pygame.event.Event(kind, **fields))
        window.read_events()

    try:
        pygame.event.clear()
        for value in (0.2, 0.9, 1.0, 0.1):  # one push of the stick
            joystick(pygame.JOYAXISMOTION, axis=0, value=value, instance_id=0)
        assert session.step == 1 and session.keymap.name(session.current.action) == "one"
        joystick(pygame.JOYHATMOTION, value=(0, 1), hat=0, instance_id=0)
        joystick(pygame.JOYHATMOTION, value=(0, 0), hat=0, instance_id=0)
        assert session.step == 2 and session.keymap.name(session.current.action) == "two"
        joystick(pygame.JOYBUTTONDOWN, button=4, instance_id=0)  # left shoulder: back a step
        joystick(pygame.JOYBUTTONUP, button=4, instance_id=0)
        assert session.step == 1
        joystick(pygame.JOYBUTTONDOWN, button=30, instance_id=0)  # unknown: nothing
        assert session.step == 1
        before = window.screen.copy()
        tap(pygame.K_SLASH)
        window.read_events()
        window.draw()
        assert session.picks and before.get_buffer().raw != window.screen.get_buffer().raw
        tap(pygame.K_3)
        tap(pygame.K_BACKQUOTE)
        window.read_events()
        assert not session.picks and session.step == 0 and session.recordings.files[0].suffix == ".gif"
    finally:
        window.close()


def test_footer_says_things_once(make_session: Callable[..., PlaySession], monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    from rl_lab.tools.play.desktop import Window

    window = Window(make_session(), "test")
    try:
        assert window._line() == "real environment, the agent plays   15 steps/s"
        tap(pygame.K_m)
        window.read_events()
        assert "real environment, you play" in window._line()
    finally:
        window.close()


def test_display_without_a_server_is_refused(make_session: Callable[..., PlaySession], monkeypatch):
    """SDL would fall back to its offscreen driver, and play would run unseen until it is killed."""
    from rl_lab.tools.play.desktop import Window, check_driver

    monkeypatch.delenv("SDL_VIDEODRIVER", raising=False)
    monkeypatch.setenv("DISPLAY", ":99")
    with pytest.raises(LabError, match="DISPLAY=:99: no display server answers there; use --web or --video"):
        Window(make_session(), "test")
    check_driver("x11")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    check_driver("dummy")


SCRIPT = """
import sys, threading, time
import pygame
from rl_lab.cli import main
from rl_lab.tools.play import desktop

def type_keys(window):
    def tap(key):
        for kind in (pygame.KEYDOWN, pygame.KEYUP):
            pygame.event.post(pygame.event.Event(kind, key=key))
    for step in range(10):
        tap((pygame.K_RIGHT, pygame.K_LEFT)[step % 2])
        time.sleep(0.05)
    while window.session.step < 10:
        time.sleep(0.05)
    time.sleep(0.3)
    pygame.image.save(window.screen, sys.argv[2])
    print("driver", pygame.display.get_driver(), "steps", window.session.step)
    tap(pygame.K_ESCAPE)

run = desktop.Window.run
def watched(window):
    threading.Thread(target=type_keys, args=(window,), daemon=True).start()
    run(window)
desktop.Window.run = watched
sys.exit(main(["play", sys.argv[1], "-w", "-r", "--header", "--ends", "never", "--seed", "1"]))
"""


def test_window_under_a_virtual_display(trained: Path, tmp_path: Path):
    xvfb = shutil.which("Xvfb")
    if xvfb is None:
        pytest.skip("not run: needs Xvfb (apt-get install xvfb)")
    reader, writer = os.pipe()
    display = subprocess.Popen(
        [xvfb, "-displayfd", str(writer), "-screen", "0", "1280x800x24", "-nolisten", "tcp"],
        pass_fds=(writer,),
        stderr=subprocess.DEVNULL,
    )
    os.close(writer)
    try:
        with os.fdopen(reader) as number:
            name = f":{number.readline().strip()}"
        image = tmp_path / "window.png"
        environment = {**os.environ, "DISPLAY": name, "SDL_VIDEODRIVER": "x11"}
        result = subprocess.run(
            [sys.executable, "-c", SCRIPT, os.environ.get("RL_LAB_PLAY_RUN", str(trained)), str(image)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert "driver x11 steps 10" in result.stdout
        shown = pygame.surfarray.array3d(pygame.image.load(str(image)))
        assert shown.shape[0] >= 480 and len(np.unique(shown.reshape(-1, 3), axis=0)) > 50
        if folder := os.environ.get("RL_LAB_PICTURES"):
            shutil.copy(image, Path(folder) / "play_window.png")
    finally:
        display.terminate()
        display.wait()
