"""The elementwise operations of one block-GRU step, between its matrix products, forward and backward.

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

from rl_lab.components.kernels.norm_silu import norm_silu_gradient
from rl_lab.components.kernels.triton_jit import cdiv, jit, next_power_of_2, tl

ELEMENTS = 512  # of the memory that one program of `gates` handles


@dataclass(frozen=True)
class EnterWeights:
    """Biases and norm scales of the two layers that lead into the block layer, (h,) each, float32."""

    deter_bias: torch.Tensor
    deter_norm: torch.Tensor
    stoch_bias: torch.Tensor
    stoch_norm: torch.Tensor
    eps: float


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
        return _enter_cuda(deter, from_deter, from_stoch, keep, weights, blocks, low)
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
    grad_from_deter: torch.Tensor,  # (B, h), written; rows may be strided
) -> torch.Tensor:
    """Writes the gradient of `from_deter`, returns that of `from_stoch` (B, h). The memory's own part is
    grad[:, :, :d], which `gates_backward` of the step before adds.
    """
    if grad.is_cuda:
        return _enter_backward_cuda(grad, from_deter, from_stoch, keep, weights, grad_from_deter)
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
        return _mix_cuda(y, y, from_action, norm, eps, backward=False)
    blocks = y.shape[0]
    z = y.float().transpose(0, 1).flatten(1) + from_action.float()
    result = _norm_silu(z, norm, eps).unflatten(-1, (blocks, -1)).transpose(0, 1)
    return result.to(y.dtype).contiguous()


def mix_backward(
    grad: torch.Tensor, y: torch.Tensor, from_action: torch.Tensor, norm: torch.Tensor, eps: float
) -> torch.Tensor:
    """Gradient of y (and so of from_action): (g, B, d)."""
    if y.is_cuda:
        return _mix_cuda(grad, y, from_action, norm, eps, backward=True)
    blocks = y.shape[0]
    z = y.float().transpose(0, 1).flatten(1) + from_action.float()
    gz, _ = norm_silu_gradient(grad.float().transpose(0, 1).flatten(1), z, norm, eps)
    return gz.unflatten(-1, (blocks, -1)).transpose(0, 1).to(y.dtype).contiguous()


def gates(
    raw: torch.Tensor,  # (g, B, 3d)
    bias: torch.Tensor,  # (g, 1, 3d) float32
    deter: torch.Tensor,  # (B, D) float32, the memory before
    keep: torch.Tensor | None,  # (B,)
    out_low: torch.Tensor | None = None,  # (B, D), rows may be strided; where products read the new memory
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next memory (B, D), in float32 and in raw's dtype."""
    if raw.is_cuda:
        return _gates_cuda(raw, bias, deter, keep, out_low)
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
        return _gates_backward_cuda(raw, bias, deter, keep, outside, product, carry, entered, keep_after)
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


@jit
def _norm_silu_grad(g, z, w, eps, F: tl.constexpr):
    r = tl.rsqrt(tl.sum(z * z, 0) / F + eps)
    n = z * r * w
    s = tl.sigmoid(n)
    gw = g * s * (1.0 + n * (1.0 - s)) * w
    return r * gw - z * (r * r * r) * (tl.sum(gw * z, 0) / F)


@jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@jit
def _enter_kernel(
    deter, from_deter, from_stoch, keep, deter_bias, deter_norm, stoch_bias, stoch_norm, out,
    batch, deter_stride, fd_stride, fs_stride, keep_stride, eps,
    H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, HAS_KEEP: tl.constexpr,
):  # fmt: skip
    b, block = tl.program_id(0), tl.program_id(1)
    k = tl.load(keep + b * keep_stride).to(tl.float32) if HAS_KEEP else 1.0
    column = tl.arange(0, BLOCK_H)
    inside = column < H
    base = out + (block * batch + b).to(tl.int64) * (D + 2 * H)
    z = tl.load(from_deter + b * fd_stride + column, mask=inside, other=0.0).to(tl.float32) * k
    z = tl.where(inside, z + tl.load(deter_bias + column, mask=inside, other=0.0), 0.0)
    n = z * tl.rsqrt(tl.sum(z * z, 0) / H + eps) * tl.load(deter_norm + column, mask=inside, other=0.0)
    tl.store(base + D + column, (n * tl.sigmoid(n)).to(out.dtype.element_ty), mask=inside)
    z = tl.load(from_stoch + b * fs_stride + column, mask=inside, other=0.0).to(tl.float32) * k
    z = tl.where(inside, z + tl.load(stoch_bias + column, mask=inside, other=0.0), 0.0)
    n = z * tl.rsqrt(tl.sum(z * z, 0) / H + eps) * tl.load(stoch_norm + column, mask=inside, other=0.0)
    tl.store(base + D + H + column, (n * tl.sigmoid(n)).to(out.dtype.element_ty), mask=inside)
    j = tl.arange(0, BLOCK_D)
    memory = tl.load(deter + b.to(tl.int64) * deter_stride + block * D + j, mask=j < D, other=0.0) * k
    tl.store(base + j, memory.to(out.dtype.element_ty), mask=j < D)


def _enter_cuda(
    deter: torch.Tensor,
    from_deter: torch.Tensor,
    from_stoch: torch.Tensor,
    keep: torch.Tensor | None,
    weights: EnterWeights,
    blocks: int,
    low: torch.dtype,
) -> torch.Tensor:
    batch, width = deter.shape
    hidden, block_width = from_deter.shape[-1], width // blocks
    out = torch.empty((blocks, batch, block_width + 2 * hidden), dtype=low, device=deter.device)
    _enter_kernel[(batch, blocks)](
        deter, from_deter, from_stoch, deter if keep is None else keep,
        weights.deter_bias, weights.deter_norm, weights.stoch_bias, weights.stoch_norm, out,
        batch, deter.stride(0), from_deter.stride(0), from_stoch.stride(0), 0 if keep is None else keep.stride(0),
        weights.eps, H=hidden, D=block_width, BLOCK_H=next_power_of_2(hidden),
        BLOCK_D=next_power_of_2(block_width), HAS_KEEP=keep is not None, num_warps=4,
    )  # fmt: skip
    return out


