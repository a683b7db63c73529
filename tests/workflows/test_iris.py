"""IRIS and Δ-IRIS: hooks, imagination, acting, memory, state and config errors."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from rl_lab.build import build_parts
from rl_lab.components.dynamics.backbones import copy_state
from rl_lab.components.nn.losses import LossWithIntermediateLosses, reward_share
from rl_lab.components.nn.optim import decayed_adamw
from rl_lab.config.compose import compose_config, resolve_config
from rl_lab.errors import ConfigError
from rl_lab.records import ActMode, Batch
from rl_lab.workflows.iris.policy_loss import imagine
from rl_lab.workflows.iris.settings import IrisSettings
from rl_lab.workflows.iris.workflow import accumulated_loss
from tests.workflows.iris_case import (
    KINDS,
    PARTS,
    SPEC,
    changed_parts,
    composed,
    hook_batch,
    hook_noise,
    make_batch,
    make_workflow,
    run_hook,
    scalars,
    weights,
)

HOOKS = {f"update_{name}": name for name in PARTS}


@pytest.fixture(scope="module", params=KINDS)
def workflow(request: pytest.FixtureRequest) -> Any:
    return make_workflow(request.param)


@pytest.mark.parametrize("hook", sorted(HOOKS))
def test_hook_trains_only_its_part(workflow, hook):
    before = weights(workflow)
    result = run_hook(workflow, hook)
    assert changed_parts(before, weights(workflow)) == {HOOKS[hook]}
    assert all(isinstance(value, torch.Tensor) and value.ndim == 0 for value in result.metrics.values())
    assert all(torch.isfinite(value) for value in result.metrics.values())
    assert {"loss", "grad_norm", "nonfinite"} <= set(result.metrics)


@pytest.mark.parametrize("hook", sorted(HOOKS))
def test_hook_is_pure(hook):
    first, second = (make_workflow("delta_iris") for _ in range(2))
    torch.manual_seed(1)
    one = run_hook(first, hook)
    torch.manual_seed(2)  # the global generator must not be used
    two = run_hook(second, hook)
    assert all(torch.equal(one.metrics[key], two.metrics[key]) for key in one.metrics)
    assert not changed_parts(weights(first), weights(second))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["tokenizer", "world_model", "actor_critic"])
def test_padding_is_ignored(kind, name):
    """The content of padded rows with no valid row after them does not change the gradient."""
    results = []
    for filler in (0, 200):
        workflow = make_workflow(kind, "algorithm.tokenizer.pad=right", "algorithm.world_model.pad=right")
        batch = hook_batch(workflow, f"update_{name}")
        if name == "actor_critic":
            batch = make_batch(len(batch.reward), batch.reward.shape[1])
            batch.mask[:] = True
        batch.columns["obs/image"][~batch.mask] = filler
        batch.columns["reward"][~batch.mask] = filler
        results.append(run_hook(workflow, f"update_{name}", batch=batch).metrics["loss"])
    torch.testing.assert_close(results[0], results[1])


@torch.no_grad()
def test_frames_after_imagined_end_are_marked(workflow):
    batch = hook_batch(workflow, "update_actor_critic")
    noise = hook_noise(workflow, "update_actor_critic")
    noise["model"][:, :, 1] = 1.0
    noise["model"][0, 0, 1] = 0.0  # the first trajectory ends with its second frame
    network = workflow.actor_critic
    dream = imagine(
        network,
        workflow.tokenizer,
        workflow.world_model,
        frames=batch.obs["image"].float() / 255,
        action=batch.action,
        memory=network.initial_state(2),
        action_noise=noise["action"],
        model_noise=noise["model"],
        autocast=workflow.autocast,
    )
    frames = workflow.settings.imagined_frames
    assert dream.frames.shape == (2, frames, 3, 16, 16)
    assert dream.ended[0].tolist() == [False, True, *[False] * (frames - 2)]
    assert dream.alive[0].tolist() == [True, *[False] * (frames - 1)]
    assert dream.alive[1].all() and not dream.ended[1].any()
    assert float(dream.frames.min()) >= 0.0 and float(dream.frames.max()) <= 1.0


def test_mask_ended():
    """With masking, frames after the imagined end do not change the loss."""

    def loss(kind: str, seed: int) -> torch.Tensor:
        workflow = make_workflow(
            kind, "algorithm.imagination_horizon=5", "algorithm.entropy=0.1", "algorithm.blocks=10"
        )
        noise = hook_noise(workflow, "update_actor_critic")
        noise["model"][:, 0, 1] = 0.0  # every trajectory ends with its second frame
        noise["action"][:, 2:] = torch.rand(
            noise["action"][:, 2:].shape, generator=torch.Generator().manual_seed(seed)
        )
        batch = hook_batch(workflow, "update_actor_critic")
        return workflow._actor_critic_step(batch, scalars(workflow), noise).metrics["loss"]

    assert torch.equal(loss("delta_iris", 1), loss("delta_iris", 2))
    assert not torch.equal(loss("iris", 1), loss("iris", 2))


PRESETS = {  # experiment -> blocks of the world model, frames that are imagined, steps that are trained on
    "iris_atari100k": (20, 20, 19),
    "delta_iris_atari100k": (26, 21, 20),
    "delta_iris_crafter": (21, 16, 15),
}


@pytest.mark.parametrize("experiment", PRESETS)
def test_published_horizons(experiment):
    """actor_critic.py: IRIS drops the last of 20 steps; Δ-IRIS trains on 20 (15), the next frame bootstraps."""
    blocks, frames, trained = PRESETS[experiment]
    config = resolve_config(compose_config([f"experiment={experiment}"]), SPEC)
    settings = IrisSettings.from_config(config.algorithm)
    assert settings.imagination_horizon == (15 if "crafter" in experiment else 20)
    assert (settings.imagined_frames, settings.imagined_frames - 1) == (frames, trained)
    assert config.components.world_model.blocks == blocks
    if "delta" in experiment:  # burn-in frames, the start and every action fill the context exactly
        assert settings.actor_critic.batch_length + 1 + trained == blocks


@pytest.mark.parametrize("experiment", PRESETS)
def test_imagination_starts(experiment):
    """vmicheli/delta-iris src/data/sampler.py prefers late rows; eloialonso/iris src/dataset.py does not."""
    config = resolve_config(compose_config([f"experiment={experiment}"]), SPEC)
    name = config.algorithm.actor_critic.sampler.partition(":")[0]
    assert config.buffers.replay.samplers[name].get("prefer_late", False) == ("delta" in experiment)
    assert config.algorithm.actor_critic.pad == "left"


@pytest.mark.parametrize(("kind", "trained"), [("iris", 2), ("delta_iris", 3)])
def test_trained_steps_of_imagination(kind, trained):
    """With imagination_horizon 3 the return of the last trained step is its reward and the next frame's value."""
    workflow = make_workflow(kind)
    returned = []

    def record(reward, cont, value):
        returned.append((reward, cont, value, workflow.return_computer(reward, cont, value)))
        return returned[-1][3]

    workflow.policy_loss.returns = record
    run_hook(workflow, "update_actor_critic")
    reward, cont, value, result = returned[0]
    assert result.shape == (2, trained) and reward.shape == (2, trained + 1)
    torch.testing.assert_close(result[:, -1], reward[:, -1] + cont[:, -1] * value[:, -1])


