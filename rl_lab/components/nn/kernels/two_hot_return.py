"""Worth of sequences whose rewards and final values are two-hot logits: decoded, discounted and summed in one pass."""

from __future__ import annotations

import torch

from rl_lab.components.nn.symlog import symexp


def two_hot_return(
    rewards: torch.Tensor,  # (H, R, K) logits of H steps
    values: torch.Tensor,  # (E, R, K) logits of E opinions, of which the mean counts
    bias: torch.Tensor | None,  # (E, K) to be added to the values' logits
    bins: torch.Tensor,  # (K,) in symlog space
    weight: torch.Tensor,  # (R, H + 1) discounts
    worst: float,  # what is no number counts as this
) -> torch.Tensor:
    """-> (R,) float32."""
    if rewards.is_cuda:
        from rl_lab.components.nn.kernels import two_hot_return_triton

        return two_hot_return_triton.two_hot_return(rewards, values, bias, bins, weight, worst)
    ends = values.float() if bias is None else values.float() + bias.float().unsqueeze(1)
    total = (weight[:, :-1].t() * _decode(rewards.float(), bins)).sum(0)
    return (total + weight[:, -1] * _decode(ends, bins).mean(0)).nan_to_num(nan=worst, neginf=worst)


def _decode(logits: torch.Tensor, bins: torch.Tensor) -> torch.Tensor:
    return symexp((torch.softmax(logits, -1) * bins).sum(-1))
