"""The example workflow of the document that first described RL Lab, as it stands there but for its imports.

Only what the document leaves to the reader is added: `select_action`, `compute_loss`, an encoder and a controller.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import rl_lab
from rl_lab.environments.vector import FourValueEnv
from rl_lab.orchestration.collector import Collector
from rl_lab.records import CollectResult
from rl_lab.training import resume
from rl_lab.workflows.base import WorldModelWorkflow
from tests.same_run import assert_same_run, stopped_at

# The document's text. Its `from .utils.base` and `from .utils.context` are the two first imports.
WORKFLOW = '''
from rl_lab.workflows.base import WorldModelWorkflow, CollectResult, Batch, PhaseConfig
from rl_lab.workflows.context import WorkflowContext

class YourWorkflow(WorldModelWorkflow):
    def __init__(self):
        super().__init__()

    def initialize(self, context: WorkflowContext) -> None:
        """Bind components and setup state."""
        self._bind_context(context)
        self._reset_episode_tracking(self.num_envs, clear_history=True)
        self._reset_rollout_state(
            initial_obs=context.initial_observation,
            initial_dones=context.initial_dones,
        )

    def _bind_context(self, context: WorkflowContext) -> None:
        """Extract what you need from context. Use your own variable names."""
        self.config = context.config
        self.device = context.device
        self.environment = context.train_environment
        self.num_envs = int(getattr(self.environment, "num_envs", 1))

        # Get components - use whatever names make sense for your algorithm
        components = context.components
        self.encoder = getattr(components, "encoder", None)
        self.dynamics = getattr(components, "dynamics_model", None)

        # Get optimizers
        self.optimizer = context.optimizers.get("world_model")

    def collect_step(self, step: int, *, phase: PhaseConfig) -> CollectResult:
        """One step of environment interaction."""
        with torch.no_grad():
            # Your collection logic
            action = self.select_action(self.current_obs)
            next_obs, reward, done, info = self.environment.step(action)

            # Track episode stats (provided by base class)
            self._update_episode_stats(reward, done, info)

            # Build trajectory
            trajectory = {
                "observations": self.current_obs,
                "actions": action,
                "rewards": reward,
                "dones": done,
            }

            self.current_obs = next_obs

        return CollectResult(
            steps=self.num_envs,
            trajectory=trajectory,
            metrics={"collect/reward": float(reward.mean())},
        )

    def update_world_model(self, batch: Batch, *, phase: PhaseConfig) -> Dict[str, float]:
        """One gradient step on world model."""
        # Your loss computation
        loss = self.compute_loss(batch)

        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

        return {"loss": loss.item()}
'''

YOURS = '''
class Encoder(torch.nn.Linear):
    def __init__(self, input_dim: int, latent_dim: int) -> None:
        super().__init__(input_dim, latent_dim)


class Controller:
    pass


def select_action(self, obs):
    """Push the cart to the side that the pole leans to, sometimes to the other."""
    leans = torch.as_tensor(obs["vector"])[:, 2] > 0
    return (leans ^ (torch.rand(len(leans)) < 0.1)).long().numpy()


def compute_loss(self, batch):
    change = self.encoder(batch["next_observations"]) - self.encoder(batch["observations"])
    return (change.mean(-1) - batch["rewards"]).square().mean()


YourWorkflow.select_action = select_action
YourWorkflow.compute_loss = compute_loss
'''

EXPERIMENT = """
# @package _global_
defaults:
  - /workflow: your_algorithm
  - /components/representation_learner@components.encoder: your_encoder
  - /controller@controllers.actor: your_controller
  - /buffer: world_model_sequence
  - /environment: cartpole
  - _self_

experiment:
  name: your_algorithm_cartpole
  seed: 42
  device: auto

_dims:
  observation: 4
  action: 2
  latent: 64

algorithm:
  learning_rate: 1e-4
  # Your hyperparameters

components:
  encoder:
    input_dim: ${_dims.observation}
    latent_dim: ${_dims.latent}

optimizers:
  world_model:
    _target_: torch.optim.Adam
    _partial_: true  # Creates partial, params added by train.py
    lr: 1e-4

training:
  total_timesteps: 100000
  phases:
    - name: training
      type: online
      buffer: replay
      duration_steps: 100000
      workflow_hooks:
        - collect
        - update_world_model