def test_saved_runs_keep_their_horizon():
    """Configs of runs that were saved before the setting existed train on one step less, as they did."""
    algorithm = {k: v for k, v in composed("delta_iris").algorithm.items() if k != "bootstrap_frame"}
    assert IrisSettings.from_config(algorithm).imagined_frames == algorithm["imagination_horizon"]


def test_reward_shares():
    """The share counts rewards of both signs, of real steps only; the mean of +1 and -1 is 0."""
    assert float(reward_share(torch.tensor([1.0, -1.0, 0.0, 0.04]))) == 0.5
    assert float(reward_share(torch.tensor([[1.0, -1.0, 0.0]]), torch.tensor([[False, True, True]]))) == 0.5
    workflow = make_workflow("delta_iris")
    batch = hook_batch(workflow, "update_world_model")
    batch.reward[:] = 0.0
    batch.reward[0, 1:3] = torch.tensor([1.0, -1.0])
    taken = int((batch.mask[:, :-1] & batch.mask[:, 1:]).sum())
    metrics = run_hook(workflow, "update_world_model", batch=batch).metrics
    assert float(metrics["reward_share"]) == pytest.approx(2 / taken)
    kept = workflow.world_model.advance

    def advance(*arguments):
        state, outcome = kept(*arguments)
        sign = torch.tensor([1.0, -1.0])
        return state, replace(outcome, reward=sign, ended=torch.zeros(2, dtype=torch.bool))

    workflow.world_model.advance = advance
    batch = make_batch(2, 3)
    metrics = run_hook(workflow, "update_actor_critic", batch=batch).metrics
    assert float(metrics["reward_share"]) == 1.0 and float(metrics["reward_mean"]) == 0.0


