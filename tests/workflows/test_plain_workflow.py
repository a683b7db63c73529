"""A plain workflow, as in the architecture document: it evaluates, plays and loads, or says why it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rl_lab
from rl_lab.cli import main
from rl_lab.errors import ConfigError, LabError
from rl_lab.records import CollectResult
from rl_lab.tools.evaluate import evaluate
from rl_lab.workflows.base import WorldModelWorkflow

EXPERIMENT = """
# @package _global_
defaults:
  - /buffer: world_model_sequence
  - /environment: cartpole
  - _self_
workflow: {_target_: tests.workflows.test_plain_workflow.NAME}
experiment: {name: plain}
components:
  encoder: {_target_: rl_lab.components.nn.mlp.MLP, inputs: 4, outputs: 2, units: 8, layers: 1}
optimizers:
  world_model: {_target_: torch.optim.Adam, _partial_: true, lr: 1.0e-3}
training:
  phases:
    - {name: training, workflow_hooks: [collect, update_world_model HOOK]}
"""
QUIET = ["logging.progress=off", "logging.tensorboard=false", "debug=tiny"]


class StepsOnly(WorldModelWorkflow):
    """The document's example: collect_step steps the environments itself."""

    def initialize(self, context: Any) -> None:
        self.environment = context.train_environment
        self.num_envs = int(getattr(self.environment, "num_envs", 1))
        self.encoder = context.components.encoder
        self.optimizer = context.optimizers.get("world_model")
        self._reset_episode_tracking(self.num_envs, clear_history=True)
        self._reset_rollout_state(initial_obs=context.initial_observation)

    def choose(self, obs: dict[str, np.ndarray]) -> np.ndarray:
        return self.encoder(torch.as_tensor(obs["vector"])).argmax(-1).numpy()

    def collect_step(self, step: int, *, phase: Any) -> CollectResult:
        action = self.choose(self.current_obs)
        obs, reward, terminated, truncated, info = self.environment.step(action)
        done = terminated | truncated
        self._update_episode_stats(reward, done, info)
        rows = {"observations": self.current_obs, "actions": action, "rewards": reward, "dones": done}
        self.current_obs = obs
        return CollectResult(steps=self.num_envs, trajectory=rows)

    def update_world_model(self, batch: Any, *, phase: Any) -> dict[str, float]:
        loss = self.encoder(batch["observations"]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item()}


class SelectsAction(StepsOnly):
    """The same with the document's name of the method that chooses actions."""

    def select_action(self, obs: dict[str, np.ndarray]) -> np.ndarray:
        assert obs["vector"].dtype == np.float32
        return self.choose(obs)


@pytest.fixture
def project(tmp_path: Path, monkeypatch) -> Path:
    folder = tmp_path / "configs" / "experiment"
    folder.mkdir(parents=True)
    for name in ("StepsOnly", "SelectsAction"):
        text = EXPERIMENT.replace("NAME", name)
        (folder / f"{name}.yaml").write_text(text.replace(" HOOK", ""))
        (folder / f"{name}_evaluates.yaml").write_text(
            text.replace(" HOOK", ", {evaluate: {every_cycles: 40}}")
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    return tmp_path


def train(name: str, *words: str) -> tuple[rl_lab.training.RunResult, list[str]]:
    said: list[str] = []
    return rl_lab.train(name, [*QUIET, "run_dir=run", *words], say=said.append), said


def test_select_action_evaluates_plays_and_loads(project: Path, capsys):
    run, _ = train("SelectsAction_evaluates")
    assert run.counters["updates"] > 10 and run.eval_return_mean is not None
    result = evaluate("run", episodes=3, video=False)
    agent = rl_lab.load_agent("run", device="cpu")
    assert result["return_mean"] > 0 and agent.step == run.counters["env_steps"]
    assert agent.act(np.zeros(4, np.float32)) in (0, 1)
    assert not agent.workflow.act_captures  # host code
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    agent.act(np.zeros(4, np.float32))
    assert torch.equal(torch.rand(1), expected)  # acting does not change the randomness of training
    assert main(["play", "run", "--steps", "3"]) == 0
    assert list(project.glob("run/media/recordings/*.npz")) and "error" not in capsys.readouterr().err


def test_without_a_policy_it_trains_and_says_what_it_cannot_do(project: Path, capsys):
    """debug=tiny switches evaluation on."""
    run, _ = train("StepsOnly")
    assert run.counters["updates"] > 10 and run.eval_return_mean is None
    sentence = (
        "StepsOnly has no act(obs, policy_state, is_first, mode) and no select_action(obs), so it cannot be"
    )
    assert f"training.evaluate is ignored: {sentence}" in capsys.readouterr().out
    for verb in ("eval", "play"):
        assert main([verb, "run"]) == 1
        shown = capsys.readouterr().err.splitlines()
        assert len(shown) == 1 and sentence in shown[0] and shown[0].startswith("error: /")
    with pytest.raises(LabError, match="implement one of them"):
        rl_lab.load_agent("run")


def test_evaluate_hook_needs_a_policy(project: Path):
    with pytest.raises(
        ConfigError, match=r"^phase 'training' has the hook evaluate, but StepsOnly has no act"
    ):
        train("StepsOnly_evaluates")
