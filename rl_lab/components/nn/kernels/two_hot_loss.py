"""Cross entropy of two-hot logits to one number or two, each direction one pass over the logits.

Arithmetic is float32; the gradient is written in the logits' dtype, without a float32 copy of them on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Saved = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def two_hot_encode(target: torch.Tensor, bins: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of the bin below (…), and the weight of the bin above it (…). Beyond the ends: the last bin."""
    target = target.float().clamp(bins[0], bins[-1]).contiguous()
    lower = (torch.bucketize(target, bins, right=True) - 1).clamp(0, len(bins) - 2)
    below, above = bins[lower], bins[lower + 1]
    return lower, (target - below) / (above - below)


def two_hot_loss_forward(
    logits: torch.Tensor,  # (…, K)
    bins: torch.Tensor,  # (K,) float32, rising
    targets: Sequence[torch.Tensor],  # one or two, (…) each
) -> tuple[torch.Tensor, Saved]:
    """-> sum of the losses (…), and for the way back: log sum (…), bins below (n, …), weights of those above (n, …)."""
    if logits.is_cuda:
        from rl_lab.components.nn.kernels import two_hot_loss_triton

        return two_hot_loss_triton.forward(logits, bins, targets)
    log_sum = torch.logsumexp(logits.float(), -1)
    codes = [two_hot_encode(target, bins) for target in targets]
    lower, weight = (torch.stack(part) for part in zip(*codes, strict=True))
    loss = torch.zeros_like(log_sum)
    for low, w in codes:
        pair = logits.gather(-1, torch.stack([low, low + 1], -1)).float() - log_sum.unsqueeze(-1)
        loss = loss - ((1.0 - w) * pair[..., 0] + w * pair[..., 1])
    return loss, (log_sum, lower, weight)


def two_hot_loss_backward(grad: torch.Tensor, logits: torch.Tensor, saved: Saved) -> torch.Tensor:
    """Gradient of the logits (…, K) from that of the loss (…)."""
    if logits.is_cuda:
        from rl_lab.components.nn.kernels import two_hot_loss_triton

        return two_hot_loss_triton.backward(grad, logits, saved)
    log_sum, lower, weight = saved
    result = torch.exp(logits.float() - log_sum.unsqueeze(-1)) * len(lower)
    for low, w in zip(lower, weight, strict=True):
        result.scatter_add_(-1, torch.stack([low, low + 1], -1), torch.stack([w - 1.0, -w], -1))
    return (grad.unsqueeze(-1) * result).to(logits.dtype)


class TwoHotCrossEntropy(torch.autograd.Function):
    """`two_hot_loss_forward` with its gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, bins: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        loss, saved = two_hot_loss_forward(logits, bins, targets)
        ctx.save_for_backward(logits, *saved)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, *saved = ctx.saved_tensors
        gradient = two_hot_loss_backward(grad, logits, tuple(saved))
        return gradient, *[None] * (len(ctx.needs_input_grad) - 1)


def two_hot_cross_entropy(
    logits: torch.Tensor, bins: torch.Tensor, target: torch.Tensor, second: torch.Tensor | None = None
) -> torch.Tensor:
    """Logits (…, K), bins (K,), targets (…), which get no gradient -> (…) float32."""
    targets = (target,) if second is None else (target, second)
    result: torch.Tensor = TwoHotCrossEntropy.apply(logits, bins, *targets)
    return result
