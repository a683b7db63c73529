"""Diffusion Policy and behaviour cloning: windows, toy, acting in chunks, expert, resume, bad settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

import rl_lab
from rl_lab.config.compose import compose_config
from rl_lab.errors import ConfigError
from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.records import ActionSpec, ActMode, Batch, Spec
from rl_lab.training import resume
from rl_lab.workflows.imitation import HISTORY, average_decay, cosine_schedule
from tests.loading import ROOT
from tests.same_run import assert_same_run
from tests.workflows.imitation_case import (
    PIXELS,
    VECTOR,
    built,
    demonstrations,
    measured,
    observations,
    trained,
)

ALGORITHMS = ("diffusion_policy", "behaviour_cloning")


def test_schedules_by_hand():
    rates = [cosine_schedule(count, 4, 8) for count in (0, 1, 4, 6, 8, 9)]
    assert rates == pytest.approx([0.0, 0.25, 1.0, 0.5, 0.0, 0.0])
    decays = [average_decay(count, 0.75, 0.9999) for count in (0, 1, 2, 11, 10**9)]
    assert decays == pytest.approx([0.0, 0.0, 1 - 2**-0.75, 1 - 11**-0.75, 0.9999])


# ---------------------------------------------------------------- windows


def windows_of(start: int, shift: float, steps: int = 12) -> Any:
    """The window that begins at a row of an episode whose step k has the observation and the action k."""
    workflow = built("diffusion_policy")  # horizon 8, 2 observations, 4 actions
    workflow.normalizer.measure(torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))
    rows = torch.arange(start, start + 9, dtype=torch.float32)[None, :, None]
    inside = rows[..., 0] <= steps
    columns = {
        "obs/vector": rows.expand(1, 9, 3) * inside[..., None],
        "action": rows.expand(1, 9, 2) * (rows < steps) / 100,
        "terminated": torch.zeros(1, 9, dtype=torch.bool),
        "truncated": rows[..., 0] == steps,
        "is_first": rows[..., 0] == 0,
    }
    batch = Batch(columns, mask=inside)
    workflow.settings.__dict__["batch_size"] = 1
    windows = workflow._windows(batch, torch.tensor([shift]))
    return windows.obs["vector"][:, 0].tolist(), (windows.action[0, :, 0] * 100).round().int().tolist()


def test_window_inside_an_episode():
    assert windows_of(2, 0.9) == ([2, 3], [2, 3, 4, 5, 6, 7, 8, 9])


def test_window_before_the_episode_repeats_its_first_step():
    assert windows_of(0, 0.4) == ([0, 1], [0, 1, 2, 3, 4, 5, 6, 7])
    assert windows_of(0, 0.6) == ([0, 0], [0, 0, 1, 2, 3, 4, 5, 6])


def test_window_beyond_the_episode_repeats_its_last_action():
    """The last row has an observation and no action."""
    assert windows_of(7, 0.9) == ([7, 8], [7, 8, 9, 10, 11, 11, 11, 11])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sampled_windows_are_those_of_the_original(algorithm: str):
    """Starts from -(To - 1) to K - T + Ta - 1 (real-stanford/diffusion_policy @ 5ba07ac, common/sampler.py), equally likely."""
    steps, buffer = 12, demonstrations(episodes=3, steps=12)
    workflow = built(algorithm, batch_size=4000)
    s, hook = workflow.settings, workflow.hooks()["update"]
    batch = buffer.sample(hook.batch, generator=torch.Generator().manual_seed(0))
    start = batch.index.position.numpy() % (steps + 1)
    last = steps - s.horizon + s.action_horizon - 1
    assert sorted(set(start.tolist())) == list(range(last + 1))
    shift = (np.random.default_rng(0).random(4000) * s.observation_horizon).astype(int) * (start == 0)
    weight = np.where(start == 0, s.observation_horizon, 1.0)
    share = np.bincount(start - shift + s.observation_horizon - 1, weight) / weight.sum()
    np.testing.assert_allclose(share, 1 / len(share), atol=0.02)


# ---------------------------------------------------------------- learning


def acted(workflow: Any, count: int, spec: Spec = VECTOR, **mode: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    first = torch.ones(count, dtype=torch.bool)
    state = workflow.initial_policy_state(count)
    return workflow.act(observations(spec, count), state, first, ActMode(generator=generator, **mode))[0]


def test_diffusion_policy_learns_both_answers():
    """Demonstrations repeat (±0.5, 0.25): a sampled action is near one of the two, and both occur."""
    buffer = demonstrations()
    steps = {"denoising_steps": 20, "sampling_steps": 20, "sampler": "ddpm"}
    workflow = measured(built("diffusion_policy", updates=300, learning_rate=1e-2, **steps), buffer)
    losses = trained(workflow, buffer, 300)
    assert np.mean(losses[-30:]) < 0.2 * np.mean(losses[:10])
    action = acted(workflow, 64)
    assert abs(float(action[:, 1].mean()) - 0.25) < 0.1 and float(action[:, 1].std()) < 0.2
    assert float((action[:, 0].abs() - 0.5).abs().median()) < 0.25
    assert 12 < int((action[:, 0] > 0).sum()) < 52


def test_regression_averages_the_answers_and_a_mixture_does_not():
    buffer = demonstrations()
    mlp = measured(built("behaviour_cloning", updates=200), buffer)
    trained(mlp, buffer, 200)
    assert float(acted(mlp, 64)[:, 0].abs().mean()) < 0.3
    mixture = measured(
        built("behaviour_cloning", VECTOR, "controller@controllers.policy=mixture_policy", updates=200),
        buffer,
    )
    trained(mixture, buffer, 200)
    action = acted(mixture, 64, sample=False)[:, 0]
    assert float((action.abs() - 0.5).abs().median()) < 0.1
    assert 8 < int((action > 0).sum()) < 56


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ("diffusion_policy", []),
        ("diffusion_policy", ["algorithm=diffusion_policy_transformer"]),
        ("behaviour_cloning", ["controller@controllers.policy=mixture_policy"]),
    ],
)
def test_images_and_vectors_train_every_part(algorithm: str, words: list[str]):
    buffer = demonstrations(PIXELS, episodes=4)
    small = (
        ["controllers.policy.layers=2", "controllers.policy.width=16"] if "transformer" in str(words) else []
    )
    sampler = {"sampler": "ddpm"} if algorithm == "diffusion_policy" else {}
    workflow = measured(built(algorithm, PIXELS, *words, *small, batch_size=4, updates=3, **sampler), buffer)
    weights = {
        f"{part}.{name}": p
        for part, module in (("encoder", workflow.encoder), ("policy", workflow.policy))
        for name, p in module.named_parameters()
    }
    before = {name: p.detach().clone() for name, p in weights.items()}
    assert np.isfinite(trained(workflow, buffer, 3)).all()
    # A softmax does not depend on a constant that is added to all of its inputs.
    same = {name.split(".", 1)[1] for name, p in weights.items() if torch.equal(p, before[name])}
    assert same <= {"cameras.image.online.keypoints.to_maps.bias"}
    assert acted(workflow, 3, PIXELS).abs().max() <= 1.0


def test_the_transformer_is_one_word():
    """Its network and its optimizer as published; all else is that of the experiment."""
    optimizer = {"betas": [0.9, 0.95], "weight_decay": 0.1, "warmup_updates": 1000}
    data = "buffers.demonstrations.path=demos"
    for name in ("lunarlander", "pusht_pixels", "pusht_state"):
        words = [f"experiment=diffusion_policy_{name}", *([data] if "pusht" in name else [])]
        plain, chosen = (
            OmegaConf.to_container(compose_config([*words, *more]))
            for more in ([], ["algorithm=diffusion_policy_transformer"])
        )
        model = OmegaConf.create(chosen).optimizers.model
        assert (model.betas, model.weight_decay) == ([0.9, 0.95], 0.1)
        policy = chosen["controllers"].pop("policy")
        assert policy["_target_"].endswith(".TransformerDenoiser")
        assert [policy[key] for key in ("width", "layers", "heads", "dropout")] == [256, 8, 4, 0.01]
        assert plain["controllers"].pop("policy")["_target_"].endswith(".UNetDenoiser")
        for key, value in optimizer.items():
            assert chosen["algorithm"].pop(key) == value != plain["algorithm"].pop(key)
        assert chosen == plain
    preset = compose_config(["experiment=diffusion_policy_transformer_pusht_state", data])
    word = compose_config([*words, "algorithm=diffusion_policy_transformer"])
    assert preset.experiment.name == "diffusion_policy_transformer_pusht_state"
    word.experiment.name = preset.experiment.name
    assert preset == word
    page = (ROOT / "docs" / "algorithms" / "diffusion_policy.md").read_text()
    authors = page.partition("| the authors' transformer from pixels | also `")[2].partition("`")[0].split()
    words = ["experiment=diffusion_policy_pusht_pixels", data, "algorithm=diffusion_policy_transformer"]
    pixels = compose_config([*words, *authors])
    assert (pixels.algorithm.horizon, pixels.controllers.policy.dropout) == (10, 0.3)


# ---------------------------------------------------------------- acting


def test_plan_is_executed_and_renewed_for_those_that_need_it():
    workflow = measured(built("diffusion_policy"), demonstrations())
    obs, state = observations(VECTOR, 3), workflow.initial_policy_state(3)
    first = torch.ones(3, dtype=torch.bool)
    mode = ActMode(generator=torch.Generator().manual_seed(0))
    planned = []
    for step in range(6):
        if step == 2:  # the second environment starts an episode
            first = torch.tensor([False, True, False])
        planned.append(workflow.act_variant(state, first))
        before = state
        action, state, _ = workflow.act(obs, state, first, mode)
        used = workflow.settings.action_horizon - 1 - state["left"]
        torch.testing.assert_close(action, state["plan"][torch.arange(3), used])
        if step == 2:
            assert torch.equal(before["plan"][[0, 2]], state["plan"][[0, 2]])
            assert not torch.equal(before["plan"][1], state["plan"][1])
        first = torch.zeros(3, dtype=torch.bool)
    # Three plan; then the second alone; after 4 actions the first and third (a power of two: 2).
    assert planned == [3, 0, 1, 0, 2, 0]


def test_executed_actions_begin_at_the_last_observation(monkeypatch: pytest.MonkeyPatch):
    """A plan begins at the first of To observations, so the actions executed are To - 1 … To - 2 + Ta, as published."""
    workflow = measured(built("diffusion_policy"), demonstrations())
    s = workflow.settings
    assert s.observation_horizon == 2 and s.horizon > s.action_horizon + 1
    plan = torch.linspace(-0.9, 0.9, s.horizon)[None, :, None].expand(1, -1, workflow.spec.action.size)
    monkeypatch.setattr(workflow, "_plan", lambda features, mode, needed: plan)
    expected = workflow.normalizer.inverse(plan)[0, 1 : 1 + s.action_horizon]
    obs, state = observations(VECTOR, 1), workflow.initial_policy_state(1)
    for step in range(s.action_horizon):
        action, state, _ = workflow.act(obs, state, torch.tensor([step == 0]), ActMode())
        torch.testing.assert_close(action[0], expected[step])


def test_history_holds_the_last_observations():
    workflow = measured(built("diffusion_policy"), demonstrations())
    state = workflow.initial_policy_state(1)
    mode = ActMode(generator=torch.Generator().manual_seed(0))
    seen = []
    for step in range(3):
        obs = {"vector": torch.full((1, 3), float(step))}
        _, state, _ = workflow.act(obs, state, torch.tensor([step == 0]), mode)
        seen.append(state[HISTORY + "vector"][0, :, 0].tolist())
    assert seen == [[0, 0], [0, 1], [1, 2]]


@pytest.mark.parametrize("sampler", ["ddpm", "ddim"])
def test_same_seed_same_action(sampler: str):
    workflow = measured(built("diffusion_policy", sampler=sampler), demonstrations())
    assert torch.equal(acted(workflow, 4), acted(workflow, 4))
    other = ActMode(generator=torch.Generator().manual_seed(6))
    state = workflow.initial_policy_state(4)
    action, _, _ = workflow.act(observations(VECTOR, 4), state, torch.ones(4, dtype=torch.bool), other)
    assert not torch.equal(action, acted(workflow, 4))


# ---------------------------------------------------------------- runs


QUIET = ["debug=tiny", "logging.progress=off", "logging.tensorboard=false"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("stop", ["demonstrate", "train"])
def test_resumed_run_is_exact(algorithm: str, stop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("Box2D", reason="extra: box2d")
    words = [f"experiment={algorithm}_lunarlander", *QUIET, "training.evaluate.every_updates=3"]
    rl_lab.train(None, [*words, f"run_dir={tmp_path / 'whole'}"])
    do = Orchestrator.run_action

    def do_and_stop(self: Orchestrator, action: str, phase: Any) -> None:
        do(self, action, phase)
        totals = self.scheduler.totals
        self.interrupted = totals["env_steps"] >= 30 if stop == "demonstrate" else totals["updates"] >= 2

    with monkeypatch.context() as patch:
        patch.setattr(Orchestrator, "run_action", do_and_stop)
        half = rl_lab.train(None, [*words, f"run_dir={tmp_path / 'half'}"])
    assert half.interrupted
    resume(tmp_path / "half")
    assert_same_run(tmp_path / "whole", tmp_path / "half", ("demonstrations",))


def test_loaded_agent_acts_like_the_run(tmp_path: Path):
    """The limits and the averaged weights are loaded with the weights."""
    pytest.importorskip("Box2D", reason="extra: box2d")
    run = rl_lab.train("diffusion_policy_lunarlander", [*QUIET, f"run_dir={tmp_path / 'run'}"])
    agent = rl_lab.load_agent(run.path)
    assert agent.workflow.normalizer.measured and agent.workflow.encoder.measured
    action = agent.act(np.zeros(8, np.float32))
    assert action.shape == (2,) and np.abs(action).max() <= 1
    agent.reset()
    np.testing.assert_array_equal(agent.act(np.zeros(8, np.float32)), action)


# ---------------------------------------------------------------- errors


def test_unmeasured_data_is_refused():
    workflow = built("diffusion_policy")
    with pytest.raises(ConfigError, match="the hook `measure` must run before `update`"):
        trained(workflow, demonstrations(), 1)


def test_discrete_actions_are_refused():
    spec = Spec("toy", VECTOR.observations, ActionSpec("discrete", (), (3,)))
    with pytest.raises(ConfigError, match="needs continuous actions, not the discrete ones of toy"):
        built("diffusion_policy", spec)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"horizon": 4}, "algorithm.horizon is 4: it must be at least 5"),
        ({"sampling_steps": 101}, "algorithm.sampling_steps is 101"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, int], message: str):
    with pytest.raises(ConfigError, match=message):
        built("diffusion_policy", **changes)


def test_expert_of_another_environment_is_refused(tmp_path: Path):
    words = ["experiment=diffusion_policy_lunarlander", "environment=pendulum", *QUIET]
    with pytest.raises(ConfigError, match="LunarLanderExpert acts in LunarLander-v3 only"):
        rl_lab.train(None, [*words, f"run_dir={tmp_path / 'run'}"])
