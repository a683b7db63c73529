"""Attention of a transformer: over a cache of fixed size when it acts or imagines, causal with dropout when it trains.

`cached_attention` has no gradient. `CausalAttention` is made of batched products: as one function its parts meet in the
layout that these need, so heads are split and merged by one copy each way, and no gradient is concatenated.
`TiledAttention` is the same on CUDA for 16-bit dtypes, without copies, and without scores that go through memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from rl_lab.components.kernels.dropout import dropout_scale, kept
from rl_lab.components.kernels.triton_jit import cdiv, jit, next_power_of_2, tl

CACHE_BLOCK = 256  # positions of the cache that are read at once, at most
HEAD_ROWS = 64  # tokens that a program copies
TILE = 64  # queries and keys of a tile of scores


def cached_attention(
    qkv: torch.Tensor,  # (B, T, 3 · heads · W): query, key, value
    keys: torch.Tensor,  # (B, heads, L, W), written in position; the batch may be strided
    values: torch.Tensor,  # the same, with the same strides
    filled: torch.Tensor,  # (B,) int64: positions in use
) -> torch.Tensor:
    """Attention of a few new tokens over a cache of fixed size, into which it also writes them. -> (B, T, heads · W).

    New tokens go to the first free positions of their row (what does not fit, to the last one) and attend to what stands
    before them and to themselves. On CUDA it is one kernel, which reads only the positions that are filled.
    """
    if qkv.is_cuda:
        return _cached_attention_cuda(qkv, keys, values, filled)
    heads, length = keys.shape[1:3]
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    position = (filled[:, None] + torch.arange(qkv.shape[1])).clamp(max=length - 1)
    index = position[:, None, :, None].expand(k.shape)
    keys.scatter_(2, index, k)
    values.scatter_(2, index, v)
    seen = (torch.arange(length) <= position[..., None]).unsqueeze(1)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen).transpose(1, 2).flatten(2)


@jit
def _cached_attention_kernel(
    qkv, keys, values, filled, out, batch_stride, head_stride, L, scale,
    H: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, T: tl.constexpr, NEW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for a row, a head and a new token. W, NEW: WIDTH and T rounded up to powers of two."""
    row, head, token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    column = tl.arange(0, W)
    inside = column < WIDTH
    start = tl.load(filled + row).to(tl.int32)
    old = tl.minimum(start, L - 1)  # positions before this one stay as they are
    mine = tl.minimum(start + token, L - 1)

    source = qkv + row.to(tl.int64) * (T * 3 * H * WIDTH) + head * WIDTH
    q = tl.load(source + token * (3 * H * WIDTH) + column, mask=inside, other=0.0).to(tl.float32) * scale

    # The new tokens are read from qkv: no program reads what another one writes to the cache.
    new = tl.arange(0, NEW)
    theirs = tl.minimum(start + new, L - 1)
    after = tl.minimum(start + new + 1, L - 1)
    last = (new == T - 1) | (after != theirs)  # of those at one position the last one is kept
    seen = (new < T) & last & (theirs <= mine)
    at = new[:, None] * (3 * H * WIDTH) + column[None, :]
    mask = (new[:, None] < T) & inside[None, :]
    k = tl.load(source + H * WIDTH + at, mask=mask, other=0.0)
    v = tl.load(source + 2 * H * WIDTH + at, mask=mask, other=0.0)
    score = tl.where(seen, tl.sum(k.to(tl.float32) * q[None, :], 1), -float("inf"))
    highest = tl.max(score, 0)
    e = tl.exp(score - highest)
    total = tl.sum(e, 0)
    result = tl.sum(e[:, None] * v.to(tl.float32), 0)

    keys += row.to(tl.int64) * batch_stride + head * head_stride
    values += row.to(tl.int64) * batch_stride + head * head_stride
    to = theirs[:, None] * WIDTH + column[None, :]
    writes = mask & (last & (new == token))[:, None]
    tl.store(keys + to, k, mask=writes)
    tl.store(values + to, v, mask=writes)

    # Other names than above: a variable that a loop assigns must keep its shape.
    for begin in range(0, old, BLOCK):
        position = begin + tl.arange(0, BLOCK)
        there = position < old
        offset = position[:, None] * WIDTH + column[None, :]
        within = there[:, None] & inside[None, :]
        old_k = tl.load(keys + offset, mask=within, other=0.0).to(tl.float32)
        old_v = tl.load(values + offset, mask=within, other=0.0).to(tl.float32)
        old_score = tl.where(there, tl.sum(old_k * q[None, :], 1), -float("inf"))
        higher = tl.maximum(highest, tl.max(old_score, 0))
        old_e = tl.exp(old_score - higher)
        shrink = tl.exp(highest - higher)
        total = total * shrink + tl.sum(old_e, 0)
        result = result * shrink + tl.sum(old_e[:, None] * old_v, 0)
        highest = higher
    end = (row * T + token).to(tl.int64) * (H * WIDTH) + head * WIDTH + column
    tl.store(out + end, (result / total).to(out.dtype.element_ty), mask=inside)


