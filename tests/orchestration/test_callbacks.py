"""Callbacks and `training.stop_when`: when they are called, what they may do, and that a resumed run is the same."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rl_lab
from rl_lab.errors import ConfigError
from rl_lab.orchestration.callbacks import Callbacks, StopRule, StopWhen, named
from rl_lab.orchestration.phases import Cadences, Every
from rl_lab.orchestration.run_log import ENDED_EARLY
from rl_lab.run_folder import RunFolder
from rl_lab.tools.report.status import run_status
from rl_lab.training import resume
from tests.orchestration.test_orchestrator import JOINT, Recorder, orchestrator_of
from tests.same_run import assert_same_run, stopped_at

TINY = ["debug=tiny", "logging.progress=off", "logging.tensorboard=false"]
EARLY = ["training.stop_when.at_least=1", "training.evaluate.every_env_steps=20"]


class Listener(rl_lab.Callback):
    """Records its calls; its number is part of the checkpoint."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.calls: list[str] = []
        self.stop_at, self.seen = stop_at, 0

    def on_begin(self, run: Any) -> None:
        self.calls.append(f"begin {run.step}")

    def on_log(self, metrics: Any, run: Any) -> None:
        self.seen += 1
        self.calls.append(f"log {run.step}")
        torch.rand(3)  # changes nothing of the run
        if self.stop_at is not None and run.step >= self.stop_at:
            run.stop("that is enough")

    def on_end(self, run: Any) -> None:
        self.calls.append(f"end {run.step}")

    def get_state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def set_state(self, state: Any) -> None:
        self.seen = state["seen"]


class Probe:
    """Stands in for a RunView."""

    def __init__(self) -> None:
        self.step, self.stopped, self.said = 0, "", []
        self.counters = {"updates": 0}

    def stop(self, reason: str) -> None:
        self.stopped = reason

    def say(self, text: str) -> None:
        self.said.append(text)


def watch(values: list[float], **rule: Any) -> tuple[int | None, str]:
    """Return after how many values a rule stops, and why; each value is ten steps later."""
    watcher, probe = StopWhen(StopRule(metric="collect/score", **rule)), Probe()
    for count, value in enumerate(values, start=1):
        probe.step = 10 * count
        watcher.on_log({"collect/score": value}, probe)  # type: ignore[arg-type]
        if probe.stopped:
            return count, probe.stopped
    return None, ""


def test_thresholds_count_values_in_a_row():
    assert watch([3, 5, 4, 5, 6], at_least=5, times=2) == (
        5,
        "collect/score is 6, at least 5, 2 times in a row",
    )
    assert watch([3, float("nan"), 0.5], at_most=1) == (3, "collect/score is 0.5, at most 1")
    assert watch([0, 10, 5], at_least=4, at_most=6)[0] == 3
    assert watch([9, 9, 9], at_least=5, after_env_steps=25)[0] == 3
    assert watch([1, 2], at_least=5) == (None, "")


def test_patience_counts_values_without_improvement():
    count, reason = watch([1, 3, 3, 2, 4], patience=2)
    assert count == 4
    assert reason == "collect/score has not improved 2 times in a row (best: 3 at step 20)"
    assert watch([3, 2, 1, 1, 1], patience=2, better="smaller")[0] == 5
    assert watch([float("nan")] * 3, patience=3)[1].endswith("(best: never a number)")


def test_a_rule_without_threshold_and_patience_is_off():
    assert StopRule.from_config(None) is None
    assert StopRule.from_config({"metric": "x", "times": 3}) is None
    with pytest.raises(ConfigError, match="Did you mean 'patience'"):
        StopRule.from_config({"patienc": 3})
    with pytest.raises(ConfigError, match=r"this run has none: set training\.evaluate"):
        StopWhen(StopRule(at_least=1.0), evaluates=False)


def test_the_state_of_a_rule_counts_only_for_the_same_rule():
    first, probe = StopWhen(StopRule(metric="a", at_least=2.0)), Probe()
    first.on_log({"a": 2.0}, probe)  # type: ignore[arg-type]
    same, other = StopWhen(first.rule), StopWhen(StopRule(metric="a", at_least=3.0))
    for watcher in (same, other):
        watcher.set_state(first.get_state())
    assert same.reason == first.reason and same.get_state() == first.get_state()
    assert other.reason == "" and other.best is None


