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
