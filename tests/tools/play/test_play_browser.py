"""A real browser opens the page: Debian's Chromium, driven by Playwright.

RL_LAB_PICTURES=docs/images keeps its screenshots, RL_LAB_PLAY_RUN=RUN takes them of a better model.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_lab.tools.play.episodes import read_video

PATIENCE = 120.0  # seconds until the server's first line; imports, weights and environment take 2 to 10
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if program is None:
        pytest.skip("not run: needs Chromium (apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="not run: needs the package playwright")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def address(trained: Path) -> Iterator[str]:
    """`rl-lab play RUN -w --web`, as a person starts it."""
    run = os.environ.get("RL_LAB_PLAY_RUN", str(trained))
    command = [
        sys.executable,
        "-m",
        "rl_lab",
        "play",
        run,
        "-w",
        "-r",
        "--web",
        "--port",
        "0",
        "--ends",
        "never",
    ]
    server = subprocess.Popen([*command, "--seed", "3"], stdout=subprocess.PIPE, text=True)
    # Python's fault handler prints the stack of every thread on SIGABRT.
    watch = threading.Timer(PATIENCE, server.send_signal, [signal.SIGABRT])
    watch.start()
    try:
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        watch.cancel()
        assert found is not None, "the server printed no URL: see the captured stderr"
        yield found[0]
    finally:
        watch.cancel()
        server.terminate()
        server.wait(20)


def number(page: Any, name: str) -> int:
    return int(page.evaluate("name => document.body.dataset[name] ?? 0", name))


def test_browser_play_and_recording(browser: Any, address: str, tmp_path: Path):
    problems: list[str] = []
    page = browser.new_page(viewport={"width": 1360, "height": 850}, color_scheme="dark")
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(address)
    page.wait_for_function(
        "() => document.body.dataset.steers === 'true' && document.querySelector('canvas.view')"
    )
    assert page.get_attribute("body", "data-mode") == "dream"
    # 50 steps in the dream, by keyboard: forward, and a turn now and then
    for step in range(50):
        page.keyboard.press("ArrowRight" if step % 7 == 3 else "ArrowUp")
        page.wait_for_function("done => +document.body.dataset.step > done", arg=step, timeout=30_000)
    assert number(page, "step") >= 50  # a key held for long repeats, and on a busy machine a press is long
    keep(page, tmp_path, "play_dream.png")
    # another mode: real environment and dream side by side
    page.keyboard.press("v")
    page.wait_for_function("() => document.body.dataset.mode === 'both'")
    page.get_by_role("button", name="Agent").click()
    page.wait_for_function(
        "() => document.body.dataset.control === 'agent' && +document.body.dataset.step >= 3"
    )
    # record, stop, download
    page.keyboard.press(",")
    page.wait_for_function("() => document.body.dataset.recording === 'true'")
    frames = number(page, "frames")
    page.wait_for_function("before => +document.body.dataset.frames >= before + 8", arg=frames)
    keep(page, tmp_path, "play_side_by_side.png")
    page.keyboard.press(",")
    link = page.locator("#files a[download*='_both_'][download$='.mp4']").first
    link.wait_for()
    with page.expect_download() as download:
        link.click()
    video = tmp_path / "video.mp4"
    download.value.save_as(video)
    assert len(read_video(video)) >= 8
    # a second page only watches
    other = browser.new_page()
    other.goto(address)
    other.wait_for_function("() => document.querySelector('canvas.view')")
    assert other.get_attribute("body", "data-steers") == "false" and not other.locator("#take").is_enabled()
    page.close()
    other.wait_for_function("() => !document.getElementById('take').disabled")
    other.locator("#take").click()
    other.wait_for_function("() => document.body.dataset.steers === 'true'")
    other.close()
    assert problems == []


def keep(page: Any, folder: Path, name: str) -> None:
    """Take a screenshot and check that it is not empty."""
    from PIL import Image

    file = Path(os.environ.get("RL_LAB_PICTURES", folder)) / name
    page.wait_for_timeout(300)
    page.screenshot(path=file)
    with Image.open(file) as image:
        assert len(image.convert("RGB").getcolors(maxcolors=1 << 24) or []) > 200
