"""Every config file of `environment` creates its environment."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

import rl_lab.configs
from rl_lab.environments import env_config_options, make_env, probe_spec
from tests.environments.suites.suite_cases import PACKAGES, use_stand_in

FOLDER = Path(rl_lab.configs.__file__).parent / "environment"
OWN_TASK = {"gym.yaml": "CartPole-v1"}


def check_suite_file(node, name):
    """Check that one environment of the suite accepts the settings; other tests cover the suites."""
    use_stand_in(node.suite)
    if PACKAGES.get(node.suite):
        pytest.importorskip(PACKAGES[node.suite], reason=f"suite {node.suite}")
    for evaluating in (False, True):
        options = env_config_options(node, evaluation=evaluating)
        assert options["task"] == f"{node.suite}/{node.task}"
        spec = probe_spec(**options)
        if node.size is not None:
            assert spec.observations["image"].shape[1:] == (node.size, node.size)
        assert spec.action_repeat == (node.action_repeat or 1), name


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_config_creates_environment(path):
    assert path.read_text().startswith("# "), "the first line is what `rl-lab list` shows"
    node = OmegaConf.load(path)
    node.task = node.task or OWN_TASK[path.name]
    if node.task[0].isupper() and "suite" not in node:
        pytest.importorskip("pygame", reason="Gymnasium's classic control")
    if "suite" in node:
        check_suite_file(node, path.stem)
        return
    for evaluating in (False, True):
        options = env_config_options(node, evaluation=evaluating)
        with make_env(**{**options, "workers": 0}, seed=1) as env:
            assert env.num_envs == (node.eval.num_envs if evaluating else node.num_envs)
            assert env.spec == probe_spec(**options)
            env.reset()
            env.step(env.action_space.sample())