def test_terminal_start_has_no_loss(workflow):
    batch = hook_batch(workflow, "update_actor_critic")
    batch.terminated[:, -1] = True
    metrics = run_hook(workflow, "update_actor_critic", batch=batch).metrics
    assert float(metrics["loss"]) == 0.0
    assert float(metrics["grad_norm"]) == 0.0


@pytest.mark.parametrize("name", PARTS)
def test_accumulation_keeps_gradient(name):
    workflow = make_workflow("iris")
    spec = workflow.hooks()[f"update_{name}"].batch
    batch = make_batch(4, spec.rows)
    generator = torch.Generator().manual_seed(0)
    noise = {
        key: torch.rand((4, *item.shape[1:]), generator=generator)
        for key, item in workflow.hooks()[f"update_{name}"].noise.items()
    }
    part = getattr(workflow, name)

    def loss(rows: Batch, row_noise: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if name == "tokenizer":
            found, metrics = part.compute_loss(rows)
        elif name == "world_model":
            found, metrics = part.compute_loss(rows, workflow.tokenizer)
        else:
            found, metrics = part.compute_loss(
                rows,
                workflow.tokenizer,
                workflow.world_model,
                workflow.policy_loss,
                action_noise=row_noise["action"],
                model_noise=row_noise["model"],
            )
        assert isinstance(found, LossWithIntermediateLosses) and set(metrics)
        return found.loss_total, metrics

    gradients, values = [], []
    for shares in (1, 2, 4):
        part.zero_grad()
        value, _ = accumulated_loss(loss, batch, noise, list(part.parameters()), shares)
        value.backward()
        values.append(value.detach())
        gradients.append([torch.zeros(()) if p.grad is None else p.grad.clone() for p in part.parameters()])
    for other, value in zip(gradients[1:], values[1:]):
        torch.testing.assert_close(value, values[0], atol=1e-5, rtol=1e-4)
        for one, two in zip(gradients[0], other):
            torch.testing.assert_close(
                one, two if two.ndim == one.ndim else two.expand_as(one), atol=1e-5, rtol=1e-3
            )


def test_grad_acc_steps_divides_batch_size():
    with pytest.raises(ConfigError, match=r"grad_acc_steps is 3: choose a divisor of batch_size"):
        make_workflow("iris", "algorithm.world_model.grad_acc_steps=3")
    workflow = make_workflow("iris", "algorithm.world_model.grad_acc_steps=2")
    before = weights(workflow)
    run_hook(workflow, "update_world_model")
    assert changed_parts(before, weights(workflow)) == {"world_model"}


def decays(workflow: Any, part: str) -> dict[str, float]:
    """Weight decay by the parameter's name."""
    named = {id(p): name for name, p in getattr(workflow, part).named_parameters()}
    groups = workflow.optimizers[part].param_groups
    rates = {named[id(p)]: group["weight_decay"] for group in groups for p in group["params"]}
    assert set(rates) == set(named.values())
    return rates


@pytest.mark.parametrize("part", ["tokenizer", "world_model"])
@pytest.mark.parametrize("kind", KINDS)
def test_weight_decay_only_on_linear_layers(kind, part):
    """vmicheli/delta-iris configure_optimizer exempts LayerNorm, Embedding, Conv2d, GroupNorm and biases."""
    workflow = make_workflow(kind, "algorithm.weight_decay.tokenizer=0.01")
    rates = decays(workflow, part)
    linear = {
        f"{name}.weight"
        for name, module in getattr(workflow, part).named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    assert linear and {name for name, rate in rates.items() if rate == 0.01} == linear
    assert {rate for name, rate in rates.items() if name not in linear} == {0.0}
    if kind == "delta_iris":
        assert rates["frame_net.layers.0.weight"] == 0.0


def test_saved_runs_keep_their_decay():
    """Without the key `decay_convolutions`, groups are those of the optimizer state of saved runs."""
    world_model = make_workflow("delta_iris").world_model
    optimizer = decayed_adamw(world_model.parameters(), lr=1.0, weight_decay=0.01)
    decayed = {id(p) for p in optimizer.param_groups[0]["params"]}
    assert id(world_model.frame_net.layers[0].weight) in decayed
    assert id(world_model.frame_net.layers[0].bias) not in decayed
    assert len(decayed_adamw([torch.nn.Parameter(torch.zeros(2))], lr=1.0).param_groups) == 1


# ---------------------------------------------------------------- acting and imagination


def acted(workflow, mode: ActMode, rows: int = 3, seed: int = 0):
    batch = make_batch(2, rows, seed=seed)
    state, actions = workflow.initial_policy_state(2), []
    for t in range(rows):
        obs = {"image": batch.obs["image"][:, t]}
        action, state, extras = workflow.act(obs, state, torch.tensor([t == 0] * 2), mode)
        assert extras == {}
        actions.append(action)
    return torch.stack(actions, 1), state


def test_acting_memory_resets_at_is_first(workflow):
    _, state = acted(workflow, ActMode(sample=False))
    obs = {"image": make_batch(2, 1, seed=5).obs["image"][:, 0]}
    _, fresh, _ = workflow.act(
        obs, workflow.initial_policy_state(2), torch.tensor([True, True]), ActMode(sample=False)
    )
    _, mixed, _ = workflow.act(obs, state, torch.tensor([True, False]), ActMode(sample=False))
    torch.testing.assert_close(mixed["h"][0], fresh["h"][0])
    assert not torch.allclose(mixed["h"][1], fresh["h"][1])


def test_acting_uses_only_given_generator(workflow):
    def actions(epsilon: float) -> torch.Tensor:
        return acted(workflow, ActMode(epsilon=epsilon, generator=torch.Generator().manual_seed(3)), rows=6)[
            0
        ]

    for epsilon in (0.0, 0.5, 1.0):
        assert torch.equal(actions(epsilon), actions(epsilon))
    assert workflow.collect_mode({}).epsilon == workflow.settings.collect_epsilon
    assert workflow.collect_mode({"collect": {"policy": "random"}}).epsilon == 1.0
    seen = workflow.inspect_policy(acted(workflow, ActMode(sample=False))[1])
    assert set(seen) == {"value", "entropy"} and seen["value"].shape == (2,)


def test_policy_sees_pixels_as_the_original():
    assert make_workflow("delta_iris").actor_critic.trunk.centered is False


def test_acting_memory_equals_burn_in(workflow):
    """The policy memory in the environment equals the memory after burn-in."""
    batch = make_batch(2, 4)
    state = workflow.initial_policy_state(2)
    for t in range(3):
        obs = {"image": batch.obs["image"][:, t]}
        _, state, _ = workflow.act(obs, state, torch.tensor([t == 0] * 2), ActMode(sample=False))
    start = workflow.dream_start(batch)
    torch.testing.assert_close(start["policy/h"], state["h"], atol=1e-5, rtol=1e-4)


def test_dream_exceeds_context_and_is_repeatable(workflow):
    batch = make_batch(2, 2)
    state = workflow.dream_start(batch)
    assert all(len(value) == 2 for value in state.values())
    assert workflow.can_dream and workflow.dream_flush == 20
    shapes = {key: value.shape for key, value in state.items()}
    for t in range(workflow.world_model.blocks + 3):
        action, state = workflow.dream_act(state, ActMode(generator=torch.Generator().manual_seed(t)))
        kept = copy_state(state)
        state, dreamed = workflow.dream_step(state, action, generator=torch.Generator().manual_seed(t))
        again, _ = workflow.dream_step(kept, action, generator=torch.Generator().manual_seed(t))
        assert all(torch.equal(state[key], again[key]) for key in state)
        assert {key: value.shape for key, value in state.items()} == shapes
        assert dreamed.obs["image"].dtype == torch.uint8 and dreamed.obs["image"].shape == (2, 3, 16, 16)
        assert dreamed.reward.shape == (2,) and bool(
            ((dreamed.terminated >= 0) & (dreamed.terminated <= 1)).all()
        )
    assert bool((state["position"] <= workflow.world_model.length).all())
    dream = workflow.imagine(horizon=3, batch=batch, decode=True, generator=torch.Generator().manual_seed(0))
    assert dream.obs["image"].shape == (2, 4, 3, 16, 16) and dream.reward.shape == dream.cont.shape == (2, 4)


def test_report_is_pure_and_reproducible(workflow):
    batch = hook_batch(workflow, "update_world_model")
    before = weights(workflow)
    first, second = workflow.report(batch), workflow.report(batch)
    assert not changed_parts(before, weights(workflow))
    assert first.keys() == second.keys()
    assert (
        first["reconstruction/image"].shape == (3, 32, 32)
        and first["reconstruction/image"].dtype == torch.uint8
    )
    assert first["imagination/image"].shape == (21, 3, 16, 32)
    for key, value in first.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(second[key]))


# ---------------------------------------------------------------- state and configs


def test_slow_copy_is_updated_and_saved():
    workflow = make_workflow("delta_iris")
    for seed in range(3):
        run_hook(workflow, "update_actor_critic", seed=seed)
    slow = dict(workflow.slow.network.named_buffers())
    moved = [not torch.equal(slow[name], p) for name, p in workflow.actor_critic.named_parameters()]
    assert any(moved)
    other = make_workflow("delta_iris")
    other.set_state(workflow.get_state())
    for name, value in other.slow.network.named_buffers():
        assert torch.equal(value, slow[name])
    assert make_workflow("iris").slow is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algorithm.size.tokens=9"], "tokens is 9, but the tokenizer has 4"),
        (["algorithm.blocks=2"], "blocks"),
        (["algorithm.world_model.batch_length=2", "algorithm.blocks=2"], "decrease it or increase"),
        (["algorithm.imagination_horizon=1"], "at least 2"),
        (["algorithm.tokenizer.pad=middle"], "'middle'"),
        (["+algorithm.tokenizer.bach_size=3"], "Did you mean 'batch_size'"),
        (["algorithm.size.levels=6"], "cannot be downsampled"),
    ],
)
def test_config_errors(words, message):
    with pytest.raises(ConfigError, match=message):
        make_workflow("iris", *words)


