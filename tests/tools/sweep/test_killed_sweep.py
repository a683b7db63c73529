"""What scripts/dev/killed_sweep.py finds in the trials of a search that was killed and continued."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "dev" / "killed_sweep.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("killed_sweep", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trial(number: int, **changes: Any) -> dict[str, Any]:
    evaluations = {"400": 20.0, "800": 30.0 + number}
    whole = {"number": number, "state": "complete", "value": 30.0 + number, "values": {"x": 0.5 * number}}
    return {**whole, "evaluations": evaluations, **changes}


def write_runs(folder: Path, count: int) -> None:
    for number in range(count):
        run = folder / "trials" / str(number)
        run.mkdir(parents=True)
        rows = [{"step": 400, "train/loss": 1.0}]
        rows += [{"step": int(s), "eval/return_mean": v} for s, v in trial(number)["evaluations"].items()]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_search_that_lost_nothing_has_no_problems(tmp_path: Path, script):
    write_runs(tmp_path, 3)
    running = trial(1, state="running", value=None, evaluations={"400": 20.0})
    trials = [trial(0), trial(1), trial(2, state="pruned")]
    assert script.problems(tmp_path, trials, [[trial(0), running]], 3) == []


def test_what_is_lost_or_double_is_named(tmp_path: Path, script):
    write_runs(tmp_path, 3)
    trials = [trial(0), trial(1), trial(2)]
    assert "trials [0, 1] instead of 0 to 2" in script.problems(tmp_path, trials[:2], [], 3)
    assert "run folders [0, 1, 2]" in script.problems(tmp_path, trials[:2], [], 3)
    open_ = trial(2, state="running")
    assert script.problems(tmp_path, [*trials[:2], open_], [], 3) == ["trial 2 is running"]
    before = [[trial(0, value=31.0), trial(1, values={"x": 0.7})]]
    found = script.problems(tmp_path, trials, before, 3)
    assert found == ["trial 0: its value changed after a kill", "trial 1: its values changed after a kill"]
    with (tmp_path / "trials" / "0" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 800, "eval/return_mean": 30.0}) + "\n")
    (only,) = script.problems(tmp_path, trials, [], 3)
    assert only.startswith("trial 0: evaluations {'400': 1, '800': 2} in its run")


def test_the_newest_checkpoint_and_the_calls_of_a_trial_are_read(tmp_path: Path, script):
    assert script.saved_step(tmp_path, 4) == 0
    folder = tmp_path / "trials" / "4" / "checkpoints"
    folder.mkdir(parents=True)
    for step in ("000000407", "000000807"):
        (folder / f"step_{step}.json").write_text("{}")
    assert script.saved_step(tmp_path, 4) == 807
    log = tmp_path / "4.txt"
    assert script.calls(log) == []
    log.write_text(
        "run folder: x\nresumed at step 407 from x/checkpoints\nstep 500\nresumed at step 807 from x\n"
    )
    assert script.calls(log) == ["resumed at step 407", "resumed at step 807"]
