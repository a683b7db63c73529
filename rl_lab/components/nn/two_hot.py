"""Two-hot regression on exponentially spaced bins (DreamerV3, "symexp twohot").

A number is represented by the two bins around it, weighted so that their mean is the number itself; the network is
trained with cross entropy, so that the size of the target does not set the size of the gradient.

The first DreamerV3 weighted and averaged the bins' logarithms ("symlog_disc" of 2023): symexp(Σ p·symlog bin). The two
agree where the network is sure; where it is not, the mean of the logarithms is the lower one for returns above 0.
"""

from __future__ import annotations

import torch
from torch import nn

from rl_lab.components.nn.fast_path import fast, piece
from rl_lab.components.nn.kernels.two_hot_loss import two_hot_cross_entropy, two_hot_encode
from rl_lab.components.nn.kernels.two_hot_mean import two_hot_mean
from rl_lab.components.nn.symlog import symexp, symlog
from rl_lab.errors import ConfigError, require_choice

SPACES = ("numbers", "symlog")


class TwoHot(nn.Module):
    """Bins, and the way between logits (…, bins) and numbers (…). Everything in float32.

    space: where bins are weighted and averaged, among the numbers or their symmetric logarithms. `positive` and `bins`
    are given in that space.
    """

    positive: torch.Tensor
    bins: torch.Tensor

    def __init__(
        self,
        bins: int = 255,  # danijar/dreamerv3: 255 bins, symexp(±20)
        *,
        limit: float = 20.0,
        space: str = "numbers",
    ) -> None:
        super().__init__()
        require_choice("two-hot space", space, SPACES)
        if bins < 3 or bins % 2 == 0:
            raise ConfigError(
                f"two-hot bins must be an odd number of at least 3, not {bins}: zero is the middle one"
            )
        self.count = bins
        self.in_symlog = space == "symlog"
        positive = torch.linspace(0.0, limit, (bins + 1) // 2)[1:]
        positive = positive if self.in_symlog else symexp(positive)
        self.register_buffer("positive", positive, persistent=False)
        # Mirrored, not computed twice: the bins are exactly symmetric and the middle one is exactly 0.
        self.register_buffer(
            "bins", torch.cat([-positive.flip(0), torch.zeros(1), positive]), persistent=False
        )

    def mean(self, logits: torch.Tensor) -> torch.Tensor:
        """Expected value: (…, bins) -> (…). Equal logits give exactly 0."""
        mean = two_hot_mean(logits, self.positive)
        return symexp(mean) if self.in_symlog else mean

    def loss(
        self, logits: torch.Tensor, target: torch.Tensor, second: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Cross entropy to a number, plus that to a second one: logits (…, bins), each target (…) -> (…)."""
        given = target.requires_grad or (second is not None and second.requires_grad)
        if fast() and not given:  # the fused form has no gradient for targets
            second = None if second is None else self._in_space(second)
            return two_hot_cross_entropy(logits, self.bins, self._in_space(target), second)
        log_probs = torch.log_softmax(logits.float(), -1)
        loss = self.cross_entropy(log_probs, target)
        return loss if second is None else loss + self.cross_entropy(log_probs, second)

    def cross_entropy(self, log_probs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """As `loss`, from log probabilities: two targets can share them."""
        lower, weight = self.encode(target)
        pair = torch.gather(log_probs, -1, torch.stack([lower, lower + 1], -1))
        return -((1.0 - weight) * pair[..., 0] + weight * pair[..., 1])

    def encode(self, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Index of the bin below (…), and the weight of the bin above it (…). Beyond the ends: the last bin."""
        return two_hot_encode(self._in_space(target), self.bins)

    def _in_space(self, number: torch.Tensor) -> torch.Tensor:
        """A number (…) in the space of the bins."""
        return symlog(number.float()) if self.in_symlog else number


# --------------------
# Regression of numbers for TD-MPC and Δ-IRIS: two-hot in symlog space, or plain squared error.
#
# The bins are evenly spaced *in symlog space* and the mean is taken there, then mapped back: symexp(Σ p·bin). That is
# TD-MPC2's form (nicklashansen/tdmpc2 common/math.py); DreamerV3 averages in the space of the numbers,
# or did likewise in 2023 (two_hot.py, whose kernels take two targets and end at exactly 0 for equal logits).


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
