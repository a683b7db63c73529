"""Triton kernels of group_norm_silu.py. Imported on CUDA only.

Two passes over a picture: sums of each channel, then the result. A picture is split among several programs when there
are few pictures; with many, one program makes both passes and finds the picture in the cache the second time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rl_lab.components.nn.kernels.group_norm_silu import TILE

ENOUGH = 512  # programs that keep the chip busy


@triton.jit
def _tile(x, pre, picture, start, end, C: tl.constexpr, ROWS: tl.constexpr, P, PRE: tl.constexpr):  # fmt: skip
    """Numbers of some places, with what is added to each channel before; places beyond the end are 0."""
    row, channel = start + tl.arange(0, ROWS), tl.arange(0, C)
    at = (picture.to(tl.int64) * P + row[:, None]) * C + channel[None, :]
    mask = (row < end)[:, None] & (channel < C)[None, :]
    z = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if PRE:
        z = tl.where(mask, z + tl.load(pre + channel).to(tl.float32)[None, :], 0.0)
    return z, at, mask


@triton.jit
def _spread(value, C: tl.constexpr, G: tl.constexpr):
    """A number of each group -> of each channel."""
    return tl.reshape(tl.broadcast_to(value[:, None], (G, C // G)), (C,))


@triton.jit
def _forward_sums(x, pre, sums, P, share, C: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, PRE: tl.constexpr):  # fmt: skip
    picture, part = tl.program_id(0), tl.program_id(1)
    end = tl.minimum(part * share + share, P)
    first, second = _sums_of(x, pre, picture, part * share, end, C, ROWS, P, PRE)
    to = ((picture * tl.num_programs(1) + part) * 2) * G + tl.arange(0, G)
    tl.store(sums + to, tl.sum(tl.reshape(first, (G, C // G)), 1))
    tl.store(sums + to + G, tl.sum(tl.reshape(second, (G, C // G)), 1))


@triton.jit
def _sums_of(x, pre, picture, begin, end, C: tl.constexpr, ROWS: tl.constexpr, P, PRE: tl.constexpr):  # fmt: skip
    first = tl.zeros((C,), tl.float32)
    second = tl.zeros((C,), tl.float32)
    for start in range(begin, end, ROWS):
        z, _, _ = _tile(x, pre, picture, start, end, C, ROWS, P, PRE)
        first += tl.sum(z, 0)
        second += tl.sum(z * z, 0)
    return first, second


@triton.jit
def _forward_result(
    x, pre, sums, weight, bias, out, moments, P, share, parts, eps, C: tl.constexpr, G: tl.constexpr,
    ROWS: tl.constexpr, SILU: tl.constexpr, WHOLE: tl.constexpr, PRE: tl.constexpr,
):  # fmt: skip
    picture, part = tl.program_id(0), tl.program_id(1)
    begin, end = part * share, tl.minimum(part * share + share, P)
    group = tl.arange(0, G)
    if WHOLE:
        one, two = _sums_of(x, pre, picture, begin, end, C, ROWS, P, PRE)
        first = tl.sum(tl.reshape(one, (G, C // G)), 1)
        second = tl.sum(tl.reshape(two, (G, C // G)), 1)
    else:
        first = tl.zeros((G,), tl.float32)
        second = tl.zeros((G,), tl.float32)
        for other in range(0, parts):
            at = ((picture * parts + other) * 2) * G + group
            first += tl.load(sums + at)
            second += tl.load(sums + at + G)
    count = P * (C // G)
    mean = first / count
    r = tl.rsqrt(tl.maximum(second / count - mean * mean, 0.0) + eps)
    if part == 0:
        tl.store(moments + picture * 2 * G + group, mean)
        tl.store(moments + picture * 2 * G + G + group, r)
    channel = tl.arange(0, C)
    w = tl.load(weight + channel).to(tl.float32) * _spread(r, C, G)
    b = tl.load(bias + channel).to(tl.float32) - w * _spread(mean, C, G)
    for start in range(begin, end, ROWS):
        z, at, mask = _tile(x, pre, picture, start, end, C, ROWS, P, PRE)
        u = z * w[None, :] + b[None, :]
        y = u * tl.sigmoid(u) if SILU else u
        tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _inner(
    x, pre, grad, picture, start, end, mean, r, w, b, C: tl.constexpr, ROWS: tl.constexpr, P,
    SILU: tl.constexpr, PRE: tl.constexpr,
):  # fmt: skip
    """Normed numbers and the gradient before weight and bias, of one tile."""
    z, at, mask = _tile(x, pre, picture, start, end, C, ROWS, P, PRE)
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    n = tl.where(mask, (z - mean[None, :]) * r[None, :], 0.0)
    if SILU:
        u = n * w[None, :] + b[None, :]
        s = tl.sigmoid(u)
        g = g * s * (1.0 + u * (1.0 - s))
    return n, g, at, mask


@triton.jit
def _gradient_sums_of(
    x, pre, grad, sums, to, picture, begin, end, mean, r, w, b, C: tl.constexpr, ROWS: tl.constexpr, P,
    SILU: tl.constexpr, PRE: tl.constexpr,
):  # fmt: skip
    """Sums over some places, of each channel; also stored: over all pictures they are the parameters' gradients."""
    sum_gn = tl.zeros((C,), tl.float32)
    sum_g = tl.zeros((C,), tl.float32)
    for start in range(begin, end, ROWS):
        n, g, _, _ = _inner(x, pre, grad, picture, start, end, mean, r, w, b, C, ROWS, P, SILU, PRE)
        sum_gn += tl.sum(g * n, 0)
        sum_g += tl.sum(g, 0)
    tl.store(sums + to, sum_gn)
    tl.store(sums + to + C, sum_g)
    return sum_gn, sum_g


