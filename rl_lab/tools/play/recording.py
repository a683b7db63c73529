"""Recordings of a session: started by the user, offered at the end of each episode, and a GIF of the last seconds."""

from __future__ import annotations

import secrets
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.records import Spec
from rl_lab.tools.play.frame import Frame, Panel, compose
from rl_lab.tools.play.starts import reduced
from rl_lab.utils.files import write_atomic
from rl_lab.utils.media import gif, save_video

MOST_KEPT = 900  # frames kept in memory for a GIF
# Kept for a GIF of the last seconds: steps, bytes of images, and the longest side of a panel in pixels.
CLIP_FRAMES, CLIP_BYTES, CLIP_SIDE = 600, 128 * 1024**2, 300


class VideoWriter:
    """Writes a video frame by frame: mp4 directly to disk, or GIF without ffmpeg.

    Frames are cropped or padded to the size of the first. Without `finish` no file remains.
    """

    def __init__(self, path: Path, fps: float) -> None:
        self.path = path  # without suffix
        self.fps = fps
        self.frames = 0
        self._writer: Any = None
        self._size: tuple[int, int] | None = None
        self._kept: list[np.ndarray] | None = None  # frames of a GIF, if mp4 is not possible
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
        """Finish the video; returns the file, or None without frames."""
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
        except (OSError, RuntimeError) as error:  # no ffmpeg binary, or it failed
            warnings.warn(f"no mp4 ({str(error).strip()[:200]}): recordings become GIFs", stacklevel=2)
            self._kept, self._writer = [], None


