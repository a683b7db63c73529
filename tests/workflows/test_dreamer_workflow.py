import pytest
import torch
from omegaconf import OmegaConf

from rl_lab.config.checks import CONFIG_FOLDER
from rl_lab.environments.world_model_env import ImaginedEpisodes, WorldModelEnv
from rl_lab.errors import ConfigError
from rl_lab.records import ActMode, Batch, Spec
from tests.workflows.dreamer_case import (
    CONTINUOUS,
    DISCRETE,
    MULTI,
    PARTS,
    changed_parts,
    dreamer_config,
    image_spec,
    make_batch,
    make_dreamer,
    run_hook,
    vector_spec,
    weights,
)

WORLD_MODEL = {"encoder", "rssm", "decoder", "reward_head", "continue_head"}


@pytest.mark.parametrize("action", [DISCRETE, MULTI, CONTINUOUS], ids=lambda a: a.kind)
def test_fused_update_trains_every_part(action):
    workflow = make_dreamer(vector_spec(action))
    before = weights(workflow)
    result = run_hook(workflow, "update")
    assert changed_parts(before, weights(workflow)) == set(PARTS)
    for name, value in result.metrics.items():
        assert value.ndim == 0 and not value.requires_grad and torch.isfinite(value), name
    for part in PARTS:
        assert result.metrics[f"grad_norm/{part}"] > 0
    for name in ("loss/reward", "loss/reconstruction/vector", "kl", "prior_entropy", "controller/loss/actor"):
        assert name in result.metrics


def test_gradients_reach_every_tensor():
    workflow = make_dreamer()
    run_hook(workflow, "update")
    run_hook(
        workflow, "update"
    )  # layers before zero-initialized ones get gradients from the second update on
    for part, parameters in workflow.parts.items():
        for parameter in parameters:
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, (part, parameter.shape)


def test_images_and_batch_of_one():
    workflow = make_dreamer(image_spec(), algorithm__batch_size=1)
    before = weights(workflow)
    result = run_hook(workflow, "update")
    assert changed_parts(before, weights(workflow)) == set(PARTS)
    assert result.write_back["deter"].shape == (1, 5, 16)


def test_separate_hooks_train_their_half_only():
    workflow = make_dreamer()
    before = weights(workflow)
    result = run_hook(workflow, "update_world_model")
    assert changed_parts(before, weights(workflow)) == WORLD_MODEL
    assert set(result.write_back) == {"deter", "stoch"}
    before = weights(workflow)
    result = run_hook(workflow, "update_controller")
    assert changed_parts(before, weights(workflow)) == {"actor", "critic"}
    assert result.write_back is None


def test_separate_hooks_equal_fused_losses():
    fused = run_hook(make_dreamer(), "update").metrics
    model = run_hook(make_dreamer(), "update_world_model").metrics
    controller = run_hook(make_dreamer(), "update_controller").metrics
    for name, value in fused.items():
        if name.startswith("loss/") or name in ("kl", "prior_entropy"):
            assert torch.allclose(value, model[name]), name
        elif name.startswith("controller/"):
            assert torch.allclose(value, controller[name]), name


def test_separate_optimizers():
    optimizers = {
        name: {"_target_": "torch.optim.Adam", "_partial_": True, "lr": 1e-3, "modules": modules}
        for name, modules in {
            "world_model": sorted(WORLD_MODEL),
            "actor": ["actor"],
            "critic": ["critic"],
        }.items()
    }
    workflow = make_dreamer(optimizers=optimizers)
    before = weights(workflow)
    run_hook(workflow, "update_controller")
    assert changed_parts(before, weights(workflow)) == {"actor", "critic"}
    run_hook(workflow, "update")
    assert changed_parts(before, weights(workflow)) == set(PARTS)


def test_step_is_a_pure_function_of_its_inputs():
    results = [run_hook(make_dreamer(), "update").metrics for _ in range(2)]
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name
    other = run_hook(make_dreamer(), "update", seed=1).metrics
    assert not torch.equal(other["loss"], results[0]["loss"])


