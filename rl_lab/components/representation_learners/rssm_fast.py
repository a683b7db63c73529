"""Fast implementations of the RSSM for GPUs: the posterior over a sequence, and imagined rollouts.

`scan_posterior` computes the same as `RSSM.observe_sequence` with its own backward pass. On a GPU a scan is
bound by the number of its kernels, therefore:
- one matrix product of the new deter serves the posterior of this step and the recurrence of the next;
- one fused kernel runs between two products;
- each step of the backward pass only propagates gradients; weight gradients are one large product per weight
  after the last step, instead of a small product and an addition per step.

`imagine` and `imagine_with_gradient` compute the same as a loop over `RSSM.imagine_step`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from rl_lab.components.kernels.block_gru import (
    EnterWeights,
    enter,
    enter_backward,
    gates,
    gates_backward,
    mix,
    mix_backward,
)
from rl_lab.components.kernels.norm_silu import (
    norm_silu_backward,
    norm_silu_forward,
    norm_silu_input_gradient,
)
from rl_lab.components.kernels.sampling import categorical_sample, categorical_sample_backward
from rl_lab.components.nn.mlp import FrozenMLP
from rl_lab.utils.device import product_dtype

if TYPE_CHECKING:
    from rl_lab.components.representation_learners.rssm import RSSM


Tensors = list[torch.Tensor]


def scan_posterior(
    rssm: RSSM,
    state: dict[str, torch.Tensor],  # deter (B, D), stoch (B, S, C) before the first row
    keep: torch.Tensor,  # (B, T) float32
    actions: torch.Tensor,  # (B, T, a) embedded actions
    embeds: torch.Tensor,  # (B, T, h) the observation's part of the posterior's first layer, with its bias
    noise: torch.Tensor,  # (B, T, S)
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Deter (B, T, D), stoch (B, T, S, C), probabilities (B, T, S, C): float32, differentiable."""
    gru, stoch_in = rssm.gru, rssm.stoch_in
    inner, from_action = split_layer(rssm)
    deter_in = gru.deter_in
    result = PosteriorScan.apply(
        (rssm.deter, rssm.unimix, gru.norm.eps),
        state["deter"],
        state["stoch"].flatten(-2),
        keep,
        actions @ from_action + gru.layer.bias.flatten(),
        embeds,
        noise,
        deter_in.linears[0].weight,
        deter_in.linears[0].bias,
        deter_in.norms[0].weight,
        stoch_in.linears[0].weight,
        stoch_in.linears[0].bias,
        stoch_in.norms[0].weight,
        inner,
        gru.norm.weight,
        gru.gates.weight,
        gru.gates.bias,
        rssm.posterior_in.weight[:, : rssm.deter],
        rssm.posterior_norm.weight,
        rssm.posterior_out.weight,
        rssm.posterior_out.bias,
    )
    return result[0], result[1], result[2]


def split_layer(rssm: RSSM) -> tuple[torch.Tensor, torch.Tensor]:
    """The block layer's weights for the state (g, d + 2h, d) and for the action (a, D).

    All blocks have the same action as input, so its part is one dense product outside the recurrence.
    """
    weight = rssm.gru.layer.weight
    entering = rssm.action_in.out_features
    inner, action = weight.split([weight.shape[1] - entering, entering], 1)
    return inner, action.transpose(0, 1).flatten(1)


