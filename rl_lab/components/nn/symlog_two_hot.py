"""Regression of numbers for TD-MPC and Δ-IRIS: two-hot in symlog space, or plain squared error.

The bins are evenly spaced *in symlog space* and the mean is taken there, then mapped back: symexp(Σ p·bin). That is
TD-MPC2's form (nicklashansen/tdmpc2 common/math.py); DreamerV3 averages in the space of the numbers,
or did likewise in 2023 (two_hot.py, whose kernels take two targets and end at exactly 0 for equal logits).
"""

from __future__ import annotations

import torch
from torch import nn

from rl_lab.components.nn.regional_compile import piece
from rl_lab.components.nn.symlog import symexp, symlog
from rl_lab.errors import ConfigError


@piece
def decode(logits: torch.Tensor, bins: torch.Tensor) -> torch.Tensor:
    """(R, K) logits, (K,) bins -> (R,): the mean bin, out of symlog space. float32 whatever the logits are."""
    # Multiplied and summed, not a matrix product: autocast would do that in bfloat16.
    return symexp((torch.softmax(logits.float(), -1) * bins).sum(-1))


def cross_entropy(logits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """(…, K) logits, (…, K) probabilities of the target -> (…)."""
    return -(weights * torch.log_softmax(logits.float(), -1)).sum(-1)


class SymlogTwoHot(nn.Module):
    """Logits (…, bins) and numbers (…). 101 bins over symlog ±10: nicklashansen/tdmpc2 config.yaml."""

    centers: torch.Tensor
    places: torch.Tensor

    def __init__(self, bins: int = 101, *, limit: float = 10.0) -> None:
        super().__init__()
        if bins < 2:
            raise ConfigError(
                f"two-hot regression needs at least 2 bins, not {bins}: 0 means plain squared error"
            )
        self.width = bins
        self.limit = limit
        self.register_buffer("centers", torch.linspace(-limit, limit, bins), persistent=False)
        self.register_buffer("places", torch.arange(bins, dtype=torch.float32), persistent=False)

    def encode(self, target: torch.Tensor) -> torch.Tensor:
        """(…) -> (…, bins): weight 1 on a bin, or shared by the two neighbours. Beyond the ends: the last bin."""
        place = (symlog(target.float()).clamp(-self.limit, self.limit) + self.limit) * (
            (self.width - 1) / (2.0 * self.limit)
        )
        # A tent around the target touches exactly its two neighbours; no gather, so no scatter in the backward pass.
        return (1.0 - (place.unsqueeze(-1) - self.places).abs()).clamp(min=0.0)

    def mean(self, logits: torch.Tensor) -> torch.Tensor:
        """(…, bins) -> (…)."""
        # Rows in one line: one compilation serves every number of axes.
        return decode(logits.reshape(-1, logits.shape[-1]), self.centers).view(logits.shape[:-1])

    def loss(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Cross entropy: logits (…, bins), target (…) or broadcast to it -> (…)."""
        return cross_entropy(logits, self.encode(target))


class SquaredError(nn.Module):
    """The plain alternative, one output: TD-MPC's first version; `symlog=True` regresses the symlog instead."""

    width = 1

    def __init__(self, *, symlog: bool = False) -> None:
        super().__init__()
        self.symlog = symlog

    def mean(self, logits: torch.Tensor) -> torch.Tensor:
        """(…, 1) -> (…)."""
        value = logits.squeeze(-1).float()
        return symexp(value) if self.symlog else value

    def loss(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """(…, 1), (…) -> squared error (…)."""
        target = symlog(target.float()) if self.symlog else target.float()
        return (logits.squeeze(-1).float() - target).square()


def make_regression(bins: int, limit: float) -> SymlogTwoHot | SquaredError:
    """Bins > 1: two-hot; 1: squared error in symlog space; 0: squared error (the original's num_bins)."""
    return SymlogTwoHot(bins, limit=limit) if bins > 1 else SquaredError(symlog=bins == 1)