def test_step_does_not_write_into_its_batch():
    workflow = make_dreamer()
    batch = make_batch(workflow)
    copy = {key: value.clone() for key, value in batch.columns.items()}
    run_hook(workflow, "update", batch)
    for key, value in copy.items():
        assert torch.equal(batch[key], value)


@pytest.mark.parametrize("hook", ["update", "update_world_model"])
def test_non_finite_input_masks_update(hook):
    workflow = make_dreamer()
    run_hook(workflow, hook)
    before = weights(workflow)
    state = {k: v.clone() for k, v in workflow.optimizers[0].state[workflow.parts["rssm"][0]].items()}
    batch = make_batch(workflow, seed=1)
    batch.columns["obs/vector"][0, 2, 0] = float("nan")
    result = run_hook(workflow, hook, batch)
    assert result.metrics["nonfinite"].item() == 1.0
    changed = changed_parts(before, weights(workflow))
    assert changed <= {"critic"}  # whose slow copy may still move
    for key, value in weights(workflow)["critic"].items():
        assert torch.isfinite(value).all()
        assert "slow" in key or torch.equal(value, before["critic"][key])
    for key, value in workflow.optimizers[0].state[workflow.parts["rssm"][0]].items():
        assert torch.equal(value, state[key])
    assert torch.equal(result.write_back["deter"], batch["deter"][:, 1:])
    assert workflow.guard.report() == {"updates": 2, "masked": 1, "first_masked": 1, "last_masked": 1}
    assert torch.isfinite(run_hook(workflow, hook).metrics["loss"])


def test_slow_critic_follows():
    workflow = make_dreamer(algorithm__slow_critic_rate=0.5)
    slow = workflow.critic.slow.network.mlp.out.weight
    fast = workflow.critic.head.mlp.out.weight
    assert torch.equal(slow, torch.zeros_like(slow))
    run_hook(workflow, "update")
    assert torch.allclose(slow, fast * 0.5)


def test_phases_set_entropy_and_learning_rate():
    workflow = make_dreamer()
    scalars = workflow.hooks()["update"].scalars
    assert scalars({}, {}) == {"entropy": pytest.approx(3e-4), "learning_rate_scale": 1.0}
    phase = {"set": {"algorithm.entropy": 0.5, "algorithm.learning_rate": 1e-3}}
    assert scalars(phase, {}) == {"entropy": 0.5, "learning_rate_scale": pytest.approx(0.1)}
    run_hook(workflow, "update", phase=phase)
    assert workflow.optimizers[0].param_groups[0]["lr"].item() == pytest.approx(1e-3)


@pytest.mark.parametrize("name", ["n_step", "discounted"])
def test_return_computer_is_swappable_by_config(name):
    node = OmegaConf.load(CONFIG_FOLDER / f"components/return_computer/{name}.yaml")
    usual, other = make_dreamer(), make_dreamer(components__return_computer=node)
    for workflow in (usual, other):
        workflow.critic.head.mlp.out.weight.data.fill_(0.1).mul_(torch.arange(41.0)[:, None] / 41)
    returns = [run_hook(w, "update").metrics["controller/return_mean"] for w in (usual, other)]
    assert torch.isfinite(returns[1])
    assert not torch.equal(*returns)


def test_overfits_short_sequence():
    workflow = make_dreamer(algorithm__learning_rate=3e-3)
    batch = make_batch(workflow)
    first = run_hook(workflow, "update_world_model", batch).metrics
    for step in range(150):
        last = run_hook(workflow, "update_world_model", batch, seed=step).metrics
    assert last["loss/reconstruction/vector"] < 0.5 * first["loss/reconstruction/vector"]
    assert last["loss/reward"] < 0.5 * first["loss/reward"]
    assert last["loss/continue"] < 0.5 * first["loss/continue"]


