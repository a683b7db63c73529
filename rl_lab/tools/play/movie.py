"""A film that grows frame by frame: mp4 straight to disk, or GIF where ffmpeg is missing."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.utils.media import save_video

MOST_KEPT = 900  # frames kept in memory for a GIF


class Movie:
    """Frames of one size; later ones are cut or padded to the first. Nothing is left of it unless it is finished."""

    def __init__(self, path: Path, fps: float) -> None:
        self.path = path  # without suffix
        self.fps = fps
        self.frames = 0
        self._writer: Any = None
        self._size: tuple[int, int] | None = None
        self._kept: list[np.ndarray] | None = None  # where no mp4 can be written
        self._temporary = path.with_name(f".{path.name}.mp4.part")

    def add(self, frame: np.ndarray) -> None:
        """(H, W, 3) uint8, sides even."""
        if self._size is None:
            self._size = frame.shape[0], frame.shape[1]
            self._open()
        frame = _fitted(frame, self._size)
        self.frames += 1
        if self._kept is not None:
            if len(self._kept) < MOST_KEPT:
                self._kept.append(frame)
            return
        self._writer.send(np.ascontiguousarray(frame))

    def finish(self) -> Path | None:
        """The file, None when there was no frame."""
        if self._kept is not None:
            return save_video(self.path, np.stack(self._kept), self.fps)
        if self._writer is None:
            return None
        self._writer.close()
        self._writer = None
        target = self.path.with_name(self.path.name + ".mp4")
        self._temporary.replace(target)
        return target

    def discard(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._temporary.unlink(missing_ok=True)
        self._kept = None

    def _open(self) -> None:
        assert self._size is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            import imageio_ffmpeg

            self._writer = imageio_ffmpeg.write_frames(
                str(self._temporary),
                (self._size[1], self._size[0]),
                fps=self.fps,
                quality=7,
                macro_block_size=1,
                ffmpeg_log_level="error",
                output_params=["-f", "mp4", "-movflags", "+faststart"],
            )
            self._writer.send(None)
        except ImportError:
            self._kept = []
        except (OSError, RuntimeError) as error:  # no ffmpeg binary, or one that gave up
            warnings.warn(f"no mp4 ({str(error).strip()[:200]}): recordings become GIFs", stacklevel=2)
            self._kept, self._writer = [], None


def _fitted(frame: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    if frame.shape[:2] == size:
        return frame
    target = np.zeros((*size, 3), np.uint8)
    height, width = min(size[0], frame.shape[0]), min(size[1], frame.shape[1])
    target[:height, :width] = frame[:height, :width]
    return target
