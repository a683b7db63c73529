"""Encoders of TD-MPC: vectors or images to the latent space, and task embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from rl_lab.components.nn.normed_mlp import GROUP, Layer, NormedMLP, simnorm
from rl_lab.components.representation_learners.encoders import (
    image_keys,
    join_images,
    join_vectors,
    refuse_unread,
    select_observations,
    vector_keys,
    vector_size,
)
from rl_lab.errors import ConfigError
from rl_lab.records import Spec

# Observations that identify the task; they are not part of the state.
TASK_KEYS = ("task", "action_mask")
IMAGES_OR_VECTORS = "TD-MPC encodes vectors or images, not both, so choose with environment.observations=[…]"


def state_keys(spec: Spec) -> list[str]:
    """Vector observations that describe the state."""
    return [key for key in vector_keys(spec) if key not in TASK_KEYS]


class LatentEncoder(nn.Module):
    """MLP from all vector observations, concatenated in sorted order, to the latent.

    layers:   max(layers - 1, 1) hidden layers, then one to the latent (nicklashansen/tdmpc2: num_enc_layers)
    context:  width of the task embedding that is concatenated to the observation
    keys:     observations to read; None: all, and images are an error
    """

    augments = False  # whether it takes noise for augmentation

    def __init__(
        self,
        *,
        spec: Spec,
        latent: int,
        units: int,
        layers: int = 2,
        context: int = 0,
        hidden: str = "norm+mish",
        out: str = "norm+simnorm",
        init: str = "normal",
        group: int = GROUP,
        keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        spec = select_observations(spec, keys, "encoder")
        self.spec = spec
        self.keys = state_keys(spec)
        if not self.keys:
            raise ConfigError(
                f"{spec.name} has no vector observation: use components/encoder=tdmpc_pixels for images"
            )
        refuse_unread("encoder", "vectors", image_keys(spec), IMAGES_OR_VECTORS)
        width = sum(vector_size(spec, key) for key in self.keys)
        kinds = [hidden] * max(layers - 1, 1)
        inputs = [width, context] if context else [width]
        self.mlp = NormedMLP(inputs, units, latent, hidden=kinds, out=out, init=init, group=group)

    def forward(
        self, obs: Mapping[str, torch.Tensor], *task: torch.Tensor, noise: torch.Tensor | None = None
    ) -> torch.Tensor:
        """obs: name -> (*batch, …), task: (*batch, context) if `context` > 0 -> latent (*batch, L)."""
        return self.mlp(join_vectors(obs, self.spec, self.keys), *task)


def random_shift(image: torch.Tensor, noise: torch.Tensor, pad: int) -> torch.Tensor:
    """Random shift of images by up to `pad` pixels, with replicated border (DrQ, Kostrikov et al. 2021).

    (N, C, H, W), noise (N, 2) uniform -> (N, C, H, W). Shifts are integers, so it only indexes rows and
    columns and keeps the dtype.
    """
    count, channels, height, width = image.shape
    shift = (noise * (2 * pad + 1)).long().clamp(max=2 * pad) - pad  # (N, 2); noise × n may round up to n
    # Clamping the indices replicates the border.
    rows = (torch.arange(height, device=image.device) + shift[:, :1]).clamp(0, height - 1)  # (N, H)
    columns = (torch.arange(width, device=image.device) + shift[:, 1:]).clamp(0, width - 1)  # (N, W)
    flat = (rows.unsqueeze(-1) * width + columns.unsqueeze(1)).view(count, 1, height * width)
    moved = image.reshape(count, channels, -1).gather(2, flat.expand(-1, channels, -1))
    return moved.view(count, channels, height, width)


class LatentImageEncoder(nn.Module):
    """x/255 − 0.5 → convolutions with ReLU between them → flatten → latent.

    TD-MPC2 (nicklashansen/tdmpc2 common/layers.py) applies SimNorm directly after flattening, which works for
    one latent size only. This encoder does the same if the widths are equal; otherwise a layer of kind `out`
    maps to the latent.

    shift:    pixels of the random shift, which is applied only if `noise` is passed, in training
    keys:     observations to read; None: all, and vectors are an error
    """

    augments = True

    def __init__(
        self,
        *,
        spec: Spec,
        latent: int,
        channels: int = 32,
        kernels: Sequence[int] = (7, 5, 3, 3),
        strides: Sequence[int] = (2, 2, 2, 1),
        shift: int = 3,
        out: str = "norm+simnorm",
        init: str = "normal",
        group: int = GROUP,
        context: int = 0,
        keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        spec = select_observations(spec, keys, "encoder")
        self.keys = image_keys(spec)
        if not self.keys:
            raise ConfigError(f"{spec.name} has no image: use components/encoder=tdmpc_state for vectors")
        refuse_unread("encoder", "images", state_keys(spec), IMAGES_OR_VECTORS)
        if context:
            raise ConfigError(
                f"algorithm.task_width={context} is not supported with images: use vector observations"
            )
        self.shift = shift
        self.group = group
        shapes = [spec.observations[key].shape for key in self.keys]
        inputs, sides = sum(shape[0] for shape in shapes), list(shapes[0][1:])
        convs = []
        for kernel, stride in zip(kernels, strides, strict=True):
            convs.append(nn.Conv2d(inputs, channels, kernel, stride))
            inputs, sides = channels, [(side - kernel) // stride + 1 for side in sides]
        if min(sides) < 1:
            raise ConfigError(
                f"images of {shapes[0][1:]} are too small for kernels {list(kernels)}: raise environment.size"
            )
        self.convs = nn.ModuleList(convs)
        for conv in convs:
            if init == "orthogonal":
                # nicklashansen/tdmpc src/algorithm/helper.py: orthogonal_init
                nn.init.orthogonal_(conv.weight, nn.init.calculate_gain("relu"))
                nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
        self.flat = channels * sides[0] * sides[1]
        activation = out.rpartition("+")[2]
        self.bare = self.flat == latent and activation == "simnorm"
        self.out = None if self.bare else Layer([self.flat], latent, out, init=init, group=group)
        if self.bare and latent % group:
            raise ConfigError(
                f"a latent of {latent} cannot be split into groups of {group}: change one of them"
            )

    def forward(
        self, obs: Mapping[str, torch.Tensor], *task: torch.Tensor, noise: torch.Tensor | None = None
    ) -> torch.Tensor:
        """obs: name -> (*batch, C, H, W) uint8, noise: (*batch, 2) uniform -> latent (*batch, L)."""
        image = join_images(obs, self.keys)
        batch = image.shape[:-3]
        image = image.reshape(-1, *image.shape[-3:])
        if noise is not None and self.shift:
            image = random_shift(image, noise.reshape(-1, 2), self.shift)
        x = image.float() / 255.0 - 0.5
        for number, conv in enumerate(self.convs):
            x = conv(F.relu(x) if number else x)
        x = x.flatten(1)
        if self.out is None:
            x = simnorm(x, self.group)
        else:
            x = self.out(F.relu(x))
        return x.view(*batch, -1)


class TaskEmbedding(nn.Module):
    """A learned vector of norm at most 1 for each task, as in multi-task TD-MPC2. Tasks are one-hot vectors.

    `project` rescales rows with a norm above 1; it is called after each update. The original uses `max_norm`
    of torch's embedding at each lookup, which needs a device-to-host copy and cannot be captured.
    """

    def __init__(self, *, spec: Spec, width: int) -> None:
        super().__init__()
        if "task" not in spec.observations:
            raise ConfigError(
                f"{spec.name} has one task only: components.task_embedding needs an observation 'task', not just "
                f"{sorted(spec.observations)}"
            )
        if width < 1:
            raise ConfigError(f"algorithm.task_width is {width}: set it to at least 1, for example 96")
        tasks = spec.observations["task"].shape[0]
        self.width = width
        # nicklashansen/tdmpc2 common/init.py: uniform ±0.02
        self.weight = nn.Parameter(torch.empty(tasks, width).uniform_(-0.02, 0.02))

    def forward(self, task: torch.Tensor) -> torch.Tensor:
        """task: (…, tasks) one-hot -> (…, width)."""
        return task.float() @ self.weight

    @torch.no_grad()
    def project(self) -> None:
        norm = torch.linalg.vector_norm(self.weight, dim=-1, keepdim=True)
        self.weight.div_(norm.clamp(min=1.0))
