from __future__ import annotations

import enum
import io
import os
import pickle
from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rl_lab.errors import CheckpointError
from rl_lab.utils.checkpoint.saveable import load_data, to_saveable


def round_trip(value):
    file = io.BytesIO()
    torch.save(to_saveable(value), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_numpy_becomes_tensors_and_numbers():
    state = {
        "array": np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::-1],
        "scalar": np.float64(0.1),
        "flag": np.bool_(True),
        "text": np.str_("name"),
        "zero_d": np.array(3.5),
        "big_endian": np.array([1, 2], dtype=">i4"),
        np.int64(4): [np.uint8(7), (np.float32(0.5),)],
    }
    loaded = round_trip(state)
    assert loaded["array"].tolist() == [[2, 1, 0], [5, 4, 3]] and loaded["array"].dtype is torch.int16
    assert (loaded["scalar"], loaded["flag"], loaded["text"]) == (0.1, True, "name")
    assert type(loaded["scalar"]) is float and type(loaded["flag"]) is bool and type(loaded["text"]) is str
    assert loaded["zero_d"].shape == () and loaded["big_endian"].tolist() == [1, 2]
    assert loaded[4] == [7, (0.5,)]


def test_arrays_copied_tensors_detached():
    array = np.zeros(2)
    saved = to_saveable({"a": array, "p": nn.Parameter(torch.ones(2))})
    array[0] = 5
    assert saved["a"].tolist() == [0, 0]
    assert type(saved["p"]) is torch.Tensor and not saved["p"].requires_grad


def test_view_is_saved_without_storage():
    file = io.BytesIO()
    torch.save(to_saveable({"row": torch.zeros(100_000)[3:5], "column": torch.zeros(300, 300)[:, 1]}), file)
    assert len(file.getvalue()) < 10_000


def test_tied_tensors_stay_tied():
    weight = torch.ones(1000)
    loaded = round_trip({"a": weight, "b": weight})
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()


def test_state_dicts_keep_their_module_versions():
    state = nn.BatchNorm1d(2).state_dict()
    loaded = round_trip({"model": state})["model"]
    assert type(loaded) is OrderedDict and loaded._metadata == state._metadata


class Colour(enum.IntEnum):
    RED = 1


@dataclass
class Record:
    x: int = 1


Pair = namedtuple("Pair", "a b")
loop: list = []
loop.append(loop)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({1, 2}, "set"),
        (b"", "uint8"),
        (deque([1]), "deque"),
        (Colour.RED, "Colour"),
        (Record(), "Record"),
        (Pair(1, 2), "Pair"),
        (lambda: 1, "function"),
        (nn.Linear(1, 1), "state_dict"),
        (torch.Generator(), "get_state"),
        (np.array(["a"]), "dtype"),
        (np.array([object()]), "dtype object"),
        (np.datetime64("2020-01-01"), "datetime64"),
        (torch.zeros(2, device="meta"), "meta"),
        (loop, "contains itself"),
        (range(3), "range"),
        (type, "type"),
        ("\ud800", "surrogates"),
        ({Colour.RED: 1}, "key"),
        ({frozenset(): 1}, "key"),
    ],
)
def test_unsupported_types_raise_with_key(value, name):
    state = {"components": {"w": torch.ones(1)}, "workflow_custom": {"history": [1, 2, (3,), value]}}
    with pytest.raises(CheckpointError, match=r"workflow_custom\.history\[3\]") as caught:
        to_saveable(state)
    assert name in str(caught.value)


def test_deep_nesting_raises():
    value: list = []
    for _ in range(500):
        value = [value]
    with pytest.raises(CheckpointError, match="nested"):
        to_saveable({"a": value})


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from([np.int32(4), np.float16(0.5), torch.tensor([1.0]), np.zeros((0, 2)), torch.tensor(3)]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=60, deadline=None)
@given(plain)
def test_accepted_values_can_be_loaded(value):
    try:
        saved = to_saveable(value)
    except CheckpointError as error:
        assert "surrogates" in str(error)
        return
    loaded = round_trip(value)
    assert repr(loaded) == repr(saved)


class Evil:
    def __reduce__(self):
        return os.system, ("touch hacked",)


def write_evil(path, kind):
    if kind == "pickle":
        path.write_bytes(pickle.dumps({"a": Evil()}))
    elif kind == "script":
        torch.jit.script(nn.Linear(1, 1)).save(path)
    else:
        torch.save({"a": {"code": Evil(), "class": deque(), "object": Record()}[kind]}, path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["code", "class", "object", "script", "pickle"])
def test_files_with_code_are_refused(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "evil.pt"
    write_evil(path, kind)
    with pytest.raises(CheckpointError, match=r"needs code to load|is not a checkpoint") as caught:
        load_data(path)
    assert "weights_only" not in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "hacked").exists()
    if kind == "code":
        assert "system" in str(caught.value)


@pytest.mark.parametrize("position", [0.2, 0.5, 0.9])
def test_zip_checksums_detect_damage(tmp_path, position):
    path = tmp_path / "a.pt"
    torch.save({"w": torch.rand(5000)}, path)
    data = bytearray(path.read_bytes())
    data[int(len(data) * position)] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        load_data(path, check_zip=True)


def test_missing_empty_and_truncated_files(tmp_path):
    path = tmp_path / "a.pt"
    with pytest.raises(CheckpointError, match="does not exist"):
        load_data(path)
    torch.save({"w": torch.rand(5000)}, path)
    data = path.read_bytes()
    for part in (b"", data[:100], data[:-10]):
        path.write_bytes(part)
        with pytest.raises(CheckpointError):
            load_data(path)
