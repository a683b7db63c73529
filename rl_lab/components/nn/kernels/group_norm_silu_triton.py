"""Triton kernels of group_norm_silu.py. Imported on CUDA only.

A small picture is one program's: it reads it once and holds it. A larger one is split among many programs, and there are
two passes over it: the sums of each part, then the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rl_lab.components.nn.kernels.group_norm_silu import TILE

HELD = 4 * TILE  # numbers of a picture that one program can hold
ENOUGH = 1024  # programs that keep the chip busy
# Tiles of a part, at most: with more, fewer programs read the sums of all parts; with too many, registers run out.
FORWARD_TILES, BACKWARD_TILES = 4, 2
PARTS = 64  # at most, of a picture: each program reads the sums of all


@triton.jit
def _tile(x, pre, start, end, C: tl.constexpr, ROWS: tl.constexpr, PRE: tl.constexpr):
    """Numbers of some places of one picture, with what is added to each channel before; 0 beyond the end."""
    row, channel = start + tl.arange(0, ROWS), tl.arange(0, C)
    at = row[:, None] * C + channel[None, :]
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
def _grouped(value, C: tl.constexpr, G: tl.constexpr):
    """A number of each channel -> the sum of each group."""
    return tl.sum(tl.reshape(value, (G, C // G)), 1)


@triton.jit
def _all_parts(sums, parts, stride, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """(WIDTH,) numbers of each part of a picture, `stride` apart -> their sum over the parts."""
    part, column = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    mask = (part < parts)[:, None] & (column < WIDTH)[None, :]
    return tl.sum(tl.load(sums + part[:, None] * stride + column[None, :], mask=mask, other=0.0), 0)


@triton.jit
def _affine(first, second, weight, bias, moments, count, eps, store, C: tl.constexpr, G: tl.constexpr):
    """Sums of each group -> what each channel is multiplied with, and what is added; moments stored where `store`."""
    group, channel = tl.arange(0, G), tl.arange(0, C)
    mean = first / count
    r = tl.rsqrt(tl.maximum(second / count - mean * mean, 0.0) + eps)
    if store:
        tl.store(moments + group, mean)
        tl.store(moments + G + group, r)
    w = tl.load(weight + channel).to(tl.float32) * _spread(r, C, G)
    return w, tl.load(bias + channel).to(tl.float32) - w * _spread(mean, C, G)


@triton.jit
def _forward_whole(
    x, pre, weight, bias, out, moments, P, eps,
    C: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, SILU: tl.constexpr, PRE: tl.constexpr,
):  # fmt: skip
    picture = tl.program_id(0)
    base = picture.to(tl.int64) * P * C
    z, at, mask = _tile(x + base, pre, 0, P, C, ROWS, PRE)
    first, second = _grouped(tl.sum(z, 0), C, G), _grouped(tl.sum(z * z, 0), C, G)
    w, b = _affine(first, second, weight, bias, moments + picture * 2 * G, P * (C // G), eps, True, C, G)
    u = z * w[None, :] + b[None, :]
    y = u * tl.sigmoid(u) if SILU else u
    tl.store(out + base + at, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _forward_sums(
    x, pre, sums, P, C: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, PRE: tl.constexpr
):  # fmt: skip
    picture, part = tl.program_id(0), tl.program_id(1)
    x += picture.to(tl.int64) * P * C
    one = tl.zeros((ROWS, C), tl.float32)
    two = tl.zeros((ROWS, C), tl.float32)
    for tile in tl.static_range(TILES):
        z, _, _ = _tile(x, pre, (part * TILES + tile) * ROWS, P, C, ROWS, PRE)
        one += z
        two += z * z
    to = sums + (picture * tl.num_programs(1) + part) * 2 * G + tl.arange(0, G)
    tl.store(to, _grouped(tl.sum(one, 0), C, G))
    tl.store(to + G, _grouped(tl.sum(two, 0), C, G))


@triton.jit
def _forward_result(
    x, pre, sums, weight, bias, out, moments, P, parts, eps, C: tl.constexpr, G: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, PARTS: tl.constexpr, SILU: tl.constexpr, PRE: tl.constexpr,
):  # fmt: skip
    # Backwards: what the sums read last is still in the cache, and a convolution will begin with what is written last.
    picture, part = tl.num_programs(0) - 1 - tl.program_id(0), parts - 1 - tl.program_id(1)
    base = picture.to(tl.int64) * P * C
    sums += picture * parts * 2 * G
    first, second = _all_parts(sums, parts, 2 * G, G, PARTS), _all_parts(sums + G, parts, 2 * G, G, PARTS)
    moments += picture * 2 * G
    w, b = _affine(first, second, weight, bias, moments, P * (C // G), eps, part == 0, C, G)
    for tile in tl.static_range(TILES):
        z, at, mask = _tile(x + base, pre, (part * TILES + tile) * ROWS, P, C, ROWS, PRE)
        u = z * w[None, :] + b[None, :]
        y = u * tl.sigmoid(u) if SILU else u
        tl.store(out + base + at, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _inner(
    x, pre, grad, start, end, mean, r, w, b, C: tl.constexpr, ROWS: tl.constexpr, SILU: tl.constexpr,
    PRE: tl.constexpr,
):  # fmt: skip
    """Normed numbers and the gradient before weight and bias, of one tile."""
    z, at, mask = _tile(x, pre, start, end, C, ROWS, PRE)
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    n = tl.where(mask, (z - mean[None, :]) * r[None, :], 0.0)
    if SILU:
        u = n * w[None, :] + b[None, :]
        s = tl.sigmoid(u)
        g = g * s * (1.0 + u * (1.0 - s))
    return n, g, at, mask


@triton.jit
def _known(moments, weight, bias, picture, C: tl.constexpr, G: tl.constexpr):
    """Mean, inverse deviation, weight and bias of each channel."""
    channel, group = tl.arange(0, C), tl.arange(0, G)
    mean = _spread(tl.load(moments + picture * 2 * G + group), C, G)
    r = _spread(tl.load(moments + picture * 2 * G + G + group), C, G)
    return mean, r, tl.load(weight + channel).to(tl.float32), tl.load(bias + channel).to(tl.float32)


@triton.jit
def _store_gradients(to, sum_gn, sum_g, sum_n, of_n, of_one, r, w, P, C: tl.constexpr, PRE: tl.constexpr):
    """One picture's share of the gradients of weight, bias and `pre`: the last is the sum of x's over the places."""
    channel = tl.arange(0, C)
    tl.store(to + channel, sum_gn)
    tl.store(to + C + channel, sum_g)
    if PRE:
        tl.store(to + 2 * C + channel, r * (sum_g * w - P * of_one - sum_n * of_n))


@triton.jit
def _backward_whole(
    x, pre, grad, beside, moments, weight, bias, gx, parameters, P, C: tl.constexpr, G: tl.constexpr,
    ROWS: tl.constexpr, SILU: tl.constexpr, PRE: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    picture = tl.program_id(0)
    base = picture.to(tl.int64) * P * C
    mean, r, w, b = _known(moments, weight, bias, picture, C, G)
    n, g, at, mask = _inner(x + base, pre, grad + base, 0, P, mean, r, w, b, C, ROWS, SILU, PRE)
    sum_gn, sum_g, sum_n = tl.sum(g * n, 0), tl.sum(g, 0), tl.sum(n, 0)
    count = P * (C // G)
    of_n = _spread(_grouped(sum_gn * w, C, G) / count, C, G)
    of_one = _spread(_grouped(sum_g * w, C, G) / count, C, G)
    to = parameters + picture * (3 if PRE else 2) * C
    _store_gradients(to, sum_gn, sum_g, sum_n, of_n, of_one, r, w, P, C, PRE)
    result = r[None, :] * (g * w[None, :] - of_one[None, :] - n * of_n[None, :])
    if BESIDE:
        result += tl.load(beside + base + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(gx + base + at, result.to(gx.dtype.element_ty), mask=mask)


@triton.jit
def _backward_sums(
    x, pre, grad, moments, weight, bias, sums, of_groups, P, C: tl.constexpr, G: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, SILU: tl.constexpr, PRE: tl.constexpr,
):  # fmt: skip
    """Of each part, the sums that make the parameters' gradients, and two numbers of each group for x's."""
    picture, part = tl.program_id(0), tl.program_id(1)
    base = picture.to(tl.int64) * P * C
    mean, r, w, b = _known(moments, weight, bias, picture, C, G)
    all_gn = tl.zeros((ROWS, C), tl.float32)
    all_g = tl.zeros((ROWS, C), tl.float32)
    all_n = tl.zeros((ROWS, C), tl.float32)
    for tile in tl.static_range(TILES):
        start = (part * TILES + tile) * ROWS
        n, g, _, _ = _inner(x + base, pre, grad + base, start, P, mean, r, w, b, C, ROWS, SILU, PRE)
        all_gn += g * n
        all_g += g
        if PRE:
            all_n += n
    sum_gn, sum_g = tl.sum(all_gn, 0), tl.sum(all_g, 0)
    row = (picture * tl.num_programs(1) + part).to(tl.int64)
    to = sums + row * (3 if PRE else 2) * C + tl.arange(0, C)
    tl.store(to, sum_gn)
    tl.store(to + C, sum_g)
    if PRE:
        tl.store(to + 2 * C, tl.sum(all_n, 0))
    to = of_groups + row * 2 * G + tl.arange(0, G)
    tl.store(to, _grouped(sum_gn * w, C, G))
    tl.store(to + G, _grouped(sum_g * w, C, G))


@triton.jit
def _backward_result(
    x, pre, grad, beside, moments, weight, bias, sums, of_groups, gx, parameters, P, parts, C: tl.constexpr,
    G: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, PARTS: tl.constexpr, SILU: tl.constexpr,
    PRE: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    picture, part = tl.num_programs(0) - 1 - tl.program_id(0), parts - 1 - tl.program_id(1)
    base = picture.to(tl.int64) * P * C
    mean, r, w, b = _known(moments, weight, bias, picture, C, G)
    of_groups += picture * parts * 2 * G
    count = P * (C // G)
    of_n = _spread(_all_parts(of_groups, parts, 2 * G, G, PARTS) / count, C, G)
    of_one = _spread(_all_parts(of_groups + G, parts, 2 * G, G, PARTS) / count, C, G)
    stride = (3 if PRE else 2) * C
    sums += (picture * parts).to(tl.int64) * stride
    if part == 0:
        sum_gn, sum_g = (
            _all_parts(sums, parts, stride, C, PARTS),
            _all_parts(sums + C, parts, stride, C, PARTS),
        )
        sum_n = _all_parts(sums + 2 * C, parts, stride, C, PARTS) if PRE else sum_g
        to = parameters + picture * stride
        _store_gradients(to, sum_gn, sum_g, sum_n, of_n, of_one, r, w, P, C, PRE)
    for tile in tl.static_range(TILES):
        start = (part * TILES + tile) * ROWS
        n, g, at, mask = _inner(x + base, pre, grad + base, start, P, mean, r, w, b, C, ROWS, SILU, PRE)
        result = r[None, :] * (g * w[None, :] - of_one[None, :] - n * of_n[None, :])
        if BESIDE:
            result += tl.load(beside + base + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(gx + base + at, result.to(gx.dtype.element_ty), mask=mask)


def _warps(numbers: int) -> int:
    return 16 if numbers > 2 * TILE else 8 if numbers >= 2048 else 4


def _shape(pictures: int, places: int, channels: int, at_most: int) -> tuple[int, int, int]:
    """Rows of a tile, tiles of a part, parts of a picture; no part at all where one program holds a whole picture."""
    whole = triton.next_power_of_2(places)
    if whole * channels <= HELD:
        return whole, 1, 0
    rows = max(1, TILE // channels)
    most = triton.cdiv(places, rows)
    tiles = max(1, min(at_most, pictures * most // ENOUGH), triton.cdiv(most, PARTS))
    return rows, tiles, triton.cdiv(most, tiles)


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
    rows, tiles, parts = _shape(pictures, places, channels, FORWARD_TILES)
    before = x if pre is None else pre
    sizes = {
        "C": channels,
        "G": groups,
        "ROWS": rows,
        "PRE": pre is not None,
        "num_warps": _warps(rows * channels),
    }
    if not parts:
        _forward_whole[(pictures,)](
            x, before, weight, bias, out, moments, places, eps, SILU=silu, **sizes
        )  # fmt: skip
        return out, moments
    sums = torch.empty((pictures, parts, 2, groups), dtype=torch.float32, device=x.device)
    _forward_sums[(pictures, parts)](x, before, sums, places, TILES=tiles, **sizes)
    _forward_result[(pictures, parts)](
        x, before, sums, weight, bias, out, moments, places, parts, eps,
        TILES=tiles, PARTS=triton.next_power_of_2(parts), SILU=silu, **sizes,
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
    beside: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    pictures, places, channels = x.shape
    groups = moments.shape[2]
    gx = torch.empty_like(x)
    rows, tiles, parts = _shape(pictures, places, channels, BACKWARD_TILES)
    kinds = 2 if pre is None else 3
    parameters = torch.empty((pictures, kinds, channels), dtype=torch.float32, device=x.device)
    before, other = x if pre is None else pre, x if beside is None else beside
    sizes = {"C": channels, "G": groups, "ROWS": rows, "SILU": silu, "PRE": pre is not None}
    warps = _warps(rows * channels)
    if not parts:
        _backward_whole[(pictures,)](
            x, before, grad, other, moments, weight, bias, gx, parameters, places,
            BESIDE=beside is not None, num_warps=warps, **sizes,
        )  # fmt: skip
    else:
        sums = torch.empty((pictures, parts, kinds, channels), dtype=torch.float32, device=x.device)
        of_groups = torch.empty((pictures, parts, 2, groups), dtype=torch.float32, device=x.device)
        _backward_sums[(pictures, parts)](
            x, before, grad, moments, weight, bias, sums, of_groups, places, TILES=tiles, num_warps=warps, **sizes
        )  # fmt: skip
        _backward_result[(pictures, parts)](
            x, before, grad, other, moments, weight, bias, sums, of_groups, gx, parameters, places, parts,
            TILES=tiles, PARTS=triton.next_power_of_2(parts), BESIDE=beside is not None, num_warps=warps, **sizes,
        )  # fmt: skip
    total = parameters.sum(0)
    return gx, total[:2], None if pre is None else total[2]
