"""A dream beside the environment as a GIF, and the game that the demo dreams of."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

import rl_lab
from rl_lab.environments.suites.dummy import Bounce
from rl_lab.errors import LabError
from rl_lab.run_folder import RunFolder
from rl_lab.tools.dream_report import measure
from rl_lab.tools.dream_report.animation import CAPTION, GAP, dream_gif, side_by_side

QUIET = ["debug=tiny", "logging.progress=off", "logging.tensorboard=false"]


def test_panels_and_their_difference():
    truth, dream = np.full((16, 16, 3), 200, np.uint8), np.full((16, 16, 3), 50, np.uint8)
    image = side_by_side(truth, dream)
    assert image.shape == (CAPTION + 160 + GAP, 3 * 160 + 4 * GAP, 3)
    middle = CAPTION + 80
    values = [int(image[middle, GAP + number * (160 + GAP) + 80, 0]) for number in range(3)]
    assert values == [200, 50, 150]
    assert (image[:CAPTION] < 100).any()  # the names


def test_gif_of_a_run(tmp_path):
    run = rl_lab.train("dreamer_bounce", [*QUIET, f"run_dir={tmp_path / 'run'}"], say=lambda text: None)
    found = measure([RunFolder(run.path)], episodes=2, context=3, horizon=12, segments=1)
    file = dream_gif(found, tmp_path / "dream.gif", episodes=2)
    with Image.open(file) as animation:
        assert getattr(animation, "n_frames", 1) >= 12 and animation.size == (512, 186)


def test_a_model_without_images_has_no_gif(tmp_path):
    run = rl_lab.train("dreamer_cartpole", [*QUIET, f"run_dir={tmp_path / 'run'}"], say=lambda text: None)
    found = measure([RunFolder(run.path)], episodes=2, context=2, horizon=4, segments=1)
    with pytest.raises(LabError, match="predicts no images"):
        dream_gif(found, tmp_path / "dream.gif")


def test_bounce_is_determined_by_its_start_and_can_be_played_without_a_miss():
    def play(seed: int) -> tuple[float, list[np.ndarray]]:
        env = Bounce()
        frame, _ = env.reset(seed=seed)
        frames, total, done = [frame], 0.0, False
        while not done:
            row, column, down, right = env.row, env.column, env.down, env.right
            while row != env.cells - 2 or down < 0:  # where the ball comes down next
                right = -right if not 0 <= column + right < env.cells else right
                row, column = row + down, column + right
                down = 1 if row == 0 else down
                if row == env.cells - 2 and down > 0:
                    break
                down = -1 if row == env.cells - 2 else down
            frame, reward, terminated, done, _ = env.step(1 + int(np.sign(column - env.paddle)))
            frames.append(frame)
            total += reward
            assert not terminated
        return total, frames

    for seed in range(5):
        total, frames = play(seed)
        assert total == Bounce().best_return == 7.0 and len(frames) == 41
        assert all(np.array_equal(a, b) for a, b in zip(frames, play(seed)[1]))
