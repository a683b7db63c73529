"""Image networks: the fast path, which defers biases, matches the plain implementation."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rl_lab.components.controllers.recurrent_actor_critic import (
    PoolTrunk,
    RecurrentActorCritic,
    ResidualTrunk,
)
from rl_lab.components.kernels.group_norm_silu import fused_group_norm
from rl_lab.components.kernels.sampling import sample_logits
from rl_lab.components.kernels.upsample2x import upsample2x
from rl_lab.components.nn.categorical import sample_index
from rl_lab.components.nn.fast_path import SideStream, use_fast_path
from rl_lab.components.nn.residual_conv import (
    Downsample,
    FrameDecoder,
    FrameEncoder,
    ImageAttention,
    ImageSequential,
    ResidualConv,
    Upsample,
)
from rl_lab.components.representation_learners.tokenizer import IrisDecoder, IrisEncoder
from rl_lab.records import ActionSpec, ArraySpec, Spec

SPEC = Spec("images", {"image": ArraySpec((3, 16, 16), "uint8")}, ActionSpec("discrete", (), (3,)))
IRIS = {"channels": 3, "side": 16, "width": 32, "levels": 3, "latent": 6, "attention": (8,), "blocks": 1}
NETS = {
    "frame_encoder": (lambda: FrameEncoder(channels=3, latent=4, width=8), (3, 16, 16)),
    "frame_decoder": (lambda: FrameDecoder(channels=3, latent=4, width=8), (4, 2, 2)),
    "iris_encoder": (lambda: IrisEncoder(**IRIS), (3, 16, 16)),
    "iris_decoder": (lambda: IrisDecoder(**IRIS), (6, 4, 4)),
    "odd_widths": (
        lambda: ImageSequential(nn.Conv2d(3, 6, 1), ResidualConv(6, 10), ResidualConv(10, 10)),
        (3, 4, 5),
    ),
    "last_bias": (
        lambda: ImageSequential(Downsample(4, 2), ImageAttention(4), Downsample(4, 3), Upsample(4)),
        (4, 8, 8),
    ),
    "pool_trunk": (lambda: PoolTrunk(SPEC, channels=(4, 8)), (3, 16, 16)),
    "residual_trunk": (lambda: ResidualTrunk(SPEC, width=8), (3, 16, 16)),
}


@pytest.mark.parametrize("name", sorted(NETS))
def test_fast_path_matches_plain(name: str):
    torch.manual_seed(0)
    make, shape = NETS[name]
    net = make()
    for parameter in net.parameters():  # also biases, which the fast path adds elsewhere
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, *shape, requires_grad=True)
    results = []
    for on in (False, True):
        use_fast_path(on, net)
        y = net(x)
        with torch.no_grad():
            assert torch.allclose(net(x), y, rtol=1e-5, atol=1e-5)
        weight = torch.linspace(-1.0, 1.0, y.numel()).view(y.shape)
        results.append((y.detach(), *torch.autograd.grad((y * weight).sum(), [x, *net.parameters()])))
    for plain, fused in zip(*results):
        assert plain.shape == fused.shape
        assert (plain - fused).abs().max() < 2e-4 * plain.abs().max() + 1e-4


@pytest.mark.parametrize("name", ["frame_decoder", "frame_encoder", "iris_decoder", "iris_encoder"])
def test_images_stay_in_bfloat16(name: str, monkeypatch: pytest.MonkeyPatch):
    """All inputs of convolutions but the first are bfloat16, and the result is exact up to rounding."""
    torch.manual_seed(0)
    make, shape = NETS[name]
    net, x, dtypes, conv2d = make(), torch.randn(2, *shape), [], F.conv2d

    def record(x, *args, **options):
        dtypes.append(x.dtype)
        return conv2d(x, *args, **options)

    monkeypatch.setattr(F, "conv2d", record)
    use_fast_path(True, net)
    with torch.autocast("cpu", torch.bfloat16):
        rough = net(x)
    assert len(dtypes) > 10 and set(dtypes[1:]) == {torch.bfloat16} == {rough.dtype}
    use_fast_path(False, net)
    exact = net(x)
    assert (rough - exact).abs().max() < 0.1 * exact.abs().max()
    rough.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())


def test_upsampling_matches_torch():
    x, weight = torch.randn(2, 3, 4, 5, requires_grad=True), torch.randn(2, 3, 8, 10)
    ours, theirs = upsample2x(x), F.interpolate(x, scale_factor=2.0, mode="nearest")
    assert torch.equal(ours, theirs)
    (found,), (expected,) = (torch.autograd.grad((y * weight).sum(), x) for y in (ours, theirs))
    assert torch.allclose(found, expected, atol=1e-6)


def test_fused_group_norm_gradients():
    torch.manual_seed(0)
    x, pre = torch.randn(2, 8, 3, 4, requires_grad=True), torch.randn(8, requires_grad=True)
    weight, bias = torch.rand(8, requires_grad=True), torch.randn(8, requires_grad=True)
    of_y, of_x = torch.randn(2, 2, 8, 3, 4)
    y, same = fused_group_norm(x, weight, bias, 4, 1e-5, True, pre)
    assert torch.equal(same, x)
    found = torch.autograd.grad((y * of_y).sum() + (same * of_x).sum(), [x, pre, weight, bias])
    z = F.silu(F.group_norm(x + pre[:, None, None], 4, weight, bias))
    expected = torch.autograd.grad((z * of_y).sum() + (x * of_x).sum(), [x, pre, weight, bias])
    assert torch.allclose(y, z, atol=1e-5)
    for ours, theirs in zip(found, expected):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    _, same = fused_group_norm(x, weight, bias, 4, 1e-5, True, pre)
    assert torch.equal(torch.autograd.grad((same * of_x).sum(), x)[0], of_x)


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize(
    "trunk", [lambda spec: PoolTrunk(spec, channels=(4, 8)), lambda spec: ResidualTrunk(spec, width=8)]
)
def test_trunk_precision(trunk, on: bool):
    torch.manual_seed(0)
    network = RecurrentActorCritic(SPEC, trunk, units=16)
    frames = torch.rand(2, 3, 3, 16, 16)
    use_fast_path(on, network)
    exact, _ = network.observe_sequence(frames, network.initial_state(2))
    network.trunk_dtype = torch.bfloat16
    hidden, state = network.observe_sequence(frames, network.initial_state(2))
    one = network.observe(frames[:, 0], network.initial_state(2))
    assert hidden.dtype == state["c"].dtype == torch.float32
    assert not torch.equal(hidden, exact) and torch.allclose(hidden, exact, atol=0.05)
    assert torch.allclose(one["h"], hidden[:, 0], atol=5e-3)
    hidden.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in network.trunk.parameters())


def first_input(trunk: torch.nn.Module, frames: torch.Tensor) -> torch.Tensor:
    """What the first convolution of a trunk gets."""
    seen: list[torch.Tensor] = []
    convolution = next(part for part in trunk.modules() if isinstance(part, torch.nn.Conv2d))
    convolution.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    trunk(frames)
    return seen[0]


def test_pixels_of_policy():
    """IRIS maps them to [-1, 1] (actor_critic.py), Δ-IRIS keeps [0, 1] (cnn_lstm_actor_critic.py)."""
    frames = torch.rand(2, 3, 16, 16)
    assert torch.equal(first_input(ResidualTrunk(SPEC, width=8, centered=False), frames), frames)
    for trunk in (PoolTrunk(SPEC, channels=(4, 8)), ResidualTrunk(SPEC, width=8)):
        assert torch.equal(first_input(trunk, frames), 2.0 * frames - 1.0)


def test_side_stream_on_cpu():
    for on in (False, True):
        device = torch.device("cpu")
        work = SideStream(torch.add, torch.ones(2), torch.ones(2), fast=on, device=device, stream=1)
        assert work.join().tolist() == [2.0, 2.0] == work.join().tolist()


def test_sample_logits_matches_softmax():
    logits, noise = torch.randn(50, 7).bfloat16(), torch.rand(50)
    drawn = sample_logits(logits, noise, fast=True)
    assert drawn.dtype == torch.int64 and len(drawn.unique()) > 3
    assert torch.equal(drawn, sample_index(torch.softmax(logits.float(), -1), noise))
