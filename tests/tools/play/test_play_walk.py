"""The walk of docs/howto/demonstrations.md: played in a browser, recorded, a world model learns it, its dream is played.

RL_LAB_PICTURES=docs/images keeps the pictures; RL_LAB_WALK=long plays and trains as long as the how-to does.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import rl_lab
from rl_lab.buffers.formats.dataset import open_dataset
from rl_lab.cli import main
from tests.tools.play.test_play_browser import keep, number

LONG = os.environ.get("RL_LAB_WALK") == "long"
EPISODES, UPDATES = (60, 1500) if LONG else (3, 20)
QUIET = ["logging.progress=off", "logging.tensorboard=false"]
LEFT, STAY, RIGHT = "ArrowLeft", "ArrowDown", "ArrowRight"


@contextmanager
def served(*words: str) -> Iterator[str]:
    """`rl-lab play … --web`, as a person starts it."""
    command = [sys.executable, "-m", "rl_lab", "play", *words, "--web", "--port", "0", "--seed", "3"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        lines = iter(server.stdout.readline, "")
        found = next((match for line in lines if (match := re.search(r"http://\S+", line))), None)
        assert found is not None, "the server printed no URL: see the captured stderr"
        yield found[0]
    finally:
        server.terminate()
        server.wait(20)


def press(page: Any, key: str) -> None:
    """One step: the frame counter must move."""
    before = number(page, "frames")
    page.keyboard.press(key)
    page.wait_for_function("before => +document.body.dataset.frames > before", arg=before, timeout=30_000)


@pytest.mark.learning
def test_played_by_hand_recorded_learned_and_dreamed(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    size = [] if LONG else ["debug=tiny"]
    rl_lab.train(
        "dreamer_catch", [*QUIET, *size, "training.total_timesteps=200", f"run_dir={tmp_path / 'hand'}"]
    )
    with served(str(tmp_path / "hand"), "--human", "--wait") as address:
        page = browser.new_page(viewport={"width": 1360, "height": 850}, color_scheme="dark")
        page.goto(address)
        page.wait_for_function(
            "() => document.body.dataset.steers === 'true' && document.querySelector('canvas.view')"
        )
        page.keyboard.press(",")
        page.wait_for_function("() => document.body.dataset.recording === 'true'")
        for episode in range(EPISODES):
            for step in range(9):  # three balls that fall three cells each
                press(page, (LEFT, STAY, RIGHT)[(episode + step * step) % 3])
            if episode == EPISODES - 1:
                keep(page, tmp_path, "walk_by_hand.png")
            press(page, "Enter")
        page.keyboard.press(",")
        page.locator("#files a").first.wait_for()
        page.close()
    words = ["collect", str(tmp_path / "hand"), "--recordings", "--out", str(tmp_path / "by_hand")]
    assert main(words) == 0
    pictures = Path(os.environ.get("RL_LAB_PICTURES", tmp_path))
    assert main(["data", "info", "by_hand", "--sheet", str(pictures / "walk_data.png")]) == 0
    with open_dataset(tmp_path / "by_hand") as data:
        assert len(data) >= EPISODES and set(data.lengths.tolist()) <= {8, 9}
        assert {int(a) for episode in data for a in episode.actions} == {0, 1, 2}
    phase = f"{{name: learn, type: offline, buffer: offline, duration_updates: {UPDATES}, workflow_hooks: [update_world_model]}}"
    learned = [
        *QUIET,
        *size,
        "+buffer@buffers.offline=offline",
        f"buffers.offline.path={tmp_path / 'by_hand'}",
    ]
    run = rl_lab.train(
        "dreamer_catch", [*learned, f"training.phases=[{phase}]", f"run_dir={tmp_path / 'learned'}"]
    )
    assert run.counters["env_steps"] == 0 and run.counters["updates"] == UPDATES
    with served(str(tmp_path / "learned"), "-w", "-r", "--wait", "--ends", "never") as address:
        page = browser.new_page(viewport={"width": 1360, "height": 850}, color_scheme="dark")
        page.goto(address)
        page.wait_for_function(
            "() => document.body.dataset.steers === 'true' && document.querySelector('canvas.view')"
        )
        assert page.get_attribute("body", "data-mode") == "dream"
        for step in range(6):
            press(page, (LEFT, RIGHT, STAY)[step % 3])
        keep(page, tmp_path, "walk_dream.png")
        page.close()
