"""The elementwise pieces of one block-GRU step, between its matrix products, forward and backward.

Shapes: B rows, g blocks of width d (memory D = g·d), h hidden units. What products read has the dtype `low` (bfloat16 or
float32); the memory itself and all arithmetic are float32.

    enter:  (deter, from_deter, from_stoch) -> inputs (g, B, d + 2h)   what the block layer sees besides the action
    mix:    SiLU(RMSNorm(y + from_action)), the norm over all blocks    y (g, B, d) -> (g, B, d)
    gates:  reset, candidate, update -> the next memory                (g, B, 3d) -> (B, D)

`keep` (B,) is 0 where an episode begins: the memory before it does not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl_lab.components.nn.kernels.norm_silu import norm_silu_gradient


@dataclass(frozen=True)
class EnterWeights:
    """Biases and norm scales of the two layers that lead into the block layer, (h,) each, float32."""

    deter_bias: torch.Tensor
    deter_norm: torch.Tensor
    stoch_bias: torch.Tensor
    stoch_norm: torch.Tensor
    eps: float


def _kernels():  # type: ignore[no-untyped-def]
    from rl_lab.components.nn.kernels import recurrent_triton

    return recurrent_triton


def _norm_silu(z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    n = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps) * weight
    return n * torch.sigmoid(n)


def enter(
    deter: torch.Tensor,  # (B, D) float32
    from_deter: torch.Tensor,  # (B, h) product with the memory, without keep and bias
    from_stoch: torch.Tensor,  # (B, h) product with the stochastic state, likewise
    keep: torch.Tensor | None,  # (B,) float32; None: all 1
    weights: EnterWeights,
    blocks: int,
    low: torch.dtype,
) -> torch.Tensor:
    if deter.is_cuda:
        return _kernels().enter(deter, from_deter, from_stoch, keep, weights, blocks, low)
    k = 1.0 if keep is None else keep[:, None]
    u = _norm_silu(from_deter.float() * k + weights.deter_bias, weights.deter_norm, weights.eps)
    v = _norm_silu(from_stoch.float() * k + weights.stoch_bias, weights.stoch_norm, weights.eps)
    memory = (deter * k).unflatten(-1, (blocks, -1)).transpose(0, 1)  # (g, B, d)
    shared = torch.cat([u, v], -1).expand(blocks, -1, -1)
    return torch.cat([memory, shared], -1).to(low)


def enter_backward(
    grad: torch.Tensor,  # (g, B, d + 2h)
    from_deter: torch.Tensor,
    from_stoch: torch.Tensor,
    keep: torch.Tensor,
    weights: EnterWeights,
    grad_from_deter: torch.Tensor,  # (B, h) written; rows may lie apart
) -> torch.Tensor:
    """Writes the gradient of `from_deter`, returns that of `from_stoch` (B, h). The memory's own part is
    grad[:, :, :d], which `gates_backward` of the step before adds.
    """
    if grad.is_cuda:
        return _kernels().enter_backward(grad, from_deter, from_stoch, keep, weights, grad_from_deter)
    hidden = from_deter.shape[-1]
    shared = grad.float()[..., -2 * hidden :].sum(0)
    results = []
    for g, x, bias, norm in (
        (shared[:, :hidden], from_deter, weights.deter_bias, weights.deter_norm),
        (shared[:, hidden:], from_stoch, weights.stoch_bias, weights.stoch_norm),
    ):
        gz, _ = norm_silu_gradient(g, x.float() * keep[:, None] + bias, norm, weights.eps)
        results.append((gz * keep[:, None]).to(grad.dtype))
    grad_from_deter.copy_(results[0])
    return results[1]


def mix(y: torch.Tensor, from_action: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    """y: (g, B, d), from_action: (B, D) with the layer's bias, norm: (D,) -> (g, B, d)."""
    if y.is_cuda:
        return _kernels().mix(y, from_action, norm, eps)
    blocks = y.shape[0]
    z = y.float().transpose(0, 1).flatten(1) + from_action.float()
    result = _norm_silu(z, norm, eps).unflatten(-1, (blocks, -1)).transpose(0, 1)
    return result.to(y.dtype).contiguous()


