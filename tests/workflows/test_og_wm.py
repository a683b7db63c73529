import pytest
import torch

from rl_lab.config.compose import compose_config, resolve_config
from rl_lab.errors import ConfigError
from rl_lab.records import ActMode, Batch, EarlyStop
from rl_lab.workflows.og_wm.settings import WorldModelsSettings
from tests.workflows.og_wm_case import (
    CAR,
    DISCRETE,
    MULTI,
    PHASE,
    changed_parts,
    image_spec,
    make_batch,
    make_workflow,
    mdn_batch,
    run_hook,
    vae_batch,
    weights,
)

ACTIONS = pytest.mark.parametrize("action", [CAR, DISCRETE, MULTI], ids=lambda a: a.kind)


# ---------------------------------------------------------------- hooks


def test_hook_trains_only_its_part():
    workflow = make_workflow()
    before = weights(workflow)
    result = run_hook(workflow, "update_vae", vae_batch(workflow))
    assert changed_parts(before, weights(workflow)) == {"vae"}
    assert {"loss/reconstruction", "loss/kl", "kl", "pixel_error", "grad_norm", "nonfinite"} <= set(
        result.metrics
    )
    before = weights(workflow)
    result = run_hook(workflow, "update_mdn", mdn_batch(workflow))
    assert changed_parts(before, weights(workflow)) == {"mdn_rnn"}
    assert {"loss/latent", "loss/reward", "loss/done", "real_steps"} <= set(result.metrics)
    for name, value in result.metrics.items():
        assert value.ndim == 0 and not value.requires_grad and torch.isfinite(value), name


def test_mdn_on_images_equals_mdn_on_codes():
    """The codes of one update are those that `encode` stores, if V has not changed since."""
    workflows = [make_workflow() for _ in range(2)]
    batch = make_batch(workflows[0], 3, 6)
    batch.columns |= workflows[0].hooks()["encode"].step(batch)
    stored = run_hook(workflows[0], "update_mdn", batch)
    keys = workflows[1].hooks()["update_mdn_on_images"].batch.keys
    images = Batch({key: batch[key] for key in keys}, mask=batch.mask)
    assert "mu" not in images.columns and "obs/image" in images.columns
    encoded = run_hook(workflows[1], "update_mdn_on_images", images)
    for name, value in stored.metrics.items():
        torch.testing.assert_close(value, encoded.metrics[name], msg=name)
    torch.testing.assert_close(weights(workflows[0])["mdn_rnn"], weights(workflows[1])["mdn_rnn"])


@pytest.mark.parametrize(("hook", "make"), [("update_vae", vae_batch), ("update_mdn", mdn_batch)])
def test_updates_are_pure(hook, make):
    """Without environment, buffer or logger, the same batch and noise give the same step."""
    workflows = [make_workflow() for _ in range(2)]
    for workflow in workflows:
        context = workflow.context
        assert context.collector is context.train_environment is context.experiment_logger is None
        assert not context.buffers
    batch = make(workflows[0])
    copy = {key: value.clone() for key, value in batch.columns.items()}
    torch.manual_seed(1)
    first = run_hook(workflows[0], hook, batch)
    torch.manual_seed(2)
    second = run_hook(workflows[1], hook, make(workflows[1]))
    for name, value in first.metrics.items():
        assert torch.equal(value, second.metrics[name]), name
    assert changed_parts(weights(workflows[0]), weights(workflows[1])) == set()
    for key, value in copy.items():
        assert torch.equal(batch[key], value)
    other = run_hook(make_workflow(), hook, make(workflows[0]), seed=1).metrics["loss"]
    assert not torch.equal(other, first.metrics["loss"])


def test_encode_in_batches_is_pure(monkeypatch):
    workflow = make_workflow()
    batch = make_batch(workflow, 3, 5)
    full = workflow.hooks()["encode"].step(batch)
    monkeypatch.setattr("rl_lab.workflows.og_wm.workflow.ENCODE_BATCH", 4)
    parts = workflow.hooks()["encode"].step(batch)
    latent = workflow.vae.observe(batch.obs)
    for key in ("mu", "logvar"):
        assert full[key].shape == (3, 5, 4) and not full[key].requires_grad
        torch.testing.assert_close(full[key], parts[key])
        torch.testing.assert_close(full[key], latent[key])


def test_padding_is_ignored():
    workflow, other = make_workflow(), make_workflow()
    batch = mdn_batch(workflow)
    changed = Batch({key: value.clone() for key, value in batch.columns.items()}, mask=batch.mask)
    for key in ("mu", "reward"):
        changed.columns[key][-1, 3:] = 99.0
    run_hook(workflow, "update_mdn", batch)
    run_hook(other, "update_mdn", changed)
    assert changed_parts(weights(workflow), weights(other)) == set()


