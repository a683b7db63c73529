"""The layout of mt30 and mt80: read without the package tensordict and without running code of the files."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_lab.buffers.formats import tensordict as reader
from rl_lab.buffers.formats.dataset import open_dataset
from rl_lab.errors import ConfigError

EPISODES, ROWS = 4, 6


def content(seed: int = 0, tasks: tuple[int, ...] = (0, 1, 2, 1)) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    action = torch.rand(EPISODES, ROWS, 3, generator=generator) * 2 - 1
    for row, task in enumerate(tasks):
        action[row, :, task + 1 :] = 0  # task k uses k + 1 values
    reward = torch.randn(EPISODES, ROWS, generator=generator)
    action[:, 0], reward[:, 0] = float("nan"), float("nan")
    numbers = torch.tensor(tasks)[:, None].expand(EPISODES, ROWS).contiguous()
    return {
        "obs": torch.randn(EPISODES, ROWS, 5, generator=generator),
        "action": action,
        "reward": reward,
        "task": numbers,
    }


class TensorDict:
    """Pickles like tensordict's: a class of that name with this state."""

    def __init__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__


def save(path: Path, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a file as the package does, without the package."""
    import sys
    import types

    module = types.ModuleType("tensordict._td")
    monkeypatch.setattr(TensorDict, "__module__", "tensordict._td")
    module.TensorDict = TensorDict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensordict", types.ModuleType("tensordict"))
    monkeypatch.setitem(sys.modules, "tensordict._td", module)
    torch.save(
        TensorDict({"_tensordict": tensors, "_device": None, "_batch_size": tensors["action"].shape[:2]}),
        path,
    )
    monkeypatch.delitem(sys.modules, "tensordict._td")
    monkeypatch.delitem(sys.modules, "tensordict")
    return path


def test_episodes_of_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "chunk_0.pt", content(), monkeypatch)
    save(tmp_path / "chunk_1.pt", content(1, (2, 2, 0, 1)), monkeypatch)
    with open_dataset(tmp_path) as data:
        assert data.format == "tensordict" and data.lengths.tolist() == [ROWS - 1] * 8
        assert {name: each.shape for name, each in data.spec.observations.items()} == {
            "vector": (5,),
            "task": (3,),
            "action_mask": (3,),
        }
        given = content(1, (2, 2, 0, 1))
        found = data.episode(6)  # the third of the second file, task 0
        assert np.array_equal(found.observations["vector"], given["obs"][2].numpy())
        assert np.array_equal(found.actions, given["action"][2, 1:].numpy())
        assert np.array_equal(found.rewards, given["reward"][2, 1:].numpy())
        assert found.observations["task"][0].tolist() == [1, 0, 0]
        assert found.observations["action_mask"][3].tolist() == [1, 0, 0]
        assert data.episode(4).observations["action_mask"][0].tolist() == [1, 1, 1]
        assert found.truncated.tolist() == [False] * 4 + [True] and not found.terminated.any()


def test_files_of_the_package(tmp_path: Path) -> None:
    tensordict = pytest.importorskip("tensordict")
    torch.save(tensordict.TensorDict(content(), batch_size=(EPISODES, ROWS)), tmp_path / "chunk_0.pt")
    with open_dataset(tmp_path) as data:
        assert data.format == "tensordict"
        assert np.array_equal(data.episode(1).rewards, content()["reward"][1, 1:].numpy())


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch tensordict_ran",)


def test_code_in_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"tensordict": Harmful()}, tmp_path / "x.pt", pickle_module=pickle)
    with pytest.raises(ConfigError, match="needs code to load, which is refused"):
        reader.Reader(tmp_path / "x.pt")
    assert not (tmp_path / "tensordict_ran").exists()


def test_damaged_and_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "chunk_0.pt", content(), monkeypatch)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ConfigError, match="cannot be read: it is damaged"):
        reader.Reader(path)
    save(path, {key: value for key, value in content().items() if key != "reward"}, monkeypatch)
    with pytest.raises(ConfigError, match="must be a TensorDict with the keys obs, action, reward"):
        reader.Reader(path)
    broken = content()
    broken["obs"][2, 3] = float("nan")
    with (
        open_dataset(save(path, broken, monkeypatch)) as data,
        pytest.raises(ConfigError, match="not finite, first at step 3"),
    ):
        data.episode(2)
