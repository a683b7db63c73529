"""Configs compose in the documented order, the YAML of the founding documents composes, errors have hints."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rl_lab.config.checks import check_config
from rl_lab.config.compose import compose_config, fill_dims, resolve_config, to_plain
from rl_lab.errors import ConfigError
from rl_lab.run_environments import environment_spec
from rl_lab.workflows.random import RandomWorkflow


def write(folder: Path, name: str, text: str) -> None:
    file = folder / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(text).lstrip())


def test_experiment_spellings():
    names = {
        compose_config(words).experiment.name
        for words in ([], ["experiment=dreamer_cartpole"], ["+experiment=dreamer_cartpole"])
    }
    assert names == {"dreamer_cartpole"}


def test_order_of_precedence(tmp_path: Path):
    """root < environment < experiment < size < debug < command line; each sets one key last."""
    write(tmp_path, "environment/here", "task: dummy/discrete\nnum_envs: 2\nworkers: 0\ntime_limit: 11\n")
    write(
        tmp_path,
        "experiment/order",
        """
        # @package _global_
        defaults:
          - /workflow: random
          - /controller@controllers.policy: random_policy
          - /environment: here
          - /buffer: world_model_sequence
          - _self_
        experiment: {name: order}
        environment: {num_envs: 3}
        algorithm: {batch_size: 5, batch_length: 6, size: {units: 1, hidden: 1, deter: 1}}
        """,
    )
    write(tmp_path, "size/order", "# @package algorithm.size\nunits: 2\nhidden: 2\n")
    write(tmp_path, "debug/order", "# @package _global_\nalgorithm: {size: {hidden: 3}, batch_length: 7}\n")
    words = ["experiment=order", "size=order", "debug=order", "algorithm.batch_length=9"]
    config = compose_config(words, config_dirs=[tmp_path])
    assert config.training.precision == "auto"  # root
    assert config.environment.time_limit == 11  # environment
    assert config.environment.num_envs == 3  # experiment over environment
    assert config.algorithm.batch_size == 5  # experiment over root
    assert (config.algorithm.size.deter, config.algorithm.size.units) == (1, 2)  # size over experiment
    assert config.algorithm.size.hidden == 3  # debug over size
    assert config.algorithm.batch_length == 9  # command line over debug


class YourWorkflow(RandomWorkflow):
    """A workflow without declared settings: any key of `algorithm` is its own."""

    settings_type = None


def founding_yaml(folder: Path) -> None:
    """Write the YAML of the founding document's "Implementing a New Algorithm", with new `_target_` paths."""
    write(folder, "workflow/your_algorithm", "_target_: tests.config.test_compose.YourWorkflow\n")
    write(
        folder,
        "components/representation_learner/your_encoder",
        "_target_: torch.nn.Linear\nin_features: ${_dims.observation}\nout_features: ${_dims.latent}\n",
    )
    write(
        folder,
        "controller/your_controller",
        "_target_: rl_lab.components.controllers.random_policy.RandomPolicyController\n",
    )
    write(
        folder,
        "experiment/your_algorithm_env",
        """
        # @package _global_
        defaults:
          - /workflow: your_algorithm
          - /components/representation_learner@components.encoder: your_encoder
          - /controller@controllers.actor: your_controller
          - /buffer: world_model_sequence
          - /environment: cartpole
          - _self_

        experiment:
          name: your_algorithm_cartpole
          seed: 42
          device: auto

        _dims:
          observation: 4
          action: 2
          latent: ${add:${_dims.observation}, 10}

        algorithm:
          learning_rate: 1e-4

        optimizers:
          world_model:
            _target_: torch.optim.Adam
            _partial_: true
            lr: 1e-4

        training:
          total_timesteps: 100000
          phases:
            - name: training
              type: online
              buffer: replay
              duration_steps: 100000
              workflow_hooks:
                - collect
        """,
    )


def test_founding_yaml_composes(tmp_path: Path):
    founding_yaml(tmp_path)
    config = compose_config(["+experiment=your_algorithm_env", "experiment.seed=123"], config_dirs=[tmp_path])
    resolve_config(config, environment_spec(config))
    assert config.experiment.seed == 123
    assert config._dims.latent == 14
    assert config.components.encoder.in_features == 4
    assert config.optimizers.world_model.lr == 1e-4
    assert config.buffers.replay._target_ == "rl_lab.buffers.replay.ReplayBuffer"


def test_configs_in_current_folder_are_found(tmp_path: Path, monkeypatch):
    founding_yaml(tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    assert compose_config(["+experiment=your_algorithm_env"]).experiment.name == "your_algorithm_cartpole"


def test_founding_groups_and_names_exist():
    for word in (
        "components/encoder@components.encoder=mlp",
        "components/encoder=dict",
        "controller@controllers.actor=dreamer_actor",
        "components/representation_learner@components.rssm=rssm",
        "+buffer@buffers.other=world_model_sequence",
        "workflow=dreamer",
        "environment=cartpole",
    ):
        compose_config([word])


def test_dims_are_filled_and_checked(tmp_path: Path):
    config = compose_config([])
    spec = environment_spec(config)
    OmegaConf.set_struct(config, False)
    fill_dims(config, spec)
    assert (config._dims.observation, config._dims.action) == (4, 2)
    config._dims.observation = 5
    with pytest.raises(ConfigError, match=r"_dims.observation is 5 in the config, but .* has 4"):
        fill_dims(config, spec)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["experiment=dreamer_cartpol"], "Did you mean 'dreamer_cartpole'"),
        (["+experiment=nothing_like_it_at_all"], "Known: "),
        (["size=13m"], "size=13m does not exist for dreamer"),
        (["algorithm.batch_sise=3"], "algorithm.batch_size"),
        (["trainng.total_timesteps=3"], "training.total_timesteps"),
        (["workflow=dreemer"], "Did you mean 'dreamer'"),
        (["debug=tony"], "tiny"),
        (["algorithm.batch_size"], "algorithm.batch_size"),
        (
            ["workflow._target_=src.workflows.utils.base.WorldModelWorkflow"],
            "rl_lab.workflows.base.WorldModelWorkflow",
        ),
    ],
)
def test_errors_suggest_known_names(words: list[str], message: str):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        compose_config(words)


@pytest.mark.parametrize(
    "path",
    [
        "training.checkpoint.keep",
        "training.log",
        "training",
        "training.evaluate.episodes",
        "logging.progress",
        "experiment.seed",
        "wandb.mode",
    ],
)
def test_a_removed_key_is_named(path: str):
    with pytest.raises(
        ConfigError, match=rf"^{re.escape(path)}[\w.]* is missing: leave out ~{re.escape(path)}"
    ):
        compose_config([f"~{path}"])


def test_eval_accepts_environment_keys():
    config = compose_config(["environment.eval.workers=0", "environment.eval.time_limit=7"])
    assert config.environment.eval.workers == 0 and config.environment.eval.time_limit == 7
    with pytest.raises(ConfigError, match=r"environment\.eval\.wrokers.*workers"):
        check_config(to_plain(compose_config(["environment.eval.wrokers=0"])))
