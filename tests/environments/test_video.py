"""Videos of training episodes: selection, length, resume, and the command line."""

import numpy as np
import pytest

from rl_lab.environments import env_config_options, make_env
from rl_lab.environments import rendering as video
from rl_lab.errors import ConfigError

imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg", reason="extra: video")


def videos(folder):
    return {file.stem: count_frames(file) for file in sorted(folder.iterdir())}


def count_frames(file):
    return imageio_ffmpeg.count_frames_and_secs(str(file))[0]


def step(env, times):
    for _ in range(times):
        env.step(np.zeros(env.num_envs, np.int64))


@pytest.mark.parametrize("workers", [0, 2])
def test_every_nth_episode_is_recorded(tmp_path, workers):
    options = {"video_every": 2, "video_folder": tmp_path / "videos", "length": 6}
    with make_env("dummy/count", 2, workers=workers, seed=3, **options) as env:
        env.reset()
        step(env, 4 * 7 + 3)  # an episode has 6 steps and a reset; the fifth one is still open
        assert videos(tmp_path / "videos") == {"episode_000000000": 7, "episode_000000002": 7}


def test_resumed_run_records_complete_episode(tmp_path):
    options = {"video_every": 2, "video_folder": tmp_path, "length": 6}
    with make_env("dummy/count", 2, workers=0, seed=3, **options) as env:
        env.reset()
        step(env, 2 * 7 + 3)
        state = env.get_state()
    (tmp_path / "episode_000000000.mp4").unlink()
    with make_env("dummy/count", 2, workers=0, seed=3, **options) as env:
        env.reset()
        assert env.set_state(state) == []
        step(env, 2 * 7)
    assert videos(tmp_path) == {"episode_000000002": 7}


def test_video_length_and_size_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "MAX_FRAMES", 4)
    monkeypatch.setattr(video, "MAX_SIDE", 20)
    assert video._reduced(np.zeros((50, 30, 3), np.uint8)).shape == (17, 10, 3)
    assert video._reduced(np.zeros((20, 8, 3), np.uint8)).shape == (20, 8, 3)
    with make_env("dummy/count", 1, workers=0, video_every=1, video_folder=tmp_path, length=9) as env:
        env.reset(seed=77)  # a seed of another run: episodes are counted
        step(env, 12)
        assert videos(tmp_path) == {"episode_000000000": 4}


@pytest.mark.parametrize("workers", [0, 1])
def test_failure_is_reported_and_the_episode_goes_on(tmp_path, workers):
    (tmp_path / "file").write_text("in the way")
    options = {"video_every": 1, "video_folder": tmp_path / "file", "length": 2}
    with make_env("dummy/count", 1, workers=workers, **options) as env:
        env.reset()
        assert env.take_side_failures() == []
        step(env, 9)
        failures = env.take_side_failures()
        assert len(failures) == 3 and all("FileExistsError" in text for text in failures)
        assert env.take_side_failures() == [] and env.restarts == 0


@pytest.mark.parametrize("kind", ["raise", "none", "float", "shape"])
def test_render_that_fails_does_not_end_the_episode(tmp_path, kind):
    options = {"video_every": 1, "video_folder": tmp_path, "render": kind, "length": 4}
    with make_env("tests.environments.sample_envs:BadRender", 1, workers=0, **options) as env:
        env.reset()
        step(env, 12)
        failures = env.take_side_failures()
        assert failures and "Traceback" in failures[0] and env.restarts == 0
        assert not videos(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"video_every": 3}, "video_every needs video_folder"),
        ({"video_every": -1, "video_folder": "."}, r"video_every=-1 must be an integer"),
        ({"video_every": 0.5, "video_folder": "."}, r"video_every=0.5 must be an integer"),
    ],
)
def test_invalid_options_raise(options, message):
    with pytest.raises(ConfigError, match=message):
        make_env("dummy/count", **options)


def test_command_line(tmp_path):
    """Training records videos to its run folder; evaluation does not."""
    import rl_lab

    words = ["environment=dummy_discrete", "environment.num_envs=2", "environment.video_every=3"]
    quiet = ["training.total_timesteps=64", "training.report.every_env_steps=null", f"run_dir={tmp_path}/run"]
    result = rl_lab.train("random_cartpole", [*words, *quiet], say=lambda line: None)
    found = videos(result.path / "media" / "episodes" / "train")
    assert list(found)[:2] == ["episode_000000000", "episode_000000003"]
    node = {"task": "dummy/discrete", "video_every": 3, "eval": {"num_envs": 1}}
    for evaluation in (False, True):
        assert "video_every" not in env_config_options(node, evaluation=evaluation)