def _cached_attention_cuda(
    qkv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, filled: torch.Tensor
) -> torch.Tensor:
    qkv = qkv.contiguous()
    batch, heads, length, width = keys.shape
    count = qkv.shape[1]
    assert keys.stride() == values.stride() and keys.stride()[2:] == (width, 1)
    assert keys.dtype == values.dtype == qkv.dtype
    out = torch.empty((batch, count, heads * width), dtype=qkv.dtype, device=qkv.device)
    _cached_attention_kernel[(batch, heads, count)](
        qkv, keys, values, filled, out, keys.stride(0), keys.stride(1), length, width**-0.5,
        H=heads, WIDTH=width, W=next_power_of_2(width), T=count, NEW=next_power_of_2(count),
        BLOCK=max(16, min(CACHE_BLOCK, next_power_of_2(length))), num_warps=8,
    )  # fmt: skip
    return out


def causal_attention(qkv: torch.Tensor, heads: int, rate: float, word: torch.Tensor) -> torch.Tensor:
    """Differentiable. qkv: (B, T, 3 · D) -> (B, T, D)."""
    tiled = False
    if qkv.is_cuda:
        tiled = _tiles_fit(qkv, heads)
    result: torch.Tensor = (TiledAttention if tiled else CausalAttention).apply(qkv, heads, rate, word)
    return result


class CausalAttention(torch.autograd.Function):
    """qkv (B, T, 3 · D), word: dropout's seed, 0-d int64 -> (B, T, D)."""

    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, heads: int, rate: float, word: torch.Tensor) -> torch.Tensor:
        parts = split_heads(qkv, 3, heads)
        q, k, v = parts
        scores = torch.bmm(q, k.transpose(1, 2))
        weights = _softmax(scores, q.shape[-1] ** -0.5, rate, word)
        ctx.save_for_backward(parts, scores, weights, word)
        ctx.settings = (heads, rate)
        return merge_heads(torch.bmm(weights, v).unsqueeze(0), heads)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts, scores, weights, word = ctx.saved_tensors
        heads, rate = ctx.settings
        q, k, v = parts
        g = split_heads(grad, 1, heads)[0]
        gradient = torch.empty_like(parts)
        torch.bmm(weights.transpose(1, 2), g, out=gradient[2])
        g_weights = torch.bmm(g, v.transpose(1, 2))
        g_scores = _softmax_backward(g_weights, scores, q.shape[-1] ** -0.5, rate, word)
        torch.bmm(g_scores, k, out=gradient[0])
        torch.bmm(g_scores.transpose(1, 2), q, out=gradient[1])
        return merge_heads(gradient, heads), None, None, None


def split_heads(x: torch.Tensor, parts: int, heads: int) -> torch.Tensor:
    """(B, T, parts · heads · W) -> (parts, B · heads, T, W)."""
    if x.is_cuda:
        return _split_heads_cuda(x, parts, heads)
    return x.unflatten(-1, (parts, heads, -1)).permute(2, 0, 3, 1, 4).flatten(1, 2).contiguous()


def merge_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """The inverse of `split_heads`: (parts, B · heads, T, W) -> (B, T, parts · heads · W)."""
    if x.is_cuda:
        return _merge_heads_cuda(x, heads)
    return x.unflatten(1, (-1, heads)).permute(1, 3, 0, 2, 4).flatten(2)


def _probabilities(scores: torch.Tensor, scale: float) -> torch.Tensor:
    length = scores.shape[-1]
    hidden = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
    return (scores.float() * scale).masked_fill(hidden, -torch.inf).softmax(-1)


def _softmax(scores: torch.Tensor, scale: float, rate: float, word: torch.Tensor) -> torch.Tensor:
    """dropout(softmax(scale · scores)) over the positions that are not ahead: (N, T, T)."""
    if scores.is_cuda:
        return _softmax_cuda(scores, scale, rate, word)
    return (_probabilities(scores, scale) * kept(tuple(scores.shape), rate, word)).to(scores.dtype)


