"""Files of weights: the format of the `safetensors` package, every bit of a state, and damaged files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_lab.errors import CheckpointError
from rl_lab.utils.checkpoint import load_checkpoint
from rl_lab.utils.checkpoint.safetensors import read_state, read_tensors, write_state, write_tensors

TENSORS = {
    "a.weight": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)),
    "b": torch.arange(7, dtype=torch.uint8),
    "half": torch.randn(2, 2).to(torch.bfloat16),
    "flag": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.zeros(0, 4),
}


def test_other_programs_read_our_files_and_we_read_theirs(tmp_path: Path):
    safetensors = pytest.importorskip("safetensors.torch")
    write_tensors(tmp_path / "ours.safetensors", TENSORS, {"format": "pt", "note": "é"})
    theirs = safetensors.load_file(tmp_path / "ours.safetensors")
    safetensors.save_file(TENSORS, tmp_path / "theirs.safetensors", metadata={"note": "x"})
    ours, metadata = read_tensors(tmp_path / "theirs.safetensors")
    assert metadata == {"note": "x"}
    for name, value in TENSORS.items():
        assert torch.equal(theirs[name], value) and torch.equal(ours[name], value)
        assert theirs[name].dtype == ours[name].dtype == value.dtype


def state() -> dict[str, Any]:
    return {
        "version": 1,
        "global_step": 12,
        "components": {"encoder": {"weight": TENSORS["a.weight"], "steps": torch.tensor(4)}},
        "controllers": {},
        "workflow_custom": {"mean": [1.5, None, "text"], "norm": {"high": torch.tensor([0.1])}},
        "observation_statistics": {"count": 3, "mean": {"x": TENSORS["scalar"]}},
    }


def test_a_state_keeps_every_bit(tmp_path: Path):
    file = tmp_path / "agent.safetensors"
    write_state(file, state(), {"spec": {"name": "x"}})
    found, info = read_state(file)
    assert info == {"spec": {"name": "x"}}
    assert torch.equal(found["components"]["encoder"]["weight"], TENSORS["a.weight"])
    assert found["components"]["encoder"]["steps"].dtype == torch.int64
    assert found["workflow_custom"]["mean"] == [1.5, None, "text"] and found["controllers"] == {}
    assert torch.equal(found["observation_statistics"]["mean"]["x"], TENSORS["scalar"])
    loaded = load_checkpoint(file, weights=True)
    assert loaded.step == 12 and loaded.info == info and not loaded.complete


def test_bfloat16_rounds_weights_only(tmp_path: Path):
    file = tmp_path / "agent.safetensors"
    write_state(file, state(), {}, "bfloat16")
    assert read_tensors(file)[0]["components.encoder.weight"].dtype == torch.bfloat16
    found, _ = read_state(file)
    weight = found["components"]["encoder"]["weight"]
    assert weight.dtype == torch.float32
    torch.testing.assert_close(weight, TENSORS["a.weight"], rtol=2**-8, atol=0.0)
    assert torch.equal(found["workflow_custom"]["norm"]["high"], torch.tensor([0.1]))
    with pytest.raises(Exception, match="dtype is 'int8'"):
        write_state(file, state(), {}, "int8")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({1: torch.zeros(1)}, "has the key 1"),
        (complex(1, 2), "cannot be exported"),
        ({"$tensor": 1}, "has the key"),
    ],
)
def test_states_that_cannot_be_written(tmp_path: Path, value: Any, text: str):
    with pytest.raises(CheckpointError, match=text):
        write_state(tmp_path / "agent.safetensors", {"components": value}, {})


def header(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def edit(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        content = json.loads(data[8 : 8 + length])
        change(content)
        text = json.dumps(content).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return edit


def put(name: str, key: str, value: Any) -> Callable[[bytes], bytes]:
    return header(lambda content: content[name].update({key: value}))


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "shorter": lambda data: data[:-1],
    "longer": lambda data: data + b"x",
    "long header": lambda data: (1 << 62).to_bytes(8, "little") + data[8:],
    "no JSON": lambda data: data[:8] + b"}" + data[9:],
    "a list": lambda data: (2).to_bytes(8, "little") + b"[]",
    "dtype": put("b", "dtype", "F8"),
    "shape": put("a.weight", "shape", [1 << 40, 1 << 40]),
    "negative": put("a.weight", "shape", [-3, -5]),
    "offsets": put("b", "data_offsets", [0, 7]),
    "beyond": put("b", "data_offsets", [1 << 50, (1 << 50) + 7]),
    "text": put("b", "data_offsets", "ab"),
    "deep": lambda data: (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "metadata": put("__metadata__", "x", 3),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_refused_with_one_sentence(tmp_path: Path, name: str):
    file = tmp_path / "w.safetensors"
    write_tensors(file, TENSORS, {"format": "pt"})
    file.write_bytes(DAMAGE[name](file.read_bytes()))
    with pytest.raises(CheckpointError, match=r"w\.safetensors is damaged or no safetensors file"):
        read_tensors(file)


def test_weights_of_another_program_are_no_state(tmp_path: Path):
    file = tmp_path / "w.safetensors"
    write_tensors(file, TENSORS, {})
    with pytest.raises(CheckpointError, match="was not written by rl-lab export"):
        read_state(file)
    for text in (
        "[]",
        '{"dtype": "float32", "info": {}, "state": {"a": {"$tensor": "nothing"}}}',
        "{}",
        "nul",
    ):
        write_tensors(file, TENSORS, {"rl_lab": text})
        with pytest.raises(CheckpointError):
            read_state(file)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_checkpoint(tmp_path / "none.safetensors")
