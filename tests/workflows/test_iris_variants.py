"""Every variant of IRIS' parts: one update of each part, imagination, and the presets that need a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rl_lab.tools.bench import load_benchmark, run_benchmark
from tests.workflows.iris_case import changed_parts, make_workflow, run_hook, weights

CODES = "algorithm.size.codes"
LOSS = "components/reconstruction_loss@components.tokenizer.losses.more"
QUANTIZER = "components/quantizer@components.tokenizer.quantizer"
BACKBONE = "components/backbone@components.world_model.backbone"
PAIRS = ["algorithm.tokenizer.batch_length=3"]
CRITIC = "{_target_: rl_lab.components.nn.return_critic.ReturnCritic, _partial_: true, horizon: 1}"
TOKENIZERS: dict[str, list[str]] = {
    "vq": [],
    "ema": [f"{QUANTIZER}=ema"],
    "fsq": [f"{QUANTIZER}=fsq", "components.tokenizer.quantizer.levels=[4,4]"],
    "lfq": [f"{QUANTIZER}=lfq", "components.tokenizer.quantizer.dim=4"],
    "residual": [f"{QUANTIZER}=residual", "components.tokenizer.quantizer.codes=4"],
    "continuous": [f"{QUANTIZER}=none", f"{CODES}=0", "+components.world_model.code=8"],
    "l2": [f"+{LOSS}=l2"],
    "worst_pixel": [f"+{LOSS}=worst_pixel"],
    "ssim": [f"+{LOSS}=ssim"],
    "perceptual": [f"+{LOSS}=perceptual", "components.tokenizer.losses.more.width=2"],
    "change": [f"+{LOSS}=change", *PAIRS],
    "hinge_gan": [f"+{LOSS}=hinge_gan", "components.tokenizer.losses.more.channels=4"],
    "value_aware": [f"+components.tokenizer.critic={CRITIC}", *PAIRS],
}
BACKBONES: dict[str, list[str]] = {
    name: [f"{BACKBONE}={name}"] for name in ("transformer", "gru", "lstm", "state_space", "cfc")
}
ONCE = ["components/world_model@components.world_model=iris_frame_at_once"]


def updated(kind: str, *words: str) -> Any:
    """Build a workflow and update each of its parts once; each update changes its part and no other."""
    workflow = make_workflow(kind, *words)
    for name in workflow.hooks():
        before = weights(workflow)
        result = run_hook(workflow, name)
        assert all(bool(torch.isfinite(value).all()) for value in result.metrics.values()), name
        assert changed_parts(before, weights(workflow)) == {name.removeprefix("update_")}
    return workflow


@pytest.mark.filterwarnings("ignore:components.tokenizer.losses")
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("kind", ["iris", "delta_iris"])
def test_tokenizers_train(kind: str, name: str):
    words = list(TOKENIZERS[name])
    if kind == "delta_iris" and name == "vq":
        words.append(f"{QUANTIZER}=vq")
    workflow = updated(kind, *words)
    metrics = run_hook(workflow, "update_tokenizer", seed=1).metrics
    if name in ("l2", "worst_pixel", "ssim", "perceptual", "change", "hinge_gan"):
        assert float(metrics["loss/more"]) != 0.0
    if name == "value_aware":
        assert float(metrics["loss/return"]) > 0.0


@pytest.mark.parametrize(
    ("kind", "words"),
    [("iris", []), ("iris", ONCE), ("delta_iris", [])],
    ids=["token_by_token", "frame_at_once", "delta_iris"],
)
@pytest.mark.parametrize("name", BACKBONES)
def test_backbones_train(name: str, kind: str, words: list[str]):
    workflow = updated(kind, *words, *BACKBONES[name])
    backbone = workflow.world_model.backbone
    assert type(backbone).__name__.lower().startswith(name.replace("_", ""))
    before = {key: p.detach().clone() for key, p in backbone.named_parameters()}
    run_hook(workflow, "update_world_model", seed=1)
    still = {key for key, p in backbone.named_parameters() if torch.equal(p, before[key])}
    assert not still, "every weight of the backbone is trained"


def test_frame_at_once_with_continuous_latents():
    updated("iris", *ONCE, *TOKENIZERS["continuous"])


def test_benchmarks_have_every_variant():
    """`rl-lab bench tokenizers` and `backbones` compare what is tested here."""
    tokenizers = load_benchmark("tokenizers").tokenizer_variants("boxing", "folder")
    others = {"pretrained_frozen", "pretrained_tuned", "diffusers"}
    assert set(tokenizers) - others == set(TOKENIZERS)
    backbones = load_benchmark("backbones").backbone_variants("folder", real=False, layers=None)
    assert set(BACKBONES) <= set(backbones)
    modes = {"lm_frozen", "lm_norms", "lm_last", "lm_lora", "lm_all", "lm_random_frozen", "lm_random_all"}
    assert modes <= set(backbones)


@pytest.mark.learning
def test_benchmarks_run(tmp_path: Path):
    short = ["--updates", "2", "--rows", "300", "--held-out", "300", "--device", "cpu"]
    short += ["--table", str(tmp_path / "table.md"), "--figure", str(tmp_path / "picture.png")]
    rows = run_benchmark("tokenizers", [*short, "--only", "vq,continuous,pretrained_frozen"])["rows"]
    values = {row["name"].removeprefix("tokenizers/catch/"): row["value"] for row in rows}
    for name in ("vq", "continuous", "pretrained_frozen"):
        assert values[f"{name}/pixel_error"] > 0 and values[f"{name}/open_15"] > 0
    assert values["vq/frame_ce"] == pytest.approx(4 * values["vq/token_ce"])
    assert (tmp_path / "table.md").read_text().count("\n") == 5
    rows = run_benchmark("backbones", [*short, "--only", "transformer,lm_lora"])["rows"]
    values = {row["name"].removeprefix("backbones/catch/"): row["value"] for row in rows}
    assert (
        values["transformer/reward_ce"] > 0 and values["lm_lora/weights"] > values["lm_lora/parameters"] > 0
    )
    assert values["real_environment/open_1"] > 0 and (tmp_path / "picture.png").stat().st_size > 1000
