"""Keys of `algorithm` that nothing reads are refused, in files and in words, for every algorithm."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import rl_lab
from rl_lab.config.algorithm_keys import check_algorithm, interpolated_keys, unread_keys
from rl_lab.config.compose import compose_config, known_choices
from rl_lab.config.saved import drop_unread
from rl_lab.errors import ConfigError

# algorithm -> an experiment; a misspelt key and the right one, also of a section; keys of other algorithms
CASES = {
    "dreamer": (
        "dreamer_cartpole",
        "entropi",
        "entropy",
        "size.unit",
        "units",
        ["plan.samples", "epochs.collect"],
    ),
    "dreamer_mpc": ("dreamer_mpc_cartpole", "entropi", "entropy", "plan.sample", "samples", ["boundary"]),
    **{
        f"dreamer_{version}": (
            experiment,
            "own_rewards",
            "own_reward",
            "size.unit",
            "units",
            ["plan.samples"],
        )
        for version, experiment in {
            "v1": "dreamer_v1_dmc_vision",
            "v2": "dreamer_v2_crafter",
            "2023": "dreamer_crafter_2023",
            "2024": "dreamer_dmc_vision_2024",
        }.items()
    },
    "plan2explore": (
        "plan2explore_crafter",
        "entropi",
        "entropy",
        "explore.step",
        "steps",
        ["plan.samples"],
    ),
    "diffusion_policy": (
        "diffusion_policy_lunarlander",
        "horizn",
        "horizon",
        "size.width",
        "widths",
        ["train_ratio", "size.units"],
    ),
    "diffusion_policy_transformer": (
        "diffusion_policy_transformer_pusht_state",
        "beta",
        "betas",
        "size.width",
        "widths",
        ["train_ratio", "size.units"],
    ),
    "behaviour_cloning": (
        "behaviour_cloning_lunarlander",
        "horizn",
        "horizon",
        "size.unit",
        "units",
        ["sampler", "size.widths"],
    ),
    "tdmpc2": (
        "tdmpc2_pendulum",
        "horizn",
        "horizon",
        "plan.elite",
        "elites",
        ["batch_length", "size.deter"],
    ),
    "tdmpc": (
        "tdmpc_dmc",
        "horizn",
        "horizon",
        "loss_scales.rewards",
        "reward",
        ["train_ratio", "size.hidden"],
    ),
    "iris": (
        "iris_catch",
        "entropi",
        "entropy",
        "tokenizer.bach_size",
        "batch_size",
        ["batch_size", "train_ratio"],
    ),
    "delta_iris": (
        "delta_iris_catch",
        "block",
        "blocks",
        "epochs.colect",
        "collect",
        ["size.levels", "size.dim"],
    ),
    "og_wm": (
        "og_wm_catch",
        "temperatur",
        "temperature",
        "evolution.sigm",
        "sigma",
        ["entropy", "learning_rate"],
    ),
}


def check(words: list[str], folders: list[Path] | None = None) -> None:
    plain: Any = OmegaConf.to_container(compose_config(words, config_dirs=folders or []))
    check_algorithm(plain)


def test_every_algorithm_has_cases():
    assert set(CASES) == set(known_choices("algorithm"))


@pytest.mark.parametrize("algorithm", CASES)
def test_wrong_keys_in_words(algorithm: str):
    experiment, wrong, right, nested, nested_right, others = CASES[algorithm]
    for key, meant in ((wrong, right), (nested, nested_right)):
        with pytest.raises(ConfigError, match=rf"^algorithm\.{key} is not a known key.*{meant}"):
            compose_config([f"experiment={experiment}", f"algorithm.{key}=1"])
        with pytest.raises(
            ConfigError, match=rf"^algorithm\.{key} is not a key that .*Did you mean '{meant}'"
        ):
            check([f"experiment={experiment}", f"+algorithm.{key}=1"])
    for key in others:
        with pytest.raises(ConfigError, match=rf"^algorithm\.{key} is not a known key"):
            compose_config([f"experiment={experiment}", f"algorithm.{key}=1"])


@pytest.mark.parametrize("algorithm", CASES)
def test_wrong_keys_in_files(algorithm: str, tmp_path: Path):
    experiment, wrong, right, nested, nested_right, others = CASES[algorithm]
    file = tmp_path / "experiment" / "mine.yaml"
    file.parent.mkdir()
    for key, meant in ((wrong, right), (nested, nested_right), *((other, "") for other in others)):
        section = "{" + ": {".join(key.split(".")) + ": 1" + "}" * (key.count(".") + 1)
        file.write_text(
            f"# @package _global_\ndefaults: [{experiment}, _self_]\nexperiment: {{name: mine}}\nalgorithm: {section}\n"
        )
        with pytest.raises(ConfigError, match=rf"^algorithm\.{key} is not a key that \w+ reads.*{meant}"):
            check(["experiment=mine"], [tmp_path])


@pytest.mark.parametrize("name", known_choices("experiment"))
def test_experiments_have_no_unread_keys(name: str):
    check([f"experiment={name}", "debug=tiny"])


def test_training_refuses_a_wrong_key(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"^algorithm\.entropi is not a key that DreamerWorkflow reads"):
        rl_lab.train(
            "dreamer_cartpole", ["debug=tiny", "+algorithm.entropi=0.1", f"run_dir={tmp_path / 'run'}"]
        )
    with pytest.raises(ConfigError, match=r"^algorithm\.batch_size is not a key that RandomWorkflow reads"):
        rl_lab.train("random_cartpole", ["+algorithm.batch_size=7", f"run_dir={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


def test_keys_of_interpolations_are_read():
    """A user's own key is read by an interpolation anywhere in the config, also one inside `algorithm`."""
    base = ["experiment=dreamer_cartpole", "+algorithm.size.wide=7", "+algorithm.mine={a: 1, b: 2}"]
    used = ["components.decoder.units=${algorithm.size.wide}", "buffers.replay.capacity=${algorithm.mine.a}"]
    check([*base, *used, "algorithm.entropy=${.mine.b}"])
    check([*base, *used, "algorithm.size.units=${..mine.b}"])
    with pytest.raises(ConfigError, match=r"algorithm\.mine\.b is not a key"):
        check([*base, *used])


