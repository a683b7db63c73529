"""x + dropout(y), and LayerNorm of it in the dtype of the product that follows: between two parts of a transformer.

Sums are float32. The backward pass computes the norm and dropout's mask again instead of storing them; it needs only the
sum, which the next residual keeps anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rl_lab.components.kernels.dropout import dropout_scale, kept
from rl_lab.components.kernels.triton_jit import cdiv, jit, row_tiles, tl

PARTIALS = 512  # programs that each sum the parameters' gradients over their share of the rows


def residual_norm_forward(
    x: torch.Tensor,  # (…, F)
    y: torch.Tensor | None,  # (…, F)
    weight: torch.Tensor,  # (F,)
    bias: torch.Tensor,  # (F,)
    eps: float,
    dtype: torch.dtype,
    rate: float = 0.0,
    word: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum in x's dtype (x itself without y), and its norm in `dtype`. word: dropout's seed; None: no dropout."""
    if x.is_cuda:
        return _residual_norm_cuda(x, y, weight, bias, eps, dtype, rate, word)
    if y is not None:
        y = y.float() if word is None else y.float() * kept(tuple(y.shape), rate, word)
        x = (x.float() + y).to(x.dtype)
    return x, nn.functional.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps).to(dtype)


def residual_norm_backward(
    grad_sum: torch.Tensor | None,  # (…, F)
    grad: torch.Tensor,  # (…, F) of the norm
    total: torch.Tensor,  # (…, F) the sum
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    rate: float = 0.0,
    word: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x (x's dtype), of y (`dtype`), and float32 ones of weight and bias, (2, F)."""
    if total.is_cuda:
        return _residual_norm_backward_cuda(grad_sum, grad, total, weight, eps, dtype, rate, word)
    centered = total.float() - total.float().mean(-1, keepdim=True)
    r = torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    n, g = centered * r, grad.float()
    gn = g * weight.float()
    gx = r * (gn - gn.mean(-1, keepdim=True) - n * (gn * n).mean(-1, keepdim=True))
    if grad_sum is not None:
        gx = gx + grad_sum.float()
    gy = gx if word is None else gx * kept(tuple(gx.shape), rate, word)
    parameters = torch.stack([(g * n).flatten(0, -2).sum(0), g.flatten(0, -2).sum(0)])
    return gx.to(total.dtype), gy.to(dtype), parameters


class ResidualNorm(torch.autograd.Function):
    """`residual_norm_forward` with its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        y: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        dtype: torch.dtype,
        rate: float,
        word: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total, normed = residual_norm_forward(x, y, weight, bias, eps, dtype, rate, word)
        ctx.save_for_backward(total, weight, word)
        ctx.settings = (eps, y.dtype, rate)
        ctx.set_materialize_grads(False)  # the last sum gets no gradient
        return total, normed

    @staticmethod
    def backward(
        ctx: Any, grad_sum: torch.Tensor | None, grad: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        total, weight, word = ctx.saved_tensors
        eps, dtype, rate = ctx.settings
        if grad is None:
            grad = torch.zeros_like(total)
        gx, gy, parameters = residual_norm_backward(grad_sum, grad, total, weight, eps, dtype, rate, word)
        gweight, gbias = parameters.to(weight.dtype)
        return gx, gy, gweight, gbias, None, None, None, None


def residual_norm(
    x: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    rate: float = 0.0,
    word: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `residual_norm_forward`, differentiable."""
    total, normed = ResidualNorm.apply(x, y, weight, bias, eps, dtype, rate, word)
    return total, normed


@jit
def _residual_norm_kernel(
    x, y, weight, bias, total, out, word, rows, eps, rate,
    F: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < F
    mask = (row[:, None] < rows) & inside[None, :]
    at = row[:, None].to(tl.int64) * F + column[None, :]
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    b = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    z = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        add = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
        if DROP:
            add = add * dropout_scale(row[:, None] * F + column[None, :], word, rate)
        z = z + add
        tl.store(total + at, z.to(total.dtype.element_ty), mask=mask)
    mean = tl.sum(z, 1) / F
    z = tl.where(inside[None, :], z - mean[:, None], 0.0)
    r = tl.rsqrt(tl.sum(z * z, 1) / F + eps)[:, None]
    tl.store(out + at, (z * r * w + b).to(out.dtype.element_ty), mask=mask)


@jit
def _residual_norm_backward_kernel(
    grad_sum, grad, total, weight, gx, gy, partial, word, rows, eps, rate,
    F: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < F
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    sum_weight = tl.zeros((BLOCK,), tl.float32)
    sum_bias = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row[:, None] < rows) & inside[None, :]
        at = row[:, None].to(tl.int64) * F + column[None, :]
        z = tl.load(total + at, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        mean = tl.sum(z, 1) / F
        z = tl.where(inside[None, :], z - mean[:, None], 0.0)
        r = tl.rsqrt(tl.sum(z * z, 1) / F + eps)[:, None]
        n = z * r
        gn = g * w
        result = r * (gn - (tl.sum(gn, 1) / F)[:, None] - n * (tl.sum(gn * n, 1) / F)[:, None])
        if ADD:
            result += tl.load(grad_sum + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(gx + at, result.to(gx.dtype.element_ty), mask=mask)
        if DROP:
            result = result * dropout_scale(row[:, None] * F + column[None, :], word, rate)
        tl.store(gy + at, result.to(gy.dtype.element_ty), mask=mask)
        sum_weight += tl.sum(g * n, 0)
        sum_bias += tl.sum(g, 0)
    to = (tl.program_id(0) * 2).to(tl.int64) * F + column  # (programs, 2, F)
    tl.store(partial + to, sum_weight, mask=inside)
    tl.store(partial + to + F, sum_bias, mask=inside)


def _residual_norm_cuda(
    x: torch.Tensor,
    y: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    rate: float,
    word: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.contiguous()
    add = x if y is None else y.contiguous()
    features = x.shape[-1]
    rows = x.numel() // features
    total = x if y is None else torch.empty_like(x)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    block, many, warps = row_tiles(rows, features)
    _residual_norm_kernel[(cdiv(rows, many),)](
        x, add, weight, bias, total, out, x if word is None else word, rows, eps, rate,
        F=features, BLOCK=block, ROWS=many, ADD=y is not None, DROP=word is not None, num_warps=warps,
    )  # fmt: skip
    return total, out


def _residual_norm_backward_cuda(
    grad_sum: torch.Tensor | None,
    grad: torch.Tensor,
    total: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    rate: float,
    word: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad = grad.contiguous()
    more = grad if grad_sum is None else grad_sum.contiguous()
    features = total.shape[-1]
    rows = total.numel() // features
    gx, gy = torch.empty_like(total), torch.empty(total.shape, dtype=dtype, device=total.device)
    block, many, warps = row_tiles(rows, features)
    programs = min(PARTIALS, cdiv(rows, many))
    partial = torch.empty((programs, 2, features), dtype=torch.float32, device=total.device)
    _residual_norm_backward_kernel[(programs,)](
        more, grad, total, weight, gx, gy, partial, grad if word is None else word, rows, eps, rate,
        F=features, BLOCK=block, ROWS=many, ADD=grad_sum is not None, DROP=word is not None, num_warps=warps,
    )  # fmt: skip
    return gx, gy, partial.sum(0)
