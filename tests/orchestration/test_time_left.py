"""The share of a run with several phases, and the time left."""

from __future__ import annotations

import pytest

from rl_lab.orchestration.phase_scheduler import PhaseScheduler, TimeLeft
from rl_lab.orchestration.phases import HookInfo, parse_phases
from rl_lab.orchestration.run_log import RunLog

PHASES = [
    {
        "repeat": 3,
        "phases": [
            {"name": "fast", "type": "offline", "duration_updates": 10, "workflow_hooks": ["fit"]},
            {"name": "slow", "type": "offline", "duration_updates": 10, "workflow_hooks": ["fit"]},
        ],
    }
]
SECONDS = {"fast": 1.0, "slow": 4.0}  # of an update


def test_phases_that_were_seen_tell_what_the_others_take():
    scheduler = PhaseScheduler(parse_phases(PHASES, {"fit": HookInfo()}, ["replay"]))
    now = 0.0
    left = TimeLeft(scheduler, clock=lambda: now)
    assert left.estimate() == (None, None)
    estimates = {}
    while scheduler.next_action() is not None:
        phase = scheduler.current_phase()
        assert phase is not None
        now += SECONDS[phase.name]
        scheduler.advance("fit")
        estimates[now] = left.estimate()
    # Six phases of 10 updates: 3 × 10 s + 3 × 40 s = 150 s. Half of the first: all are thought to take 10 s.
    assert estimates[5.0] == pytest.approx((5 / 60, 55.0))
    assert estimates[50.0] == pytest.approx((1 / 3, 100.0))  # both were seen
    assert estimates[72.0] == pytest.approx((72 / 150, 78.0))
    assert estimates[150.0] == (1.0, 0.0)


class Recorder:
    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def scalars(self, metrics, **counters) -> None:
        self.lines.append(dict(metrics))


class Meter:
    def drain(self) -> dict[str, float]:
        return {"loss": 1.0, "nonfinite": 0.0}


def test_a_short_last_interval_is_no_outlier_of_the_curves():
    recorder = Recorder()
    log = RunLog(recorder, clock=lambda: 1.0)
    meters = [("train", Meter())]

    def write(steps: int, last: bool = False) -> None:
        totals = {"env_steps": steps, "updates": 0, "episodes": 0}
        log.write(totals, meters, phase="joint", progress=0.5, last=last)

    write(1000)
    write(1002, last=True)
    first, second = recorder.lines
    assert {"train/loss", "time/env_steps_per_second"} <= first.keys()
    assert not {"train/loss", "time/env_steps_per_second"} & second.keys()
    assert second["train/nonfinite"] == 0.0  # failures are never left out
    write(2000)
    write(2500, last=True)
    assert "train/loss" in recorder.lines[-1]


def test_a_log_without_a_display_takes_ticks():
    RunLog(Recorder()).tick({"env_steps": 1, "updates": 0, "episodes": 0}, dict)
    shown = []

    class Display:
        def tick(self, values) -> None:
            shown.append(values)

    now = 0.0
    log = RunLog(Recorder(), progress=Display(), total_steps=9, clock=lambda: now)
    for step in range(10):
        now += 0.125
        log.tick({"env_steps": step, "updates": 0, "episodes": 0}, lambda: {"phase": "joint"})
    assert len(shown) == 5 and shown[-1]["phase"] == "joint" and shown[-1]["total"] == 9