def test_a_metric_that_is_never_logged_is_named():
    watcher, probe = StopWhen(StopRule(metric="train/los", patience=1)), Probe()
    for _ in range(5):
        watcher.on_log({"train/loss": 1.0}, probe)  # type: ignore[arg-type]
    assert len(probe.said) == 1 and "Did you mean 'train/loss'" in probe.said[0]


def test_callbacks_are_called_in_order_and_can_end_the_run():
    recorder, listener = Recorder(), Listener(stop_at=2)
    orchestrator = orchestrator_of(recorder, JOINT, Cadences(log=Every({"env_steps": 2})))
    orchestrator.callbacks = Callbacks({"mine": listener})
    orchestrator.run()
    assert listener.calls == ["begin 0", "log 2", "end 2"]
    assert orchestrator.ended == "mine: that is enough" and not orchestrator.interrupted
    assert recorder.lines[-1][ENDED_EARLY] == 1.0
    assert recorder.saved == [(2, None)]


def test_a_failing_callback_does_not_end_the_run():
    class Broken(rl_lab.Callback):
        def on_log(self, metrics: Any, run: Any) -> None:
            raise ValueError("no network")

        def get_state(self) -> dict[str, Any]:
            raise ValueError("no state")

    recorder = Recorder()
    orchestrator = orchestrator_of(recorder, JOINT, Cadences(log=Every({"env_steps": 2})))
    orchestrator.callbacks = Callbacks({"broken": Broken()})
    orchestrator.run()
    assert orchestrator.scheduler.totals["env_steps"] == 6
    assert orchestrator.side_jobs.counts["callback broken"] == len(recorder.lines) > 2
    assert orchestrator.side_jobs.counts["state of callback broken"] == 1

    class Late(rl_lab.Callback):
        def on_begin(self, run: Any) -> None:
            raise ValueError("no key")

    orchestrator = orchestrator_of(Recorder(), JOINT)
    orchestrator.callbacks = Callbacks({"late": Late()})
    with pytest.raises(ConfigError, match=r"callbacks\.late: on_begin failed"):
        orchestrator.run()


def test_mistakes_in_callbacks_are_named():
    class Typo:
        def on_evaluate(self, metrics: Any, run: Any) -> None: ...

    class Half:
        def on_log(self, metrics: Any, run: Any) -> None: ...
        def get_state(self) -> dict[str, Any]:
            return {}

    with pytest.raises(
        ConfigError, match=r"Typo\.on_evaluate would never be called\. Did you mean 'on_evaluation'"
    ):
        Callbacks({"typo": Typo()})
    with pytest.raises(ConfigError, match="object has none of the methods on_begin"):
        Callbacks({"nothing": object()})
    with pytest.raises(ConfigError, match="both get_state and set_state"):
        Callbacks({"half": Half()})
    with pytest.raises(ConfigError, match=r"pass an object, Listener\(\)"):
        named([Listener])
    assert list(named([Listener(), Listener()])) == ["Listener", "Listener_2"]


