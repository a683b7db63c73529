"""robomimic's layout: one HDF5 file with data/demo_0, data/demo_1, …

Each demonstration has `actions` (K, …), `rewards`, `dones`, `obs/<name>` and `next_obs/<name>` (K, …); the attribute
`num_samples` is K. `mask/<name>` lists demonstrations, such as `train` and `valid`. Layout: robomimic.github.io,
"Dataset Contents and Visualization". Images are (H, W, C). `next_obs` has the last observation; without it the one
before is repeated. Files written here have `terminated` and `truncated` in addition to `dones`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.buffers.formats.dataset import KIND, Dataset, DatasetWriter, spec_of_episode
from rl_lab.buffers.formats.episode import (
    PlainEpisode,
    channels_first,
    channels_last,
    check_array,
    is_image,
    looks_channels_last,
    make_episode,
)
from rl_lab.buffers.formats.files import split_ends
from rl_lab.buffers.formats.hdf5 import array_at, open_hdf5
from rl_lab.errors import ConfigError
from rl_lab.records import Spec

SUFFIXES = (".hdf5", ".h5")


class Reader(Dataset):
    format = "robomimic"

    def __init__(self, path: Path) -> None:
        self.path = path
        file = path if path.is_file() else next(p for p in sorted(path.iterdir()) if p.suffix in SUFFIXES)
        self._file = open_hdf5(file)
        data = self._file.get("data")
        if data is None:
            raise ConfigError(f"{path} has no group 'data': it does not have robomimic's layout")
        self._names = sorted(
            (name for name in data if name.startswith("demo")), key=lambda name: (len(name), name)
        )
        self._data = data
        self.metadata = {key: _plain(value) for key, value in data.attrs.items()}
        masks = self._file.get("mask")
        if masks is not None:
            self.metadata["masks"] = {name: len(masks[name]) for name in masks}
        self.lengths = np.array([self._length(name) for name in self._names], dtype=np.int64)

    def _length(self, name: str) -> int:
        actions = self._data[name].get("actions")
        if actions is None or not len(actions):
            raise ConfigError(f"{self.path}: {name} has no actions: use a complete file")
        return len(actions)

    def episode(self, index: int) -> PlainEpisode:
        group = self._data[self._names[index]]
        steps = int(self.lengths[index])
        try:
            if "obs" not in group:
                raise ConfigError("'obs' is missing: the file must hold observations, not only states")
            observations = {}
            for name in group["obs"]:
                value = array_at(group, f"obs/{name}")
                if "next_obs" in group and name in group["next_obs"] and len(value) == steps:
                    value = np.concatenate([value, array_at(group, f"next_obs/{name}")[-1:]])
                if value.dtype == np.uint8 and value.ndim == 4:
                    if KIND in self.metadata or looks_channels_last(value.shape[1:]):
                        value = channels_first(value)
                elif value.dtype != np.uint8:
                    value = value.astype(np.float32).reshape(len(value), -1)
                observations[name] = value
            actions = array_at(group, "actions")
            rewards = array_at(group, "rewards") if "rewards" in group else np.zeros(steps, np.float32)
            ends = {key: array_at(group, key) for key in ("dones", "terminated", "truncated") if key in group}
            for key, value in ends.items():
                check_array(key, value, steps, flat=True)
            terminated, truncated = split_ends(ends, steps)
            early = np.flatnonzero((terminated | truncated)[:-1])
            if len(early) and KIND not in self.metadata:
                # robomimic's own files set `dones` at every step in which the task is solved.
                terminated[:-1] = truncated[:-1] = False
            return make_episode(
                observations,
                actions if actions.dtype.kind in "biu" else actions.astype(np.float32),
                rewards.astype(np.float32),
                terminated,
                truncated,
                {key: _plain(value) for key, value in group.attrs.items()},
            )
        except ConfigError as error:
            raise self.fault(index, error) from None

    @cached_property
    def spec(self) -> Spec:
        if KIND in self.metadata:
            return Spec.from_dict(json.loads(self.metadata[KIND])["spec"])
        first, choices = self.episode(0), 0
        if first.actions.dtype.kind in "biu":
            choices = 1 + max(int(self._data[name]["actions"][()].max()) for name in self._names)
        return spec_of_episode(first, self.path.stem, choices=choices)

    def close(self) -> None:
        self._file.close()


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)


class Writer(DatasetWriter):
    """One file; its name ends in .hdf5."""

    format = "robomimic"
    suffix = ".hdf5"

    def __init__(self, path: Path, spec: Spec, metadata: Mapping[str, Any] | None = None) -> None:
        super().__init__(path, spec, metadata)
        self._file = open_hdf5(self.temporary, "w")
        self._data = self._file.create_group("data")

    def write(self, episode: PlainEpisode) -> None:
        group = self._data.create_group(f"demo_{self.episodes}")
        group.attrs["num_samples"] = len(episode)
        for name, value in episode.observations.items():
            picture = is_image(self.spec.observations[name])
            stored = channels_last(value) if picture else value
            options: dict[str, Any] = {}
            if picture:
                options = {"chunks": (1, *stored.shape[1:]), "compression": "gzip", "compression_opts": 1}
            group.create_dataset(f"obs/{name}", data=stored[:-1], **options)
            group.create_dataset(f"next_obs/{name}", data=stored[1:], **options)
        group.create_dataset("actions", data=episode.actions)
        group.create_dataset("rewards", data=episode.rewards)
        group.create_dataset("dones", data=(episode.terminated | episode.truncated).astype(np.int64))
        group.create_dataset("terminated", data=episode.terminated)
        group.create_dataset("truncated", data=episode.truncated)

    def complete(self) -> None:
        self._data.attrs["total"] = self.steps
        environment = {"env_name": self.spec.name, "type": 2, "env_kwargs": {}}  # 2: a Gymnasium environment
        self._data.attrs["env_args"] = json.dumps(environment)
        self._data.attrs[KIND] = json.dumps({**self.metadata, "spec": self.spec.to_dict()})
        self._file.close()

    def discard(self) -> None:
        self._file.close()
        super().discard()
