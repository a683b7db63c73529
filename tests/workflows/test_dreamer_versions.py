"""Dreamer v1, v2, 2023, 2024: parameter counts and published values, a dry update of each, resume bit for bit.

The counts are sums over the layers that the original's code defines, written out below.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import rl_lab
from rl_lab.build import assemble_workflow, instantiate
from rl_lab.config.compose import compose_config, resolve_config
from rl_lab.records import ActionSpec, ArraySpec, Spec
from rl_lab.training import resume
from tests.same_run import assert_same_run, stopped_at

DISCRETE, CONTINUOUS = ActionSpec("discrete", (), (9,)), ActionSpec("continuous", (6,), ())
COLOUR = {"image": ArraySpec((3, 64, 64), "uint8")}
VECTOR = {"vector": ArraySpec((24,), "float32")}


def dense(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def convs(channels: list[int], kernels: list[int]) -> int:
    return sum(a * b * k * k + b for a, b, k in zip(channels, channels[1:], kernels))


def normed(inputs: int, outputs: int) -> int:
    """A layer of 2023: no bias, a norm with scale and offset."""
    return inputs * outputs + 2 * outputs


def normed_mlp(inputs: int, units: int, layers: int, outputs: int | None = None) -> int:
    total = normed(inputs, units) + (layers - 1) * normed(units, units)
    return total if outputs is None else total + dense(units, outputs)


def mlp(inputs: int, units: int, layers: int, outputs: int, *, norm: int = 0) -> int:
    """norm: parameters of a norm per unit."""
    total = dense(inputs, units) + (layers - 1) * dense(units, units) + layers * norm * units
    return total + dense(units, outputs)


def version_1(actions: int) -> dict[str, int]:
    """danijar/dreamer models.py: RSSM(30, 200, 200), ConvEncoder(32), DenseDecoder, ActionDecoder; 400 units."""
    feature = 200 + 30
    return {
        "encoder": convs([3, 32, 64, 128, 256], [4] * 4),
        "rssm": dense(30 + actions, 200)  # img1
        + 3 * 200 * (200 + 200 + 2)  # GRUCell: kernel, recurrent kernel, two biases (reset_after)
        + dense(200, 200) + dense(200, 60)  # img2, img3
        + dense(200 + 1024, 200) + dense(200, 60),  # obs1, obs2
        "decoder": dense(feature, 1024) + convs([1024, 128, 64, 32, 3], [5, 5, 6, 6]),
        "reward_head": mlp(feature, 400, 2, 1),
        "continue_head": 0,
        "actor": mlp(feature, 400, 4, 2 * actions),
        "critic": mlp(feature, 400, 3, 1),
    }  # fmt: skip


def version_2(
    actions: int, *, deter: int, norm: bool = False, head: bool = True, outputs: int
) -> dict[str, int]:
    """danijar/dreamerv2 common/nets.py: EnsembleRSSM (one member), Encoder, Decoder, MLP; depth 48, 400 units."""
    feature, two = deter + 1024, 2 if norm else 0
    hidden = deter  # rssm.hidden
    image = convs([3, 48, 96, 192, 384], [4] * 4) + two * (48 + 96 + 192 + 384)
    return {
        "encoder": image,
        "rssm": dense(1024 + actions, hidden) + two * hidden  # img_in
        + dense(hidden + deter, 3 * deter) + 2 * 3 * deter  # GRUCell with its LayerNormalization
        + dense(deter, hidden) + two * hidden + dense(hidden, 1024)  # img_out_0, img_dist_0
        + dense(deter + 1536, hidden) + two * hidden + dense(hidden, 1024),  # obs_out, obs_dist
        "decoder": dense(feature, 1536) + convs([1536, 192, 96, 48, 3], [5, 5, 6, 6]) + two * (192 + 96 + 48),
        "reward_head": mlp(feature, 400, 4, 1, norm=two),
        "continue_head": mlp(feature, 400, 4, 1, norm=two) if head else 0,
        "actor": mlp(feature, 400, 4, outputs, norm=two),
        "critic": mlp(feature, 400, 4, 1, norm=two),
    }  # fmt: skip


def version_2023(
    actions: int, *, deter: int, units: int, layers: int, depth: int, vector: int = 0, outputs: int
) -> dict[str, int]:
    """danijar/dreamerv3 @ 8fa35f8 nets.py: RSSM, MultiEncoder, MultiDecoder, MLP."""
    feature, d = deter + 1024, depth
    if vector:
        encoder, embed = normed_mlp(vector, 1024, 5), 1024
        decoder = normed_mlp(feature, 1024, 5, vector)
    else:
        widths, embed = [3, d, 2 * d, 4 * d, 8 * d], 16 * 8 * d
        encoder = sum(a * b * 16 + 2 * b for a, b in itertools.pairwise(widths))
        ups = [8 * d, 4 * d, 2 * d, d]
        decoder = (
            dense(feature, embed)
            + sum(a * b * 16 + 2 * b for a, b in itertools.pairwise(ups))
            + d * 3 * 16
            + 3
        )
    return {
        "encoder": encoder,
        "rssm": normed(1024 + actions, units)  # img_in
        + normed(deter + units, 3 * deter)  # gru
        + normed(deter, units) + dense(units, 1024)  # img_out, img_stats
        + normed(deter + embed, units) + dense(units, 1024)  # obs_out, obs_stats
        + deter,  # initial
        "decoder": decoder,
        "reward_head": normed_mlp(feature, units, layers, 255),
        "continue_head": normed_mlp(feature, units, layers, 1),
        "actor": normed_mlp(feature, units, layers, outputs),
        "critic": normed_mlp(feature, units, layers, 255),
    }  # fmt: skip


def block(inputs: int, outputs: int) -> int:
    """A layer of 2024: with bias, and a norm with a scale."""
    return dense(inputs, outputs) + outputs


def version_2024(actions: int, *, outputs: int) -> dict[str, int]:
    """danijar/dreamerv3 @ 251910d nets.py at size12m: RSSM (blockgru), SimpleEncoder, SimpleDecoder, MLP."""
    deter, hidden, stoch, depth, units = 2048, 256, 32 * 16, 16, 256
    feature, widths = deter + stoch, [16, 32, 48, 64, 64]
    embed = seed = 16 * widths[-1]
    channels = [3, *widths]
    ups = [64, 64, 48, 32, 16]
    head = block(feature, units)
    return {
        "encoder": convs(channels, [5] * 5) + sum(widths),
        "rssm": block(deter, hidden) + block(stoch, hidden) + block(actions, hidden)  # dynin0, dynin1, dynin2
        + (deter + 8 * 3 * hidden) * deter // 8 + 2 * deter  # dyn0
        + deter * 3 * deter // 8 + 3 * deter  # dyncore
        + block(deter, hidden) + block(hidden, hidden) + dense(hidden, stoch)  # img0, img1, imglogit
        + block(deter + embed, hidden) + dense(hidden, stoch),  # obs0, obslogit
        "decoder": deter * seed // 8 + seed + block(stoch, 2 * units) + dense(2 * units, seed) + 64  # space
        + convs(ups, [5] * 4) + sum(ups[1:]) + depth * 3 * 25 + 3,
        "reward_head": head + dense(units, 255),
        "continue_head": head + dense(units, 1),
        "actor": head + 2 * block(units, units) + dense(units, outputs),
        "critic": head + 2 * block(units, units) + dense(units, 255),
    }  # fmt: skip


SMALL = {"deter": 512, "units": 512, "layers": 2, "depth": 32}
COUNTS: dict[str, tuple[dict[str, ArraySpec], ActionSpec, dict[str, int]]] = {
    "dreamer_v1_dmc_vision": (COLOUR, CONTINUOUS, version_1(6)),
    "dreamer_v2_dmc_vision": (COLOUR, CONTINUOUS, version_2(6, deter=200, head=False, outputs=12)),
    "dreamer_v2_atari": (COLOUR, DISCRETE, version_2(9, deter=600, outputs=9)),
    "dreamer_v2_crafter": (COLOUR, DISCRETE, version_2(9, deter=1024, norm=True, outputs=9)),
    "dreamer_atari100k_2023": (COLOUR, DISCRETE, version_2023(9, **SMALL, outputs=9)),
    "dreamer_dmc_vision_2023": (COLOUR, CONTINUOUS, version_2023(6, **SMALL, outputs=12)),
    "dreamer_dmc_proprio_2023": (VECTOR, CONTINUOUS, version_2023(6, **SMALL, vector=24, outputs=12)),
    "dreamer_crafter_2023": (
        COLOUR,
        DISCRETE,
        version_2023(9, deter=4096, units=1024, layers=5, depth=96, outputs=9),
    ),
    "dreamer_dmc_vision_2024": (COLOUR, CONTINUOUS, version_2024(6, outputs=12)),
}


@pytest.mark.parametrize("experiment", COUNTS)
def test_parameter_counts(experiment: str):
    observations, action, expected = COUNTS[experiment]
    spec = Spec("test", observations, action)
    config = resolve_config(compose_config([f"experiment={experiment}"]), spec)
    nodes = {**config.components, **config.controllers}
    with torch.device("meta"):
        parts = {name: instantiate(name, node, spec=spec) for name, node in nodes.items()}
    modules = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
    assert {name: sum(p.numel() for p in part.parameters()) for name, part in modules.items()} == expected


# experiment -> values by dotted path; the sources are in the YAML files
VALUES: dict[str, dict[str, Any]] = {
    "dreamer_v1_dmc_vision": {
        "algorithm.batch_size": 50,
        "algorithm.batch_length": 50,
        "algorithm.free_nats": 3.0,
        "algorithm.imagination_horizon": 15,
        "optimizers.model.lr": 6e-4,
        "optimizers.actor.lr": 8e-5,
        "optimizers.critic.lr": 8e-5,
        "components.return_computer.lam": 0.95,
        "components.encoder.images": "valid",
        "environment.action_repeat": 2,
    },
    "dreamer_v2_atari": {
        "algorithm.entropy": 1e-3,
        "algorithm.size.deter": 600,
        "algorithm.loss_scales.dynamics": pytest.approx(0.1 * 0.8),
        "algorithm.loss_scales.representation": pytest.approx(0.1 * 0.2),
        "algorithm.loss_scales.continue": 5.0,
        "algorithm.sampler": "ends",
        "optimizers.model.lr": 2e-4,
        "optimizers.model.weight_decay": pytest.approx(1e-6 / 2e-4),
        "optimizers.actor.lr": 4e-5,
        "optimizers.actor.weight_decay": pytest.approx(1e-6 / 4e-5),
        "optimizers.critic.lr": 1e-4,
    },
    "dreamer_v2_crafter": {
        "algorithm.entropy": 3e-3,
        "algorithm.layer": "layer+elu",
        "components.rssm.layer": "layer+elu",
        "optimizers.actor.lr": 1e-4,
    },
    "dreamer_v2_dmc_vision": {
        "algorithm.free_nats": 1.0,
        "algorithm.sampler": "uniform",
        "algorithm.discount_horizon": 100,
        "optimizers.model.lr": 3e-4,
        "components.continue_head._target_": "rl_lab.components.nn.heads.ConstantContinue",
    },
    "dreamer_atari100k_2023": {
        "algorithm.train_ratio": 1024,
        "algorithm.loss_scales.dynamics": 0.5,
        "algorithm.clip_norms": {"model": 1000.0, "actor": 100.0, "critic": 100.0},
        "components.encoder.units": 1024,
        "components.reward_head.layers": 2,
        "controllers.actor.unimix": 0.01,
        "optimizers.model.lr": 1e-4,
        "optimizers.actor.lr": pytest.approx(3e-5),
    },
    "dreamer_dmc_proprio_2024": {
        "components.decoder.out_scale": 0.1,
        "components.encoder.images": "outer",
        "controllers.actor.unimix": 0.01,
        "algorithm.first_continue": "real",
        "algorithm.size.deter": 2048,
    },
}


@pytest.mark.parametrize("experiment", VALUES)
def test_published_values(experiment: str):
    spec = Spec("test", COLOUR, CONTINUOUS)
    config = resolve_config(compose_config([f"experiment={experiment}"]), spec)
    for path, expected in VALUES[experiment].items():
        value: Any = config
        for key in path.split("."):
            value = value[key]
        assert value == expected, path


# ---------------------------------------------------------------- runs

QUIET = ["debug=tiny", "logging.progress=off", "logging.tensorboard=false", "training.total_timesteps=60"]
RUNS = {
    "v1": ["experiment=dreamer_v1_dmc_vision", "environment=dummy_continuous"],
    "v2": ["experiment=dreamer_v2_crafter", "environment=dummy_discrete"],
    "v2_dmc": ["experiment=dreamer_v2_dmc_vision", "environment=dummy_continuous"],
    "2023": ["experiment=dreamer_atari100k_2023", "environment=dummy_discrete"],
    "2023_dmc": ["experiment=dreamer_dmc_proprio_2023", "environment=dummy_continuous"],
    "2024": ["experiment=dreamer_dmc_vision_2024", "environment=dummy_dict"],
}


@pytest.mark.parametrize("name", RUNS)
def test_resumed_run_equals_uninterrupted_run(name: str, tmp_path: Path, monkeypatch):
    words = [*RUNS[name], *QUIET]
    whole = rl_lab.train(None, [*words, f"run_dir={tmp_path / 'whole'}"])
    assert whole.counters["updates"] >= 4
    with stopped_at(monkeypatch):
        half = rl_lab.train(None, [*words, f"run_dir={tmp_path / 'half'}"])
    assert half.interrupted
    resume(tmp_path / "half")
    assert_same_run(tmp_path / "whole", tmp_path / "half")


@pytest.mark.parametrize(
    ("name", "scan", "norms"),
    [("v1", False, False), ("v2", False, True), ("2023", False, True), ("2024", True, True)],
)
def test_what_is_fused_can_be_read_off_the_parts(name: str, scan: bool, norms: bool):
    """With training.fast_path=on: only 2024 has today's scan, and V1 has no norms."""
    spec = Spec("test", COLOUR, CONTINUOUS)
    words = [RUNS[name][0], "debug=tiny", "training.fast_path=on", "experiment.device=cpu"]
    workflow = assemble_workflow(resolve_config(compose_config(words), spec), spec, torch.device("cpu"))
    assert workflow.fast and workflow.rssm.fast == workflow.fused == scan
    assert workflow.actor.mlp.fast == norms
