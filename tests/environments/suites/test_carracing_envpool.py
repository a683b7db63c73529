"""EnvPool's CarRacing compared with Gymnasium's: other tracks, but the same physics, rewards, ends and colours."""

import numpy as np
import pytest

pytest.importorskip("Box2D", reason="extra: box2d")
pytest.importorskip("envpool", reason="extra: envpool, 750 MB, so not among those of the tests")

from rl_lab.environments import make_env
from rl_lab.environments.suites import carracing
from rl_lab.errors import ConfigError

FIELD = np.array([102, 204, 102])  # the ground's colour
SPEED = slice(13, 15)  # columns of the bar that shows the speed


def drive(backend, seed, steps=400):
    """Drive straight until the car leaves the field; return frames, rewards, and how the episode ended."""
    env = carracing.make("continuous", backend=backend)
    frames, rewards = [env.reset(seed=seed)[0].copy()], []
    for _ in range(steps):
        frame, reward, terminated, truncated, _ = env.step(np.array([0.0, 0.5, 0.0], np.float32))
        frames.append(frame.copy())
        rewards.append(reward)
        if terminated or truncated:
            break
    env.close()
    return np.array(frames), np.array(rewards), (terminated, truncated)


@pytest.fixture(scope="module")
def drives():
    return {backend: drive(backend, seed=2) for backend in carracing.BACKENDS}


def test_same_physics_and_ends(drives):
    ours, theirs = drives["gymnasium"], drives["envpool"]
    assert ours[2] == theirs[2] == (True, False)  # off the field
    assert ours[1][-1] == theirs[1][-1] == -100
    # Of 270 steps; how far the field's end is depends on where the track begins.
    assert abs(len(ours[1]) - len(theirs[1])) <= 5
    bars = [(frames[:250, -12:, SPEED].max(-1) > 128).any(2).sum(1) for frames, _, _ in (ours, theirs)]
    assert np.abs(bars[0] - bars[1]).max() <= 1 and bars[0].max() == 5


def test_same_rewards(drives):
    """-0.1 per frame, and 1000 / N for each of the N tiles of the track."""
    for _, rewards, _ in drives.values():
        gained = np.round(rewards[:-1] + 0.1, 3)
        tile = gained[gained > 0].min()
        assert 200 < 1000 / tile < 400  # the tiles of a track
        np.testing.assert_allclose(gained / tile, np.round(gained / tile), atol=1e-2)


def test_same_colours_and_positions(drives):
    """Edges are not antialiased and colours differ by up to 2; otherwise frames on a straight are the same."""
    last = [frames[60].astype(int) for frames, _, _ in drives.values()]
    for frame in last:
        ground = np.abs(frame[:84] - FIELD).max(-1) <= 3
        assert ground.mean() > 0.3
        car = (frame[..., 0] > 150) & (frame[..., 1] < 80)
        rows, columns = np.nonzero(car[60:80, 40:56])
        assert len(rows) > 8 and abs(columns.mean() - 8) < 1.5
    around = [frame[60:84, 40:56] for frame in last]
    road = [(np.ptp(frame, axis=-1) < 12).mean() for frame in around]  # grey
    assert abs(road[0] - road[1]) < 0.1


def test_seed_determines_episode():
    left, middle, right = (drive("envpool", seed, steps=20) for seed in (5, 5, 6))
    np.testing.assert_array_equal(left[0], middle[0])
    np.testing.assert_array_equal(left[1], middle[1])
    assert (left[0] != right[0]).any()


def test_limits_and_unsupported_options():
    with make_env("carracing/continuous", 1, workers=0, backend="envpool", time_limit=7) as env:
        env.reset()
        ends = [env.step(np.zeros((1, 3), np.float32))[3][0] for _ in range(7)]
        assert ends == [False] * 6 + [True]
    with pytest.raises(ConfigError, match="backend=envpool does not support carracing/discrete"):
        make_env("carracing/discrete", backend="envpool")
    with pytest.raises(ConfigError, match="backend=envpool does not support domain_randomize"):
        make_env("carracing/continuous", backend="envpool", domain_randomize=True)
