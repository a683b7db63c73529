"""Plan2Explore: disagreement by hand, rewards that are not used while exploring, who acts, and phases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import rl_lab
from rl_lab.build import assemble_workflow
from rl_lab.components.dynamics.disagreement import LatentDisagreement
from rl_lab.components.nn.mlp import MLP
from rl_lab.config.checks import CONFIG_FOLDER
from rl_lab.config.compose import compose_config, resolve_config
from rl_lab.errors import ConfigError
from rl_lab.records import ActionSpec, ActMode
from rl_lab.training import resume
from rl_lab.workflows.dreamer.explore import ExploreWorkflow
from tests.config.test_kept_configs import leaves
from tests.same_run import assert_same_run, stopped_at
from tests.workflows.dreamer_case import (
    CONTINUOUS,
    DISCRETE,
    MULTI,
    draw_noise,
    make_batch,
    run_hook,
    vector_spec,
)

QUIET = ["debug=tiny", "logging.progress=off", "logging.tensorboard=false"]


def make(action: ActionSpec = DISCRETE, *words: str) -> ExploreWorkflow:
    spec = vector_spec(action)
    config = compose_config(
        ["experiment=plan2explore_dmc_vision", "debug=tiny", "experiment.device=cpu", *words]
    )
    torch.manual_seed(0)
    workflow = assemble_workflow(resolve_config(config, spec), spec, torch.device("cpu"))
    assert isinstance(workflow, ExploreWorkflow)
    return workflow


def constant_ensemble() -> LatentDisagreement:
    """Two members that predict (1, 2) and (3, 8) whatever they see."""
    ensemble = LatentDisagreement(spec=vector_spec(), features=4, target=2, units=3, layers=1, members=2)
    with torch.no_grad():
        for parameter in ensemble.parameters():
            parameter.zero_()
        ensemble.ensemble.bias_1.copy_(torch.tensor([[[1.0, 2.0]], [[3.0, 8.0]]]))
    return ensemble


def test_disagreement_by_hand():
    ensemble, feature, action = constant_ensemble(), torch.randn(1, 3, 4), torch.randn(1, 3, 3)
    # Deviations 1 and 3 of the two outputs: mean 2.
    assert ensemble.reward(feature, action).tolist() == [[2.0, 2.0, 2.0]]
    target, mask = torch.tensor([[[1.0, 2.0]]]).repeat(1, 3, 1), torch.tensor([[True, False, True]])
    target[0, 1] = 100.0  # of another episode: it does not count
    assert ensemble.loss(feature, action, target, mask).item() == (3 - 1) ** 2 + (8 - 2) ** 2
    assert ensemble.loss(feature, action, target, torch.zeros(1, 3, dtype=torch.bool)).item() == 0.0
    with pytest.raises(ConfigError, match="at least 2"):
        LatentDisagreement(spec=vector_spec(), features=4, target=2, units=3, members=1)


def test_members_start_different():
    ensemble = LatentDisagreement(spec=vector_spec(), features=4, target=2, units=8, members=3)
    assert ensemble.reward(torch.randn(5, 4), torch.randn(5, 3)).min() > 0.0


@pytest.mark.parametrize("action", [DISCRETE, MULTI, CONTINUOUS])
def test_rewards_of_rollouts_are_the_slow_loop(action: ActionSpec):
    """The reward of a state is the disagreement about it before it was reached; the first state has none."""
    w = make(action)
    noise, batch = draw_noise(w, "explore"), make_batch(w)
    with torch.no_grad():
        states, _ = w.infer(batch, noise["posterior"])
        rollouts = w._exploring_rollouts(states, noise, batch.terminated)
        for t in range(w.settings.imagination_horizon):
            encoded = w.rssm.action_encoder(rollouts.action[:, t])
            predictions = w.disagreement(rollouts.feature[:, t], encoded)
            mean = sum(predictions) / len(predictions)
            spread = (sum((p - mean).square() for p in predictions) / len(predictions)).sqrt().mean(-1)
            assert torch.allclose(rollouts.reward[:, t + 1], spread, atol=1e-6)
    assert rollouts.reward[:, 0].abs().max() == 0.0


def state_of(w: ExploreWorkflow) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": value.clone()
        for name in w.trained_parts
        for key, value in getattr(w, name).state_dict().items()
    }


def test_exploring_never_sees_a_reward():
    results = []
    for reward in (0.0, 100.0):
        w = make(DISCRETE, "optimizers.model.warmup=0")
        before, batch = state_of(w), make_batch(w)
        batch.reward[:] = reward
        run_hook(w, "explore", batch)
        results.append(state_of(w))
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])
    changed = {key.split(".")[0] for key in before if not torch.equal(before[key], results[0][key])}
    assert changed == {
        "encoder",
        "rssm",
        "decoder",
        "continue_head",
        "disagreement",
        "explorer",
        "explorer_critic",
    }


def test_task_update_leaves_the_explorer():
    w = make(DISCRETE, "optimizers.model.warmup=0")
    before = state_of(w)
    run_hook(w, "update")
    after = state_of(w)
    changed = {key.split(".")[0] for key in before if not torch.equal(before[key], after[key])}
    assert {"actor", "critic", "reward_head", "rssm"} <= changed
    assert not changed & {"disagreement", "explorer", "explorer_critic"}


def test_gradients_through_the_dynamics():
    w = make(CONTINUOUS, "controllers.actor.gradient=dynamics", "controllers.critic.out_scale=1.0")
    run_hook(w, "explore")
    assert max(float(p.grad.abs().max()) for p in w.parts["explorer"]) > 0.0


OWN = {
    "return_rate",
    "return_low",
    "return_high",
    "return_limit",
}  # of the explorer: the scale of its returns
# They belong to phases, optimizers and the tiny batch.
NOT_SWITCHES = {f"algorithm.{key}" for key in ("train_ratio", "clip_norms", "batch_size", "batch_length")}
SIZES = {"dreamer_v1": {"bins": 0, "classes": 1, "blocks": 1}, "dreamer_v2": {"bins": 0, "blocks": 1}}


def version_words(version: str) -> list[str]:
    """Overrides with the switches of a version; widths stay those of the experiment."""
    file: Any = OmegaConf.to_container(OmegaConf.load(CONFIG_FOLDER / f"algorithm/{version}.yaml"))
    known = compose_config(["experiment=plan2explore_dmc_vision"])
    words = [f"algorithm.size.{key}={value}" for key, value in SIZES.get(version, {}).items()]
    for section in ("algorithm", "components", "controllers"):
        for path, value in leaves(file[section], section):
            switch = not path.startswith("algorithm.size.") and path not in NOT_SWITCHES
            if switch and has(known, path) and "${" not in str(value):
                words.append(f"{path}={'null' if value is None else value}")
    return words


def has(config: Any, path: str) -> bool:
    node = OmegaConf.select(config, path.rpartition(".")[0])
    return OmegaConf.is_dict(node) and path.rpartition(".")[2] in node


def styles(part: torch.nn.Module) -> list[Any]:
    return [module.style for module in part.modules() if isinstance(module, MLP)]


@pytest.mark.parametrize("version", ["dreamer", "dreamer_2023", "dreamer_v2", "dreamer_v1"])
def test_explorer_is_built_like_the_actor_of_every_version(version: str):
    w = make(CONTINUOUS, *(version_words(version) if version != "dreamer" else ()))
    norm, act = {"dreamer": ("rms", "silu"), "dreamer_2023": ("layer", "silu")}.get(version, ("none", "elu"))
    for one, other in ((w.actor, w.explorer), (w.critic, w.explorer_critic)):
        assert {key: value.shape for key, value in one.state_dict().items()} == {
            key: value.shape for key, value in other.state_dict().items()
        }
        assert repr(one) == repr(other) and styles(one) == styles(other) != []
        assert {(style.norm, style.act) for style in styles(other)} == {(norm, act)}
    assert (w.actor.gradient, w.actor.noise) == (w.explorer.gradient, w.explorer.noise)
    assert type(w.actor.policy) is type(w.explorer.policy)
    numbers = [
        {k: v for k, v in vars(part.policy).items() if isinstance(v, float)} for part in (w.actor, w.explorer)
    ]
    assert numbers[0] == numbers[1] != {}
    for key in ("slow_targets", "slow_weight"):
        assert getattr(w.critic, key) == getattr(w.explorer_critic, key)
    assert w.critic.slow.every == w.explorer_critic.slow.every
    outputs = [actor.mlp.out.weight.detach().std().item() for actor in (w.actor, w.explorer)]
    assert outputs[0] == pytest.approx(outputs[1], rel=0.5)
    result = run_hook(w, "explore")
    assert all(torch.isfinite(value).all() for value in result.metrics.values())


def test_explorer_gets_every_key_of_the_actor():
    """Interpolations: a key of the actor or the critic that is added later must be added here too."""
    file = OmegaConf.to_container(OmegaConf.load(CONFIG_FOLDER / "algorithm/plan2explore.yaml"))[
        "controllers"
    ]
    of_task = OmegaConf.load(CONFIG_FOLDER / "algorithm/dreamer.yaml").controllers
    for name, task in (("explorer", "actor"), ("explorer_critic", "critic")):
        assert file[name].keys() == of_task[task].keys()
        for key in file[name].keys() - OWN - {"_target_"}:
            assert file[name][key] == f"${{controllers.{task}.{key}}}"


def test_who_acts():
    w = make()
    with torch.no_grad():
        for actor, choice in ((w.actor, 0), (w.explorer, 2)):
            actor.mlp.out.weight.zero_()
            actor.mlp.out.bias.copy_(100.0 * torch.nn.functional.one_hot(torch.tensor(choice), 3))
    obs, first = {"vector": torch.zeros(4, 4)}, torch.ones(4, dtype=torch.bool)
    for policy, expected in (("agent", 0), ("explore", 2)):
        mode = w.collect_mode({"collect": {"policy": policy}})
        action, _, _ = w.act(obs, w.initial_policy_state(4), first, mode)
        assert action.tolist() == [expected] * 4
    action, _, _ = w.act(obs, w.initial_policy_state(4), first, ActMode(sample=False))  # evaluation
    assert action.tolist() == [0] * 4
    assert w.collect_mode({"collect": {"policy": "random"}}).epsilon == 1.0
    with pytest.raises(ConfigError, match="collect: policy is 'explorer'"):
        w.collect_mode({"collect": {"policy": "explorer"}})


@pytest.mark.parametrize("policy", ["explore", "random"])
def test_phases(policy: str, tmp_path: Path):
    words = [
        "environment=dummy_discrete",
        f"algorithm.explore.policy={policy}",
        f"run_dir={tmp_path / 'run'}",
    ]
    run = rl_lab.train("plan2explore_dmc_vision", [*QUIET, *words])
    calls: dict[str, Any] = run.counters
    assert calls["env_steps"] >= 100 and calls["updates"] > 4


def test_resumed_run_equals_uninterrupted_run(tmp_path: Path, monkeypatch):
    words = ["experiment=plan2explore_dmc_vision", "environment=dummy_continuous", *QUIET]
    rl_lab.train(None, [*words, f"run_dir={tmp_path / 'whole'}"])
    with stopped_at(monkeypatch):
        half = rl_lab.train(None, [*words, f"run_dir={tmp_path / 'half'}"])
    assert half.interrupted
    resume(tmp_path / "half")
    assert_same_run(tmp_path / "whole", tmp_path / "half")
