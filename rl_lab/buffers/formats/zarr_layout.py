"""Demonstrations in the zarr layout of Diffusion Policy: all episodes one after the other, in one array per key.

    demos.zarr/data/<key>            (T, …) with a row per step: action, state, img, …
    demos.zarr/meta/episode_ends     (E,) the row after the last one of each episode

Read here from zarr version 2 in a folder, with numcodecs for compressed chunks and without the package zarr. Row k has
the observation and the action that was taken after it; the observation after the last action is not in this layout, so
the last one is repeated. Actions are in the environment's units. There is no end (the last step counts as truncated)
and, unless there is a key `reward`, no reward.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.errors import ConfigError, MissingPackageError, closest, install_line
from rl_lab.records import OBS_PREFIX, ArraySpec, Spec
from rl_lab.utils.files import crc32_of

EXTRA = "zarr"
TOLERANCE = 1e-3  # of a scaled action outside [-1, 1]
Keys = str | Sequence[str]  # "img", "state[0:2]", or several that are concatenated


def is_zarr_layout(path: Path) -> bool:
    """Whether a path is a folder of zarr arrays."""
    return path.is_dir() and any((path / name).exists() for name in (".zgroup", "zarr.json"))


class ZarrEpisodes:
    """Episodes of a zarr folder as the rows of one stream; a RowSource of offline.py.

    observations: the environment's observation -> the key or keys of `data` that it is made of; default: the key with
                  the same name. Images (H, W, C) become (C, H, W)
    episodes:     only this many, from the first one on
    """

    num_streams = 1

    def __init__(
        self,
        path: Path,
        spec: Spec,
        observations: Mapping[str, Keys] | None = None,
        episodes: int | None = None,
    ) -> None:
        self.path, self.spec = path, spec
        self.arrays = open_arrays(path)
        self.ends = self._episode_ends(episodes)
        self.sources = self._sources(observations or {})
        self.action = self._array("action")
        self._check_shapes()
        facts = hashlib.blake2b(digest_size=16)
        used = {"action": self.action, **{part.key: part.array for part in self._parts()}}
        for name, array in sorted(used.items()):
            facts.update(f"{name} {array.facts()}\n".encode())
        facts.update(self.ends.tobytes())
        self.fingerprint = facts.hexdigest()

    @property
    def length(self) -> int:
        """Rows of the stream: the steps, and a last observation for each episode."""
        return int(self.ends[-1]) + len(self.ends)

    def pieces(self, columns: dict[str, ArraySpec]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield position and rows (1, count, …) of each episode."""
        position = start = 0
        for number, end in enumerate(self.ends.tolist()):
            try:
                rows = self._rows(start, end)
            except ConfigError as error:
                raise ConfigError(f"{self.path}: episode {number}: {error}") from None
            yield position, {name: value[None] for name, value in rows.items()}
            position, start = position + end - start + 1, end

    def notes(self) -> list[str]:
        """Return remarks about the data for `describe`."""
        notes = [
            f"in {len(self.ends):,} episodes the last observation is missing and the previous one is repeated"
        ]
        return notes if "reward" in self.arrays else [*notes, "no rewards: they are 0"]

    # ---------------------------------------------------------------- rows

    def _rows(self, start: int, end: int) -> dict[str, np.ndarray]:
        """Return the K+1 rows of one episode of K steps, column -> (K+1, …)."""
        steps = end - start
        rows: dict[str, np.ndarray] = {}
        for name, parts in self.sources.items():
            value = np.concatenate([part.read(start, end) for part in parts], axis=-1)
            value = _observation(name, value, self.spec.observations[name])
            rows[OBS_PREFIX + name] = np.concatenate([value, value[-1:]])
        action = self._actions(self.action.read(start, end))
        rows["action"] = np.concatenate([action, np.zeros_like(action[:1])])
        reward = np.zeros(steps + 1, np.float32)
        if "reward" in self.arrays:
            reward[1:] = self.arrays["reward"].read(start, end).reshape(steps)
            _check_finite("reward", reward)
        rows["reward"] = reward
        rows |= {flag: np.zeros(steps + 1, bool) for flag in ("terminated", "truncated", "is_first")}
        rows["is_first"][0] = rows["truncated"][-1] = True
        return rows

    def _actions(self, raw: np.ndarray) -> np.ndarray:
        """Actions in the environment's units -> the stored form."""
        action = self.spec.action
        _check_finite("action", raw)
        raw = raw.reshape(len(raw), *action.shape)
        if action.kind != "continuous":
            if np.any((raw < 0) | (raw >= np.array(action.choices))):
                raise ConfigError(
                    f"'action' ranges from {raw.min():.4g} to {raw.max():.4g}, but {self.spec.name} has "
                    f"{action.choices} choices: use data of the same environment"
                )
            return raw.astype(np.int64)
        low, high = np.array(action.low), np.array(action.high)
        scaled = 2.0 * (raw - low) / (high - low) - 1.0
        if np.abs(scaled).max() > 1 + TOLERANCE:
            raise ConfigError(
                f"'action' ranges from {raw.min():.4g} to {raw.max():.4g}, but {self.spec.name} takes {low.tolist()} to "
                f"{high.tolist()}: use data of the same environment"
            )
        result: np.ndarray = scaled.clip(-1.0, 1.0).astype(np.float32)
        return result

    # ---------------------------------------------------------------- checks

    def _parts(self) -> list[_Part]:
        return [part for parts in self.sources.values() for part in parts]

    def _array(self, key: str) -> ZarrArray:
        if key not in self.arrays:
            raise ConfigError(f"{self.path} has no array 'data/{key}'.{closest(key, self.arrays)}")
        return self.arrays[key]

    def _sources(self, observations: Mapping[str, Keys]) -> dict[str, list[_Part]]:
        for name in observations:
            if name not in self.spec.observations:
                raise ConfigError(
                    f"observations.{name}: {self.spec.name} has no such observation."
                    f"{closest(name, self.spec.observations)}"
                )
        sources = {}
        for name in self.spec.observations:
            keys = observations.get(name, name)
            if name not in observations and name not in self.arrays:
                raise ConfigError(
                    f"{self.path} has no array 'data/{name}' for the observation '{name}': set the buffer's "
                    f"`observations.{name}` to one or more of {', '.join(sorted(self.arrays))}"
                )
            sources[name] = [self._part(key) for key in ([keys] if isinstance(keys, str) else keys)]
        return sources

    def _part(self, text: str) -> _Part:
        match = re.fullmatch(r"([^\[\]]+?)(?:\[(\d*):(\d*)\])?", text.strip())
        if match is None:
            raise ConfigError(
                f"observations: '{text}' must be a key of `data`, or a part of it such as state[0:2]"
            )
        begin, end = (int(value) if value else None for value in match.group(2, 3))
        return _Part(match[1], self._array(match[1]), slice(begin, end))

    def _episode_ends(self, episodes: int | None) -> np.ndarray:
        ends_path = self.path / "meta" / "episode_ends"
        if not (ends_path / ".zarray").exists():
            raise ConfigError(
                f"{self.path} has no array 'meta/episode_ends': it is not in the layout of Diffusion Policy"
            )
        array = ZarrArray(ends_path)
        ends = array.read(0, array.shape[0]).astype(np.int64)
        if not len(ends) or ends[0] < 1 or (np.diff(ends) < 1).any():
            raise ConfigError(f"{self.path}: meta/episode_ends must be increasing and start above 0")
        if episodes is not None:
            if not 1 <= episodes <= len(ends):
                raise ConfigError(
                    f"episodes must be from 1 to {len(ends)}, as many as {self.path} has, not {episodes}"
                )
            ends = ends[:episodes]
        return ends

    def _check_shapes(self) -> None:
        needed = int(self.ends[-1])
        for array in [self.action, *(part.array for part in self._parts())]:
            if array.shape[0] < needed:
                raise ConfigError(
                    f"{array.path} has {array.shape[0]} rows, but the episodes end at row {needed}: the data is truncated"
                )
        width, wanted = int(np.prod(self.action.shape[1:])), int(np.prod(self.spec.action.shape))
        if width != wanted:
            raise ConfigError(
                f"{self.action.path} has actions of {width} values, but {self.spec.name} takes {wanted}: use data of the "
                "same environment"
            )
        for name, parts in self.sources.items():
            shape, keys = self.spec.observations[name].shape, ", ".join(part.text for part in parts)
            widths = sum(int(np.prod(part.shape)) for part in parts)
            if widths != int(np.prod(shape)):
                raise ConfigError(
                    f"{self.path}: {keys} give {widths} values for the observation '{name}', but {self.spec.name} has "
                    f"shape {shape}: use data of the same environment, or set the buffer's `observations.{name}`"
                )