class PosteriorScan(torch.autograd.Function):
    """Inputs and outputs as in `scan_posterior`; the state before the first row gets no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        sizes: tuple[int, float, float],
        deter: torch.Tensor,
        stoch: torch.Tensor,
        keep: torch.Tensor,
        from_action: torch.Tensor,  # (B, T, D)
        from_embed: torch.Tensor,  # (B, T, h)
        noise: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        _, unimix, eps = sizes
        low = product_dtype(deter.device)
        weights = ScanWeights(parameters, eps, low)
        hidden, blocks = weights.hidden, weights.blocks
        deter_low, stoch_low = deter.to(low), stoch.to(low)
        # (B, 2h): for the posterior of this step, and for the input layer of the next step
        product = deter_low @ weights.both.t()
        from_stoch = stoch_low @ weights.stoch.t()
        kept: dict[str, Tensors] = {name: [] for name in SAVED}
        kept["deter"].append(deter)
        kept["deter_low"].append(deter_low)
        kept["stoch"].append(stoch_low)
        steps = noise.shape[1]
        for t in range(steps):
            keep_t = keep[:, t]
            inputs = enter(deter, product[:, hidden:], from_stoch, keep_t, weights.enter, blocks, low)
            y = torch.bmm(inputs, weights.layer)
            mixed = mix(y, from_action[:, t], weights.layer_norm, eps)
            raw = torch.bmm(mixed, weights.gates)
            deter, deter_low = gates(raw, weights.gate_bias, deter, keep_t)
            before, product = product, deter_low @ weights.both.t()
            x = norm_silu_forward(product[:, :hidden], from_embed[:, t], weights.posterior_norm, eps)
            probs, stoch_low = categorical_sample(x @ weights.out.t(), weights.out_bias, noise[:, t], unimix)
            step = (deter, deter_low, stoch_low, before, from_stoch, inputs, y, mixed, raw, x, probs)
            for name, value in zip(SAVED, step):
                kept[name].append(value)
            if t < steps - 1:
                from_stoch = stoch_low @ weights.stoch.t()
        kept["product"].append(product)
        ctx.kept, ctx.weights, ctx.unimix = kept, weights, unimix
        ctx.save_for_backward(keep, from_action, from_embed)
        samples = torch.stack(kept["stoch"][1:], 1).float()
        probabilities = torch.stack(kept["probs"], 1)
        return torch.stack(kept["deter"][1:], 1), samples.view_as(probabilities), probabilities

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_deter: torch.Tensor, grad_stoch: torch.Tensor, grad_probs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        keep, from_action, from_embed = ctx.saved_tensors
        kept, w, unimix = ctx.kept, ctx.weights, ctx.unimix
        hidden, eps, low = w.hidden, w.eps, w.low
        grad_deter, grad_probs = grad_deter.contiguous(), grad_probs.contiguous()
        grad_stoch = grad_stoch.flatten(-2).contiguous()
        batch, steps = keep.shape
        # Gradients of `product` before the first step and after each; the next step writes the second half.
        both = torch.zeros((steps + 1, batch, 2 * hidden), dtype=low, device=keep.device)
        found: dict[str, Tensors] = {name: [] for name in FOUND}
        carry: torch.Tensor | None = None
        entered: torch.Tensor | None = None
        from_next: torch.Tensor | None = None
        for t in reversed(range(steps)):
            logits = categorical_sample_backward(
                kept["probs"][t], grad_probs[:, t], grad_stoch[:, t], from_next, unimix, low
            )
            x = logits @ w.out
            product = kept["product"][t + 1][:, :hidden]
            norm_silu_input_gradient(
                x, product, from_embed[:, t], w.posterior_norm, eps, both[t + 1, :, :hidden]
            )
            raw, carry = gates_backward(
                kept["raw"][t],
                w.gate_bias,
                kept["deter"][t],
                keep[:, t],
                grad_deter[:, t],
                both[t + 1] @ w.both,
                carry,
                entered,
                keep[:, t + 1] if t < steps - 1 else None,
            )
            mixed = torch.bmm(raw, w.gates.transpose(1, 2))
            y = mix_backward(mixed, kept["y"][t], from_action[:, t], w.layer_norm, eps)
            entered = torch.bmm(y, w.layer.transpose(1, 2))
            from_stoch = enter_backward(
                entered, kept["product"][t][:, hidden:], kept["from_stoch"][t], keep[:, t], w.enter,
                both[t, :, hidden:],
            )  # fmt: skip
            from_next = from_stoch @ w.stoch if t > 0 else None
            for name, value in zip(FOUND, (logits, x, raw, mixed, y, entered, from_stoch)):
                found[name].append(value)
        for values in found.values():
            values.reverse()
        gradients = parameter_gradients(w, kept, found, both, keep, from_action, from_embed)
        grad_action = torch.stack(found["y"]).permute(2, 0, 1, 3).flatten(2).to(from_action.dtype)
        grad_embed = both[1:, :, :hidden].transpose(0, 1).to(from_embed.dtype)
        ctx.kept = None
        return None, None, None, None, grad_action, grad_embed, None, *gradients


# Tensors that the forward pass saves for each step, and gradients that the backward pass computes for each.
SAVED = (
    "deter", "deter_low", "stoch", "product", "from_stoch", "inputs", "y", "mixed", "raw", "x", "probs",
)  # fmt: skip
FOUND = ("logits", "x", "raw", "mixed", "y", "entered", "from_stoch")


class ScanWeights:
    """Parameters of the scan: matrices cast once to the dtype of the products, vectors in float32."""

    def __init__(self, parameters: tuple[torch.Tensor, ...], eps: float, low: torch.dtype) -> None:
        (
            deter, deter_bias, deter_norm, stoch, stoch_bias, stoch_norm, layer, self.layer_norm,
            gate_weight, self.gate_bias, posterior, self.posterior_norm, out, self.out_bias,
        ) = parameters  # fmt: skip
        self.eps, self.low = eps, low
        self.hidden, self.blocks = deter.shape[0], layer.shape[0]
        self.enter = EnterWeights(deter_bias, deter_norm, stoch_bias, stoch_norm, eps)
        self.both = torch.cat([posterior, deter]).to(low)  # (2h, D)
        self.stoch = stoch.to(low)  # (h, S·C)
        self.layer = layer.to(low).contiguous()  # (g, d + 2h, d)
        self.gates = gate_weight.to(low)  # (g, d, 3d)
        self.out = out.to(low)  # (S·C, h)


def parameter_gradients(
    w: ScanWeights,
    kept: dict[str, Tensors],
    found: dict[str, Tensors],
    both: torch.Tensor,  # (T+1, B, 2h)
    keep: torch.Tensor,
    from_action: torch.Tensor,
    from_embed: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Gradients of all parameters over all steps, in the order of `PosteriorScan`'s parameters."""
    hidden, eps = w.hidden, w.eps
    g_both = (both.flatten(0, 1).t() @ torch.stack(kept["deter_low"]).flatten(0, 1)).float()
    g_posterior, g_deter = g_both.split(hidden)
    g_stoch = _rows(found["from_stoch"]).t() @ _rows(kept["stoch"][:-1])
    # Norms and biases of the two input layers, from gradients summed over the blocks.
    shared = torch.stack(found["entered"])[..., -2 * hidden :].sum(1, dtype=torch.float32)  # (T, B, 2h)
    scale = keep.t().unsqueeze(-1)  # (T, B, 1)
    input_layers = []
    for half, name, bias, norm in (
        (shared[..., :hidden], "product", w.enter.deter_bias, w.enter.deter_norm),
        (shared[..., hidden:], "from_stoch", w.enter.stoch_bias, w.enter.stoch_norm),
    ):
        values = torch.stack(kept[name][: len(found["y"])])[..., -hidden:].float() * scale
        rows = half.flatten(0, 1).contiguous()
        _, g_norm, g_bias = norm_silu_backward(rows, values.flatten(0, 1), bias, norm, eps)
        input_layers.append((g_bias, g_norm))
    (g_deter_bias, g_deter_norm), (g_stoch_bias, g_stoch_norm) = input_layers
    g_layer = torch.bmm(_blocks(kept["inputs"]).transpose(1, 2), _blocks(found["y"]))
    y = torch.stack(kept["y"]).transpose(1, 2).flatten(0, 1).flatten(1)  # (T·B, D)
    grad = torch.stack(found["mixed"]).transpose(1, 2).flatten(0, 1).flatten(1)
    actions = from_action.transpose(0, 1).flatten(0, 1)
    _, g_layer_norm, _ = norm_silu_backward(grad, y, actions, w.layer_norm, eps)
    raw = _blocks(found["raw"])
    g_gates = torch.bmm(_blocks(kept["mixed"]).transpose(1, 2), raw)
    g_gate_bias = raw.sum(1, keepdim=True, dtype=torch.float32)
    product = torch.stack(kept["product"][1:])[..., :hidden].flatten(0, 1)
    embeds = from_embed.transpose(0, 1).flatten(0, 1)
    _, g_posterior_norm, _ = norm_silu_backward(_rows(found["x"]), product, embeds, w.posterior_norm, eps)
    logits = _rows(found["logits"])
    g_out = logits.t() @ _rows(kept["x"])
    g_out_bias = logits.sum(0, dtype=torch.float32)
    return (
        g_deter, g_deter_bias, g_deter_norm, g_stoch.float(), g_stoch_bias, g_stoch_norm, g_layer.float(), g_layer_norm,
        g_gates.float(), g_gate_bias, g_posterior, g_posterior_norm, g_out.float(), g_out_bias,
    )  # fmt: skip


