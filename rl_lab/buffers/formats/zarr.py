"""Diffusion Policy's zarr layout as a data set, both ways; zarr_layout.py reads it into a buffer for an environment.

    NAME.zarr/data/<key>            (T, …) the rows of all episodes: action, reward, terminated, truncated, observations
    NAME.zarr/meta/episode_ends     (E,) the row after the last one of each episode
    NAME.zarr/meta/last/<key>       (E, …) the observation after the last action: ours, others ignore it

Written as zarr version 2, which every zarr package reads, with one file for about a megabyte of rows; compressed with
Blosc if numcodecs is installed. Images are (H, W, C). Actions are in [-1, 1] (`units="environment"`: in the
environment's). Files of others have no reward and no end; their actions are scaled to [-1, 1] by the range in the data,
because their bounds are not stored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.buffers.formats.dataset import KIND, Dataset, DatasetWriter
from rl_lab.buffers.formats.episode import (
    PlainEpisode,
    channels_first,
    channels_last,
    is_image,
    looks_channels_last,
    make_episode,
    scaled_actions,
    unscaled_actions,
)
from rl_lab.buffers.formats.zarr_layout import ZarrArray, open_arrays
from rl_lab.errors import ConfigError
from rl_lab.records import ActionSpec, ArraySpec, Spec
from rl_lab.utils.files import write_json_atomic

CHUNK_BYTES = 1 << 20
OURS = ("action", "reward", "terminated", "truncated")
BLOSC = {"id": "blosc", "cname": "zstd", "clevel": 5, "shuffle": 1, "blocksize": 0}


def is_ours(path: Path) -> bool:
    """Return whether a zarr folder was written here, so that it has ends, rewards and the exact actions."""
    return KIND in _attributes(path)


def _attributes(path: Path) -> dict[str, Any]:
    file = path / ".zattrs"
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read: the data is damaged ({error})") from None


class Reader(Dataset):
    format = "zarr"

    def __init__(self, path: Path) -> None:
        self.path = path
        attributes = _attributes(path)
        try:
            self._own: dict[str, Any] | None = attributes.get(KIND)
            self._spec = Spec.from_dict(self._own["spec"]) if self._own else None
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path / '.zattrs'} is damaged ({error}): restore it") from None
        self.metadata = dict(self._own or attributes)
        self._arrays = open_arrays(path)
        if "action" not in self._arrays:
            raise ConfigError(f"{path} has no array 'data/action'")
        ends_folder = path / "meta" / "episode_ends"
        if not (ends_folder / ".zarray").exists():
            raise ConfigError(
                f"{path} has no array 'meta/episode_ends': it is not in the layout of Diffusion Policy"
            )
        array = ZarrArray(ends_folder)
        self._ends = array.read(0, array.shape[0]).astype(np.int64)
        if not len(self._ends) or self._ends[0] < 1 or (np.diff(self._ends) < 1).any():
            raise ConfigError(f"{path}: meta/episode_ends must be increasing and start above 0")
        for name, each in self._arrays.items():
            if each.shape[0] < self._ends[-1]:
                raise ConfigError(
                    f"{path}: data/{name} has {each.shape[0]} rows, but the episodes end at row {self._ends[-1]}: the data "
                    "is truncated"
                )
        self.lengths = np.diff(self._ends, prepend=0)
        self._last = open_arrays(path, "meta/last") if self._own else {}

    def episode(self, index: int) -> PlainEpisode:
        end = int(self._ends[index])
        begin = end - int(self.lengths[index])
        rows = {name: array.read(begin, end) for name, array in self._arrays.items()}
        steps, none = end - begin, np.zeros(end - begin, dtype=bool)
        observations = {}
        for name, value in rows.items():
            if name in OURS:
                continue
            if name in self._last:
                value = np.concatenate([value, self._last[name].read(index, index + 1)])
            if value.ndim == 4 and (self._own or looks_channels_last(value.shape[1:])):
                if value.dtype.kind == "f" and not self._own:
                    value = np.rint(value).astype(np.uint8)  # the published images are float32, 0 to 255
                value = channels_first(value)
            elif not self._own:
                value = value.reshape(len(value), -1).astype(np.float32)
            observations[name] = value
        try:
            return make_episode(
                observations,
                self._actions(rows["action"]),
                rows.get("reward", np.zeros(steps, np.float32)).reshape(steps).astype(np.float32),
                rows.get("terminated", none),
                rows.get("truncated", none),
            )
        except ConfigError as error:
            raise self.fault(index, error) from None

    def _actions(self, value: np.ndarray) -> np.ndarray:
        if value.dtype.kind in "iub" or (self._own and self._own.get("units") != "environment"):
            return value
        action = self.spec.action
        return scaled_actions(value.reshape(len(value), -1), np.array(action.low), np.array(action.high))

    @cached_property
    def spec(self) -> Spec:
        if self._spec is not None:
            return self._spec
        actions = self._arrays["action"].read(0, int(self._ends[-1]))
        if actions.dtype.kind in "iub":
            action = ActionSpec("discrete", (), (int(actions.max()) + 1,))
        else:
            flat = actions.reshape(len(actions), -1).astype(np.float64)
            low, high = flat.min(0), flat.max(0)
            high = np.where(high > low, high, low + 1)
            action = ActionSpec("continuous", (flat.shape[1],), (), tuple(low.tolist()), tuple(high.tolist()))
        observations = {}
        for name, array in self._arrays.items():
            shape = array.shape[1:]
            if name in OURS:
                continue
            if len(shape) == 3 and looks_channels_last(shape):
                observations[name] = ArraySpec((shape[2], *shape[:2]), "uint8")
            else:
                observations[name] = ArraySpec((int(np.prod(shape)),), "float32")
        return Spec(self.path.stem, observations, action)

    def notes(self) -> list[str]:
        if self._own:
            return []
        return [] if "reward" in self._arrays else ["no rewards: they are 0"]


class Writer(DatasetWriter):
    """units: "lab" (actions in [-1, 1]) or "environment"."""

    format = "zarr"

    def __init__(
        self, path: Path, spec: Spec, metadata: Mapping[str, Any] | None = None, *, units: str = "lab"
    ) -> None:
        super().__init__(path, spec, metadata)
        self.units = units
        self._arrays: dict[str, _ArrayWriter] = {}

    def write(self, episode: PlainEpisode) -> None:
        actions, steps = episode.actions, len(episode)
        if self.units == "environment" and self.spec.action.kind == "continuous":
            actions = unscaled_actions(actions, self.spec.action)
        self._put("data/action", actions)
        self._put("data/reward", episode.rewards)
        self._put("data/terminated", episode.terminated)
        self._put("data/truncated", episode.truncated)
        for name, value in episode.observations.items():
            stored = channels_last(value) if is_image(self.spec.observations[name]) else value
            self._put(f"data/{name}", stored[:steps])
            self._put(f"meta/last/{name}", stored[steps:])
        self._put("meta/episode_ends", np.array([self.steps + steps], np.int64))

    def _put(self, name: str, rows: np.ndarray) -> None:
        if name not in self._arrays:
            self._arrays[name] = _ArrayWriter(self.temporary / name, rows)
        self._arrays[name].add(rows)

    def complete(self) -> None:
        for array in self._arrays.values():
            array.close()
        groups = [self.temporary / name for name in ("", "data", "meta", "meta/last")]
        for folder in groups:
            write_json_atomic(folder / ".zgroup", {"zarr_format": 2})
        facts = {**self.metadata, "units": self.units, "spec": self.spec.to_dict()}
        write_json_atomic(self.temporary / ".zattrs", {KIND: facts})


class _ArrayWriter:
    """Appends rows to one zarr array. It holds one chunk, and no array that it is given."""

    def __init__(self, folder: Path, first: np.ndarray) -> None:
        self.folder, self.dtype, self.shape = folder, first.dtype, first.shape[1:]
        width = max(1, int(np.prod(self.shape)) * first.dtype.itemsize)
        self.rows = max(1, CHUNK_BYTES // width)
        self.count = 0
        self._chunk = np.zeros((self.rows, *self.shape), self.dtype)
        self._codec, self._config = _codec()
        folder.mkdir(parents=True)

    def add(self, rows: np.ndarray) -> None:
        done = 0
        while done < len(rows):
            filled = self.count % self.rows
            taken = min(len(rows) - done, self.rows - filled)
            self._chunk[filled : filled + taken] = rows[done : done + taken]
            done, self.count = done + taken, self.count + taken
            if filled + taken == self.rows:
                self._write()

    def _write(self) -> None:
        name = ".".join(["0"] * len(self.shape))
        number = (self.count - 1) // self.rows
        data = self._chunk.tobytes()
        content = data if self._codec is None else bytes(self._codec.encode(data))
        (self.folder / (f"{number}.{name}" if name else str(number))).write_bytes(content)
        self._chunk[:] = 0  # a chunk always has its full shape

    def close(self) -> None:
        if self.count % self.rows:
            self._write()
        meta = {
            "zarr_format": 2,
            "shape": [self.count, *self.shape],
            "chunks": [self.rows, *self.shape],
            "dtype": self.dtype.str,
            "compressor": self._config,
            "fill_value": 0 if self.dtype.kind != "b" else False,
            "order": "C",
            "filters": None,
        }
        write_json_atomic(self.folder / ".zarray", meta)


def _codec() -> tuple[Any, dict[str, Any] | None]:
    try:
        from numcodecs import get_codec
    except ModuleNotFoundError:
        return None, None
    return get_codec(dict(BLOSC)), BLOSC
