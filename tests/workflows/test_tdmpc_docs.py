"""docs/algorithms/tdmpc.md matches the configs and metrics, and the benchmark runs on a CPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import rl_lab
from rl_lab.config.checks import CONFIG_FOLDER
from rl_lab.tools.bench import run_benchmark
from tests.workflows.tdmpc_case import composed

PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithms" / "tdmpc.md"


def same(stated: str, value: object) -> bool:
    if isinstance(value, bool):
        return stated == str(value).lower()
    try:
        return float(stated) == float(value)  # type: ignore[arg-type]
    except ValueError:
        return stated == value


@pytest.mark.parametrize(("column", "experiment"), [(0, "tdmpc2_dmc_state"), (1, "tdmpc_dmc")])
def test_documented_values_match_configs(column: int, experiment: str):
    rows = re.findall(r"^\|[^|]+\| `([\w.]+)` \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(), re.M)
    assert len(rows) > 25
    config = composed(experiment)
    for key, *stated in rows:
        value = OmegaConf.select(config, key)
        assert same(stated[column].strip(), value), f"{key} is {value} in {experiment}, not {stated[column]}"


def test_documented_sizes_match_configs():
    for size in ("1m", "5m", "19m", "48m", "317m"):
        stated = OmegaConf.load(CONFIG_FOLDER / f"size/tdmpc2/{size}.yaml")
        sizes = [stated[key] for key in ("encoder_units", "units", "latent", "encoder_layers", "members")]
        row = re.search(rf"^\| `{size}`[^|]*\|(.+)\|$", PAGE.read_text(), re.M)
        assert row is not None
        assert [int(cell) for cell in row[1].split("|")[:5]] == sizes


def test_documented_metrics_are_logged(tmp_path: Path):
    words = ["debug=tiny", "environment=dummy_continuous", "training.total_timesteps=60"]
    words += ["training.evaluate.every_env_steps=40", "training.report.every_env_steps=20"]
    words += ["logging.progress=off", "logging.tensorboard=false", f"run_dir={tmp_path / 'run'}"]
    run = rl_lab.train("tdmpc2_pendulum", words)
    logged = {
        key for line in (run.path / "metrics.jsonl").read_text().splitlines() for key in json.loads(line)
    }
    table = PAGE.read_text().partition("## Reading the metrics")[2].partition("\n## ")[0]
    named = set(re.findall(r"`((?:train|controller|collect|eval|report)/[\w/]+)`", table))
    assert len(named) > 15
    assert named - logged == set()


def test_benchmark_runs_on_a_cpu():
    options = (
        "--size 1m --observations 4 --actions 2 --batch 4 --samples 8 --updates 1 --envs 1,2 --device cpu"
    )
    rows = {row["name"]: row["value"] for row in run_benchmark("tdmpc", options.split())["rows"]}
    assert {"tdmpc2/1m/update_ms", "tdmpc2/1m/plan_1_ms", "tdmpc2/1m/plan_2_ms"} <= set(rows)
    assert rows["tdmpc2/1m/first_step_s"] > 0
    assert rows["tdmpc2/1m/parity_loss"] == rows["tdmpc2/1m/parity_action"] == 0.0
