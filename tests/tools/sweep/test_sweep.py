"""Sweeps with Optuna: values, pruning, failures, and a sweep that is killed. Runs are stand-in programs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_lab.errors import LabError
from rl_lab.tools.sweep.definition import Definition, definition_from
from rl_lab.tools.sweep.page import write_sweep_page
from rl_lab.tools.sweep.runner import SweepRunner
from rl_lab.tools.sweep.study import SweepFolder, Trials

pytestmark = [pytest.mark.extras, pytest.mark.timeout(300)]

# A run of 100 steps with 5 evaluations; its return depends on `x` and `kind`. It saves its step and stops on SIGTERM.
RUN = """
import json, os, re, signal, sys, time
from pathlib import Path

order = json.load(open(sys.argv[1]))
words = dict(word.lstrip("+").split("=", 1) for word in order["overrides"])
folder = Path(words["run_dir"].strip("'"))
folder.mkdir(parents=True, exist_ok=True)
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
if words.get("broken") == words["kind"]:
    print("error: kind=b cannot be built")
    sys.exit(1)
file = folder / "metrics.jsonl"
done = len(file.read_text().splitlines()) if file.exists() else 0
for number in range(done, 5):
    value = (10 - (float(words["x"]) - 3) ** 2) * (number + 1) / 5 + (5 if words["kind"] == "a" else 0)
    with file.open("a") as out:
        out.write(json.dumps({"step": 20 * (number + 1), "eval/return_mean": value}) + "\\n")
    wait = time.monotonic() + float(words.get("pause", 0))
    while time.monotonic() < wait and not stopped:
        time.sleep(0.01)
    if stopped:
        print("stopped after", number)
        sys.exit(75)