def test_actor_learns_imagined_reward():
    """The policy learns action 0 if only this action is rewarded."""
    workflow = make_dreamer(algorithm__learning_rate=3e-3, algorithm__batch_size=8)
    torch.manual_seed(0)
    batch = make_batch(workflow)
    for flag in ("terminated", "truncated", "is_first"):
        batch.columns[flag].zero_()
    batch.columns["reward"][:, 1:] = (batch["action"][:, :-1] == 0).float()
    # The next observation depends on the action, as in an environment.
    batch.columns["obs/vector"][:, 1:, 0] = 2.0 * batch["reward"][:, 1:] - 1.0
    for step in range(250):
        run_hook(workflow, "update", batch, seed=step)
    states, _ = workflow.infer(batch, torch.rand(8, 5, 3))
    chosen = workflow.actor.act(workflow.rssm.feature(states).flatten(0, 1), ActMode(sample=False))
    assert (chosen == 0).float().mean() > 0.9


@pytest.mark.parametrize("action", [DISCRETE, MULTI, CONTINUOUS], ids=lambda a: a.kind)
def test_act_and_imagine(action):
    workflow = make_dreamer(vector_spec(action))
    state = workflow.initial_policy_state(4)
    is_first = torch.ones(4, dtype=torch.bool)
    chosen, state, _extras = workflow.act({"vector": torch.randn(4, 4)}, state, is_first, ActMode())
    assert chosen.shape == (4, *action.shape)
    assert torch.equal(state["action"], chosen)
    assert {key: value.shape for key, value in state.items()} == {
        key: value.shape for key, value in workflow.initial_policy_state(4).items()
    }
    generator = torch.Generator().manual_seed(0)
    dream = workflow.imagine(horizon=3, batch=make_batch(workflow), decode=True, generator=generator)
    assert dream.state["deter"].shape == (2, 4, 16)
    assert dream.action.shape == (2, 3, *action.shape)
    assert dream.reward.shape == dream.cont.shape == (2, 4)
    assert dream.obs["vector"].shape == (2, 4, 4)
    start = {key: value[:, 0] for key, value in dream.state.items()}
    repeats = [
        workflow.imagine(horizon=2, state=start, generator=torch.Generator().manual_seed(1)).reward
        for _ in range(2)
    ]
    assert torch.equal(*repeats)


def test_acting_resets_at_is_first():
    workflow = make_dreamer(algorithm__size__classes=1)
    obs, mode = {"vector": torch.randn(2, 4)}, ActMode(sample=False)
    fresh = workflow.initial_policy_state(2)
    used = {
        key: torch.randn(value.shape) if value.is_floating_point() else value + 1
        for key, value in fresh.items()
    }
    states = [workflow.act(obs, s, torch.tensor([True, False]), mode)[1]["deter"] for s in (fresh, used)]
    assert torch.equal(states[0][0], states[1][0])
    assert not torch.equal(states[0][1], states[1][1])


def test_report_of_vectors_and_images():
    workflow = make_dreamer()
    batch = make_batch(workflow, rows=9)
    report = workflow.report(batch)
    assert set(report) == {"open_loop_error/vector", "open_loop/vector", "imagination_return"}
    assert report["open_loop_error/vector"] > 0
    again = workflow.report(batch)
    picture = report.pop("open_loop/vector")
    assert torch.equal(again.pop("open_loop/vector"), picture) and again == report
    assert picture.dtype == torch.uint8 and picture.shape[0] == 3
    grey, red = (torch.tensor(color).view(3, 1, 1) for color in ([0x9A, 0xA0, 0xA6], [0xD7, 0x30, 0x27]))
    assert (picture == grey).all(0).any() and (picture == red).all(0).any(), "truth and prediction are drawn"
    workflow = make_dreamer(image_spec(size=32))
    report = workflow.report(make_batch(workflow, rows=9))
    video = report["open_loop/image"]
    assert video.shape == (8, 3, 2 * 36, 3 * 36)
    assert video.dtype == torch.uint8
    # The border of the model's panel is green while it observes, red while it predicts.
    assert video[0, :, 0, 36].tolist() == [0, 255, 0]
    assert video[-1, :, 0, 36].tolist() == [255, 0, 0]
    # Two rollouts side by side: the last observed state and eight imagined ones.
    assert report["imagination/image"].shape == (9, 3, 32, 2 * 32)


