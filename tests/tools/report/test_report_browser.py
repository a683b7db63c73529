"""The report in a real browser: it needs nothing from the network, and the live page follows a run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_lab.tools.report import command as report
from rl_lab.tools.report.serve import LiveReport, Server
from rl_lab.tools.web_access import WebAccess

MakeRun = Callable[..., Path]


def test_page_is_self_contained(browser: Any, make_run: MakeRun, tmp_path: Path):
    runs = [make_run(name=name, seed=seed, lines=12) for name in ("a", "b") for seed in (0, 1, 2)]
    index = report.write_report(runs, out=tmp_path / "report", keys=["train/loss/reward"])[0]
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(index.as_uri())
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert page.locator("h1").inner_text() == "a, b"
    shown = page.evaluate("[...document.images].map((image) => image.complete && image.naturalWidth)")
    assert len(shown) >= 10 and all(shown)
    assert_fits(page)
    wide = page.evaluate(PICTURES)
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_function(
        "[...document.querySelectorAll('img.plot')].every((image) => image.naturalWidth < 700)"
    )
    assert_fits(page)
    narrow = page.evaluate(PICTURES)
    assert len(narrow) == len(wide) >= 5
    for phone, desk in zip(narrow, wide):
        assert phone["scale"] > 0.57, "8 points are at least 9 pixels high"
        assert phone["height"] / phone["width"] > desk["height"] / desk["width"], "drawn for this width"


PICTURES = """[...document.querySelectorAll('img.plot')].map((image) => ({
  width: image.clientWidth, height: image.clientHeight, scale: image.clientWidth / image.naturalWidth}))"""


def assert_fits(page: Any) -> None:
    """Nothing scrolls sideways but tables, and no picture or video is cut off."""
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    beyond = page.evaluate(
        """[...document.querySelectorAll('img, video, figure, picture, .card:not(:has(table))')].filter((element) => {
          const box = element.getBoundingClientRect();
          return box.left < 0 || box.right > window.innerWidth || element.scrollWidth > element.clientWidth + 1;
        }).map((element) => element.outerHTML.slice(0, 80))"""
    )
    assert beyond == []


def test_live_page_reloads(browser: Any, make_run: MakeRun, tmp_path: Path):
    run = make_run(lines=5, media=False)
    access = WebAccess("127.0.0.1", "secret")
    live = LiveReport([tmp_path / "outputs"])
    server = Server(live, access, 0)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        live.refresh()
        page = browser.new_page()
        complaints: list[str] = []
        page.on(
            "console", lambda message: complaints.append(message.text) if message.type == "error" else None
        )
        page.goto(server.url)
        assert page.locator("h1").inner_text() == "dreamer_cartpole"
        with (run / "metrics.jsonl").open("a") as file:
            file.write('\n{"step": 54321, "collect/return_mean": 3.0}\n')
        live.refresh()
        page.get_by_text("54,321").first.wait_for(timeout=60_000)
        assert [text for text in complaints if "favicon" not in text] == []
        other = browser.new_page()
        assert other.goto(server.url.partition("?")[0]).status == 403
    finally:
        server.shutdown()
        server.server_close()
        live.close()
