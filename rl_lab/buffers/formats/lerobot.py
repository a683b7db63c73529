"""LeRobot's data sets, version 3: parquet tables, and a video for each image observation.

    meta/info.json, meta/stats.json, meta/tasks.parquet, meta/episodes/chunk-000/file-000.parquet
    data/chunk-000/file-000.parquet                    a row per step, several episodes in a file
    videos/<feature>/chunk-000/file-000.mp4            frames; here one file for each episode
    meta/rl_lab_last.parquet                           ours: the observations after the last actions

Needs pyarrow, and imageio-ffmpeg for videos. `images="png"` stores lossless images in the table instead of a video.
`vector` is `observation.state`, an image NAME is `observation.images.NAME`, others are `observation.NAME`. Rewards are
`next.reward`; ends are `next.done` and, ours, `next.terminated`. Layout: huggingface/lerobot @ 00448aa,
src/lerobot/datasets/utils.py. Actions are in [-1, 1]; those of others are scaled by the range in meta/stats.json.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.buffers.formats.dataset import KIND, Dataset, DatasetWriter
from rl_lab.buffers.formats.episode import (
    MissingKeyError,
    PlainEpisode,
    channels_first,
    channels_last,
    is_image,
    make_episode,
    scaled_actions,
)
from rl_lab.buffers.formats.parquet import ParquetRows, read_table
from rl_lab.errors import CheckpointError, ConfigError, MissingPackageError, install_line
from rl_lab.records import ActionSpec, ArraySpec, Spec
from rl_lab.utils.files import read_json, write_json_atomic

VERSION = "v3.0"
FILES = "chunk-{chunk_index:03d}/file-{file_index:03d}"
DATA_PATH, VIDEO_PATH = f"data/{FILES}.parquet", f"videos/{{video_key}}/{FILES}.mp4"
EPISODES, TASKS = "meta/episodes/chunk-000/file-000.parquet", "meta/tasks.parquet"
LAST, LAST_GROUP = "meta/rl_lab_last.parquet", 256  # episodes in a row group, also of EPISODES
FILE_BYTES, PER_CHUNK = 100 << 20, 1000
GROUP_BYTES = 1 << 20  # of a row group of steps: what reading an episode decodes at least
TASK = "task"


def place(number: int) -> dict[str, int]:
    return {"chunk_index": number // PER_CHUNK, "file_index": number % PER_CHUNK}


_FIELD = re.compile(r"\{(\w+)(?::0?(\d))?d?\}")  # {chunk_index:03d}, {video_key}


def _filled(found: re.Match[str], where: Mapping[str, Any]) -> str:
    """Return the value of one field of a path pattern; an unknown one stays as it is."""
    if found[1] not in where:
        return found[0]
    return str(where[found[1]]).zfill(int(found[2] or 0))


class Reader(Dataset):
    format = "lerobot"

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.metadata = dict(read_json(path / "meta" / "info.json"))
            self._features: dict[str, Any] = self.metadata["features"]
            version = str(self.metadata["codebase_version"])
        except (CheckpointError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path / 'meta/info.json'} cannot be read: it is damaged ({error})") from None
        if not version.startswith("v3"):
            raise ConfigError(
                f"{path} has LeRobot's version {version}, but this version reads v3: convert it with LeRobot's "
                "convert_dataset_v21_to_v30"
            )
        self._own = self.metadata.get(KIND)
        self._spec = Spec.from_dict(self._own["spec"]) if self._own else None
        files = sorted((path / "meta" / "episodes").glob("*/*.parquet"))
        if not files:
            raise ConfigError(f"{path} has no meta/episodes/*/*.parquet: the data set is incomplete")
        self._episodes = _joined(
            [read_table(file) for file in files]
        )  # a table: dicts take ten times as much
        self.lengths = np.array([int(each) for each in self._episodes["length"].to_pylist()], dtype=np.int64)
        self._data: ParquetRows | None = None
        self._last: ParquetRows | None = None
        self._first_index = 0  # `index` of the first row of the open file

    def _rows(self, path: Path, index: int, count: int) -> Any:
        """Return the rows of a file from the one with this `index` on; the last file is kept open."""
        if self._data is None or self._data.path != path:
            if self._data is not None:
                self._data.close()
            self._data = ParquetRows(path)
            self._first_index = self._data.first_value("index")
        return self._data.rows(index - self._first_index, count)

    def _file(self, key: str, default: str, **where: Any) -> Path:
        """Return a file that a pattern in info.json names; the data set may be a stranger's.

        Links are followed: the Hugging Face cache consists of them.
        """
        pattern = str(self.metadata.get(key) or default)
        name = _FIELD.sub(lambda found: _filled(found, where), pattern)
        if "{" in name or "}" in name or Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
            raise ConfigError(
                f"{self.path / 'meta/info.json'} has {key} {pattern[:100]!r}, which is no path in the data set"
            )
        return self.path / name

    def episode(self, index: int) -> PlainEpisode:
        facts = self._episodes.slice(index, 1).to_pylist()[0]
        where = {key: int(facts[f"data/{key}"]) for key in ("chunk_index", "file_index")}
        path = self._file("data_path", DATA_PATH, **where)
        rows = self._rows(path, int(facts["dataset_from_index"]), int(facts["length"]))
        if len(rows) != int(facts["length"]):
            raise self.fault(index, "the table ends before the episode: the data is truncated")
        try:
            observations = {}
            for key, feature in self._features.items():
                if key.startswith("observation."):
                    observations[_name(key)] = self._observation(key, feature, rows, facts)
            if self._own:
                observations = self._with_last(observations, index)
            count = len(rows)
            done = _column(rows, "next.done") if "next.done" in rows.column_names else np.zeros(count, bool)
            done = done.reshape(count).astype(bool)
            terminated = _column(rows, "next.terminated").reshape(count) if self._own else done
            reward = _column(rows, "next.reward") if "next.reward" in rows.column_names else np.zeros(count)
            return make_episode(
                observations,
                self._actions(_column(rows, "action")),
                reward.reshape(count).astype(np.float32),
                terminated,
                done & ~terminated.astype(bool),
                {"tasks": facts.get("tasks")} if facts.get("tasks") else None,
            )
        except ConfigError as error:
            raise self.fault(index, error) from None

    def _observation(
        self, key: str, feature: Mapping[str, Any], rows: Any, facts: Mapping[str, Any]
    ) -> np.ndarray:
        if feature["dtype"] == "video":
            return channels_first(self._frames(key, feature, facts))
        if feature["dtype"] == "image":
            return channels_first(np.stack([_decoded(each["bytes"]) for each in rows[key].to_pylist()]))
        value = _column(rows, key)
        if self._spec is not None:
            spec = self._spec.observations[_name(key)]
            return value.reshape(len(value), *spec.shape).astype(spec.dtype, copy=False)
        return value.reshape(len(value), -1).astype(np.float32)

    def _frames(self, key: str, feature: Mapping[str, Any], facts: Mapping[str, Any]) -> np.ndarray:
        where = {name: int(facts[f"videos/{key}/{name}"]) for name in ("chunk_index", "file_index")}
        path = self._file("video_path", VIDEO_PATH, video_key=key, **where)
        if not path.is_file():
            raise MissingKeyError(f"the video {path} is missing")
        start, count = float(facts.get(f"videos/{key}/from_timestamp") or 0.0), int(facts["length"])
        frames = read_frames(path, start, count)
        if len(frames) < count:
            raise ConfigError(
                f"{path} has {len(frames)} frames after second {start:g}, but the episode has {count}"
            )
        return frames

    def _with_last(self, observations: dict[str, np.ndarray], index: int) -> dict[str, np.ndarray]:
        if self._last is None:
            self._last = ParquetRows(self.path / LAST)
        found = self._last.rows(index, 1).to_pylist()
        if not found:
            raise ConfigError(f"{LAST} has {len(self._last)} episodes: it is damaged")
        row = found[0]
        assert self._spec is not None
        for name, spec in self._spec.observations.items():
            last = np.frombuffer(row[name], dtype=spec.dtype).reshape(1, *spec.shape)
            observations[name] = np.concatenate([observations[name], last])
        return {name: observations[name] for name in self._spec.observations}

    def _actions(self, value: np.ndarray) -> np.ndarray:
        action = self.spec.action
        if action.kind != "continuous":
            return value.reshape(len(value), *action.shape).astype(np.int64)
        value = value.reshape(len(value), -1)
        if self._own:
            return value
        return scaled_actions(value, np.array(action.low), np.array(action.high))

    @cached_property
    def spec(self) -> Spec:
        if self._spec is not None:
            return self._spec
        observations = {}
        for key, feature in self._features.items():
            if not key.startswith("observation."):
                continue
            shape = tuple(int(n) for n in feature["shape"])
            if feature["dtype"] in ("video", "image"):
                height, width, channels = shape if shape[-1] in (1, 3, 4) else (*shape[1:], shape[0])
                observations[_name(key)] = ArraySpec((channels, height, width), "uint8")
            else:
                observations[_name(key)] = ArraySpec((int(np.prod(shape)),), "float32")
        feature = self._features["action"]
        stats = read_json(self.path / "meta" / "stats.json")["action"]
        low, high = np.ravel(stats["min"]).astype(float), np.ravel(stats["max"]).astype(float)
        if "int" in feature["dtype"]:
            return Spec(self.path.name, observations, ActionSpec("discrete", (), (int(high[0]) + 1,)))
        high = np.where(high > low, high, low + 1)
        action = ActionSpec("continuous", (len(low),), (), tuple(low.tolist()), tuple(high.tolist()))
        return Spec(self.path.name, observations, action)

    def close(self) -> None:
        for file in (self._data, self._last):
            if file is not None:
                file.close()


def _joined(tables: list[Any]) -> Any:
    """Return the facts of all episodes, without statistics."""
    import pyarrow

    wanted = [
        each.select([name for name in each.column_names if not name.startswith("stats/")]) for each in tables
    ]
    return pyarrow.concat_tables(wanted, promote_options="permissive").combine_chunks()


def _name(key: str) -> str:
    """Return the lab's name of a feature `observation.…`."""
    name = key.removeprefix("observation.")
    if name == "state":
        return "vector"
    return name.removeprefix("images.").replace(".", "_")