def test_a_run_with_callbacks_equals_one_without_and_continues_bit_for_bit(tmp_path: Path, monkeypatch):
    words = [*TINY, "training.stop_when.patience=50", "training.checkpoint.every_env_steps=40"]
    plain = rl_lab.train(None, [*TINY, f"run_dir={tmp_path / 'plain'}"], say=lambda text: None)
    weights = [rl_lab.load_agent(run).workflow for run in (plain.path,)]
    target = f"callbacks.mine={{_target_:{__name__}.Listener}}"
    whole = rl_lab.train(None, [*words, f"+{target}", f"run_dir={tmp_path / 'whole'}"], say=lambda text: None)
    with stopped_at(monkeypatch):
        rl_lab.train(None, [*words, f"+{target}", f"run_dir={tmp_path / 'half'}"], say=lambda text: None)
    resume(tmp_path / "half", say=lambda text: None)
    assert_same_run(tmp_path / "whole", tmp_path / "half")
    weights.append(rl_lab.load_agent(whole.path).workflow)
    first, second = (dict(workflow.context.components.state_dict()) for workflow in weights)
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_an_early_end_is_kept_until_the_rule_changes(tmp_path: Path):
    said: list[str] = []
    listener = Listener()
    words = [*TINY, *EARLY, f"run_dir={tmp_path / 'run'}"]
    run = rl_lab.train(None, words, callbacks=[listener], say=said.append)
    assert run.counters["env_steps"] == 20 and not run.interrupted
    assert run.ended is not None and run.ended.startswith("training.stop_when: eval/return_mean is ")
    assert "run training.stop_when=null continues" in run.summary()[1]
    assert "ended early at step 20" in repr(run)
    folder = RunFolder(run.path)
    before = folder.metrics.read_text()
    assert json.loads(before.splitlines()[-1])[ENDED_EARLY] == 1.0
    assert run_status(folder, total_steps=100).state == "finished"

    again = resume(run.path, say=said.append)  # nothing is done, and no line is added
    assert again.counters == run.counters and again.ended == run.ended
    assert folder.metrics.read_text() == before

    listener = Listener()
    more = resume(run.path, "training.stop_when=null", callbacks=[listener], say=said.append)
    assert more.counters["env_steps"] == 100 and more.ended is None
    assert listener.calls[0] == "begin 20" and listener.seen > 1  # its state was kept meanwhile
    assert run_status(folder, total_steps=100).state == "finished"


def test_a_callback_logs_and_sees_evaluations_and_checkpoints(tmp_path: Path):
    class Notes(rl_lab.Callback):
        def __init__(self) -> None:
            self.evaluations: list[float] = []
            self.saved: list[str] = []

        def on_evaluation(self, metrics: Any, run: Any) -> None:
            self.evaluations.append(metrics["eval/return_mean"])
            run.log({"mine/evaluations": len(self.evaluations)})
            run.image("mine/grey", torch.full((3, 4, 4), 128, dtype=torch.uint8))

        def on_save(self, path: Path, run: Any) -> None:
            assert path.is_file() and run.path == path.parents[1]
            self.saved.append(path.name)

    notes = Notes()
    run = rl_lab.train(None, [*TINY, f"run_dir={tmp_path / 'run'}"], callbacks=[notes], say=lambda text: None)
    assert len(notes.evaluations) == 2 and {"best.000000050.pt", "step_000000100.pt"} < set(notes.saved)
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert [line["mine/evaluations"] for line in lines if "mine/evaluations" in line] == [1.0, 2.0]
    assert len(list((run.path / "media" / "callbacks").glob("*.png"))) == 2


def test_callbacks_of_a_stranger_are_not_built(tmp_path: Path, monkeypatch):
    target = f"+callbacks.mine={{_target_:{__name__}.Listener}}"
    run = rl_lab.train(None, [*TINY, target, f"run_dir={tmp_path / 'run'}"], say=lambda text: None)
    monkeypatch.setenv("RL_LAB_KEY_FILE", str(tmp_path / "another.key"))
    assert rl_lab.load_agent(run.path).step == 100  # acting needs none
    with pytest.raises(ConfigError, match="set callbacks=null, or add --trust"):
        resume(run.path, "training.total_timesteps=120", say=lambda text: None)
    more = resume(run.path, "training.total_timesteps=120 callbacks=null", say=lambda text: None)
    assert more.counters["env_steps"] == 120


def test_a_run_without_finished_episodes_says_so_once():
    recorder = Recorder()
    orchestrator = orchestrator_of(recorder, JOINT, Cadences(log=Every({"env_steps": 2})))
    orchestrator.environment = SimpleNamespace(num_envs=2)  # type: ignore[assignment]
    orchestrator.scheduler.totals["env_steps"] = 1000
    orchestrator.write_log()
    orchestrator.write_log()
    told = [
        text
        for text in recorder.entries
        if text.startswith("no episode has ended after 500 steps of each of 2")
    ]
    assert len(told) == 1