def test_revival_updates_of_ema():
    """IRIS has no such key, so its value is the one of Δ-IRIS; an own key is used."""
    word = "components/quantizer@components.tokenizer.quantizer=ema"
    for words, updates in (([word], 400), ([word, "+algorithm.revive_updates=7"], 7)):
        assert composed("iris", *words).components.tokenizer.quantizer.revive_updates == updates
    assert composed("delta_iris").components.tokenizer.quantizer.revive_updates == 400


@pytest.mark.parametrize("experiment", ["iris_catch", "delta_iris_catch"])
def test_perceptual_loss_needs_large_images(experiment):
    words = ["+components/reconstruction_loss@components.tokenizer.losses.vgg=perceptual"]
    config = compose_config([f"experiment={experiment}", *words])
    small = replace(SPEC, observations={"image": replace(SPEC.observations["image"], shape=(3, 8, 8))})
    message = (
        r"^components\.tokenizer\.losses\.vgg \(Perceptual\) needs images of at least 16×16 pixels, not 8×8: "
    )
    with pytest.raises(ConfigError, match=message):
        build_parts(resolve_config(config, small), small, torch.device("cpu"))


@pytest.mark.parametrize(
    "words",
    [
        ["components/backbone@components.world_model.backbone=gru"],
        ["components/quantizer@components.tokenizer.quantizer=fsq", "algorithm.size.codes=512"],
        ["components/quantizer@components.tokenizer.quantizer=ema"],
        ["+components/reconstruction_loss@components.tokenizer.losses.worst=worst_pixel"],
        [
            "+components/reconstruction_loss@components.tokenizer.losses.perceptual=perceptual",
            "components.tokenizer.losses.perceptual.width=2",
        ],
    ],
)
def test_parts_are_swappable_by_config(words):
    workflow = make_workflow("iris", *words)
    run = partial(run_hook, workflow)
    for hook in HOOKS:
        assert torch.isfinite(run(hook).metrics["loss"])
