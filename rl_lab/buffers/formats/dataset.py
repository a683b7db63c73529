"""Dataset and DatasetWriter: what every format of stored episodes provides, and how a path is opened.

A reader knows the length of every episode when it is opened, and reads the arrays of one episode at a time, so data
may be larger than memory. A writer collects its files under a hidden name beside the target and renames them at the
end: the target exists completely or not at all.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import hashlib
import importlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

import numpy as np

from rl_lab.buffers.formats.episode import PlainEpisode, is_image, to_rows
from rl_lab.errors import ConfigError, LabError, MissingPackageError, closest, install_line, one_line
from rl_lab.records import ActionSpec, ArraySpec, Spec
from rl_lab.utils.files import free_bytes
from rl_lab.utils.untrusted import control_characters

KIND = "rl_lab"  # key of our own facts in the metadata of other formats


class Dataset(abc.ABC):
    """Episodes of one path, read one at a time."""

    format: str
    path: Path
    lengths: np.ndarray  # (E,) steps of each episode
    metadata: dict[str, Any]  # JSON values, such as where the data comes from

    def __init_subclass__(cls) -> None:
        """Errors of `episode` about damaged or foreign content name the path and the episode."""
        super().__init_subclass__()
        if "episode" in cls.__dict__:
            cls.episode = _with_sentence(cls.__dict__["episode"])  # type: ignore[assignment, method-assign]

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[PlainEpisode]:
        for index in range(len(self)):
            yield self.episode(index)

    @abc.abstractmethod
    def episode(self, index: int) -> PlainEpisode:
        """Read one episode; ConfigError if it is damaged."""

    @property
    @abc.abstractmethod
    def spec(self) -> Spec:
        """Shapes and types, from the metadata or from the first episode."""

    def fingerprint(self) -> str:
        """Return a hash that changes with the content."""
        facts = hashlib.blake2b(digest_size=16)
        facts.update(f"{self.format} {self.lengths.tolist()}".encode())
        for file in files_of(self.path):
            status = file.stat()
            facts.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        return facts.hexdigest()

    def notes(self) -> list[str]:
        """Return remarks about the data."""
        return []

    def close(self) -> None:
        """Close open files."""

    def fault(self, index: int, problem: object) -> ConfigError:
        return ConfigError(f"{self.path}: episode {index}: {problem}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


# What reading raises if metadata has other types or names than they should be; the files may be a stranger's.
ODD_CONTENT = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, LookupError),
    *(OSError, RecursionError, RuntimeError, TypeError, ValueError),
)


def _with_sentence(read: Callable[[Any, int], PlainEpisode]) -> Callable[[Any, int], PlainEpisode]:
    @functools.wraps(read)
    def episode(self: Dataset, index: int) -> PlainEpisode:
        try:
            return read(self, index)
        except LabError:
            raise
        except ODD_CONTENT as error:
            raise self.fault(index, f"it cannot be read: {one_line(error)}") from error

    return episode


def _check_spec(spec: Spec) -> None:
    """Raise ValueError for types that no spec has."""
    names = [spec.name, *spec.observations]
    if not all(isinstance(name, str) and not control_characters(name) for name in names):
        raise ValueError("its names are no text")
    parts: list[ArraySpec | ActionSpec] = [*spec.observations.values(), spec.action]
    for each in parts:
        if not all(isinstance(size, int) and 0 <= size < 2**31 for size in each.shape):
            raise ValueError(f"it has the shape {str(each.shape)[:100]}")
        np.dtype(each.dtype)
    action = spec.action
    if action.kind not in ("discrete", "multi_discrete", "continuous"):
        raise ValueError(f"its actions are {ascii(action.kind)[:100]}")
    if not all(isinstance(count, int) and 0 < count < 2**31 for count in action.choices or ()):
        raise ValueError(f"its actions have the choices {ascii(action.choices)[:100]}")
    np.asarray([action.low or (), action.high or ()], np.float64)


def stored_rows(dataset: Dataset, index: int, spec: Spec) -> dict[str, np.ndarray]:
    """Return the rows of an episode, column -> (1, K+1, …); ConfigError that names it if it does not fit."""
    episode = dataset.episode(index)
    try:
        return to_rows(episode, spec)
    except ConfigError as error:
        raise dataset.fault(index, error) from None


def spec_of_episode(episode: PlainEpisode, name: str, *, choices: int = 0) -> Spec:
    """Return the spec that one episode shows. choices: number of discrete actions; 0: those of this episode"""
    observations = {
        key: ArraySpec(tuple(value.shape[1:]), "uint8" if value.dtype == np.uint8 else "float32")
        for key, value in episode.observations.items()
    }
    return Spec(name, observations, action_of(episode.actions, choices))


def action_of(actions: np.ndarray, choices: int = 0) -> ActionSpec:
    if actions.dtype.kind in "biu":
        if actions.ndim == 1:
            return ActionSpec("discrete", (), (choices or int(actions.max(initial=0)) + 1,))
        counts = tuple(int(n) + 1 for n in actions.max(axis=0))
        return ActionSpec("multi_discrete", (actions.shape[1],), counts)
    width = 1 if actions.ndim == 1 else int(np.prod(actions.shape[1:]))
    return ActionSpec("continuous", (width,), low=(-1.0,) * width, high=(1.0,) * width)


def default_name(shape: tuple[int, ...], dtype: np.dtype[Any]) -> str:
    """Return the lab's name of an only observation."""
    return "image" if is_image(ArraySpec(shape, str(dtype))) else "vector"


