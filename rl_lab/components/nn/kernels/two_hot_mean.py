"""The number that two-hot logits stand for, in one pass: every value and reward of a dream is one."""

from __future__ import annotations

import torch

from rl_lab.components.nn.fast_path import fast_without_gradient


def two_hot_mean(logits: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    """logits: (…, 2 P + 1), positive: (P,) the bins above 0, mirrored below it -> (…) float32.

    Each pair ±b is subtracted before anything is summed, so that equal logits give exactly 0: a plain sum would
    leave rounding error of the largest bins (4.9e8) in the result.
    """
    if fast_without_gradient(logits):
        from rl_lab.components.nn.kernels import two_hot_mean_triton

        return two_hot_mean_triton.mean(logits, positive)
    probs = torch.softmax(logits.float(), -1)
    half = len(positive)
    # Multiplied and summed, not a matrix product: autocast would do that in bfloat16.
    return ((probs[..., half + 1 :] - probs[..., :half].flip(-1)) * positive).sum(-1)
