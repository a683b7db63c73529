"""Environments on the training device: the Collector and the buffer hold the same tensors, and runs resume exactly."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import rl_lab
from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.environments import make_env
from rl_lab.errors import ConfigError, LabError
from rl_lab.orchestration.collector import Collector
from rl_lab.records import ActMode

QUIET = ["logging.progress=off", "logging.tensorboard=false"]


class Alternating:
    """Acts 0, 1, 0, … and remembers the tensors that it was given."""

    def __init__(self):
        self.seen = []

    def initial_policy_state(self, count):
        return {"step": torch.zeros(count, dtype=torch.int64)}

    def act(self, obs, state, is_first, mode):
        self.seen.append((obs, is_first))
        step = torch.where(is_first, 0, state["step"])
        return step % 2, {"step": step + 1}, {"extra": step.float()}


def collector_of(task, count, **options):
    env = make_env(task, count, batched=True, seed=1, **options)
    collector = Collector(env, device="cpu", generator=torch.Generator().manual_seed(0))
    collector.reset()
    return env, collector


def test_observations_are_not_copied_between_environment_and_buffer(monkeypatch):
    env, collector = collector_of("tensor/catch", 64, cells=4, side=16)
    policy = Alternating()
    monkeypatch.setattr(torch, "from_numpy", lambda array: pytest.fail(f"an array of {array.shape}"))
    for _ in range(20):
        collector.receive()
        given = env.last_obs["image"]
        result = collector.step(policy, ActMode())
        row = result.trajectory
        assert row["obs/image"].data_ptr() == given.data_ptr() == policy.seen[-1][0]["image"].data_ptr()
        assert all(isinstance(row[name], torch.Tensor) for name in row if name != "is_first")
        assert policy.seen[-1][1].data_ptr() == env.is_first.data_ptr() or result.steps == 0
        assert env._action.data_ptr() == row["action"].data_ptr()  # the action, too


def test_rows_equal_those_of_ordinary_environments():
    """The same rows and counts as if the environment had returned arrays."""
    _env, collector = collector_of("tensor/cartpole", 32, time_limit=25)
    plain, arrays = collector_of("tensor/cartpole", 32, time_limit=25)
    arrays.environment = AsArrays(plain)
    arrays.reset()
    left, right = Alternating(), Alternating()
    ended = 0
    for _ in range(60):
        one, two = collector.step(left, ActMode()), arrays.step(right, ActMode())
        assert (one.steps, one.episodes) == (two.steps, two.episodes)
        ended += one.episodes
        for name, value in two.trajectory.items():
            np.testing.assert_array_equal(np.asarray(one.trajectory[name]), np.asarray(value), name)
            assert np.asarray(one.trajectory[name]).dtype == np.asarray(value).dtype, name
    assert ended > 32
    assert [e.episode_return for e in collector.tracker.drain()] == [
        e.episode_return for e in arrays.tracker.drain()
    ]


class AsArrays:
    """Returns the tensors of an environment as arrays."""

    def __init__(self, env):
        self.env, self.num_envs = env, env.num_envs

    @property
    def is_first(self):
        return self.env.is_first.numpy()

    def reset(self):
        obs, info = self.env.reset(seed=1)
        return {name: value.numpy() for name, value in obs.items()}, info

    def step_async(self, actions):
        self.env.step_async(actions)

    def step_wait(self):
        obs, *flags, info = self.env.step_wait()
        return {name: value.numpy() for name, value in obs.items()}, *(flag.numpy() for flag in flags), info


def test_buffer_stores_the_rows():
    env, collector = collector_of("tensor/cartpole", 16, time_limit=7)
    columns = {**env.spec.row_columns()}
    buffer = ReplayBuffer(columns, capacity=16 * 40, num_streams=16)
    policy, rows = Alternating(), []
    for _ in range(30):
        row = collector.step(policy, ActMode()).trajectory
        row.pop("extra")
        buffer.add(row)
        rows.append({name: torch.as_tensor(value).clone() for name, value in row.items()})
    stored = buffer.read(0, 30)
    for name in columns:
        expected = torch.stack([row[name] for row in rows], dim=1)
        assert torch.equal(stored.columns[name], expected), name
    assert stored.columns["truncated"].sum() > 0 and stored.columns["is_first"].sum() > 16
    over = stored.columns["terminated"] | stored.columns["truncated"]
    assert (stored.columns["action"][over] == 0).all()
    assert (stored.columns["is_first"][:, 1:] == over[:, :-1]).all()


def test_nan_stops_the_run():
    env, collector = collector_of("tensor/cartpole", 4)
    collector.step(Alternating(), ActMode())
    env.simulator.variables[2, 1] = torch.nan
    with pytest.raises(LabError, match="environment 2 returned an observation or a reward that is NaN"):
        collector.receive()


def test_state_of_the_collector():
    _env, collector = collector_of("tensor/cartpole", 8, time_limit=9)
    policy = Alternating()
    for _ in range(13):
        collector.step(policy, ActMode())
    state = collector.get_state()
    expected = [collector.step(policy, ActMode()).trajectory for _ in range(12)]
    _, other = collector_of("tensor/cartpole", 8, time_limit=9)
    assert other.set_state(state) == []
    for row in expected:
        found = other.step(policy, replace(ActMode())).trajectory
        for name in row:
            np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(row[name]), name)


@pytest.mark.parametrize(
    "experiment",
    ["dreamer_cartpole_batched", pytest.param("tdmpc2_cartpole_batched", marks=pytest.mark.learning)],
)
def test_training_and_exact_resume(experiment, tmp_path):
    words = [
        f"experiment={experiment}",
        "debug=tiny",
        *QUIET,
        "environment.num_envs=8",
        "training.log.every_env_steps=80",
        "training.evaluate.every_env_steps=null",
        "training.report.every_env_steps=null",
        "training.checkpoint.every_env_steps=80",
    ]
    whole = rl_lab.train(None, [*words, "training.total_timesteps=320", f"run_dir={tmp_path / 'whole'}"])
    assert whole.counters["updates"] > 20
    rl_lab.train(None, [*words, "training.total_timesteps=160", f"run_dir={tmp_path / 'half'}"])
    half = rl_lab.resume(tmp_path / "half", ["training.total_timesteps=320"])
    assert half.counters == whole.counters
    left, right = (
        torch.load(tmp_path / name / "checkpoints" / "last.pt", weights_only=True)
        for name in ("whole", "half")
    )
    assert_equal(left["components"], right["components"])


def assert_equal(left, right):
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for name in left:
            assert_equal(left[name], right[name])
    elif isinstance(left, list | tuple):
        for one, two in zip(left, right, strict=True):
            assert_equal(one, two)
    else:
        assert left == right


def test_videos_and_normalization_are_refused(tmp_path):
    words = ["experiment=dreamer_cartpole_batched", "debug=tiny", *QUIET, f"run_dir={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match="normalize_observations"):
        rl_lab.train(None, [*words, "+environment.normalize_observations=true"])
