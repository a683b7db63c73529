"""Activation(LayerNorm(x + bias) · scale + shift): after every layer of TD-MPC's networks, and of earlier Dreamers'.

Rows are (members, rows, features): an ensemble has a bias, scale and shift for each member, a single network is an
ensemble of one. Activations: `mish`, `silu`, `elu`, or `simnorm` (softmax in groups of neighbours). Arithmetic is
float32; the backward pass computes the norm again instead of storing it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rl_lab.components.kernels.triton_jit import cdiv, jit, row_tiles, tl

PARTIALS = 256  # programs of a member that each sum the parameters' gradients over their share of the rows

ACTIVATIONS = {"simnorm": 0, "mish": 1, "silu": 2, "elu": 3}  # numbers in the kernels

LARGE = 20.0  # from here on tanh(softplus(u)) is 1 in float32


def norm_activate_forward(
    x: torch.Tensor,  # (E, R, F)
    bias: torch.Tensor | None,  # (E, F)
    scale: torch.Tensor,  # (E, F), or (1, F) for all
    shift: torch.Tensor,  # as scale
    eps: float,
    activation: str,
    group: int,
    out: torch.Tensor | None = None,  # (E, R, F), may be x; rows may be strided
) -> torch.Tensor:
    """-> (E, R, F) in x's dtype."""
    if x.is_cuda:
        return _norm_activate_cuda(x, bias, scale, shift, eps, activation, group, out)
    z = x.float() if bias is None else x.float() + bias.float().unsqueeze(1)
    normed = nn.functional.layer_norm(z, z.shape[-1:], None, None, eps)
    u = torch.addcmul(shift.float().unsqueeze(1), normed, scale.float().unsqueeze(1))
    if activation == "simnorm":
        y = torch.softmax(u.unflatten(-1, (-1, group)), -1).flatten(-2)
    else:
        y = getattr(nn.functional, activation)(u)
    return y.to(x.dtype) if out is None else out.copy_(y)


