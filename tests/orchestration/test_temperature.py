"""The temperature of sampled actions, from the config to `ActMode`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from rl_lab import train
from rl_lab.build import assemble_workflow
from rl_lab.config.compose import compose_config, resolve_config
from rl_lab.environments.make import make_env
from rl_lab.errors import ConfigError
from rl_lab.orchestration.evaluator import Evaluator
from rl_lab.records import ActionSpec, ActMode, ArraySpec, Spec

IMAGES = {"image": ArraySpec((3, 16, 16), "uint8")}
SPEC = Spec("images", IMAGES, ActionSpec("discrete", (), (3,)))
VECTORS = Spec("vectors", {"vector": ArraySpec((4,), "float32")}, SPEC.action)
WORDS = ["debug=tiny", "experiment.device=cpu", "training.precision=float32"]


def workflow_of(experiment: str, *words: str) -> Any:
    spec = VECTORS if "cartpole" in experiment else SPEC
    config = resolve_config(compose_config([f"experiment={experiment}", *WORDS, *words]), spec)
    return assemble_workflow(config, spec, torch.device("cpu"))


class Recording:
    """A collector or policy that keeps the modes it was called with."""

    def __init__(self) -> None:
        self.modes: list[ActMode] = []

    def step(self, policy: Any, mode: ActMode) -> None:
        self.modes.append(mode)

    def act(self, obs: Any, state: Any, is_first: Any, mode: ActMode) -> Any:
        self.modes.append(mode)
        return torch.zeros(len(is_first), dtype=torch.int64), state, {}

    def initial_policy_state(self, num_envs: int) -> dict[str, torch.Tensor]:
        return {}


@pytest.mark.parametrize("experiment", ["dreamer_cartpole", "delta_iris_catch"])
def test_collection(experiment: str):
    """The phase's own temperature, else the config's, else 1."""
    epsilon = 0.01 if "iris" in experiment else 0.0
    for words, collect, expected in (
        ([], {}, ActMode(epsilon=epsilon)),
        (["training.collect.temperature=0.5"], {}, ActMode(temperature=0.5, epsilon=epsilon)),
        (
            ["training.collect.temperature=0.5"],
            {"temperature": 2.0},
            ActMode(temperature=2.0, epsilon=epsilon),
        ),
        ([], {"policy": "random"}, ActMode(epsilon=1.0)),
    ):
        workflow = workflow_of(experiment, *words)
        workflow.collector = Recording()
        workflow.collect_step(0, phase={"collect": collect})
        assert workflow.collector.modes == [expected]


def test_saved_runs_collect_at_temperature_1():
    workflow = workflow_of("dreamer_cartpole")
    config = OmegaConf.to_container(workflow.context.config)
    del config["training"]["collect"]
    workflow.context = replace(workflow.context, config=OmegaConf.create(config))
    assert workflow.collect_mode({"collect": {}}).temperature == 1.0


def test_evaluation():
    def make(seed: int, render: bool) -> Any:
        return make_env("dummy/discrete", num_envs=2, workers=0, seed=seed, render=render, copy=False)

    for options, expected in (
        ({}, (False, 1.0)),
        ({"sample": True}, (True, 1.0)),
        ({"sample": True, "temperature": 0.5}, (True, 0.5)),
    ):
        policy = Recording()
        Evaluator(make, device="cpu", seed=0).run(policy, episodes=2, **options)
        assert {(mode.sample, mode.temperature) for mode in policy.modes} == {expected}


@pytest.mark.parametrize("experiment", ["dreamer_cartpole", "delta_iris_catch"])
def test_low_temperature_takes_likely_actions(experiment: str):
    workflow = workflow_of(experiment)
    spec = VECTORS if "cartpole" in experiment else SPEC
    shape = next(iter(spec.observations.values())).shape
    name = next(iter(spec.observations))
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(64, *shape, generator=generator)
    obs = {name: (values * 255).to(torch.uint8) if name == "image" else values}
    is_first = torch.ones(64, dtype=torch.bool)

    def actions(sample: bool, temperature: float) -> torch.Tensor:
        mode = ActMode(sample, temperature, generator=torch.Generator().manual_seed(1))
        return workflow.act(obs, workflow.initial_policy_state(64), is_first, mode)[0]

    likely = actions(False, 1.0)
    agreeing = [int((actions(True, t) == likely).sum()) for t in (1.0, 1e-4)]
    assert agreeing[0] < 55 and agreeing[1] >= 62  # of 64; Dreamer mixes in 1 % of uniform actions


@pytest.mark.parametrize(
    ("experiment", "words", "message"),
    [
        ("tdmpc2_cartpole", ["training.collect.temperature=0.5"], "TDMPCWorkflow has no policy that samples"),
        (
            "dreamer_mpc_cartpole",
            ["training.collect.temperature=0.5"],
            "training.collect.temperature must be 1",
        ),
        (
            "tdmpc2_cartpole",
            ["training.evaluate.temperature=2", "training.evaluate.sample=true"],
            "training.evaluate.temperature must be 1, not 2.0",
        ),
        (
            "tdmpc2_cartpole",
            ["training.phases=[{name: a, workflow_hooks: [{collect: {temperature: 0.5}}]}]"],
            "phase 'a': collect.temperature must be 1",
        ),
        (
            "dreamer_cartpole",
            ["training.evaluate.temperature=0.5", "training.evaluate.sample=false"],
            "set training.evaluate.sample=true",
        ),
        (
            "dreamer_cartpole",
            ["training.evaluate.temperature=0"],
            "training.evaluate.temperature must be a number above 0, not 0",
        ),
        (
            "dreamer_cartpole",
            ["training.collect.temperature=-1"],
            "training.collect.temperature must be a number above 0, not -1",
        ),
        ("dreamer_cartpole", ["+training.collect.warmth=2"], "training.collect has an unknown key 'warmth'"),
    ],
)
def test_refused_configs(experiment: str, words: list[str], message: str, tmp_path: Path):
    with pytest.raises(ConfigError) as error:
        train(experiment, [*WORDS, *words, f"run_dir={tmp_path / 'run'}", "logging.progress=off"])
    assert message in str(error.value)
