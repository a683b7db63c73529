"""Denoisers and image encoder: published parameter counts, shapes, masks, FiLM, crops, limits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from rl_lab.components.controllers.cloned_policies import MixturePolicy, MLPPolicy
from rl_lab.components.controllers.denoisers import (
    FiLMBlock,
    TransformerDenoiser,
    UNet1d,
    UNetDenoiser,
    sinusoidal,
)
from rl_lab.components.nn.moving_averages import Averaged
from rl_lab.components.nn.normalizer import LimitsNormalizer
from rl_lab.components.nn.resnet import ResNet18, SpatialSoftmax
from rl_lab.components.representation_learners.observation_encoder import ObservationEncoder, crop_images
from rl_lab.errors import ConfigError
from rl_lab.records import ActionSpec, ArraySpec, Spec

ACTION = ActionSpec("continuous", (2,), low=(0.0, 0.0), high=(512.0, 512.0))
KEYPOINTS = Spec("pusht/keypoints", {"vector": ArraySpec((20,), "float32")}, ACTION)
PIXELS = Spec(
    "pusht/pixels",
    {"image": ArraySpec((3, 96, 96), "uint8"), "agent_pos": ArraySpec((2,), "float32")},
    ACTION,
)
HORIZONS: dict[str, Any] = {"horizon": 16, "observation_horizon": 2}


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_published_parameter_counts():
    """On the meta device, without memory for them.

    262,709,026: LeRobot's diffusion policy on Push-T from pixels prints num_learnable_params (263M); it has the
    architecture of the authors' config. 9M and 256M: the denoisers in tables 7 and 8 of Chi et al. 2023.
    """
    with torch.device("meta"):
        pixels = UNetDenoiser(spec=PIXELS, **HORIZONS, widths=(512, 1024, 2048), step_width=128)
        encoder = ObservationEncoder(spec=PIXELS)
        state = UNetDenoiser(spec=KEYPOINTS, **HORIZONS)
        transformer = TransformerDenoiser(spec=KEYPOINTS, **HORIZONS)
    assert count(pixels) + count(encoder) == 262_709_026
    assert count(pixels) == 251_511_938 and count(encoder) == 11_197_088
    assert count(state) == 65_783_298
    assert count(transformer) == 8_965_122


def test_resnet_has_the_parameters_of_resnet18_without_its_classifier():
    with torch.device("meta"):
        assert (
            count(ResNet18()) == 11_176_512
        )  # torchvision's resnet18: 11,689,512 with a classifier of 513,000
    assert ResNet18(width=16)(torch.zeros(2, 3, 84, 84)).shape == (2, 128, 3, 3)


@pytest.mark.parametrize(
    ("kind", "widths"),
    [
        (UNetDenoiser, {"widths": (16, 32)}),
        (UNetDenoiser, {"widths": (16, 32), "observation_units": (24, 8)}),
        (TransformerDenoiser, {"width": 16, "layers": 2, "heads": 2}),
    ],
)
def test_shapes_gradients_and_averages(kind: Any, widths: dict[str, Any]):
    denoiser = kind(spec=KEYPOINTS, **HORIZONS, **widths)
    inputs = torch.randn(3, 16, 2), torch.tensor([0, 5, 99]), torch.randn(3, 2, 20)
    out = denoiser(*inputs)
    assert out.shape == (3, 16, 2)
    out.square().mean().backward()
    assert all(parameter.grad is not None for parameter in denoiser.parameters())
    torch.testing.assert_close(denoiser(*inputs, slow=True), out.detach())
    with torch.no_grad():
        for parameter in denoiser.parameters():
            parameter.add_(0.1)
    assert not torch.allclose(denoiser(*inputs, slow=True), denoiser(*inputs))
    denoiser.update_slow(torch.tensor(1.0))
    torch.testing.assert_close(denoiser(*inputs, slow=True), denoiser(*inputs), atol=1e-4, rtol=1e-4)


def test_average_moves_by_its_rate():
    averaged = Averaged(nn.Linear(1, 1, bias=False))
    before = averaged.slow.network.weight.clone()
    with torch.no_grad():
        averaged.online.weight.add_(1.0)
    averaged.update_slow(torch.tensor(0.25))
    torch.testing.assert_close(averaged.slow.network.weight, before + 0.25)
    assert [name for name, _ in averaged.named_parameters()] == ["online.weight"]


def test_film_scales_and_shifts_each_channel():
    block = FiLMBlock(4, 8, 3, kernel=5, groups=2)
    x, condition = torch.randn(2, 4, 6), torch.randn(2, 3)
    scale, shift = block.film(condition)[:, :8, None], block.film(condition)[:, 8:, None]
    expected = block.second(scale * block.first(x) + shift) + block.shortcut(x)
    torch.testing.assert_close(block(x, condition), expected)


def test_observations_pass_an_mlp_before_film():
    """40 -> 24 -> Mish -> 8: the U-Net conditioned on its outputs gives the same noise."""
    small: dict[str, Any] = {"widths": [16, 32], "step_width": 16, "kernel": 5, "groups": 8}
    whole, rest = UNet1d(2, 40, **small, observation_units=[24, 8]), UNet1d(2, 8, **small)
    rest.load_state_dict({k: v for k, v in whole.state_dict().items() if "observation_net" not in k})
    first, _, second = whole.observation_net
    actions, step, features = torch.randn(3, 16, 2), torch.tensor([0, 5, 99]), torch.randn(3, 2, 20)
    embedded = second(nn.functional.mish(first(features.flatten(1))))
    torch.testing.assert_close(whole(actions, step, features), rest(actions, step, embedded[:, None]))


def test_action_sees_only_the_past_and_its_observations():
    """Published masks: action t attends to actions up to t, the step, and observations up to t."""
    denoiser = TransformerDenoiser(
        spec=KEYPOINTS, horizon=4, observation_horizon=3, width=16, layers=2, heads=2
    )
    actions = torch.randn(1, 4, 2, requires_grad=True)
    features = torch.randn(1, 3, 20, requires_grad=True)
    out = denoiser(actions, torch.tensor([3]), features)
    for t in range(4):
        past, seen = torch.autograd.grad(out[0, t].sum(), (actions, features), retain_graph=True)
        assert past[0].abs().sum(-1).gt(0).tolist() == [k <= t for k in range(4)]
        assert seen[0].abs().sum(-1).gt(0).tolist() == [k <= t for k in range(3)]


def test_dropout_depends_on_its_seeds_alone():
    denoiser = TransformerDenoiser(spec=KEYPOINTS, **HORIZONS, width=16, layers=2, heads=2, dropout=0.5)
    inputs = torch.randn(3, 16, 2), torch.tensor([0, 5, 99]), torch.randn(3, 2, 20)
    seeds = torch.rand(denoiser.seeds)
    torch.testing.assert_close(denoiser(*inputs, seeds), denoiser(*inputs, seeds))
    assert not torch.allclose(denoiser(*inputs, seeds), denoiser(*inputs, torch.rand(denoiser.seeds)))
    assert not torch.allclose(denoiser(*inputs, seeds), denoiser(*inputs))


def test_sinusoidal_by_hand():
    out = sinusoidal(torch.tensor([0, 3]), 4)
    expected = [[0, 0, 1, 1], [math.sin(3), math.sin(3e-4), math.cos(3), math.cos(3e-4)]]
    torch.testing.assert_close(out, torch.tensor(expected, dtype=torch.float32))


def test_spatial_softmax_finds_a_bright_spot():
    layer = SpatialSoftmax(1, 1)
    with torch.no_grad():
        layer.to_maps.weight.fill_(50.0)
        layer.to_maps.bias.zero_()
    image = torch.zeros(1, 1, 3, 5)
    image[0, 0, 2, 1] = 1.0
    torch.testing.assert_close(layer(image), torch.tensor([[-0.5, 1.0]]))
    torch.testing.assert_close(layer(torch.zeros(1, 1, 3, 5)), torch.zeros(1, 2), atol=1e-6, rtol=0)


def test_crops():
    image = torch.arange(2 * 16, dtype=torch.uint8).reshape(2, 1, 4, 4)
    torch.testing.assert_close(crop_images(image, (2, 2), None), image[..., 1:3, 1:3])
    places = torch.tensor([[0.0, 0.99], [0.4, 0.0]])
    cropped = crop_images(image, (2, 2), places)
    torch.testing.assert_close(cropped[0], image[0, :, 0:2, 2:4])
    torch.testing.assert_close(cropped[1], image[1, :, 1:3, 0:2])


def test_limits_normalizer():
    normalizer = LimitsNormalizer(3)
    assert not normalizer.measured
    normalizer.measure(torch.tensor([[0.0, 5.0, -1.0], [10.0, 5.0, 0.0]]))
    normalizer.measure(torch.tensor([[2.0, 5.0, 3.0]]))
    values = torch.tensor([[0.0, 5.0, 3.0], [10.0, 6.0, 1.0]])
    expected = torch.tensor([[-1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])  # the constant one keeps its scale
    torch.testing.assert_close(normalizer(values), expected)
    torch.testing.assert_close(normalizer.inverse(expected), values)
    loaded = LimitsNormalizer(3)
    loaded.load_state_dict(normalizer.state_dict())
    assert loaded.measured


def test_encoder_has_images_first_and_normalized_vectors():
    spec = Spec("toy", {"v": ArraySpec((2,), "float32"), "image": ArraySpec((3, 64, 64), "uint8")}, ACTION)
    encoder = ObservationEncoder(spec=spec, image_features=5, keypoints=4, width=16)
    vectors = torch.tensor([[0.0, 1.0], [4.0, 3.0]])
    obs = {"v": vectors, "image": torch.randint(255, (2, 3, 64, 64), dtype=torch.uint8)}
    encoder.measure(obs)
    features = encoder(obs)
    assert features.shape == (2, encoder.width) == (2, 7)
    torch.testing.assert_close(features[:, 5:], torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))
    torch.testing.assert_close(encoder(obs, torch.full((1, 2, 2), 0.5)), features)  # the centre
    assert not torch.allclose(encoder(obs, torch.zeros(1, 2, 2)), features)


def test_mixture_density_by_hand():
    policy = MixturePolicy(spec=KEYPOINTS, horizon=3, observation_horizon=2, units=(8,), modes=2)
    features, action = torch.randn(4, 2, 20), torch.rand(4, 3, 2) * 2 - 1
    weight, mean, std = policy.mixture(features)
    mixture = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(logits=weight),
        torch.distributions.Independent(torch.distributions.Normal(mean, std), 1),
    )
    torch.testing.assert_close(policy.loss(features, action), -mixture.log_prob(action).mean(-1))
    generator = torch.Generator().manual_seed(0)
    drawn = torch.cat([policy.act(features, generator, False)[:1, 0] for _ in range(200)])
    assert {tuple(row) for row in drawn.tolist()} == {tuple(row) for row in mean[0, 0].tolist()}
    share = float((drawn == mean[0, 0, 0]).all(-1).float().mean())
    assert share == pytest.approx(float(weight[0, 0, 0].detach().exp()), abs=0.12)


def test_mlp_policy_shape_and_loss():
    policy = MLPPolicy(spec=KEYPOINTS, horizon=3, observation_horizon=2, units=(8,))
    features, action = torch.randn(4, 2, 20), torch.rand(4, 3, 2)
    predicted = policy.act(features, None, False)
    assert predicted.shape == action.shape
    torch.testing.assert_close(policy.loss(features, action), (predicted - action).square().mean((1, 2)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"horizon": 15}, "algorithm.horizon is 15: with 3 widths of the U-Net it must be divisible by 4"),
        ({"widths": (12, 24)}, "algorithm.size.widths has 12, which is not divisible by groups=8"),
        ({"observation_units": (64, 0)}, "algorithm.size.observation_units is .64, 0.: each width must be"),
    ],
)
def test_impossible_sizes_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        UNetDenoiser(spec=KEYPOINTS, **{**HORIZONS, **options})
