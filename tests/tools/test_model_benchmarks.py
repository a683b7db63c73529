"""Benchmarks of updates and plans on a CPU with their smallest networks, as a check before they run on a GPU."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest

from rl_lab.errors import LabError
from rl_lab.tools.bench import load_benchmark, run_benchmark

VERSIONS = ("v1", "v2", "2023", "2024", "today")
EACH = ("update_ms", "first_update_s", "captured_s", "act_16_ms", "parameters", "times_today")
SHORT = ["--batch", "2x4", "--updates", "1", "--device", "cpu"]


def values(name: str, *options: str) -> dict[str, float]:
    """Value of every row; all but differences in percent are positive, and all have a unit."""
    rows = run_benchmark(name, options)["rows"]
    assert all((row["value"] > 0 or row["unit"] == "%") and row["unit"] for row in rows)
    assert len({row["name"] for row in rows}) == len(rows)
    return {row["name"]: row["value"] for row in rows}


def test_every_dreamer_version_is_measured():
    found = values("dreamer", "--version", ",".join(VERSIONS), "--tiny", *SHORT)
    assert set(found) == {f"dreamer/{version}/{key}" for version in VERSIONS for key in EACH}
    assert found["dreamer/today/times_today"] == 1.0
    ratio = found["dreamer/v1/update_ms"] / found["dreamer/today/update_ms"]
    assert found["dreamer/v1/times_today"] == pytest.approx(ratio)
    assert all(found[f"dreamer/{version}/parameters"] < 30_000 for version in VERSIONS)
    with pytest.raises(LabError, match="--version is 'v3'"):
        run_benchmark("dreamer", ["--version", "v3"])


@pytest.mark.learning
def test_dreamer_versions_have_about_12_million_parameters():
    found = values("dreamer", "--version", ",".join(VERSIONS), *SHORT)
    for version in VERSIONS:
        assert found[f"dreamer/{version}/parameters"] == pytest.approx(12e6, rel=0.15), version


@pytest.mark.learning
def test_ranks_are_measured():
    with mock.patch.dict(os.environ):  # it sets torchrun's variables
        found = values("ranks", "--size", "tiny", *SHORT)
    assert {"ranks/tiny/alone_ms", "ranks/tiny/joined_ms"} <= set(found)


PLANS = ["--samplers", "ddim:4", "ddpm:8", "--envs", "1", "2", "--rounds", "1", "--updates", "1"]
DIFFUSION = {
    f"small {row} eager"
    for row in ("update", *(f"{plan}, {envs} envs" for plan in ("ddim 4", "ddpm 8") for envs in (1, 2)))
}


@pytest.mark.parametrize("observations", ["low_dim", "image"])
def test_diffusion_updates_and_plans_are_measured(observations: str, monkeypatch: pytest.MonkeyPatch):
    module = load_benchmark("diffusion")
    monkeypatch.setitem(module.SPECS, "small", module.SPECS[observations])
    monkeypatch.setitem(module.BATCH, "small", 4)
    rows: list[dict[str, Any]] = module.run(["--sizes", "small", "--device", "cpu", *PLANS])
    found = {row["name"]: row["value"] for row in rows if not row["name"].endswith(" diffusers")}
    assert set(found) == DIFFUSION and all(row["unit"] == "ms" for row in rows)
    assert all(value > 0 for value in found.values())


@pytest.mark.learning
def test_diffusion_with_the_published_network_for_vectors():
    found = values("diffusion", "--sizes", "low_dim", "--device", "cpu", *PLANS)
    own = {name for name in found if not name.endswith(" diffusers")}
    assert own == {name.replace("small", "low_dim") for name in DIFFUSION}
