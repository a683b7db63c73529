"""ObservationEncoder: vectors and images of one time step -> one feature vector, for imitation learning.

Vectors are normalized by their limits in the data. Each camera has a ResNet-18 with GroupNorm on a crop, then spatial
softmax and a linear layer (real-stanford/diffusion_policy @ 5ba07ac, policy/diffusion_unet_hybrid_image_policy.py, with
robomimic's encoder).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F

from rl_lab.components.nn.moving_averages import Averaged
from rl_lab.components.nn.normalizer import LimitsNormalizer
from rl_lab.components.nn.resnet import ResNet18, SpatialSoftmax
from rl_lab.errors import ConfigError
from rl_lab.records import Spec


def vector_keys(spec: Spec) -> list[str]:
    return [name for name, array in spec.observations.items() if array.dtype != "uint8"]


def image_keys(spec: Spec) -> list[str]:
    return [name for name, array in spec.observations.items() if array.dtype == "uint8"]


def feature_width(spec: Spec, image_features: int) -> int:
    """Width of the features of one time step."""
    vectors = sum(int(torch.Size(spec.observations[name].shape).numel()) for name in vector_keys(spec))
    return vectors + image_features * len(image_keys(spec))


class CameraNet(nn.Module):
    """Cropped images (M, C, h, w) in [-1, 1] -> features (M, F)."""

    def __init__(self, channels: int, features: int, keypoints: int, width: int) -> None:
        super().__init__()
        self.backbone = ResNet18(channels, width)
        self.keypoints = SpatialSoftmax(self.backbone.channels, keypoints)
        self.project = nn.Linear(self.keypoints.size, features)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.relu(self.project(self.keypoints(self.backbone(images))))


class ObservationEncoder(nn.Module):
    """Observations (M, …) by name -> features (M, width): images first, then vectors, each in the spec's order.

    image_features: outputs per camera
    keypoints:      of the spatial softmax
    crop:           side of the crop as a fraction of the image's: random in training, else at the centre
    width:          channels of the ResNet's first stage
    """

    def __init__(
        self,
        *,
        spec: Spec,
        image_features: int = 64,
        keypoints: int = 32,
        crop: float = 0.875,
        width: int = 64,
    ) -> None:
        super().__init__()
        self.vectors, self.images = vector_keys(spec), image_keys(spec)
        if not 0.0 < crop <= 1.0:
            raise ConfigError(f"components.encoder.crop is {crop}: it must be above 0 and at most 1")
        self.width = feature_width(spec, image_features)
        self.crops = {}
        for name in self.images:
            if len(spec.observations[name].shape) != 3:
                raise ConfigError(f"'{name}' of {spec.name} is uint8 but no image (C, H, W): leave it out")
            self.crops[name] = tuple(max(1, round(crop * side)) for side in spec.observations[name].shape[1:])
        self.sizes = {name: tuple(spec.observations[name].shape[1:]) for name in self.images}
        sizes = {name: int(torch.Size(spec.observations[name].shape).numel()) for name in self.vectors}
        self.normalizers = nn.ModuleDict({name: LimitsNormalizer(size) for name, size in sizes.items()})
        self.cameras = nn.ModuleDict(
            {
                name: Averaged(CameraNet(spec.observations[name].shape[0], image_features, keypoints, width))
                for name in self.images
            }
        )

    def forward(
        self,
        obs: Mapping[str, torch.Tensor],
        places: torch.Tensor
        | None = None,  # (cameras, M, 2) in [0, 1): corners of random crops; None: centre
        *,
        slow: bool = False,
    ) -> torch.Tensor:
        parts = []
        for k, name in enumerate(self.images):
            cropped = crop_images(obs[name], self.crops[name], None if places is None else places[k])
            parts.append(self.cameras[name](cropped.float() / 127.5 - 1.0, slow=slow))
        for name in self.vectors:
            parts.append(self.normalizers[name](obs[name].flatten(1).float()))
        return torch.cat(parts, -1)

    def _normalizer(self, name: str) -> LimitsNormalizer:
        normalizer = self.normalizers[name]
        assert isinstance(normalizer, LimitsNormalizer)
        return normalizer

    def measure(self, obs: Mapping[str, torch.Tensor]) -> None:
        """Widen the limits of the vectors to these observations, (M, …)."""
        for name in self.vectors:
            self._normalizer(name).measure(obs[name].flatten(1).float())

    @property
    def measured(self) -> bool:
        return all(self._normalizer(name).measured for name in self.vectors)

    def update_slow(self, rate: torch.Tensor) -> None:
        for camera in self.cameras.values():
            assert isinstance(camera, Averaged)
            camera.update_slow(rate)


def crop_images(images: torch.Tensor, size: tuple[int, ...], places: torch.Tensor | None) -> torch.Tensor:
    """(M, C, H, W) -> (M, C, h, w). places: (M, 2) in [0, 1), of the upper left corners; None: centre"""
    (height, width), (h, w) = images.shape[-2:], size
    if places is None:
        top, left = (height - h) // 2, (width - w) // 2
        return images[..., top : top + h, left : left + w]
    # Not a tensor of both: it would be copied from the host, which a CUDA graph cannot do.
    upper, leftmost = (places[:, 0] * (height - h + 1)).long(), (places[:, 1] * (width - w + 1)).long()
    rows = upper[:, None] + torch.arange(h, device=images.device)  # (M, h)
    columns = leftmost[:, None] + torch.arange(w, device=images.device)
    which = torch.arange(len(images), device=images.device)[:, None, None]
    return images.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
