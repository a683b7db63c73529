"""Which observations a part reads, which of them are images and which vectors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch

from rl_lab.errors import ConfigError, reject_unknown
from rl_lab.records import ArraySpec, Spec


def chosen(spec: Spec, keys: Sequence[str] | None, part: str) -> Spec:
    """The spec with these observations alone; None: all of them. `part` is named where one is unknown."""
    if keys is None:
        return spec
    where = f"components.{part}.keys"
    if isinstance(keys, str) or not keys:
        raise ConfigError(
            f"{where}={keys!r} must be a list of observations: [{', '.join(sorted(spec.observations))}] "
            "or some of these, or null for all"
        )
    reject_unknown(where, keys, spec.observations)
    return dataclasses.replace(spec, observations={key: spec.observations[key] for key in keys})


def is_image(spec: ArraySpec) -> bool:
    """uint8 and three axes: channels, height, width."""
    return spec.dtype == "uint8" and len(spec.shape) == 3


def image_keys(spec: Spec) -> list[str]:
    return sorted(key for key, item in spec.observations.items() if is_image(item))


def vector_keys(spec: Spec) -> list[str]:
    return sorted(key for key, item in spec.observations.items() if not is_image(item))


def vector_size(spec: Spec, key: str) -> int:
    return math.prod(spec.observations[key].shape)


def image_shape(spec: Spec, stages: int) -> tuple[int, int, int]:
    """Channels of all images together, height, width; checked to survive `stages` halvings."""
    shapes = {key: spec.observations[key].shape for key in image_keys(spec)}
    sizes = {shape[1:] for shape in shapes.values()}
    if len(sizes) != 1:
        raise ConfigError(
            f"images are stacked by channel, so they need one size, not {shapes}: resize them alike"
        )
    height, width = sizes.pop()
    factor = 2**stages
    if height % factor or width % factor:
        raise ConfigError(
            f"images of {height}×{width} cannot be halved {stages} times: choose environment.size with sides "
            f"divisible by {factor}, for example 64×64 or 96×96"
        )
    return sum(shape[0] for shape in shapes.values()), height, width


def join_vectors(obs: Mapping[str, torch.Tensor], spec: Spec, keys: list[str]) -> torch.Tensor:
    """The vectors of a dict observation side by side: name -> (*batch, …) becomes (*batch, width) float32."""
    parts = []
    for key in keys:
        value, axes = obs[key], len(spec.observations[key].shape)
        batch = value.shape[: value.ndim - axes]
        parts.append(value.reshape(*batch, vector_size(spec, key)).float())
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def join_images(obs: Mapping[str, torch.Tensor], keys: list[str]) -> torch.Tensor:
    """Images stacked by channel: name -> (*batch, C, H, W) becomes (*batch, ΣC, H, W), still uint8."""
    return obs[keys[0]] if len(keys) == 1 else torch.cat([obs[key] for key in keys], -3)