def mdn_after_update(reference, **changes):
    """M's weights after one update that starts from the weights of `reference`."""
    workflow = make_workflow(**changes)
    workflow.mdn_rnn.load_state_dict(reference.mdn_rnn.state_dict(), strict=False)
    run_hook(workflow, "update_mdn", mdn_batch(workflow))
    return workflow.mdn_rnn.state_dict()


def test_reward_and_done_losses_can_be_turned_off():
    """Scale 0: the LSTM is trained as without the heads, and the heads keep their weights."""
    reference = make_workflow()
    before = reference.mdn_rnn.state_dict()
    off = mdn_after_update(reference, algorithm__loss_scales={"latent": 1.0, "reward": 0.0, "done": 0.0})
    none = mdn_after_update(
        reference, components__mdn_rnn__reward_head=False, components__mdn_rnn__done_head=False
    )
    for name, value in none.items():
        assert torch.equal(off[name], value), name
    for name in ("to_reward.weight", "to_done.weight"):
        assert torch.equal(off[name], before[name])
    on = mdn_after_update(reference)
    assert not torch.equal(on["to_reward.weight"], before["to_reward.weight"])


def test_reward_scale_of_ctallec():
    """Sum over dimensions + reward (ctallec/world-models) is D times mean over dimensions + reward / D."""
    workflow = make_workflow(algorithm__gradient_limit=0.0)
    batch, latents = mdn_batch(workflow), workflow.vae.latent
    result = run_hook(workflow, "update_mdn", batch).metrics
    scales = {"latent": 1.0, "reward": 1 / latents, "done": 1 / latents}
    scaled = run_hook(make_workflow(algorithm__loss_scales=scales), "update_mdn", batch).metrics
    total = latents * result["loss/latent"] + result["loss/reward"] + result["loss/done"]
    assert scaled["loss"].item() * latents == pytest.approx(total.item(), rel=1e-4)


def test_mdn_gradients_clipped_by_value():
    workflow = make_workflow(algorithm__gradient_limit=1e-3)
    run_hook(workflow, "update_mdn", mdn_batch(workflow))
    limit = torch.tensor(1e-3)
    assert max(p.grad.abs().max() for p in workflow.mdn_rnn.parameters()) == limit
    free = make_workflow(algorithm__gradient_limit=0.0)
    run_hook(free, "update_mdn", mdn_batch(free))
    assert max(p.grad.abs().max() for p in free.mdn_rnn.parameters()) > limit


def test_non_finite_input_masks_update():
    workflow = make_workflow()
    batch = mdn_batch(workflow)
    batch.columns["reward"][0, 2] = float("inf")
    before = weights(workflow)
    result = run_hook(workflow, "update_mdn", batch)
    assert result.metrics["nonfinite"] == 1.0
    assert changed_parts(before, weights(workflow)) == set()


def test_mdn_overfits_batch():
    workflow = make_workflow(optimizers__mdn_rnn__lr=2e-2)
    batch = mdn_batch(workflow)
    batch.columns["logvar"][:] = -6.0
    first = run_hook(workflow, "update_mdn", batch).metrics
    for step in range(150):
        last = run_hook(workflow, "update_mdn", batch, seed=step).metrics
    assert last["loss/reward"] < 0.3 * first["loss/reward"] and last["loss/latent"] < first["loss/latent"]


# ---------------------------------------------------------------- acting


@ACTIONS
def test_act_returns_actions_state_and_columns(action):
    workflow = make_workflow(image_spec(action))
    workflow.controller.set_vector(torch.randn(workflow.controller.num_parameters))
    obs = make_batch(workflow, 5, 1, padded=False).obs
    obs = {key: value[:, 0] for key, value in obs.items()}
    state, first = workflow.initial_policy_state(5), torch.ones(5, dtype=torch.bool)
    for mode in (ActMode(), ActMode(sample=False), ActMode(epsilon=0.5), ActMode(epsilon=1.0)):
        chosen, after, extras = workflow.act(obs, state, first, mode)
        assert chosen.shape == (5, *action.shape) and chosen.dtype == getattr(torch, action.dtype)
        assert {key: value.shape for key, value in after.items()} == {k: v.shape for k, v in state.items()}
        assert torch.equal(after["action"], chosen)
        assert {key: value.shape[1:] for key, value in extras.items()} == {
            key: column.shape for key, column in workflow.policy_columns().items()
        }


