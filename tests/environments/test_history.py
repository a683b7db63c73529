import numpy as np
import pytest

from rl_lab.environments.history import FIRST_CAPACITY, ActionHistory
from rl_lab.records import ActionSpec

DISCRETE = ActionSpec("discrete", (), choices=(3,))
CONTINUOUS = ActionSpec("continuous", (2,), low=(-1.0, -1.0), high=(1.0, 1.0))


def test_against_plain_lists():
    rng = np.random.default_rng(0)
    history, lists = ActionHistory(DISCRETE, 3), [[], [], []]
    for _ in range(5 * FIRST_CAPACITY):  # far beyond the first capacity for environment 0, which never ends
        actions = rng.integers(0, 3, 3)
        ignored = np.array([False, rng.random() < 0.1, rng.random() < 0.02])
        history.record(actions, ignored)
        for env in range(3):
            lists[env] = [] if ignored[env] else [*lists[env], int(actions[env])]
        assert history.lengths.tolist() == [len(kept) for kept in lists]
    for env in range(3):
        assert history.get(env).tolist() == lists[env]
    history.clear()
    assert history.lengths.tolist() == [0, 0, 0] and len(history.get(0)) == 0


@pytest.mark.parametrize(("spec", "dtype"), [(DISCRETE, np.uint8), (CONTINUOUS, np.float32)])
def test_set_takes_back_what_get_gave(spec, dtype):
    first, second = ActionHistory(spec, 2), ActionHistory(spec, 2)
    rng = np.random.default_rng(0)
    for _ in range(FIRST_CAPACITY + 10):
        first.record(rng.integers(0, 2, (2, *spec.shape)), np.array([False, False]))
    assert first.get(1).dtype == dtype
    second.set(1, first.get(1))
    last = rng.integers(0, 2, (2, *spec.shape))
    for history in (first, second):
        history.record(last, np.array([False, False]))
    np.testing.assert_array_equal(first.get(1), second.get(1))
    assert len(second.get(0)) == 1


def test_many_choices_need_more_than_a_byte():
    history = ActionHistory(ActionSpec("discrete", (), choices=(1000,)), 1)
    history.record(np.array([999]), np.array([False]))
    assert history.get(0).tolist() == [999]
