"""Every variant of IRIS' parts: one update of each part, imagination, and the presets that need a file."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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


@pytest.mark.parametrize("words", [[], ONCE], ids=["token_by_token", "frame_at_once"])
@pytest.mark.parametrize("name", BACKBONES)
def test_backbones_train(name: str, words: list[str]):
    updated("iris", *words, *BACKBONES[name])


def test_frame_at_once_with_continuous_latents():
    updated("iris", *ONCE, *TOKENIZERS["continuous"])