def test_controller_gets_z_and_previous_memory():
    workflow = make_workflow()
    vector = torch.randn(workflow.controller.num_parameters)
    workflow.controller.set_vector(vector)
    frames = make_batch(workflow, 2, 3, padded=False).obs["image"]
    state, mode = workflow.initial_policy_state(2), ActMode(sample=False)
    memory, actions = workflow.mdn_rnn.reset_state(2), []
    for t in range(3):
        action, state, _ = workflow.act({"image": frames[:, t]}, state, torch.full((2,), t == 0), mode)
        z = workflow.vae.observe({"image": frames[:, t]})["mu"]
        expected = workflow.controller.act(torch.cat([z, memory["h"]], -1))
        torch.testing.assert_close(action, expected)
        memory = workflow.mdn_rnn.observe(memory, z, action)
        actions.append(action)
    # M uses the action in the policy state, which somebody else may have written.
    pretended = {**state, "action": torch.ones_like(state["action"])}
    recalled = workflow.update_memory(pretended, torch.zeros(2, dtype=torch.bool))
    assert not torch.equal(recalled["h"], memory["h"])


def test_acting_resets_at_is_first():
    workflow = make_workflow()
    workflow.controller.set_vector(torch.randn(workflow.controller.num_parameters))
    frame = {"image": make_batch(workflow, 2, 1, padded=False).obs["image"][:, 0]}
    fresh = workflow.initial_policy_state(2)
    used = {k: torch.randn(v.shape) if v.is_floating_point() else v for k, v in fresh.items()}
    first = torch.tensor([True, False])
    actions = [workflow.act(frame, s, first, ActMode(sample=False))[0] for s in (fresh, used)]
    assert torch.equal(actions[0][0], actions[1][0]) and not torch.equal(actions[0][1], actions[1][1])


@pytest.mark.parametrize(("memory", "features"), [("none", 4), ("h", 12), ("hc", 20)])
def test_memory_setting_selects_features(memory, features):
    workflow = make_workflow(algorithm__memory=memory, controllers__controller__features=features)
    state = workflow.mdn_rnn.reset_state(2)
    assert workflow.features(torch.zeros(2, 4), state).shape == (2, features)
    with pytest.raises(ConfigError, match=rf"features={features}"):
        make_workflow(algorithm__memory=memory, controllers__controller__features=features + 1)


# ---------------------------------------------------------------- evolution


@ACTIONS
def test_population_equals_single_candidates(action):
    workflow = make_workflow(image_spec(action))
    evolution = workflow.evolution
    candidates = torch.randn(4, workflow.controller.num_parameters)
    frames = make_batch(workflow, 4, 3, padded=False).obs["image"]
    together, alone = evolution.initial_policy_state(4), [workflow.initial_policy_state(1) for _ in range(4)]
    mode = ActMode(sample=False)
    for t in range(3):
        first = torch.full((4,), t == 0)
        actions, together = evolution.act(candidates, {"image": frames[:, t]}, together, first, mode)
        for index, candidate in enumerate(candidates):
            workflow.controller.set_vector(candidate)
            own, alone[index], _ = workflow.act(
                {"image": frames[index : index + 1, t]}, alone[index], first[:1], mode
            )
            torch.testing.assert_close(actions[index], own[0])


def evolve(workflow, generations: int, phase=PHASE) -> None:
    target = torch.linspace(-1, 1, workflow.controller.num_parameters)
    for _ in range(generations):
        workflow.evolution.begin(phase)
        candidates = workflow.evolution.ask()
        workflow.evolution.tell(candidates, -(candidates - target).square().sum(1))


def test_controller_is_distribution_mean():
    workflow = make_workflow()
    evolve(workflow, 30)
    vector = workflow.controller.get_vector()
    torch.testing.assert_close(vector, workflow.cma_es.mean)
    target = torch.linspace(-1, 1, len(vector))
    assert (vector - target).norm() < 0.9 * target.norm()


def test_resumed_evolution_is_exact():
    full, half, resumed = make_workflow(), make_workflow(), make_workflow()
    evolve(full, 12)
    evolve(half, 5)
    half.evolution.ask()  # stopped during a generation
    resumed.set_state(half.get_state())
    resumed.controller.load_state_dict(half.controller.state_dict())
    evolve(resumed, 7)
    assert torch.equal(full.controller.get_vector(), resumed.controller.get_vector())
    assert torch.equal(full.evolution.ask(), resumed.evolution.ask())


def test_next_round_restarts_around_controller():
    workflow = make_workflow()
    evolve(workflow, 10)
    centre, narrowed = workflow.controller.get_vector(), workflow.cma_es.step_size
    evolve(workflow, 1, {**PHASE, "iteration": 1})
    assert workflow.cma_es.generation == 1 and workflow.evolving == "evolve/1"
    candidates = workflow.evolution.ask()
    assert (candidates.mean(0) - centre).norm() < 1.0 and workflow.cma_es.step_size != narrowed


