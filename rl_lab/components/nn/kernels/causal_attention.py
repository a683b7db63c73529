"""Causal attention with dropout from a seed, for training: from q, k, v side by side to the heads' results side by side.

`CausalAttention` is made of batched products: as one function its pieces meet in the layout that these want, so heads are
split and merged by one copy each way, and no gradient is put together from parts. `TiledAttention` is the same on CUDA for
sixteen-bit numbers, without copies, and without scores that go through memory.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_lab.components.nn.kernels.dropout import kept


def split_heads(x: torch.Tensor, parts: int, heads: int) -> torch.Tensor:
    """(B, T, parts · heads · W) -> (parts, B · heads, T, W)."""
    if x.is_cuda:
        from rl_lab.components.nn.kernels import causal_attention_triton

        return causal_attention_triton.split_heads(x, parts, heads)
    return x.unflatten(-1, (parts, heads, -1)).permute(2, 0, 3, 1, 4).flatten(1, 2).contiguous()


def merge_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """The way back: (parts, B · heads, T, W) -> (B, T, parts · heads · W)."""
    if x.is_cuda:
        from rl_lab.components.nn.kernels import causal_attention_triton

        return causal_attention_triton.merge_heads(x, heads)
    return x.unflatten(1, (-1, heads)).permute(1, 3, 0, 2, 4).flatten(2)


def _probabilities(scores: torch.Tensor, scale: float) -> torch.Tensor:
    length = scores.shape[-1]
    hidden = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
    return (scores.float() * scale).masked_fill(hidden, -torch.inf).softmax(-1)


def _softmax(scores: torch.Tensor, scale: float, rate: float, word: torch.Tensor) -> torch.Tensor:
    """dropout(softmax(scale · scores)) over what lies not ahead: (N, T, T)."""
    if scores.is_cuda:
        from rl_lab.components.nn.kernels import dropout_triton

        return dropout_triton.softmax_forward(scores, scale, rate, word)
    return (_probabilities(scores, scale) * kept(tuple(scores.shape), rate, word)).to(scores.dtype)


def _softmax_backward(
    grad: torch.Tensor, scores: torch.Tensor, scale: float, rate: float, word: torch.Tensor
) -> torch.Tensor:
    if scores.is_cuda:
        from rl_lab.components.nn.kernels import dropout_triton

        return dropout_triton.softmax_backward(grad, scores, scale, rate, word)
    p, g = _probabilities(scores, scale), grad.float() * kept(tuple(grad.shape), rate, word)
    return (scale * p * (g - (p * g).sum(-1, keepdim=True))).to(scores.dtype)


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
        found = torch.empty_like(parts)
        torch.bmm(weights.transpose(1, 2), g, out=found[2])
        g_weights = torch.bmm(g, v.transpose(1, 2))
        g_scores = _softmax_backward(g_weights, scores, q.shape[-1] ** -0.5, rate, word)
        torch.bmm(g_scores, k, out=found[0])
        torch.bmm(g_scores.transpose(1, 2), q, out=found[1])
        return merge_heads(found, heads), None, None, None


class TiledAttention(torch.autograd.Function):
    """The same, of a kind that tiled_attention_triton.suits."""

    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, heads: int, rate: float, word: torch.Tensor) -> torch.Tensor:
        from rl_lab.components.nn.kernels import tiled_attention_triton

        qkv = qkv.contiguous()
        out, sums = tiled_attention_triton.forward(qkv, heads, rate, word)
        ctx.save_for_backward(qkv, out, sums, word)
        ctx.settings = (heads, rate)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from rl_lab.components.nn.kernels import tiled_attention_triton

        qkv, out, sums, word = ctx.saved_tensors
        heads, rate = ctx.settings
        found = tiled_attention_triton.backward(grad, qkv, out, sums, heads, rate, word)
        return found, None, None, None


def causal_attention(qkv: torch.Tensor, heads: int, rate: float, word: torch.Tensor) -> torch.Tensor:
    """Differentiable. qkv: (B, T, 3 · D) -> (B, T, D)."""
    tiled = False
    if qkv.is_cuda:
        from rl_lab.components.nn.kernels import tiled_attention_triton

        tiled = tiled_attention_triton.suits(qkv, heads)
    result: torch.Tensor = (TiledAttention if tiled else CausalAttention).apply(qkv, heads, rate, word)
    return result