"""
SEARCH = {"x": {"low": 0.0, "high": 10.0}, "kind": ["a", "b"]}


def definition(**changes) -> Definition:
    return definition_from({"search": SEARCH, "trials": 12, "startup": 4, "pruner": "none", **changes})


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    (tmp_path / "run.py").write_text(RUN)
    return [sys.executable, "-S", str(tmp_path / "run.py")]


def runner(folder: Path, program: list[str], **changes) -> SweepRunner:
    at_once = changes.pop("at_once", 1)
    said: list[str] = []
    sweep = SweepFolder(folder)
    found = definition(**changes)
    sweep.save(found)
    made = SweepRunner(sweep, found, budget=100, at_once=at_once, command=program, say=said.append)
    made.said = said
    return made


def records(trials: Trials) -> list[tuple]:
    return [(t.number, t.state.name, t.params, t.value) for t in trials.all()]


def test_a_sweep_finds_the_better_half_and_writes_its_page(tmp_path: Path, program):
    made = runner(tmp_path / "s", program)
    summary = made.run()
    assert (summary.complete, summary.pruned, summary.failed) == (12, 0, {})
    best = made.trials.best
    assert best.params["kind"] == "a" and abs(best.params["x"] - 3) < 2
    assert best.value == pytest.approx(15 - (best.params["x"] - 3) ** 2)
    shares = made.trials.importances()
    assert set(shares) == {"x", "kind"} and sum(shares.values()) == pytest.approx(1.0)
    page = write_sweep_page(made.folder, made.trials).read_text()
    assert page.count('<img class="plot"') == 4 and f"trial {best.number}" in page and "PED-ANOVA" in page
    assert page.index(f">The best: trial {best.number}<") < page.index(">Trials in order<")
    assert "rl-lab train" in page and f"x={best.params['x']!r}" in page
    again = runner(tmp_path / "s", program)
    assert again.run().complete == 0  # nothing is left to do


def test_more_trials_continue_the_study_and_seeds_repeat_it(tmp_path: Path, program):
    whole = runner(tmp_path / "a", program, trials=6)
    whole.run()
    runner(tmp_path / "b", program, trials=3).run()
    parts = runner(tmp_path / "b", program, trials=6)
    parts.run()
    assert records(whole.trials) == records(parts.trials)
    other = runner(tmp_path / "c", program, trials=3, seed=1)
    other.run()
    assert records(other.trials)[0][2] != records(whole.trials)[0][2]


@pytest.mark.parametrize("saves", [True, False], ids=["saves", "dies by the signal"])
def test_bad_trials_are_pruned_and_save(tmp_path: Path, program, monkeypatch, saves: bool):
    """While Python starts or ends, a run has no handler of signals: it is pruned, not failed."""
    from rl_lab.tools.sweep import runner as module

    if not saves:
        (tmp_path / "run.py").write_text(RUN.replace("signal.signal(", "(lambda *_: None)("))
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.05)
    made = runner(tmp_path / "s", program, pruner="median", overrides=["pause=0.25"], trials=9)
    summary = made.run()
    assert summary.pruned >= 1 and summary.complete >= 2 and summary.complete + summary.pruned == 9
    for trial in made.trials.in_state("PRUNED"):
        assert max(trial.intermediate_values) < 100  # ended early
        assert ("stopped after" in made.folder.log(trial.number).read_text()) == saves
        assert trial.value == trial.intermediate_values[max(trial.intermediate_values)]
    values = [trial.value for trial in made.trials.in_state("COMPLETE")]
    assert made.trials.best.value == max(values)


def test_the_best_or_the_last_evaluation_counts(tmp_path: Path, program):
    trials = {}
    for value, direction in (("last", "maximize"), ("best", "minimize")):
        made = runner(tmp_path / value, program, trials=1, value=value, direction=direction)
        made.run()
        (trials[value],) = made.trials.all()
    assert trials["last"].value == trials["last"].intermediate_values[100]
    assert trials["best"].value == min(trials["best"].intermediate_values.values())


def test_failed_runs_are_named_and_three_at_the_start_end_the_sweep(tmp_path: Path, program):
    made = runner(tmp_path / "s", program, overrides=["broken=b"], trials=8)
    summary = made.run()
    assert summary.failed and set(summary.failed.values()) == {"kind=b cannot be built"}
    assert summary.complete + len(summary.failed) == 8
    assert {trial.params["kind"] for trial in made.trials.in_state("COMPLETE")} == {"a"}
    broken = runner(tmp_path / "t", [sys.executable, "-c", "import sys; sys.exit(3)"])
    with pytest.raises(LabError, match="the first 3 trials failed: the process ended with status 3"):
        broken.run()


def test_a_run_without_the_metric_fails(tmp_path: Path, program):
    made = runner(tmp_path / "s", program, trials=2, metric="eval/score")
    assert made.run().failed[0] == "its run has logged no eval/score"


KILLED = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from tests.tools.sweep.test_sweep import runner
made = runner(Path({folder!r}), {program!r}, overrides=["pause=0.2"], at_once=2)
made.say = lambda text: print(text, flush=True)
made.run()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_sweep_that_is_ended_continues_the_trials_that_were_running(tmp_path: Path, program, number):
    folder = tmp_path / "s"
    text = KILLED.format(path=[os.getcwd(), *sys.path], folder=str(folder), program=program)
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "trial 4 of" in line:
            break
    time.sleep(0.3)
    process.send_signal(number)
    process.communicate(timeout=60)
    found = Trials(SweepFolder(folder), definition(overrides=["pause=0.2"]))
    open_ = [trial.number for trial in found.in_state("RUNNING")]
    assert open_ and len(found.all()) < 12
    before = {
        n: len((SweepFolder(folder).run_dir(n) / "metrics.jsonl").read_text().splitlines()) for n in open_
    }
    made = runner(folder, program, overrides=["pause=0.2"], at_once=2)
    summary = made.run()
    assert f"trials that were running are continued: {', '.join(map(str, open_))}" in made.said
    assert len(made.trials.in_state("COMPLETE")) == 12 and not summary.failed
    assert any(count > 0 for count in before.values())
    for trial in made.trials.all():  # each evaluation once, also of the continued ones
        rows = [
            json.loads(line)
            for line in (made.folder.run_dir(trial.number) / "metrics.jsonl").read_text().splitlines()
        ]
        assert sorted(trial.intermediate_values) == sorted({row["step"] for row in rows})
        assert trial.value == rows[-1]["eval/return_mean"]
