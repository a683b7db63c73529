"""Comparison with ale-py's vector environment: identical frames before resizing, other frames after it."""

import numpy as np
import pytest

pytest.importorskip("ale_py", reason="extra: atari")

from rl_lab.environments.suites.atari import AtariEnv

NATIVE = (210, 160)


def differences(game, size, decisions=60):
    """Return the fraction of values that differ, for each decision, with the same actions."""
    from ale_py.vector_env import AtariVectorEnv

    theirs = AtariVectorEnv(
        game,
        1,
        num_threads=1,
        img_height=size[0],
        img_width=size[1],
        grayscale=False,
        stack_num=1,
        frameskip=4,
        maxpool=True,
        noop_max=0,
        reward_clipping=False,
        use_fire_reset=False,
    )
    ours = AtariEnv(game, size=size, noops=(0, 0))
    obs, _ = theirs.reset(seed=0)
    image, _ = ours.reset(seed=0)
    actions = np.random.default_rng(0)
    found = []
    for _ in range(decisions):
        found.append(float((obs[0, 0] != image).mean()))
        action = int(actions.integers(ours.action_space.n))
        obs, rewards, ended, _, _ = theirs.step(np.array([action]))
        image, reward, terminated, _, _ = ours.step(action)
        assert (rewards[0], ended[0]) == (reward, terminated)
    theirs.close()
    return found


@pytest.mark.parametrize("game", ["pong", "breakout"])
def test_same_frames_at_emulator_size(game):
    assert not any(differences(game, NATIVE))


def test_other_frames_at_published_size():
    """The reason why it is not used. If this fails, ale-py resizes like Pillow and could be used."""
    assert min(differences("pong", (64, 64))) > 0.05
