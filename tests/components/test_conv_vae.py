import pytest
import torch

from rl_lab.components.representation_learners.conv_vae import ConvVAE, kl_to_standard_normal
from rl_lab.errors import ConfigError
from rl_lab.records import ActionSpec, ArraySpec, Spec

ACTION = ActionSpec("discrete", (), (2,))


def image_spec(*shape: int) -> Spec:
    return Spec("images", {"image": ArraySpec(shape, "uint8")}, ACTION)


def images(*batch: int, channels: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"image": torch.randint(0, 256, (*batch, channels, 64, 64), generator=generator).to(torch.uint8)}


def test_vae_parameter_count():
    vae = ConvVAE(spec=image_spec(3, 64, 64))
    assert sum(p.numel() for p in vae.parameters()) == 4_348_547


def test_observe_matches_observe_sequence():
    vae = ConvVAE(spec=image_spec(3, 64, 64), latent=5, depth=2)
    obs, noise = images(2, 3), torch.randn(2, 3, 5)
    sequence = vae.observe_sequence(obs, noise)
    assert {key: value.shape for key, value in sequence.items()} == dict.fromkeys(
        ("z", "mu", "logvar"), (2, 3, 5)
    )
    step = vae.observe({"image": obs["image"][:, 1]}, noise[:, 1])
    for key, value in step.items():
        torch.testing.assert_close(value, sequence[key][:, 1])
    expected = sequence["mu"] + torch.exp(sequence["logvar"] / 2) * noise
    torch.testing.assert_close(sequence["z"], expected)
    assert torch.equal(vae.observe(obs)["z"], vae.observe(obs)["mu"])


def test_decode_shape_and_dtype():
    spec = Spec(
        "two", {"front": ArraySpec((3, 64, 64), "uint8"), "map": ArraySpec((1, 64, 64), "uint8")}, ACTION
    )
    vae = ConvVAE(spec=spec, latent=4, depth=2)
    decoded = vae.decode(torch.randn(2, 6, 4))
    assert decoded.shape == (2, 6, 4, 64, 64) and decoded.min() >= 0 and decoded.max() <= 1
    shown = vae.observations(decoded)
    assert {key: (value.shape, value.dtype) for key, value in shown.items()} == {
        "front": ((2, 6, 3, 64, 64), torch.uint8),
        "map": ((2, 6, 1, 64, 64), torch.uint8),
    }


@pytest.mark.parametrize("side", [16, 32, 64])
def test_smaller_images(side: int):
    vae = ConvVAE(spec=image_spec(3, side, side), latent=4, depth=2)
    obs = {"image": torch.zeros(2, 5, 3, side, side, dtype=torch.uint8)}
    assert vae.encoder(torch.zeros(1, 3, side, side)).shape[-2:] == (2, 2)
    assert vae.observe(obs)["z"].shape == (2, 5, 4)
    assert vae.decode(torch.zeros(2, 5, 4)).shape == (2, 5, 3, side, side)


def test_kl_is_clipped_at_tolerance():
    vae = ConvVAE(spec=image_spec(1, 64, 64), latent=4, depth=2, kl_tolerance=0.5)
    obs, noise = images(3, channels=1), torch.randn(3, 4)
    for module in (vae.to_mu, vae.to_logvar):
        torch.nn.init.zeros_(module.weight)
    losses, metrics = vae.losses(obs, noise)
    assert losses["kl"].tolist() == [2.0, 2.0, 2.0] and metrics["kl"] == 0.0
    losses["kl"].sum().backward()
    assert vae.to_mu.bias.grad.abs().sum() == 0.0
    vae.zero_grad()
    torch.nn.init.constant_(vae.to_mu.bias, 3.0)
    losses, metrics = vae.losses(obs, noise)
    assert losses["kl"].tolist() == [18.0, 18.0, 18.0] and metrics["kl"] == 18.0
    losses["kl"].sum().backward()
    assert vae.to_mu.bias.grad.abs().sum() > 0.0


def test_reconstruction_loss():
    vae = ConvVAE(spec=image_spec(3, 64, 64), latent=4, depth=2)
    obs, noise = images(2), torch.randn(2, 4)
    losses, metrics = vae.losses(obs, noise)
    decoded = vae.decode(vae.observe(obs, noise)["z"])
    expected = (decoded - obs["image"] / 255.0).square().flatten(1).sum(1)
    torch.testing.assert_close(losses["reconstruction"], expected)
    assert metrics["pixel_error"].item() == pytest.approx(expected.mean().item() / (3 * 64 * 64))


def test_kl_matches_torch():
    mu, logvar = torch.randn(5, 3), torch.randn(5, 3)
    posterior = torch.distributions.Normal(mu, (logvar / 2).exp())
    expected = torch.distributions.kl_divergence(posterior, torch.distributions.Normal(0.0, 1.0)).sum(-1)
    torch.testing.assert_close(kl_to_standard_normal(mu, logvar), expected)


def test_vae_learns_two_images():
    """A square at two positions: a model that cannot distinguish them, or draws none, has an error of 104."""
    torch.manual_seed(0)
    vae = ConvVAE(spec=image_spec(1, 64, 64), latent=2, depth=8)
    image = torch.full((2, 1, 64, 64), 60, dtype=torch.uint8)
    image[0, :, 20:40, 20:40] = 190
    image[1, :, 5:25, 40:60] = 190
    optimizer = torch.optim.Adam(vae.parameters(), lr=3e-3)
    for _ in range(80):
        optimizer.zero_grad()
        losses, _ = vae.losses({"image": image}, 0.1 * torch.randn(2, 2))
        (losses["reconstruction"].mean() + losses["kl"].mean()).backward()
        optimizer.step()
    assert losses["reconstruction"].max() < 60


def test_vae_error_messages():
    with pytest.raises(ConfigError, match=r"environment\.size=64"):
        ConvVAE(spec=image_spec(3, 96, 96))
    with pytest.raises(ConfigError, match=r"environment\.pixels=true"):
        ConvVAE(spec=Spec("cart", {"vector": ArraySpec((4,), "float32")}, ACTION))


def test_vae_that_would_ignore_an_observation_is_refused():
    both = {"camera": ArraySpec((3, 64, 64), "uint8"), "joints": ArraySpec((4,), "float32")}
    with pytest.raises(
        ConfigError, match=r"^components.vae reads images only and would ignore joints: choose"
    ):
        ConvVAE(spec=Spec("arm", both, ACTION))
    assert ConvVAE(spec=Spec("arm", both, ACTION), latent=4, depth=2, keys=["camera"]).keys == ["camera"]
