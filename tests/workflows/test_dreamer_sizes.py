"""Parameter counts on 64×64×3 images with 9 actions, computed from the original's code."""

import pytest
import torch
from dreamer_case import dreamer_config
from omegaconf import OmegaConf

from rl_lab.build import instantiate
from rl_lab.compose import CONFIG_FOLDER
from rl_lab.records import ActionSpec, ArraySpec, Spec

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
    config = dreamer_config(algorithm__size=OmegaConf.load(CONFIG_FOLDER / f"size/{size}.yaml"))
    nodes = {**config.components, **config.controllers}
    with torch.device("meta"):
        parts = {name: instantiate(name, node, spec=SPEC) for name, node in nodes.items()}
    modules = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
    return {name: sum(p.numel() for p in module.parameters()) / 1e6 for name, module in modules.items()}


@pytest.mark.parametrize("size", COUNTS)
def test_total(size):
    assert sum(counts_of(size).values()) == pytest.approx(COUNTS[size], rel=0.005)


@pytest.mark.parametrize("size", PARTS)
def test_by_part(size):
    assert counts_of(size) == pytest.approx(PARTS[size], abs=0.05 if size == "200m" else 0.005)