def _softmax_backward(
    grad: torch.Tensor, scores: torch.Tensor, scale: float, rate: float, word: torch.Tensor
) -> torch.Tensor:
    if scores.is_cuda:
        return _softmax_backward_cuda(grad, scores, scale, rate, word)
    p, g = _probabilities(scores, scale), grad.float() * kept(tuple(grad.shape), rate, word)
    return (scale * p * (g - (p * g).sum(-1, keepdim=True))).to(scores.dtype)


@jit
def _move_heads_kernel(
    x, out, T, P: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """One program for some tokens of one part and head: (B, T, P, H, WIDTH) to (P, B, H, T, WIDTH), or back."""
    which = tl.program_id(0)
    head, part, row = which % H, (which // H) % P, which // (H * P)
    batch = tl.num_programs(0) // (H * P)
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, W)
    mask = (token[:, None] < T) & (column[None, :] < WIDTH)
    merged = (row * T + token[:, None]).to(tl.int64) * (P * H * WIDTH) + (part * H + head) * WIDTH
    split = (((part * batch + row) * H + head).to(tl.int64) * T + token[:, None]) * WIDTH
    if SPLIT:
        tl.store(out + split + column[None, :], tl.load(x + merged + column[None, :], mask=mask), mask=mask)
    else:
        tl.store(out + merged + column[None, :], tl.load(x + split + column[None, :], mask=mask), mask=mask)


def _move_heads_cuda(
    x: torch.Tensor, out: torch.Tensor, batch: int, tokens: int, parts: int, heads: int, width: int, split: bool
) -> torch.Tensor:  # fmt: skip
    _move_heads_kernel[(batch * parts * heads, cdiv(tokens, HEAD_ROWS))](
        x, out, tokens, P=parts, H=heads, WIDTH=width, W=next_power_of_2(width), ROWS=HEAD_ROWS, SPLIT=split
    )
    return out


def _split_heads_cuda(x: torch.Tensor, parts: int, heads: int) -> torch.Tensor:
    x = x.contiguous()
    batch, tokens, features = x.shape
    width = features // (parts * heads)
    out = torch.empty((parts, batch * heads, tokens, width), dtype=x.dtype, device=x.device)
    return _move_heads_cuda(x, out, batch, tokens, parts, heads, width, True)


def _merge_heads_cuda(x: torch.Tensor, heads: int) -> torch.Tensor:
    x = x.contiguous()
    parts, rows, tokens, width = x.shape
    batch = rows // heads
    out = torch.empty((batch, tokens, parts * heads * width), dtype=x.dtype, device=x.device)
    return _move_heads_cuda(x, out, batch, tokens, parts, heads, width, False)


@jit
def _causal_softmax_row(scores, row, column, T, scale):
    """Softmax of one row of scores over the positions up to its own."""
    seen = column <= row % T
    z = tl.load(scores + row.to(tl.int64) * T + column, mask=seen & (column < T), other=-float("inf")).to(
        tl.float32
    )
    e = tl.exp(z * scale - tl.max(z, 0) * scale)
    e = tl.where(seen & (column < T), e, 0.0)
    return e / tl.sum(e, 0)


@jit
def _softmax_kernel(scores, out, word, T, scale, rate, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    y = _causal_softmax_row(scores, row, column, T, scale) * dropout_scale(row * T + column, word, rate)
    tl.store(out + row.to(tl.int64) * T + column, y.to(out.dtype.element_ty), mask=column < T)


@jit
def _softmax_backward_kernel(grad, scores, out, word, T, scale, rate, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    p = _causal_softmax_row(scores, row, column, T, scale)
    g = tl.load(grad + row.to(tl.int64) * T + column, mask=column < T, other=0.0).to(tl.float32)
    g = g * dropout_scale(row * T + column, word, rate)
    result = scale * p * (g - tl.sum(p * g, 0))
    tl.store(out + row.to(tl.int64) * T + column, result.to(out.dtype.element_ty), mask=column < T)


def _softmax_cuda(scores: torch.Tensor, scale: float, rate: float, word: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(scores)
    width = scores.shape[-1]
    _softmax_kernel[(scores.numel() // width,)](
        scores, out, word, width, scale, rate, BLOCK=next_power_of_2(width)
    )
    return out


def _softmax_backward_cuda(
    grad: torch.Tensor, scores: torch.Tensor, scale: float, rate: float, word: torch.Tensor
) -> torch.Tensor:
    out = torch.empty_like(scores)
    width = scores.shape[-1]
    _softmax_backward_kernel[(scores.numel() // width,)](
        grad, scores, out, word, width, scale, rate, BLOCK=next_power_of_2(width)
    )
    return out


class TiledAttention(torch.autograd.Function):
    """The same on CUDA where `_tiles_fit`: scores are computed tile by tile, and never stored.

    q, k and v are read from the product's result, (B, T, 3, heads, W), and their gradients are written the same way. The
    forward pass keeps the logarithm of each row's sum; the backward pass computes the weights again from it.
    """

    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, heads: int, rate: float, word: torch.Tensor) -> torch.Tensor:
        qkv = qkv.contiguous()
        out, sums = _tiled_attention_cuda(qkv, heads, rate, word)
        ctx.save_for_backward(qkv, out, sums, word)
        ctx.settings = (heads, rate)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        qkv, out, sums, word = ctx.saved_tensors
        heads, rate = ctx.settings
        gradient = _tiled_attention_backward_cuda(grad, qkv, out, sums, heads, rate, word)
        return gradient, None, None, None


def _tiles_fit(qkv: torch.Tensor, heads: int) -> bool:
    """Whether the kernels can do it: matrix units need these dtypes, and wider heads more shared memory than many GPUs have."""
    return qkv.dtype in (torch.bfloat16, torch.float16) and qkv.shape[-1] // (3 * heads) in (16, 32, 64)


@jit
def _tiled_attention_kernel(
    qkv, out, sums, word, T, scale, rate, H: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    block, which = tl.program_id(0), tl.program_id(1)
    source = qkv + (which // H).to(tl.int64) * T * (3 * H * W) + (which % H) * W
    column = tl.arange(0, W)[None, :]
    m = block * TILE + tl.arange(0, TILE)
    q = tl.load(source + m[:, None] * (3 * H * W) + column, mask=m[:, None] < T, other=0.0)
    highest = tl.zeros((TILE,), tl.float32) - float("inf")
    total = tl.zeros((TILE,), tl.float32)
    result = tl.zeros((TILE, W), tl.float32)
    for begin in range(0, tl.minimum((block + 1) * TILE, T), TILE):
        n = begin + tl.arange(0, TILE)
        at = n[:, None] * (3 * H * W) + column
        k = tl.load(source + H * W + at, mask=n[:, None] < T, other=0.0)
        v = tl.load(source + 2 * H * W + at, mask=n[:, None] < T, other=0.0)
        seen = (n[None, :] <= m[:, None]) & (n[None, :] < T)
        score = tl.where(seen, tl.dot(q, tl.trans(k)) * scale, -float("inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        e = tl.exp(score - higher[:, None])
        shrink = tl.exp(highest - higher)
        total = total * shrink + tl.sum(e, 1)
        e = e * dropout_scale((which * T + m[:, None]) * T + n[None, :], word, rate)
        result = result * shrink[:, None] + tl.dot(e.to(v.dtype), v)
        highest = higher
    result = result / total[:, None]
    to = ((which // H).to(tl.int64) * T + m[:, None]) * (H * W) + (which % H) * W + column
    tl.store(out + to, result.to(out.dtype.element_ty), mask=m[:, None] < T)
    tl.store(sums + which * T + m, highest + tl.log(total), mask=m < T)


@jit
def _query_gradient_kernel(
    grad, qkv, out, sums, means, gradient, word, T, scale, rate, H: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Gradients of some queries, and for the other kernel each row's mean gradient: the sum of weight · gradient."""
    block, which = tl.program_id(0), tl.program_id(1)
    start = (which // H).to(tl.int64) * T * (3 * H * W) + (which % H) * W
    source = qkv + start
    column = tl.arange(0, W)[None, :]
    m = block * TILE + tl.arange(0, TILE)
    inside = m[:, None] < T
    here = ((which // H).to(tl.int64) * T + m[:, None]) * (H * W) + (which % H) * W + column
    q = tl.load(source + m[:, None] * (3 * H * W) + column, mask=inside, other=0.0)
    g = tl.load(grad + here, mask=inside, other=0.0)
    o = tl.load(out + here, mask=inside, other=0.0)
    mean = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(means + which * T + m, mean, mask=m < T)
    log_sum = tl.load(sums + which * T + m, mask=m < T, other=0.0)
    result = tl.zeros((TILE, W), tl.float32)
    for begin in range(0, tl.minimum((block + 1) * TILE, T), TILE):
        n = begin + tl.arange(0, TILE)
        at = n[:, None] * (3 * H * W) + column
        k = tl.load(source + H * W + at, mask=n[:, None] < T, other=0.0)
        v = tl.load(source + 2 * H * W + at, mask=n[:, None] < T, other=0.0)
        seen = (n[None, :] <= m[:, None]) & (n[None, :] < T)
        score = tl.where(seen, tl.dot(q, tl.trans(k)) * scale, -float("inf"))
        p = tl.exp(score - log_sum[:, None])
        gp = tl.dot(g, tl.trans(v)) * dropout_scale((which * T + m[:, None]) * T + n[None, :], word, rate)
        gs = p * (gp - mean[:, None]) * scale
        result += tl.dot(gs.to(k.dtype), k)
    to = start + m[:, None] * (3 * H * W) + column
    tl.store(gradient + to, result.to(gradient.dtype.element_ty), mask=inside)


@jit
def _key_gradient_kernel(
    grad, qkv, sums, means, gradient, word, T, scale, rate, H: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Gradients of some keys and values. Tiles are transposed here: keys down, queries across."""
    block, which = tl.program_id(0), tl.program_id(1)
    start = (which // H).to(tl.int64) * T * (3 * H * W) + (which % H) * W
    source = qkv + start
    column = tl.arange(0, W)[None, :]
    n = block * TILE + tl.arange(0, TILE)
    inside = n[:, None] < T
    at = n[:, None] * (3 * H * W) + column
    k = tl.load(source + H * W + at, mask=inside, other=0.0)
    v = tl.load(source + 2 * H * W + at, mask=inside, other=0.0)
    gk = tl.zeros((TILE, W), tl.float32)
    gv = tl.zeros((TILE, W), tl.float32)
    for begin in range(block * TILE, T, TILE):
        m = begin + tl.arange(0, TILE)
        here = ((which // H).to(tl.int64) * T + m[:, None]) * (H * W) + (which % H) * W + column
        q = tl.load(source + m[:, None] * (3 * H * W) + column, mask=m[:, None] < T, other=0.0)
        g = tl.load(grad + here, mask=m[:, None] < T, other=0.0)
        log_sum = tl.load(sums + which * T + m, mask=m < T, other=0.0)
        mean = tl.load(means + which * T + m, mask=m < T, other=0.0)
        seen = (n[:, None] <= m[None, :]) & (m[None, :] < T)
        score = tl.where(seen, tl.dot(k, tl.trans(q)) * scale, -float("inf"))
        p = tl.exp(score - log_sum[None, :])
        keep = dropout_scale((which * T + m[None, :]) * T + n[:, None], word, rate)
        gv += tl.dot((p * keep).to(g.dtype), g)
        gs = p * (tl.dot(v, tl.trans(g)) * keep - mean[None, :]) * scale
        gk += tl.dot(gs.to(q.dtype), q)
    tl.store(gradient + start + H * W + at, gk.to(gradient.dtype.element_ty), mask=inside)
    tl.store(gradient + start + 2 * H * W + at, gv.to(gradient.dtype.element_ty), mask=inside)


def _tiled_attention_cuda(
    qkv: torch.Tensor, heads: int, rate: float, word: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T, 3 · heads · W), contiguous -> (B, T, heads · W), and the logarithms of sums (B · heads, T)."""
    batch, tokens, features = qkv.shape
    width = features // (3 * heads)
    out = torch.empty((batch, tokens, heads * width), dtype=qkv.dtype, device=qkv.device)
    sums = torch.empty((batch * heads, tokens), dtype=torch.float32, device=qkv.device)
    _tiled_attention_kernel[(cdiv(tokens, TILE), batch * heads)](
        qkv, out, sums, word, tokens, width**-0.5, rate, H=heads, W=width, TILE=TILE, num_warps=4
    )
    return out, sums


def _tiled_attention_backward_cuda(
    grad: torch.Tensor,
    qkv: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    heads: int,
    rate: float,
    word: torch.Tensor,
) -> torch.Tensor:
    """The gradient of qkv."""
    grad = grad.contiguous()
    batch, tokens, features = qkv.shape
    width = features // (3 * heads)
    gradient, means = torch.empty_like(qkv), torch.empty_like(sums)
    grid = (cdiv(tokens, TILE), batch * heads)
    scalars = (word, tokens, width**-0.5, rate)
    _query_gradient_kernel[grid](
        grad, qkv, out, sums, means, gradient, *scalars, H=heads, W=width, TILE=TILE, num_warps=4
    )
    _key_gradient_kernel[grid](
        grad, qkv, sums, means, gradient, *scalars, H=heads, W=width, TILE=TILE, num_warps=4
    )
    return gradient
