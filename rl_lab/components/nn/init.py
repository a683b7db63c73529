"""Weight initialisation of DreamerV3 (danijar/dreamerv3, embodied/jax/nets.py)."""

from __future__ import annotations

import math

import torch
from torch import nn

# A standard normal cut at ±2 has standard deviation 0.8796; this factor brings it back to 1.
TRUNCATION = 1.1368


@torch.no_grad()
def truncated_normal_(weight: torch.Tensor, fan_in: int, scale: float = 1.0) -> torch.Tensor:
    """Fill `weight` from a normal cut at two deviations, with variance scale² / fan_in. Scale 0 gives zeros."""
    if scale == 0.0:
        return weight.zero_()
    std = TRUNCATION * math.sqrt(1.0 / fan_in)
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
    return weight.mul_(scale)
