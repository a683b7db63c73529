"""A real browser opens the page: Debian's Chromium, driven by Playwright.

The pictures of docs/howto/play.md are those of a CartPole run:

    RL_LAB_PICTURES=$PWD/docs/images RL_LAB_PLAY_RUN=RUN pytest tests/tools/play/test_play_desktop.py \
        tests/tools/play/test_play_browser.py::test_browser_play_and_recording
"""

from __future__ import annotations

import os
import re
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


@pytest.fixture(scope="module")
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
        lines = iter(server.stdout.readline, "")
        found = next((match for line in lines if (match := re.search(r"http://\S+", line))), None)
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
    # 50 steps in the dream, by keyboard: forward, and a turn now and then; or to both sides in turn
    shown = page.eval_on_selector_all("#keys kbd", "caps => caps.map(cap => cap.dataset.key)")
    keys = ("ArrowUp", "ArrowUp", "ArrowRight") if "ArrowUp" in shown else ("ArrowRight", "ArrowLeft")
    for step in range(50):
        page.keyboard.press(keys[step % len(keys)])
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


READY = "() => document.body.dataset.steers === 'true' && document.querySelector('canvas.view')"
SIZES = ((1280, 800), (390, 844))
OVERFLOW = """() => [
  document.documentElement.scrollWidth - innerWidth,
  ...[...document.querySelectorAll('.tile strong, .tile span, .dock button')].map(e => e.scrollWidth - e.clientWidth - 2),
  ...[...document.querySelectorAll('canvas.view')].map(c => Math.abs(c.width / c.height - c.clientWidth / c.clientHeight) - 0.05),
]"""
# A gamepad of the standard mapping, which the test presses: pad(buttons, axes).
GAMEPAD = """
window.held = {buttons: [], axes: [0, 0]};
window.pad = (buttons, axes) => { window.held = {buttons, axes}; };
navigator.getGamepads = () => [{
  axes: window.held.axes, buttons: Array.from({length: 17}, (_, i) => ({pressed: window.held.buttons.includes(i)})),
}];
"""


@pytest.fixture
def open_page(browser: Any, address: str) -> Iterator[Any]:
    """open_page(width, height, **options) -> a page with a new dream that the user plays, and the list of its errors."""
    contexts = []

    def opened(width: int, height: int, script: str = "", **options: Any) -> tuple[Any, list[str]]:
        contexts.append(browser.new_context(viewport={"width": width, "height": height}, **options))
        page = contexts[-1].new_page()
        problems = listened(page)
        if script:
            page.add_init_script(script)
        begin(page, address)
        return page, problems

    yield opened
    for context in contexts:
        context.close()


def listened(page: Any) -> list[str]:
    """Return the list that collects the errors of a page."""
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    return problems


def begin(page: Any, address: str) -> None:
    """Open the page with a new dream that the user plays, whatever the test before left."""
    page.goto(address)
    page.wait_for_function(READY)
    page.locator("#control [data-value=human]").click()
    page.locator("#modes [data-value=dream]").click()
    page.wait_for_function(
        "() => document.body.dataset.mode === 'dream' && document.body.dataset.control === 'human'"
    )
    page.locator("[data-do=reset]").click()
    page.wait_for_function("() => document.body.dataset.step === '0'")


def test_touch_on_a_phone_rewinds_chooses_a_start_and_downloads_a_gif(open_page: Any, tmp_path: Path):
    page, problems = open_page(390, 844, has_touch=True, is_mobile=True, color_scheme="light")
    for step in range(6):
        page.locator("#keys kbd[data-key=ArrowUp]").tap()
        page.wait_for_function("done => +document.body.dataset.step > done", arg=step, timeout=30_000)
    keep(page, tmp_path, "play_phone.png")
    page.locator("#past").evaluate("e => { e.value = 2; e.dispatchEvent(new Event('input')); }")
    page.wait_for_function("() => +document.body.dataset.step === 2")
    page.locator("#past").dispatch_event("change")
    last = number(page, "last")
    assert last >= 6
    page.locator("#keys kbd[data-key=ArrowRight]").tap()
    page.wait_for_function("() => +document.body.dataset.branches === 1 && +document.body.dataset.step === 3")
    page.locator("#dreambar [data-do=starts]").tap()
    page.wait_for_function("() => document.querySelectorAll('#picks img').length === 8")
    page.wait_for_function(
        "() => [...document.querySelectorAll('#picks img')].every(i => i.naturalWidth > 0)"
    )
    keep(page, tmp_path, "play_starts_phone.png")
    page.locator("#picks button").nth(3).tap()
    page.wait_for_function("() => document.body.dataset.picks === '0' && document.body.dataset.step === '0'")
    for _ in range(3):
        page.locator("#keys kbd[data-key=ArrowUp]").tap()
    page.wait_for_function("() => +document.body.dataset.step >= 3")
    with page.expect_download() as download:
        page.locator("#gif").tap()
    assert download.value.suggested_filename.endswith(".gif")
    clip = tmp_path / "clip.gif"
    download.value.save_as(clip)
    assert len(read_video(clip)) >= 9
    page.wait_for_function(
        "() => document.querySelector('#still').naturalWidth > 0"
    )  # shown on the page, too
    assert page.locator("#temperature").is_visible() and not page.locator("#dreamy").is_visible()
    assert problems == []


def test_gamepad_plays_in_the_browser(open_page: Any):
    page, problems = open_page(1280, 800, GAMEPAD)
    for step, (buttons, axes) in enumerate(([[12], [0, 0]], [[], [0.9, 0.1]], [[0], [0, 0]])):
        page.evaluate("([buttons, axes]) => pad(buttons, axes)", [buttons, axes])
        page.wait_for_function("done => +document.body.dataset.step > done", arg=step, timeout=30_000)
        page.evaluate("() => pad([], [0, 0])")
        page.wait_for_timeout(100)
    step = number(page, "step")
    page.evaluate("() => pad([4], [0, 0])")  # left shoulder: back a step
    page.wait_for_function("before => +document.body.dataset.step < before", arg=step)
    assert page.locator("#pad").is_visible()
    assert problems == []


def test_page_fits_wide_and_narrow_light_and_dark(open_page: Any, tmp_path: Path):
    for width, height in SIZES:
        for scheme in ("light", "dark"):
            page, problems = open_page(width, height, color_scheme=scheme)
            page.keyboard.press("ArrowUp")
            page.wait_for_function("() => document.querySelectorAll('.tile').length >= 7")
            for mode in ("dream", "both"):
                page.locator(f"#modes [data-value={mode}]").click()
                page.wait_for_function("mode => document.body.dataset.mode === mode", arg=mode)
                page.wait_for_timeout(300)
                assert max(page.evaluate(OVERFLOW)) <= 0, (width, scheme, mode, page.evaluate(OVERFLOW))
            keep(page, tmp_path, f"play_{width}_{scheme}.png")
            page.locator("#modes [data-value=dream]").click()
            page.wait_for_function("() => document.body.dataset.mode === 'dream'")
            page.close()
            assert problems == []


def keep(page: Any, folder: Path, name: str) -> None:
    """Take a screenshot and check that it is not empty."""
    from PIL import Image

    file = Path(os.environ.get("RL_LAB_PICTURES", folder)) / name
    page.wait_for_timeout(300)
    page.screenshot(path=file)
    with Image.open(file) as image:
        assert len(image.convert("RGB").getcolors(maxcolors=1 << 24) or []) > 200
