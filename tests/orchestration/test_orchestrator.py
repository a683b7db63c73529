"""The Orchestrator with stand-ins: no environment, buffer, network or file."""

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


class Recorder:
    """Stands in for workflow, storage, logger and checkpoints, and records all calls."""

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


def orchestrator_of(
    recorder: Recorder, phases: list, cadences: Cadences | None = None, **settings
) -> Orchestrator:
    hook = Hook(recorder.step)
    parsed = parse_phases(phases, {"update": HookInfo()}, ["replay", "demos"])
    scheduler = PhaseScheduler(parsed, total_timesteps=100)
    runner = HookRunner("update", hook, device=torch.device("cpu"), generator=torch.Generator())
    return Orchestrator(
        workflow=recorder,
        scheduler=scheduler,
        storage=SimpleNamespace(
            store=recorder.store,
            stream=recorder.stream,
            shortage=recorder.shortage,
            buffers={},
            get_state=dict,
            drop_prefetched=lambda: None,
        ),
        runners={"update": runner},
        log=RunLog(recorder),
        run_state=RunState(workflow=recorder, scheduler=scheduler),
        own_collect_step=lambda step, *, phase: recorder.collect_step(step, phase=phase),
        cadences=cadences or Cadences(),
        settings=Settings(**settings),
        checkpoints=SimpleNamespace(save=recorder.save),
        say=recorder.entries.append,
    )


JOINT = [{"name": "joint", "buffer": "demos", "duration_steps": 6, "workflow_hooks": ["collect", "update"]}]


def test_collect_store_update_order():
    recorder = Recorder()
    orchestrator_of(recorder, JOINT).run()
    assert recorder.entries == [
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
    assert recorder.saved == [(6, None)]


def test_log_line_contents():
    recorder = Recorder(loss=3.0)
    orchestrator_of(recorder, JOINT, Cadences(log=Every({"env_steps": 4}))).run()
    line = recorder.lines[0]
    assert (line["step"], line["frames"], line["updates"]) == (4, 4, 1)
    assert line["train/loss"] == 3.0
    assert line["collect/speed"] == 1.0
    assert {"time/env_steps_per_second", "time/updates_per_second", "workflow/phase_progress"} <= set(line)


def test_a_phase_of_several_is_logged_once_when_it_begins():
    group = [
        {"name": "joint", "duration_steps": 4, "workflow_hooks": ["collect", "update"]},
        {"name": "updates", "duration_updates": 1, "workflow_hooks": ["update"]},
    ]
    recorder = Recorder()
    orchestrator = orchestrator_of(recorder, [{"repeat": 2, "phases": group}])
    orchestrator.run()
    begun = [
        (line["workflow/phase"], line["step"], line["updates"])
        for line in recorder.lines
        if "workflow/phase" in line
    ]
    assert begun == [(1, 0, 0), (2, 4, 2), (3, 4, 3), (4, 8, 5)]
    assert recorder.lines[-1]["time/run_done"] == 1.0
    # Resumed within the third phase: it began before.
    log = RunLog(Recorder())
    log.set_state({**orchestrator.log.get_state(), "phase": 3})
    for number in (3, 4):
        log.begin_phase({"env_steps": 6, "updates": 4}, {"phase_number": number})
    assert [line["workflow/phase"] for line in log.logger.lines] == [4]
    recorder = Recorder()
    orchestrator_of(recorder, JOINT).run()
    assert not any("workflow/phase" in line for line in recorder.lines), "one phase alone is not"


def test_cycle_end_is_not_logged_twice():
    recorder = Recorder()
    orchestrator_of(recorder, JOINT, Cadences(log=Every({"env_steps": 2, "updates": 1, "cycles": 1}))).run()
    places = [(line["step"], line["updates"]) for line in recorder.lines]
    assert places == [(2, 0), (2, 1), (4, 1), (4, 2), (6, 2), (6, 3)]  # the run's end adds none


def test_epoch_weights_are_saved_every_cycle():
    recorder = Recorder()
    orchestrator_of(recorder, JOINT, Cadences(epoch_weights=Every({"cycles": 1}))).run()
    assert recorder.saved == [(2, "epoch_1"), (4, "epoch_2"), (6, "epoch_3"), (6, None)]


def test_checkpoint_cadence_and_save_failures():
    recorder = Recorder()
    orchestrator_of(recorder, JOINT, Cadences(checkpoint=Every({"env_steps": 4}))).run()
    assert recorder.saved == [(4, None), (6, None)]
    for choice, updates in (("continue", 3), ("stop", 2)):
        recorder = Recorder()
        recorder.fail_saves = True
        with pytest.raises(CheckpointError, match="disk full"):  # by the last checkpoint at the latest
            orchestrator_of(
                recorder, JOINT, Cadences(checkpoint=Every({"env_steps": 4})), on_save_failure=choice
            ).run()
        assert recorder.entries.count("update") == updates - (choice == "stop")
        said = any("training continues: disk full" in entry for entry in recorder.entries)
        assert said == (choice == "continue")


def test_nonfinite_updates_stop_or_are_reported():
    with pytest.raises(LabError, match="non-finite"):
        orchestrator_of(Recorder(nonfinite=1.0), JOINT).run()
    recorder = Recorder(nonfinite=1.0)
    orchestrator_of(recorder, JOINT, on_nonfinite="continue").run()
    assert any("non-finite" in entry for entry in recorder.entries)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signal_finishes_action_and_saves(number: signal.Signals, capfd):
    recorder = Recorder()
    orchestrator = orchestrator_of(recorder, JOINT)
    collect = recorder.collect_step

    def interrupted_collect(step, *, phase):
        if step == 2:
            os.kill(os.getpid(), number)
        return collect(step, phase=phase)

    recorder.collect_step = interrupted_collect
    handler = signal.getsignal(number)
    orchestrator.run()
    assert orchestrator.interrupted
    assert recorder.entries[-2:] == ["collect@2", "store 2 in demos"]
    assert recorder.saved == [(4, None)]
    assert signal.getsignal(number) is handler
    assert f"{number.name}: finishing the current action, then saving" in capfd.readouterr().err


def test_offline_phase_needs_enough_data():
    recorder = Recorder()
    phases = [{"name": "off", "type": "offline", "duration_updates": 3, "workflow_hooks": ["update"]}]
    with pytest.raises(LabError, match="too few rows"):
        orchestrator_of(recorder, phases).run()
    assert "update" not in recorder.entries


def test_freeze_applies_to_its_phase_only():
    recorder = Recorder()
    phases = [
        {"name": "a", "duration_steps": 2, "workflow_hooks": ["collect"], "freeze": ["part"]},
        {"name": "b", "duration_steps": 2, "workflow_hooks": ["collect"]},
    ]
    orchestrator = orchestrator_of(recorder, phases)
    part = torch.nn.Linear(2, 2)
    orchestrator.run_state.components["part"] = part
    seen = []
    collect = recorder.collect_step

    def watching(step, *, phase):
        seen.append((phase["name"], part.weight.requires_grad))
        return collect(step, phase=phase)

    recorder.collect_step = watching
    orchestrator.run()
    assert seen == [("a", False), ("b", True)]
