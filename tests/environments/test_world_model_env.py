from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.build import assemble_workflow
from rl_lab.config.compose import compose_config, resolve_config
from rl_lab.environments.make import make_env
from rl_lab.environments.world_model_env import (
    BufferStarts,
    EnvironmentStarts,
    EpisodeStarts,
    ImaginedEpisodes,
    WorldModelEnv,
    WorldModelVectorEnv,
)
from rl_lab.errors import ConfigError, LabError
from rl_lab.orchestration.evaluator import Evaluator
from rl_lab.records import Batch, Spec
from rl_lab.workflows.random import RandomWorkflow
from tests.counting_model import SHADE, SPEC, CountingEnv, CountingModel, rows


def at(*counts: int) -> Any:
    """Starts that always show these counts."""
    return lambda size, generator: rows(*counts, size=size)


def count_of(obs: dict[str, np.ndarray]) -> int:
    return int(obs["image"].flat[0]) // SHADE


def test_gymnasium_interface():
    env = WorldModelEnv(CountingModel({9: 0.5}), SPEC, at(2, 3), horizon=50, render_mode="rgb_array")
    check_env(env, skip_render_check=True)
    obs, info = env.reset(seed=1)
    assert count_of(obs) == 3 and info == {}
    obs, reward, terminated, truncated, info = env.step(2)
    assert (count_of(obs), reward, terminated, truncated) == (5, 2.0, False, False)
    assert info == {"end_chance": 0.0}
    assert env.render().shape == (8, 8, 3)
    assert int(env.agent_action()) == 1


def test_works_with_make_env():
    with make_env(
        lambda: WorldModelEnv(CountingModel(), SPEC, at(0), horizon=3), num_envs=1, workers=0
    ) as env:
        env.reset(seed=0)
        flags = [bool(env.step(np.array([1]))[3][0]) for _ in range(4)]
    assert flags == [False, False, True, False]  # the fourth call resets


@pytest.mark.parametrize(
    ("ends", "over"),
    [(0.4, [False, True]), (0.9, [False, False]), (None, [False, False]), (0.0, [True, True])],
)
def test_ends_by_threshold(ends: float | None, over: list[bool]):
    dreams = ImaginedEpisodes(CountingModel({2: 0.5}), SPEC, ends=ends)
    dreams.start(rows(0, size=1))
    found = [bool(dreams.step(torch.ones(1, dtype=torch.int64)).terminated) for _ in range(2)]
    assert found == over


def test_sampled_ends_use_model_probability():
    def ends(seed: int) -> torch.Tensor:
        dreams = ImaginedEpisodes(CountingModel({1: 0.25}), SPEC, seed=seed)
        dreams.start(rows(0, size=2000))
        return dreams.step(torch.ones(2000, dtype=torch.int64)).terminated

    first = ends(1)
    assert abs(first.float().mean().item() - 0.25) < 0.03
    assert torch.equal(first, ends(1)) and not torch.equal(first, ends(2))


def test_termination_at_horizon_is_not_truncation():
    dreams = ImaginedEpisodes(CountingModel({2: 1.0}), SPEC, horizon=2)
    dreams.start(rows(0, size=1))
    dreams.step(torch.ones(1, dtype=torch.int64))
    step = dreams.step(torch.ones(1, dtype=torch.int64))
    assert bool(step.terminated) and not bool(step.truncated)