def test_nan_fitness_ranks_last():
    workflow = make_workflow()
    workflow.evolution.begin(PHASE)
    candidates = workflow.evolution.ask()
    fitness = torch.arange(6.0)
    fitness[5] = float("nan")
    workflow.evolution.tell(candidates, fitness)
    assert torch.isfinite(workflow.controller.get_vector()).all()


# ---------------------------------------------------------------- dreams


def test_dream_fitness_equals_single_dreams():
    """All candidates at once with common noise equal one dream at a time."""
    workflow = make_workflow()
    evolution = workflow.dream_evolution
    candidates = torch.randn(4, workflow.controller.num_parameters)
    batch = make_batch(workflow, 3, 2, padded=False)
    batch.columns["terminated"][2, -1] = True
    fitness, steps = evolution.evaluate(candidates, batch, torch.Generator().manual_seed(0))
    assert fitness.shape == (4,)
    total = 0
    for index, candidate in enumerate(candidates):
        workflow.controller.set_vector(candidate)
        generator = torch.Generator().manual_seed(0)
        state = workflow.dream_start(batch, generator=generator)
        alive, returns = (~batch["terminated"][:, -1]).float(), torch.zeros(3)
        for _ in range(workflow.settings.imagination_horizon):
            action, _ = workflow.dream_act(state, ActMode())
            state, reward, done = workflow.dream_latent(state, action, workflow.dream_noise(3, generator))
            total += int(alive.sum())
            returns += reward * alive
            alive *= (done <= 0).float()
        assert fitness[index].item() == pytest.approx(returns.mean().item(), abs=1e-5)
    assert steps == total


def test_phase_sets_temperature():
    workflow = make_workflow()
    workflow.dream_evolution.begin({**PHASE, "set": {"algorithm.temperature": 0.25}})
    assert workflow.temperature == 0.25
    state = workflow.dream_start(make_batch(workflow, 400, 1, padded=False), generator=torch.Generator())
    action = torch.zeros(400, 3)
    spread = []
    for temperature in (0.01, 1.0, 2.0):
        workflow.temperature = temperature
        after, _ = workflow.dream_step(
            {key: value[:1].expand(400, -1) for key, value in state.items()},
            action,
            generator=torch.Generator().manual_seed(0),
        )
        spread.append(after["z"].std(0).mean().item())
    assert spread[0] < 0.6 * spread[1] < 0.6 * spread[2]


@ACTIONS
def test_dream_interface(action):
    workflow = make_workflow(image_spec(action, channels=3))
    assert workflow.can_dream
    batch = make_batch(workflow, 2, 4, padded=False)
    generator = torch.Generator().manual_seed(0)
    state = workflow.dream_start(batch, generator=generator)
    assert {key: value.shape for key, value in state.items()} == {"z": (2, 4), "h": (2, 8), "c": (2, 8)}
    chosen, state = workflow.dream_act(state, ActMode())
    assert chosen.shape == (2, *action.shape)
    after, dreamed = workflow.dream_step(state, chosen, generator=generator)
    assert dreamed.reward.shape == dreamed.terminated.shape == (2,)
    assert (dreamed.terminated >= 0).all() and (dreamed.terminated <= 1).all()
    shown = workflow.dream_observation(after)["image"]
    assert shown.shape == (2, 3, 64, 64) and shown.dtype == torch.uint8
    assert torch.equal(shown, dreamed.obs["image"])
    dream = workflow.imagine(horizon=5, batch=batch, decode=True, generator=generator)
    assert dream.state["z"].shape == (2, 6, 4) and dream.action.shape == (2, 5, *action.shape)
    assert dream.reward.shape == dream.cont.shape == (2, 6) and dream.obs["image"].shape == (2, 6, 3, 64, 64)


