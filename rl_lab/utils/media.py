"""Images and videos as bytes and files: PNG and GIF with Pillow, mp4 if imageio-ffmpeg is installed."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.errors import LabError
from rl_lab.utils.files import write_atomic

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
    import imageio_ffmpeg

    odd = [(0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0)]
    frames = np.pad(frames, odd, mode="edge")  # the default pixel format needs even sides
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    writer = imageio_ffmpeg.write_frames(
        str(temporary),
        (frames.shape[2], frames.shape[1]),
        fps=fps,
        quality=7,
        macro_block_size=1,
        ffmpeg_log_level="error",
        output_params=["-f", "mp4"],  # the temporary name has no .mp4 suffix
    )
    try:
        writer.send(None)
        for frame in frames:
            writer.send(np.ascontiguousarray(frame))
        writer.close()
        temporary.replace(target)
    finally:
        writer.close()
        temporary.unlink(missing_ok=True)
    return target
