"""`Batch.transitions()` undoes what the TrajectoryAdapter does, for any episodes of any environments."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_lab.buffers.trajectory import TrajectoryAdapter
from rl_lab.records import ActionSpec, ArraySpec, Batch, Spec

SPEC = Spec(
    name="test",
    observations={"vector": ArraySpec((2,), "float32")},
    action=ActionSpec("discrete", (), (5,)),
)


@st.composite
def steps(draw: st.DrawFn) -> dict[str, np.ndarray]:
    """Plain steps (N, T) as environments with NextStep autoreset give them: after an end, a reset without reward."""
    streams, length = draw(st.integers(1, 3)), draw(st.integers(2, 24))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ends = random.random((streams, length)) < draw(st.sampled_from([0.0, 0.2, 0.5]))
    for t in range(1, length):
        ends[:, t] &= ~ends[:, t - 1]  # the step after an end only resets
    reset = np.concatenate([np.zeros((streams, 1), bool), ends[:, :-1]], axis=1)
    terminated = ends & (random.random(ends.shape) < 0.5)
    return {
        "observations": random.normal(size=(streams, length, 2)).astype(np.float32),
        "actions": random.integers(0, 5, (streams, length)),
        "rewards": np.where(reset, 0.0, random.normal(size=ends.shape)).astype(np.float32),
        "terminated": terminated,
        "truncated": ends & ~terminated,
    }


@settings(deadline=None, max_examples=200)
@given(plain=steps(), cuts=st.sets(st.integers(1, 23)))
def test_transitions_are_the_plain_steps_again(plain: dict[str, np.ndarray], cuts: set[int]) -> None:
    streams, length = plain["rewards"].shape
    adapter = TrajectoryAdapter(SPEC)
    edges = [0, *sorted(cut for cut in cuts if cut < length), length]
    parts = [
        adapter.convert({name: value[:, begin:end] for name, value in plain.items()})
        for begin, end in itertools.pairwise(edges)
    ]
    rows = {name: np.concatenate([part[name] for part in parts if part], axis=1) for name in parts[0] or {}}
    assert rows["reward"].shape == (streams, length)
    batch = Batch({name: torch.from_numpy(value) for name, value in rows.items()})
    found = {name: value.numpy() for name, value in batch.transitions().items()}
    valid = found["valid"]
    # Every step but the last is found again, except the steps that only reset the environment.
    ended = plain["terminated"] | plain["truncated"]
    reset = np.concatenate([np.zeros((streams, 1), bool), ended[:, :-1]], axis=1)
    np.testing.assert_array_equal(valid, ~reset[:, :-1])
    for name, column in (("observations", "observations"), ("actions", "actions"), ("rewards", "rewards")):
        np.testing.assert_array_equal(found[name][valid], plain[column][:, :-1][valid])
    np.testing.assert_array_equal(found["terminated"][valid], plain["terminated"][:, :-1][valid])
    np.testing.assert_array_equal(found["dones"][valid], ended[:, :-1][valid])
    np.testing.assert_array_equal(found["next_observations"][valid], plain["observations"][:, 1:][valid])
