"""TensorBoard event files, written with the `tensorboard` package alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.utils.media import gif, png


class TensorBoardWriter:
    """Scalars (one event per call, however many), images, animations and text.

    resume_step: hide what an earlier process logged after that step. Animations are GIFs in image summaries,
    which TensorBoard plays; its own video summary would need another package.
    """

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._event, self._summary = Event, Summary
        self._writer: Any = EventFileWriter(str(folder), flush_secs=10)
        if resume_step is not None:
            # What was logged at the step itself came before its checkpoint: the purge begins after it.
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
