"""A run folder whose bytes, links and types were changed at random: one sentence or success, and nothing else happens.

`rl-lab bench mutations --count 1000` runs a thousand trials (docs/results); RL_LAB_MUTATIONS sets how many run here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rl_lab.tools.bench import load_benchmark

COUNT = int(os.environ.get("RL_LAB_MUTATIONS", "24"))


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Any:
    module = load_benchmark("mutations")
    # Reports take seconds: the thousand trials have them.
    module.WEIGHTS = tuple(
        0 if name in ("report", "dream") else weight for name, weight in zip(module.COMMANDS, module.WEIGHTS)
    )
    return module.Trials(tmp_path_factory.mktemp("mutations"))


def test_mutated_run_folders_do_no_harm(trials: Any, tmp_path: Path) -> None:
    results = [trials.run(number) for number in range(COUNT)]
    assert [result for result in results if result["problems"]] == []
    assert len({result["outcome"] for result in results}) > 1 or COUNT < 10


def test_every_file_is_changed_in_every_way(trials: Any) -> None:
    """`rl-lab bench mutations --each` has one trial for each; four of them are tried here."""
    targets = trials.targets()
    for name in ("replay", "episodes"):
        files = {str(path.relative_to(trials.place / name)) for path in (trials.place / name).rglob("*")}
        assert {path for run, path, _ in targets if run == name} == files
        assert {"config.yaml", "metrics.jsonl", ".lock", "code.txt", "config/spec.json"} <= files
    kinds = {kind for run, path, kind in targets if (run, path) == ("replay", "config/spec.json")}
    assert kinds == {"bytes", "links", "types"} and len(targets) > 150
    results = [trials.run(number, targets[number]) for number in range(0, len(targets), len(targets) // 3)]
    assert [result for result in results if result["problems"]] == []
