from __future__ import annotations

import importlib.util
import io
import math
import re
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from PIL import Image

from rl_lab.errors import ConfigError, LabError, MissingPackageError, install_line
from rl_lab.utils.files import read_jsonl
from rl_lab.utils.logger import ExperimentLogger
from rl_lab.utils.metrics import prefixed


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def clip() -> np.ndarray:
    frames = np.zeros((5, 3, 16, 16), dtype=np.uint8)
    for t in range(5):
        frames[t, :, :, 2 * t] = 255
    return frames


def test_prefixes():
    metrics = {"loss": 1, "train/loss": 2, "report/x": 3, "trainer/loss": 4, "log/x": 5}
    expected = {
        "controller/loss": 1,
        "train/loss": 2,
        "report/x": 3,
        "controller/trainer/loss": 4,
        "controller/log/x": 5,
    }
    assert prefixed(metrics, "controller") == prefixed(metrics, "controller/") == expected


def test_scalars_in_file_and_tensorboard(tmp_path):
    with ExperimentLogger(tmp_path) as logger:
        logger.scalars(
            {"train/loss": torch.tensor(0.5), "train/bad": math.nan}, step=10, frames=40, updates=3
        )
        logger.scalars({"train/loss": np.float32(0.25)}, step=20)
        assert logger.metrics_bytes() == (tmp_path / "metrics.jsonl").stat().st_size
    first, second = read_jsonl(tmp_path / "metrics.jsonl")
    assert (first["step"], first["frames"], first["updates"], first["train/loss"]) == (10, 40, 3, 0.5)
    assert math.isnan(first["train/bad"]) and first["time"] > 1.6e9
    assert second["train/loss"] == 0.25 and "frames" not in second
    board = events(tmp_path / "tensorboard")
    assert [(event.step, event.value) for event in board.Scalars("train/loss")] == [(10, 0.5), (20, 0.25)]
    assert [event.value for event in board.Scalars("time/frames")] == [40]
    assert math.isnan(board.Scalars("train/bad")[0].value)


def test_images_videos_and_text(tmp_path):
    with ExperimentLogger(tmp_path) as logger:
        file = logger.video("eval/episode", clip(), step=7, fps=10, folder="episodes/test")
        assert logger.image("report/still", clip()[0], step=7) is None
        still = logger.image("report/still", torch.as_tensor(clip()[0]), step=8, folder="reconstructions")
        logger.text("config", "a: **1**", step=0)
    assert file.parent == tmp_path / "media" / "episodes" / "test" and file.stem == "eval_episode_000000007"
    assert file.suffix in (".mp4", ".gif") and file.stat().st_size > 100
    assert still == tmp_path / "media" / "reconstructions" / "report_still_000000008.png"
    board = events(tmp_path / "tensorboard")
    (animation,) = board.Images("eval/episode")
    with Image.open(io.BytesIO(animation.encoded_image_string)) as image:
        assert image.format == "GIF" and image.n_frames == 5 and image.size == (16, 16)
    assert [event.step for event in board.Images("report/still")] == [7, 8]
    (text,) = board.Tensors("config")
    assert text.tensor_proto.string_val[0] == b"a: **1**"


