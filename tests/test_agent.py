"""`load_agent` and `Agent.act`: raw observations in, actions in the environment's units out, without an environment."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import rl_lab
from rl_lab.agent import Agent
from rl_lab.environments.env_runner import episode_seed
from rl_lab.errors import ConfigError, LabError
from tests.environments import sample_envs

TINY = ["debug=tiny", "training.total_timesteps=20", "logging.progress=off", "logging.tensorboard=false"]
TINY += ["training.evaluate.every_env_steps=null", "training.report.every_env_steps=null"]
SAMPLED = ["environment=gym", "environment.task=tests.environments.sample_envs:Sampled"]


def trained(folder: Path, *words: str) -> Path:
    return rl_lab.train("dreamer_cartpole", [*TINY, *words, f"run_dir={folder}"]).path


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory) -> Path:
    words = ["environment=pendulum", "environment.normalize_observations=true"]
    return trained(tmp_path_factory.mktemp("agent") / "pendulum", *words)


@pytest.fixture(scope="module")
def camera(tmp_path_factory) -> Path:
    """A camera, which is resized and stacked, and joints."""
    words = [*SAMPLED, "+environment.kind=image_and_vector", "environment.size=16"]
    words += ["+environment.wrappers.frame_stack=2"]
    return trained(tmp_path_factory.mktemp("agent") / "camera", *words)


def test_agent_scores_in_the_plain_environment_what_it_scores_in_the_labs(pendulum: Path):
    """Pendulum takes a torque in [-2, 2]; an agent that acted in [-1, 1] lost half of it."""
    agent = rl_lab.load_agent(pendulum)
    with rl_lab.make_env("Pendulum-v1", 1, seed=5) as env:
        obs, _ = env.reset()
        expected, applied = [], []
        for _ in range(30):
            action = agent.act(obs, env.is_first, sample=True, scaled=True)
            obs, reward, *_ = env.step(action)
            expected.append(float(reward[0]))
            applied.append(2.0 * np.clip(action[0], -1.0, 1.0))
    agent.reset()
    plain = gymnasium.make("Pendulum-v1")
    obs, _ = plain.reset(seed=episode_seed(5, 0, 0))
    for reward, torque in zip(expected, applied):
        action = agent.act(obs, sample=True)
        assert action.dtype == np.float32 and plain.action_space.contains(action)
        np.testing.assert_allclose(action, torque, rtol=1e-6)
        obs, received, *_ = plain.step(action)
        assert received == pytest.approx(reward, rel=1e-5)
    assert np.abs(applied).max() > 1.0  # the other form would have been clipped


def test_batched_and_single_observations(pendulum: Path):
    agent = rl_lab.load_agent(pendulum)
    obs = gymnasium.make("Pendulum-v1").observation_space.sample()
    single = agent.act(obs, is_first=True)
    agent.reset()
    batch = agent.act(np.stack([obs, obs, obs]))
    assert single.shape == (1,) and batch.shape == (3, 1) and batch.dtype == np.float32
    np.testing.assert_allclose(batch[0], single, atol=1e-5)
    agent.act(np.stack([obs, obs, obs]), is_first=[False, True, False])
    for wrong, text in (
        ((obs,), r"^obs has 1 environments, but the policy state has 3: call reset\(\) first"),
        ((np.stack([obs] * 3), [True, False]), "^is_first must be a bool or 3 of them, not"),
        ((np.stack([obs] * 3), "yes"), "^is_first must be a bool"),
        ((obs[:2],), r"^obs 'vector' has shape \(2,\), but the environment returns \(3,\)"),
        (({"vector": obs},), "^obs is a dict, but the environment returns an array"),
        ((np.full((3, 3), np.nan),), "^obs is unusable: observation 'vector' has NaN or infinity"),
    ):
        with pytest.raises(LabError, match=text):
            agent.act(*wrong)
    assert agent.act(np.stack([obs] * 3)).shape == (3, 1)  # it goes on


def test_discrete_actions_and_repr(tmp_path: Path):
    agent = rl_lab.load_agent(trained(tmp_path / "run"))
    plain = gymnasium.make("CartPole-v1")
    obs, _ = plain.reset(seed=0)
    action = agent.act(obs)
    assert isinstance(action, int) and plain.action_space.contains(action)
    agent.reset()
    actions = agent.act(np.stack([obs] * 4))
    assert actions.shape == (4,) and actions.dtype.kind == "i"
    assert repr(agent) == f"Agent(DreamerWorkflow, CartPole-v1, weights of step 20, {agent.device})"


def test_images_at_the_environments_own_size(camera: Path):
    agent = rl_lab.load_agent(camera)
    raw = sample_envs.Sampled(kind="image_and_vector")
    with rl_lab.make_env(
        sample_envs.Sampled, 1, kind="image_and_vector", size=16, wrappers={"frame_stack": 2}
    ) as env:
        obs, _ = env.reset()
        expected = []
        for _ in range(5):
            action = agent.act(obs, env.is_first, sample=True, scaled=True)
            expected.append(int(action[0]))
            obs, *_ = env.step(action)
    assert len(set(expected)) == 2  # both actions, so that the comparison means something
    for _ in range(2):  # a new episode starts with a new stack of frames
        agent.reset()
        obs, _ = raw.reset()
        assert obs["camera"].shape == (30, 40, 3)
        actions = []
        for _ in range(5):
            actions.append(agent.act(obs, sample=True))
            obs, *_ = raw.step(actions[-1])
        assert actions == expected


@pytest.mark.parametrize(
    "obs, text",
    [
        (np.zeros(4), "obs must be a dict with the keys camera, joints"),
        ({"joints": np.zeros(4)}, r"obs has no \['camera'\]"),
        ({"camera": np.full((6, 16, 16), 0.5), "joints": np.zeros(4)}, "'camera' has fractions"),
        ({"camera": np.zeros((6, 16, 16)), "joints": [0, 0, 0, np.inf]}, "'joints' has NaN or infinity"),
        ({"camera": np.zeros((30, 40, 3)), "joints": np.zeros(4)}, r"'obs/camera' has shape \(30, 40, 3\)"),
    ],
)
def test_unusable_observations_of_the_labs_form(camera: Path, obs: Any, text: str):
    with pytest.raises(LabError, match=text):
        rl_lab.load_agent(camera).act(obs, scaled=True)


def copied(run: Path, folder: Path) -> Path:
    """Copy a run; its weights are also in weights.pt, without the manifest of a checkpoint."""
    shutil.copytree(run, folder)
    shutil.copy(folder / "checkpoints" / "last.pt", folder / "weights.pt")
    return folder


def test_environment_is_not_needed(camera: Path, tmp_path: Path):
    """On another machine, without the package of the environment."""
    run = copied(camera, tmp_path / "run")
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("tests.environments.sample_envs:Sampled", "not_here:Robot"))
    obs = sample_envs.Sampled(kind="image_and_vector").reset()[0]
    with pytest.warns(UserWarning, match="environment.task is 'not_here:Robot'"):
        agent = rl_lab.load_agent(run)
    assert agent.act(obs) in (0, 1)
    assert rl_lab.load_agent(run / "weights.pt").act(obs) in (0, 1)
    assert "not_here" not in sys.modules

    (run / "config" / "native.json").unlink()  # as a run of an older version
    agent = rl_lab.load_agent(run / "weights.pt")
    with pytest.raises(LabError, match=r"native\.json is missing, .* cannot be created here \(.*scaled=True"):
        agent.act(obs)
    scaled = {"camera": np.zeros((6, 16, 16), np.uint8), "joints": np.zeros(4)}
    assert agent.act(scaled, scaled=True) in (0, 1)


def test_older_run_reads_the_spaces_of_its_environment(pendulum: Path, tmp_path: Path):
    run = copied(pendulum, tmp_path / "run")
    file = run / "config" / "native.json"
    saved = json.loads(file.read_text())
    file.unlink()
    obs = np.array([1.0, 0.0, 0.5], np.float32)
    agents = [rl_lab.load_agent(pendulum), rl_lab.load_agent(run / "weights.pt")]
    np.testing.assert_array_equal(*(agent.act(obs) for agent in agents))

    for broken in (
        "{",
        "[]",
        json.dumps({**saved, "action": {"kind": "Box"}}),
        json.dumps({**saved, "size": 64}),
    ):
        file.write_text(broken)
        with pytest.raises(LabError, match=r"native\.json"):
            rl_lab.load_agent(run / "weights.pt").act(obs)
    file.write_text(json.dumps({**saved, "action": {"kind": "Discrete", "n": 2, "start": 0}}))
    with pytest.raises(ConfigError, match=r"native\.json does not fit .*spec\.json"):
        rl_lab.load_agent(run / "weights.pt").act(obs)
    # A checkpoint has its own copy, with a checksum.
    np.testing.assert_array_equal(*(rl_lab.load_agent(each).act(obs) for each in (pendulum, run)))


def test_agent_of_other_code_acts_in_the_labs_form(pendulum: Path):
    loaded = rl_lab.load_agent(pendulum)
    agent = Agent(loaded.workflow, loaded.spec, loaded.device, loaded.config, 0, normalizer=loaded.normalizer)
    assert agent.act(np.zeros(3), scaled=True).shape == (1,)
    with pytest.raises(LabError, match="pass scaled=True"):
        agent.act(np.zeros(3))
