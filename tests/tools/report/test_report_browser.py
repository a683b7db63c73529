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
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), (
        "it does not scroll sideways"
    )


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