@triton.jit
def _backward_sums(
    x, pre, grad, moments, weight, bias, sums, P, share,
    C: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, SILU: tl.constexpr, PRE: tl.constexpr,
):  # fmt: skip
    picture, part = tl.program_id(0), tl.program_id(1)
    begin, end = part * share, tl.minimum(part * share + share, P)
    channel, group = tl.arange(0, C), tl.arange(0, G)
    mean = _spread(tl.load(moments + picture * 2 * G + group), C, G)
    r = _spread(tl.load(moments + picture * 2 * G + G + group), C, G)
    w, b = tl.load(weight + channel).to(tl.float32), tl.load(bias + channel).to(tl.float32)
    to = ((picture * tl.num_programs(1) + part) * 2).to(tl.int64) * C + channel
    _gradient_sums_of(x, pre, grad, sums, to, picture, begin, end, mean, r, w, b, C, ROWS, P, SILU, PRE)


@triton.jit
def _backward_result(
    x, pre, grad, moments, weight, bias, sums, gx, before, P, share, parts, C: tl.constexpr, G: tl.constexpr,
    ROWS: tl.constexpr, SILU: tl.constexpr, WHOLE: tl.constexpr, PRE: tl.constexpr,
):  # fmt: skip
    picture, part = tl.program_id(0), tl.program_id(1)
    begin, end = part * share, tl.minimum(part * share + share, P)
    channel, group = tl.arange(0, C), tl.arange(0, G)
    mean = _spread(tl.load(moments + picture * 2 * G + group), C, G)
    r = _spread(tl.load(moments + picture * 2 * G + G + group), C, G)
    w, b = tl.load(weight + channel).to(tl.float32), tl.load(bias + channel).to(tl.float32)
    if WHOLE:
        to = (picture * 2).to(tl.int64) * C + channel
        sum_gn, sum_g = _gradient_sums_of(
            x, pre, grad, sums, to, picture, begin, end, mean, r, w, b, C, ROWS, P, SILU, PRE
        )
    else:
        sum_gn = tl.zeros((C,), tl.float32)
        sum_g = tl.zeros((C,), tl.float32)
        for other in range(0, parts):
            at = ((picture * parts + other) * 2).to(tl.int64) * C + channel
            sum_gn += tl.load(sums + at)
            sum_g += tl.load(sums + at + C)
    count = P * (C // G)
    of_n = _spread(tl.sum(tl.reshape(sum_gn * w, (G, C // G)), 1) / count, C, G)
    of_one = _spread(tl.sum(tl.reshape(sum_g * w, (G, C // G)), 1) / count, C, G)
    sum_gx = tl.zeros((C,), tl.float32)
    for start in range(begin, end, ROWS):
        n, g, at, mask = _inner(x, pre, grad, picture, start, end, mean, r, w, b, C, ROWS, P, SILU, PRE)
        result = r[None, :] * (g * w[None, :] - of_one[None, :] - n * of_n[None, :])
        tl.store(gx + at, result.to(gx.dtype.element_ty), mask=mask)
        if PRE:
            sum_gx += tl.sum(tl.where(mask, result, 0.0), 0)
    if PRE:
        tl.store(before + (picture * parts + part).to(tl.int64) * C + channel, sum_gx)


def _shape(pictures: int, places: int, channels: int) -> tuple[int, int, int, int]:
    """Rows of a tile, parts that a picture is split into, places of a part, warps."""
    rows = max(1, min(TILE // channels, triton.next_power_of_2(places)))
    most = triton.cdiv(places, rows)
    parts = max(1, min(most, ENOUGH // max(1, pictures)))
    share = triton.cdiv(most, parts) * rows
    return rows, triton.cdiv(places, share), share, 8 if rows * channels >= 2048 else 4


def forward(
    x: torch.Tensor,
    pre: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    groups: int,
    eps: float,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    pictures, places, channels = x.shape
    out = torch.empty_like(x)
    moments = torch.empty((pictures, 2, groups), dtype=torch.float32, device=x.device)
    rows, parts, share, warps = _shape(pictures, places, channels)
    sums = moments
    if parts > 1:
        sums = torch.empty((pictures, parts, 2, groups), dtype=torch.float32, device=x.device)
        _forward_sums[(pictures, parts)](
            x, x if pre is None else pre, sums, places, share,
            C=channels, G=groups, ROWS=rows, PRE=pre is not None, num_warps=warps,
        )  # fmt: skip
    _forward_result[(pictures, parts)](
        x, x if pre is None else pre, sums, weight, bias, out, moments, places, share, parts, eps,
        C=channels, G=groups, ROWS=rows, SILU=silu, WHOLE=parts == 1, PRE=pre is not None, num_warps=warps,
    )  # fmt: skip
    return out, moments


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    pre: torch.Tensor | None,
    moments: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    pictures, places, channels = x.shape
    groups = moments.shape[2]
    gx = torch.empty_like(x)
    rows, parts, share, warps = _shape(pictures, places, channels)
    sums = torch.empty((pictures, parts, 2, channels), dtype=torch.float32, device=x.device)
    grid = (pictures, parts)
    if parts > 1:
        _backward_sums[grid](
            x, x if pre is None else pre, grad, moments, weight, bias, sums, places, share,
            C=channels, G=groups, ROWS=rows, SILU=silu, PRE=pre is not None, num_warps=warps,
        )  # fmt: skip
    before = sums if pre is None else torch.empty((*grid, channels), dtype=torch.float32, device=x.device)
    _backward_result[grid](
        x, x if pre is None else pre, grad, moments, weight, bias, sums, gx, before, places, share, parts,
        C=channels, G=groups, ROWS=rows, SILU=silu, WHOLE=parts == 1, PRE=pre is not None, num_warps=warps,
    )  # fmt: skip
    return gx, sums.sum((0, 1)), None if pre is None else before.sum((0, 1))