def _feature(name: str, spec: ArraySpec) -> str:
    if is_image(spec):
        return f"observation.images.{name}"
    return "observation.state" if name == "vector" else f"observation.{name}"


def _column(table: Any, name: str) -> np.ndarray:
    import pyarrow

    if name not in table.column_names:
        raise MissingKeyError(f"column '{name}' is missing; there are {', '.join(table.column_names)}")
    array = table[name].combine_chunks()
    count = len(array)
    while pyarrow.types.is_list(array.type) or pyarrow.types.is_fixed_size_list(array.type):
        array = array.flatten()
    return np.asarray(array.to_numpy(zero_copy_only=False)).reshape(count, -1)


def _decoded(data: bytes) -> np.ndarray:
    from PIL import Image

    try:
        picture = np.asarray(Image.open(io.BytesIO(data)))
    except (OSError, SyntaxError) as error:
        raise ConfigError(f"an image cannot be read ({error})") from None
    return picture[..., None] if picture.ndim == 2 else picture


def read_frames(path: Path, start: float, count: int) -> np.ndarray:
    """Return up to `count` frames (T, H, W, 3) of a video from a second on."""
    try:
        import imageio_ffmpeg
    except ImportError:
        raise MissingPackageError(f"{path.name} needs imageio-ffmpeg: {install_line('video')}") from None
    try:
        reader = imageio_ffmpeg.read_frames(
            str(path),
            # A file that is called .mp4 may be a playlist, which would name other files and addresses.
            input_params=[
                *("-protocol_whitelist", "file", "-f", "mov"),
                *(("-ss", f"{start:.6f}") if start else ()),
            ],
            output_params=["-vsync", "passthrough"],
        )
        width, height = next(reader)["size"]
        frames = []
        for frame in reader:
            frames.append(np.frombuffer(frame, np.uint8).reshape(height, width, 3))
            if len(frames) == count:
                break
        reader.close()
    except (OSError, RuntimeError, StopIteration, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {str(error).strip()[:150] or type(error).__name__}"
        ) from None
    return np.stack(frames) if frames else np.zeros((0, height, width, 3), np.uint8)


