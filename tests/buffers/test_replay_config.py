from __future__ import annotations

import importlib.util
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import OmegaConf

import rl_lab
from rl_lab.buffers.replay import ReplayBuffer
from tests.buffers.buffer_helpers import COLUMNS

PACKAGE = Path(rl_lab.__file__).parent


def test_config_builds_buffer() -> None:
    path = PACKAGE / "configs" / "buffer" / "world_model_sequence.yaml"
    first, comment, *_ = path.read_text().splitlines()
    assert first == "# @package buffers.replay" and comment.startswith("# ")
    config = OmegaConf.load(path)
    assert set(config) == {"_target_", "capacity", "storage"}
    buffer = instantiate(config, columns=COLUMNS, num_streams=4, _convert_="object")
    assert (
        isinstance(buffer, ReplayBuffer) and buffer.capacity == 1_000_000
    )  # zero pages: nothing is touched yet


def test_benchmark_rows() -> None:
    path = PACKAGE.parent / "benchmarks" / "replay.py"
    module_spec = importlib.util.spec_from_file_location("bench_replay", path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    module.IMAGE = (3, 8, 8)
    rows = module.run(["--steps", "8000", "--rounds", "2", "--no-torchrl", "--device", "cpu"])
    values = {row["name"]: row["value"] for row in rows}
    assert values["replay/bytes_per_step"] == 192 + 8 + 4 + 3 + 4
    assert values["replay/sample_over_memcpy"] == values["replay/sample_ms"] / values["replay/memcpy_ms"]
    assert all(set(row) == {"name", "value", "unit"} for row in rows)
