from __future__ import annotations

import io
import sys
import types
import warnings

import pytest

from rl_lab.errors import ConfigError
from rl_lab.utils import progress as progress_module
from rl_lab.utils.progress import Progress, point_of

HEADLINE = {
    "phase": "joint",
    "phase_progress": 0.5,
    "step": 12000,
    "total": 40000,
    "updates": 300,
    "episodes": 1234,
    "env_steps_per_second": 321.4,
    "updates_per_second": 45.25,
    "return": 210.0,
    "eval_return": None,
}


def test_point_of_a_run() -> None:
    assert point_of(12002, 300) == "step 12,002"
    assert point_of(0, 6000) == "update 6,000"  # stored data alone
    assert point_of(0, 0) == point_of(0, None) == "step 0"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

        def __call__(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(progress_module, "perf_counter", clock)
    return clock


def test_plain_prints_one_line_per_update(clock):
    stream = io.StringIO()
    with Progress(mode="auto", stream=stream) as progress:
        assert progress.mode == "plain"
        progress.update(HEADLINE)
        clock.now += 10
        progress.update({"step": 13000, "return": 220.5})
        progress.say("checkpoint saved")
    first, second, third = stream.getvalue().splitlines()
    assert first.startswith(
        "step 12,000/40,000 (30%) · joint · 321 env steps/s · 45.2 updates/s · return 210.0 · 1,234"
    )
    assert "MiB" in first and "eval" not in first and "ETA" not in first
    assert "ETA 4:30" in second and "return 220.5" in second  # 27,000 steps at 100 a second
    assert third == "checkpoint saved"


def test_live_on_a_terminal_and_throttled(clock):
    stream = Terminal()
    with Progress(mode="auto", title="my run", stream=stream) as progress:
        assert progress.mode == "live"
        progress.update(HEADLINE)
        drawn = len(stream.getvalue())
        for step in range(50):
            clock.now += 0.004
            progress.update({"step": 12000 + step})
        assert len(stream.getvalue()) == drawn  # 0.2 s: not yet
        clock.now += 0.1
        progress.update({"step": 12345})
        assert "12,345" in stream.getvalue()
        progress.update({"step": 39999})
        progress.say("[not markup]")
    text = stream.getvalue()
    assert "my run" in text and "joint" in text and "321 env steps/s" in text
    assert "39,999" in text  # the last state stays
    assert "[not markup]" in text


def test_ticks_redraw_between_log_lines_with_rates_of_the_counters(clock):
    stream = Terminal()
    with Progress(mode="live", title="my run", stream=stream) as progress:
        assert "starting" in stream.getvalue()
        for step in range(40):
            clock.now += 0.25
            progress.tick({"phase": "joint", "step": 10 * step, "total": 4000, "updates": step})
        assert "step 390/4,000" in stream.getvalue()
        assert "40 env steps/s · 4.0 updates/s" in stream.getvalue()
        assert "ETA 1:30" in stream.getvalue()  # 3,610 steps


def test_phases_epochs_and_the_share_of_the_run(clock):
    stream = io.StringIO()
    progress = Progress(mode="plain", stream=stream)
    shown = {
        "phase": "world_model",
        "phase_progress": 0.4,
        "phase_number": 5,
        "phases": 12,
        "epoch": 2,
        "epochs": 4,
    }
    progress.update(
        {"step": 800, **shown, "share": 0.25, "seconds_left": 90.0, "activity": "evaluating 8 episodes"}
    )
    progress.update({"episodes": 1, "activity": None})
    first, second = stream.getvalue().splitlines()
    assert first.startswith(
        "step 800 · 25% of the run · ETA 1:30 · world_model 40% · phase 5 of 12 · epoch 2 of 4 · evaluating 8 episodes"
    )
    assert "1 episode ·" in second and "evaluating" not in second


def test_plain_ticks_print_seldom(clock):
    stream = io.StringIO()
    progress = Progress(mode="plain", stream=stream)
    for step in range(400):
        clock.now += 0.2  # 80 s
        progress.tick({"step": step})
    assert len(stream.getvalue().splitlines()) == 2


def test_one_updated_output_in_a_notebook(clock, monkeypatch):
    shown: list[str] = []

    class Handle:
        def update(self, data, raw):
            shown.append(data["text/plain"])

    def display(data, raw, display_id):
        shown.append("new " + data["text/plain"])
        return Handle()

    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    assert not progress_module.in_notebook()
    kernel = types.SimpleNamespace(kernel=object())
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: kernel)
    with Progress(title="my run") as progress:
        assert progress.mode == "notebook"
        for step in range(3):
            clock.now += 1
            progress.tick({"step": step})
    assert [text.partition(" ·")[0] for text in shown] == ["new my run", "my run", "my run", "my run"]
    assert "step 2" in shown[-1]


def test_off_prints_only_messages():
    stream = io.StringIO()
    with Progress(mode="off", stream=stream) as progress:
        progress.update(HEADLINE)
        progress.say("done")
    assert stream.getvalue() == "done\n"


def test_time_left_unknown_without_progress(clock):
    progress = Progress(mode="off")
    assert progress.seconds_left() is None
    for _ in range(3):
        progress.update({"step": 5, "total": 10})
        clock.now += 1
    assert progress.seconds_left() is None
    progress.update({"step": 7})
    assert progress.seconds_left() == pytest.approx(4.5)  # two steps in three seconds, three to go


def test_without_a_total(clock):
    stream = io.StringIO()
    Progress(mode="plain", stream=stream).update({"step": 3, "total": None, "phase": "pretrain"})
    assert stream.getvalue().startswith("step 3 · pretrain")


def test_broken_stream():
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    progress = Progress(mode="plain", stream=Broken())
    with pytest.warns(UserWarning, match="progress display failed"):
        progress.update(HEADLINE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # reported once
        progress.update(HEADLINE)
        progress.update({"step": "not a number"})


def test_unknown_mode_raises():
    with pytest.raises(ConfigError, match=r"logging\.progress cannot be 'rich'"):
        Progress(mode="rich")
