"""SiLU(GroupNorm(x + pre)), or the norm alone, on channels-last images: before every convolution of IRIS' networks.

`pre` is the bias of the convolution before, which would cost a pass over memory of its own.

Images are (M, P, C): M of them, P pixels, C channels. Arithmetic is float32, results have x's dtype. Only mean and
inverse standard deviation of each group are kept for the backward pass.

One program reads a small image once and holds it. A larger image is split among many programs, in two passes: the sums of
each part, then the result.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_lab.components.kernels.triton_jit import cdiv, jit, next_power_of_2, tl

TILE = 4096  # elements that a program of the kernels holds at once
HELD = 4 * TILE  # elements of an image that one program can hold
ENOUGH = 1024  # programs that keep the GPU busy
# Tiles of a part, at most: with more, fewer programs read the sums of all parts; with too many, registers run out.
FORWARD_TILES, BACKWARD_TILES = 4, 2
PARTS = 64  # parts of an image, at most: each program reads the sums of all


def supports(channels: int, groups: int) -> bool:
    """Powers of two, as the kernels' tiles need them."""
    return channels & (channels - 1) == 0 and groups & (groups - 1) == 0 and channels <= TILE


def group_norm_forward(
    x: torch.Tensor,  # (M, P, C)
    pre: torch.Tensor | None,  # (C,)
    weight: torch.Tensor,  # (C,)
    bias: torch.Tensor,  # (C,)
    groups: int,
    eps: float,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (M, P, C), and mean and inverse standard deviation, (M, 2, groups)."""
    if x.is_cuda:
        return _group_norm_cuda(x, pre, weight, bias, groups, eps, silu)
    z = x.float() if pre is None else x.float() + pre
    parts = z.unflatten(2, (groups, -1))  # (M, P, G, C / G)
    mean = parts.mean((1, 3))
    r = torch.rsqrt((parts - mean[:, None, :, None]).square().mean((1, 3)) + eps)
    u = ((parts - mean[:, None, :, None]) * r[:, None, :, None]).flatten(2) * weight + bias
    return (u * torch.sigmoid(u) if silu else u).to(x.dtype), torch.stack([mean, r], 1)


def group_norm_backward(
    grad: torch.Tensor,  # (M, P, C)
    x: torch.Tensor,
    pre: torch.Tensor | None,
    moments: torch.Tensor,  # (M, 2, groups)
    weight: torch.Tensor,
    bias: torch.Tensor,
    silu: bool,
    residual: torch.Tensor | None = None,  # (M, P, C)
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradient of x (M, P, C), float32 ones of weight and bias, (2, C), and of `pre`, (C,), where there is one.

    residual: the gradient of x from its other uses, added to x's, and to nothing else
    """
    if x.is_cuda:
        return _group_norm_backward_cuda(grad, x, pre, moments, weight, bias, silu, residual)
    groups = moments.shape[2]
    mean, r = (part[:, None, :, None] for part in moments.unbind(1))
    z = x.float() if pre is None else x.float() + pre
    n = ((z.unflatten(2, (groups, -1)) - mean) * r).flatten(2)
    g = grad.float()
    if silu:
        u = n * weight + bias
        s = torch.sigmoid(u)
        g = g * s * (1.0 + u * (1.0 - s))
    parameters = torch.stack([(g * n).sum((0, 1)), g.sum((0, 1))])
    gn, n = (g * weight).unflatten(2, (groups, -1)), n.unflatten(2, (groups, -1))
    gx = r * (gn - gn.mean((1, 3), keepdim=True) - n * (gn * n).mean((1, 3), keepdim=True))
    gx = gx.flatten(2)
    of_pre = None if pre is None else gx.sum((0, 1))
    return (gx if residual is None else gx + residual.float()).to(x.dtype), parameters, of_pre


class GroupNormSiLU(torch.autograd.Function):
    """`group_norm_forward` with its gradient. It also returns x: where that one is used, the sum of x's gradients
    needs no pass of its own.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        pre: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor,
        groups: int,
        eps: float,
        silu: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, moments = group_norm_forward(x, pre, weight, bias, groups, eps, silu)
        ctx.save_for_backward(x, pre, moments, weight, bias)
        ctx.silu = silu
        ctx.set_materialize_grads(False)
        return y, x

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor | None, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if grad is None:
            return residual, None, None, None, None, None, None
        x, pre, moments, weight, bias = ctx.saved_tensors
        residual = None if residual is None else residual.contiguous()
        gx, parameters, gpre = group_norm_backward(
            grad.contiguous(), x, pre, moments, weight, bias, ctx.silu, residual
        )
        return gx, gpre, parameters[0], parameters[1], None, None, None


def fused_group_norm(
    x: torch.Tensor,  # (M, C, H, W)
    weight: torch.Tensor,
    bias: torch.Tensor,
    groups: int,
    eps: float,
    silu: bool,
    pre: torch.Tensor | None = None,  # (C,)
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> the result, (M, C, H, W), channels last in memory, and x for further use. Differentiable."""
    pixels = x.permute(0, 2, 3, 1)
    rows = pixels.reshape(x.shape[0], -1, x.shape[1])  # a view where the channels are last in memory already
    if not torch.is_grad_enabled():
        y = group_norm_forward(rows, pre, weight, bias, groups, eps, silu)[0]
        return y.view(pixels.shape).permute(0, 3, 1, 2), x
    both: tuple[torch.Tensor, torch.Tensor] = GroupNormSiLU.apply(rows, pre, weight, bias, groups, eps, silu)
    y, rows = (value.view(pixels.shape).permute(0, 3, 1, 2) for value in both)
    return y, rows


@jit
def _tile(x, pre, start, end, C: tl.constexpr, ROWS: tl.constexpr, PRE: tl.constexpr):
    """Values of some pixels of one image, plus `pre`; 0 beyond the end."""
    row, channel = start + tl.arange(0, ROWS), tl.arange(0, C)
    at = row[:, None] * C + channel[None, :]
    mask = (row < end)[:, None] & (channel < C)[None, :]
    z = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if PRE:
        z = tl.where(mask, z + tl.load(pre + channel).to(tl.float32)[None, :], 0.0)
    return z, at, mask


@jit
def _per_channel(value, C: tl.constexpr, G: tl.constexpr):
    """A value of each group -> of each channel."""
    return tl.reshape(tl.broadcast_to(value[:, None], (G, C // G)), (C,))


@jit
def _group_sums(value, C: tl.constexpr, G: tl.constexpr):
    """A value of each channel -> the sum of each group."""
    return tl.sum(tl.reshape(value, (G, C // G)), 1)


@jit
def _sum_parts(sums, parts, stride, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """(WIDTH,) values of each part of an image, `stride` apart -> their sum over the parts."""
    part, column = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    mask = (part < parts)[:, None] & (column < WIDTH)[None, :]
    return tl.sum(tl.load(sums + part[:, None] * stride + column[None, :], mask=mask, other=0.0), 0)


@jit
def _affine(first, second, weight, bias, moments, count, eps, store, C: tl.constexpr, G: tl.constexpr):
    """Sums of each group -> scale and shift of each channel; moments are stored where `store`."""
    group, channel = tl.arange(0, G), tl.arange(0, C)
    mean = first / count
    r = tl.rsqrt(tl.maximum(second / count - mean * mean, 0.0) + eps)
    if store:
        tl.store(moments + group, mean)
        tl.store(moments + G + group, r)
    w = tl.load(weight + channel).to(tl.float32) * _per_channel(r, C, G)
    return w, tl.load(bias + channel).to(tl.float32) - w * _per_channel(mean, C, G)


@jit
def _forward_image_kernel(
    x, pre, weight, bias, out, moments, P, eps,
    C: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, SILU: tl.constexpr, PRE: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0)
    base = image.to(tl.int64) * P * C
    z, at, mask = _tile(x + base, pre, 0, P, C, ROWS, PRE)
    first, second = _group_sums(tl.sum(z, 0), C, G), _group_sums(tl.sum(z * z, 0), C, G)
    w, b = _affine(first, second, weight, bias, moments + image * 2 * G, P * (C // G), eps, True, C, G)
    u = z * w[None, :] + b[None, :]
    y = u * tl.sigmoid(u) if SILU else u
    tl.store(out + base + at, y.to(out.dtype.element_ty), mask=mask)


@jit
def _forward_sums_kernel(
    x, pre, sums, P, C: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, PRE: tl.constexpr
):  # fmt: skip
    image, part = tl.program_id(0), tl.program_id(1)
    x += image.to(tl.int64) * P * C
    one = tl.zeros((ROWS, C), tl.float32)
    two = tl.zeros((ROWS, C), tl.float32)
    for tile in tl.static_range(TILES):
        z, _, _ = _tile(x, pre, (part * TILES + tile) * ROWS, P, C, ROWS, PRE)
        one += z
        two += z * z
    to = sums + (image * tl.num_programs(1) + part) * 2 * G + tl.arange(0, G)
    tl.store(to, _group_sums(tl.sum(one, 0), C, G))
    tl.store(to + G, _group_sums(tl.sum(two, 0), C, G))


@jit
def _forward_result_kernel(
    x, pre, sums, weight, bias, out, moments, P, parts, eps, C: tl.constexpr, G: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, PARTS: tl.constexpr, SILU: tl.constexpr, PRE: tl.constexpr,
):  # fmt: skip
    # In reverse: what the sums read last is still in the cache, and a convolution starts with what is written last.
    image, part = tl.num_programs(0) - 1 - tl.program_id(0), parts - 1 - tl.program_id(1)
    base = image.to(tl.int64) * P * C
    sums += image * parts * 2 * G
    first, second = _sum_parts(sums, parts, 2 * G, G, PARTS), _sum_parts(sums + G, parts, 2 * G, G, PARTS)
    moments += image * 2 * G
    w, b = _affine(first, second, weight, bias, moments, P * (C // G), eps, part == 0, C, G)
    for tile in tl.static_range(TILES):
        z, at, mask = _tile(x + base, pre, (part * TILES + tile) * ROWS, P, C, ROWS, PRE)
        u = z * w[None, :] + b[None, :]
        y = u * tl.sigmoid(u) if SILU else u
        tl.store(out + base + at, y.to(out.dtype.element_ty), mask=mask)


@jit
def _normed_and_grad(
    x, pre, grad, start, end, mean, r, w, b, C: tl.constexpr, ROWS: tl.constexpr, SILU: tl.constexpr,
    PRE: tl.constexpr,
):  # fmt: skip
    """Normalized values of one tile, and the gradient of the norm's output."""
    z, at, mask = _tile(x, pre, start, end, C, ROWS, PRE)
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    n = tl.where(mask, (z - mean[None, :]) * r[None, :], 0.0)
    if SILU:
        u = n * w[None, :] + b[None, :]
        s = tl.sigmoid(u)
        g = g * s * (1.0 + u * (1.0 - s))
    return n, g, at, mask


@jit
def _load_statistics(moments, weight, bias, image, C: tl.constexpr, G: tl.constexpr):
    """Mean, inverse standard deviation, weight and bias of each channel."""
    channel, group = tl.arange(0, C), tl.arange(0, G)
    mean = _per_channel(tl.load(moments + image * 2 * G + group), C, G)
    r = _per_channel(tl.load(moments + image * 2 * G + G + group), C, G)
    return mean, r, tl.load(weight + channel).to(tl.float32), tl.load(bias + channel).to(tl.float32)


@jit
def _store_gradients(to, sum_gn, sum_g, sum_n, of_n, of_one, r, w, P, C: tl.constexpr, PRE: tl.constexpr):
    """One image's share of the gradients of weight, bias and `pre`: the last is the sum of x's over the pixels."""
    channel = tl.arange(0, C)
    tl.store(to + channel, sum_gn)
    tl.store(to + C + channel, sum_g)
    if PRE:
        tl.store(to + 2 * C + channel, r * (sum_g * w - P * of_one - sum_n * of_n))


@jit
def _backward_image_kernel(
    x, pre, grad, residual, moments, weight, bias, gx, parameters, P, C: tl.constexpr, G: tl.constexpr,
    ROWS: tl.constexpr, SILU: tl.constexpr, PRE: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0)
    base = image.to(tl.int64) * P * C
    mean, r, w, b = _load_statistics(moments, weight, bias, image, C, G)
    n, g, at, mask = _normed_and_grad(x + base, pre, grad + base, 0, P, mean, r, w, b, C, ROWS, SILU, PRE)
    sum_gn, sum_g, sum_n = tl.sum(g * n, 0), tl.sum(g, 0), tl.sum(n, 0)
    count = P * (C // G)
    of_n = _per_channel(_group_sums(sum_gn * w, C, G) / count, C, G)
    of_one = _per_channel(_group_sums(sum_g * w, C, G) / count, C, G)
    to = parameters + image * (3 if PRE else 2) * C
    _store_gradients(to, sum_gn, sum_g, sum_n, of_n, of_one, r, w, P, C, PRE)
    result = r[None, :] * (g * w[None, :] - of_one[None, :] - n * of_n[None, :])
    if RESIDUAL:
        result += tl.load(residual + base + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(gx + base + at, result.to(gx.dtype.element_ty), mask=mask)


@jit
def _backward_sums_kernel(
    x, pre, grad, moments, weight, bias, sums, of_groups, P, C: tl.constexpr, G: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, SILU: tl.constexpr, PRE: tl.constexpr,
):  # fmt: skip
    """Of each part, the sums that make the parameters' gradients, and two values of each group for x's."""
    image, part = tl.program_id(0), tl.program_id(1)
    base = image.to(tl.int64) * P * C
    mean, r, w, b = _load_statistics(moments, weight, bias, image, C, G)
    all_gn = tl.zeros((ROWS, C), tl.float32)
    all_g = tl.zeros((ROWS, C), tl.float32)
    all_n = tl.zeros((ROWS, C), tl.float32)
    for tile in tl.static_range(TILES):
        start = (part * TILES + tile) * ROWS
        n, g, _, _ = _normed_and_grad(x + base, pre, grad + base, start, P, mean, r, w, b, C, ROWS, SILU, PRE)
        all_gn += g * n
        all_g += g
        if PRE:
            all_n += n
    sum_gn, sum_g = tl.sum(all_gn, 0), tl.sum(all_g, 0)
    row = (image * tl.num_programs(1) + part).to(tl.int64)
    to = sums + row * (3 if PRE else 2) * C + tl.arange(0, C)
    tl.store(to, sum_gn)
    tl.store(to + C, sum_g)
    if PRE:
        tl.store(to + 2 * C, tl.sum(all_n, 0))
    to = of_groups + row * 2 * G + tl.arange(0, G)
    tl.store(to, _group_sums(sum_gn * w, C, G))
    tl.store(to + G, _group_sums(sum_g * w, C, G))


@jit
def _backward_result_kernel(
    x, pre, grad, residual, moments, weight, bias, sums, of_groups, gx, parameters, P, parts, C: tl.constexpr,
    G: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, PARTS: tl.constexpr, SILU: tl.constexpr,
    PRE: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    image, part = tl.num_programs(0) - 1 - tl.program_id(0), parts - 1 - tl.program_id(1)
    base = image.to(tl.int64) * P * C
    mean, r, w, b = _load_statistics(moments, weight, bias, image, C, G)
    of_groups += image * parts * 2 * G
    count = P * (C // G)
    of_n = _per_channel(_sum_parts(of_groups, parts, 2 * G, G, PARTS) / count, C, G)
    of_one = _per_channel(_sum_parts(of_groups + G, parts, 2 * G, G, PARTS) / count, C, G)
    stride = (3 if PRE else 2) * C
    sums += (image * parts).to(tl.int64) * stride
    if part == 0:
        sum_gn, sum_g = (
            _sum_parts(sums, parts, stride, C, PARTS),
            _sum_parts(sums + C, parts, stride, C, PARTS),
        )
        sum_n = _sum_parts(sums + 2 * C, parts, stride, C, PARTS) if PRE else sum_g
        to = parameters + image * stride
        _store_gradients(to, sum_gn, sum_g, sum_n, of_n, of_one, r, w, P, C, PRE)
    for tile in tl.static_range(TILES):
        start = (part * TILES + tile) * ROWS
        n, g, at, mask = _normed_and_grad(
            x + base, pre, grad + base, start, P, mean, r, w, b, C, ROWS, SILU, PRE
        )
        result = r[None, :] * (g * w[None, :] - of_one[None, :] - n * of_n[None, :])
        if RESIDUAL:
            result += tl.load(residual + base + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(gx + base + at, result.to(gx.dtype.element_ty), mask=mask)


def _warps(elements: int) -> int:
    return 16 if elements > 2 * TILE else 8 if elements >= 2048 else 4


def _tiling(images: int, pixels: int, channels: int, at_most: int) -> tuple[int, int, int]:
    """Rows of a tile, tiles of a part, parts of an image; no parts where one program holds the image."""
    padded = next_power_of_2(pixels)
    if padded * channels <= HELD:
        return padded, 1, 0
    rows = max(1, TILE // channels)
    most = cdiv(pixels, rows)
    tiles = max(1, min(at_most, images * most // ENOUGH), cdiv(most, PARTS))
    return rows, tiles, cdiv(most, tiles)


def _group_norm_cuda(
    x: torch.Tensor,
    pre: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    groups: int,
    eps: float,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    images, pixels, channels = x.shape
    out = torch.empty_like(x)
    moments = torch.empty((images, 2, groups), dtype=torch.float32, device=x.device)
    rows, tiles, parts = _tiling(images, pixels, channels, FORWARD_TILES)
    before = x if pre is None else pre
    sizes = {
        "C": channels,
        "G": groups,
        "ROWS": rows,
        "PRE": pre is not None,
        "num_warps": _warps(rows * channels),
    }
    if not parts:
        _forward_image_kernel[(images,)](
            x, before, weight, bias, out, moments, pixels, eps, SILU=silu, **sizes
        )  # fmt: skip
        return out, moments
    sums = torch.empty((images, parts, 2, groups), dtype=torch.float32, device=x.device)
    _forward_sums_kernel[(images, parts)](x, before, sums, pixels, TILES=tiles, **sizes)
    _forward_result_kernel[(images, parts)](
        x, before, sums, weight, bias, out, moments, pixels, parts, eps,
        TILES=tiles, PARTS=next_power_of_2(parts), SILU=silu, **sizes,
    )  # fmt: skip
    return out, moments


def _group_norm_backward_cuda(
    grad: torch.Tensor,
    x: torch.Tensor,
    pre: torch.Tensor | None,
    moments: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    silu: bool,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    images, pixels, channels = x.shape
    groups = moments.shape[2]
    gx = torch.empty_like(x)
    rows, tiles, parts = _tiling(images, pixels, channels, BACKWARD_TILES)
    kinds = 2 if pre is None else 3
    parameters = torch.empty((images, kinds, channels), dtype=torch.float32, device=x.device)
    before, other = x if pre is None else pre, x if residual is None else residual
    sizes = {"C": channels, "G": groups, "ROWS": rows, "SILU": silu, "PRE": pre is not None}
    warps = _warps(rows * channels)
    if not parts:
        _backward_image_kernel[(images,)](
            x, before, grad, other, moments, weight, bias, gx, parameters, pixels,
            RESIDUAL=residual is not None, num_warps=warps, **sizes,
        )  # fmt: skip
    else:
        sums = torch.empty((images, parts, kinds, channels), dtype=torch.float32, device=x.device)
        of_groups = torch.empty((images, parts, 2, groups), dtype=torch.float32, device=x.device)
        _backward_sums_kernel[(images, parts)](
            x, before, grad, moments, weight, bias, sums, of_groups, pixels, TILES=tiles, num_warps=warps, **sizes
        )  # fmt: skip
        _backward_result_kernel[(images, parts)](
            x, before, grad, other, moments, weight, bias, sums, of_groups, gx, parameters, pixels, parts,
            TILES=tiles, PARTS=next_power_of_2(parts), RESIDUAL=residual is not None, num_warps=warps, **sizes,
        )  # fmt: skip
    total = parameters.sum(0)
    return gx, total[:2], None if pre is None else total[2]