class _Part:
    """A key of `data`, or some of its last dimension after flattening."""

    def __init__(self, key: str, array: ZarrArray, columns: slice) -> None:
        self.key, self.array, self.columns = key, array, columns
        self.selects = columns != slice(None, None)

    @property
    def text(self) -> str:
        begin, end = self.columns.start, self.columns.stop
        return (
            f"{self.key}[{'' if begin is None else begin}:{'' if end is None else end}]"
            if self.selects
            else self.key
        )

    @property
    def shape(self) -> tuple[int, ...]:
        own = self.array.shape[1:]
        return (len(range(*self.columns.indices(int(np.prod(own))))),) if self.selects else own

    def read(self, start: int, end: int) -> np.ndarray:
        """Return (count, H, W, C) for images, else (count, values)."""
        value = self.array.read(start, end)
        if value.ndim == 4 and not self.selects:
            return value
        value = value.reshape(len(value), -1)
        return value[:, self.columns] if self.selects else value


def _observation(name: str, value: np.ndarray, spec: ArraySpec) -> np.ndarray:
    if value.ndim == 4:  # an image, channels last unless it already has the environment's shape
        if value.shape[1:] != spec.shape:
            value = value.transpose(0, 3, 1, 2)
        if value.shape[1:] != spec.shape:
            raise ConfigError(
                f"images are {value.shape[1:]}, but the observation '{name}' is {spec.shape}: use data of the same "
                "environment, or another environment.size"
            )
    _check_finite(f"observation '{name}'", value)
    if spec.dtype == "uint8" and value.dtype.kind == "f":
        if value.min() < 0 or value.max() > 255:
            raise ConfigError(
                f"'{name}' ranges from {value.min():.4g} to {value.max():.4g}, but images are 0 to 255"
            )
        value = np.rint(value)
    return np.ascontiguousarray(value.reshape(len(value), *spec.shape).astype(spec.dtype))


