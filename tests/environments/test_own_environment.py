"""The class of docs/howto/own_environment.md, extracted: checked, and trained from the command line."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

import rl_lab
from rl_lab.environments import make_env
from rl_lab.errors import ConfigError
from tests.environments import sample_envs

# Enough steps to execute every part of the page's command once.
SHORTER = [
    "training.total_timesteps=80",
    "training.evaluate.every_env_steps=null",
    "training.report.every_env_steps=null",
]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "own_environment.md"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A user's folder with my_env.py in it."""
    (code,) = re.findall(r"^`my_env.py`:\n\n```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    (tmp_path / "my_env.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_env", raising=False)
    return tmp_path


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_passes_environment_checker(project, monkeypatch):
    monkeypatch.syspath_prepend(project)
    import my_env

    check_env(my_env.Orchard(render_mode="rgb_array"), skip_render_check=True)
    with make_env("my_env:Orchard", 2, workers=1, render=True) as env:
        assert {name: spec.shape for name, spec in env.spec.observations.items()} == {
            "camera": (3, 16, 16),
            "tool": (3,),
        }
        assert env.spec.action.choices == (4, 3)
        env.reset()
        for _ in range(20):
            *_, infos = env.step(env.action_space.sample())
        assert set(infos["log"]) == {0, 1} and "log/both_right" in infos["log"][0]
        assert env.frame().shape == (16, 16, 3)


def test_trains_from_command_line(project):
    words, longer = re.findall(r"^rl-lab (train .*Orchard[^#]*?) *(?:#.*)?$", PAGE.read_text(), re.M)
    assert words == f"{longer} debug=tiny"
    done = subprocess.run(
        [sys.executable, "-m", "rl_lab", *words.split(), *SHORTER, "run_dir=run"],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert any((project / "run" / "checkpoints").iterdir())
    metrics = (project / "run" / "metrics.jsonl").read_text()
    assert "both_right" in metrics


@pytest.mark.parametrize("kind", sample_envs.OBSERVATIONS)
def test_default_experiment_trains_on_any_observations(kind, tmp_path):
    """None of these was in mind when the default experiment was written, and no word but the task is typed."""
    words = [
        "environment=gym",
        "environment.task=tests.environments.sample_envs:Sampled",
        f"+environment.kind={kind}",
    ]
    words += ["debug=tiny", "environment.num_envs=1", "training.total_timesteps=12", *SHORTER[1:]]
    words += ["logging.progress=off", "logging.tensorboard=false", f"run_dir={tmp_path / 'run'}"]
    run = rl_lab.train(None, words)
    agent = rl_lab.load_agent(run.path, device="cpu")
    assert run.counters["updates"] > 0
    assert set(agent.workflow.decoder.keys) == set(agent.spec.observations)
    for key, spec in agent.spec.observations.items():
        # The encoder reads it.
        obs = {name: np.zeros((1, *each.shape), each.dtype) for name, each in agent.spec.observations.items()}
        tensors = [{name: torch.from_numpy(value) for name, value in obs.items()} for _ in range(2)]
        tensors[1][key] = torch.full((1, *spec.shape), 99).to(tensors[0][key].dtype)
        without, with_value = (agent.workflow.encoder(each) for each in tensors)
        assert not torch.equal(without, with_value), key


def test_image_sizes_of_own_environments():
    shapes = {}
    for kind in sample_envs.OBSERVATIONS:
        with make_env(sample_envs.Sampled, kind=kind, size="auto", workers=0) as env:
            shapes[kind] = {name: spec.shape for name, spec in env.spec.observations.items()}
    assert shapes["large_image"] == {"image": (3, 64, 64)}
    assert shapes["small_gray_image"] == {"image": (1, 64, 64)}
    assert shapes["fitting_image"] == {"image": (3, 32, 48)}
    assert shapes["image_and_vector"] == {"camera": (3, 64, 64), "joints": (4,)}
    assert shapes["cameras"] == {"front": (1, 64, 64), "hand": (3, 64, 64), "touch": (3,)}
    assert shapes["vector"] == {"vector": (3,)}
    for size in ("automatic", 0, [64], [64, 64, 3], "64x64", 1.5):
        with pytest.raises(ConfigError, match=r"^environment.size="):
            make_env(sample_envs.Sampled, size=size)


def test_encoder_that_ignores_the_camera_is_refused(tmp_path):
    words = ["environment=gym", "environment.task=tests.environments.sample_envs:Sampled"]
    words += ["+environment.kind=image_and_vector", "debug=tiny", "components/encoder=mlp", *SHORTER]
    words += ["logging.progress=off", "logging.tensorboard=false", f"run_dir={tmp_path / 'run'}"]
    with pytest.raises(
        ConfigError, match=r"^components.encoder reads vectors only and would ignore camera: use"
    ):
        rl_lab.train(None, words)
    # The advice that used to be followed does not help, and `keys` does.
    with pytest.raises(ConfigError, match="would ignore camera"):
        rl_lab.train(None, [*words, "components.rssm.embed_dim=8"])
    run = rl_lab.train(None, [*words, "components.encoder.keys=[joints]", "training.total_timesteps=20"])
    assert run.counters["updates"] > 0


def test_tdmpc_says_which_observations_to_choose(tmp_path):
    words = ["environment=gym", "environment.task=tests.environments.sample_envs:Sampled", *SHORTER]
    words += ["+environment.kind=image_and_vector", "debug=tiny", f"run_dir={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match=r"environment\.observations=\["):
        rl_lab.train("tdmpc2_pendulum", words)