def files_of(path: Path) -> list[Path]:
    """Return the files at a path, sorted, without hidden ones."""
    if path.is_file():
        return [path]
    return sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))


# --- Writing ------------------------------------------------------------------------------------


class DatasetWriter(abc.ABC):
    """Writes episodes below `self.temporary`; `finish` renames it to the target.

    path:     the target, which must not exist
    spec:     of every episode
    metadata: JSON values for the file's own description
    """

    format: str
    suffix = ""  # of the target, if it is one file

    def __init__(self, path: Path, spec: Spec, metadata: Mapping[str, Any] | None = None) -> None:
        if self.suffix and path.suffix != self.suffix:
            path = path.with_name(path.name + self.suffix)
        if path.exists():
            raise ConfigError(f"{path} exists: choose another name, or delete it first")
        self.path, self.spec, self.metadata = path, spec, dict(metadata or {})
        remove_abandoned(path)
        self.temporary = path.with_name(f".{path.name}.{os.getpid()}.part{self.suffix}")
        self.episodes = self.steps = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove(self.temporary)
            if not self.suffix:
                self.temporary.mkdir()
        except OSError as error:
            raise LabError(f"{path} cannot be created ({error.strerror}); choose another folder") from None

    def add(self, episode: PlainEpisode) -> None:
        try:
            self.write(episode)
        except OSError as error:
            raise self.write_error(error) from None
        self.episodes += 1
        self.steps += len(episode)

    @abc.abstractmethod
    def write(self, episode: PlainEpisode) -> None:
        """Write one episode, number `self.episodes`."""

    @abc.abstractmethod
    def complete(self) -> None:
        """Write what describes all episodes, and close the files."""

    def finish(self) -> Path:
        """Make the target visible; ConfigError if no episode was added."""
        if not self.episodes:
            self.discard()
            raise ConfigError(f"{self.path}: there is no episode to write")
        try:
            self.complete()
            os.replace(self.temporary, self.path)
        except OSError as error:
            raise self.write_error(error) from None
        return self.path

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            _remove(self.temporary)

    def write_error(self, error: OSError) -> LabError:
        self.discard()
        free = free_bytes(self.path.parent) / 1e9
        return LabError(
            f"{self.path} cannot be written ({error.strerror or error}, {free:.2f} GB free): free some space or choose "
            "another folder; nothing was kept"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the unfinished files after an error or without `finish`."""
        self.discard()


def remove_abandoned(path: Path) -> None:
    """Remove unfinished files of this target whose process no longer exists."""
    pattern = re.compile(re.escape(f".{path.name}.") + r"(\d+)\.part")
    if not path.parent.is_dir():
        return
    for found in path.parent.iterdir():
        match = pattern.match(found.name)
        if match and not _is_running(int(match[1])):
            with contextlib.suppress(OSError):
                _remove(found)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return pid != os.getpid()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# --- Formats ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """A format: the module in this folder that has `Reader` and, if it can be written, `Writer`.

    recognizes: whether a path has this format, by its files; no optional package is imported for it
    package:    optional package that it needs, and the `extra` that installs it
    """

    name: str
    text: str
    module_name: str
    recognizes: Callable[[Path], bool]
    package: str = ""
    extra: str = ""
    writable: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)  # of the Writer

    def module(self) -> ModuleType:
        try:
            if self.package:
                importlib.import_module(self.package)
        except ModuleNotFoundError:
            raise MissingPackageError(
                f"format '{self.name}' needs the package {self.package}: {install_line(self.extra)}"
            ) from None
        return importlib.import_module(f"{__package__}.{self.module_name}")


def _has(path: Path, *patterns: str) -> bool:
    return path.is_dir() and any(next(path.glob(pattern), None) is not None for pattern in patterns)


def _is_lab(path: Path) -> bool:
    if path.suffix == ".pt":
        return path.with_suffix(".json").is_file() or path.name == "last.pt"
    return _has(path, "layout.json", "checkpoints", "step_*.json", "buffers/*/layout.json")


def _is_tensordict(path: Path) -> bool:
    from rl_lab.buffers.formats.tensordict import is_tensordict

    return is_tensordict(path)


FORMATS = {
    each.name: each
    for each in (
        Format(
            "minari",
            "Minari: a folder with data/main_data.hdf5 and data/metadata.json",
            "minari",
            lambda path: _has(path, "data/main_data.hdf5", "main_data.hdf5", "data/metadata.json"),
            package="h5py",
            extra="hdf5",
        ),
        Format(
            "robomimic",
            "robomimic: one HDF5 file with data/demo_0, data/demo_1, …",
            "robomimic",
            lambda path: path.suffix in (".hdf5", ".h5") or _has(path, "*.hdf5", "*.h5"),
            package="h5py",
            extra="hdf5",
        ),
        Format(
            "tensordict",
            "files of TensorDicts with many episodes each: TD-MPC2's mt30 and mt80",
            "tensordict",
            lambda path: _is_tensordict(path),
            writable=False,
        ),
        Format(
            "zarr",
            "Diffusion Policy: a folder with data/… and meta/episode_ends, zarr version 2",
            "zarr",
            lambda path: path.is_dir() and any((path / name).exists() for name in (".zgroup", "zarr.json")),
        ),
        Format(
            "lerobot",
            "LeRobot v3: parquet tables and videos",
            "lerobot",
            lambda path: (path / "meta" / "info.json").is_file(),
            package="pyarrow",
            extra="lerobot",
        ),
        Format("lab", "our own: compressed episodes in a few files, and runs", "lab", _is_lab),
        Format(
            "npz",
            "a folder of .npz files, one episode each: recordings of `rl-lab play`",
            "files",
            lambda path: path.suffix == ".npz" or _has(path, "*.npz"),
        ),
        Format(
            "pt",
            "a folder of .pt files, one episode each, as IRIS and Δ-IRIS store them",
            "files",
            lambda path: path.suffix == ".pt" or _has(path, "*.pt"),
            options={"suffix_of_files": ".pt"},
        ),
    )
}


def open_dataset(path: Path | str, format: str | None = None) -> Dataset:
    """Open stored episodes; the format is recognized by its files unless it is given."""
    where = Path(path).expanduser().absolute()
    if not where.exists():
        raise ConfigError(f"{where} does not exist: use a folder or file of stored episodes")
    chosen = find_format(format) if format else recognize(where)
    if chosen is None:
        raise ConfigError(
            f"{where} has no known format of stored episodes: use a run, or a data set of {', '.join(FORMATS)}"
        )
    module = chosen.module()
    reader: Dataset | None = None
    try:
        reader = module.Reader(where)
        assert reader is not None
        if len(reader):
            _check_spec(reader.spec)
    except LabError:
        raise
    except ODD_CONTENT as error:
        if reader is not None:
            reader.close()
        raise ConfigError(f"{where} cannot be read as {chosen.name}: {one_line(error)}") from error
    if not len(reader):
        reader.close()
        raise ConfigError(f"{where} has no episodes")
    return reader


def recognize(path: Path) -> Format | None:
    """Return the format of a path by its files; no optional package is imported."""
    for each in FORMATS.values():
        if each.recognizes(path):
            return each
    return None


def create_dataset(
    path: Path | str,
    spec: Spec,
    format: str = "lab",
    metadata: Mapping[str, Any] | None = None,
    **options: Any,
) -> DatasetWriter:
    """Return a writer; see DatasetWriter."""
    chosen = find_format(format)
    if not chosen.writable:
        raise ConfigError(f"format '{format}' can only be read; write one of {', '.join(_writable())}")
    writer: DatasetWriter = chosen.module().Writer(
        Path(path).expanduser().absolute(), spec, metadata, **{**chosen.options, **options}
    )
    return writer


def find_format(name: str) -> Format:
    if name not in FORMATS:
        raise ConfigError(f"format '{name}' is unknown.{closest(name, FORMATS)}")
    return FORMATS[name]


def _writable() -> list[str]:
    return [name for name, each in FORMATS.items() if each.writable]
