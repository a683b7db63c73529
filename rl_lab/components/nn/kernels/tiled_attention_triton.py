"""Triton kernels of causal_attention.py for sixteen-bit numbers: scores are made tile by tile, and never stored.

q, k and v are read where the product left them, (B, T, 3, heads, W), and their gradients are written the same way. The
forward pass keeps the logarithm of each row's sum; the backward pass makes the weights again from it. Imported on CUDA only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rl_lab.components.nn.kernels.dropout_triton import kept

TILE = 64  # queries and keys that a program looks at together


def suits(qkv: torch.Tensor, heads: int) -> bool:
    """Whether the kernels can: matrix units know these formats, and wider heads want more shared memory than many GPUs have."""
    return qkv.dtype in (torch.bfloat16, torch.float16) and qkv.shape[-1] // (3 * heads) in (16, 32, 64)


@triton.jit
def _forward_kernel(
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
        e = e * kept((which * T + m[:, None]) * T + n[None, :], word, rate)
        result = result * shrink[:, None] + tl.dot(e.to(v.dtype), v)
        highest = higher
    result = result / total[:, None]
    to = ((which // H).to(tl.int64) * T + m[:, None]) * (H * W) + (which % H) * W + column
    tl.store(out + to, result.to(out.dtype.element_ty), mask=m[:, None] < T)
    tl.store(sums + which * T + m, highest + tl.log(total), mask=m < T)


@triton.jit
def _query_kernel(
    grad, qkv, out, sums, means, found, word, T, scale, rate, H: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr
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
        gp = tl.dot(g, tl.trans(v)) * kept((which * T + m[:, None]) * T + n[None, :], word, rate)
        gs = p * (gp - mean[:, None]) * scale
        result += tl.dot(gs.to(k.dtype), k)
    to = start + m[:, None] * (3 * H * W) + column
    tl.store(found + to, result.to(found.dtype.element_ty), mask=inside)


@triton.jit
def _key_kernel(
    grad, qkv, sums, means, found, word, T, scale, rate, H: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Gradients of some keys and values. Tiles lie the other way here: keys down, queries across."""
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
        keep = kept((which * T + m[None, :]) * T + n[:, None], word, rate)
        gv += tl.dot((p * keep).to(g.dtype), g)
        gs = p * (tl.dot(v, tl.trans(g)) * keep - mean[None, :]) * scale
        gk += tl.dot(gs.to(q.dtype), q)
    tl.store(found + start + H * W + at, gk.to(found.dtype.element_ty), mask=inside)
    tl.store(found + start + 2 * H * W + at, gv.to(found.dtype.element_ty), mask=inside)


def forward(
    qkv: torch.Tensor, heads: int, rate: float, word: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T, 3 · heads · W), contiguous -> (B, T, heads · W), and the logarithms of sums (B · heads, T)."""
    batch, tokens, whole = qkv.shape
    width = whole // (3 * heads)
    out = torch.empty((batch, tokens, heads * width), dtype=qkv.dtype, device=qkv.device)
    sums = torch.empty((batch * heads, tokens), dtype=torch.float32, device=qkv.device)
    _forward_kernel[(triton.cdiv(tokens, TILE), batch * heads)](
        qkv, out, sums, word, tokens, width**-0.5, rate, H=heads, W=width, TILE=TILE, num_warps=4
    )
    return out, sums


def backward(
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
    batch, tokens, whole = qkv.shape
    width = whole // (3 * heads)
    found, means = torch.empty_like(qkv), torch.empty_like(sums)
    grid = (triton.cdiv(tokens, TILE), batch * heads)
    numbers = (word, tokens, width**-0.5, rate)
    _query_kernel[grid](
        grad, qkv, out, sums, means, found, *numbers, H=heads, W=width, TILE=TILE, num_warps=4
    )
    _key_kernel[grid](grad, qkv, sums, means, found, *numbers, H=heads, W=width, TILE=TILE, num_warps=4)
    return found
