from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from rl_lab.utils.files import JsonlWriter, json_safe, read_jsonl


def strict(text: str):
    def refuse(constant: str):
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def test_json_safe():
    value = {
        "nan": math.nan,
        "inf": [math.inf, -math.inf],
        "numpy": np.float32(0.5),
        "count": np.int64(3),
        "flag": np.bool_(True),
        "tensor": torch.tensor(2.0),
        "tuple": (1, None, "a", True),
        7: "key",
    }
    assert strict(json.dumps(json_safe(value), allow_nan=False)) == {
        "nan": "NaN",
        "inf": ["Infinity", "-Infinity"],
        "numpy": 0.5,
        "count": 3,
        "flag": True,
        "tensor": 2.0,
        "tuple": [1, None, "a", True],
        "7": "key",
    }


def test_nonfinite_values_round_trip(tmp_path):
    path = tmp_path / "m.jsonl"
    writer = JsonlWriter(path)
    writer.write({"step": 1, "loss": math.nan, "peak": -math.inf, "name": "x"})
    writer.close()
    assert strict(path.read_text())["loss"] == "NaN"
    (row,) = read_jsonl(path)
    assert math.isnan(row["loss"]) and row["peak"] == -math.inf and row["name"] == "x"


def test_resume_drops_later_lines(tmp_path):
    path = tmp_path / "m.jsonl"
    writer = JsonlWriter(path)
    writer.write({"step": 1})
    writer.write({"step": 2})
    size = writer.size()
    writer.write({"step": 3})
    writer.close()
    with open(path, "ab") as file:
        file.write(b'{"step": 4, "lo')  # torn by a kill
    resumed = JsonlWriter(path, resume_bytes=size)
    resumed.write({"step": 3})
    assert resumed.size() == path.stat().st_size
    resumed.close()
    assert [row["step"] for row in read_jsonl(path)] == [1, 2, 3]


@pytest.mark.parametrize("torn", [b'{"step": 2, "a', b"x" * 200_000])
def test_incomplete_line_is_removed(tmp_path, torn):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n' + torn)
    assert [row["step"] for row in read_jsonl(path)] == [1]
    JsonlWriter(path).write({"step": 2})
    assert [row["step"] for row in read_jsonl(path)] == [1, 2]


def test_zero_bytes_start_over(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n')
    JsonlWriter(path, resume_bytes=0).write({"step": 5})
    assert [row["step"] for row in read_jsonl(path)] == [5]


def test_lost_lines_warn(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st')
    with pytest.warns(UserWarning, match="but 100 at the checkpoint"):
        writer = JsonlWriter(path, resume_bytes=100)
    assert writer.size() == len(b'{"step": 1}\n')


def test_full_disk_loses_only_lines(tmp_path):
    path = tmp_path / "m.jsonl"
    writer = JsonlWriter(path)
    writer.write({"step": 1})
    real = writer._file

    class Full:
        """Takes three bytes, then refuses."""

        def __init__(self) -> None:
            self.taken = 0

        def write(self, view) -> int:
            if self.taken:
                raise OSError(28, "No space left on device")
            self.taken = real.write(view[:3])
            return self.taken

        def truncate(self, size) -> None:
            real.truncate(size)

    writer._file = Full()
    with pytest.warns(UserWarning, match="No space left"):
        writer.write({"step": 2})
    writer._file = real
    writer.write({"step": 3})
    assert [row["step"] for row in read_jsonl(path)] == [1, 3]


def test_line_that_is_nested_too_deeply_is_skipped(tmp_path):
    depth = 100_000  # Python 3.11 raises RecursionError at 1,000, newer ones later
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n' + '{"a":' * depth + "1" + "}" * depth + '\n{"step": 2}\n')
    assert [row["step"] for row in read_jsonl(file) if "step" in row] == [1, 2]
