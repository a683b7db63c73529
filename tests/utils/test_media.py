from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rl_lab.errors import LabError
from rl_lab.utils import media
from rl_lab.utils.media import gif, png, save_image, save_video, to_frames, to_image


def moving(count: int = 6, channels: int = 3, height: int = 20, width: int = 30) -> np.ndarray:
    frames = np.zeros((count, channels, height, width), dtype=np.uint8)
    for t in range(count):
        frames[t, :, :, 3 * t : 3 * t + 3] = 200
    return frames


def test_to_frames():
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 2, 2)
    assert np.array_equal(to_frames(array), array.transpose(0, 2, 3, 1))
    grey = to_frames(array[:, :1])
    assert grey.shape == (2, 2, 2, 3) and np.array_equal(grey[..., 0], grey[..., 2])
    stacked = np.concatenate([array, array + 100], axis=1)  # two RGB frames: the newer is shown
    assert np.array_equal(to_frames(stacked), to_frames(array + 100))
    four_grey = np.concatenate([array, array[:, :1] + 50], axis=1)
    assert np.array_equal(to_frames(four_grey), to_frames(array[:, :1] + 50))
    assert np.array_equal(to_image(torch.as_tensor(array[0])), to_image(array[0]))


@pytest.mark.parametrize(
    "array", [np.zeros((2, 3, 4, 4)), np.zeros((3, 4, 4), np.uint8), np.zeros((0, 3, 4, 4), np.uint8)]
)
def test_invalid_arrays_raise(array):
    with pytest.raises(LabError, match=r"'dream' cannot be shown.*shape"):
        to_frames(array, "dream")


def test_png_and_gif_round_trip(tmp_path):
    frames = to_frames(moving())
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png(frames[0])))), frames[0])
    with Image.open(io.BytesIO(gif(frames, fps=10))) as animation:
        assert animation.n_frames == 6 and animation.info["duration"] == 100 and animation.info["loop"] == 0
    path = save_image(tmp_path / "deep" / "v1.5", frames[0])
    assert path.name == "v1.5.png" and Image.open(path).size == (30, 20)


@pytest.mark.parametrize(("height", "width"), [(20, 30), (21, 33), (301, 257)])
def test_mp4_with_ffmpeg(tmp_path, height, width):
    reader = pytest.importorskip("imageio_ffmpeg")
    path = save_video(tmp_path / "a" / "clip", to_frames(moving(height=height, width=width)), fps=12)
    assert path.name == "clip.mp4" and [p.name for p in path.parent.iterdir()] == ["clip.mp4"]
    frames = reader.read_frames(str(path))
    meta = next(frames)
    assert meta["fps"] == 12 and sum(1 for _ in frames) == 6
    assert all(side % 2 == 0 for side in meta["size"])
    assert meta["size"][0] >= 230  # small frames are enlarged


def test_gif_without_ffmpeg(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    path = save_video(tmp_path / "clip", to_frames(moving()), fps=12)
    assert path.name == "clip.gif"
    with Image.open(path) as animation:
        assert animation.n_frames == 6 and animation.size == (240, 160)


def test_gif_when_ffmpeg_fails(tmp_path, monkeypatch):
    module = pytest.importorskip("imageio_ffmpeg")

    def broken():
        raise RuntimeError("No ffmpeg exe could be found")

    monkeypatch.setattr(module, "get_ffmpeg_exe", broken)
    with pytest.warns(UserWarning, match="No ffmpeg exe"):
        path = save_video(tmp_path / "clip", to_frames(moving()), fps=12)
    assert path.suffix == ".gif" and [p.name for p in tmp_path.iterdir()] == ["clip.gif"]


HANGS = """#!/bin/sh
sleep 1000 &
echo $! > %s
wait
"""


def test_encoder_that_hangs_is_ended(tmp_path, monkeypatch):
    module = pytest.importorskip("imageio_ffmpeg")
    script, note = tmp_path / "ffmpeg", tmp_path / "child"
    script.write_text(HANGS % note)
    script.chmod(0o755)
    monkeypatch.setattr(module, "get_ffmpeg_exe", lambda: str(script))
    monkeypatch.setattr(media, "ENCODER_TIMEOUT_S", 0.5)
    large = np.zeros((40, 64, 64, 3), np.uint8)  # more than fits into the pipe
    with pytest.warns(UserWarning, match=r"ffmpeg did not end within 0.5 s\)"):
        assert save_video(tmp_path / "clips" / "a", large, fps=12).name == "a.gif"
    child = int(note.read_text())
    status = Path(f"/proc/{child}/status")
    assert not status.exists() or "State:\tZ" in status.read_text(), "what it started is ended, too"
    with pytest.warns(UserWarning, match="did not end before"):  # the next video does not wait again
        assert save_video(tmp_path / "clips" / "b", large, fps=12).name == "b.gif"
    assert sorted(p.name for p in (tmp_path / "clips").iterdir()) == ["a.gif", "b.gif"]


def test_message_of_the_encoder_is_shown(tmp_path, monkeypatch):
    module = pytest.importorskip("imageio_ffmpeg")
    script = tmp_path / "ffmpeg"
    script.write_text("#!/bin/sh\necho no such codec >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(module, "get_ffmpeg_exe", lambda: str(script))
    with pytest.warns(UserWarning, match="ffmpeg: no such codec"):
        assert save_video(tmp_path / "clips" / "a", to_frames(moving()), fps=12).suffix == ".gif"