def _fitted(frame: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    if frame.shape[:2] == size:
        return frame
    target = np.zeros((*size, 3), np.uint8)
    height, width = min(size[0], frame.shape[0]), min(size[1], frame.shape[1])
    target[:height, :width] = frame[:height, :width]
    return target


class Recorder:
    """Records images as a video and frames as .npz files that `buffer/offline` can train on.

    The .npz is the plain episode of docs/howto/offline_data.md: observations (K+1), actions, rewards,
    terminated, truncated (K). A recording across episode ends has one .npz per episode.
    """

    def __init__(self, folder: Path, spec: Spec, *, fps: float, label: str = "") -> None:
        self.spec = spec
        self.path = folder / new_name(label)
        self.writer = VideoWriter(self.path, fps)
        self._episodes: list[list[Frame]] = []
        self._cut = False

    def cut(self) -> None:
        """Begin a new episode with the next frame: it does not follow from the last one."""
        self._cut = True

    def add(self, frame: Frame, image: np.ndarray) -> None:
        if frame.is_first or self._cut or not self._episodes:
            self._episodes.append([])
        self._cut = False
        self._episodes[-1].append(frame)
        self.writer.add(image)

    @property
    def length(self) -> int:
        return self.writer.frames

    def keep(self) -> list[Path]:
        """Write the files; returns their paths, the video first."""
        video = self.writer.finish()
        files = [video] if video is not None else []
        complete = [frames for frames in self._episodes if len(frames) > 1 and frames[0].obs]
        for number, frames in enumerate(complete, start=1):
            name = self.path.name + (f"_{number}" if number > 1 else "") + ".npz"
            files.append(write_episode(self.path.with_name(name), frames, self.spec))
        return files

    def discard(self) -> None:
        self.writer.discard()


def new_name(label: str) -> str:
    """Return the name of a new recording, without suffix: "2026-11-15_14-30-05_dream_670d"."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return f"{stamp}{'_' + label if label else ''}_{secrets.token_hex(2)}"


class Clip:
    """The last steps of a session, small, for a GIF of them."""

    def __init__(self) -> None:
        self._frames: deque[tuple[list[Panel], list[tuple[str, str]]]] = deque(maxlen=CLIP_FRAMES)
        self._bytes: deque[int] = deque(maxlen=CLIP_FRAMES)

    def __len__(self) -> int:
        return len(self._frames)

    def add(self, panels: Sequence[Panel], header: Sequence[tuple[str, str]]) -> None:
        small = [Panel(panel.title, reduced(panel.image, CLIP_SIDE)) for panel in panels]
        layout = [(panel.title, panel.image.shape) for panel in small]
        if self._frames and [(panel.title, panel.image.shape) for panel in self._frames[-1][0]] != layout:
            self.clear()  # other panels: a GIF has one size
        self._frames.append((small, list(header)))
        self._bytes.append(sum(panel.image.nbytes for panel in small))
        while sum(self._bytes) > CLIP_BYTES and len(self._frames) > 1:
            self._frames.popleft()
            self._bytes.popleft()

    def clear(self) -> None:
        self._frames.clear()
        self._bytes.clear()

    def save(self, path: Path, seconds: float, fps: float) -> Path | None:
        """Write the last seconds as path.gif; None if nothing was shown yet."""
        count = max(1, round(seconds * fps))
        frames = [compose(panels, header) for panels, header in list(self._frames)[-count:]]
        if not frames:
            return None
        target = path.with_name(path.name + ".gif")
        data = gif(np.stack([_fitted(frame, frames[-1].shape[:2]) for frame in frames]), fps)
        write_atomic(target, lambda file: file.write(data))
        return target


def write_episode(path: Path, frames: list[Frame], spec: Spec) -> Path:
    """Write K+1 frames as an episode of K steps."""
    names = list(frames[0].obs)
    single = len(spec.observations) == 1
    arrays = {
        ("observations" if single else f"observations/{name}"): np.stack(
            [frame.obs[name] for frame in frames]
        )
        for name in names
    }
    later = frames[1:]
    arrays["actions"] = np.stack([np.asarray(frame.action) for frame in later])
    arrays["rewards"] = np.array([frame.reward for frame in later], np.float32)
    arrays["terminated"] = np.array([frame.terminated for frame in later])
    arrays["truncated"] = np.array([frame.truncated for frame in later])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, lambda file: np.savez_compressed(file, **arrays))  # type: ignore[arg-type]
    return path


class Recordings:
    """The recordings of a session. ask: ask at the end of each episode whether to keep it."""

    def __init__(self, folder: Path, spec: Spec, *, ask: bool) -> None:
        self.folder = folder
        self.spec = spec
        self.ask = ask
        self.asking = False  # waiting for an answer
        self.files: list[Path] = []  # of the last recording
        self._recording: Recorder | None = None
        self._episode: Recorder | None = None

    @property
    def recording(self) -> int | None:
        """Number of frames of the open recording."""
        return None if self._recording is None else self._recording.length

    def start(self, frame: Frame, image: np.ndarray, *, fps: float, label: str) -> None:
        self._recording = Recorder(self.folder, self.spec, fps=fps, label=label)
        self._recording.add(frame, image)

    def stop(self) -> list[Path]:
        if self._recording is not None:
            self.files = self._recording.keep()
            self._recording = None
        return self.files

    def cut(self) -> None:
        """The next frame does not follow from the last one: a dream was rewound."""
        for recorder in (self._recording, self._episode):
            if recorder is not None:
                recorder.cut()

    def begin_episode(self, *, fps: float, label: str) -> None:
        """Start a new episode and discard an unanswered one. Replayed episodes are already on disk."""
        self.asking = False
        if self._episode is not None:
            self._episode.discard()
            self._episode = None
        if self.ask and label != "episodes":
            self._episode = Recorder(self.folder, self.spec, fps=fps, label=f"{label}_episode")

    def add(self, frame: Frame, image: Callable[[], np.ndarray]) -> None:
        """Add a frame; `image` is called only if a recorder is active."""
        active = [recorder for recorder in (self._recording, self._episode) if recorder is not None]
        drawn = image() if active else None
        for recorder in active:
            assert drawn is not None
            recorder.add(frame, drawn)
        self.asking = frame.done and self._episode is not None

    def answer(self, keep: bool) -> list[Path]:
        """Keep or discard the episode; returns the written files."""
        self.asking = False
        episode, self._episode = self._episode, None
        if episode is None:
            return []
        if not keep:
            episode.discard()
            return []
        self.files = episode.keep()
        return self.files

    def close(self) -> None:
        self.stop()
        if self._episode is not None:
            self._episode.discard()
