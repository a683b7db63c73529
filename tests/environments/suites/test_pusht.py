"""Push-T: areas against values computed by hand, physics, exact resets, score. Against gym-pusht: scripts/dev/compare_pusht.py."""

import math

import numpy as np
import pytest

from rl_lab.environments import make_env
from rl_lab.environments.suites.pusht import BAR, GOAL, KEYPOINTS, STEM, PushT, area, overlap, shrink
from rl_lab.errors import ConfigError

pytest.importorskip("pymunk", reason="extra: pusht")
SQUARE = [(0, 0), (2, 0), (2, 2), (0, 2)]


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (SQUARE, 4.0),
        (SQUARE[::-1], 4.0),
        ([(1, 1), (3, 1), (3, 3), (1, 3)], 1.0),
        ([(2, 0), (4, 0), (4, 2), (2, 2)], 0.0),  # they share an edge
        ([(5, 5), (6, 5), (6, 6)], 0.0),
        ([(0.5, 0.5), (1.5, 0.5), (1.0, 1.0)], 0.25),  # inside
        ([(1, -1), (3, 1), (1, 3), (-1, 1)], 4.0),  # around it
        ([(1, 0), (2, 1), (1, 2), (0, 1)], 2.0),
    ],
)
def test_overlap_of_convex_polygons(other, expected):
    assert overlap(SQUARE, other) == pytest.approx(expected)
    assert overlap(other, SQUARE) == pytest.approx(expected)


def test_block_is_a_bar_and_a_stem():
    assert area(BAR) == 120 * 30 and area(STEM) == 30 * 90
    assert overlap(BAR, STEM) == 0


def test_reset_to_a_state_is_exact_and_on_the_goal_ends_with_reward_one():
    env = PushT()
    wanted = np.array([100.0, 120.0, 300.0, 200.0, 1.0])
    obs, _ = env.reset(options={"state": wanted})
    np.testing.assert_allclose(obs, wanted, atol=1e-3)
    assert env.coverage() < 0.5
    env.reset(options={"state": [50, 50, *GOAL]})
    assert env.coverage() == pytest.approx(1.0, abs=1e-6)
    _, reward, terminated, truncated, info = env.step(np.array([50.0, 50.0]))
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info["log/success"] == 1.0 and info["log/max_reward"] == 1.0


def test_keypoints_follow_the_block():
    env = PushT("keypoints")
    obs, _ = env.reset(options={"state": [10, 20, 300, 200, math.pi / 2]})
    turned = np.stack([300 - KEYPOINTS[:, 1], 200 + KEYPOINTS[:, 0]], axis=1)
    np.testing.assert_allclose(obs[:18].reshape(9, 2), turned, atol=1e-3)
    np.testing.assert_allclose(obs[18:], [10, 20], atol=1e-3)


def test_agent_follows_its_controller_and_pushes_the_block():
    env = PushT()
    env.reset(options={"state": [100, 300, 300, 300, 0]})
    x, speed = 100.0, 0.0
    for _ in range(10):  # the PD controller, by hand: Euler steps of 0.01 s
        speed += (100.0 * (200.0 - x) - 20.0 * speed) * 0.01
        x += speed * 0.01
    obs, *_ = env.step(np.array([200.0, 300.0]))
    assert obs[0] == pytest.approx(x, abs=1e-3) and obs[1] == pytest.approx(300, abs=1e-3)
    for _ in range(20):
        obs, *_ = env.step(np.array([330.0, 310.0]))
    assert obs[2] > 310  # the block has moved to the right


def test_starts_are_seeded_and_in_the_published_range():
    env = PushT()
    starts = np.array([env.reset(seed=seed)[0] for seed in range(50)])
    np.testing.assert_array_equal(env.reset(seed=7)[0], starts[7])
    assert (starts[:, :2] >= 50).all() and (starts[:, :2] < 450).all()
    # gym-pusht 0.1.8, seed 0: the drawn block position (204, 223), moved by the turn about its centre of mass.
    np.testing.assert_allclose(starts[0], [390, 304, 241.542557, 268.516974, 3.399037], atol=1e-4)


def test_score_of_an_episode_is_its_largest_reward():
    with make_env("pusht/state", 1, workers=0, time_limit=30, seed=3) as env:
        env.reset()
        best, logged = 0.0, None
        for step in range(30):
            action = np.array([[math.sin(step), math.cos(step)]], np.float32)
            _, reward, _, truncated, info = env.step(action)
            best = max(best, float(reward[0]))
            logged = info.get("log", {}).get(0, logged)
    assert truncated[0] and logged["log/max_reward"] == pytest.approx(best, abs=1e-6)


def test_shrink_is_bilinear_at_pixel_centres():
    ramp = np.repeat(np.arange(12, dtype=np.uint8)[None, :, None] * 20, 12, axis=0).repeat(3, axis=2)
    # Output pixel 0 of 4 has its centre at 0.5 · 3 − 0.5 = 1: exactly pixel 1; of 8, at 0.25.
    np.testing.assert_array_equal(shrink(ramp, 4)[0, :, 0], [20, 80, 140, 200])
    np.testing.assert_array_equal(shrink(ramp, 8)[0, :2, 0], [5, 35])


def test_image_shows_goal_and_agent():
    env = PushT("pixels")
    obs, _ = env.reset(options={"state": [50, 450, 400, 100, 0]})
    image = obs["image"]
    assert image.shape == (96, 96, 3)
    assert tuple(image[50, 46]) == (144, 238, 144)  # the goal
    assert tuple(image[84, 9]) == (78, 126, 255)  # the agent: RoyalBlue, 1.2 times as bright
    assert (image[60, 10] == 255).all()


def test_unknown_task_names_the_closest():
    with pytest.raises(ConfigError, match=r"no task 'pusht/keypoint'.*keypoints"):
        make_env("pusht/keypoint")