def _check_finite(name: str, value: np.ndarray) -> None:
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        row = int(np.argmin(np.isfinite(value.reshape(len(value), -1)).all(1)))
        raise ConfigError(f"{name} is not finite at step {row}: repair the data, or leave this episode out")


# ---------------------------------------------------------------- zarr, version 2


def open_arrays(path: Path, group: str = "data") -> dict[str, ZarrArray]:
    """Return the arrays of a group by key."""
    if (path / "zarr.json").exists():
        raise ConfigError(
            f"{path} is zarr version 3: write it as version 2 (zarr_format=2), as the published data is"
        )
    arrays = {
        str(file.parent.relative_to(path / group)): ZarrArray(file.parent)
        for file in sorted((path / group).rglob(".zarray"))
    }
    if not arrays:
        raise ConfigError(
            f"{path} has no arrays under '{group}': it is not in the layout of Diffusion Policy"
        )
    return arrays


class ZarrArray:
    """One array of a zarr folder; chunks are decoded when they are read, and the last one is kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            meta = json.loads((path / ".zarray").read_text(encoding="utf-8"))
            self.shape = tuple(int(n) for n in meta["shape"])
            self.chunks = tuple(int(n) for n in meta["chunks"])
            self.dtype = np.dtype(meta["dtype"])
            compressor, filters, order = meta["compressor"], meta["filters"], meta["order"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}/.zarray cannot be read: the data is damaged ({error})") from None
        if filters or order != "C" or self.dtype.kind not in "biuf" or not self.shape:
            raise ConfigError(f"{path} must be a numeric array in C order without filters")
        self._separator = str(meta.get("dimension_separator", "."))
        self._codec = None if compressor is None else _codec(path, compressor)
        self._kept: tuple[int, np.ndarray] | None = None

    def read(self, start: int, end: int) -> np.ndarray:
        """Return rows start … end, (end - start, …)."""
        first, size = start // self.chunks[0], self.chunks[0]
        parts = []
        for number in range(first, -(-end // size)):
            rows = self._chunk_rows(number)
            parts.append(rows[max(0, start - number * size) : end - number * size])
        return np.concatenate(parts) if parts else np.empty((0, *self.shape[1:]), self.dtype)

    def facts(self) -> str:
        """Shape, type, and names, sizes and checksums of all chunks."""
        files = sorted(file for file in self.path.rglob("*") if file.is_file() and file.name != ".zattrs")
        sums = [f"{file.name} {file.stat().st_size} {crc32_of(file)}" for file in files]
        return f"{self.shape} {self.dtype} {sums}"

    def _chunk_rows(self, number: int) -> np.ndarray:
        """Return all rows of the chunks that begin at row number · chunks[0]."""
        if self._kept is not None and self._kept[0] == number:
            return self._kept[1]
        rows = np.empty((self.chunks[0], *self.shape[1:]), self.dtype)
        grid = [range(-(-size // chunk)) for size, chunk in zip(self.shape[1:], self.chunks[1:])]
        for place in itertools.product(*grid):
            chunk = self._chunk((number, *place))
            where = tuple(
                slice(i * n, min((i + 1) * n, size))
                for i, n, size in zip(place, self.chunks[1:], self.shape[1:])
            )
            rows[(slice(None), *where)] = chunk[(slice(None), *(slice(0, w.stop - w.start) for w in where))]
        self._kept = (number, rows)
        return rows

    def _chunk(self, place: tuple[int, ...]) -> np.ndarray:
        file = self.path / self._separator.join(map(str, place))
        try:
            data = file.read_bytes()
        except OSError:
            raise ConfigError(f"the chunk {file} is missing: the data is truncated, copy it again") from None
        try:
            content = np.frombuffer(data if self._codec is None else self._codec.decode(data), self.dtype)
            return content.reshape(self.chunks)
        except Exception as error:  # the codecs raise many types for damaged data
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigError(
                f"the chunk {file} cannot be read: the data is damaged, copy it again ({reason[0][:200]})"
            ) from None


# numcodecs has codecs that run code of the data ("pickle"): only those that unpack bytes are used.
CODECS = ("blosc", "zlib", "gzip", "bz2", "lzma", "lz4", "zstd")


def _codec(path: Path, config: Any) -> Any:
    if not isinstance(config, Mapping) or config.get("id") not in CODECS:
        name = config.get("id") if isinstance(config, Mapping) else config
        raise ConfigError(f"{path} is compressed with {str(name)[:50]!r}: only {', '.join(CODECS)} are read")
    try:
        from numcodecs import get_codec
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"{path} is compressed and needs numcodecs: {install_line(EXTRA)}"
        ) from error
    try:
        return get_codec(dict(config))
    except Exception as error:  # an unknown codec, or options that it does not take
        raise ConfigError(
            f"{path} is compressed with {config.get('id')!r}, which numcodecs does not have"
        ) from error
