"""Triton kernels of norm_activate.py. Imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rl_lab.components.nn.kernels.row_tiles import row_tiles

PARTIALS = 256  # programs of a member that each sum the parameters' gradients over their share of the rows
LARGE = 20.0  # from here on tanh(softplus(u)) is 1 in float32


@triton.jit
def _normed(x, bias, at, member, column, mask, inside, F: tl.constexpr, eps, HAS_BIAS: tl.constexpr):  # fmt: skip
    z = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias + member * F + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    mean = tl.sum(z, 1) / F
    z = tl.where(inside[None, :], z - mean[:, None], 0.0)
    r = tl.rsqrt(tl.sum(z * z, 1) / F + eps)[:, None]
    return z * r, r


@triton.jit
def _forward_kernel(
    x, bias, scale, shift, out, rows, out_stride, scale_stride, eps, LARGE: tl.constexpr,
    F: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr, MISH: tl.constexpr,
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
    if MISH:
        e = tl.exp(tl.minimum(u, LARGE))
        y = u * (e * (e + 2.0) / (e * (e + 2.0) + 2.0))
    else:
        groups = tl.reshape(u, (ROWS, BLOCK // GROUP, GROUP))
        e = tl.exp(groups - tl.max(groups, 2, keep_dims=True))
        y = tl.reshape(e / tl.sum(e, 2, keep_dims=True), (ROWS, BLOCK))
    to = (member * rows + row[:, None]).to(tl.int64) * out_stride + column[None, :]
    tl.store(out + to, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    grad, x, bias, scale, shift, gx, partial, rows, eps, LARGE: tl.constexpr,
    F: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr, MISH: tl.constexpr,
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
        if MISH:
            e = tl.exp(tl.minimum(u, LARGE))
            t = e * (e + 2.0) / (e * (e + 2.0) + 2.0)
            gu = g * (t + u * (1.0 - t * t) * tl.sigmoid(u))
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


def forward(
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
    _forward_kernel[(triton.cdiv(rows, many), members)](
        x, x if bias is None else bias, scale, shift, out, rows, out.stride(1),
        features if len(scale) == members else 0, eps, LARGE,
        F=features, BLOCK=block, ROWS=many, GROUP=group, HAS_BIAS=bias is not None, MISH=activation == "mish",
        num_warps=warps,
    )  # fmt: skip
    return out


def backward(
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
    programs = min(PARTIALS, triton.cdiv(rows, many))
    partial = torch.empty((members, programs, 3, features), dtype=torch.float32, device=x.device)
    _backward_kernel[(programs, members)](
        grad, x, x if bias is None else bias, scale, shift, gx, partial, rows, eps, LARGE,
        F=features, BLOCK=block, ROWS=many, GROUP=group, HAS_BIAS=bias is not None, MISH=activation == "mish",
        num_warps=warps,
    )  # fmt: skip
    return gx, partial.sum(1)