def test_dream_start_memory():
    workflow = make_workflow()
    batch = make_batch(workflow, 2, 5, padded=False)
    batch.columns["is_first"][1, 2] = True
    generator = torch.Generator().manual_seed(0)
    state = workflow.dream_start(batch, generator=generator)
    noise = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    z = workflow.vae.observe(batch.obs, noise)["z"]
    _, memory = workflow.mdn_rnn.observe_sequence(
        workflow.mdn_rnn.reset_state(2), z[:, :-1], batch.action[:, :-1], batch.is_first[:, :-1]
    )
    torch.testing.assert_close(state, {"z": z[:, -1], **memory})
    # The columns of `encode` can replace the images; padding at the front does not change the memory.
    batch.columns |= workflow.hooks()["encode"].step(batch)
    coded = Batch({key: value for key, value in batch.columns.items() if not key.startswith("obs/")})
    torch.testing.assert_close(workflow.dream_start(coded, generator=torch.Generator().manual_seed(0)), state)
    short = Batch(coded.columns, mask=torch.tensor([[False, False, True, True, True], [True] * 5]))
    state = workflow.dream_start(short, generator=torch.Generator().manual_seed(0))
    _, late = workflow.mdn_rnn.observe_sequence(
        workflow.mdn_rnn.reset_state(1), z[:1, 2:-1], batch.action[:1, 2:-1]
    )
    torch.testing.assert_close(state["h"][:1], late["h"])


def test_dream_without_heads():
    workflow = make_workflow(components__mdn_rnn__reward_head=False, components__mdn_rnn__done_head=False)
    state = workflow.dream_start(make_batch(workflow, 2, 2, padded=False), generator=torch.Generator())
    _, dreamed = workflow.dream_step(state, torch.zeros(2, 3))
    assert dreamed.reward.tolist() == dreamed.terminated.tolist() == [0.0, 0.0]


def test_report():
    workflow = make_workflow(image_spec(channels=3))
    batch = make_batch(workflow, 3, 8)
    report = workflow.report(batch)
    assert report["reconstruction/image"].shape == (3, 2 * 64, 3 * 64)
    video = report["dream/image"]
    assert video.shape == (8, 3, 3 * 64, 5 * 64) and video.dtype == torch.uint8
    assert video[0, :, 0, 64].tolist() == [0, 255, 0] and video[-1, :, 0, 64].tolist() == [255, 0, 0]
    assert torch.equal(video[3, :, :64, :64], batch.obs["image"][0, 3])
    for name in ("reconstruction_error", "dream_error/0.1", "dream_error/1.3"):
        assert 0 < report[name] < 1
    assert workflow.temperature == workflow.settings.temperature
    again = workflow.report(batch)
    assert torch.equal(video, again["dream/image"]) and report["dream_error/1.0"] == again["dream_error/1.0"]
    gray = make_workflow()
    video = gray.report(make_batch(gray, 2, 8))["dream/image"]
    assert video[0, :, 0, 64].tolist() == [255] and video[-1, :, 0, 64].tolist() == [0]


# ---------------------------------------------------------------- configs


def test_published_parameter_counts():
    config = compose_config(["experiment=og_wm_carracing"])
    spec = image_spec(CAR, channels=3)
    resolve_config(config, spec)
    from rl_lab.build import build_parts

    components, controllers = build_parts(config, spec, torch.device("cpu"))
    count = lambda part: sum(p.numel() for p in part.parameters())  # noqa: E731
    assert count(components.vae) == 4_348_547
    assert count(components.mdn_rnn) == 422_368 + 2 * 257  # plus the heads for reward and end
    assert count(controllers["controller"]) == 867
    assert config.algorithm.evolution.episodes == 8 and config.controllers.controller.hidden == 0


def test_controller_with_hidden_layer_evolves():
    workflow = make_workflow(controllers__controller__hidden=5)
    evolution = workflow.evolution
    evolution.begin(PHASE)
    candidates = evolution.ask()
    assert candidates.shape == (6, 12 * 5 + 5 + 5 * 3 + 3)  # z and h have 12 values
    evolution.tell(candidates, torch.arange(6.0))
    assert workflow.controller.get_vector().abs().sum() > 0
    action, _, _ = workflow.act(
        {"image": torch.zeros(2, 1, 64, 64, dtype=torch.uint8)},
        workflow.initial_policy_state(2),
        torch.ones(2, dtype=torch.bool),
        ActMode(sample=False),
    )
    assert action.shape == (2, 3) and action.abs().max() <= 1


def test_config_errors():
    with pytest.raises(ConfigError, match=r"mdn_rnn\.latent=4"):
        make_workflow(components__mdn_rnn__latent=5)
    with pytest.raises(ConfigError, match="Did you mean 'patience'"):
        make_workflow(algorithm__evolution__early_stop={"patient": 4})
    with pytest.raises(ConfigError, match=r"algorithm\.memory"):
        make_workflow(algorithm__memory="z")
    with pytest.raises(ConfigError, match="above 0"):
        make_workflow(algorithm__temperature=0.0)
    with pytest.raises(ConfigError, match=r"algorithm: og_wm"):
        WorldModelsSettings.from_config({"batch_size": 1})
    assert make_workflow().settings.evolution.early_stop == EarlyStop()
