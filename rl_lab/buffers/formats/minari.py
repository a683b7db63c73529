"""Minari's layout on disk: data/main_data.hdf5 with a group for each episode, and data/metadata.json.

Read and written here with h5py alone; the tests open what is written with the `minari` package. Layout:
github.com/Farama-Foundation/Minari, minari/dataset/_storages/hdf5_storage.py, version 0.5.4.

Actions of a Box with bounds other than [-1, 1] are scaled when they are read, as `make_env` does. They are written in
[-1, 1], so that reading them back gives the same bits; `units="environment"` writes them in the environment's units.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.buffers.formats.dataset import KIND, Dataset, DatasetWriter, default_name
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
from rl_lab.buffers.formats.hdf5 import array_at, open_hdf5
from rl_lab.errors import CheckpointError, ConfigError
from rl_lab.records import ActionSpec, ArraySpec, Spec
from rl_lab.utils.files import read_json, write_json_atomic

DATA, FILE, METADATA = "data", "main_data.hdf5", "metadata.json"
VERSION = "0.5.4"  # of the minari package whose layout this is


class Reader(Dataset):
    """A data set of Minari: its folder, or the folder `data` in it."""

    format = "minari"

    def __init__(self, path: Path) -> None:
        self.path = path
        folder = path / DATA if (path / DATA).is_dir() else path
        try:
            self.metadata = dict(read_json(folder / METADATA))
            spaces = {name: json.loads(self.metadata[name]) for name in ("observation_space", "action_space")}
        except (CheckpointError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{folder / METADATA} cannot be read: it must have observation_space and action_space ({error})"
            ) from None
        kind = self.metadata.get("data_format", "hdf5")
        if kind != "hdf5":
            raise ConfigError(f"{path} stores Minari's format '{kind}', but this version reads 'hdf5'")
        self._action_space = spaces["action_space"]
        self._leaves = dict(_leaves(spaces["observation_space"], ()))
        self._jpeg = bool(self.metadata.get("jpeg_encoding", True))
        self._file = open_hdf5(folder / FILE)
        self._groups = sorted(
            (name for name in self._file if name.startswith("episode_")),
            key=lambda name: int(name.split("_")[1]),
        )
        self.lengths = np.array([self._length(name) for name in self._groups], dtype=np.int64)

    def _length(self, name: str) -> int:
        rewards = self._file[name].get("rewards")
        if rewards is None or not len(rewards):
            raise ConfigError(f"{self.path}: {name} has no rewards: use a complete file")
        return len(rewards)

    def episode(self, index: int) -> PlainEpisode:
        group = self._file[self._groups[index]]
        try:
            observations = {}
            for path, space in self._leaves.items():
                value = array_at(group, "/".join(("observations", *path)))
                name = "_".join(path) or default_name(tuple(space.get("shape", ())), value.dtype)
                observations[name] = self._observation(value, space)
            facts = {key: _plain(value) for key, value in group.attrs.items()}
            return make_episode(
                observations,
                self._actions(array_at(group, "actions")),
                array_at(group, "rewards").astype(np.float32),
                array_at(group, "terminations"),
                array_at(group, "truncations"),
                facts,
            )
        except ConfigError as error:
            raise self.fault(index, error) from None

    def _observation(self, value: np.ndarray, space: Mapping[str, Any]) -> np.ndarray:
        if space["type"] == "Discrete":  # one-hot, as the lab's environments return it
            return np.eye(int(space["n"]), dtype=np.float32)[
                value.astype(np.int64) - int(space.get("start", 0))
            ]
        if self._jpeg and _is_image_space(space) and value.ndim <= 2:
            value = _decoded(value)
        if value.dtype == np.uint8 and value.ndim == 4:
            stored_last = KIND in self.metadata or looks_channels_last(value.shape[1:])
            return channels_first(value) if stored_last else value
        return value.astype(np.float32) if value.dtype != np.uint8 else value

    def _actions(self, value: np.ndarray) -> np.ndarray:
        space = self._action_space
        if space["type"] == "Discrete":
            return np.asarray(value.astype(np.int64) - int(space.get("start", 0)))
        if space["type"] == "MultiDiscrete":
            return np.asarray(value - np.asarray(space.get("start", 0)), dtype=np.int64)
        if space["type"] != "Box":
            raise ConfigError(f"actions of a {space['type']} space cannot be read")
        flat = value.reshape(len(value), -1)
        low, high = (np.asarray(space[key], np.float64).reshape(-1) for key in ("low", "high"))
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            return flat.astype(np.float32)
        return scaled_actions(flat, low, high)

    @cached_property
    def spec(self) -> Spec:
        if KIND in self.metadata:
            return Spec.from_dict(json.loads(self.metadata[KIND])["spec"])
        first = self.episode(0)
        observations = {
            name: ArraySpec(tuple(value.shape[1:]), str(value.dtype))
            for name, value in first.observations.items()
        }
        return Spec(
            str(self.metadata.get("dataset_id", self.path.name)), observations, self._action_spec(first)
        )

    def _action_spec(self, first: PlainEpisode) -> ActionSpec:
        space = self._action_space
        if space["type"] == "Discrete":
            return ActionSpec("discrete", (), (int(space["n"]),))
        if space["type"] == "MultiDiscrete":
            choices = tuple(int(n) for n in np.asarray(space["nvec"]).reshape(-1))
            return ActionSpec("multi_discrete", (len(choices),), choices)
        width = first.actions.shape[1]
        low, high = (tuple(float(x) for x in np.asarray(space[key]).reshape(-1)) for key in ("low", "high"))
        return ActionSpec("continuous", (width,), low=low, high=high)

    def close(self) -> None:
        self._file.close()


def _leaves(
    space: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    if space["type"] == "Dict":
        for name, inner in space["subspaces"].items():
            yield from _leaves(inner, (*path, name))
    elif space["type"] in ("Box", "Discrete", "MultiBinary", "MultiDiscrete"):
        yield path, space
    else:
        raise ConfigError(f"observation '{'/'.join(path)}' of a {space['type']} space cannot be read")


def _is_image_space(space: Mapping[str, Any]) -> bool:
    return space["type"] == "Box" and space.get("dtype") == "uint8" and len(space["shape"]) in (2, 3)


def _decoded(value: np.ndarray) -> np.ndarray:
    from PIL import Image

    return np.stack([np.asarray(Image.open(io.BytesIO(bytes(frame)))) for frame in value])


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)


class Writer(DatasetWriter):
    """units: "lab" (actions in [-1, 1]) or "environment"."""

    format = "minari"

    def __init__(
        self, path: Path, spec: Spec, metadata: Mapping[str, Any] | None = None, *, units: str = "lab"
    ) -> None:
        super().__init__(path, spec, metadata)
        self.units = units
        (self.temporary / DATA).mkdir()
        self._file = open_hdf5(self.temporary / DATA / FILE, "w")

    def write(self, episode: PlainEpisode) -> None:
        group = self._file.create_group(f"episode_{self.episodes}")
        group.attrs["id"] = self.episodes
        group.attrs["total_steps"] = len(episode)
        for key, value in episode.facts.items():
            if isinstance(value, int | float | str):
                group.attrs[key] = value
        single = len(episode.observations) == 1
        for name, value in episode.observations.items():
            stored = channels_last(value) if is_image(self.spec.observations[name]) else value
            group.create_dataset(
                "observations" if single else f"observations/{name}", data=stored, **_storage(stored)
            )
        actions, action = episode.actions, self.spec.action
        if self.units == "environment" and action.kind == "continuous":
            actions = unscaled_actions(actions, action)
        for key, value in (
            ("actions", actions),
            ("rewards", episode.rewards),
            ("terminations", episode.terminated),
            ("truncations", episode.truncated),
        ):
            group.create_dataset(key, data=value, **_storage(value))

    def complete(self) -> None:
        self._file.close()
        size = (self.temporary / DATA / FILE).stat().st_size
        description = {
            "total_episodes": self.episodes,
            "total_steps": self.steps,
            "data_format": "hdf5",
            "jpeg_encoding": False,
            "observation_space": json.dumps(self._observation_space()),
            "action_space": json.dumps(self._space_of_actions()),
            "dataset_id": _identifier(self.path.name),
            "minari_version": VERSION,
            "dataset_size": round(size / 1e6, 1),
            KIND: json.dumps({**self.metadata, "spec": self.spec.to_dict()}),
        }
        write_json_atomic(self.temporary / DATA / METADATA, description)

    def _observation_space(self) -> dict[str, Any]:
        spaces = {name: _box(each) for name, each in self.spec.observations.items()}
        if len(spaces) == 1:
            return next(iter(spaces.values()))
        return {"type": "Dict", "subspaces": spaces}

    def _space_of_actions(self) -> dict[str, Any]:
        action = self.spec.action
        if action.kind == "discrete":
            return {"type": "Discrete", "dtype": "int64", "start": 0, "n": action.choices[0]}
        if action.kind == "multi_discrete":
            starts = [0] * len(action.choices)
            return {"type": "MultiDiscrete", "dtype": "int64", "nvec": list(action.choices), "start": starts}
        bounds = (action.low, action.high) if self.units == "environment" else ((-1.0,), (1.0,))
        low, high = (list(each) * (1 if len(each) == action.size else action.size) for each in bounds)
        return {"type": "Box", "dtype": "float32", "shape": list(action.shape), "low": low, "high": high}

    def discard(self) -> None:
        self._file.close()
        super().discard()


def _box(spec: ArraySpec) -> dict[str, Any]:
    shape = (*spec.shape[1:], spec.shape[0]) if is_image(spec) else spec.shape
    low, high = (0, 255) if spec.dtype == "uint8" else (-np.inf, np.inf)
    return {
        "type": "Box",
        "dtype": spec.dtype,
        "shape": list(shape),
        "low": np.full(shape, low, dtype=np.float64 if spec.dtype != "uint8" else np.int64).tolist(),
        "high": np.full(shape, high, dtype=np.float64 if spec.dtype != "uint8" else np.int64).tolist(),
    }


def _storage(value: np.ndarray) -> dict[str, Any]:
    """Compress images; small arrays stay as they are."""
    if value.dtype == np.uint8 and value.ndim == 4:
        return {"chunks": (1, *value.shape[1:]), "compression": "gzip", "compression_opts": 1}
    return {}


def _identifier(name: str) -> str:
    """Return `name` as Minari's identifier: letters, digits, - and _, with a version."""
    clean = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in name) or "data"
    head, dash, version = clean.rpartition("-v")
    return clean if head and dash and version.isdigit() else f"{clean}-v0"