def test_interpolated_keys():
    config = {
        "a": ["${algorithm.x}", "${mul:${algorithm.y.z}, 2}"],
        "b": "${oc.select:algorithm.w, 3}",
        "c": "x.y",
    }
    assert interpolated_keys(config) == {"algorithm.x", "algorithm.y.z", "algorithm.w"}


# ---------------------------------------------------------------- workflows of users


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a plain workflow `mine.Plain`, and `mine.Declared` with a dataclass."""
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
            from dataclasses import dataclass
            from rl_lab.workflows.settings import read_settings
            from rl_lab.workflows.random import RandomWorkflow

            @dataclass(frozen=True)
            class MySettings:
                speed: float
                steps: int = 3

            class Plain(RandomWorkflow):
                settings_type = None
                def initialize(self, context):
                    super().initialize(context)
                    self.speed = context.config.algorithm.speed

            class Declared(RandomWorkflow):
                settings_type = MySettings
                def initialize(self, context):
                    super().initialize(context)
                    self.settings = read_settings(MySettings, context.config.algorithm, "algorithm")
            """)
    )
    for name in ("plain", "declared"):
        (tmp_path / "configs" / "experiment").mkdir(parents=True, exist_ok=True)
        (tmp_path / "configs" / "experiment" / f"{name}.yaml").write_text(
            textwrap.dedent(f"""
                # @package _global_
                defaults: [random_cartpole, _self_]
                experiment: {{name: {name}}}
                workflow: {{_target_: mine.{name.title()}}}
                algorithm: {{speed: 2.0}}
                """).lstrip()
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


QUIET = ["debug=tiny", "logging.progress=off", "logging.tensorboard=false", "training.total_timesteps=4"]


def test_plain_workflow_is_told_once_of_unread_keys(project: Path):
    said: list[str] = []
    words = [
        *QUIET,
        "+algorithm.speeed=3",
        "+algorithm.cap=500",
        "buffers.replay.capacity=${algorithm.cap}",
    ]
    rl_lab.train("plain", words, say=said.append)
    assert [line for line in said if "speeed" in line] == [
        "algorithm.speeed: neither the workflow's code nor an interpolation reads it; correct or remove it"
    ]
    assert not any(name in line for name in ("algorithm.speed:", "algorithm.cap") for line in said)
    plain: Any = OmegaConf.to_container(compose_config(["experiment=plain"]))
    assert unread_keys(plain) == []


def test_dataclass_of_a_user_is_the_schema(project: Path):
    run = rl_lab.train("declared", [*QUIET, "+algorithm.steps=5"], say=lambda text: None)
    assert run.counters["env_steps"] == 4
    with pytest.raises(
        ConfigError, match=r"^algorithm\.spead is .* Did you mean 'speed'.* fields of MySettings"
    ):
        rl_lab.train("declared", [*QUIET, "+algorithm.spead=5"], say=lambda text: None)
    with pytest.raises(ConfigError, match=r"algorithm\.steps must be an integer, not 'many'"):
        rl_lab.train("declared", [*QUIET, "+algorithm.steps=many"], say=lambda text: None)


# ---------------------------------------------------------------- saved runs


def test_only_keys_that_every_algorithm_got_are_dropped():
    config = {
        "workflow": {"_target_": "rl_lab.workflows.iris.IrisWorkflow"},
        "algorithm": {
            "batch_size": 2,
            "entropy": 0.1,
            "mine": 3,
            "plan": {"samples": 8},
            "epochs": {"collect": 1},
        },
    }
    assert drop_unread(config) == ["algorithm.batch_size", "algorithm.plan"]
    assert config["algorithm"] == {"entropy": 0.1, "mine": 3, "epochs": {"collect": 1}}
