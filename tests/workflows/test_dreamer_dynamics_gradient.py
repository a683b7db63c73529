"""Actor gradients through the dynamics instead of REINFORCE (`controllers.actor.gradient`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_lab.errors import ConfigError
from rl_lab.workflows.dreamer.workflow import DreamerWorkflow
from tests.workflows.dreamer_case import (
    CONTINUOUS,
    EARLY,
    PARTS,
    changed_parts,
    draw_noise,
    make_batch,
    make_dreamer,
    run_hook,
    vector_spec,
    weights,
)


def make(gradient: str = "dynamics", **changes) -> DreamerWorkflow:
    """Heads that do not start at zero, so that gradients pass through them."""
    torch.manual_seed(0)
    return make_dreamer(
        vector_spec(CONTINUOUS),
        controllers__actor__gradient=gradient,
        controllers__critic__out_scale=1.0,
        components__reward_head__out_scale=1.0,
        **changes,
    )


def slow_gradient(
    workflow: DreamerWorkflow, noise: dict[str, torch.Tensor], entropy: float
) -> list[torch.Tensor]:
    """The loss of the 2023 version, computed state by state, and its gradient with respect to the actor."""
    w, horizon = workflow, workflow.settings.imagination_horizon
    with torch.no_grad():
        states, _ = w.infer(make_batch(w), noise["posterior"])
    state = {key: value.flatten(0, 1) for key, value in states.items()}
    features = [w.rssm.feature(state)]
    entropies = []
    for t in range(horizon):
        raw = w.actor(features[-1].detach())  # no gradient from the policy into the states
        mean, spread = raw[:, :2].tanh(), 0.9 * torch.sigmoid(raw[:, 2:] + 2.0) + 0.1
        action = mean + spread * noise["action"][t]
        entropies.append((spread.log() + 0.5 * (1 + torch.log(torch.tensor(2 * torch.pi)))).sum(-1))
        state = w.rssm.imagine_step(state, action, noise["prior"][t])
        features.append(w.rssm.feature(state))
    reward = [w.reward_head.predict(f) for f in features]
    cont = [w.continue_head.predict(f) for f in features]
    value = [w.critic.value(f) for f in features]
    returns = [value[-1]]
    for t in reversed(range(1, horizon + 1)):
        returns.insert(0, reward[t] + cont[t] * (0.05 * value[t] + 0.95 * returns[0]))
    found = torch.stack(returns[:-1])
    low, high = (0.01 * found.detach().flatten().quantile(q) for q in (0.05, 0.95))
    scale = max(1.0, float(high - low))
    loss, alive = torch.zeros(()), torch.ones(len(reward[0]))
    for t in range(horizon):
        alive = alive * cont[t].detach()
        loss = loss - (alive * ((returns[t] - value[t]) / scale + entropy * entropies[t])).mean() / horizon
    return list(torch.autograd.grad(loss, list(w.actor.parameters())))


@pytest.mark.parametrize(
    "changes",
    [{"algorithm__size__blocks": 1}, {"algorithm__size__blocks": 4}, EARLY],
    ids=["one_block", "four_blocks", "2023"],
)
@pytest.mark.parametrize("fast_path", ["off", "on"])
def test_gradient_matches_explicit_loss(fast_path: str, changes: dict[str, Any]):
    workflow = make(algorithm__entropy=0.1, training__fast_path=fast_path, **changes)
    noise = draw_noise(workflow, "update")
    noise["action"] *= 3.0  # some exceed the action limits
    expected = slow_gradient(workflow, noise, entropy=0.1)
    with torch.no_grad():
        states, _ = workflow.infer(make_batch(workflow), noise["posterior"])
    with workflow.autocast():
        dreams = workflow._imagine_rollouts(states, noise)
        learned = workflow._actor_critic_gradients(dreams, {"entropy": torch.tensor(0.1)})
    assert (dreams.action.abs() > 1.0).any() and (dreams.action.abs() < 1.0).any()
    found = {id(parameter): gradient for parameter, gradient in learned.gradients.found}
    assert max(gradient.abs().max() for gradient in expected) > 1e-3
    for parameter, gradient in zip(workflow.actor.parameters(), expected):
        assert torch.allclose(found[id(parameter)], gradient, rtol=1e-4, atol=1e-7)


def test_critic_gradient_equals_reinforce():
    results = {}
    for choice in ("dynamics", "reinforce"):
        workflow = make(choice)
        run_hook(workflow, "update")
        results[choice] = {
            part: [p.grad.clone() for p in parameters] for part, parameters in workflow.parts.items()
        }
    for part in PARTS:
        pairs = list(zip(results["dynamics"][part], results["reinforce"][part]))
        same = all(torch.allclose(ours, theirs, rtol=1e-4, atol=1e-7) for ours, theirs in pairs)
        assert same == (part != "actor"), part


def test_controller_hook_keeps_world_model():
    workflow = make()
    before = weights(workflow)
    result = run_hook(workflow, "update_controller")
    assert changed_parts(before, weights(workflow)) == {"actor", "critic"}
    assert all(not value.requires_grad for value in result.metrics.values())


def test_policy_maximizes_known_reward():
    workflow = make(algorithm__learning_rate=1e-2, algorithm__imagination_horizon=5)
    states, _ = workflow.infer(make_batch(workflow), draw_noise(workflow, "update")["posterior"])
    start = {key: value[:, -1].detach() for key, value in states.items()}

    def dreamed_reward() -> float:
        generator = torch.Generator().manual_seed(5)
        many = {key: value.repeat_interleave(200, 0) for key, value in start.items()}
        return float(workflow.imagine(horizon=5, state=many, generator=generator).reward[:, 1:].mean())

    before = dreamed_reward()
    for seed in range(60):
        run_hook(workflow, "update_controller", seed=seed)
    assert dreamed_reward() > before + 0.05


def test_invalid_gradient_settings():
    with pytest.raises(ConfigError, match="reinforce"):
        make_dreamer(vector_spec(CONTINUOUS), controllers__actor__gradient="reinforced")
    with pytest.raises(ConfigError, match="gradient_mix"):
        make_dreamer(vector_spec(CONTINUOUS), controllers__actor__gradient_mix=1.5)


def test_bfloat16_gradient_direction():
    found = []
    for precision, fast_path in (("float32", "off"), ("bfloat16", "on")):
        workflow = make(training__precision=precision, training__fast_path=fast_path)
        noise = draw_noise(workflow, "update")
        states = workflow.rssm.initial_state(2)
        states = {key: value.unsqueeze(1).expand(-1, 5, *value.shape[1:]) for key, value in states.items()}
        with workflow.autocast():
            dreams = workflow._imagine_rollouts(states, noise)
            learned = workflow._actor_critic_gradients(dreams, {"entropy": torch.tensor(0.0)})
        gradients = {id(parameter): gradient for parameter, gradient in learned.gradients.found}
        found.append(torch.cat([gradients[id(p)].float().flatten() for p in workflow.actor.parameters()]))
    assert torch.nn.functional.cosine_similarity(*found, dim=0) > 0.999