# --- Writing ------------------------------------------------------------------------------------


class Writer(DatasetWriter):
    """images: "video" (H.264), or "png" in the table, without loss. fps: of timestamps and videos"""

    format = "lerobot"

    def __init__(
        self,
        path: Path,
        spec: Spec,
        metadata: Mapping[str, Any] | None = None,
        *,
        images: str = "video",
        fps: int = 30,
    ) -> None:
        self.images, self.fps = images, fps
        for name, each in spec.observations.items():
            if (
                is_image(each)
                and images == "video"
                and (each.shape[0] != 3 or any(n % 2 for n in each.shape[1:]))
            ):
                raise ConfigError(
                    f"observation '{name}' of shape {each.shape} does not fit a video, which has 3 channels and even sides: "
                    "use --images png"
                )
        super().__init__(path, spec, metadata)
        self._episodes: list[dict[str, Any]] = []
        self._last: list[dict[str, bytes]] = []
        self._stats: dict[str, _Moments] = {}
        self._data: Any = None
        self._last_file: Any = None
        self._episodes_file: Any = None
        self._waiting: list[Any] = []  # tables of the next row group
        self._file, self._bytes, self._waiting_bytes = 0, 0, 0

    def write(self, episode: PlainEpisode) -> None:
        import pyarrow

        steps, number, start = len(episode), self.episodes, self.steps
        columns: dict[str, Any] = {}
        facts: dict[str, Any] = {"episode_index": number, "tasks": [TASK], "length": steps}
        for name, value in episode.observations.items():
            spec = self.spec.observations[name]
            key = _feature(name, spec)
            if not is_image(spec):
                columns[key] = self._numbers(key, value[:steps].reshape(steps, -1))
                continue
            frames = channels_last(value[:steps])
            self._moments(key, frames.reshape(-1, frames.shape[-1]) / 255.0)
            if self.images == "png":
                pictures = [{"bytes": _encoded(frame), "path": None} for frame in frames]
                kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
                columns[key] = pyarrow.array(pictures, type=kind)
            else:
                where = place(number)
                self._video(self.temporary / VIDEO_PATH.format(video_key=key, **where), frames)
                times = {"from_timestamp": 0.0, "to_timestamp": steps / self.fps}
                facts |= {f"videos/{key}/{k}": v for k, v in {**where, **times}.items()}
        ended = episode.terminated | episode.truncated
        index = np.arange(steps)
        for key, values in {
            "action": episode.actions.reshape(steps, -1),
            "next.reward": episode.rewards[:, None],
            "next.done": ended[:, None],
            "next.terminated": episode.terminated[:, None],
            "timestamp": (index / self.fps).astype(np.float32)[:, None],
            "frame_index": index[:, None],
            "episode_index": np.full((steps, 1), number),
            "index": start + index[:, None],
            "task_index": np.zeros((steps, 1), np.int64),
        }.items():
            columns[key] = self._numbers(key, values)
        table = pyarrow.table(columns)
        self._append(table)
        facts |= {f"data/{k}": v for k, v in place(self._file).items()}
        facts |= {"dataset_from_index": start, "dataset_to_index": start + steps}
        facts |= {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
        self._episodes.append(facts)
        self._last.append({name: value[-1].tobytes() for name, value in episode.observations.items()})
        if len(self._last) == LAST_GROUP:
            self._write_last()
            self._write_episodes()

    def _numbers(self, key: str, values: np.ndarray) -> Any:
        import pyarrow

        self._moments(key, values.astype(np.float64))
        flat = pyarrow.array(np.ascontiguousarray(values).reshape(-1))
        width = values.shape[1]
        return flat if width == 1 else pyarrow.FixedSizeListArray.from_arrays(flat, width)

    def _moments(self, key: str, values: np.ndarray) -> None:
        self._stats.setdefault(key, _Moments(values.shape[1])).add(values)

    def _append(self, table: Any) -> None:
        import pyarrow.parquet

        if self._data is not None and self._bytes + table.nbytes > FILE_BYTES:
            self._write_group()
            self._data.close()
            self._data, self._bytes, self._file = None, 0, self._file + 1
        if self._data is None:
            path = self.temporary / DATA_PATH.format(**place(self._file))
            path.parent.mkdir(parents=True, exist_ok=True)
            self._data = pyarrow.parquet.ParquetWriter(path, table.schema)
        self._waiting.append(table)
        self._waiting_bytes += table.nbytes
        self._bytes += table.nbytes
        if self._waiting_bytes >= GROUP_BYTES:
            self._write_group()

    def _write_group(self) -> None:
        import pyarrow

        if self._waiting:
            table = pyarrow.concat_tables(self._waiting).combine_chunks()
            self._data.write_table(table, row_group_size=len(table))
        self._waiting, self._waiting_bytes = [], 0

    def _write_episodes(self) -> None:
        import pyarrow
        import pyarrow.parquet

        if not self._episodes:
            return
        file = self._episodes_file
        table = pyarrow.Table.from_pylist(self._episodes, schema=file.schema if file else None)
        if file is None:
            (self.temporary / EPISODES).parent.mkdir(parents=True, exist_ok=True)
            file = self._episodes_file = pyarrow.parquet.ParquetWriter(
                self.temporary / EPISODES, table.schema
            )
        file.write_table(table)
        self._episodes = []

    def _write_last(self) -> None:
        import pyarrow
        import pyarrow.parquet

        if not self._last:
            return
        schema = pyarrow.schema([(name, pyarrow.binary()) for name in self.spec.observations])
        table = pyarrow.Table.from_pylist(self._last, schema=schema)
        if self._last_file is None:
            (self.temporary / "meta").mkdir(exist_ok=True)
            self._last_file = pyarrow.parquet.ParquetWriter(self.temporary / LAST, schema)
        self._last_file.write_table(table)
        self._last = []

    def _video(self, path: Path, frames: np.ndarray) -> None:
        try:
            import imageio_ffmpeg
        except ImportError:
            raise MissingPackageError(f"videos need imageio-ffmpeg: {install_line('video')}") from None
        path.parent.mkdir(parents=True, exist_ok=True)
        height, width = frames.shape[1:3]
        writer = imageio_ffmpeg.write_frames(
            str(path),
            (width, height),
            fps=self.fps,
            quality=None,
            macro_block_size=1,
            ffmpeg_log_level="error",
            output_params=["-crf", "15", "-g", "2"],
        )
        writer.send(None)
        for frame in frames:
            writer.send(np.ascontiguousarray(frame))
        writer.close()

    def complete(self) -> None:
        import pyarrow
        import pyarrow.parquet

        self._write_group()
        self._data.close()
        self._write_last()
        self._last_file.close()
        self._write_episodes()
        self._episodes_file.close()
        tasks = pyarrow.table({"task_index": pyarrow.array([0]), "task": [TASK]})
        kinds = (("task_index", "int64", "int64"), ("task", "unicode", "object"))
        columns = [
            {"name": n, "field_name": n, "pandas_type": p, "numpy_type": t, "metadata": None}
            for n, p, t in kinds
        ]
        pandas = {
            "index_columns": ["task"],
            "column_indexes": [],
            "columns": columns,
            "pandas_version": "2.2.0",
        }
        pyarrow.parquet.write_table(
            tasks.replace_schema_metadata({"pandas": json.dumps(pandas)}), self.temporary / TASKS
        )
        pictures = {_feature(n, s) for n, s in self.spec.observations.items() if is_image(s)}
        stats = {key: each.result(picture=key in pictures) for key, each in self._stats.items()}
        write_json_atomic(self.temporary / "meta" / "stats.json", stats)
        write_json_atomic(self.temporary / "meta" / "info.json", self._info())

    def _info(self) -> dict[str, Any]:
        features: dict[str, Any] = {}
        for name, spec in self.spec.observations.items():
            if is_image(spec):
                channels, height, width = spec.shape
                kind = "image" if self.images == "png" else "video"
                features[_feature(name, spec)] = {
                    "dtype": kind,
                    "shape": [height, width, channels],
                    "names": ["height", "width", "channels"],
                }
            else:
                shape = [int(np.prod(spec.shape))]
                features[_feature(name, spec)] = {"dtype": spec.dtype, "shape": shape, "names": None}
        action = self.spec.action
        features["action"] = {"dtype": action.dtype, "shape": [max(1, *action.shape, 1)], "names": None}
        for key, kind in (
            ("next.reward", "float32"),
            ("next.done", "bool"),
            ("next.terminated", "bool"),
            ("timestamp", "float32"),
            ("frame_index", "int64"),
            ("episode_index", "int64"),
            ("index", "int64"),
            ("task_index", "int64"),
        ):
            features[key] = {"dtype": kind, "shape": [1], "names": None}
        videos = any(each["dtype"] == "video" for each in features.values())
        return {
            "codebase_version": VERSION,
            "robot_type": None,
            "total_episodes": self.episodes,
            "total_frames": self.steps,
            "total_tasks": 1,
            "chunks_size": PER_CHUNK,
            "data_files_size_in_mb": FILE_BYTES >> 20,
            "video_files_size_in_mb": 500,
            "fps": self.fps,
            "splits": {"train": f"0:{self.episodes}"},
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if videos else None,
            "features": features,
            KIND: {**self.metadata, "spec": self.spec.to_dict()},
        }

    def discard(self) -> None:
        for name in ("_data", "_last_file", "_episodes_file"):
            file = getattr(self, name, None)
            if file is not None and file.is_open:
                file.close()
        super().discard()


class _Moments:
    """Smallest, largest, mean and standard deviation of a feature, from a stream of rows."""

    def __init__(self, width: int) -> None:
        self.count = 0
        self.low, self.high = np.full(width, np.inf), np.full(width, -np.inf)
        self.total, self.squares = np.zeros(width), np.zeros(width)

    def add(self, values: np.ndarray) -> None:
        self.count += len(values)
        self.low, self.high = np.minimum(self.low, values.min(0)), np.maximum(self.high, values.max(0))
        self.total += values.sum(0)
        self.squares += np.square(values).sum(0)

    def result(self, *, picture: bool) -> dict[str, Any]:
        mean = self.total / self.count
        spread = np.sqrt(np.maximum(self.squares / self.count - np.square(mean), 0))
        found = {"min": self.low, "max": self.high, "mean": mean, "std": spread}
        shape = (-1, 1, 1) if picture else (-1,)  # LeRobot's images are (C, H, W) from 0 to 1
        return {**{k: v.reshape(shape).tolist() for k, v in found.items()}, "count": [self.count]}


def _encoded(frame: np.ndarray) -> bytes:
    from PIL import Image

    target = io.BytesIO()
    Image.fromarray(frame[..., 0] if frame.shape[-1] == 1 else frame).save(target, format="PNG")
    return target.getvalue()
