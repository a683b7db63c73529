"""Parameter counts on 64×64×3 images with 9 actions, computed from the original's code."""

import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from rl_lab.build import instantiate
from rl_lab.config.checks import CONFIG_FOLDER
from rl_lab.config.compose import compose_config
from rl_lab.records import ActionSpec, ArraySpec, Spec
from tests.workflows.dreamer_case import dreamer_config

SPEC = Spec("image", {"image": ArraySpec((3, 64, 64), "uint8")}, ActionSpec("discrete", (), (9,)))
COUNTS = {
    "1m": 0.687,
    "12m": 10.49,
    "25m": 23.49,
    "50m": 41.65,
    "100m": 93.47,
    "200m": 165.95,
    "400m": 372.90,
}
# Million parameters by part at 12m and 200m.
PARTS = {
    "12m": {
        "encoder": 0.22,
        "rssm": 5.98,
        "decoder": 1.27,
        "reward_head": 0.72,
        "continue_head": 0.66,
        "actor": 0.79,
        "critic": 0.85,
    },
    "200m": {
        "encoder": 3.5,
        "rssm": 95.5,
        "decoder": 20.3,
        "reward_head": 10.7,
        "continue_head": 10.5,
        "actor": 12.6,
        "critic": 12.9,
    },
}


def counts_of(size):
    config = dreamer_config(algorithm__size=OmegaConf.load(CONFIG_FOLDER / f"size/dreamer/{size}.yaml"))
    nodes = {**config.components, **config.controllers}
    with torch.device("meta"):
        parts = {name: instantiate(name, node, spec=SPEC) for name, node in nodes.items()}
    modules = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
    return {name: sum(p.numel() for p in module.parameters()) / 1e6 for name, module in modules.items()}


@pytest.mark.parametrize("size", COUNTS)
def test_total_count(size):
    assert sum(counts_of(size).values()) == pytest.approx(COUNTS[size], rel=0.005)


@pytest.mark.parametrize("size", PARTS)
def test_count_per_part(size):
    assert counts_of(size) == pytest.approx(PARTS[size], abs=0.05 if size == "200m" else 0.005)


@pytest.mark.parametrize(("preset", "size", "parts"), [("8gb", "50m", 2), ("24gb", "200m", 1)])
def test_presets_for_a_memory(preset, size, parts):
    """Their estimate in docs/howto/scale.md is that of the H200's peak, and leaves a third of the memory free."""
    config = compose_config(["experiment=dreamer_crafter", f"size={preset}"])
    assert (
        config.algorithm.size == compose_config(["experiment=dreamer_crafter", f"size={size}"]).algorithm.size
    )
    assert config.algorithm.grad_acc_steps == parts and config.algorithm.batch_size % parts == 0
    assert config.buffers.replay.storage == "host" and config.buffers.replay.capacity == 1_100_000
    root = Path(__file__).parents[2]
    rows = json.loads((root / "docs/results/dreamer_h200.json").read_text())["rows"]
    values = {row["name"].removeprefix(f"dreamer/{size}/"): row["value"] for row in rows}
    gib, replay = 2**30, 9600 * 12302
    fixed = values["parameters"] * (16 if parts == 1 else 24)
    activations = values["peak_gib"] * gib - replay - values["parameters"] * 16
    estimates = [(fixed + factor * activations / parts) / gib for factor in (1, 2)]
    table = (root / "docs/howto/scale.md").read_text().partition("### Dreamer on 8 and 24 GB")[2]
    assert all(f" {value:.1f} GiB |" in table for value in estimates)
    assert estimates[1] <= 2 / 3 * int(preset.removesuffix("gb"))


def test_2023_hyperparameters():
    """danijar/dreamerv3 configs.yaml @ 8fa35f8, defaults and dmc_proprio."""
    config = compose_config(["experiment=dreamer_dmc_proprio_2023"])
    layers = {name: (node.layers, node.units) for name, node in config.components.items() if "layers" in node}
    layers |= {name: (node.layers, node.units) for name, node in config.controllers.items()}
    big, small = (5, 1024), (2, 512)
    assert layers == {
        "encoder": big,  # mlp_layers, mlp_units
        "decoder": big,
        "reward_head": small,
        "continue_head": small,
        "actor": small,
        "critic": small,
    }
    rssm = config.components.rssm
    assert (rssm.deter, rssm.hidden, rssm.stoch, rssm.classes) == (512, 512, 32, 32)
    assert (rssm.cell, rssm.initial, rssm.prior_layers, rssm.unimix) == ("layer_norm_gru", "learned", 1, 0.01)
    assert {config.components.reward_head.space, config.controllers.critic.space} == {"symlog"}
    rates = {name: (node.lr, node.eps) for name, node in config.optimizers.items()}
    assert rates == {
        "model": (pytest.approx(1e-4), 1e-8),
        "actor": (pytest.approx(3e-5), 1e-5),
        "critic": (pytest.approx(3e-5), 1e-5),
    }
    algorithm, environment = config.algorithm, config.environment
    assert (algorithm.loss_scales.dynamics, algorithm.loss_scales.representation) == (0.5, 0.1)
    assert (algorithm.train_ratio, algorithm.batch_size, algorithm.batch_length) == (512, 16, 64)
    assert (algorithm.imagination_horizon, algorithm.entropy, algorithm.slow_critic_rate) == (15, 3e-4, 0.02)
    assert (environment.num_envs, environment.action_repeat) == (4, 2)
    assert config.training.precision == "tensorfloat32"  # float16 in the original, with as many mantissa bits
