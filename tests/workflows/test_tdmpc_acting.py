"""TD-MPC: acting by planning, imagination, and several tasks."""

import pytest
import torch

from rl_lab.components.controllers.mpc_planner import repeat, trajectory_values
from rl_lab.components.nn.fast_path import use_fast_path
from rl_lab.protocols import ObservationDecoder
from rl_lab.records import ActMode
from rl_lab.workflows.tdmpc.planning_model import LatentModel
from tests.workflows.tdmpc_case import KINDS, SEVERAL, make_batch, make_tdmpc, run_hook, task_spec


def observation(workflow, n, seed=0):
    batch = make_batch(workflow, size=n, seed=seed)
    return {key: value[:, 0] for key, value in batch.obs.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_acting(kind):
    workflow = KINDS[kind]()
    state = workflow.initial_policy_state(3)
    first = torch.ones(3, dtype=torch.bool)
    mode = ActMode(generator=torch.Generator().manual_seed(0))
    action, after, extras = workflow.act(observation(workflow, 3), state, first, mode)
    spec = workflow.spec.action
    assert action.shape == (3, *spec.shape) and extras == {}
    assert {key: value.shape for key, value in after.items()} == {
        key: value.shape for key, value in state.items()
    }
    if spec.kind == "continuous":
        assert action.abs().max() <= 1.0 and action.dtype == torch.float32
    else:
        assert action.dtype == torch.int64 and (action < max(spec.choices)).all()
    again = workflow.act(
        observation(workflow, 3), state, first, ActMode(generator=torch.Generator().manual_seed(0))
    )
    assert torch.equal(action, again[0])


def without_returns(self, name, value):
    if name != "returns":
        object.__setattr__(self, name, value)


@pytest.mark.parametrize("spec, changes", [(None, {}), (task_spec(), SEVERAL)], ids=["one task", "several"])
def test_rollout_value_keeps_plan(spec, changes, monkeypatch):
    workflow = make_tdmpc(spec, **changes)
    for _ in range(3):  # heads that start at zero would hide differences
        run_hook(workflow, "update")
    obs, first = observation(workflow, 3), torch.zeros(3, dtype=torch.bool)
    plans = []
    for _ in range(2):
        mode = ActMode(generator=torch.Generator().manual_seed(0))
        plans.append(workflow.act(obs, workflow.initial_policy_state(3), first, mode)[1]["plan"])
        monkeypatch.setattr(LatentModel, "__setattr__", without_returns)
    assert torch.allclose(*plans, atol=1e-6)


@pytest.mark.parametrize("spec, changes", [(None, {}), (task_spec(), SEVERAL)], ids=["one task", "several"])
@pytest.mark.parametrize("horizon", [1, 3])
@pytest.mark.parametrize("quick", [False, True])
def test_rollout_value_equals_trajectory_values(spec, changes, horizon, quick):
    """Two calls of the same model: the second one reuses the inputs buffer of the first."""
    workflow = make_tdmpc(spec, **changes)
    n, samples, size = 3, 5, workflow.spec.action.size
    obs = observation(workflow, n)
    task = workflow._task(obs)
    parts = workflow.planning_parts.parts
    layers = [workflow.encoder, workflow.critic, *parts.values()]
    use_fast_path(quick, *layers)
    with torch.no_grad():
        for parameter in (p for part in parts.values() for p in part.parameters()):
            parameter += 0.3 * torch.randn_like(parameter)
        model = LatentModel(
            **parts,
            critic=workflow.critic,
            pair=parts["online"].select(torch.tensor([2, 0])),
            task=task.embedding[0] if task.embedding else None,
            mask=task.mask,
        )
        latent = workflow.encoder(obs, *task.embedding)
        for _ in range(2):
            actions = torch.rand(n * samples, horizon, size) * 2.0 - 1.0
            weight, noise = torch.rand(n * samples, horizon + 1), torch.randn(n * samples, size)
            found = model.returns(latent, actions, weight, noise)
            use_fast_path(False, *layers)
            start = repeat(latent, samples)
            plain = trajectory_values(model, start, actions, weight=weight, value_noise=noise)
            use_fast_path(quick, *layers)
            assert plain.std() > 0.05 and torch.allclose(found, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_plan_close_to_float32(kind):
    """The weights are padded with zeros, in every kind of network."""
    plans = []
    for precision in ("float32", "bfloat16"):
        torch.manual_seed(0)
        workflow = KINDS[kind]()
        workflow._set_precision(precision)
        mode = ActMode(sample=False, generator=torch.Generator().manual_seed(0))
        first = torch.ones(3, dtype=torch.bool)
        obs = observation(workflow, 3)
        plans.append(workflow.act(obs, workflow.initial_policy_state(3), first, mode)[1]["plan"])
    assert plans[0].shape == plans[1].shape
    # The elites may differ, but a wrong plan would be much further away.
    assert (plans[0] - plans[1]).abs().mean() < 0.3


def test_random_and_mixed_actions():
    workflow = make_tdmpc()
    first = torch.zeros(200, dtype=torch.bool)
    obs, state = observation(workflow, 200), workflow.initial_policy_state(200)
    state["plan"] += 1.0
    mode = ActMode(epsilon=1.0, generator=torch.Generator().manual_seed(0))
    action, after, _ = workflow.act(obs, state, first, mode)
    assert torch.equal(after["plan"], workflow.initial_policy_state(200)["plan"])
    assert action.mean().abs() < 0.15 and action.std() == pytest.approx(0.577, abs=0.05)
    mode = ActMode(epsilon=0.5, generator=torch.Generator().manual_seed(0))
    action, after, _ = workflow.act(obs, state, first, mode)
    assert action.shape == (200, 2) and not torch.equal(after["plan"], state["plan"])


def test_plan_memory_resets_at_is_first():
    workflow = make_tdmpc()
    obs = observation(workflow, 2)
    fresh = workflow.initial_policy_state(2)
    used = {"plan": torch.ones_like(fresh["plan"])}
    plans = []
    for state in (fresh, used):
        mode = ActMode(generator=torch.Generator().manual_seed(0))
        plans.append(workflow.act(obs, state, torch.tensor([True, False]), mode)[1]["plan"])
    assert torch.equal(plans[0][0], plans[1][0])
    assert not torch.equal(plans[0][1], plans[1][1])


def test_evaluation_adds_no_noise():
    """Without exploration the executed action is the first action of a sampled elite."""
    workflow = make_tdmpc(algorithm__plan__min_std=1.0)
    obs, state, first = (
        observation(workflow, 4),
        workflow.initial_policy_state(4),
        torch.ones(4, dtype=torch.bool),
    )
    noise = workflow._draw(workflow.act_noise(4), torch.Generator().manual_seed(0))
    quiet = workflow.act_step(obs, state, first, noise, {"explore": torch.tensor(0.0)})[0]
    loud = workflow.act_step(obs, state, first, noise, {"explore": torch.tensor(1.0)})[0]
    assert torch.equal(loud, (quiet + noise["choice"] * (loud - quiet) / noise["choice"]).clamp(-1, 1))
    assert not torch.equal(quiet, loud)


def test_bfloat16_plans_close_after_updates():
    exact, coarse = make_tdmpc(), make_tdmpc(training__precision="bfloat16")
    assert coarse.planning_parts.dtype == torch.bfloat16
    obs, first = observation(exact, 4), torch.ones(4, dtype=torch.bool)
    noise = exact._draw(exact.act_noise(4), torch.Generator().manual_seed(0))
    plans = [
        w.act_step(obs, w.initial_policy_state(4), first, noise, {"explore": torch.tensor(0.0)})[1]["plan"]
        for w in (exact, coarse)
    ]
    assert torch.isfinite(plans[1]).all()
    assert (plans[0] - plans[1]).abs().mean() < 0.2  # near ties may select other elites
    run_hook(coarse, "update")
    old = coarse.planning_parts.parts["dynamics"].mlp.layers[0].bias.clone()
    coarse.act_step(obs, coarse.initial_policy_state(4), first, noise, {"explore": torch.tensor(0.0)})
    assert not torch.equal(old, coarse.planning_parts.parts["dynamics"].mlp.layers[0].bias)


def test_bfloat16_update_close_to_float32():
    plain = run_hook(make_tdmpc(), "update").metrics
    half = run_hook(make_tdmpc(training__precision="bfloat16"), "update").metrics
    for name in ("loss/reward", "loss/value", "loss/consistency"):
        assert half[name].item() == pytest.approx(plain[name].item(), rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_dream_interface(kind):
    workflow = KINDS[kind]()
    batch = make_batch(workflow, size=3)
    assert workflow.can_dream
    state = workflow.dream_start(batch)
    assert not isinstance(workflow, ObservationDecoder)
    mode = ActMode(generator=torch.Generator().manual_seed(0))
    action, state = workflow.dream_act(state, mode)
    after, dreamed = workflow.dream_step(state, action)
    assert after["latent"].shape == state["latent"].shape
    assert dreamed.reward.shape == dreamed.terminated.shape == (3,) and dreamed.obs == {}
    assert ((dreamed.terminated >= 0) & (dreamed.terminated <= 1)).all()
    assert (dreamed.terminated > 0).any() == (workflow.termination_head is not None)
    dream = workflow.imagine(horizon=4, batch=batch, generator=torch.Generator().manual_seed(0))
    assert dream.state["latent"].shape[:2] == (3, 5)
    assert dream.action.shape == (3, 4, *workflow.spec.action.shape)
    assert dream.reward.shape == dream.cont.shape == (3, 5)


def test_report():
    report = make_tdmpc().report(make_batch(make_tdmpc()))
    assert set(report) == {"open_loop_error/latent", "open_loop_error/reward"}
    assert all(value >= 0 for value in report.values())


# ---------------------------------------------------------------- several tasks


def test_masked_action_dimensions_stay_zero():
    workflow = make_tdmpc(task_spec(), **SEVERAL)
    obs = observation(workflow, 3)  # the second task has one action dimension
    mode = ActMode(generator=torch.Generator().manual_seed(0))
    first = torch.ones(3, dtype=torch.bool)
    action, state, _ = workflow.act(obs, workflow.initial_policy_state(3), first, mode)
    assert action[1, 1] == 0.0 and (action[[0, 2], 1] != 0).all()
    assert (state["plan"][1, :, 1] == 0).all()


def test_discount_and_embedding_per_task():
    workflow = make_tdmpc(task_spec(), **SEVERAL, algorithm__episode_length=[500, 100, 1000])
    task = workflow._task(observation(workflow, 3))
    assert torch.allclose(task.discount, torch.tensor([0.99, 0.95, 0.995]))
    assert task.embedding[0].shape == (3, 6)
    assert not torch.equal(task.embedding[0][0], task.embedding[0][1])
    workflow.task_embedding.weight.data.mul_(1000.0)
    run_hook(workflow, "update")
    assert workflow.task_embedding.weight.norm(dim=-1).max() <= 1.0 + 1e-5
