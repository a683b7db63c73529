from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.buffers.trajectory import TrajectoryAdapter
from rl_lab.errors import ConfigError
from rl_lab.records import ActionSpec, ArraySpec, BatchSpec, Spec

DISCRETE = ActionSpec("discrete", (), choices=(4,))
VECTOR = Spec("count", {"vector": ArraySpec((2,), "float32")}, DISCRETE)


class CountingEnv:
    """N counters that end after `lengths[n]` steps and reset on the step after: the NextStep rule.

    The observation is (episode, step in the episode); reward is the step's number, so it says what it followed.
    """

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = np.array(lengths)
        self.episode = np.zeros(len(lengths), dtype=int)
        self.count = np.zeros(len(lengths), dtype=int)
        self.done = np.zeros(len(lengths), dtype=bool)

    def observe(self) -> np.ndarray:
        return np.stack([self.episode, self.count], axis=1).astype(np.float32)

    def step(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        resetting = self.done
        self.episode = self.episode + resetting
        self.count = np.where(resetting, 0, self.count + 1)
        reward = np.where(resetting, 0, self.count).astype(np.float32)
        self.done = ~resetting & (self.count == self.lengths)
        truncated = self.done & (self.episode % 2 == 1)  # odd episodes are truncated
        return self.observe(), reward, self.done & ~truncated, truncated


def plain_steps(lengths: list[int], steps: int) -> list[dict[str, np.ndarray]]:
    env = CountingEnv(lengths)
    obs, taken = env.observe(), []
    for step in range(steps):
        action = np.full(len(lengths), step % 3 + 1)
        following, reward, terminated, truncated = env.step()
        taken.append(
            {
                "observations": obs,
                "actions": action,
                "rewards": reward,
                "dones": terminated | truncated,
                "terminated": terminated,
                "truncated": truncated,
            }
        )
        obs = following
    return taken


def check_rows(rows: dict[str, np.ndarray], lengths: list[int], step: int) -> None:
    """Check that reward, ends and is_first of each row match its observation (episode, count)."""
    episode, count = rows["obs/vector"][:, 0], rows["obs/vector"][:, 1]
    last = count == np.array(lengths)
    assert np.array_equal(rows["reward"], count)  # the reward returned with this count; 0 at a reset
    assert np.array_equal(rows["is_first"], count == 0)
    assert np.array_equal(rows["terminated"], last & (episode % 2 == 0))
    assert np.array_equal(rows["truncated"], last & (episode % 2 == 1))
    assert np.array_equal(rows["action"], np.where(last, 0, step % 3 + 1))


def test_rows_match_environment() -> None:
    lengths = [3, 5, 1]
    adapter = TrajectoryAdapter(VECTOR)
    for step, trajectory in enumerate(plain_steps(lengths, 40)):
        rows = adapter.convert(trajectory)
        assert rows is not None and set(rows) == set(VECTOR.row_columns())
        check_rows(rows, lengths, step)


def test_transitions_invert_conversion() -> None:
    """Batch.transitions() of the stored rows returns the original steps."""
    adapter = TrajectoryAdapter(VECTOR)
    buffer = ReplayBuffer(VECTOR.row_columns(), capacity=120, num_streams=3)
    steps = plain_steps([3, 5, 7], 40)
    for trajectory in steps:
        buffer.add(adapter.convert(trajectory))
    spec = BatchSpec(size=32, length=3, boundary="within")
    batch = buffer.sample(spec, generator=torch.Generator().manual_seed(0))
    transitions = batch.transitions()
    assert transitions["valid"].all()
    for sequence in range(32):
        stream, start = int(batch.index.stream[sequence]), int(batch.index.position[sequence])
        for offset in range(2):
            given = steps[start + offset]
            for ours, theirs in (
                ("observations", "observations"),
                ("rewards", "rewards"),
                ("dones", "dones"),
            ):
                assert np.array_equal(transitions[ours][sequence, offset].numpy(), given[theirs][stream])
            assert int(transitions["actions"][sequence, offset]) == given["actions"][stream]


def test_many_steps_at_once() -> None:
    steps = plain_steps([3, 5], 30)
    one, many = TrajectoryAdapter(VECTOR), TrajectoryAdapter(VECTOR)
    single = [one.convert(step) for step in steps]
    for begin, end in ((0, 4), (4, 5), (5, 30)):
        block = {key: np.stack([step[key] for step in steps[begin:end]], axis=1) for key in steps[0]}
        rows = many.convert(block)
        for name in rows:
            assert np.array_equal(rows[name], np.stack([row[name] for row in single[begin:end]], axis=1))
    assert str(one.get_state()) == str(many.get_state())


def test_dones_terminated_and_truncated() -> None:
    def ends(**given: list[bool]) -> tuple[list[bool], list[bool]]:
        adapter = TrajectoryAdapter(VECTOR)
        zeros = {"observations": np.zeros((2, 2)), "actions": np.zeros(2, int), "rewards": np.zeros(2)}
        adapter.convert({**zeros, **{key: np.array(value) for key, value in given.items()}})
        rows = adapter.convert({**zeros, "dones": np.zeros(2)})
        return rows["terminated"].tolist(), rows["truncated"].tolist()

    assert ends(dones=[True, False]) == ([True, False], [False, False])
    assert ends(dones=[True, True], terminated=[True, False]) == ([True, False], [False, True])
    assert ends(dones=[True, True], truncated=[True, False]) == ([False, True], [True, False])
    assert ends(terminated=[True, False], truncated=[False, True]) == ([True, False], [False, True])
    with pytest.raises(ConfigError, match="'dones' differs from 'terminated' or 'truncated'"):
        ends(dones=[False, False], terminated=[True, False], truncated=[False, False])


def test_one_hot_actions() -> None:
    step = plain_steps([3, 5], 1)[0]
    one_hot = torch.eye(4)[torch.tensor([2, 3])].requires_grad_()
    rows = TrajectoryAdapter(VECTOR).convert({**step, "actions": one_hot})
    assert rows["action"].tolist() == [2, 3] and rows["action"].dtype == np.int64
    two = Spec("two", VECTOR.observations, ActionSpec("multi_discrete", (2,), choices=(2, 3)))
    side_by_side = np.array([[1, 0, 0, 0, 1], [0, 1, 1, 0, 0]], dtype=np.float32)
    assert TrajectoryAdapter(two).convert({**step, "actions": side_by_side})["action"].tolist() == [
        [0, 2],
        [1, 0],
    ]


def test_continuous_actions_and_named_observations() -> None:
    spec = Spec(
        "named",
        {"image": ArraySpec((3, 4, 4), "uint8"), "vector": ArraySpec((2,), "float32")},
        ActionSpec("continuous", (2,), low=(-1.0, -1.0), high=(1.0, 1.0)),
    )
    trajectory = {
        "observations": {"vector": np.ones((1, 2)), "image": torch.full((1, 3, 4, 4), 7, dtype=torch.uint8)},
        "actions": np.array([[0.5, -0.5]]),
        "rewards": np.ones(1),
        "dones": np.zeros(1, dtype=bool),
        "value": np.array([3.0]),
    }
    rows = TrajectoryAdapter(spec, extras={"value": ArraySpec((), "float32")}).convert(trajectory)
    assert rows["obs/image"].dtype == np.uint8 and rows["obs/vector"].dtype == np.float32
    assert rows["action"].dtype == np.float32 and rows["value"].tolist() == [3.0]


def test_state_keeps_last_reward_and_end() -> None:
    lengths = [3, 4]
    steps = plain_steps(lengths, 30)
    adapter = TrajectoryAdapter(VECTOR)
    for step, trajectory in enumerate(steps):
        twin = TrajectoryAdapter(VECTOR)
        twin.set_state(adapter.get_state())
        check_rows(twin.convert(trajectory), lengths, step)
        check_rows(adapter.convert(trajectory), lengths, step)


def test_restart() -> None:
    adapter = TrajectoryAdapter(VECTOR)
    steps = plain_steps([9, 9], 4)
    for trajectory in steps[:3]:
        adapter.convert(trajectory)
    adapter.restart([1])
    rows = adapter.convert(steps[3])
    assert rows["is_first"].tolist() == [False, True] and rows["reward"].tolist() == [3.0, 0.0]


def test_empty_trajectory() -> None:
    adapter = TrajectoryAdapter(VECTOR)
    assert adapter.convert(None) is None
    empty = {"observations": np.zeros((2, 0, 2)), "actions": np.zeros((2, 0)), "rewards": np.zeros((2, 0))}
    assert adapter.convert({**empty, "dones": np.zeros((2, 0))}) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"observations": np.zeros((2, 3))}, r"\(2, 3\), but \(2, 2\) is expected"),
        (
            {"observations": {"image": np.zeros((2, 2))}},
            r"\['image'\], but the environment has \['vector'\]",
        ),
        ({"observations": np.zeros((2, 2), complex)}, "complex128, but the environment has float32"),
        ({"rewards": np.zeros(3)}, r"rewards have shape \(3,\), but \(2,\)"),
        ({"dones": np.zeros((2, 1))}, r"dones have shape \(2, 1\), but \(2,\)"),
        ({"actions": np.zeros((2, 3))}, r"\(2, 3\), but \(2,\) \(indices\) or \(2, 4\) \(one-hot\)"),
        ({"actions": np.array([0, 4])}, r"below \(4,\); got \[0 4\]"),
        ({"actions": np.full((2, 4), 0.25)}, "each vector needs a single 1"),
        ({"reward": np.zeros(2)}, "Did you mean 'rewards'"),
    ],
)
def test_invalid_values(change: dict[str, Any], message: str) -> None:
    good = plain_steps([3, 5], 1)[0]
    trajectory = {key: good[key] for key in ("observations", "actions", "rewards", "dones")} | change
    with pytest.raises(ConfigError, match=message):
        TrajectoryAdapter(VECTOR).convert(trajectory)


def test_missing_keys_and_environments() -> None:
    step = plain_steps([3, 5], 1)[0]
    with pytest.raises(ConfigError, match="key 'rewards' is missing"):
        TrajectoryAdapter(VECTOR).convert({key: value for key, value in step.items() if key != "rewards"})
    with pytest.raises(ConfigError, match="key 'dones' is missing"):
        TrajectoryAdapter(VECTOR).convert({key: step[key] for key in ("observations", "actions", "rewards")})
    adapter = TrajectoryAdapter(VECTOR)
    adapter.convert(step)
    with pytest.raises(ConfigError, match="3 environments, but the previous one had 2"):
        adapter.convert(plain_steps([1, 1, 1], 1)[0])


def test_same_step_autoreset_is_refused() -> None:
    """With SAME_STEP autoreset the observation after an end belongs to the next episode, so the rows would be wrong."""
    adapter = TrajectoryAdapter(VECTOR)
    step = {"observations": np.zeros((1, 2)), "actions": np.zeros(1, int), "rewards": np.ones(1)}
    adapter.convert({**step, "dones": np.ones(1, dtype=bool)})
    with pytest.raises(ConfigError, match="NEXT_STEP"):
        adapter.convert({**step, "dones": np.zeros(1, dtype=bool)})