def mix_backward(
    grad: torch.Tensor, y: torch.Tensor, from_action: torch.Tensor, norm: torch.Tensor, eps: float
) -> torch.Tensor:
    """Gradient of y (and so of from_action): (g, B, d)."""
    if y.is_cuda:
        return _kernels().mix_backward(grad, y, from_action, norm, eps)
    blocks = y.shape[0]
    z = y.float().transpose(0, 1).flatten(1) + from_action.float()
    gz, _ = norm_silu_gradient(grad.float().transpose(0, 1).flatten(1), z, norm, eps)
    return gz.unflatten(-1, (blocks, -1)).transpose(0, 1).to(y.dtype).contiguous()


def gates(
    raw: torch.Tensor,  # (g, B, 3d)
    bias: torch.Tensor,  # (g, 1, 3d) float32
    deter: torch.Tensor,  # (B, D) float32, the memory before
    keep: torch.Tensor | None,  # (B,)
    out_low: torch.Tensor | None = None,  # (B, D) rows may lie apart; where products read the new memory
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next memory (B, D), in float32 and in raw's dtype."""
    if raw.is_cuda:
        return _kernels().gates(raw, bias, deter, keep, out_low)
    blocks = raw.shape[0]
    reset, candidate, update = (raw.float() + bias).chunk(3, -1)
    memory = deter if keep is None else deter * keep[:, None]
    memory = memory.unflatten(-1, (blocks, -1)).transpose(0, 1)
    update = torch.sigmoid(update - 1.0)
    new = torch.lerp(memory, torch.tanh(torch.sigmoid(reset) * candidate), update).transpose(0, 1).flatten(1)
    if out_low is None:
        return new, new.to(raw.dtype)
    return new, out_low.copy_(new)


def gates_backward(
    raw: torch.Tensor,
    bias: torch.Tensor,
    deter: torch.Tensor,  # (B, D) the memory before
    keep: torch.Tensor,  # (B,) of this step
    outside: torch.Tensor,  # (B, D) float32: gradient that reaches the new memory from outside the recurrence
    product: torch.Tensor,  # (B, D): gradient through the products that read the new memory
    carry: torch.Tensor | None,  # (B, D) float32: `kept` of the step after
    entered: torch.Tensor | None,  # (g, B, d + …): gradient of the inputs of the step after
    keep_after: torch.Tensor | None,  # (B,) of the step after
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of raw (g, B, 3d), and `kept` (B, D): what passes to the memory before, not yet times keep."""
    if raw.is_cuda:
        return _kernels().gates_backward(raw, bias, deter, keep, outside, product, carry, entered, keep_after)
    blocks, _, width = raw.shape
    width //= 3
    total = outside + product.float()
    if carry is not None:
        assert entered is not None and keep_after is not None
        memory_part = entered[..., :width].float().transpose(0, 1).flatten(1)
        total = total + keep_after[:, None] * (carry + memory_part)
    g = total.unflatten(-1, (blocks, -1)).transpose(0, 1)
    reset, candidate, update = (raw.float() + bias).chunk(3, -1)
    memory = (deter * keep[:, None]).unflatten(-1, (blocks, -1)).transpose(0, 1)
    r, u = torch.sigmoid(reset), torch.sigmoid(update - 1.0)
    c = torch.tanh(r * candidate)
    g_inner = g * u * (1.0 - c * c)
    g_update = g * (c - memory) * u * (1.0 - u)
    g_raw = torch.cat([g_inner * candidate * r * (1.0 - r), g_inner * r, g_update], -1)
    kept = (g * (1.0 - u)).transpose(0, 1).flatten(1)
    return g_raw.to(raw.dtype), kept
