import numpy as np
import pytest

from rl_lab.environments.vector import INITIAL_CAPACITY, ActionHistory
from rl_lab.records import ActionSpec

DISCRETE = ActionSpec("discrete", (), choices=(3,))
NO = np.zeros(3, bool)
CONTINUOUS = ActionSpec("continuous", (2,), low=(-1.0, -1.0), high=(1.0, 1.0))


def test_against_plain_lists():
    rng = np.random.default_rng(0)
    history, lists = ActionHistory(DISCRETE, 3), [[], [], []]
    for _ in range(5 * INITIAL_CAPACITY):  # far beyond the first capacity for environment 0, which never ends
        actions = rng.integers(0, 3, 3)
        ignored = np.array([False, rng.random() < 0.1, rng.random() < 0.02])
        history.record(actions, ignored, NO)
        for env in range(3):
            lists[env] = [] if ignored[env] else [*lists[env], int(actions[env])]
        assert history.lengths.tolist() == [len(kept) for kept in lists]
    for env in range(3):
        actions, cuts = history.get(env)
        assert actions.tolist() == lists[env] and cuts == []
    history.reset(range(3))
    assert history.lengths.tolist() == [0, 0, 0] and len(history.get(0)[0]) == 0


@pytest.mark.parametrize(("spec", "dtype"), [(DISCRETE, np.uint8), (CONTINUOUS, np.float32)])
def test_set_restores_get(spec, dtype):
    first, second = ActionHistory(spec, 2), ActionHistory(spec, 2)
    rng = np.random.default_rng(0)
    for _ in range(INITIAL_CAPACITY + 10):
        first.record(rng.integers(0, 2, (2, *spec.shape)), NO[:2], NO[:2])
    assert first.get(1)[0].dtype == dtype
    second.set(1, *first.get(1))
    last = rng.integers(0, 2, (2, *spec.shape))
    for history in (first, second):
        history.record(last, NO[:2], NO[:2])
    np.testing.assert_array_equal(first.get(1)[0], second.get(1)[0])
    assert len(second.get(0)[0]) == 1


def test_more_than_256_choices():
    history = ActionHistory(ActionSpec("discrete", (), choices=(1000,)), 1)
    history.record(np.array([999]), NO[:1], NO[:1])
    assert history.get(0)[0].tolist() == [999]


def test_continued_game_keeps_history():
    history = ActionHistory(DISCRETE, 2)
    yes = np.array([True, False])
    for step, (began, continued) in enumerate(
        [(NO, NO), (NO, NO), (yes, yes), (NO, NO), (yes, yes), (yes, NO)]
    ):
        if step == 5:
            assert history.get(0)[0].tolist() == [0, 1, 0] and history.get(0)[1] == [2, 3]
            copy = ActionHistory(DISCRETE, 2)
            copy.set(0, *history.get(0))
            assert copy.get(0)[1] == [2, 3] and copy.lengths[0] == 3
        history.record(np.array([step % 3, 2]), began[:2], continued[:2])
    assert history.get(0)[0].tolist() == [] and history.get(0)[1] == [] and history.lengths[1] == 6


@pytest.mark.parametrize("limit", [0, 1, 7, INITIAL_CAPACITY, 3 * INITIAL_CAPACITY])
def test_limit(limit):
    history = ActionHistory(DISCRETE, 2, limit=limit)
    for step in range(limit + 5):
        assert history.forgotten.tolist() == [step > limit] * 2 and history.overflowed == (step > limit)
        if step <= limit:
            assert history.get(0)[0].tolist() == [number % 3 for number in range(step)]
        history.record(np.array([step % 3, 0]), NO[:2], NO[:2])
    assert history._actions.shape[1] <= limit + 1
    history.record(np.array([1, 1]), np.array([True, False]), NO[:2])
    history.record(np.array([2, 2]), NO[:2], NO[:2])
    assert history.forgotten.tolist() == [limit < 1, True] and history.lengths.tolist() == [1, limit + 7]