def norm_activate_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    activation: str,
    group: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of x (E, R, F), and float32 ones of bias, scale and shift, (E, 3, F)."""
    if x.is_cuda:
        return _norm_activate_backward_cuda(grad, x, bias, scale, shift, eps, activation, group)
    z = x.float() if bias is None else x.float() + bias.float().unsqueeze(1)
    centered = z - z.mean(-1, keepdim=True)
    r = torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    n, g = centered * r, grad.float()
    u = torch.addcmul(shift.float().unsqueeze(1), n, scale.float().unsqueeze(1))
    if activation == "mish":
        t = torch.tanh(nn.functional.softplus(u))
        gu = g * (t + u * (1.0 - t * t) * torch.sigmoid(u))
    elif activation == "silu":
        t = torch.sigmoid(u)
        gu = g * t * (1.0 + u * (1.0 - t))
    elif activation == "elu":
        gu = g * torch.exp(u.clamp(max=0.0))
    else:
        y, gy = torch.softmax(u.unflatten(-1, (-1, group)), -1), g.unflatten(-1, (-1, group))
        gu = (y * (gy - (gy * y).sum(-1, keepdim=True))).flatten(-2)
    gn = gu * scale.float().unsqueeze(1)
    gz = r * (gn - gn.mean(-1, keepdim=True) - n * (gn * n).mean(-1, keepdim=True))
    return gz.to(x.dtype), torch.stack([gz.sum(1), (gu * n).sum(1), gu.sum(1)], 1)


class NormActivate(torch.autograd.Function):
    """`norm_activate_forward` with its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        scale: torch.Tensor,
        shift: torch.Tensor,
        eps: float,
        activation: str,
        group: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, bias, scale, shift)
        ctx.settings = (eps, activation, group)
        return norm_activate_forward(x, bias, scale, shift, eps, activation, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, bias, scale, shift = ctx.saved_tensors
        gx, parameters = norm_activate_backward(grad.contiguous(), x, bias, scale, shift, *ctx.settings)
        gbias, gscale, gshift = parameters.unbind(1)
        return gx, None if bias is None else gbias, gscale, gshift, None, None, None


def fused_norm_activate(
    x: torch.Tensor,  # (E, R, F)
    bias: torch.Tensor | None,  # (E, F)
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    activation: str,
    group: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Differentiable, unless the result is to go to `out`. -> (E, R, F)."""
    if torch.is_grad_enabled():
        assert out is None, "a result that is written to `out` has no gradient"
        result: torch.Tensor = NormActivate.apply(x, bias, scale, shift, eps, activation, group)
        return result
    return norm_activate_forward(x, bias, scale, shift, eps, activation, group, out)


def norm_activate_rows(
    x: torch.Tensor,  # (…, F)
    bias: torch.Tensor | None,  # (F,)
    scale: torch.Tensor,  # (F,)
    shift: torch.Tensor,  # (F,)
    eps: float,
    activation: str,
) -> torch.Tensor:
    """`fused_norm_activate` of one network, for any number of axes. -> (…, F)."""
    rows = x.reshape(1, -1, x.shape[-1])
    given = (None if bias is None else bias[None], scale[None], shift[None])
    return fused_norm_activate(rows, *given, eps, activation).view(x.shape)


@jit
def _normed(x, bias, at, member, column, mask, inside, F: tl.constexpr, eps, HAS_BIAS: tl.constexpr):  # fmt: skip
    z = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias + member * F + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    mean = tl.sum(z, 1) / F
    z = tl.where(inside[None, :], z - mean[:, None], 0.0)
    r = tl.rsqrt(tl.sum(z * z, 1) / F + eps)[:, None]
    return z * r, r


@jit
def _norm_activate_kernel(
    x, bias, scale, shift, out, rows, out_stride, scale_stride, eps, LARGE: tl.constexpr,
    F: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < F
    mask = (row[:, None] < rows) & inside[None, :]
    at = (member * rows + row[:, None]).to(tl.int64) * F + column[None, :]
    n, _ = _normed(x, bias, at, member, column, mask, inside, F, eps, HAS_BIAS)
    w = tl.load(scale + member * scale_stride + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(shift + member * scale_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = n * w[None, :] + b[None, :]
    if ACTIVATION == 1:  # mish
        e = tl.exp(tl.minimum(u, LARGE))
        y = u * (e * (e + 2.0) / (e * (e + 2.0) + 2.0))
    elif ACTIVATION == 2:  # silu
        y = u * tl.sigmoid(u)
    elif ACTIVATION == 3:  # elu
        y = tl.where(u > 0.0, u, tl.exp(tl.minimum(u, 0.0)) - 1.0)
    else:
        groups = tl.reshape(u, (ROWS, BLOCK // GROUP, GROUP))
        e = tl.exp(groups - tl.max(groups, 2, keep_dims=True))
        y = tl.reshape(e / tl.sum(e, 2, keep_dims=True), (ROWS, BLOCK))
    to = (member * rows + row[:, None]).to(tl.int64) * out_stride + column[None, :]
    tl.store(out + to, y.to(out.dtype.element_ty), mask=mask)


@jit
def _norm_activate_backward_kernel(
    grad, x, bias, scale, shift, gx, partial, rows, eps, LARGE: tl.constexpr,
    F: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < F
    w = tl.load(scale + member * F + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    b = tl.load(shift + member * F + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    sum_bias = tl.zeros((BLOCK,), tl.float32)
    sum_scale = tl.zeros((BLOCK,), tl.float32)
    sum_shift = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row[:, None] < rows) & inside[None, :]
        at = (member * rows + row[:, None]).to(tl.int64) * F + column[None, :]
        n, r = _normed(x, bias, at, member, column, mask, inside, F, eps, HAS_BIAS)
        g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        u = n * w + b
        if ACTIVATION == 1:  # mish
            e = tl.exp(tl.minimum(u, LARGE))
            t = e * (e + 2.0) / (e * (e + 2.0) + 2.0)
            gu = g * (t + u * (1.0 - t * t) * tl.sigmoid(u))
        elif ACTIVATION == 2:  # silu
            t = tl.sigmoid(u)
            gu = g * t * (1.0 + u * (1.0 - t))
        elif ACTIVATION == 3:  # elu
            gu = g * tl.exp(tl.minimum(u, 0.0))
        else:
            groups = tl.reshape(u, (ROWS, BLOCK // GROUP, GROUP))
            e = tl.exp(groups - tl.max(groups, 2, keep_dims=True))
            y = e / tl.sum(e, 2, keep_dims=True)
            gy = tl.reshape(g, (ROWS, BLOCK // GROUP, GROUP))
            gu = tl.reshape(y * (gy - tl.sum(gy * y, 2, keep_dims=True)), (ROWS, BLOCK))
        gu = tl.where(mask, gu, 0.0)
        gn = gu * w
        gz = r * (gn - (tl.sum(gn, 1) / F)[:, None] - n * (tl.sum(gn * n, 1) / F)[:, None])
        gz = tl.where(mask, gz, 0.0)
        tl.store(gx + at, gz.to(gx.dtype.element_ty), mask=mask)
        sum_bias += tl.sum(gz, 0)
        sum_scale += tl.sum(gu * n, 0)
        sum_shift += tl.sum(gu, 0)
    # (members, programs, 3, F)
    to = ((member * tl.num_programs(0) + tl.program_id(0)) * 3).to(tl.int64) * F + column
    tl.store(partial + to, sum_bias, mask=inside)
    tl.store(partial + to + F, sum_scale, mask=inside)
    tl.store(partial + to + 2 * F, sum_shift, mask=inside)


def _norm_activate_cuda(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    activation: str,
    group: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    x = x.contiguous()
    members, rows, features = x.shape
    out = torch.empty_like(x) if out is None else out
    block, many, warps = row_tiles(rows, features)
    _norm_activate_kernel[(cdiv(rows, many), members)](
        x, x if bias is None else bias, scale, shift, out, rows, out.stride(1),
        features if len(scale) == members else 0, eps, LARGE,
        F=features, BLOCK=block, ROWS=many, GROUP=group, HAS_BIAS=bias is not None, ACTIVATION=ACTIVATIONS[activation],
        num_warps=warps,
    )  # fmt: skip
    return out


def _norm_activate_backward_cuda(
    grad: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    activation: str,
    group: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.contiguous()
    members, rows, features = x.shape
    gx = torch.empty_like(x)
    block, many, warps = row_tiles(rows, features)
    programs = min(PARTIALS, cdiv(rows, many))
    partial = torch.empty((members, programs, 3, features), dtype=torch.float32, device=x.device)
    _norm_activate_backward_kernel[(programs, members)](
        grad, x, x if bias is None else bias, scale, shift, gx, partial, rows, eps, LARGE,
        F=features, BLOCK=block, ROWS=many, GROUP=group, HAS_BIAS=bias is not None, ACTIVATION=ACTIVATIONS[activation],
        num_warps=warps,
    )  # fmt: skip
    return gx, partial.sum(1)
