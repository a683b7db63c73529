"""Every experiment has the values that it had when its parts were composed from one file each (042ffd0)."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf

from rl_lab.config.checks import CONFIG_FOLDER
from rl_lab.config.choices import choices
from rl_lab.config.compose import compose_config, known_choices

DUMP = Path(__file__).parents[1] / "fixtures" / "configs_042ffd0" / "resolved.json.xz"
ROOT_CONFIG = CONFIG_FOLDER / "config.yaml"  # new keys of all runs stand there
DIMS = {"observation": 4, "action": 2, "image": [3, 64, 64]}
WORDS = {"as it is": [], "tiny": ["debug=tiny"]}
# Keys that every algorithm got from the root config, and with debug=tiny, and that most of them did not read.
FOR_ALL = ("algorithm.batch_size", "algorithm.batch_length", "algorithm.train_ratio")
# Changed on purpose since then: an encoder for all observations, images of a size that encoders can take.
CHANGED = {
    # The beginners' experiments also draw predictions of the world model.
    "dreamer_cartpole": {"components.encoder._target_", "training.report.every_env_steps"},
    "dreamer_mpc_cartpole": {"components.encoder._target_", "training.report.every_env_steps"},
    "dreamer_catch": {"training.report.every_env_steps"},
    "tdmpc2_pendulum": {"training.report.every_env_steps"},
    "tdmpc2_gym_mujoco": {"environment.size"},
    "og_wm_carracing": {"algorithm.batch_length"},  # M sees whole rollouts
    "og_wm_carracing_dream": {"algorithm.batch_length"},
    "iris_atari100k": {"training.evaluate.temperature"},  # 0.5, as its authors evaluate
    # As fast as before the tokenizer's action table got the authors' initial weights: twice as many policy updates.
    "delta_iris_catch": {
        "algorithm.epochs.actor_critic_updates",
        "optimizers.actor_critic.lr",
        "training.phases",
    },
    # A preset that keeps the pole up: action repeat 2, phases with bursts of random actions, finer bins.
    "tdmpc2_cartpole": {
        "algorithm.episode_length",
        "algorithm.seed_steps",
        "algorithm.size.bin_limit",
        "components.reward_head.limit",
        "controllers.critic.limit",
        "environment.action_repeat",
        "environment.time_limit",
        "training.phases",
        "training.total_timesteps",
    },
}
CHANGED_TINY = {
    "delta_iris_catch": {"optimizers.actor_critic.lr"},
    "tdmpc2_cartpole": {"environment.action_repeat", "training.phases"},
    "dreamer_cartpole": {"components.encoder._target_"},
    "dreamer_mpc_cartpole": {"components.encoder._target_"},
    "dreamer_catch": set[str](),
    "og_wm_carracing": set[str](),
    "og_wm_carracing_dream": set[str](),
    "tdmpc2_pendulum": set[str](),
}
ADDED = {"algorithm", "debug.fast_render", "debug.plain_batch.size", "debug.plain_batch.length"}
ADDED |= {
    "algorithm.sequences",  # World Models: as they were, but on CarRacing
    "algorithm.stages.start_steps",  # World Models: of phases=og_wm_evolve_dream only
    "training.on_side_failure",
    "components.encoder.keys",
    "components.vae.keys",
    "components.encoder.depth",
    "algorithm.grad_acc_steps",
}
# Where environments run, with the value that says: as before.
ENVIRONMENT = {"python": None, "host": None, "seed_argument": None, "backend": "gymnasium"}
ADDED |= {f"environment.{key}" for key in ENVIRONMENT}
UNREAD = {"dreamer_dmc_proprio_2023": ["algorithm.seed_steps"]}  # its phases have no such step
# They had the settings of an earlier version with today's agent; now they have its agent too.
VERSIONS = ("_2023", "_2024")
# Switches of earlier versions, with the value that the code had before they existed.
SWITCHES = {
    "clip_norms": None,
    "layer": "rms+silu",
    "init": "fan_in",
    "bias": True,
    "free_mean": False,
    "discount_in_continue": True,
    "first_continue": "predicted",
    "own_reward": False,
    "critic_start": 0,
    "reward_transform": "none",
    "reward_gradient": True,
    "replay_value_gradient": True,
    "images": "pooled",
    "image_layer": None,
    "squash": True,
    "cell": "block_gru",
    "latent": "categorical",
    "std_form": "softplus",
    "min_std": (0.1, None),
    "initial": "zeros",
    "out_scale": 1.0,
    "estimate": "mean",
    "gradient_mix": 0.1,
    "distribution": "bounded_normal",
    "max_std": 1.0,
    "init_std": None,
    "noise": 0.0,
    "slow_targets": False,
    "slow_weight": 1.0,
    "slow_every": 1,
    "nesterov": False,
    "weight_decay": 0.0,
    "schedule": "const",
    "anneal": 0,
    "kernel": None,
    "multipliers": None,
    "posterior_layers": 1,
    "dynamics_layers": 1,
    "absolute": False,
    "return_debias": False,
    "advantage_norm": "none",
    "value_norm": "none",
    "actor_critic_gradient": False,
}


@cache
def dump() -> dict[str, dict[str, Any]]:
    kept: dict[str, dict[str, Any]] = json.loads(lzma.decompress(DUMP.read_bytes()))
    return kept


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, f"{path}.{key}" if path else key)
    else:
        yield path, node


def resolved(name: str, words: list[str]) -> dict[str, Any]:
    config = compose_config([f"experiment={name}", *words])
    OmegaConf.set_struct(config, False)
    config._dims = OmegaConf.merge(DIMS, config._dims)
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


@pytest.mark.parametrize("variant", WORDS)
@pytest.mark.parametrize("name", sorted(dump()))
def test_values_are_kept(name: str, variant: str):
    before, now = dump()[name][variant], resolved(name, WORDS[variant])
    published = dict(leaves(dump()[name]["as it is"]))
    if name.endswith(VERSIONS):
        before, now = ({key: node[key] for key in ("environment", "buffers")} for node in (before, now))
        for key in ENVIRONMENT.keys() & now["environment"].keys() - before["environment"].keys():
            assert now["environment"].pop(key) == ENVIRONMENT[key]
        assert now == before
        return
    old, new = dict(leaves(before)), dict(leaves(now))
    changed = {path for path in new if path in old and new[path] != old[path]}
    expected = CHANGED.get(name, set())
    assert changed == (CHANGED_TINY.get(name, expected) if variant == "tiny" else expected)
    if "algorithm.sequences" in new:
        assert new["algorithm.sequences"] == ("start" if "carracing" in name else "anywhere")
    # What is gone: keys for all algorithms, that this one does not have.
    gone = {path for path in old if path not in new}
    allowed = {*FOR_ALL, *UNREAD.get(name, ())}
    assert {path for path in gone if path in published and path not in allowed} == set()
    assert all(path.startswith("algorithm.") for path in gone)
    added = {path for path in new if path not in old and not path.startswith("launch.")}
    if name.startswith("dreamer"):
        switches = {path for path in added if path.rpartition(".")[2] in SWITCHES}
        for path in switches:
            value = SWITCHES[path.rpartition(".")[2]]
            assert new[path] in (value if isinstance(value, tuple) else (value,)), path
        added -= switches
    assert added <= ADDED | set(dict(leaves(yaml.safe_load(ROOT_CONFIG.read_text()))))
    for section in ("components", "controllers", "optimizers"):  # parts are initialized in this order
        assert list(before[section]) == list(now[section])


# What ran under the name of a version before 0b40c77 -> the words that compose it now (docs/algorithms/dreamer.md)
RAN = {
    "dreamer_dmc_proprio_2023": ["experiment=dreamer_dmc_proprio_settings_2023"],
    "dreamer_dmc_proprio_2024": ["experiment=dreamer_dmc_proprio_2024", "algorithm=dreamer"],
    "dreamer_dmc_vision_2024": ["experiment=dreamer_dmc_vision_2024", "algorithm=dreamer"],
}


@pytest.mark.parametrize("name", RAN)
def test_settings_of_a_year_with_the_agent_of_today_still_compose(name: str):
    """The results on walker-walk are of these."""
    now = resolved(RAN[name][0].partition("=")[2], RAN[name][1:])
    sections = ("algorithm", "components", "controllers", "optimizers", "buffers", "environment")
    old, new = (
        {path: value for path, value in leaves(node) if path.split(".")[0] in sections}
        for node in (dump()[name]["as it is"], now)
    )
    assert {path: new.get(path) for path in old if path not in FOR_ALL} == {
        path: value for path, value in old.items() if path not in FOR_ALL
    }
    for path in new.keys() - old.keys():
        value = SWITCHES.get(path.rpartition(".")[2])
        assert path in ADDED or new[path] in (value if isinstance(value, tuple) else (value,)), path


def test_experiments_are_composed_from_few_files():
    counts = {}
    with choices(), initialize_config_module("rl_lab.configs", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        for name in known_choices("experiment"):
            found = loader._settle("config", [f"experiment={name}"], RunMode.RUN)
            files = {str(default.config_path) for default in found.defaults}
            beside = ("hydra", "_dummy", "launch/")  # launch: how sweeps are run
            counts[name] = len([file for file in files if not file.startswith(beside)])
    assert max(counts.values()) <= 8, counts
    assert sorted(counts.values())[len(counts) // 2] <= 6, counts
