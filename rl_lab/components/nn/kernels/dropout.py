"""Dropout from a seed, alone or behind a causal softmax, each as one pass over memory.

The mask is a hash of an element's place and the seed (see nn/seeded_dropout.py, which has the slow definition): forward
and backward compute it, nobody stores it.
"""

from __future__ import annotations

from typing import Any

import torch


class SeededDropout(torch.autograd.Function):
    """x (…) contiguous, CUDA; word: 0-d int64, the seed as an integer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rate: float, word: torch.Tensor) -> torch.Tensor:
        from rl_lab.components.nn.kernels import dropout_triton

        ctx.save_for_backward(word)
        ctx.rate = rate
        return dropout_triton.drop(x.contiguous(), rate, word)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from rl_lab.components.nn.kernels import dropout_triton

        (word,) = ctx.saved_tensors
        return dropout_triton.drop(grad.contiguous(), ctx.rate, word), None, None


class CausalSoftmaxDropout(torch.autograd.Function):
    """scores (…, T, T), CUDA -> dropout(softmax of what lies not ahead), in the scores' dtype."""

    @staticmethod
    def forward(
        ctx: Any, scores: torch.Tensor, scale: float, rate: float, word: torch.Tensor
    ) -> torch.Tensor:
        from rl_lab.components.nn.kernels import dropout_triton

        scores = scores.contiguous()
        ctx.save_for_backward(scores, word)
        ctx.settings = (scale, rate)
        return dropout_triton.softmax_forward(scores, scale, rate, word)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from rl_lab.components.nn.kernels import dropout_triton

        scores, word = ctx.saved_tensors
        scale, rate = ctx.settings
        return dropout_triton.softmax_backward(grad.contiguous(), scores, scale, rate, word), None, None, None
