"""The Orchestrator with injected stand-ins only: no environment, buffer, network or file."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest
import torch

from rl_lab.errors import CheckpointError, LabError
from rl_lab.orchestration.orchestrator import Orchestrator, Settings
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.orchestration.phases import Cadences, Every, HookInfo, parse_phases
from rl_lab.orchestration.run_log import RunLog
from rl_lab.orchestration.run_state import RunState
from rl_lab.orchestration.updates import HookRunner
from rl_lab.records import CollectResult, Hook, UpdateResult


class Diary:
    """Stands in for workflow, storage, logger and checkpoints, and writes down what it was asked."""

    def __init__(self, ready_after: int = 0, loss: float = 1.0, nonfinite: float = 0.0) -> None:
        self.entries: list[str] = []
        self.lines: list[dict] = []
        self.saved: list[tuple[int, str | None]] = []
        self.buffers: dict = {}
        self.ready_after = ready_after
        self.loss, self.nonfinite = loss, nonfinite
        self.fail_saves = False

    # workflow
    def collect_step(self, step, *, phase):
        self.entries.append(f"collect@{step}")
        return CollectResult(steps=2, trajectory={"rows": step}, metrics={"speed": 1.0})

    def finished_episodes(self):
        return []

    def get_state(self):
        return {}

    def set_state(self, state):
        pass

    def report(self, batch):
        return {}

    # storage
    def store(self, phase, trajectory):
        self.entries.append(f"store {trajectory['rows']} in {next(iter(phase.buffer))}")

    def stream(self, hook, phase):
        return None

    def shortage(self, hook, phase):
        return "too few rows"

    # logger
    def scalars(self, metrics, **counters):
        self.lines.append({**metrics, **counters})

    def flush(self):
        pass

    def metrics_bytes(self):
        return 0

    # checkpoints
    def save(self, step, state, buffers, *, info=None, tag=None):
        if self.fail_saves:
            raise CheckpointError("disk full")
        self.saved.append((step, tag))

    def step(self, batch, scalars, noise):
        self.entries.append("update")
        metrics = {"loss": torch.tensor(self.loss), "nonfinite": torch.tensor(self.nonfinite)}
        return UpdateResult(metrics)


def orchestrator_of(diary: Diary, phases: list, cadences: Cadences | None = None, **settings) -> Orchestrator:
    hook = Hook(diary.step)
    parsed = parse_phases(phases, {"update": HookInfo()}, ["replay", "demos"])
    scheduler = PhaseScheduler(parsed, total_timesteps=100)
    runner = HookRunner("update", hook, device=torch.device("cpu"), generator=torch.Generator())
    return Orchestrator(
        workflow=diary,
        scheduler=scheduler,
        storage=SimpleNamespace(
            store=diary.store,
            stream=diary.stream,
            shortage=diary.shortage,
            buffers={},
            get_state=dict,
            settle=lambda: None,
        ),
        runners={"update": runner},
        log=RunLog(diary),
        run_state=RunState(workflow=diary, scheduler=scheduler),
        cadences=cadences or Cadences(),
        settings=Settings(**settings),
        checkpoints=SimpleNamespace(save=diary.save),
        say=diary.entries.append,
    )


JOINT = [{"name": "joint", "buffer": "demos", "duration_steps": 6, "workflow_hooks": ["collect", "update"]}]


def test_collects_stores_and_updates_in_order():
    diary = Diary()
    orchestrator_of(diary, JOINT).run()
    assert diary.entries == [
        "collect@0",
        "store 0 in demos",
        "update",
        "collect@2",
        "store 2 in demos",
        "update",
        "collect@4",
        "store 4 in demos",
        "update",
    ]
    assert diary.saved == [(6, None)]


def test_log_lines_hold_counters_means_and_prefixes():
    diary = Diary(loss=3.0)
    orchestrator_of(diary, JOINT, Cadences(log=Every({"env_steps": 4}))).run()
    line = diary.lines[0]
    assert (line["step"], line["frames"], line["updates"]) == (4, 4, 1)
    assert line["train/loss"] == 3.0
    assert line["collect/speed"] == 1.0
    assert {"time/env_steps_per_second", "time/updates_per_second", "workflow/phase_progress"} <= set(line)


def test_the_end_of_a_cycle_is_not_logged_again_when_nothing_came_between():
    diary = Diary()
    orchestrator_of(diary, JOINT, Cadences(log=Every({"env_steps": 2, "updates": 1, "cycles": 1}))).run()
    *lines, last = diary.lines
    places = [(line["step"], line["updates"]) for line in lines]
    assert places == [(2, 0), (2, 1), (4, 1), (4, 2), (6, 2), (6, 3)]
    assert (last["step"], last["updates"]) == (6, 3)  # the run's own last line


def test_the_weights_of_epochs_are_kept_the_last_included():
    diary = Diary()
    orchestrator_of(diary, JOINT, Cadences(epoch_weights=Every({"cycles": 1}))).run()
    assert diary.saved == [(2, "epoch_1"), (4, "epoch_2"), (6, "epoch_3"), (6, None)]


def test_checkpoint_cadence_and_a_failing_disk():
    diary = Diary()
    orchestrator_of(diary, JOINT, Cadences(checkpoint=Every({"env_steps": 4}))).run()
    assert diary.saved == [(4, None), (6, None)]
    for choice, updates in (("continue", 3), ("stop", 2)):
        diary = Diary()
        diary.fail_saves = True
        with pytest.raises(CheckpointError, match="disk full"):  # of the last checkpoint, at the latest
            orchestrator_of(
                diary, JOINT, Cadences(checkpoint=Every({"env_steps": 4})), on_save_failure=choice
            ).run()
        assert diary.entries.count("update") == updates - (choice == "stop")
        said = any("training goes on: disk full" in entry for entry in diary.entries)
        assert said == (choice == "continue")


def test_nonfinite_updates_stop_the_run_or_are_said():
    with pytest.raises(LabError, match="non-finite"):
        orchestrator_of(Diary(nonfinite=1.0), JOINT).run()
    diary = Diary(nonfinite=1.0)
    orchestrator_of(diary, JOINT, on_nonfinite="continue").run()
    assert any("non-finite" in entry for entry in diary.entries)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_finishes_the_action_saves_and_returns(number: signal.Signals, capfd):
    diary = Diary()
    orchestrator = orchestrator_of(diary, JOINT)
    collect = diary.collect_step

    def interrupted_collect(step, *, phase):
        if step == 2:
            os.kill(os.getpid(), number)
        return collect(step, phase=phase)

    diary.collect_step = interrupted_collect
    handler = signal.getsignal(number)
    orchestrator.run()
    assert orchestrator.interrupted
    assert diary.entries[-2:] == ["collect@2", "store 2 in demos"]
    assert diary.saved == [(4, None)]
    assert signal.getsignal(number) is handler
    assert f"{number.name}: finishing what is under way, then saving" in capfd.readouterr().err


def test_an_offline_phase_with_too_little_data_is_an_error_at_its_start():
    diary = Diary()
    phases = [{"name": "off", "type": "offline", "duration_updates": 3, "workflow_hooks": ["update"]}]
    with pytest.raises(LabError, match="too few rows"):
        orchestrator_of(diary, phases).run()
    assert "update" not in diary.entries


def test_freezing_holds_for_its_phase_only():
    diary = Diary()
    phases = [
        {"name": "a", "duration_steps": 2, "workflow_hooks": ["collect"], "freeze": ["part"]},
        {"name": "b", "duration_steps": 2, "workflow_hooks": ["collect"]},
    ]
    orchestrator = orchestrator_of(diary, phases)
    part = torch.nn.Linear(2, 2)
    orchestrator.run_state.components["part"] = part
    seen = []
    collect = diary.collect_step

    def watching(step, *, phase):
        seen.append((phase["name"], part.weight.requires_grad))
        return collect(step, phase=phase)

    diary.collect_step = watching
    orchestrator.run()
    assert seen == [("a", False), ("b", True)]
