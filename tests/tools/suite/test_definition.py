from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rl_lab.config.compose import compose_config
from rl_lab.errors import ConfigError
from rl_lab.tools.published import Task, published, published_curves
from rl_lab.tools.report.runs import flatten
from rl_lab.tools.suite.definition import load_suite, parse_suite, suite_names
from tests.tools.suite.suite_case import make_suite


@pytest.mark.parametrize("name", suite_names())
def test_shipped_suites_compose(name: str):
    """Every experiment and override exists, cadences divide the budget, and published agents have values."""
    suite = load_suite(name)
    assert suite.text and suite.runs()
    for method in suite.methods:
        words = [f"experiment={method.experiment}", *method.overrides, f"environment.task={method.tasks[0]}"]
        config = compose_config(words)
        for counts in (method.evaluate, method.checkpoint):
            every = counts.get("every_frames")
            repeat = int(config.environment.action_repeat)
            assert every is None or (every % repeat == 0 and method.frames and method.frames % every == 0)
        flat = flatten({"environment": OmegaConf.to_container(config.environment)})
        for task_name in method.tasks:
            task = Task.from_config({**flat, "environment.task": task_name})
            agents = {row.agent for row in published(task, method.score.metric)}
            agents |= {row.agent for row in published_curves(task)}
            assert set(method.published) <= agents, task


def test_runs_are_ordered_by_task_and_named():
    suite = make_suite(["gym/CartPole-v1", "b"], [3, 1])
    assert [run.name for run in suite.runs()] == [
        "m.gym_CartPole-v1.seed3",
        "m.gym_CartPole-v1.seed1",
        "m.b.seed3",
        "m.b.seed1",
    ]
    assert [run.name for run in suite.select(tasks=["b"], seeds=[1])] == ["m.b.seed1"]
    with pytest.raises(ConfigError, match=r"^--tasks c: suite small has none.*Did you mean|Known: b"):
        suite.select(tasks=["c"])


def test_a_task_may_have_its_own_budget():
    suite = make_suite(["a", "b"], [1], frames={"default": 1000, "b": 400})
    assert [run.frames for run in suite.runs()] == [1000, 400]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"taks": ["a"]}, "suite x: methods.m has an unknown key 'taks'.*Did you mean 'tasks'"),
        ({"seeds": []}, "suite x: methods.m.seeds is missing"),
        ({"frames": 1.5}, "suite x: methods.m.frames must be an integer"),
        ({"frames": {"default": 5, "c": 5}}, "suite x: methods.m.frames: task is 'c'"),
        ({"score": {"from": "best"}}, "suite x: methods.m.score.from is 'best'"),
        ({"score": {"from": "train"}}, "suite x: methods.m.score.window must be an integer"),
        ({"score": {"from": "final"}}, "suite x: methods.m.score.from is final: add final"),
        ({"score": {"from": "eval", "metric": 3}}, "suite x: methods.m.score.metric must be the name"),
        (
            {"score": {"from": "eval", "last": 0}},
            "suite x: methods.m.score.last must be an integer of at least 1",
        ),
        (
            {"score": {"from": "train", "window": 5, "last": 2}},
            "suite x: methods.m.score.last counts evaluations",
        ),
        ({"each": {"cores": 0}}, "suite x: methods.m.each.cores must be a number above 0"),
        ({"evaluate": {"every": 5}}, "suite x: methods.m.evaluate has an unknown key 'every'"),
    ],
)
def test_wrong_suites_are_refused(change: dict, says: str):
    method = {"experiment": "random_cartpole", "tasks": ["a"], "seeds": [1], "frames": 10, **change}
    with pytest.raises(ConfigError, match=says):
        parse_suite("x", {"methods": {"m": method}})


def test_own_suite_file_and_unknown_name(tmp_path: Path):
    file = tmp_path / "own.yaml"
    file.write_text("methods: {m: {experiment: random_cartpole, tasks: [a], seeds: [1]}}")
    assert load_suite(str(file), ["debug=tiny"]).methods[0].overrides == ("debug=tiny",)
    with pytest.raises(ConfigError, match=r"^suite atari does not exist.*Did you mean 'atari100k'"):
        load_suite("atari")
    file.write_text("methods: [")
    with pytest.raises(ConfigError, match=r"own.yaml cannot be read as YAML"):
        load_suite(str(file))