def test_counts_of_trouble_are_shown_once_there_is_some(tmp_path):
    with ExperimentLogger(tmp_path) as logger:
        for step, count in enumerate([0, 0, 2, 0]):
            logger.scalars({"collect/env_restarts": count, "train/loss": 0.0}, step=step)
    assert [row["collect/env_restarts"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 0, 2, 0]
    board = events(tmp_path / "tensorboard")
    assert [event.step for event in board.Scalars("collect/env_restarts")] == [2, 3]
    assert [event.step for event in board.Scalars("train/loss")] == [0, 1, 2, 3]


def test_hyperparameters_are_in_their_tab(tmp_path):
    from tensorboard.plugins.hparams import metadata

    with ExperimentLogger(tmp_path) as logger:
        logger.hparams({"algorithm.rate": 0.5, "task": "CartPole-v1", "off": None, "flag": True})
    board = events(tmp_path / "tensorboard")
    (content,) = board.PluginTagToContent("hparams").values()
    info = metadata.parse_session_start_info_plugin_data(content)
    assert set(info.hparams) == {"algorithm.rate", "task", "flag"}
    assert info.hparams["algorithm.rate"].number_value == 0.5


@pytest.mark.parametrize("folder", ["../..", "/tmp", "episodes/../../..", "link"])
def test_media_cannot_leave_the_run_folder(tmp_path, folder):
    run = tmp_path / "run"
    (run / "media").mkdir(parents=True)
    (run / "media" / "link").symlink_to(tmp_path)
    with ExperimentLogger(run, tensorboard=False) as logger:
        with pytest.raises(ConfigError, match="leads out of"):
            logger.video("x", clip(), step=1, folder=folder)
        with pytest.raises(ConfigError, match="leads out of"):
            logger.image("x", clip()[0], step=1, folder=folder)
        # Names come from workflows and are made harmless.
        file = logger.video("../../evil name/*", clip(), step=1, folder="recordings")
    assert file.parent == run / "media" / "recordings"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_invalid_array_raises_with_name(tmp_path):
    with (
        ExperimentLogger(tmp_path, tensorboard=False) as logger,
        pytest.raises(LabError, match=r"'dream'.*float64"),
    ):
        logger.video("dream", np.zeros((2, 3, 4, 4)), step=1)


def test_resume_logs_each_step_once(tmp_path):
    with ExperimentLogger(tmp_path, resume_bytes=0) as logger:
        for step in (1, 2):
            logger.scalars({"train/x": float(step)}, step=step)
        size = logger.metrics_bytes()
        for step in (3, 4):
            logger.scalars({"train/x": -1.0}, step=step)
    with ExperimentLogger(tmp_path, resume_step=2, resume_bytes=size) as logger:
        for step in (3, 4, 5):
            logger.scalars({"train/x": float(step)}, step=step)
    assert [row["train/x"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    board = events(tmp_path / "tensorboard")
    assert [event.value for event in board.Scalars("train/x")] == [1, 2, 3, 4, 5]


def test_start_over_in_used_folder(tmp_path):
    for value in (1.0, 2.0):
        with ExperimentLogger(tmp_path, resume_bytes=0) as logger:
            logger.scalars({"train/x": value}, step=0)
    assert [row["train/x"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [2.0]
    assert [event.value for event in events(tmp_path / "tensorboard").Scalars("train/x")] == [2.0]


def test_failing_output_warns_once(tmp_path, monkeypatch):
    with ExperimentLogger(tmp_path) as logger:

        def fails(*args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(logger._tensorboard, "scalars", fails)
        with pytest.warns(UserWarning, match="TensorBoard failed.*No space left") as caught:
            for step in range(3):
                logger.scalars({"train/x": 1.0}, step=step)
        assert len(caught) == 1
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 3
    logger.close()  # again is harmless


def test_no_folder_without_tensorboard(tmp_path):
    with ExperimentLogger(tmp_path, tensorboard=False) as logger:
        logger.scalars({"train/x": 1.0}, step=1)
        logger.text("a", "b")
        logger.flush()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_wandb_missing_or_unknown_mode(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingPackageError, match=re.escape(install_line("track"))):
        ExperimentLogger(tmp_path, wandb_mode="offline")
    with pytest.raises(ConfigError, match=r"'ofline'.*Did you mean 'offline'"):
        ExperimentLogger(tmp_path, wandb_mode="ofline")
    assert list(tmp_path.iterdir()) == []


def test_wandb_without_login(tmp_path, monkeypatch):
    class UsageError(Exception):
        pass

    def init(**settings):
        raise UsageError("No API key configured. Use `wandb login` to log in.\nMore lines")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    message = r"^wandb\.mode=online: wandb cannot start \(UsageError: No API key .*\): run wandb login, or set wandb.mode"
    with pytest.raises(ConfigError, match=message):
        ExperimentLogger(tmp_path, wandb_mode="online")
    assert list(tmp_path.iterdir()) == []


def test_wandb_logs_and_resumes(tmp_path, monkeypatch):
    calls: list[tuple] = []

    class Run:
        id = "run7"

        def log(self, row, step):
            calls.append(("log", sorted(row), step))

        def finish(self):
            calls.append(("finish",))

    def init(**settings):
        calls.append(("init", settings))
        return Run()

    fake = types.SimpleNamespace(init=init, Image=lambda array: array, Video=lambda file: file)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for _ in range(2):
        with ExperimentLogger(
            tmp_path, tensorboard=False, wandb_mode="offline", wandb_options={"project": "p", "name": None}
        ) as logger:
            logger.scalars({"train/x": 1.0}, step=3, frames=6)
            logger.image("report/i", clip()[0], step=3)
            logger.video("report/v", clip(), step=3)
    inits = [call[1] for call in calls if call[0] == "init"]
    assert [settings["id"] for settings in inits] == [None, "run7"]
    assert inits[0]["mode"] == "offline" and inits[0]["project"] == "p" and "name" not in inits[0]
    assert ("log", ["time/frames", "train/x"], 3) in calls and ("log", ["report/v"], 3) in calls
    assert calls[-1] == ("finish",)


def test_trackio_logs_and_resumes(tmp_path, monkeypatch):
    calls: list[tuple] = []
    run = types.SimpleNamespace(
        log=lambda row, step: calls.append(("log", sorted(row), step)),
        finish=lambda: calls.append(("finish",)),
    )

    def init(**settings):
        calls.append(("init", settings))
        return run

    fake = types.SimpleNamespace(init=init, Image=lambda array: array, Video=lambda file: file)
    monkeypatch.setitem(sys.modules, "trackio", fake)
    for folder in (tmp_path / "day" / "time", tmp_path / "day" / "moved"):
        with ExperimentLogger(folder, tensorboard=False, trackio="p") as logger:
            logger.scalars({"train/x": 1.0}, step=3, frames=6)
            logger.image("report/i", clip()[0], step=3)
            logger.video("report/v", clip(), step=3)
        (tmp_path / "day" / "time").rename(tmp_path / "day" / "moved") if folder.name == "time" else None
    settings = {"project": "p", "name": "day-time", "resume": "allow", "embed": False}
    assert [call[1] for call in calls if call[0] == "init"] == [settings, settings]  # the name stays
    assert ("log", ["time/frames", "train/x"], 3) in calls and ("log", ["report/v"], 3) in calls
    assert calls[-1] == ("finish",)
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(MissingPackageError, match=re.escape(install_line("trackio"))):
        ExperimentLogger(tmp_path / "other", trackio="p")
    assert list((tmp_path / "other").iterdir()) == []


@pytest.mark.extras
def test_real_trackio_keeps_the_metrics(tmp_path, subprocess_env):
    """In its own process: Trackio reads its folder when it is imported."""
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("not run: trackio needs pillow<13, and the tests have 13")
    code = (
        "import sys; from rl_lab.utils.logger import ExperimentLogger\n"
        "for step in (1, 2):\n"
        "    with ExperimentLogger(sys.argv[1], tensorboard=False, trackio='p') as log:\n"
        "        log.scalars({'train/x': float(step)}, step=step)\n"
        "import trackio\n"
        "print('runs:', [run.name for run in trackio.Api().runs('p')])"
    )
    environ = subprocess_env | {"TRACKIO_DIR": str(tmp_path / "trackio")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a" / "b")], capture_output=True, text=True, env=environ
    )
    assert done.returncode == 0, done.stderr
    assert "runs: ['a-b']" in done.stdout.splitlines()  # one run, which the second logger continued


def test_logger_imports_lazily(tmp_path, subprocess_env):
    code = (
        "import sys; from rl_lab.utils.logger import ExperimentLogger; "
        "ExperimentLogger(sys.argv[1], tensorboard=False).close(); "
        "print([m for m in ('wandb', 'trackio', 'imageio_ffmpeg', 'tensorboard', 'torch', 'PIL') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=subprocess_env
    )
    assert done.stdout.strip() == "[]", done.stderr