@jit
def _enter_backward_kernel(
    grad, from_deter, from_stoch, keep, deter_bias, deter_norm, stoch_bias, stoch_norm, gd, gs,
    batch, fd_stride, fs_stride, keep_stride, gd_stride, eps,
    BLOCKS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    b, half = tl.program_id(0), tl.program_id(1)
    k = tl.load(keep + b * keep_stride).to(tl.float32)
    column = tl.arange(0, BLOCK_H)
    inside = column < H
    g = tl.zeros((BLOCK_H,), tl.float32)
    for block in range(BLOCKS):
        row = grad + (block * batch + b).to(tl.int64) * (D + 2 * H) + D + half * H
        g += tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    if half == 0:
        z = tl.load(from_deter + b * fd_stride + column, mask=inside, other=0.0).to(tl.float32) * k
        z = tl.where(inside, z + tl.load(deter_bias + column, mask=inside, other=0.0), 0.0)
        gz = _norm_silu_grad(g, z, tl.load(deter_norm + column, mask=inside, other=0.0), eps, H) * k
        tl.store(gd + b.to(tl.int64) * gd_stride + column, gz.to(gd.dtype.element_ty), mask=inside)
    else:
        z = tl.load(from_stoch + b * fs_stride + column, mask=inside, other=0.0).to(tl.float32) * k
        z = tl.where(inside, z + tl.load(stoch_bias + column, mask=inside, other=0.0), 0.0)
        gz = _norm_silu_grad(g, z, tl.load(stoch_norm + column, mask=inside, other=0.0), eps, H) * k
        tl.store(gs + b * H + column, gz.to(gs.dtype.element_ty), mask=inside)


def _enter_backward_cuda(
    grad: torch.Tensor,
    from_deter: torch.Tensor,
    from_stoch: torch.Tensor,
    keep: torch.Tensor,
    weights: EnterWeights,
    grad_from_deter: torch.Tensor,
) -> torch.Tensor:
    blocks, batch, width = grad.shape
    hidden = from_deter.shape[-1]
    gs = torch.empty((batch, hidden), dtype=grad.dtype, device=grad.device)
    _enter_backward_kernel[(batch, 2)](
        grad, from_deter, from_stoch, keep,
        weights.deter_bias, weights.deter_norm, weights.stoch_bias, weights.stoch_norm, grad_from_deter, gs,
        batch, from_deter.stride(0), from_stoch.stride(0), keep.stride(0), grad_from_deter.stride(0), weights.eps,
        BLOCKS=blocks, H=hidden, D=width - 2 * hidden, BLOCK_H=next_power_of_2(hidden), num_warps=4,
    )  # fmt: skip
    return gs


@jit
def _mix_kernel(
    y, from_action, norm, grad, out, batch, action_stride, eps,
    W: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    column = tl.arange(0, BLOCK)  # over all blocks of the memory
    inside = column < W
    at = ((column // D) * batch + b).to(tl.int64) * D + column % D
    z = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    z += tl.load(from_action + b.to(tl.int64) * action_stride + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(norm + column, mask=inside, other=0.0)
    if BACKWARD:
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        result = _norm_silu_grad(g, z, w, eps, W)
    else:
        n = z * tl.rsqrt(tl.sum(z * z, 0) / W + eps) * w
        result = n * tl.sigmoid(n)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


def _mix_cuda(
    grad: torch.Tensor,
    y: torch.Tensor,
    from_action: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    backward: bool,
) -> torch.Tensor:
    blocks, batch, width = y.shape
    out = torch.empty_like(y)
    size = blocks * width
    _mix_kernel[(batch,)](
        y, from_action, norm, grad, out, batch, from_action.stride(0), eps,
        W=size, D=width, BLOCK=next_power_of_2(size), BACKWARD=backward, num_warps=8 if size > 1024 else 4,
    )  # fmt: skip
    return out


@jit
def _gates_kernel(
    raw, bias, deter, keep, out, out_low, batch, deter_stride, keep_stride, low_stride,
    W: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, HAS_KEEP: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < W
    block, j = column // D, column % D
    at = (block * batch + b).to(tl.int64) * (3 * D) + j
    bias_at = block * (3 * D) + j
    reset = tl.load(raw + at, mask=inside, other=0.0).to(tl.float32) + tl.load(
        bias + bias_at, mask=inside, other=0.0
    )
    candidate = tl.load(raw + at + D, mask=inside, other=0.0).to(tl.float32)
    candidate += tl.load(bias + bias_at + D, mask=inside, other=0.0)
    update = tl.load(raw + at + 2 * D, mask=inside, other=0.0).to(tl.float32)
    update += tl.load(bias + bias_at + 2 * D, mask=inside, other=0.0)
    k = tl.load(keep + b * keep_stride).to(tl.float32) if HAS_KEEP else 1.0
    memory = tl.load(deter + b.to(tl.int64) * deter_stride + column, mask=inside, other=0.0) * k
    u = tl.sigmoid(update - 1.0)
    new = memory + u * (_tanh(tl.sigmoid(reset) * candidate) - memory)
    tl.store(out + b.to(tl.int64) * W + column, new, mask=inside)
    tl.store(out_low + b.to(tl.int64) * low_stride + column, new.to(out_low.dtype.element_ty), mask=inside)


def _gates_cuda(
    raw: torch.Tensor,
    bias: torch.Tensor,
    deter: torch.Tensor,
    keep: torch.Tensor | None,
    out_low: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, size = deter.shape
    out = torch.empty((batch, size), dtype=torch.float32, device=raw.device)
    if out_low is None:
        out_low = torch.empty((batch, size), dtype=raw.dtype, device=raw.device)
    _gates_kernel[(batch, cdiv(size, ELEMENTS))](
        raw, bias, deter, deter if keep is None else keep, out, out_low,
        batch, deter.stride(0), 0 if keep is None else keep.stride(0), out_low.stride(0),
        W=size, D=size // raw.shape[0], BLOCK=ELEMENTS, HAS_KEEP=keep is not None, num_warps=4,
    )  # fmt: skip
    return out, out_low


@jit
def _gates_backward_kernel(
    raw, bias, deter, keep, outside, product, carry, entered, keep_after, g_raw, kept,
    batch, deter_stride, keep_stride, outside_stride, after_stride, E,
    W: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < W
    block, j = column // D, column % D
    row = b.to(tl.int64) * W + column
    g = tl.load(outside + b.to(tl.int64) * outside_stride + column, mask=inside, other=0.0).to(tl.float32)
    g += tl.load(product + row, mask=inside, other=0.0).to(tl.float32)
    if not LAST:
        part = tl.load(entered + (block * batch + b).to(tl.int64) * E + j, mask=inside, other=0.0).to(
            tl.float32
        )
        part += tl.load(carry + row, mask=inside, other=0.0)
        g += tl.load(keep_after + b * after_stride).to(tl.float32) * part
    at = (block * batch + b).to(tl.int64) * (3 * D) + j
    bias_at = block * (3 * D) + j
    reset = tl.load(raw + at, mask=inside, other=0.0).to(tl.float32) + tl.load(
        bias + bias_at, mask=inside, other=0.0
    )
    candidate = tl.load(raw + at + D, mask=inside, other=0.0).to(tl.float32)
    candidate += tl.load(bias + bias_at + D, mask=inside, other=0.0)
    update = tl.load(raw + at + 2 * D, mask=inside, other=0.0).to(tl.float32)
    update += tl.load(bias + bias_at + 2 * D, mask=inside, other=0.0)
    k = tl.load(keep + b * keep_stride).to(tl.float32)
    memory = tl.load(deter + b.to(tl.int64) * deter_stride + column, mask=inside, other=0.0) * k
    r = tl.sigmoid(reset)
    u = tl.sigmoid(update - 1.0)
    c = _tanh(r * candidate)
    inner = g * u * (1.0 - c * c)
    tl.store(g_raw + at, (inner * candidate * r * (1.0 - r)).to(g_raw.dtype.element_ty), mask=inside)
    tl.store(g_raw + at + D, (inner * r).to(g_raw.dtype.element_ty), mask=inside)
    tl.store(g_raw + at + 2 * D, (g * (c - memory) * u * (1.0 - u)).to(g_raw.dtype.element_ty), mask=inside)
    tl.store(kept + row, g * (1.0 - u), mask=inside)


def _gates_backward_cuda(
    raw: torch.Tensor,
    bias: torch.Tensor,
    deter: torch.Tensor,
    keep: torch.Tensor,
    outside: torch.Tensor,
    product: torch.Tensor,
    carry: torch.Tensor | None,
    entered: torch.Tensor | None,
    keep_after: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, size = deter.shape
    g_raw = torch.empty_like(raw)
    kept = torch.empty((batch, size), dtype=torch.float32, device=raw.device)
    last = carry is None
    _gates_backward_kernel[(batch, cdiv(size, ELEMENTS))](
        raw, bias, deter, keep, outside, product, raw if last else carry, raw if last else entered,
        keep if last else keep_after, g_raw, kept, batch, deter.stride(0), keep.stride(0), outside.stride(0),
        0 if keep_after is None else keep_after.stride(0), 0 if entered is None else entered.shape[-1],
        W=size, D=size // raw.shape[0], BLOCK=ELEMENTS, LAST=last, num_warps=4,
    )  # fmt: skip
    return g_raw, kept
