"""Dream steps of the RSSM without gradient: weights cast once, fused pieces, states written where they are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from rl_lab.components.nn.frozen_mlp import FrozenMLP
from rl_lab.components.nn.kernels.latent import sample_latent
from rl_lab.components.nn.kernels.recurrent import EnterWeights, enter, gates, mix
from rl_lab.components.nn.precision import product_dtype
from rl_lab.components.representation_learners.rssm_scan import split_layer

if TYPE_CHECKING:
    from rl_lab.components.representation_learners.rssm import RSSM


class FrozenDynamics:
    """`RSSM.imagine_step` with the weights of this moment.

    A state is the memory in float32 and a feature row (deter, stoch) in the products' dtype, which is also what the
    policy and the heads read: nothing is copied or joined between steps.
    """

    @torch.no_grad()
    def __init__(self, rssm: RSSM) -> None:
        gru, stoch_in = rssm.gru, rssm.stoch_in
        deter_layer, stoch_layer = gru.deter_in.linears[0], stoch_in.linears[0]
        self.dtype = low = product_dtype(deter_layer.weight.device)
        self.rssm = rssm
        self.action_in = FrozenMLP(rssm.action_in, low)
        self.prior = FrozenMLP(rssm.prior_net, low)
        self.enter = EnterWeights(
            deter_layer.bias,
            gru.deter_in.norms[0].weight,
            stoch_layer.bias,
            stoch_in.norms[0].weight,
            gru.norm.eps,
        )
        inner, action = split_layer(rssm)
        self.deter_weight = deter_layer.weight.to(low).t()
        self.stoch_weight = stoch_layer.weight.to(low).t()
        self.layer, self.action = inner.to(low).contiguous(), action.to(low)
        self.layer_bias = gru.layer.bias.flatten().to(low)
        self.gates = gru.gates.weight.to(low)
        self.no_bias = torch.zeros(rssm.stoch * rssm.classes, device=self.gates.device)

    @torch.no_grad()
    def step(
        self,
        deter: torch.Tensor,  # (N, D) float32
        feature: torch.Tensor,  # (N, F) of the state before; rows may lie apart
        action: torch.Tensor,  # (N, …) as stored
        noise: torch.Tensor,  # (N, S) uniform
        out: torch.Tensor,  # (N, F) written: the next state's feature; rows may lie apart
    ) -> torch.Tensor:
        """The next memory (N, D) float32."""
        rssm, gru, width = self.rssm, self.rssm.gru, self.rssm.deter
        encoded = self.action_in(rssm.action_encoder(action, self.dtype))
        from_action = torch.addmm(self.layer_bias, encoded, self.action)
        from_deter = feature[:, :width] @ self.deter_weight
        from_stoch = feature[:, width:] @ self.stoch_weight
        inputs = enter(deter, from_deter, from_stoch, None, self.enter, gru.blocks, self.dtype)
        mixed = mix(torch.bmm(inputs, self.layer), from_action, gru.norm.weight, gru.norm.eps)
        deter, _ = gates(torch.bmm(mixed, self.gates), gru.gates.bias, deter, None, out[:, :width])
        logits = self.prior(out[:, :width])
        sample_latent(logits, self.no_bias, noise, rssm.unimix, out[:, width:])
        return deter


@torch.no_grad()
def dream(
    rssm: RSSM,
    policy: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],  # (feature, noise) -> action
    state: dict[str, torch.Tensor],  # deter (N, D), stoch (N, S, C)
    prior_noise: torch.Tensor,  # (H, N, S)
    action_noise: torch.Tensor,  # (H, N, k)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (N, H+1, F) in the products' dtype, actions (N, H, …)."""
    dynamics = FrozenDynamics(rssm)
    horizon, count = prior_noise.shape[:2]
    features = torch.empty(
        (count, horizon + 1, rssm.features), dtype=dynamics.dtype, device=prior_noise.device
    )
    features[:, 0] = rssm.feature(state)
    deter, actions = state["deter"].float().contiguous(), []
    for t in range(horizon):
        actions.append(policy(features[:, t], action_noise[t]))
        deter = dynamics.step(deter, features[:, t], actions[-1], prior_noise[t], features[:, t + 1])
    return features, torch.stack(actions, 1)
