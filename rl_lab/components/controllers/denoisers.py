"""Denoisers of action sequences: a conditional 1-D U-Net and a transformer, as published with Diffusion Policy.

Both map noisy actions (B, T, A), the denoising step (B,) and features (B, To, F) of the observations to the noise
(B, T, A). Architectures: real-stanford/diffusion_policy @ 5ba07ac, model/diffusion/conditional_unet1d.py and
transformer_for_diffusion.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from rl_lab.components.nn.moving_averages import Averaged
from rl_lab.components.nn.optim import exempt_from_decay
from rl_lab.components.nn.transformer import seeded_dropout
from rl_lab.components.representation_learners.observation_encoder import feature_width
from rl_lab.errors import ConfigError
from rl_lab.records import Spec


def sinusoidal(step: torch.Tensor, width: int) -> torch.Tensor:
    """(B,) -> (B, width): sines, then cosines, of frequencies from 1 to 1 / 10,000."""
    half = width // 2
    frequency = torch.exp(torch.arange(half, device=step.device) * (-math.log(10_000.0) / (half - 1)))
    angle = step.float()[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], -1)


# ---------------------------------------------------------------- U-Net


class ConvBlock(nn.Module):
    """Convolution over time, GroupNorm, Mish: (B, in, T) -> (B, out, T)."""

    def __init__(self, channels_in: int, channels: int, kernel: int, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels_in, channels, kernel, padding=kernel // 2)
        self.norm = nn.GroupNorm(groups, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mish(self.norm(self.conv(x)))


class FiLMBlock(nn.Module):
    """Residual block; the condition scales and shifts each channel after the first convolution."""

    def __init__(self, channels_in: int, channels: int, condition: int, kernel: int, groups: int) -> None:
        super().__init__()
        self.first = ConvBlock(channels_in, channels, kernel, groups)
        self.second = ConvBlock(channels, channels, kernel, groups)
        self.film = nn.Linear(condition, 2 * channels)
        same = channels_in == channels
        self.shortcut: nn.Module = nn.Identity() if same else nn.Conv1d(channels_in, channels, 1)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """x: (B, in, T), condition: (B, C) after its activation"""
        scale, bias = self.film(condition)[..., None].chunk(2, 1)
        return self.second(scale * self.first(x) + bias) + self.shortcut(x)


class UNet1d(nn.Module):
    """U-Net over the time of an action sequence, conditioned by FiLM on the step and on all observations.

    observation_units: widths of an MLP for the observations; none as published
    """

    def __init__(
        self,
        actions: int,
        condition: int,
        widths: Sequence[int],
        step_width: int,
        kernel: int,
        groups: int,
        observation_units: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.step_width = step_width
        layers: list[nn.Module] = []
        for units in observation_units:  # the last activation is that of the whole condition
            layers += [nn.Mish(), nn.Linear(condition, units)] if layers else [nn.Linear(condition, units)]
            condition = units
        self.observation_net = nn.Sequential(*layers)
        self.step_net = nn.Sequential(
            nn.Linear(step_width, 4 * step_width), nn.Mish(), nn.Linear(4 * step_width, step_width)
        )
        condition += step_width

        def block(channels_in: int, channels: int) -> FiLMBlock:
            return FiLMBlock(channels_in, channels, condition, kernel, groups)

        levels = list(zip([actions, *widths[:-1]], widths))
        self.down = nn.ModuleList(nn.ModuleList([block(a, b), block(b, b)]) for a, b in levels)
        self.shrink = nn.ModuleList(nn.Conv1d(b, b, 3, stride=2, padding=1) for _, b in levels[:-1])
        self.middle = nn.ModuleList([block(widths[-1], widths[-1]), block(widths[-1], widths[-1])])
        upward = list(reversed(levels[1:]))
        self.up = nn.ModuleList(nn.ModuleList([block(2 * b, a), block(a, a)]) for a, b in upward)
        self.grow = nn.ModuleList(nn.ConvTranspose1d(a, a, 4, stride=2, padding=1) for a, _ in upward)
        self.out = nn.Sequential(
            ConvBlock(widths[0], widths[0], kernel, groups), nn.Conv1d(widths[0], actions, 1)
        )

    def forward(
        self,
        actions: torch.Tensor,
        step: torch.Tensor,
        features: torch.Tensor,
        seeds: torch.Tensor | None = None,  # it has no dropout
    ) -> torch.Tensor:
        embedded = self.step_net(sinusoidal(step, self.step_width))
        condition = F.mish(torch.cat([embedded, self.observation_net(features.flatten(1))], -1))
        x, skips = actions.transpose(1, 2), []
        for level, blocks in enumerate(self.down):
            for block in blocks:  # type: ignore[attr-defined]
                x = block(x, condition)
            skips.append(x)
            if level < len(self.shrink):
                x = self.shrink[level](x)
        for block in self.middle:
            x = block(x, condition)
        # The published network has no skip connection from its first level.
        for blocks, grow in zip(self.up, self.grow):
            x = torch.cat([x, skips.pop()], 1)
            for block in blocks:  # type: ignore[attr-defined]
                x = block(x, condition)
            x = grow(x)
        return self.out(x).transpose(1, 2)


class UNetDenoiser(Averaged):
    """UNet1d with a moving average of its weights.

    widths: channels of the levels; the horizon must be divisible by 2 for each level but the last
    observation_units: widths of an MLP between observations and FiLM; none as published
    """

    seeds: tuple[int, ...] | None = None  # shape of the uniform noise for dropout

    def __init__(
        self,
        *,
        spec: Spec,
        horizon: int,
        observation_horizon: int,
        image_features: int = 64,
        widths: Sequence[int] = (256, 512, 1024),
        step_width: int = 256,
        kernel: int = 5,
        groups: int = 8,
        observation_units: Sequence[int] = (),
    ) -> None:
        factor = 2 ** (len(widths) - 1)
        if horizon % factor:
            raise ConfigError(
                f"algorithm.horizon is {horizon}: with {len(widths)} widths of the U-Net it must be divisible by {factor}"
            )
        odd = [width for width in widths if width % groups]
        if odd:
            raise ConfigError(
                f"algorithm.size.widths has {odd[0]}, which is not divisible by groups={groups} of controllers.policy"
            )
        if any(units < 1 for units in observation_units):
            raise ConfigError(
                f"algorithm.size.observation_units is {list(observation_units)}: each width must be at least 1"
            )
        condition = observation_horizon * feature_width(spec, image_features)
        super().__init__(
            UNet1d(spec.action.size, condition, list(widths), step_width, kernel, groups, observation_units)
        )


# ---------------------------------------------------------------- transformer


SEEDS_PER_LAYER = 6  # of dropout: weights and output of both attentions, hidden units and output of the MLP


class Attention(nn.Module):
    """Multi-head attention with an additive mask and dropout of its weights."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.rate = heads, dropout
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor, seed: torch.Tensor | None
    ) -> torch.Tensor:
        """x: (B, T, D), memory: (B, S, D), mask: (T, S) -> (B, T, D)"""
        query = self._split(self.query(x))
        key, value = (self._split(part) for part in self.key_value(memory).chunk(2, -1))
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        weights = seeded_dropout((scores + mask).softmax(-1), self.rate, seed)
        return self.out((weights @ value).transpose(1, 2).flatten(2))

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class DecoderLayer(nn.Module):
    """Pre-norm: causal self-attention, attention to the memory, MLP with GELU (torch's TransformerDecoderLayer)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.rate = dropout
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own = Attention(width, heads, dropout)
        self.cross = Attention(width, heads, dropout)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(
        self,
        x: torch.Tensor,
        memory: torch.Tensor,
        masks: tuple[torch.Tensor, torch.Tensor],
        seeds: torch.Tensor | None,  # (6,) uniform; None: no dropout
    ) -> torch.Tensor:
        s = [None] * SEEDS_PER_LAYER if seeds is None else list(seeds.unbind(0))
        own = self.norms[0](x)
        x = x + seeded_dropout(self.own(own, own, masks[0], s[0]), self.rate, s[1])
        x = x + seeded_dropout(self.cross(self.norms[1](x), memory, masks[1], s[2]), self.rate, s[3])
        hidden = seeded_dropout(F.gelu(self.expand(self.norms[2](x))), self.rate, s[4])
        return x + seeded_dropout(self.contract(hidden), self.rate, s[5])


class ActionTransformer(nn.Module):
    """Decoder over the action sequence; it attends to the denoising step and the observations.

    Action t sees the actions up to t, the step, and the observations up to t.
    """

    mask: torch.Tensor
    memory_mask: torch.Tensor

    def __init__(
        self,
        actions: int,
        features: int,
        horizon: int,
        observation_horizon: int,
        width: int,
        layers: int,
        heads: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.width = width
        self.embed = nn.Linear(actions, width)
        self.position = nn.Parameter(torch.zeros(horizon, width))
        self.observe = nn.Linear(features, width)
        self.condition_position = nn.Parameter(torch.zeros(1 + observation_horizon, width))
        self.condition = nn.Sequential(nn.Linear(width, 4 * width), nn.Mish(), nn.Linear(4 * width, width))
        self.layers = nn.ModuleList(DecoderLayer(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, actions)
        time = torch.arange(horizon)[:, None]
        hidden = {
            "mask": time < torch.arange(horizon),
            "memory_mask": time < torch.arange(1 + observation_horizon) - 1,
        }
        for name, forbidden in hidden.items():
            values = torch.zeros(forbidden.shape).masked_fill(forbidden, float("-inf"))
            self.register_buffer(name, values, persistent=False)
        self.apply(_small_normal)
        exempt_from_decay(self)
        for parameter in (self.position, self.condition_position):
            nn.init.normal_(parameter, std=0.02)
            parameter.no_decay = True  # type: ignore[attr-defined]

    def forward(
        self,
        actions: torch.Tensor,
        step: torch.Tensor,
        features: torch.Tensor,
        seeds: torch.Tensor | None = None,  # (layers, 6) uniform, for dropout
    ) -> torch.Tensor:
        tokens = torch.cat([sinusoidal(step, self.width)[:, None], self.observe(features)], 1)
        memory = self.condition(tokens + self.condition_position)
        x = self.embed(actions) + self.position
        masks = (self.mask, self.memory_mask)
        for k, layer in enumerate(self.layers):
            x = layer(x, memory, masks, None if seeds is None else seeds[k])
        return self.out(self.norm(x))


def _small_normal(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


class TransformerDenoiser(Averaged):
    """ActionTransformer with a moving average of its weights. Defaults: Push-T from state."""

    def __init__(
        self,
        *,
        spec: Spec,
        horizon: int,
        observation_horizon: int,
        image_features: int = 64,
        width: int = 256,
        layers: int = 8,
        heads: int = 4,
        dropout: float = 0.01,
    ) -> None:
        features = feature_width(spec, image_features)
        super().__init__(
            ActionTransformer(
                spec.action.size,
                features,
                horizon,
                observation_horizon,
                width,
                layers,
                heads,
                dropout,
            )
        )
        self.seeds = (layers, SEEDS_PER_LAYER) if dropout > 0 else None