def _rows(steps: Tensors) -> torch.Tensor:
    """T tensors (B, F) -> (T·B, F)."""
    return torch.stack(steps).flatten(0, 1)


def _blocks(steps: Tensors) -> torch.Tensor:
    """T tensors (g, B, F) -> (g, T·B, F)."""
    return torch.stack(steps, 1).flatten(1, 2)


# --- Imagined rollouts ---


class StepTrace(NamedTuple):
    """Intermediate values of one imagined step for backward: g blocks of width d, h hidden units."""

    deter: torch.Tensor  # (N, D) float32, before the step
    action_products: list[torch.Tensor]  # (N, h) of the layers of the action embedding
    from_action: torch.Tensor  # (N, D)
    from_deter: torch.Tensor  # (N, h)
    from_stoch: torch.Tensor  # (N, h)
    layer: torch.Tensor  # (g, N, d) product of the block layer
    gates: torch.Tensor  # (g, N, 3d) product of the gates
    prior_products: list[torch.Tensor]  # (N, h) of the prior's layers
    probs: torch.Tensor  # (N, S, C)


class FrozenDynamics:
    """`RSSM.imagine_step` with the current weights, cast once, without gradients.

    In float32 they are the parameters themselves. A state is deter in float32 and the feature (deter, stoch)
    in the dtype of the products, which is also the input of policy and heads: nothing is copied or
    concatenated between steps.
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
        feature: torch.Tensor,  # (N, F) of the previous state; may be a slice
        action: torch.Tensor,  # (N, …) as stored
        noise: torch.Tensor,  # (N, S) uniform
        out: torch.Tensor,  # (N, F) output: feature of the next state; may be a slice
    ) -> tuple[torch.Tensor, StepTrace]:
        """The next deter (N, D) float32, and the trace."""
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
        probs, _ = categorical_sample(logits, self.no_bias, noise, rssm.unimix, out[:, width:])
        return after, StepTrace(
            deter, action_products, from_action, from_deter, from_stoch, layer, raw, prior_products, probs
        )


@torch.no_grad()
def imagine(
    dynamics: FrozenDynamics,
    policy: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],  # (feature, noise) -> action
    state: dict[str, torch.Tensor],  # deter (N, D), stoch (N, S, C)
    prior_noise: torch.Tensor,  # (H, N, S)
    action_noise: torch.Tensor,  # (H, N, k)
    *,
    traces: list[StepTrace] | None = None,  # appended to, if given
) -> tuple[torch.Tensor, torch.Tensor]:
    """Imagined rollout: features (N, H+1, F) in the dtype of the products, actions (N, H, …)."""
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


def imagine_with_gradient(
    rssm: RSSM,
    actor: Any,  # `frozen` and `sample`, continuous actions
    state: dict[str, torch.Tensor],  # deter (N, D), stoch (N, S, C)
    prior_noise: torch.Tensor,  # (H, N, S)
    action_noise: torch.Tensor,  # (H, N, k)
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `imagine`, with gradients from features to the previous actions, and from these to the policy.

    The policy's inputs are detached. Therefore its actions are recomputed for all steps at once with
    gradients, and the backward pass through time only propagates gradients. The world model's weights get no
    gradients; they must not change before the backward pass.
    """
    dynamics, traces = FrozenDynamics(rssm), list[StepTrace]()
    policy = actor.frozen(product_dtype(prior_noise.device))
    features, _ = imagine(dynamics, policy, state, prior_noise, action_noise, traces=traces)
    actions = actor.sample(features[:, :-1], action_noise.transpose(0, 1))
    return ImaginedFeatures.apply(actions, RolloutRecord(features, dynamics, traces)), actions


