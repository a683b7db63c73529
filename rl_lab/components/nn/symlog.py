"""Symmetric logarithm: compresses large values of either sign (DreamerV3, equation 1)."""

from __future__ import annotations

import torch


def symlog(x: torch.Tensor) -> torch.Tensor:
    """sign(x) · log(1 + |x|)."""
    return torch.sign(x) * torch.log1p(torch.abs(x))


def symexp(x: torch.Tensor) -> torch.Tensor:
    """The inverse of `symlog`."""
    return torch.sign(x) * torch.expm1(torch.abs(x))
