"""Attention of a few new tokens over a cache of fixed size, into which it also writes them. Without gradient.

New tokens go to the first free places of their row (what does not fit, to the last place) and see what stands before
them and themselves. On CUDA it is one kernel, and only places that are filled are read.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F


def cached_attention(
    qkv: torch.Tensor,  # (B, T, 3 · heads · W): query, key, value side by side
    keys: torch.Tensor,  # (B, heads, L, W), written in place; rows of the batch may lie apart
    values: torch.Tensor,  # the same, with the same strides
    filled: torch.Tensor,  # (B,) int64: places in use
) -> torch.Tensor:
    """-> (B, T, heads · W)."""
    if qkv.is_cuda:
        from rl_lab.components.nn.kernels import cached_attention_triton

        return cached_attention_triton.forward(qkv, keys, values, filled)
    heads, length = keys.shape[1:3]
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    place = (filled[:, None] + torch.arange(qkv.shape[1])).clamp(max=length - 1)
    index = place[:, None, :, None].expand(k.shape)
    keys.scatter_(2, index, k)
    values.scatter_(2, index, v)
    seen = (torch.arange(length) <= place[..., None]).unsqueeze(1)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen).transpose(1, 2).flatten(2)