def test_workflow_state():
    workflow = make_dreamer()
    run_hook(workflow, "update")
    other = make_dreamer()
    other.set_state(workflow.get_state())
    assert other.guard.report()["updates"] == 1


def test_resumed_training_is_exact():
    def train(workflow, steps, start=0):
        for step in range(start, start + steps):
            run_hook(workflow, "update", make_batch(workflow, seed=step), seed=step)

    full, half, resumed = make_dreamer(), make_dreamer(), make_dreamer()
    train(full, 4)
    train(half, 2)
    for name in PARTS:
        getattr(resumed, name).load_state_dict(getattr(half, name).state_dict())
    resumed.optimizers[0].load_state_dict(half.optimizers[0].state_dict())
    resumed.set_state(half.get_state())
    train(resumed, 2, start=2)
    assert changed_parts(weights(full), weights(resumed)) == set()


def test_config_errors():
    with pytest.raises(ConfigError, match=r"rssm\.embed_dim=8"):
        make_dreamer(components__rssm__embed_dim=5)
    with pytest.raises(ConfigError, match="replay_context"):
        make_dreamer(algorithm__replay_context=3)
    with pytest.raises(ConfigError, match="imagination_last"):
        make_dreamer(algorithm__imagination_last=9)
    with pytest.raises(ConfigError, match="Did you mean 'reward'"):
        make_dreamer(algorithm__loss_scales__rewards=1.0)
    with pytest.raises(ConfigError, match="precision"):
        make_dreamer(training__precision="float16")


def test_missing_settings_are_named():
    from rl_lab.workflows.dreamer.settings import DreamerSettings

    algorithm = dict(dreamer_config().algorithm)
    del algorithm["free_nats"]
    with pytest.raises(ConfigError, match=r"algorithm\.free_nats.*algorithm: dreamer"):
        DreamerSettings.from_config(algorithm)


def test_imagination_last():
    workflow = make_dreamer(algorithm__imagination_last=2)
    hook = workflow.hooks()["update"]
    assert hook.noise["prior"].shape == (3, 4, 3)
    assert torch.isfinite(run_hook(workflow, "update").metrics["loss"])


def test_bfloat16_close_to_float32():
    plain = run_hook(make_dreamer(), "update").metrics
    workflow = make_dreamer(training__precision="bfloat16")
    half = run_hook(workflow, "update").metrics
    for name in ("loss/reward", "loss/continue", "controller/loss/critic"):
        assert half[name].item() == pytest.approx(plain[name].item(), rel=0.02)
    assert all(p.dtype == torch.float32 for parameters in workflow.parts.values() for p in parameters)


def test_batch_mapping_is_enough():
    """A hook reads only the columns of the batch."""
    workflow = make_dreamer()
    batch = Batch(dict(make_batch(workflow).columns))
    assert torch.isfinite(run_hook(workflow, "update", batch).metrics["loss"])


def test_encoder_and_decoder_keys():
    spec = Spec("both", {**vector_spec().observations, **image_spec().observations}, DISCRETE)
    workflow = make_dreamer(spec, components__encoder__keys=["vector"], components__decoder__keys=["image"])
    assert workflow.rssm.embed_dim == workflow.encoder.embed_dim == 8
    metrics = run_hook(workflow, "update").metrics
    assert [name for name in metrics if "reconstruction" in name] == ["loss/reconstruction/image"]
    env = WorldModelEnv(workflow, spec, lambda count, generator: make_batch(workflow, size=count))
    obs, _ = env.reset(seed=0)
    assert set(obs) == {"image"} and env.observation_space.contains(obs)
    dreams = ImaginedEpisodes(workflow, spec, flush_every=1)
    assert set(dreams.start(make_batch(workflow))) == {"image"}
    with pytest.raises(ConfigError, match="only predicts image"):
        dreams.step(torch.zeros(2, dtype=torch.int64))
