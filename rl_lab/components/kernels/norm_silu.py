"""SiLU(RMSNorm(x + bias)): after every linear and convolution layer.

Rows are (rows, features). Arithmetic is float32; results have x's dtype. The backward pass computes the norm again
instead of storing it: both directions read each row once.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_lab.components.kernels.triton_jit import cdiv, jit, next_power_of_2, tl

PARTIALS = 512  # programs that each sum the parameters' gradients over their share of the rows


def norm_silu_forward(
    x: torch.Tensor, bias: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """x: (R, F), contiguous rows; bias: (F,) or (R, F) or None; weight: (F,) -> (R, F)."""
    if x.is_cuda:
        return _norm_silu_cuda(x, bias, weight, eps)
    z = x.float() if bias is None else x.float() + bias.float()
    n = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps) * weight
    return (n * torch.sigmoid(n)).to(x.dtype)


def norm_silu_backward(
    grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x (R, F), of the weight (F,) and of a (F,) bias, from that of the result."""
    if x.is_cuda:
        return _norm_silu_backward_cuda(grad, x, bias, weight, eps)
    z = x.float() if bias is None else x.float() + bias.float()
    gz, gn_normed = norm_silu_gradient(grad.float(), z, weight, eps)
    return gz.to(x.dtype), gn_normed.sum(0), gz.sum(0)


def norm_silu_input_gradient(
    grad: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,  # (R, F), rows may be strided
) -> torch.Tensor:
    """Only the gradient of x, written to `out`: inside a scan the parameters' gradients are computed once, after it."""
    if x.is_cuda:
        return _norm_silu_backward_cuda(grad, x, bias, weight, eps, out, parameters=False)[0]
    z = x.float() if bias is None else x.float() + bias.float()
    return out.copy_(norm_silu_gradient(grad.float(), z, weight, eps)[0])


