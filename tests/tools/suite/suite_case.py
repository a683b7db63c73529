"""A small suite, its results folder, and a runner whose runs are stand-ins."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rl_lab.tools.suite.definition import Suite, parse_suite
from rl_lab.tools.suite.results import SuiteFolder
from rl_lab.tools.suite.runner import Machine, SuiteRunner

STUB = (sys.executable, "-S", str(Path(__file__).with_name("stub_run.py")))


def make_suite(tasks: list[str], seeds: list[int] | None = None, **method: Any) -> Suite:
    content = {
        "experiment": "random_cartpole",
        "tasks": tasks,
        "seeds": seeds or [1, 2],
        "frames": 1000,
        "each": {"per_gpu": 4, "host_gib": 0.01},
        **method,
    }
    return parse_suite("small", {"text": "a small suite", "methods": {"m": content}})


def make_runner(suite: Suite, folder: Path, **options: Any) -> tuple[SuiteRunner, list[str]]:
    lines: list[str] = []
    options = {"command": STUB, "machine": Machine(cores=4), "every": 1e9, **options}
    runner = SuiteRunner(suite, suite.runs(), SuiteFolder(folder), say=lines.append, **options)
    return runner, lines
