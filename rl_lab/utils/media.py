"""Images and videos as bytes and files: PNG and GIF with Pillow, mp4 if imageio-ffmpeg is installed."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.errors import LabError
from rl_lab.utils.files import make_folder, write_atomic

ENCODER_TIMEOUT_S = 60.0  # an encoder that has not ended by then is killed, and the video becomes a GIF
_hung: set[Path] = set()  # folders for which an encoder did not end
SMALLEST_SIDE = 256  # pixels; smaller frames are enlarged in video files, by integer factors


def to_image(array: Any, name: str = "image") -> np.ndarray:
    """(C, H, W) uint8, tensor or array -> (H, W, 3). See `to_frames` for channels other than three."""
    return to_frames(_as_array(array)[None], name)[0]


def to_frames(array: Any, name: str = "video") -> np.ndarray:
    """(T, C, H, W) uint8, tensor or array -> (T, H, W, 3).

    One channel becomes grey. Of frames stacked in the channels only the newest is kept: the last three
    channels, or the last one if their number is not divisible by three.
    """
    frames = _as_array(array)
    if frames.dtype != np.uint8 or frames.ndim != 4 or 0 in frames.shape:
        raise LabError(
            f"'{name}' cannot be shown: it must be uint8 with channels before height and width, "
            f"not {frames.dtype} of shape {frames.shape}"
        )
    channels = frames.shape[1]
    frames = frames[:, -3:] if channels % 3 == 0 else np.repeat(frames[:, -1:], 3, axis=1)
    return np.ascontiguousarray(frames.transpose(0, 2, 3, 1))


def _as_array(array: Any) -> np.ndarray:
    return np.asarray(array.detach().cpu() if hasattr(array, "detach") else array)


def png(image: np.ndarray) -> bytes:
    """(H, W, 3) -> the bytes of a PNG."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG")
    return buffer.getvalue()


def gif(frames: np.ndarray, fps: float) -> bytes:
    """(T, H, W, 3) -> the bytes of an animated GIF that repeats."""
    from PIL import Image

    images = [Image.fromarray(frame) for frame in frames]
    buffer = io.BytesIO()
    duration = max(20, round(100 / fps) * 10)  # GIF counts in 10 ms; browsers slow down frames below 20 ms
    images[0].save(buffer, format="GIF", save_all=True, append_images=images[1:], duration=duration, loop=0)
    return buffer.getvalue()


def save_image(path: Path, image: np.ndarray) -> Path:
    """Write (H, W, 3) as PNG; adds the suffix."""
    target = path.with_name(path.name + ".png")
    write_atomic(target, lambda file: file.write(png(image)))
    return target


def save_video(path: Path, frames: np.ndarray, fps: float) -> Path:
    """Write (T, H, W, 3) as mp4, or as GIF if mp4 is not possible; adds the suffix."""
    frames = _enlarged(frames)
    try:
        return _save_mp4(path.with_name(path.name + ".mp4"), frames, fps)
    except ImportError:
        pass
    except (OSError, RuntimeError, ValueError) as error:  # no ffmpeg binary, or it failed
        warnings.warn(f"no mp4 ({str(error).strip()[:200]}): the video is written as GIF", stacklevel=2)
    target = path.with_name(path.name + ".gif")
    write_atomic(target, lambda file: file.write(gif(frames, fps)))
    return target


def _enlarged(frames: np.ndarray) -> np.ndarray:
    factor = max(1, SMALLEST_SIDE // max(frames.shape[1:3]))
    return frames.repeat(factor, axis=1).repeat(factor, axis=2) if factor > 1 else frames


def _save_mp4(target: Path, frames: np.ndarray, fps: float) -> Path:
    """Write an mp4 with ffmpeg; RuntimeError if it fails or does not end within `ENCODER_TIMEOUT_S`."""
    import imageio_ffmpeg

    if target.parent in _hung:  # once is enough: every further video would wait as long
        raise RuntimeError("ffmpeg did not end before")
    odd = [(0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0)]
    if np.any(odd):  # the pixel format needs even sides
        frames = np.pad(frames, odd, mode="edge")
    frames = np.ascontiguousarray(frames)
    make_folder(target.parent)
    temporary = target.with_name(f".{target.name}.tmp")
    command = [
        *(imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error"),
        *("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{frames.shape[2]}x{frames.shape[1]}"),
        *("-r", f"{fps:.3f}", "-i", "-", "-an", "-pix_fmt", "yuv420p", "-crf", "15"),
        *("-f", "mp4", str(temporary)),  # the temporary name has no .mp4 suffix
    ]
    try:
        # A session of its own: what the encoder has started can be ended with it, and Ctrl-C does not reach it.
        encoder = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            data: Any = memoryview(frames.data).cast("B")
            _, said = encoder.communicate(data, timeout=ENCODER_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            _hung.add(target.parent)
            raise RuntimeError(f"ffmpeg did not end within {ENCODER_TIMEOUT_S:g} s") from None
        finally:
            _end(encoder)
        if encoder.returncode != 0:
            raise RuntimeError(f"ffmpeg: {said.decode(errors='replace').strip() or encoder.returncode}")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _end(encoder: subprocess.Popen[bytes]) -> None:
    """Kill an encoder that is still running, with the processes that it started."""
    if encoder.poll() is None:
        try:
            os.killpg(encoder.pid, signal.SIGKILL)
        except (AttributeError, OSError):  # no process groups on this system, or it has just ended
            encoder.kill()
        encoder.wait()
    for stream in (encoder.stdin, encoder.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):  # what was not written yet
                stream.close()
