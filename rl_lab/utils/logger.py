"""Logging of a run: metrics.jsonl, TensorBoard, media files and, optionally, wandb and Trackio."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from rl_lab.errors import ConfigError, MissingPackageError, closest, install_line, one_line
from rl_lab.utils.files import JsonlWriter, inside
from rl_lab.utils.media import gif, png, save_image, save_video, to_frames, to_image


class TensorBoardWriter:
    """Writes scalars (one event per call), images, animations and text with the `tensorboard` package alone.

    resume_step: hide what an earlier process logged after that step. Animations are GIFs in image summaries,
    which TensorBoard plays; its own video summary needs another package.
    """

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._event, self._summary = Event, Summary
        self._writer: Any = EventFileWriter(str(folder), flush_secs=10)
        if resume_step is not None:
            # Events of the step itself were logged before its checkpoint: the purge starts after it.
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=resume_step + 1, session_log=start))

    def scalars(self, metrics: Mapping[str, float], step: int) -> None:
        values = [self._summary.Value(tag=key, simple_value=value) for key, value in metrics.items()]
        self._add(values, step)

    def image(self, name: str, image: np.ndarray, step: int) -> None:
        """(H, W, 3) uint8."""
        self._add_encoded(name, png(image), image.shape[0], image.shape[1], step)

    def animation(self, name: str, frames: np.ndarray, step: int, fps: float) -> None:
        """(T, H, W, 3) uint8."""
        self._add_encoded(name, gif(frames, fps), frames.shape[1], frames.shape[2], step)

    def text(self, name: str, text: str, step: int) -> None:
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.text.metadata import create_summary_metadata

        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
        metadata = create_summary_metadata(display_name=name, description="")
        self._add([self._summary.Value(tag=name, tensor=tensor, metadata=metadata)], step)

    def hparams(self, values: Mapping[str, bool | float | str]) -> None:
        """Values for the HParams tab, which compares runs by them and groups runs that have the same."""
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        written = self._summary.FromString(hparams_pb(dict(values)).SerializeToString())
        self._add(list(written.value), 0)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add_encoded(self, name: str, data: bytes, height: int, width: int, step: int) -> None:
        image = self._summary.Image(height=height, width=width, colorspace=3, encoded_image_string=data)
        self._add([self._summary.Value(tag=name, image=image)], step)

    def _add(self, values: list[Any], step: int) -> None:
        self._writer.add_event(
            self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        )


MODES = ("online", "offline", "disabled")
ID_FILE = "wandb_id.txt"  # a resumed run continues the same wandb run


class WandbWriter:
    """Sends scalars, images and videos to Weights & Biases. `options` are passed to `wandb.init`."""

    def __init__(self, run_dir: Path, mode: str, options: Mapping[str, Any]) -> None:
        if mode not in MODES:
            raise ConfigError(f"wandb.mode cannot be '{mode}'.{closest(mode, MODES)}")
        try:
            import wandb
        except ImportError:
            raise MissingPackageError(
                f"wandb.mode={mode} needs the package wandb: {install_line('track')}, or set wandb.mode=disabled"
            ) from None
        self._wandb = wandb
        id_file = run_dir / ID_FILE
        known = id_file.read_text(encoding="utf-8").strip() if id_file.is_file() else None
        settings = {key: value for key, value in options.items() if value is not None}
        settings.setdefault("id", known)
        try:
            self._run = wandb.init(dir=str(run_dir), mode=mode, resume="allow", **settings)
        except Exception as error:  # no account on this machine, or no connection
            raise ConfigError(
                f"wandb.mode={mode}: wandb cannot start ({one_line(error)}): run wandb login, or set "
                "wandb.mode=offline or disabled"
            ) from error
        id_file.write_text(f"{self._run.id}\n", encoding="utf-8")

    def scalars(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def image(self, name: str, image: Any, step: int) -> None:
        self._run.log({name: self._wandb.Image(image)}, step=step)

    def video(self, name: str, file: Path, step: int) -> None:
        self._run.log({name: self._wandb.Video(str(file))}, step=step)

    def close(self) -> None:
        self._run.finish()


# Counts of trouble: TensorBoard and the trackers get them once there is some, not a flat line as their first card.
TROUBLE = ("/env_restarts", "/nonfinite")


class SilentLogger:
    """Logs nothing: for the ranks other than the first."""

    run_dir = None

    def scalars(self, metrics: Mapping[str, Any], **counters: Any) -> None: ...

    def image(self, name: str, array: Any, step: int, folder: str | None = None) -> None: ...

    def video(self, name: str, array: Any, step: int, fps: float = 15, folder: str = "") -> None: ...

    def text(self, name: str, text: str, step: int = 0) -> None: ...

    def hparams(self, values: Mapping[str, Any]) -> None: ...

    def metrics_bytes(self) -> int:
        return 0

    def flush(self) -> None: ...

    def close(self) -> None: ...


TRACKIO_FILE = "trackio_run.txt"  # the run's name there: a resumed run continues it


class TrackioWriter:
    """Sends scalars, images and videos to Trackio, whose data stay on this machine (`trackio show`)."""

    def __init__(self, run_dir: Path, project: str) -> None:
        try:
            import trackio
        except ImportError:
            raise MissingPackageError(
                f"logging.trackio={project} needs the package trackio: {install_line('trackio')}, or set "
                "logging.trackio=null"
            ) from None
        self._trackio = trackio
        file = run_dir / TRACKIO_FILE
        name = (
            file.read_text(encoding="utf-8").strip()
            if file.is_file()
            else "-".join(run_dir.absolute().parts[-2:])
        )
        try:
            self._run = trackio.init(project=project, name=name, resume="allow", embed=False)
        except Exception as error:
            raise ConfigError(
                f"logging.trackio={project}: Trackio cannot start ({one_line(error)}); null switches it off"
            ) from error
        file.write_text(f"{name}\n", encoding="utf-8")

    def scalars(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def image(self, name: str, image: Any, step: int) -> None:
        self._run.log({name: self._trackio.Image(image)}, step=step)

    def video(self, name: str, file: Path, step: int) -> None:
        self._run.log({name: self._trackio.Video(str(file))}, step=step)

    def close(self) -> None:
        self._run.finish()


class ExperimentLogger:
    """Logs scalars, images, videos and text of a run to every output.

    A new run leaves `resume_step` and `resume_bytes` None, or passes `resume_bytes=0` to start over in a used
    folder. A resumed run passes the step of its checkpoint and the `metrics_bytes` of its manifest: lines
    logged after it are dropped, so that each step is logged once.

    Outputs that fail (a full disk, a lost connection) are reported once and do not stop the run; a media path
    outside the run folder raises ConfigError.
    """

    def __init__(
        self,
        run_dir: Path | str,
        *,
        tensorboard: bool = True,
        wandb_mode: str = "disabled",
        wandb_options: Mapping[str, Any] | None = None,
        trackio: str | None = None,  # project
        resume_step: int | None = None,
        resume_bytes: int | None = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        # These first: a missing package is reported before any file is truncated or opened.
        self._trackers: dict[str, WandbWriter | TrackioWriter] = {}
        if wandb_mode != "disabled":
            self._trackers["wandb"] = WandbWriter(self.run_dir, wandb_mode, wandb_options or {})
        if trackio:
            self._trackers["Trackio"] = TrackioWriter(self.run_dir, trackio)
        self._jsonl = JsonlWriter(self.run_dir / "metrics.jsonl", resume_bytes=resume_bytes)
        self._tensorboard: TensorBoardWriter | None = None
        if tensorboard:
            folder = self.run_dir / "tensorboard"
            if resume_bytes == 0 and resume_step is None:
                for old in folder.glob("events.out.tfevents.*") if not folder.is_symlink() else ():
                    old.unlink()
            self._tensorboard = TensorBoardWriter(folder, resume_step=resume_step)
        self._warned: set[str] = set()
        self._troubled: set[str] = set()  # metrics of TROUBLE that were not 0
        self._closed = False

    def scalars(
        self, metrics: Mapping[str, Any], *, step: int, frames: int | None = None, updates: int | None = None
    ) -> None:
        """Log one line with step, frames, updates and time to metrics.jsonl and to the other outputs.

        NaN and infinities are written as strings (see `json_safe`).
        """
        values = {key: float(value) for key, value in metrics.items()}
        counters = {"frames": frames, "updates": updates}
        known = {key: value for key, value in counters.items() if value is not None}
        self._jsonl.write({"step": step, **known, "time": round(time.time(), 3), **values})
        self._troubled |= {key for key, value in values.items() if key.endswith(TROUBLE) and value != 0}
        shown = {
            key: value for key, value in values.items() if key in self._troubled or not key.endswith(TROUBLE)
        }
        shown |= {f"time/{key}": float(value) for key, value in known.items()}
        if self._tensorboard:
            self._guarded("TensorBoard", self._tensorboard.scalars, shown, step)
        for name, tracker in self._trackers.items():
            self._guarded(name, tracker.scalars, shown, step)

    def image(self, name: str, array: Any, step: int, folder: str | None = None) -> Path | None:
        """Log (C, H, W) uint8 to TensorBoard, and as PNG under media/<folder>/ if `folder` is not None."""
        shown = to_image(array, name)
        path = self._media_path(folder, name, step) if folder is not None else None
        if self._tensorboard:
            self._guarded("TensorBoard", self._tensorboard.image, name, shown, step)
        for output, tracker in self._trackers.items():
            self._guarded(output, tracker.image, name, shown, step)
        return self._guarded("images", save_image, path, shown) if path else None

    def video(
        self, name: str, array: Any, step: int, fps: float = 15, folder: str = "recordings"
    ) -> Path | None:
        """Log (T, C, H, W) uint8 as mp4 or GIF under media/<folder>/ and as an animation to TensorBoard.

        returns: the file, or None when it could not be written
        """
        frames = to_frames(array, name)
        path = self._media_path(folder, name, step)
        if self._tensorboard:
            self._guarded("TensorBoard", self._tensorboard.animation, name, frames, step, fps)
        file: Path | None = self._guarded("videos", save_video, path, frames, fps)
        for output, tracker in self._trackers.items() if file else ():
            self._guarded(output, tracker.video, name, file, step)
        return file

    def text(self, name: str, text: str, step: int = 0) -> None:
        """Text for TensorBoard's text tab (Markdown)."""
        if self._tensorboard:
            self._guarded("TensorBoard", self._tensorboard.text, name, text, step)

    def hparams(self, values: Mapping[str, Any]) -> None:
        """Numbers, words and flags for TensorBoard's HParams tab; other values are left out."""
        kept = {key: value for key, value in values.items() if isinstance(value, bool | int | float | str)}
        if self._tensorboard:
            self._guarded("TensorBoard", self._tensorboard.hparams, kept)

    def metrics_bytes(self) -> int:
        """Return the length of metrics.jsonl after fsync; stored in a checkpoint's manifest."""
        return self._jsonl.size()

    def flush(self) -> None:
        if self._tensorboard:
            self._guarded("TensorBoard", self._tensorboard.flush)

    def close(self) -> None:
        """Close every output; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._jsonl.close()
        if self._tensorboard:
            self._guarded("TensorBoard", self._tensorboard.close)
        for output, tracker in self._trackers.items():
            self._guarded(output, tracker.close)

    def __enter__(self) -> ExperimentLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _media_path(self, folder: str, name: str, step: int) -> Path:
        """Return media/<folder>/<name>_<step> without suffix; unsafe characters of the name are replaced."""
        safe = re.sub(r"[^\w.-]+", "_", name).lstrip(".")[:120] or "media"
        media = inside(self.run_dir, "media")  # may itself be a link
        return inside(media, Path(folder) / f"{safe}_{step:09d}")

    def _guarded(self, output: str, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            if output not in self._warned:
                self._warned.add(output)
                warnings.warn(f"logging to {output} failed ({type(error).__name__}: {error})", stacklevel=3)
            return None
