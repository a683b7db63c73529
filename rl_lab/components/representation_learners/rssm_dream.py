"""Dream steps of the RSSM: weights cast once, fused pieces, states written where they are needed.

The weights get no gradient here. What a step leaves in its `StepTrace` is enough to find the gradient of its action
(rssm_dream_gradient.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from rl_lab.components.nn.frozen_mlp import FrozenMLP
from rl_lab.components.nn.kernels.latent import sample_latent
from rl_lab.components.nn.kernels.recurrent import EnterWeights, enter, gates, mix
from rl_lab.components.nn.precision import product_dtype
from rl_lab.components.representation_learners.rssm_scan import split_layer

if TYPE_CHECKING:
    from rl_lab.components.representation_learners.rssm import RSSM


class StepTrace(NamedTuple):
    """What one dreamed step went through: g blocks of width d, h hidden units."""

    deter: torch.Tensor  # (N, D) float32, the memory before
    action_products: list[torch.Tensor]  # (N, h) of the layers of the action's way in
    from_action: torch.Tensor  # (N, D)
    from_deter: torch.Tensor  # (N, h)
    from_stoch: torch.Tensor  # (N, h)
    layer: torch.Tensor  # (g, N, d) product of the block layer
    gates: torch.Tensor  # (g, N, 3d) product of the gates
    prior_products: list[torch.Tensor]  # (N, h) of the prior's layers
    probs: torch.Tensor  # (N, S, C)


class FrozenDynamics:
    """`RSSM.imagine_step` with the weights of this moment (in float32 they are the parameters themselves).

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
        self.gates, self.gate_bias = gru.gates.weight.to(low), gru.gates.bias.detach()
        self.layer_norm, self.eps = gru.norm.weight.detach(), gru.norm.eps
        self.no_bias = torch.zeros(rssm.stoch * rssm.classes, device=self.gates.device)

    @torch.no_grad()
    def step(
        self,
        deter: torch.Tensor,  # (N, D) float32
        feature: torch.Tensor,  # (N, F) of the state before; rows may lie apart
        action: torch.Tensor,  # (N, …) as stored
        noise: torch.Tensor,  # (N, S) uniform
        out: torch.Tensor,  # (N, F) written: the next state's feature; rows may lie apart
    ) -> tuple[torch.Tensor, StepTrace]:
        """The next memory (N, D) float32, and how it came about."""
        rssm, blocks, width = self.rssm, self.rssm.gru.blocks, self.rssm.deter
        encoded, action_products = self.action_in.traced(rssm.action_encoder(action, self.dtype))
        from_action = torch.addmm(self.layer_bias, encoded, self.action)
        from_deter = feature[:, :width] @ self.deter_weight
        from_stoch = feature[:, width:] @ self.stoch_weight
        inputs = enter(deter, from_deter, from_stoch, None, self.enter, blocks, self.dtype)
        layer = torch.bmm(inputs, self.layer)
        raw = torch.bmm(mix(layer, from_action, self.layer_norm, self.eps), self.gates)
        after, _ = gates(raw, self.gate_bias, deter, None, out[:, :width])
        logits, prior_products = self.prior.traced(out[:, :width])
        probs, _ = sample_latent(logits, self.no_bias, noise, rssm.unimix, out[:, width:])
        return after, StepTrace(
            deter, action_products, from_action, from_deter, from_stoch, layer, raw, prior_products, probs
        )


@torch.no_grad()
def dream(
    dynamics: FrozenDynamics,
    policy: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],  # (feature, noise) -> action
    state: dict[str, torch.Tensor],  # deter (N, D), stoch (N, S, C)
    prior_noise: torch.Tensor,  # (H, N, S)
    action_noise: torch.Tensor,  # (H, N, k)
    *,
    traces: list[StepTrace] | None = None,  # filled where it is given
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (N, H+1, F) in the products' dtype, actions (N, H, …)."""
    horizon, count = prior_noise.shape[:2]
    features = torch.empty(
        (count, horizon + 1, dynamics.rssm.features), dtype=dynamics.dtype, device=prior_noise.device
    )
    features[:, 0] = dynamics.rssm.feature(state)
    deter, actions = state["deter"].float().contiguous(), []
    for t in range(horizon):
        actions.append(policy(features[:, t], action_noise[t]))
        deter, trace = dynamics.step(deter, features[:, t], actions[-1], prior_noise[t], features[:, t + 1])
        if traces is not None:
            traces.append(trace)
    return features, torch.stack(actions, 1)
