"""The plots of a report in a real browser: values under the pointer, zoom, smoothing, axes, runs, search."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_lab.run_folder import RunFolder
from rl_lab.tools.report import command as report
from rl_lab.tools.report import interactive
from rl_lab.tools.report.curves import combine, smooth
from rl_lab.tools.report.runs import load_runs
from rl_lab.tools.report.serve import LiveReport, Server
from rl_lab.tools.web_access import WebAccess
from rl_lab.utils.files import RunLock
from tests.tools.conftest import write_phases

MakeRun = Callable[..., Path]

# In place of plotly.js: it keeps what it is told to draw. With the package, the marker `extras`.
STUB = """window.Plotly = { react: (area, traces, layout) => {
  area.traces = traces; area.layout = layout; area.textContent = traces.length + " traces"; return Promise.resolve(area);
} };"""

# A busy browser tells a page late which plots are in view.
LATE = """const Observer = window.IntersectionObserver;
window.IntersectionObserver = class extends Observer {
  constructor(call, options) { super((entries) => setTimeout(() => call(entries), 200), options); }
};"""


def open_page(browser: Any, address: str, late: bool = False, **options: Any) -> tuple[Any, list[str]]:
    """The page, when its plots are drawn, and what the browser complains about."""
    page = browser.new_context(**options).new_page()
    if late:
        page.add_init_script(LATE)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(address)
    page.locator("html[data-charts=ready]").wait_for(state="attached", timeout=60_000)
    return page, complaints


def traces(page: Any, number: int = 0) -> list[dict[str, Any]]:
    return page.evaluate("(number) => document.querySelectorAll('.plotarea')[number].traces", number)


def test_what_the_script_draws(browser: Any, make_run: MakeRun, tmp_path: Path, monkeypatch) -> None:
    stub = tmp_path / "plotly.min.js"
    stub.write_text(STUB)
    monkeypatch.setattr(interactive, "library", lambda: stub)
    folders = [make_run(seed=seed, lines=60, media=False) for seed in (0, 1, 2)]
    index = report.write_report(folders, out=tmp_path / "report", keys=["train/loss/*"])[0]
    page, complaints = open_page(browser, index.as_uri(), late=True)
    runs = load_runs([RunFolder(folder) for folder in folders])
    # The learning curve: the same mean as in the pictures, and nearly the same interval.
    drawn = {trace["name"]: trace for trace in traces(page)}
    curve = drawn["dreamer_cartpole (3 seeds), evaluation"]
    band = combine([run.metrics.curve("eval/return_mean") for run in runs])
    np.testing.assert_allclose(curve["x"], band.x)
    np.testing.assert_allclose(curve["y"], band.mean, rtol=1e-4)
    area = next(trace for trace in traces(page) if trace.get("fill"))
    half = len(area["y"]) // 2
    np.testing.assert_allclose(area["y"][:half], band.high, atol=0.1 * np.ptp(band.mean))
    np.testing.assert_allclose(area["y"][half:][::-1], band.low, atol=0.1 * np.ptp(band.mean))
    # One run, unsmoothed and smoothed.
    page.get_by_label("seeds").select_option("single")
    page.get_by_role("button", name="dreamer_cartpole, seed 0").dblclick()
    slide = "(value) => { const s = document.querySelector('#smooth'); s.value = value; s.dispatchEvent(new Event('input')); }"
    loss = runs[0].metrics.curve("train/loss/observation").finite()
    for percent in (0, 20):
        page.evaluate(slide, percent)
        box = page.locator(".chart", has_text="loss/observation")
        box.scroll_into_view_if_needed()
        box.locator(".plotarea:not(:empty)").wait_for()
        shown = box.locator(".plotarea").evaluate("(area) => area.traces")[-1]
        expected = smooth(loss, 0 if percent == 0 else 2 * (60 * percent // 200))
        np.testing.assert_allclose(shown["y"], expected.y, rtol=1e-4)
        assert shown["name"] == "dreamer_cartpole, seed 0"
    # The x axis; what is out of sight is drawn when it comes into view.
    page.locator("h1").scroll_into_view_if_needed()
    page.wait_for_function("document.querySelector('.chart').near")
    for axis, last in (("frames", 20_000), ("updates", 10_000), ("seconds", 59 * 3.1 / 60), ("step", 20_000)):
        page.get_by_label("x axis").select_option(axis)
        assert traces(page)[-1]["x"][-1] == pytest.approx(last, rel=1e-3), axis
    # Runs off and on; a choice outlives the page's reload.
    page.get_by_role("button", name="none", exact=True).click()
    assert traces(page) == [] and page.locator("#run-count").inner_text() == "Runs: 0 of 3"
    page.reload()
    page.locator("html[data-charts=ready]").wait_for(state="attached")
    assert page.locator("#run-count").inner_text() == "Runs: 0 of 3"
    page.get_by_role("button", name="all", exact=True).click()
    # Search: "/" goes to the field, sections without a hit go.
    page.locator("h1").click()
    page.keyboard.press("/")
    page.keyboard.type("LOSS reward")
    assert page.locator(".chart:visible").count() == 1 and page.locator("#found").inner_text() == "1 of 6"
    assert not page.locator("#learning-curve").is_visible()
    page.get_by_label("find a metric").fill("")
    assert page.locator("#learning-curve").is_visible()
    assert complaints == []


PHASES = """[{name: random, duration_steps: 4000, workflow_hooks: [collect]},
  {repeat: 20, phases: [{name: joint, duration_cycles: 1}, {name: <actor>, type: offline, duration_updates: 9}]}]"""


def phase_page(make_run: MakeRun, tmp_path: Path) -> Path:
    """Two runs of a curriculum, one that is in its first phase, and one without phases."""
    begins = [(0, 1), *((4000 + 400 * number, 2 + number) for number in range(40))]
    folders = [
        write_phases(make_run(name="a", media=False), PHASES, begins),
        write_phases(make_run(name="b", media=False), PHASES, begins[:1]),
        make_run(name="c", media=False),
    ]
    return report.write_report(folders, out=tmp_path / "report", keys=["train/loss/reward"])[0]


def test_bars_of_phases(browser: Any, make_run: MakeRun, tmp_path: Path, monkeypatch) -> None:
    stub = tmp_path / "plotly.min.js"
    stub.write_text(STUB)
    monkeypatch.setattr(interactive, "library", lambda: stub)
    page, complaints = open_page(browser, phase_page(make_run, tmp_path).as_uri(), late=True)
    random, joint, actor = traces(page, 1)
    assert (random["base"], random["x"][1], joint["name"]) == (
        [0, 0],
        pytest.approx(20_000, rel=0.01),
        "joint",
    )
    assert joint["base"] == actor["base"] == [4000] and joint["y"][0] < actor["y"][0] < random["y"][1]
    assert actor["text"] == ["<actor>"] and "&lt;actor&gt;: offline, 20 × 9 updates" in actor["customdata"][0]
    page.get_by_label("x axis").select_option("seconds")
    assert traces(page, 1)[1]["base"][0] == pytest.approx(20 * 3.1 / 60, rel=1e-3), "minutes"
    page.get_by_role("button", name="a", exact=True).click()
    assert [trace["name"] for trace in traces(page, 1)] == ["random"]
    page.get_by_role("button", name="none", exact=True).click()
    assert traces(page, 1) == []
    assert complaints == []


@pytest.mark.extras
@pytest.mark.parametrize("width, scheme", [(1280, "light"), (390, "dark")])
def test_bars_of_phases_of_plotly(
    browser: Any, make_run: MakeRun, tmp_path: Path, plotly: Path, width: int, scheme: str
) -> None:
    options = {"viewport": {"width": width, "height": 850}, "color_scheme": scheme, "has_touch": width < 600}
    page, complaints = open_page(browser, phase_page(make_run, tmp_path).as_uri(), **options)
    plot = page.locator(".chart.phases .plotarea")
    plot.scroll_into_view_if_needed()
    bars = plot.locator(".barlayer .point path")
    bars.first.wait_for()
    assert bars.count() == 4
    boxes = [bar.bounding_box() for bar in bars.all()]
    assert all(box["height"] > 15 and box["width"] > 2 for box in boxes)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    if width > 600:
        box = max(boxes[2:], key=lambda box: box["y"])  # the lower one of the two that take turns
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.mouse.move(box["x"] + box["width"] / 2 + 3, box["y"] + box["height"] / 2)
        plot.locator(".hoverlayer").get_by_text("<actor>: offline, 20 × 9 updates").wait_for(timeout=10_000)
    assert complaints == []


@pytest.mark.extras
@pytest.mark.parametrize("width, scheme", [(1280, "light"), (390, "dark")])
def test_plots_of_plotly(
    browser: Any, make_run: MakeRun, tmp_path: Path, plotly: Path, width: int, scheme: str
) -> None:
    runs = [make_run(name=name, seed=seed, lines=40) for name in ("a", "b") for seed in (0, 1)]
    index = report.write_report(runs, out=tmp_path / "report", keys=["train/loss/*", "controller/*"])[0]
    options = {"viewport": {"width": width, "height": 850}, "color_scheme": scheme, "has_touch": width < 600}
    page, complaints = open_page(browser, index.as_uri(), **options)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "nothing is cut off"
    plot = page.locator(".chart .plotarea").first
    plot.locator(".main-svg").first.wait_for()
    area = plot.locator(".nsewdrag").first.bounding_box()
    middle = (area["x"] + area["width"] / 2, area["y"] + area["height"] / 2)
    scale = "(area) => area.layout.xaxis.range"
    if width > 600:
        # The value under the pointer.
        page.mouse.move(*middle)
        page.mouse.move(middle[0] + 3, middle[1])
        hover = plot.locator(".hoverlayer")
        hover.get_by_text("a (2 seeds), training").wait_for(timeout=10_000)
        assert any(letter.isdigit() for letter in hover.text_content())
        # Zoom by dragging, and back by a double click.
        before = plot.evaluate(scale)
        page.mouse.down()
        page.mouse.move(middle[0] + area["width"] / 4, middle[1] + 2, steps=8)
        page.mouse.up()
        page.wait_for_function(
            "(before) => document.querySelector('.plotarea').layout.xaxis.range[0] > before + 1",
            arg=before[0],
        )
        zoomed = plot.evaluate(scale)
        assert zoomed[1] - zoomed[0] < 0.5 * (before[1] - before[0])
        # A change of the smoothing keeps the zoom.
        page.get_by_label("smoothing").fill("12")
        page.wait_for_timeout(300)
        assert plot.evaluate(scale) == pytest.approx(zoomed)
        page.mouse.dblclick(*middle)
        page.wait_for_function(
            "(after) => document.querySelector('.plotarea').layout.xaxis.range[0] < after", arg=zoomed[0]
        )
    else:
        before = plot.evaluate(scale)
        plot.locator("[data-title='Zoom in'], [aria-label='Zoom in']").first.tap()
        page.wait_for_function(
            "(before) => document.querySelector('.plotarea').layout.xaxis.range[0] > before", arg=before[0]
        )
        page.locator("#runs-box summary").tap()
    # Runs off and on.
    lines = "(area) => area.querySelectorAll('.scatterlayer .trace').length"
    drawn = plot.evaluate(lines)
    for name in ("b, seed 0", "b, seed 1"):
        page.get_by_role("button", name=name).click()
    page.wait_for_timeout(300)
    assert 0 < plot.evaluate(lines) < drawn
    assert "b (2 seeds)" not in plot.locator(".legend").text_content()
    # A small plot is drawn when it comes into view, and enlarged by its title.
    small = page.locator(".chart", has_text="loss/reward")
    small.scroll_into_view_if_needed()
    small.locator(".main-svg").first.wait_for()
    height = small.bounding_box()["height"]
    small.get_by_role("button", name="loss/reward").click()
    page.wait_for_timeout(300)
    assert small.bounding_box()["height"] > 1.5 * height
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert complaints == [] and [url for url in asked if not url.startswith(("data:", "blob:"))] == []


def check_live_page(browser: Any, make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(lines=20)
    other = make_run(name="other", lines=12)
    access = WebAccess("127.0.0.1", "a secret of the test")
    live = LiveReport([tmp_path / "outputs"])
    server = Server(live, access, 0)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    with (other / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 20500, "time": 1700000000.0}\n')
    (other / "config.yaml").write_text((other / "config.yaml").read_text().replace("20000", "41000"))
    try:
        with RunLock(other):
            live.refresh()
            page, complaints = open_page(browser, server.url)
            row = page.locator(".live .run", has_text="other")
            row.get_by_text("running").wait_for()
            assert "50 %" in row.inner_text() and "updated" in row.inner_text()
            assert page.title().startswith("50 % ·")
            page.locator(".live .run", has_text="dreamer_cartpole").get_by_text("finished").wait_for()
            # New lines come without a reload: what the reader chose and scrolled to stays.
            page.get_by_label("x axis").select_option("updates")
            page.evaluate("document.querySelector('.chart').mark = 'here'; window.kept = true")
            with (run / "metrics.jsonl").open("a") as file:
                file.write('\n{"step": 54321, "updates": 30000, "collect/return_mean": 3.0}\n')
            live.refresh()
            page.get_by_text("54,321").first.wait_for(timeout=60_000)
            assert page.evaluate("[window.kept, document.querySelector('.chart').mark]") == [True, "here"]
            assert page.get_by_label("x axis").input_value() == "updates"
            last = "[...document.querySelectorAll('.plotarea')].some((area) => (area.traces || area.data).some((t) => t.x.at(-1) === 30000))"
            page.wait_for_function(last)
        # Its page, and that it ended without saving.
        page.locator(".live a", has_text="other").click()
        page.locator("h1", has_text="other").wait_for()
        page.locator(".live .crashed").wait_for()
        assert page.locator(".live .run").count() == 1
        page.locator(".live a", has_text="all runs").click()
        page.locator(".live a", has_text="dreamer_cartpole").wait_for()
        assert [text for text in complaints if "favicon" not in text] == [], (
            "the Content-Security-Policy holds"
        )
    finally:
        server.shutdown()
        server.server_close()
        live.close()


def test_live_page(browser: Any, make_run: MakeRun, tmp_path: Path, monkeypatch) -> None:
    stub = tmp_path / "plotly.min.js"
    stub.write_text(STUB)
    monkeypatch.setattr(interactive, "library", lambda: stub)
    check_live_page(browser, make_run, tmp_path)


@pytest.mark.extras
def test_live_page_of_plotly(browser: Any, make_run: MakeRun, tmp_path: Path, plotly: Path) -> None:
    check_live_page(browser, make_run, tmp_path)
