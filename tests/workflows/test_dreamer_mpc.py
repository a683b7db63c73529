"""Dreamer that acts by planning in its RSSM."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

import rl_lab
from rl_lab.build import assemble_workflow
from rl_lab.components.controllers.mpc_planner import discount_weights, trajectory_values
from rl_lab.config.checks import CONFIG_FOLDER
from rl_lab.records import ActMode
from tests.workflows.dreamer_case import CONTINUOUS, DISCRETE, MULTI, dreamer_config, make_batch, vector_spec

WORKFLOW = OmegaConf.load(CONFIG_FOLDER / "workflow/dreamer_mpc.yaml")
PLANNER = {
    "_target_": "rl_lab.components.controllers.mpc_planner.MPCPlanner",
    "horizon": 3,
    "iterations": 2,
    "samples": 12,
    "policy_samples": 4,
    "elites": 4,
}


def make_workflow(action=DISCRETE):
    spec = vector_spec(action)
    config = dreamer_config(controllers__planner=PLANNER, workflow=WORKFLOW)
    return assemble_workflow(config, spec, torch.device("cpu"))


@pytest.mark.parametrize("action", [DISCRETE, MULTI, CONTINUOUS], ids=lambda a: a.kind)
def test_acts_by_planning(action):
    workflow = make_workflow(action)
    state = workflow.initial_policy_state(3)
    obs, first = {"vector": torch.randn(3, 4)}, torch.ones(3, dtype=torch.bool)
    results = []
    for _ in range(2):
        mode = ActMode(generator=torch.Generator().manual_seed(0))
        results.append(workflow.act(obs, state, first, mode))
    chosen, after, extras = results[0]
    assert chosen.shape == (3, *action.shape) and torch.equal(chosen, results[1][0])
    assert {key: value.shape for key, value in after.items()} == {
        key: value.shape for key, value in state.items()
    }
    assert torch.equal(after["action"], chosen)  # the state must contain the executed action
    assert not torch.equal(after["plan"], state["plan"])
    assert set(extras) == {"deter", "stoch"}
    random = workflow.act(obs, after, first, ActMode(epsilon=1.0))
    assert torch.equal(random[1]["plan"], workflow.initial_policy_state(3)["plan"])


def test_planning_model_matches_rssm():
    """Rewards are those of the following state; the discount of the continue head is applied once."""
    workflow = make_workflow()
    model, rssm = workflow.planning_model, workflow.rssm
    state = rssm.initial_state(5)
    actions = torch.nn.functional.one_hot(torch.randint(3, (5, 2)), 3).float()
    noise = torch.rand(2, 5, rssm.stoch)
    weight = discount_weights(torch.full((5,), workflow.settings.discount), 2)
    value = trajectory_values(model, state, actions, weight=weight, next_noise=noise)
    expected, alive = torch.zeros(5), torch.ones(5)
    for t in range(2):
        state = rssm.imagine_step(state, actions[:, t].argmax(-1), noise[t])
        feature = rssm.feature(state)
        expected += alive * workflow.settings.discount**t * workflow.reward_head.predict(feature)
        alive = alive * (workflow.continue_head.predict(feature) / workflow.settings.discount).clamp(max=1.0)
    expected += alive * workflow.settings.discount**2 * workflow.critic.value(feature)
    assert torch.allclose(value, expected, atol=1e-5)


def test_dream_act_plans():
    workflow = make_workflow()
    state = workflow.dream_start(make_batch(workflow, size=3, rows=4))
    mode = ActMode(generator=torch.Generator().manual_seed(0))
    action, state = workflow.dream_act(state, mode)
    after, dreamed = workflow.dream_step(state, action)
    assert action.shape == (3,) and dreamed.reward.shape == (3,)
    action, _ = workflow.dream_act({**state, **after}, mode)
    assert action.shape == (3,)


def test_planning_beats_untrained_actor():
    """With the critic and reward of a trained model replaced by known ones, the plan takes the better action."""
    workflow = make_workflow()
    model = workflow.planning_model

    def reward(latent, action, following):
        return action[..., 2]  # the third action, in every state

    model.reward = reward
    state = workflow.initial_policy_state(4)
    mode = ActMode(sample=False, generator=torch.Generator().manual_seed(0))
    chosen, _, _ = workflow.act({"vector": torch.randn(4, 4)}, state, torch.ones(4, dtype=torch.bool), mode)
    assert chosen.tolist() == [2, 2, 2, 2]


@pytest.mark.learning
def test_experiment_balances_pole(tmp_path: Path):
    """After a few minutes of training: well above the return of 20 of random actions."""
    words = ["training.total_timesteps=5000", "environment.workers=0", "logging.progress=off"]
    words += ["training.evaluate.every_env_steps=2500", "logging.tensorboard=false"]
    run = rl_lab.train("dreamer_mpc_cartpole", [*words, f"run_dir={tmp_path / 'run'}"])
    assert run.eval_return_mean is not None and run.eval_return_mean > 100
