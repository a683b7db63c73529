from __future__ import annotations

import io
import warnings

import pytest

from rl_lab.errors import ConfigError
from rl_lab.utils import progress as progress_module
from rl_lab.utils.progress import Progress

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