def norm_silu_gradient(
    grad: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 gradients of z, and per row of the weight; the definition that the kernels are held to."""
    r = torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    n = z * r * weight
    s = torch.sigmoid(n)
    gn = grad * s * (1.0 + n * (1.0 - s))
    gw = gn * weight
    gz = r * gw - z * (r * r * r) * (gw * z).mean(-1, keepdim=True)
    return gz, gn * z * r


class NormSiLU(torch.autograd.Function):
    """`norm_silu_forward` with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        ctx.save_for_backward(x, bias, weight)
        ctx.eps = eps
        return norm_silu_forward(x, bias, weight, eps)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, bias, weight = ctx.saved_tensors
        gx, gweight, gbias = norm_silu_backward(grad.contiguous(), x, bias, weight, ctx.eps)
        return gx, None if bias is None else gbias, gweight, None


def norm_silu(
    x: torch.Tensor, weight: torch.Tensor, eps: float, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x: (…, F), bias: (F,) or None -> (…, F), differentiable."""
    shape = x.shape
    rows = x.reshape(-1, shape[-1])
    result: torch.Tensor = NormSiLU.apply(rows, bias, weight, eps)
    return result.view(shape)


@jit
def _norm_silu_kernel(
    x, bias, weight, out, rows, x_stride, bias_stride, out_stride, eps,
    F: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row[:, None] < rows) & (column[None, :] < F)
    z = tl.load(x + row[:, None].to(tl.int64) * x_stride + column[None, :], mask=mask, other=0.0).to(
        tl.float32
    )
    if HAS_BIAS:
        at = row[:, None].to(tl.int64) * bias_stride + column[None, :]
        z += tl.load(bias + at, mask=mask, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(z * z, 1) / F + eps)
    w = tl.load(weight + column, mask=column < F, other=0.0).to(tl.float32)
    n = z * r[:, None] * w[None, :]
    y = n * tl.sigmoid(n)
    tl.store(
        out + row[:, None].to(tl.int64) * out_stride + column[None, :], y.to(out.dtype.element_ty), mask=mask
    )


@jit
def _norm_silu_backward_kernel(
    grad, x, bias, weight, gx, gweight, gbias, rows, grad_stride, x_stride, bias_stride, gx_stride, eps,
    F: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, PARAMETERS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < F
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    sum_weight = tl.zeros((BLOCK,), tl.float32)
    sum_bias = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row[:, None] < rows) & inside[None, :]
        long = row[:, None].to(tl.int64)
        z = tl.load(x + long * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            z += tl.load(bias + long * bias_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad + long * grad_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(z * z, 1) / F + eps)[:, None]
        n = z * r * w[None, :]
        s = tl.sigmoid(n)
        gn = g * s * (1.0 + n * (1.0 - s))
        gw = gn * w[None, :]
        gz = r * gw - z * (r * r * r) * (tl.sum(gw * z, 1) / F)[:, None]
        tl.store(gx + long * gx_stride + column[None, :], gz.to(gx.dtype.element_ty), mask=mask)
        if PARAMETERS:
            sum_weight += tl.sum(tl.where(mask, gn * z * r, 0.0), 0)
            sum_bias += tl.sum(tl.where(mask, gz, 0.0), 0)
    if PARAMETERS:
        at = tl.program_id(0) * F + column
        tl.store(gweight + at, sum_weight, mask=inside)
        tl.store(gbias + at, sum_bias, mask=inside)


@jit
def _sum_partials_kernel(partial, out, programs, F: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    which = tl.program_id(1)  # weight, bias
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row[:, None] < programs) & (column[None, :] < F)
        total += tl.load(
            partial + (which * programs + row[:, None]) * F + column[None, :], mask=mask, other=0.0
        )
    tl.store(out + which * F + column, tl.sum(total, 0), mask=column < F)


def _tiles(features: int) -> tuple[int, int, int]:
    """Padded width, rows a program handles at once, warps."""
    block = next_power_of_2(features)
    rows = max(1, 2048 // block)
    return block, rows, 4 if block * rows <= 2048 else 8


def _norm_silu_cuda(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,  # rows may be strided
) -> torch.Tensor:
    rows, features = x.shape
    out = torch.empty((rows, features), dtype=x.dtype, device=x.device) if out is None else out
    block, group, warps = _tiles(features)
    if rows <= 4096:  # few rows: spread them over the chip
        group = 1
    bias_stride = 0 if bias is None or bias.ndim == 1 else bias.stride(0)
    _norm_silu_kernel[(cdiv(rows, group),)](
        x, x if bias is None else bias, weight, out, rows, x.stride(0), bias_stride, out.stride(0), eps,
        F=features, BLOCK=block, ROWS=group, HAS_BIAS=bias is not None, num_warps=warps,
    )  # fmt: skip
    return out


def _norm_silu_backward_cuda(
    grad: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    parameters: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, features = x.shape
    gx = torch.empty((rows, features), dtype=x.dtype, device=x.device) if out is None else out
    block, group, warps = _tiles(features)
    if rows <= 4096:
        group = 1
    programs = min(PARTIALS, cdiv(rows, group)) if parameters else cdiv(rows, group)
    partial = torch.empty((2, programs, features) if parameters else (2, 1, 1), device=x.device)
    bias_stride = 0 if bias is None or bias.ndim == 1 else bias.stride(0)
    _norm_silu_backward_kernel[(programs,)](
        grad, x, x if bias is None else bias, weight, gx, partial[0], partial[1], rows,
        grad.stride(0), x.stride(0), bias_stride, gx.stride(0), eps,
        F=features, BLOCK=block, ROWS=group, HAS_BIAS=bias is not None, PARAMETERS=parameters, num_warps=warps,
    )  # fmt: skip
    if not parameters:
        return gx, partial[0], partial[1]
    sums = torch.empty((2, features), device=x.device)
    _sum_partials_kernel[(cdiv(features, 32), 2)](partial, sums, programs, F=features, ROWS=128, BLOCK=32)
    return gx, sums[0], sums[1]