@pytest.mark.parametrize("flush_rows", [1, 3])
def test_flush_rebuilds_memory_from_predictions(flush_rows: int):
    model = CountingModel(grows=True)
    dreams = ImaginedEpisodes(model, SPEC, flush_every=4, flush_rows=flush_rows)
    dreams.start(rows(0, 0, size=2))
    ages, counts = [], []
    for _ in range(9):
        step = dreams.step(torch.ones(2, dtype=torch.int64))
        ages.append(int(dreams.state["age"][0]))
        counts.append(int(step.obs["image"][0, 0, 0, 0]) // SHADE)
    assert counts == list(range(1, 10))  # the count continues: it is read from the decoded frame
    assert model.starts == [2, flush_rows, flush_rows]
    assert ages[3] == flush_rows and max(ages) <= flush_rows + 4


def test_vector_resets_on_next_step():
    env = WorldModelVectorEnv(CountingModel({3: 1.0}), SPEC, at(0), num_envs=2, seed=3)
    obs, _ = env.reset(seed=5)
    assert obs["image"].shape == (2, 3, 8, 8) and env.is_first.all()
    env.step(np.array([1, 2]))
    obs, reward, terminated, truncated, _ = env.step(np.array([1, 1]))  # counts 2 and 3
    assert terminated.tolist() == [False, True] and not truncated.any()
    obs, reward, terminated, truncated, _ = env.step(np.array([0, 2]))
    assert env.is_first.tolist() == [False, True]
    assert reward.tolist() == [0.0, 0.0] and not terminated.any()
    assert obs["image"][:, 0, 0, 0].tolist() == [2 * SHADE, 0]
    obs, reward, *_ = env.step(np.array([0, 2]))
    assert obs["image"][1, 0, 0, 0] == 2 * SHADE and reward.tolist() == [0.0, 2.0]
    assert env.observation_space.contains(obs)


def test_vector_with_growing_memory():
    env = WorldModelVectorEnv(CountingModel({3: 1.0}, grows=True), SPEC, at(0), num_envs=2)
    env.reset(seed=5)
    env.step(np.array([1, 2]))
    env.step(np.array([0, 1]))
    obs, *_ = env.step(np.array([1, 1]))  # the second restarts; the first continues from its predicted frame
    assert obs["image"][:, 0, 0, 0].tolist() == [2 * SHADE, 0]
    obs, *_ = env.step(np.array([1, 1]))
    assert obs["image"][:, 0, 0, 0].tolist() == [3 * SHADE, SHADE]


def test_misuse_raises():
    with pytest.raises(ConfigError, match="RandomWorkflow has no world model"):
        ImaginedEpisodes(RandomWorkflow(), SPEC)
    for options in ({"ends": "maybe"}, {"ends": 1.5}, {"horizon": 0}, {"flush_every": 0}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            ImaginedEpisodes(CountingModel(), SPEC, **options)
    env = WorldModelEnv(CountingModel(), SPEC, at(0), horizon=1)
    with pytest.raises(LabError, match="call reset"):
        env.step(0)
    vector = WorldModelVectorEnv(CountingModel(), SPEC, at(0), num_envs=2)
    with pytest.raises(LabError, match="call reset"):
        vector.step(np.zeros(2, np.int64))
    vector.reset()
    with pytest.raises(ConfigError, match="shape"):
        vector.step(np.zeros(3, np.int64))


class Blind(CountingModel):
    """A model without a decoder: rewards and ends only."""

    def dream_observation(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {}


def test_model_without_decoder():
    env = WorldModelEnv(Blind({2: 1.0}), SPEC, at(0), render_mode="rgb_array")
    assert env.reset(seed=0)[0] == {}
    obs, reward, terminated, _, _ = env.step(2)
    assert (obs, reward, terminated) == ({}, 2.0, True) and env.render() is None
    vector = WorldModelVectorEnv(Blind({2: 1.0}), SPEC, at(0), num_envs=2)
    vector.reset(seed=0)
    vector.step(np.array([2, 1]))
    assert vector.step(np.array([0, 1]))[2].tolist() == [False, True]
    flushing = ImaginedEpisodes(Blind(), SPEC, flush_every=1)
    flushing.start(rows(0))
    with pytest.raises(ConfigError, match="needs a model with a decoder"):
        flushing.step(torch.ones(1, dtype=torch.int64))


# ---------------------------------------------------------------- start sequences


def counting_episode(length: int) -> dict[str, np.ndarray]:
    """Rows of an episode of `length` steps, as stored."""
    count = np.arange(length + 1)
    image = np.broadcast_to((count * SHADE)[:, None, None, None], (length + 1, 3, 8, 8)).astype(np.uint8)
    ended = count == length
    return {
        "obs/image": image,
        "action": np.ones(length + 1, np.int64),
        "reward": np.ones(length + 1, np.float32),
        "terminated": ended,
        "truncated": np.zeros(length + 1, bool),
        "is_first": count == 0,
    }


def test_buffer_starts_never_end_an_episode():
    buffer = ReplayBuffer(SPEC.row_columns(), capacity=60, num_streams=1)
    for length in (6, 9, 4):
        episode = counting_episode(length)
        for t in range(length + 1):
            buffer.add({name: value[t : t + 1] for name, value in episode.items()})
    batch = BufferStarts(buffer, 3)(200, torch.Generator().manual_seed(0))
    assert batch.reward.shape == (200, 3)
    assert not batch.terminated.any()
    shades = batch.obs["image"][:, :, 0, 0, 0].long()
    assert (shades.diff(dim=1) == SHADE).all()
    assert set(shades[:, 0].unique().tolist()) == {SHADE * n for n in range(7)}


def test_episode_starts():
    starts = EpisodeStarts([counting_episode(6), counting_episode(2)], 3)
    batch = starts(100, torch.Generator().manual_seed(0))
    assert batch.reward.shape == (100, 3) and not batch.terminated.any()
    assert set(batch.obs["image"][:, 0, 0, 0, 0].tolist()) == {0, SHADE, 2 * SHADE, 3 * SHADE}
    with pytest.raises(ConfigError, match="the longest has 6"):
        EpisodeStarts([counting_episode(6)], 7)


def test_environment_starts():
    starts = EnvironmentStarts(CountingEnv(last=100), 4, choose=lambda obs, is_first: np.array([2]))
    batch = starts(3, torch.Generator().manual_seed(0))
    assert (batch.obs["image"][:, :, 0, 0, 0].long() == torch.tensor([0, 2, 4, 6]) * SHADE).all()
    assert (
        batch.action.tolist() == [[2, 2, 2, 0]] * 3
        and batch.is_first.tolist() == [[True, False, False, False]] * 3
    )
    # An environment that always ends too early still returns its first frames.
    short = EnvironmentStarts(CountingEnv(last=1), 4, choose=lambda obs, is_first: np.array([1]))
    assert short(2, torch.Generator().manual_seed(0)).reward.shape == (2, 1)


# ---------------------------------------------------------------- a real model


def tiny_dreamer(task: str) -> tuple[Any, Spec]:
    config = compose_config(
        ["components/encoder@components.encoder=dict", "debug=tiny", f"environment.task={task}"]
    )
    with make_env(task) as env:
        spec = env.spec
    resolve_config(config, spec)
    return assemble_workflow(config, spec, torch.device("cpu"), optimizers=False), spec


def test_evaluator_steps_world_model():
    workflow, spec = tiny_dreamer("dummy/dict")  # image and vector, two action parts
    with make_env("dummy/dict", num_envs=2, workers=0) as real:
        starts = EnvironmentStarts(real, 3)

        def make(seed: int, render: bool) -> Any:
            return WorldModelVectorEnv(workflow, spec, starts, num_envs=2, seed=seed, horizon=5, ends=None)

        evaluation = Evaluator(make, device="cpu", seed=0).run(workflow, episodes=4)
    assert [episode.length for episode in evaluation.episodes] == [5] * 4
    assert all(np.isfinite(evaluation.returns))


def test_same_seed_same_episode():
    workflow, spec = tiny_dreamer("dummy/continuous")
    with make_env("dummy/continuous", num_envs=1, workers=0) as real:
        env = WorldModelEnv(workflow, spec, EnvironmentStarts(real, 4), ends=None)
        assert isinstance(env, gymnasium.Env)

        def dream(seed: int) -> list[np.ndarray]:
            obs, _ = env.reset(seed=seed)
            seen = [obs["vector"]]
            for _ in range(5):
                obs, reward, *_ = env.step(env.agent_action())
                seen.append(np.append(obs["vector"], reward))
            return seen

        one, again, other = dream(1), dream(1), dream(2)
    assert all(np.array_equal(a, b) for a, b in zip(one, again))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other))


def test_reset_accepts_start():
    env = WorldModelEnv(CountingModel(), SPEC, at(0))
    obs, _ = env.reset(options={"batch": Batch(rows(4, 5).columns)})
    assert count_of(obs) == 5
