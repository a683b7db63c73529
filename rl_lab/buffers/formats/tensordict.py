"""Files of TensorDicts with many episodes each: the layout of the published mt30 and mt80 data of TD-MPC2.

Each .pt file is a TensorDict of shape (episodes, length) with the keys obs (…, D), action (…, A), reward and, for
several tasks, task. Row t has what arrived together: obs after the action of row t, and its reward; the action and the
reward of row 0 are undefined. Layout: nicklashansen/tdmpc2 @ 13cac07, tdmpc2/trainer/offline_trainer.py and
trainer/online_trainer.py.

The package tensordict is not needed, and no code of the files is run: they are loaded with weights_only, where the two
names of tensordict that they contain stand for the plain functions below. With `task`, the observations are those of
`environment=multitask`: vector, task (one-hot) and action_mask, which is 1 for the values that a task ever uses.
"""

from __future__ import annotations

import json
import warnings
import zipfile
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.formats.dataset import Dataset
from rl_lab.buffers.formats.episode import PlainEpisode, make_episode
from rl_lab.errors import ConfigError
from rl_lab.records import ActionSpec, ArraySpec, Spec

NAMES = (
    "tensordict._td.TensorDict",
    "tensordict.tensordict.TensorDict",
    "tensordict._reductions._make_td",
)
KEYS = ("obs", "action", "reward")
TASKS = "tasks.json"  # optional, in the folder: names of the tasks, in the order of their numbers


class _Stored:
    """Stands for tensordict's TensorDict while a file is read: it only keeps the state."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state


def _make(kind: Any, state: Any) -> _Stored:
    """Stands for tensordict's function of that name."""
    found = _Stored()
    found.__setstate__(state)
    return found


def is_tensordict(path: Path) -> bool:
    """Return whether a .pt file, or the first one in a folder, contains a TensorDict; nothing is loaded."""
    if path.is_dir():
        files = sorted(file for file in path.glob("*.pt") if not file.name.startswith("."))
        return bool(files) and is_tensordict(files[0])
    if path.suffix != ".pt":
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            name = next((each for each in archive.namelist() if each.endswith("/data.pkl")), None)
            return name is not None and b"tensordict" in archive.read(name)
    except Exception:  # a damaged archive raises errors of many kinds; what reads the file says what is wrong
        return False


def load_tensordict(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file by key, mapped from disk; ConfigError if it is damaged or holds other objects."""
    stand_ins: list[Any] = [(_Stored, NAMES[0]), (_Stored, NAMES[1]), (_make, NAMES[2])]
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(stand_ins):
            warnings.simplefilter("ignore")
            loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # damaged archives raise many types of errors
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:150]
        raise ConfigError(
            f"{path} cannot be read: it is damaged, or needs code to load, which is refused ({reason})"
        ) from None
    content: Any = loaded.__dict__.get("state") if isinstance(loaded, _Stored) else loaded
    if isinstance(content, dict):
        content = content.get("_tensordict", content)
    elif callable(
        getattr(content, "items", None)
    ):  # the package is imported, and has allowed its own classes
        content = dict(content.items())
    if not isinstance(content, dict) or not all(isinstance(content.get(key), torch.Tensor) for key in KEYS):
        raise ConfigError(f"{path} must be a TensorDict with the keys {', '.join(KEYS)}")
    return {key: value for key, value in content.items() if isinstance(value, torch.Tensor)}


class Reader(Dataset):
    """A file, or a folder of files, sorted by name. One file is mapped at a time."""

    format = "tensordict"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = [path] if path.is_file() else sorted(f for f in path.glob("*.pt") if f.name[0] != ".")
        self.metadata: dict[str, Any] = {}
        self._held: tuple[int, dict[str, torch.Tensor]] | None = None
        counts, lengths = [], []
        highest, self._used = -1, dict[int, np.ndarray]()
        for number in range(len(self.files)):
            content = self._content(number)
            episodes, rows = content["reward"].shape[:2]
            if rows < 2 or any(content[key].shape[:2] != (episodes, rows) for key in KEYS):
                raise ConfigError(
                    f"{self.files[number]}: obs, action and reward differ in length, or have no step"
                )
            counts.append(episodes)
            lengths += [rows - 1] * episodes
            if "task" in content:
                highest = max(highest, self._note_tasks(content))
        self._ends = np.cumsum(counts)
        self.lengths = np.array(lengths, dtype=np.int64)
        self.tasks = highest + 1
        names = path / TASKS
        if names.is_file():
            self.metadata["tasks"] = json.loads(names.read_text())
            self.tasks = max(self.tasks, len(self.metadata["tasks"]))

    def _note_tasks(self, content: dict[str, torch.Tensor]) -> int:
        """Remember which values of an action each task uses; return the highest task."""
        tasks = content["task"].reshape(*content["reward"].shape[:2], -1)[:, 0, 0].long()
        for task in tasks.unique().tolist():
            rows = content["action"][tasks == task, 1:]
            used = (rows.nan_to_num() != 0).flatten(0, 1).any(0).numpy()
            self._used[task] = used | self._used.get(task, np.zeros_like(used))
        return int(tasks.max())

    def _content(self, number: int) -> dict[str, torch.Tensor]:
        if self._held is None or self._held[0] != number:
            self._held = number, load_tensordict(self.files[number])
        return self._held[1]

    def episode(self, index: int) -> PlainEpisode:
        number = int(np.searchsorted(self._ends, index, side="right"))
        row = index - (int(self._ends[number - 1]) if number else 0)
        content = self._content(number)
        obs = content["obs"][row].float().numpy()
        actions = content["action"][row, 1:].float().numpy()
        rewards = content["reward"][row, 1:].float().numpy().reshape(-1)
        observations, facts = {"vector": obs.reshape(len(obs), -1)}, dict[str, Any]()
        if self.tasks:
            task = int(content["task"][row].reshape(-1)[0])
            facts["task"] = task
            hot, mask = np.zeros(self.tasks, np.float32), self._used[task].astype(np.float32)
            hot[task] = 1
            observations |= {"task": np.tile(hot, (len(obs), 1)), "action_mask": np.tile(mask, (len(obs), 1))}
        none = np.zeros(len(rewards), dtype=bool)
        try:
            return make_episode(observations, actions, rewards, none, none, facts)
        except ConfigError as error:
            raise ConfigError(f"{self.files[number]}: episode {row}: {error}") from None

    @cached_property
    def spec(self) -> Spec:
        first = self.episode(0)
        observations = {
            name: ArraySpec(value.shape[1:], "float32") for name, value in first.observations.items()
        }
        width = first.actions.shape[1]
        action = ActionSpec("continuous", (width,), low=(-1.0,) * width, high=(1.0,) * width)
        return Spec(self.path.stem, observations, action)