@dataclass
class RolloutRecord:
    """A rollout that was computed without gradients."""

    features: torch.Tensor
    dynamics: FrozenDynamics
    traces: list[StepTrace]


class ImaginedFeatures(torch.autograd.Function):
    """Actions (N, H, A) -> features of the rollout (N, H+1, F)."""

    @staticmethod
    def forward(ctx: Any, actions: torch.Tensor, record: RolloutRecord) -> torch.Tensor:
        # Not `record`: it holds the output, and an output that its own graph references is freed late.
        ctx.dynamics, ctx.traces = record.dynamics, record.traces
        ctx.save_for_backward(actions)
        return record.features

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (actions,) = ctx.saved_tensors
        dynamics, traces = ctx.dynamics, ctx.traces
        from_action = backward_through_time(dynamics, traces, grad)  # (H, N, D)
        rows = from_action.flatten(0, 1) @ dynamics.action.t()
        products = [torch.cat(layer) for layer in zip(*(trace.action_products for trace in traces))]
        rows = dynamics.action_in.input_gradient(rows, products)
        found = rows.unflatten(0, from_action.shape[:2]).transpose(0, 1).to(actions.dtype)
        ctx.traces = None
        # As in `limit_action`: scaled where the action was scaled, no gradient through the limit.
        return found / actions.abs().clamp(min=1.0), None


