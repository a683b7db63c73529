import pytest
import torch

from rl_lab.errors import ConfigError
from rl_lab.records import ActMode, Batch
from rl_lab.workflows.tdmpc.losses import td_target
from tests.workflows.tdmpc_case import (
    CONTINUOUS,
    DISCRETE,
    KINDS,
    MULTI,
    changed_parts,
    first_version,
    hook_noise,
    make_batch,
    make_tdmpc,
    padded,
    parts_of,
    run_hook,
    task_spec,
    weights,
)

MODEL = {"encoder", "dynamics", "reward_head", "critic"}


@pytest.mark.parametrize("kind", KINDS)
def test_update_trains_every_part(kind):
    workflow = KINDS[kind]()
    before = weights(workflow)
    result = run_hook(workflow, "update")
    # Layers before zero-initialized output layers do not change in the first update of the model.
    run_hook(workflow, "update", seed=1)
    assert changed_parts(before, weights(workflow)) == set(parts_of(workflow))
    for name, value in result.metrics.items():
        assert value.ndim == 0 and not value.requires_grad and torch.isfinite(value), name
    assert {"loss/consistency", "loss/reward", "loss/value", "loss", "grad_norm", "td_error"} <= set(
        result.metrics
    )
    assert {"controller/loss", "controller/entropy", "controller/value_scale"} <= set(result.metrics)
    run_hook(workflow, "update", seed=2)
    for name, part in parts_of(workflow).items():
        for key, parameter in part.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, (name, key)


def test_separate_hooks_train_their_half_only():
    workflow = make_tdmpc()
    run_hook(workflow, "update")
    before = weights(workflow)
    run_hook(workflow, "update_world_model")
    assert changed_parts(before, weights(workflow)) == MODEL
    before = weights(workflow)
    run_hook(workflow, "update_controller")
    assert changed_parts(before, weights(workflow)) == {"policy"}


def test_step_is_a_pure_function_of_its_inputs():
    results = [run_hook(make_tdmpc(), "update").metrics for _ in range(2)]
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name
    other = run_hook(make_tdmpc(), "update", seed=1).metrics
    assert not torch.equal(other["controller/loss"], results[0]["controller/loss"])