"""
FILES = {
    "your_algorithm.py": f"from typing import Dict\n\nimport torch\n{WORKFLOW}\n{YOURS}",
    "configs/workflow/your_algorithm.yaml": "_target_: your_algorithm.YourWorkflow\n",
    "configs/components/representation_learner/your_encoder.yaml": "_target_: your_algorithm.Encoder\n",
    "configs/controller/your_controller.yaml": "_target_: your_algorithm.Controller\n",
    "configs/experiment/your_algorithm_env.yaml": EXPERIMENT.lstrip(),
}
WORDS = [
    "logging.progress=off",
    "logging.tensorboard=false",
    "experiment.device=cpu",
    "environment.num_envs=4",
    "environment.workers=0",
    "environment.eval.num_envs=2",
    "training.total_timesteps=1200",
    "training.evaluate.every_env_steps=600",
    "training.evaluate.episodes=6",
]


@pytest.fixture
def project(tmp_path: Path, monkeypatch) -> Path:
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "your_algorithm", raising=False)
    return tmp_path


def test_the_example_trains_evaluates_and_resumes(project: Path, monkeypatch):
    run = rl_lab.train("your_algorithm_env", WORDS)
    assert run.counters["env_steps"] == 1200
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    logged = {key for line in lines for key in line}
    assert {"collect/reward", "collect/return_mean", "train/loss", "eval/return_mean"} <= logged
    assert run.eval_return_mean is not None and run.eval_return_mean > 26  # a random policy gets 22
    with stopped_at(monkeypatch, 700):
        half = rl_lab.train("your_algorithm_env", WORDS)
    assert half.interrupted
    resume(half.path)
    assert_same_run(run.path, half.path)
    agent = rl_lab.load_agent(run.path)
    assert agent.act(np.array([0.0, 0.0, 0.1, 0.0], np.float32)) in (0, 1)


class Both(WorldModelWorkflow):
    """Its own `collect_step` calls super(), with episode statistics that it never updates."""

    def initialize(self, context):
        self._reset_episode_tracking(4)
        self.steps: list[tuple[int, str]] = []

    def act(self, obs, policy_state, is_first, mode):
        return (obs["vector"][:, 2] > 0).long(), policy_state, {}

    def collect_step(self, step, *, phase):
        self.steps.append((step, phase["name"]))
        result = super().collect_step(step, phase=phase)
        return CollectResult(result.steps, result.episodes, {"seen": 1.0}, result.trajectory)


def test_collect_step_with_super_is_called_with_the_step_and_the_phase(project: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "both_project", sys.modules[__name__])
    Path("configs/workflow/both.yaml").write_text("_target_: both_project.Both\n")
    text = (
        EXPERIMENT.lstrip()
        .replace("your_algorithm\n", "both\n")
        .replace("        - update_world_model\n", "")
    )
    Path("configs/experiment/both.yaml").write_text(text)
    built = []
    initialize = Both.initialize
    monkeypatch.setattr(Both, "initialize", lambda self, c: (built.append(self), initialize(self, c))[1])
    run = rl_lab.train("both", [*WORDS, "training.evaluate.every_env_steps=null"])
    workflow = built[0]
    assert isinstance(workflow.collector, Collector)
    # The first call only resets: it returns rows and no steps.
    assert workflow.steps[:3] == [(0, "training"), (0, "training"), (4, "training")]
    assert run.counters["episodes"] > 10 and run.return_mean is not None and run.return_mean > 20


class FiveValues(WorldModelWorkflow):
    def initialize(self, context):
        self.environment = context.train_environment

    def collect_step(self, step, *, phase):
        _obs, _reward, _terminated, _truncated, _info = self.environment.step(np.zeros(4, np.int64))
        return CollectResult(steps=4)


class FourValues(FiveValues):
    def collect_step(self, step, *, phase):
        _obs, _reward, done, info = self.environment.step(np.zeros(4, np.int64))
        assert np.array_equal(done, info["terminated"] | info["truncated"])
        return CollectResult(steps=4)


@pytest.mark.parametrize("cls", [FiveValues, FourValues])
def test_environment_returns_as_many_values_as_the_workflow_unpacks(project: Path, monkeypatch, cls):
    monkeypatch.setitem(sys.modules, "values_project", sys.modules[__name__])
    Path("configs/workflow/values.yaml").write_text(f"_target_: values_project.{cls.__name__}\n")
    text = (
        EXPERIMENT.lstrip()
        .replace("your_algorithm\n", "values\n")
        .replace("        - update_world_model\n", "")
    )
    Path("configs/experiment/values.yaml").write_text(text)
    built = []
    initialize = FiveValues.initialize
    monkeypatch.setattr(
        FiveValues, "initialize", lambda self, c: (built.append(self), initialize(self, c))[1]
    )
    rl_lab.train("values", [*WORDS[:6], "training.total_timesteps=40"])
    assert isinstance(built[0].environment, FourValueEnv) == (cls is FourValues)
