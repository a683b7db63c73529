"""Recurrent actor-critic on frames: a convolutional trunk, an LSTM cell, two linear heads (IRIS, Δ-IRIS)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rl_lab.components.nn.actions import make_policy
from rl_lab.components.nn.losses import LossWithIntermediateLosses
from rl_lab.components.nn.residual_conv import HALVE, WIDTHS, FrameEncoder, latent_side
from rl_lab.components.nn.two_hot import make_regression
from rl_lab.components.representation_learners.tokenizer import frame_shape
from rl_lab.errors import ConfigError
from rl_lab.records import Batch, Spec
from rl_lab.utils.device import autocast

State = dict[str, torch.Tensor]  # h, c: (N, units)


class RecurrentActorCritic(nn.Module):
    """Actor and critic share the trunk and the LSTM.

    trunk:       builds the convolutional network (`trunk(spec)`), which has a `width`
    bins:        of the critic: 0 regresses the value directly, else two-hot in symlog space up to ±`limit`
    zero_critic: initialise the critic's head to zero
    """

    trunk_dtype = torch.float32  # of the trunk's convolutions; everything after them is float32

    def __init__(
        self,
        spec: Spec,
        trunk: Callable[[Spec], Any],
        *,
        units: int = 512,
        bins: int = 0,
        limit: float = 20.0,
        zero_critic: bool = False,
    ) -> None:
        super().__init__()
        self.policy = make_policy(spec.action)
        self.regression = make_regression(bins, limit)
        self.units = units
        self.trunk = trunk(spec)
        self.cell = nn.LSTMCell(self.trunk.width, units)
        self.actor = nn.Linear(units, self.policy.width)
        self.critic = nn.Linear(units, self.regression.width)
        if zero_critic:
            nn.init.zeros_(self.critic.weight)
            nn.init.zeros_(self.critic.bias)

    def initial_state(self, size: int) -> State:
        zeros = self.actor.weight.new_zeros(size, self.units)
        return {"h": zeros, "c": zeros.clone()}

    def advance(self, features: torch.Tensor, state: State) -> State:
        """features: (N, trunk width) -> the next LSTM state."""
        h, c = self.cell(features, (state["h"], state["c"]))
        return {"h": h, "c": c}

    def encode_frames(self, frames: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) -> features (N, trunk width), float32."""
        with autocast(self.trunk_dtype, frames.device):
            return self.trunk(frames.float()).float()

    def observe(self, frames: torch.Tensor, state: State) -> State:
        """frames: (N, C, H, W) -> the LSTM state after them."""
        return self.advance(self.encode_frames(frames), state)

    def observe_sequence(
        self, frames: torch.Tensor, state: State, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, State]:
        """frames: (B, T, C, H, W) -> h after each frame (B, T, units), and the last state.

        mask: (B, T) bool; the state is zero after a frame that is padding.
        """
        size, rows = frames.shape[:2]
        features = self.encode_frames(frames.flatten(0, 1)).unflatten(0, (size, rows))
        hidden = []
        for t in range(rows):
            state = self.advance(features[:, t], state)
            if mask is not None:
                state = {key: value * mask[:, t, None] for key, value in state.items()}
            hidden.append(state["h"])
        return torch.stack(hidden, 1), state

    def raw_policy(self, h: torch.Tensor) -> torch.Tensor:
        """(…, units) -> raw outputs of the action distribution (…, policy.width)."""
        return self.actor(h)

    def value(self, h: torch.Tensor) -> torch.Tensor:
        """(…, units) -> (…)."""
        return self.regression.mean(self.critic(h))

    def compute_loss(
        self,
        batch: Batch,  # (B, burn_in + 1) rows; imagination starts from the last
        tokenizer: Any,
        world_model: Any,
        objective: Callable[..., tuple[LossWithIntermediateLosses, dict[str, torch.Tensor]]],
        *,
        action_noise: torch.Tensor,  # (B, H, k)
        model_noise: torch.Tensor,  # (B, H - 1, world_model.step_noise)
        slow: Any = None,  # moving average of this network, used for the targets if given
        entropy: torch.Tensor | None = None,  # 0-d: overrides the objective's weight
    ) -> tuple[LossWithIntermediateLosses, dict[str, torch.Tensor]]:
        """Loss on trajectories that are imagined from the batch, and metrics.

        objective: what is minimized on them, such as rl_lab.workflows.iris.policy_loss.ImaginedPolicyLoss
        """
        return objective(
            batch,
            self,
            tokenizer,
            world_model,
            action_noise=action_noise,
            model_noise=model_noise,
            slow=slow,
            entropy=entropy,
        )


# --- Trunks: frames in [0, 1] to feature vectors ---


class PoolTrunk(nn.Module):
    """For each of `channels`: 3×3 convolution, 2×2 max-pooling, ReLU (IRIS)."""

    fast = False  # adds the bias after pooling; see fast_path.py

    def __init__(self, spec: Spec, *, channels: Sequence[int] = (32, 32, 64, 64)) -> None:
        super().__init__()
        inputs, side = frame_shape(spec)
        if side >> len(channels) < 1:
            raise ConfigError(
                f"images of {side}×{side} cannot be pooled {len(channels)} times: set fewer channels"
            )
        layers: list[nn.Module] = []
        for before, after in zip([inputs, *channels[:-1]], channels):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Flatten())
        self.width = channels[-1] * (side >> len(channels)) ** 2

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """(M, C, H, W) -> (M, width)."""
        x = frames * 2.0 - 1.0
        if not self.fast:
            return self.layers(x)
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d):
                assert layer.bias is not None
                pooled = F.max_pool2d(F.conv2d(x, layer.weight, padding=1), 2)
                x = F.relu(
                    pooled + layer.bias.to(pooled.dtype)[:, None, None]
                )  # after pooling: a quarter of the pixels
        return x.flatten(1)


class ResidualTrunk(nn.Module):
    """The residual network that Δ-IRIS applies to frames.

    centered: map pixels to [-1, 1] first. Δ-IRIS does not; True is for saved runs without this key
    """

    def __init__(
        self,
        spec: Spec,
        *,
        width: int = 32,
        latent: int = 16,
        widths: Sequence[int] = WIDTHS,
        halve: Sequence[bool] = HALVE,
        centered: bool = True,
    ) -> None:
        super().__init__()
        channels, side = frame_shape(spec)
        self.centered = centered
        self.net = FrameEncoder(
            channels=channels, latent=latent, width=width, widths=tuple(widths), halve=tuple(halve)
        )
        self.width = latent * latent_side(side, halve) ** 2

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """(M, C, H, W) -> (M, width)."""
        return self.net(frames * 2.0 - 1.0 if self.centered else frames).flatten(1)
