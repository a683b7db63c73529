"""Dreams that gradients go back through: from states to the actions before them, and from these to the policy.

It computes what a loop of `RSSM.imagine_step` would, arranged for a GPU: the policy sees states as given (no gradient
goes through its eyes), so its actions are computed once more, all at once, with gradient, and the way back through time
only passes gradients on. Weights of the world model get none; they must not change before the gradient is found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from rl_lab.components.nn.kernels.latent import sample_latent_backward
from rl_lab.components.nn.kernels.recurrent import enter_backward, gates_backward, mix_backward
from rl_lab.components.nn.precision import product_dtype
from rl_lab.components.representation_learners.rssm_dream import FrozenDynamics, StepTrace, dream

if TYPE_CHECKING:
    from rl_lab.components.representation_learners.rssm import RSSM


def dream_with_gradient(
    rssm: RSSM,
    actor: Any,  # `frozen` and `sample`, continuous actions
    state: dict[str, torch.Tensor],  # deter (N, D), stoch (N, S, C)
    prior_noise: torch.Tensor,  # (H, N, S)
    action_noise: torch.Tensor,  # (H, N, k)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (N, H+1, F) in the products' dtype and actions (N, H, A), both with gradient."""
    dynamics, traces = FrozenDynamics(rssm), list[StepTrace]()
    policy = actor.frozen(product_dtype(prior_noise.device))
    features, _ = dream(dynamics, policy, state, prior_noise, action_noise, traces=traces)
    actions = actor.sample(features[:, :-1], action_noise.transpose(0, 1))
    return DreamedFeatures.apply(actions, DreamRecord(features, dynamics, traces)), actions


@dataclass
class DreamRecord:
    """A dream that has been dreamed without gradient."""

    features: torch.Tensor
    dynamics: FrozenDynamics
    traces: list[StepTrace]


class DreamedFeatures(torch.autograd.Function):
    """Actions (N, H, A) -> the features that they led to (N, H+1, F)."""

    @staticmethod
    def forward(ctx: Any, actions: torch.Tensor, record: DreamRecord) -> torch.Tensor:
        # Not `record` itself: it holds the result, and a result that its own graph holds is freed late.
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
        # As `limit_action` has it: scaled where the action was, no gradient through the limit.
        return found / actions.abs().clamp(min=1.0), None


def backward_through_time(
    dynamics: FrozenDynamics,
    traces: list[StepTrace],
    grad: torch.Tensor,  # (N, H+1, F) of the features
) -> torch.Tensor:
    """Gradients of the actions' products with the block layer: (H, N, D)."""
    w, low = dynamics, dynamics.dtype
    grad = grad.contiguous()
    count, width, steps = len(grad), w.rssm.deter, len(traces)
    hidden = traces[0].from_deter.shape[-1]
    always = torch.ones(count, device=grad.device)  # no episode begins within a dream
    # The memory's two products, for the prior and for the way into the next step, go back as one.
    both_weights = torch.cat([w.prior.first_weight, w.deter_weight.t()])  # (2h, D)
    both = torch.zeros((steps + 1, count, 2 * hidden), dtype=low, device=grad.device)
    found: list[torch.Tensor] = []
    carry: torch.Tensor | None = None
    entered: torch.Tensor | None = None
    from_next: torch.Tensor | None = None
    for t in reversed(range(steps)):
        trace = traces[t]
        logits = sample_latent_backward(
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
        if t > 0:  # the state that a dream starts from is given
            entered = torch.bmm(layer, w.layer.transpose(1, 2))
            from_stoch = enter_backward(
                entered, trace.from_deter, trace.from_stoch, always, w.enter, both[t, :, hidden:]
            )
            from_next = from_stoch @ w.stoch_weight.t()
    return torch.stack(found[::-1])
