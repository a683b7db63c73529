"""docs/algorithms/dreamer.md matches the configs, and what it says about differences from the original is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from rl_lab.components.nn.actions import make_policy
from rl_lab.config.checks import CONFIG_FOLDER
from rl_lab.config.compose import compose_config
from rl_lab.records import ActMode
from tests.workflows.dreamer_case import CONTINUOUS, make_dreamer, vector_spec
from tests.workflows.test_tdmpc_docs import same

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "algorithms" / "dreamer.md").read_text()
TEXT = " ".join(PAGE.split())


@pytest.mark.parametrize(("column", "experiment"), [(0, "dreamer_atari"), (1, "dreamer_cartpole")])
def test_documented_values_match_configs(column: int, experiment: str):
    rows = re.findall(r"^\|[^|]+\| `([\w.]+)`[^|]* \| ([^|]+) \| ([^|]+) \|$", PAGE, re.M)
    assert len(rows) > 30
    config = compose_config([f"experiment={experiment}"])
    for key, *stated in rows:
        value, text = OmegaConf.select(config, key), stated[column].strip()
        assert text == "by size" or same(text, value), f"{key} is {value} in {experiment}, not {text}"


def test_presets_say_what_the_paper_has():
    """The train ratio of Atari 100k, what is not plotted; the 2024 presets have the agent of 2024."""
    said = {path.stem: path.read_text() for path in (CONFIG_FOLDER / "experiment").glob("dreamer_*.yaml")}
    assert "ratio 128" in said["dreamer_atari100k"]
    assert compose_config(["experiment=dreamer_atari100k"]).algorithm.train_ratio == 256
    for task in ("dmc_proprio", "dmc_vision"):
        assert "Not what the paper plots" in said[f"dreamer_{task}"]
    for task in ("atari", "atari100k", "dmc_proprio", "dmc_vision"):  # the agent of 2024, too
        now, of_2024 = (compose_config([f"experiment=dreamer_{task}{suffix}"]) for suffix in ("", "_2024"))
        for config, unimix, first in ((now, 0.0, "predicted"), (of_2024, 0.01, "real")):
            assert (config.controllers.actor.unimix, config.algorithm.first_continue) == (unimix, first)
    assert "norms and the latents' softmax are in float32 (the original: bfloat16)" in TEXT


def test_deter_is_float32_and_stored_as_bfloat16():
    workflow = make_dreamer(training__precision="bfloat16")
    obs = {"vector": torch.randn(3, 4)}
    mode = ActMode(generator=torch.Generator().manual_seed(0))
    _, state, columns = workflow.act(
        obs, workflow.initial_policy_state(3), torch.ones(3, dtype=torch.bool), mode
    )
    assert state["deter"].dtype == torch.float32 and columns["deter"].dtype == torch.bfloat16
    assert workflow.policy_columns()["stoch"].dtype == "uint8"
    assert "`deter` is float32 in the scan, in imagination and when acting" in TEXT


def test_policy_deviation_shares_the_output_layer_and_is_bounded():
    """Adaptive clipping sees mean and deviation as one tensor; bounds 0.1 and 1."""
    actor = make_dreamer(vector_spec(CONTINUOUS)).actor
    outputs = {
        tuple(p.shape) for p in actor.parameters() if p.ndim == 2 and p.shape[0] == 2 * CONTINUOUS.shape[0]
    }
    assert len(outputs) == 1
    policy = make_policy(CONTINUOUS)
    raw = torch.cat([torch.zeros(2, 2), torch.tensor([[-50.0, 50.0]] * 2)], -1)
    samples = torch.stack(
        [policy.sample(raw, torch.full((2, 2), 1.0)), policy.sample(raw, torch.zeros(2, 2))]
    )
    assert torch.allclose(samples[0] - samples[1], torch.tensor([0.1, 1.0]).expand(2, 2), atol=1e-4)
    assert "The bounds of the deviation (0.1 and 1) are not settings" in TEXT


@pytest.mark.parametrize(
    "words",
    [
        "The output layers of heads and policy have float32 weights",  # test_heads.py
        "Rows of resets do not count as steps for the train ratio",  # test_collector.py
        "Online sequences start at the first row of a stream",  # test_samplers.py
        "sequences of the prefill phase are not queued",
        "Crafter's worlds and Atari's sticky actions do not depend on earlier episodes",
        "their current categorical head ignores it",
        "DreamerV2 3.8, PPO 2.9, Rainbow 2.5",
    ],
)
def test_other_differences_are_told(words: str):
    assert words in TEXT
