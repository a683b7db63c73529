"""A class drawn from logits and given noise, in one pass: between any two tokens of a dream."""

from __future__ import annotations

import torch

from rl_lab.components.nn.categorical import sample_index
from rl_lab.components.nn.fast_path import fast

MOST = 8192  # classes that a program of the kernel holds


def sample_logits(logits: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """logits: (B, C), noise: (B,) uniform in [0, 1) -> (B,) int64; `categorical.sample_index` of their softmax."""
    if logits.is_cuda and fast() and logits.shape[1] <= MOST:
        from rl_lab.components.nn.kernels import sample_logits_triton

        return sample_logits_triton.sample(logits.contiguous(), noise)
    return sample_index(torch.softmax(logits.float(), -1), noise)