def backward_through_time(
    dynamics: FrozenDynamics,
    traces: list[StepTrace],
    grad: torch.Tensor,  # (N, H+1, F) of the features
) -> torch.Tensor:
    """Gradients of the products of actions and block layer: (H, N, D)."""
    w, low = dynamics, dynamics.dtype
    grad = grad.contiguous()
    count, width, steps = len(grad), w.rssm.deter, len(traces)
    hidden = traces[0].from_deter.shape[-1]
    always = torch.ones(count, device=grad.device)  # no episode starts within a rollout
    # One product propagates both gradients of deter: from the prior and from the next step's input layer.
    both_weights = torch.cat([w.prior.first_weight, w.deter_weight.t()])  # (2h, D)
    both = torch.zeros((steps + 1, count, 2 * hidden), dtype=low, device=grad.device)
    found: list[torch.Tensor] = []
    carry: torch.Tensor | None = None
    entered: torch.Tensor | None = None
    from_next: torch.Tensor | None = None
    for t in reversed(range(steps)):
        trace = traces[t]
        logits = categorical_sample_backward(
            trace.probs, None, grad[:, t + 1, width:], from_next, w.rssm.unimix, low
        )
        w.prior.first_product_gradient(logits, trace.prior_products, both[t + 1, :, :hidden])
        raw, carry = gates_backward(
            trace.gates, w.gate_bias, trace.deter, always, grad[:, t + 1, :width], both[t + 1] @ both_weights,
            carry, entered, None if entered is None else always,
        )  # fmt: skip
        mixed = torch.bmm(raw, w.gates.transpose(1, 2))
        layer = mix_backward(mixed, trace.layer, trace.from_action, w.layer_norm, w.eps)
        found.append(layer.transpose(0, 1).flatten(1))
        if t > 0:  # the initial state of a rollout gets no gradient
            entered = torch.bmm(layer, w.layer.transpose(1, 2))
            from_stoch = enter_backward(
                entered, trace.from_deter, trace.from_stoch, always, w.enter, both[t, :, hidden:]
            )
            from_next = from_stoch @ w.stoch_weight.t()
    return torch.stack(found[::-1])