def test_hooks_need_no_environment_or_buffer(monkeypatch):
    """Hooks use no environment, buffer or logger, and not the global generator."""
    workflow = make_tdmpc()
    batch, noise = make_batch(workflow), hook_noise(workflow, "update")

    def refuse(*arguments, **options):
        raise AssertionError("a hook drew a random number of its own")

    for name in ("rand", "randn", "randint", "rand_like", "randn_like", "randperm", "multinomial"):
        monkeypatch.setattr(torch, name, refuse)
    before = torch.get_rng_state()
    workflow.hooks()["update"].step(
        Batch(dict(batch.columns)),
        {"entropy": torch.tensor(1e-4), "learning_rate_scale": torch.tensor(1.0)},
        noise,
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert workflow._bound().buffers == {} and workflow.collector is None


def test_hooks_and_plan_do_not_sync():
    """The meta device has no values: reading one on the host fails."""
    workflow = make_tdmpc()
    parts = [*parts_of(workflow).values(), workflow.scale, workflow.guard, workflow.policy_guard]
    for module in (*parts, workflow.action_encoder):
        module.to("meta")
    for name in ("discounts", "policy_weights", "model_weights"):
        setattr(workflow, name, getattr(workflow, name).to("meta"))
    state = workflow.initial_policy_state(2)
    noise = {k: v.to("meta") for k, v in workflow._draw(workflow.act_noise(2), None).items()}
    action, memory, _ = workflow.act_step(
        {"vector": torch.empty(2, 4, device="meta")},
        {"plan": state["plan"].to("meta")},
        torch.zeros(2, dtype=torch.bool, device="meta"),
        noise,
        {"explore": torch.ones((), device="meta")},
    )
    assert action.shape == (2, 2) and memory["plan"].shape == state["plan"].shape
    batch = Batch({k: v.to("meta") for k, v in make_batch(workflow).columns.items()})
    losses, latents, error, _ = workflow._model_losses(
        batch, {k: v.to("meta") for k, v in hook_noise(workflow, "update").items()}
    )
    assert latents.shape == (4, 4, 16) and error.shape == (4,)
    assert {loss.shape for loss in losses.values()} == {(4,)}


def test_step_does_not_write_into_its_batch():
    workflow = make_tdmpc()
    batch = make_batch(workflow)
    copy = {key: value.clone() for key, value in batch.columns.items()}
    run_hook(workflow, "update", batch)
    for key, value in copy.items():
        assert torch.equal(batch[key], value)


@pytest.mark.parametrize("real_rows", [(4, 4, 4, 4), (2, 3, 4, 2)])
def test_losses_match_equations(real_rows):
    """Against a plain version: one sequence, one step and one ensemble member at a time.

    A sequence with k real rows has the losses of its first k - 1 steps.
    """
    workflow = make_tdmpc(controllers__critic__dropout=0.0)
    for step in range(3):  # away from the zero initialization
        run_hook(workflow, "update", make_batch(workflow, seed=step), seed=step)
    batch, noise = padded(make_batch(workflow, seed=9), real_rows), hook_noise(workflow, "update")
    losses, latents, error, _ = workflow._model_losses(batch, noise)
    s, pair = workflow.settings, torch.topk(noise["target_members"], 2).indices
    for b in range(s.batch_size):
        obs = {"vector": batch["obs/vector"][b]}
        z, sums = workflow.encoder({"vector": obs["vector"][:1]}), dict.fromkeys(losses, 0.0)
        absolute = 0.0
        for t in range(real_rows[b] - 1):
            assert torch.allclose(latents[t, b], z[0], atol=1e-6)
            action = batch.action[b, t : t + 1]
            following = workflow.encoder({"vector": obs["vector"][t + 1 : t + 2]})
            chosen = workflow.policy.sample(following, noise["target_action"][t, b : b + 1])
            slow = workflow.critic.slow.network(following, chosen)[pair]
            target = td_target(
                batch.reward[b, t + 1].view(1, 1),
                batch.terminated[b, t + 1].view(1, 1),
                workflow.critic.mean(slow).amin(0).view(1, 1),
                0.99,
            )[0]
            logits = workflow.critic.online(z, action)
            reward = workflow.reward_head(z, action)
            z = workflow.dynamics(z, action)
            weight = s.rho**t / s.horizon
            sums["consistency"] += weight * (z - following).square().mean()
            sums["reward"] += weight * workflow.reward_head.loss(reward, batch.reward[b, t + 1]).sum()
            sums["value"] += weight * workflow.critic.loss(logits, target).mean()
            absolute += s.rho**t * (workflow.critic.mean(logits) - target).abs().sum()
        for name, value in sums.items():
            assert torch.allclose(losses[name][b], value, atol=1e-5), name
        assert torch.allclose(error[b], absolute, atol=1e-4)


def test_targets_use_observations():
    """No gradient flows through the target latents."""
    workflow = make_tdmpc()
    run_hook(workflow, "update")
    batch = make_batch(workflow)
    losses, *_ = workflow._model_losses(batch, hook_noise(workflow, "update"))
    gradient = torch.autograd.grad(
        losses["consistency"].sum(), workflow.dynamics.mlp.layers[-1].bias, retain_graph=True
    )[0]
    assert gradient.abs().sum() > 0
    last = batch.columns["obs/vector"].clone().requires_grad_()
    moved = Batch({**batch.columns, "obs/vector": last})
    losses, *_ = workflow._model_losses(moved, hook_noise(workflow, "update"))
    gradient = torch.autograd.grad(losses["consistency"].sum(), last)[0]
    assert gradient[:, 0].abs().sum() > 0 and gradient[:, 1:].abs().sum() == 0


def test_policy_step_gives_critic_no_gradient():
    workflow = make_tdmpc()
    run_hook(workflow, "update_world_model")
    for parameter in workflow.critic.parameters():
        parameter.grad = None
    run_hook(workflow, "update_controller")
    assert all(parameter.grad is None for parameter in workflow.critic.parameters())


def test_slow_critic_follows():
    workflow = make_tdmpc(algorithm__target_rate=0.5)
    run_hook(workflow, "update")
    slow = workflow.critic.slow.network.bias_2
    assert torch.allclose(slow, workflow.critic.online.bias_2 * 0.5)


@pytest.mark.parametrize("hook", ["update", "update_world_model"])
def test_non_finite_input_masks_update(hook):
    workflow = make_tdmpc()
    run_hook(workflow, hook)
    before = weights(workflow)
    batch = make_batch(workflow, seed=1)
    batch.columns["obs/vector"][0, 0, 0] = float("nan")
    result = run_hook(workflow, hook, batch)
    assert result.metrics["nonfinite"].item() == 1.0
    after = weights(workflow)
    assert changed_parts(before, after) <= {"critic"}  # whose slow copy still moves
    for key, value in after["critic"].items():
        assert torch.isfinite(value).all()
        assert key.startswith("slow") or torch.equal(value, before["critic"][key])
    assert torch.isfinite(workflow.scale.value)
    assert torch.isfinite(run_hook(workflow, hook).metrics["loss"])


def test_learning_rates():
    workflow = make_tdmpc()
    scalars = workflow.hooks()["update"].scalars
    assert scalars({}, {}) == {"entropy": pytest.approx(1e-4), "learning_rate_scale": 1.0}
    phase = {"set": {"algorithm.entropy": 0.5, "algorithm.learning_rate": 2e-3}}
    run_hook(workflow, "update", phase=phase)
    encoder, model = (optimizer.param_groups[0]["lr"].item() for optimizer in workflow.model_optimizers)
    assert (encoder, model) == (pytest.approx(6e-4), pytest.approx(2e-3))
    assert workflow.policy_optimizer.param_groups[0]["eps"] == 1e-5


def test_overfits_batch():
    workflow = make_tdmpc(algorithm__learning_rate=3e-3, algorithm__batch_size=8)
    batch = make_batch(workflow)
    first = run_hook(workflow, "update", batch).metrics
    for step in range(150):
        last = run_hook(workflow, "update", batch, seed=step).metrics
    assert last["loss/reward"] < 0.5 * first["loss/reward"]
    assert last["loss/consistency"] < 0.5 * first["loss/consistency"]


# ---------------------------------------------------------------- TD-MPC (2022)


def dense(mlp):
    """The weight matrix of each layer; that of the first one is stored in two parts."""
    for layer in mlp.layers:
        yield torch.cat([p for name, p in layer.named_parameters() if name.startswith("weight")], 1)


def test_tdmpc1_settings():
    workflow = first_version()
    assert type(workflow.dynamics).__name__ == "LatentDynamics"
    x = torch.randn(5, 16 + 2)
    by_hand = x
    for weights_in, layer in zip(dense(workflow.dynamics.mlp), workflow.dynamics.mlp.layers, strict=True):
        by_hand = by_hand @ weights_in.t() + layer.bias
        by_hand = by_hand if layer is workflow.dynamics.mlp.layers[-1] else torch.nn.functional.elu(by_hand)
    assert torch.allclose(workflow.dynamics(x[:, :16], x[:, 16:]), by_hand, atol=1e-5)
    assert workflow.critic.members == 3 and workflow.critic.reduce == "min" and workflow.critic.dropout == 0.0
    assert workflow.critic.regression.width == 1
    assert workflow.slow_encoder is not None
    assert workflow.hooks()["update"].batch.sampler == "prioritized"
    assert workflow.hooks()["update"].batch.length == 6


def test_tdmpc1_priorities():
    workflow = first_version()
    run_hook(workflow, "update")
    batch = make_batch(workflow)
    rows = batch.reward.shape
    batch.columns["priority"] = torch.ones(rows)
    batch.columns["weight"] = torch.ones(rows)
    result = run_hook(workflow, "update", batch)
    assert result.write_back["priority"].shape == (4, 1)
    assert (result.write_back["priority"] > 0).all()
    loss = workflow._model_losses(batch, hook_noise(workflow, "update"))[0]
    one = {"weight": torch.zeros(rows)}
    one["weight"][0] = 1.0
    weighted = run_hook(first_version(), "update", Batch({**batch.columns, **one})).metrics["loss"]
    plain = run_hook(first_version(), "update", batch).metrics["loss"]
    assert weighted < plain and set(loss) == {"consistency", "reward", "value"}


def test_tdmpc1_target_encoder():
    workflow = first_version()
    batch, noise = make_batch(workflow), hook_noise(workflow, "update")
    before = workflow._model_losses(batch, noise)[0]["consistency"]
    for buffer in workflow.slow_encoder.network.buffers():
        buffer.mul_(1.5)
    assert not torch.equal(workflow._model_losses(batch, noise)[0]["consistency"], before)


def test_tdmpc1_plan_schedule():
    workflow = first_version()
    assert workflow.act_scalars(ActMode()) == {"explore": 1.0, "min_std": 0.5, "horizon": 1.0}
    workflow.hooks()["update"].scalars({}, {"env_steps": 25_000})
    assert workflow.act_scalars(ActMode()) == {"explore": 1.0, "min_std": pytest.approx(0.05), "horizon": 5.0}
    other = first_version()
    other.set_state(workflow.get_state())
    assert other.act_scalars(ActMode())["horizon"] == 5.0


# ---------------------------------------------------------------- state and errors


def test_resumed_training_is_exact():
    def train(workflow, steps, start=0):
        for step in range(start, start + steps):
            run_hook(workflow, "update", make_batch(workflow, seed=step), seed=step)

    for make in (make_tdmpc, first_version):
        full, half, resumed = make(), make(), make()
        train(full, 4)
        train(half, 2)
        for name, part in parts_of(resumed).items():
            part.load_state_dict(parts_of(half)[name].state_dict())
        for mine, theirs in zip(
            [*resumed.model_optimizers, resumed.policy_optimizer],
            [*half.model_optimizers, half.policy_optimizer],
        ):
            mine.load_state_dict(theirs.state_dict())
        resumed.set_state(half.get_state())
        train(resumed, 2, start=2)
        assert changed_parts(weights(full), weights(resumed)) == set()
        assert torch.equal(full.scale.value, resumed.scale.value)


def test_config_errors():
    with pytest.raises(ConfigError, match=r"components\.termination_head"):
        make_tdmpc(algorithm__episodic=True)
    with pytest.raises(ConfigError, match=r"components\.task_embedding"):
        make_tdmpc(task_spec())
    with pytest.raises(ConfigError, match="precision"):
        make_tdmpc(training__precision="float16")


def test_discrete_policy_uses_expected_value():
    workflow = KINDS["discrete"]()
    with torch.no_grad():
        for part in (workflow.policy, workflow.critic.online):
            for parameter in part.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
    latents = torch.randn(4, 5, 16)
    pair = workflow.critic.online.select(torch.tensor([2, 0]))
    value, entropy = workflow._expected_value(latents, (), pair)
    (probabilities,) = workflow.policy.probabilities(latents)
    one_hot = torch.eye(3).view(3, 1, 1, 3).expand(-1, 4, 5, -1)
    values = torch.stack([workflow.critic.value(latents, action, pair) for action in one_hot], -1)
    assert values.std() > 0.01 and torch.allclose(value, (probabilities * values).sum(-1), atol=1e-5)
    assert torch.allclose(entropy, torch.distributions.Categorical(probabilities).entropy(), atol=1e-5)
    bias = workflow.policy.mlp.layers[-1].bias
    (found,) = torch.autograd.grad(value[0, 0], bias)
    softmax = (
        probabilities - 0.01 / 3
    ) / 0.99  # of the logits: probabilities are mixed with a uniform distribution
    mean = (softmax[0, 0] * values[0, 0]).sum()
    assert torch.allclose(found, 0.99 * softmax[0, 0] * (values[0, 0] - mean), atol=1e-5)


def test_all_action_kinds_are_covered():
    assert {CONTINUOUS.kind, DISCRETE.kind, MULTI.kind} == {"continuous", "discrete", "multi_discrete"}


def test_target_encoder_follows_loaded_weights():
    workflow = make_tdmpc(experiment="tdmpc_dmc")
    for parameter in workflow.encoder.parameters():
        parameter.data += 1.0
    workflow.weights_loaded()
    slow = dict(workflow.slow_encoder.network.named_buffers())
    for name, parameter in workflow.encoder.named_parameters():
        assert torch.equal(slow[name], parameter)
