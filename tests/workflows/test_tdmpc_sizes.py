"""Layer shapes and parameter counts of the published sizes."""

import pytest
import torch
from omegaconf import OmegaConf

from rl_lab.build import instantiate
from rl_lab.config.checks import CONFIG_FOLDER
from rl_lab.config.compose import compose_config
from rl_lab.records import ActionSpec, ArraySpec, Spec
from tests.workflows.tdmpc_case import make_tdmpc, run_hook, tdmpc_config

# nicklashansen/tdmpc2 common/__init__.py: enc_dim, mlp_dim, latent_dim, enc layers, num_q; millions of parameters for
# walker, and for 80 tasks with 39 observations, 6 actions and an embedding of 96.
SIZES = {
    "1m": (256, 384, 128, 2, 2, 1.21, 1.43),
    "5m": (256, 512, 512, 2, 5, 4.96, 5.38),
    "19m": (1024, 1024, 768, 3, 5, 18.1, 19.0),
    "48m": (1792, 1792, 768, 4, 5, 47.2, 48.8),
    "317m": (4096, 4096, 1376, 5, 8, 312.6, 317.4),
}
WALKER = Spec("walker", {"vector": ArraySpec((24,), "float32")}, ActionSpec("continuous", (6,)))
EIGHTY = Spec(
    "mt80",
    {
        "vector": ArraySpec((39,), "float32"),
        "task": ArraySpec((80,), "float32"),
        "action_mask": ArraySpec((6,), "float32"),
    },
    ActionSpec("continuous", (6,)),
)


def build(size, spec, **changes):
    config = tdmpc_config(
        algorithm__size=OmegaConf.load(CONFIG_FOLDER / f"size/tdmpc2/{size}.yaml"), **changes
    )
    if "task" in spec.observations:
        embedding = OmegaConf.load(CONFIG_FOLDER / "components/task_embedding/learned.yaml")
        OmegaConf.update(config, "components.task_embedding", embedding, force_add=True)
        config.algorithm.task_width = config.algorithm.size.task_width
    nodes = {**config.components, **config.controllers}
    with torch.device("meta"):
        parts = {name: instantiate(name, node, spec=spec) for name, node in nodes.items()}
    return {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}


def millions(parts):
    return sum(p.numel() for part in parts.values() for p in part.parameters()) / 1e6


@pytest.mark.parametrize("size", SIZES)
def test_published_sizes(size):
    units, mlp, latent, layers, members, _, _ = SIZES[size]
    stated = OmegaConf.load(CONFIG_FOLDER / f"size/tdmpc2/{size}.yaml")
    assert (stated.encoder_units, stated.units, stated.latent, stated.encoder_layers, stated.members) == (
        units,
        mlp,
        latent,
        layers,
        members,
    )
    assert (stated.bins, stated.bin_limit) == (101, 10.0)


@pytest.mark.parametrize("size", SIZES)
def test_parameter_counts(size):
    *_, walker, eighty = SIZES[size]
    assert millions(build(size, WALKER)) == pytest.approx(walker, rel=0.005)
    assert millions(build(size, EIGHTY)) == pytest.approx(eighty, rel=0.005)


def test_default_parameter_count():
    """5m on walker, layer by layer: a dense layer with LayerNorm has in·out + 3·out parameters."""

    def normed(inputs, outputs):
        return inputs * outputs + 3 * outputs

    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in build("5m", WALKER).items()}
    head = normed(512 + 6, 512) + normed(512, 512) + 512 * 101 + 101
    assert counts == {
        "encoder": normed(24, 256) + normed(256, 512),
        "dynamics": normed(512 + 6, 512) + normed(512, 512) + normed(512, 512),
        "reward_head": head,
        "critic": 5 * head,
        "policy": normed(512, 512) + normed(512, 512) + 512 * 12 + 12,
    }
    assert sum(counts.values()) == 4_960_618


def test_mt30_widths():
    """Latent 512 and task width 64 for mt30 at 19m; 96 for every other size (nicklashansen/tdmpc2 parser.py)."""

    def widths(*words):
        algorithm = compose_config(["experiment=tdmpc2_multitask", *words]).algorithm
        return algorithm.size.latent, algorithm.task_width

    assert widths() == (768, 96)
    assert widths("size=19m_mt30") == (512, 64)
    assert widths("size=48m", "algorithm.task_width=64") == (768, 64)  # mt30 at 48m
    wide, narrow = (
        OmegaConf.load(CONFIG_FOLDER / f"size/tdmpc2/{size}.yaml") for size in ("19m", "19m_mt30")
    )
    assert {**wide, "latent": 512, "task_width": 64} == dict(narrow)
    parts = build("19m_mt30", EIGHTY)
    assert shapes(parts["encoder"].mlp)[0] == [(1024, 39), (1024, 64)]
    assert shapes(parts["dynamics"].mlp)[0] == [(1024, 512), (1024, 6 + 64)]


@pytest.mark.parametrize("size", ["1m", "19m"])
def test_published_sizes_make_an_update(size):
    workflow = make_tdmpc(WALKER, algorithm__size=OmegaConf.load(CONFIG_FOLDER / f"size/tdmpc2/{size}.yaml"))
    before = workflow.dynamics.mlp.layers[0].bias.detach().clone()
    metrics = run_hook(workflow, "update").metrics
    assert all(torch.isfinite(value) for value in metrics.values())
    assert metrics["nonfinite"].item() == 0.0
    assert not torch.equal(workflow.dynamics.mlp.layers[0].bias, before)


def shapes(mlp):
    return [
        [tuple(p.shape) for name, p in layer.named_parameters() if name.startswith("weight")]
        for layer in mlp.layers
    ]


def test_largest_layer_shapes():
    parts = build("317m", WALKER)
    assert shapes(parts["encoder"].mlp) == [
        [(4096, 24)],
        [(4096, 4096)],
        [(4096, 4096)],
        [(4096, 4096)],
        [(1376, 4096)],
    ]
    assert shapes(parts["dynamics"].mlp) == [[(4096, 1376), (4096, 6)], [(4096, 4096)], [(1376, 4096)]]
    assert shapes(parts["reward_head"].mlp) == [[(4096, 1376), (4096, 6)], [(4096, 4096)], [(101, 4096)]]
    assert shapes(parts["policy"].mlp) == [[(4096, 1376)], [(4096, 4096)], [(12, 4096)]]
    online = dict(parts["critic"].online.named_parameters())
    assert online["input0_0"].shape == (8, 1376, 4096) and online["input1_0"].shape == (8, 6, 4096)
    assert online["input0_2"].shape == (8, 4096, 101)
