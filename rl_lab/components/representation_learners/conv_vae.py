"""The vision model V of World Models: a convolutional VAE of 64×64 images (Ha and Schmidhuber 2018).

Four convolutions without padding reduce 64×64 to 2×2; four transposed convolutions reverse this. The KL
divergence, summed over dimensions, is clipped from below at `kl_tolerance` nats per dimension. Layers as in
hardmaru/WorldModelsExperiments, vae/vae.py; our versions for 32×32 and 16×16 images have three and two of
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from rl_lab.components.representation_learners.encoders import (
    image_keys,
    image_shape,
    join_images,
    refuse_unread,
    select_observations,
    vector_keys,
)
from rl_lab.errors import ConfigError
from rl_lab.records import Spec

MULTIPLES = (1, 2, 4, 8)  # channels of the encoder's layers, in multiples of `depth`
# Side of the image -> kernel sizes of the decoder. With strides of 2 no other sides are possible.
DECODER_KERNELS = {
    64: (5, 5, 6, 6),  # 1 -> 5 -> 13 -> 30 -> 64 pixels
    32: (5, 6, 6),  # 1 -> 5 -> 14 -> 32
    16: (6, 6),  # 1 -> 6 -> 16
}

Latent = dict[str, torch.Tensor]  # z, mu, logvar: (*batch, latent)


class ConvVAE(nn.Module):
    """Encodes images (stacked by channel) as a normal distribution of `latent` dimensions, and decodes them.

    bounded:  apply a sigmoid to the decoder's output, as in the original. It saturates on images with large
              pure black or white areas, where training then stops; False applies none and clips images for
              display
    kl_scale: weight of the KL term; below 1 if small objects matter
    keys:     observations to read; None: all, and vectors are an error
    """

    def __init__(
        self,
        *,
        spec: Spec,
        latent: int = 32,
        depth: int = 32,
        kl_tolerance: float = 0.5,
        kl_scale: float = 1.0,
        bounded: bool = True,
        keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        spec = select_observations(spec, keys, "vae")
        self.keys = image_keys(spec)
        if not self.keys:
            raise ConfigError(
                f"{spec.name} has no image observation, only {sorted(spec.observations)}: set "
                "environment.pixels=true, or choose an environment with images"
            )
        refuse_unread("vae", "images", vector_keys(spec), "choose with environment.observations=[…]")
        self.channels = [spec.observations[key].shape[0] for key in self.keys]
        channels, height, width = image_shape(spec, 0)
        if height != width or height not in DECODER_KERNELS:
            raise ConfigError(
                f"images of {height}×{width} do not fit this VAE, which takes 64×64, 32×32 or 16×16: "
                "set environment.size=64"
            )
        kernels = DECODER_KERNELS[height]
        self.latent = latent
        self.kl_tolerance = kl_tolerance
        self.kl_scale = kl_scale
        self.bounded = bounded
        widths = [depth * multiple for multiple in MULTIPLES[: len(kernels)]]
        self.features = widths[-1] * 2 * 2
        self.encoder = nn.Sequential()
        for inputs, outputs in zip([channels, *widths], widths):
            self.encoder.extend([nn.Conv2d(inputs, outputs, 4, stride=2), nn.ReLU()])
        self.to_mu = nn.Linear(self.features, latent)
        self.to_logvar = nn.Linear(self.features, latent)
        self.from_z = nn.Linear(latent, self.features)  # the original has no activation here
        self.decoder = nn.Sequential()
        ups = [self.features, *widths[-2::-1], channels]
        for inputs, outputs, kernel in zip(ups, ups[1:], kernels):
            self.decoder.extend([nn.ConvTranspose2d(inputs, outputs, kernel, stride=2), nn.ReLU()])
        del self.decoder[-1]
        for module in self.modules():  # default initialisation of TensorFlow, which the original uses
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    # ---------------------------------------------------------------- encoding

    def observe(self, obs: Mapping[str, torch.Tensor], noise: torch.Tensor | None = None) -> Latent:
        """obs: name -> (*batch, C, H, W) uint8, noise: (*batch, latent) normal, None: z is the mean."""
        images = join_images(obs, self.keys)
        batch = images.shape[:-3]
        x = self.encoder(images.reshape(-1, *images.shape[-3:]).float() / 255.0).flatten(1)
        mu = self.to_mu(x).float().unflatten(0, batch)
        logvar = self.to_logvar(x).float().unflatten(0, batch)
        return {"z": sample_normal(mu, logvar, noise), "mu": mu, "logvar": logvar}

    def observe_sequence(self, obs: Mapping[str, torch.Tensor], noise: torch.Tensor | None = None) -> Latent:
        """The same for (B, T, C, H, W): each image is encoded independently."""
        return self.observe(obs, noise)

    # ---------------------------------------------------------------- decoding

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """z: (*batch, latent) -> (*batch, ΣC, H, W) float32, in [0, 1] if `bounded`."""
        batch = z.shape[:-1]
        x = self.decoder(self.from_z(z.reshape(-1, self.latent))[:, :, None, None]).float()
        return (torch.sigmoid(x) if self.bounded else x).unflatten(0, batch)

    def observations(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """Decoded images (*batch, ΣC, H, W) as they are stored: name -> (*batch, C, H, W) uint8."""
        stored = (images.clamp(0.0, 1.0) * 255.0).round().to(torch.uint8)
        return dict(zip(self.keys, stored.split(self.channels, -3)))

    # ---------------------------------------------------------------- losses

    def losses(
        self, obs: Mapping[str, torch.Tensor], noise: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Losses (*batch): squared error summed over pixels, clipped KL; and detached metrics."""
        latent = self.observe(obs, noise)
        target = join_images(obs, self.keys).float() / 255.0
        error = (self.decode(latent["z"]) - target).square().sum((-3, -2, -1))
        kl = kl_to_standard_normal(latent["mu"], latent["logvar"])
        limited = kl.clamp(min=self.kl_tolerance * self.latent)
        losses = {"reconstruction": error, "kl": self.kl_scale * limited}
        metrics = {"kl": kl.detach().mean(), "pixel_error": error.detach().mean() / target.shape[-3:].numel()}
        return losses, metrics


def sample_normal(mu: torch.Tensor, logvar: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
    """Sample of a normal with mean and log variance; the mean without noise."""
    return mu if noise is None else mu + torch.exp(0.5 * logvar) * noise


def kl_to_standard_normal(mu: torch.Tensor, logvar: torch.Tensor) -> torch.Tensor:
    """KL(N(mu, exp(logvar)) ‖ N(0, 1)), summed over the last axis."""
    return 0.5 * (mu.square() + logvar.exp() - 1.0 - logvar).sum(-1)
