"""Tokenizers of frames and of changes, and reconstruction losses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rl_lab.components.nn.fast_path import use_fast_path
from rl_lab.components.nn.losses import (
    AbsoluteError,
    Perceptual,
    SquaredPixelError,
    WorstPixel,
    weighted_losses,
)
from rl_lab.components.nn.quantizers import EMAQuantizer, VectorQuantizer
from rl_lab.components.nn.residual_conv import ImageNorm, ResidualConv
from rl_lab.components.representation_learners.delta_tokenizer import DeltaTokenizer
from rl_lab.components.representation_learners.tokenizer import (
    FrameTokenizer,
    frame_key,
    rounded,
    to_frames,
    to_pixels,
)
from rl_lab.errors import ConfigError
from rl_lab.records import ActionSpec, ArraySpec, Batch, Spec

SIDE = 16
SPEC = Spec("images", {"image": ArraySpec((3, SIDE, SIDE), "uint8")}, ActionSpec("discrete", (), (3,)))


def make(kind: str):
    torch.manual_seed(0)
    losses = {"l2": SquaredPixelError()}
    if kind == "frame":
        return FrameTokenizer(SPEC, VectorQuantizer(vocab=16, dim=8), losses, width=4, levels=3, latent=8)
    return DeltaTokenizer(
        SPEC, EMAQuantizer(vocab=16, dim=8), losses, width=4, latent=8, frame_width=4, frame_latent=4
    )


def batch_of(rows: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2, rows, 3, SIDE, SIDE), generator=generator).to(torch.uint8)
    mask = torch.ones(2, rows, dtype=torch.bool)
    mask[1, -1] = False
    return Batch({"obs/image": images, "action": torch.randint(3, (2, rows), generator=generator)}, mask=mask)


@torch.no_grad()
@pytest.mark.parametrize(("kind", "tokens"), [("frame", 16), ("delta", 4)])
def test_encode_and_decode(kind: str, tokens: int):
    tokenizer = make(kind)
    frames = torch.rand(5, 2, 3, SIDE, SIDE)
    action = torch.tensor([0, 1, 2, 0, 1])
    found = tokenizer.encode(frames[:, 1], frames[:, 0], action)
    assert tokenizer.num_tokens == tokens and found.shape == (5, tokens)
    assert found.dtype == torch.int64 and int(found.max()) < tokenizer.vocab
    shown = tokenizer.decode(found, frames[:, 0], action)
    assert shown.shape == (5, 3, SIDE, SIDE)
    early = tokenizer.frame_features(frames[:, 0])
    assert torch.equal(tokenizer.decode(found, frames[:, 0], action, early), shown)
    assert float(shown.min()) >= 0.0 and float(shown.max()) <= 1.0
    seen = tokenizer.policy_view(frames[:, 1])
    if kind == "delta":
        torch.testing.assert_close(shown, rounded(shown))
        assert seen is not None and torch.equal(seen, frames[:, 1])
        other = tokenizer.decode(found, frames[:, 0], (action + 1) % 3)
        assert not torch.equal(shown, other)  # the action matters
    else:
        torch.testing.assert_close(seen, shown)  # the policy gets reconstructions


def test_delta_tokenizer_initial_weights():
    """vmicheli/delta-iris src/utils.py init_weights: N(0, 0.02), biases 0; convolutions as torch has them."""
    torch.manual_seed(0)
    tokenizer = DeltaTokenizer(SPEC, EMAQuantizer(vocab=16, dim=64), {}, width=8, frame_width=8)
    for name in ("action_plane", "action_grid", "before", "after"):
        weight = tokenizer.get_parameter(f"{name}.weight").detach()
        deviation = 0.02 * (1.0 + 5.0 / (2 * weight.numel()) ** 0.5)  # five standard errors
        assert 0.04 - deviation < float(weight.std()) < deviation, name
        assert abs(float(weight.mean())) < 5 * 0.02 / weight.numel() ** 0.5, name
    assert not tokenizer.before.bias.any() and not tokenizer.after.bias.any()
    first = tokenizer.encoder.layers[0]  # U(±1/√fan_in)
    assert float(first.weight.detach().std()) == pytest.approx((3 * 7 * 9) ** -0.5, rel=0.1)


def test_codebook_changes_in_training_only():
    tokenizer, batch = make("delta"), batch_of()
    before = tokenizer.quantizer.table.clone()
    tokenizer.compute_loss(batch, torch.rand(tokenizer.noise_size(2, 3)), learn=False)
    tokenizer.encode(*(to_frames(batch.obs["image"][:, t]) for t in (1, 0)), batch.action[:, 0])
    assert torch.equal(tokenizer.quantizer.table, before)
    tokenizer.compute_loss(batch, torch.rand(tokenizer.noise_size(2, 3)))
    assert not torch.equal(tokenizer.quantizer.table, before)


@pytest.mark.parametrize("kind", ["frame", "delta"])
def test_tokenizer_learns_images(kind: str):
    tokenizer, batch = make(kind), batch_of()
    batch.columns["obs/image"] = batch.obs["image"] = (batch.obs["image"][..., :1, :1] // 2).expand(
        2, 3, 3, SIDE, SIDE
    )
    optimizer = torch.optim.Adam(tokenizer.parameters(), 3e-3)
    errors = []
    for _ in range(60):
        loss, metrics = tokenizer.compute_loss(batch, torch.rand(tokenizer.noise_size(2, 3)))
        optimizer.zero_grad()
        loss.loss_total.backward()
        optimizer.step()
        errors.append(float(metrics["pixel_error"]))
    assert set(loss.intermediate_losses) == {"l2", "quantizer"}
    assert errors[-1] < 0.3 * errors[0]


def test_reconstruction_losses():
    target = torch.zeros(2, 3, 4, 4)
    shown = target.clone()
    shown[0, 1, 2, 3] = 0.5
    losses = {"l1": AbsoluteError(weight=2.0), "l2": SquaredPixelError(), "worst": WorstPixel(weight=0.5)}
    found = weighted_losses({**losses, "none": AbsoluteError(weight=0.0)}, shown, target, None)
    assert set(found) == {"l1", "l2", "worst"}
    assert float(found["l1"]) == pytest.approx(2.0 * 0.5 / 48 / 2)
    assert float(found["l2"]) == pytest.approx(0.25 / 48 / 2)
    assert float(found["worst"]) == pytest.approx(0.5 * 0.25 / 2)
    masked = weighted_losses(losses, shown, target, torch.tensor([False, True]))
    assert all(float(value) == 0.0 for value in masked.values())


def test_perceptual_loss(tmp_path):
    loss = Perceptual(width=2)
    target = torch.rand(3, 3, 32, 32)
    assert float(loss(target, target).abs().max()) == 0.0
    shown = (target + 0.3 * torch.rand(3, 3, 32, 32)).requires_grad_()
    value = loss(shown, target)
    assert value.shape == (3,) and bool((value > 0).all())
    value.sum().backward()
    assert shown.grad is not None and float(shown.grad.abs().sum()) > 0
    assert not list(loss.parameters()) and not loss.state_dict()
    same = Perceptual(width=2)  # random weights depend on the seed only
    torch.testing.assert_close(same(shown.detach(), target), value.detach())
    names = [name for name, _ in loss.named_buffers() if name not in ("shift", "scale")]
    torch.save({name: loss.get_buffer(name) * 0.5 for name in names}, tmp_path / "vgg.pt")
    loaded = Perceptual(width=2, path=str(tmp_path / "vgg.pt"))
    torch.testing.assert_close(loaded.get_buffer("weight3"), loss.get_buffer("weight3") * 0.5)
    with pytest.raises(ConfigError, match="no perceptual weights"):
        Perceptual(path=str(tmp_path / "nothing.pt"))


def test_tokenizer_error_messages():
    vector = Spec("v", {"vector": ArraySpec((3,), "float32")}, SPEC.action)
    with pytest.raises(ConfigError, match="one image"):
        frame_key(vector)
    both = Spec("arm", {"camera": ArraySpec((3, 8, 8), "uint8"), **vector.observations}, vector.action)
    with pytest.raises(
        ConfigError, match=r"^environment.observations must be one .*\.observations=\[camera\]$"
    ):
        frame_key(both)
    wide = Spec("w", {"image": ArraySpec((3, 16, 32), "uint8")}, SPEC.action)
    with pytest.raises(ConfigError, match="square"):
        FrameTokenizer(wide, VectorQuantizer(vocab=4, dim=2), {})
    with pytest.raises(ConfigError, match="tokens_side"):
        DeltaTokenizer(SPEC, EMAQuantizer(vocab=4, dim=2), {}, width=2, tokens_side=3)
    pixels = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_pixels(to_frames(pixels)), pixels)


@pytest.mark.parametrize("silu", [True, False])
def test_fused_image_norm(silu: bool):
    norm = ImageNorm(64, silu=silu)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x, weight = torch.randn(3, 64, 5, 4, requires_grad=True), torch.randn(3, 64, 5, 4)
    results = []
    for on in (False, True):
        use_fast_path(on, norm)
        y = norm(x)
        results.append((y.detach(), *torch.autograd.grad((y * weight).sum(), [x, *norm.parameters()])))
    for plain, fused in zip(*results):
        assert plain.shape == fused.shape and torch.allclose(plain, fused, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("outputs", [32, 64])
def test_fast_path_residual_block(outputs: int):
    torch.manual_seed(0)
    block = ResidualConv(32, outputs)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    x, weight = torch.randn(3, 32, 5, 4, requires_grad=True), torch.randn(3, outputs, 5, 4)
    results = []
    for on in (False, True):
        use_fast_path(on, block)
        y = block(x)
        results.append((y.detach(), *torch.autograd.grad((y * weight).sum(), [x, *block.parameters()])))
    for plain, fused in zip(*results):
        assert plain.shape == fused.shape
        assert (plain - fused).abs().max() < 1e-4 * plain.abs().max() + 1e-4
