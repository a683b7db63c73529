"""Two-hot regression on exponentially spaced bins (DreamerV3, "symexp twohot").

A scalar is represented by the two nearest bins, weighted so that their mean is the scalar; the network is
trained with cross entropy, so that the scale of the targets does not affect the scale of the gradients.

The 2023 version of DreamerV3 averaged in symlog space ("symlog_disc"): symexp(Σ p·symlog bin). Both agree
where the network is certain; where it is not, the mean in symlog space is lower for returns above 0.
"""

from __future__ import annotations

import torch
from torch import nn

from rl_lab.components.nn.fast_path import compiled_pointwise
from rl_lab.errors import ConfigError, require_choice

SPACES = ("numbers", "symlog")


def symlog(x: torch.Tensor) -> torch.Tensor:
    """sign(x) · log(1 + |x|): compresses large values of either sign (DreamerV3, equation 1)."""
    return torch.sign(x) * torch.log1p(torch.abs(x))


def symexp(x: torch.Tensor) -> torch.Tensor:
    """The inverse of `symlog`."""
    return torch.sign(x) * torch.expm1(torch.abs(x))


class TwoHot(nn.Module):
    """Converts between logits (…, bins) and scalars (…), in float32.

    space: where bins are weighted and averaged: "numbers" (the scalars themselves) or "symlog". The buffers
           `positive` and `bins` are in that space.
    """

    fast = False  # loss and mean in one kernel each; see fast_path.py
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
                f"two-hot bins={bins} must be an odd number of at least 3, because the middle bin is zero"
            )
        self.count = bins
        self.in_symlog = space == "symlog"
        positive = torch.linspace(0.0, limit, (bins + 1) // 2)[1:]
        positive = positive if self.in_symlog else symexp(positive)
        self.register_buffer("positive", positive, persistent=False)
        # Negated, not computed separately: the bins are exactly symmetric and the middle one is exactly 0.
        self.register_buffer(
            "bins", torch.cat([-positive.flip(0), torch.zeros(1), positive]), persistent=False
        )

    def mean(self, logits: torch.Tensor) -> torch.Tensor:
        """Expected value: (…, bins) -> (…), exactly 0 for equal logits."""
        from rl_lab.components.kernels.two_hot import two_hot_mean

        mean = two_hot_mean(logits, self.positive, fast=self.fast)
        return symexp(mean) if self.in_symlog else mean

    def loss(
        self, logits: torch.Tensor, target: torch.Tensor, second: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Cross entropy to the target, plus that to a second target: logits (…, bins), targets (…) -> (…)."""
        needs_gradient = target.requires_grad or (second is not None and second.requires_grad)
        if self.fast and not needs_gradient:  # the fused loss has no gradient for targets
            from rl_lab.components.kernels.two_hot import two_hot_cross_entropy

            second = None if second is None else self._in_space(second)
            return two_hot_cross_entropy(logits, self.bins, self._in_space(target), second)
        log_probs = torch.log_softmax(logits.float(), -1)
        loss = self.cross_entropy(log_probs, target)
        return loss if second is None else loss + self.cross_entropy(log_probs, second)

    def cross_entropy(self, log_probs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """As `loss`, from log probabilities, so that two targets can share them."""
        lower, weight = self.encode(target)
        pair = torch.gather(log_probs, -1, torch.stack([lower, lower + 1], -1))
        return -((1.0 - weight) * pair[..., 0] + weight * pair[..., 1])

    def encode(self, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Index of the bin below (…), weight of the bin above (…); targets are clipped to the bins' range."""
        from rl_lab.components.kernels.two_hot import two_hot_encode

        return two_hot_encode(self._in_space(target), self.bins)

    def _in_space(self, value: torch.Tensor) -> torch.Tensor:
        """Map scalars (…) to the space of the bins."""
        return symlog(value.float()) if self.in_symlog else value


# --- Regression of TD-MPC and Δ-IRIS ---


@compiled_pointwise
def decode(logits: torch.Tensor, bins: torch.Tensor) -> torch.Tensor:
    """(R, K) logits, (K,) bins -> (R,): symexp of the mean bin, in float32 for any dtype of the logits."""
    # Multiply and sum: autocast would compute a matrix product in bfloat16.
    return symexp((torch.softmax(logits.float(), -1) * bins).sum(-1))


def cross_entropy(logits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """(…, K) logits, (…, K) probabilities of the target -> (…)."""
    return -(weights * torch.log_softmax(logits.float(), -1)).sum(-1)


class SymlogTwoHot(nn.Module):
    """Converts between logits (…, bins) and scalars (…), with evenly spaced bins and mean in symlog space.

    As in TD-MPC2 (nicklashansen/tdmpc2 common/math.py; 101 bins over symlog ±10 in config.yaml). `TwoHot`
    with space "symlog" has the same mean; its kernels take two targets and give exactly 0 for equal logits.
    """

    centers: torch.Tensor
    places: torch.Tensor

    def __init__(self, bins: int = 101, *, limit: float = 10.0) -> None:
        super().__init__()
        if bins < 2:
            raise ConfigError(f"two-hot bins={bins} must be at least 2; set 0 for squared error")
        self.width = bins
        self.limit = limit
        self.register_buffer("centers", torch.linspace(-limit, limit, bins), persistent=False)
        self.register_buffer("places", torch.arange(bins, dtype=torch.float32), persistent=False)

    def encode(self, target: torch.Tensor) -> torch.Tensor:
        """(…) -> (…, bins): weights of the two neighbouring bins; targets are clipped to the bins' range."""
        place = (symlog(target.float()).clamp(-self.limit, self.limit) + self.limit) * (
            (self.width - 1) / (2.0 * self.limit)
        )
        # A triangular function, non-zero at the two neighbours only: backward needs no scatter.
        return (1.0 - (place.unsqueeze(-1) - self.places).abs()).clamp(min=0.0)

    def mean(self, logits: torch.Tensor) -> torch.Tensor:
        """(…, bins) -> (…)."""
        # Flattened to rows, so that one compilation serves any number of axes.
        return decode(logits.reshape(-1, logits.shape[-1]), self.centers).view(logits.shape[:-1])

    def loss(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Cross entropy: logits (…, bins), target (…) or broadcastable -> (…)."""
        return cross_entropy(logits, self.encode(target))


class SquaredError(nn.Module):
    """Squared error with one output, as in the first TD-MPC, DreamerV1 and V2; `symlog=True` regresses the symlog."""

    width = 1

    def __init__(self, *, symlog: bool = False) -> None:
        super().__init__()
        self.symlog = symlog

    def mean(self, logits: torch.Tensor) -> torch.Tensor:
        """(…, 1) -> (…)."""
        value = logits.squeeze(-1).float()
        return symexp(value) if self.symlog else value

    def loss(
        self, logits: torch.Tensor, target: torch.Tensor, second: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(…, 1), (…) -> squared error (…), plus that to a second target (…)."""
        target = symlog(target.float()) if self.symlog else target.float()
        loss = (logits.squeeze(-1).float() - target).square()
        return loss if second is None else loss + self.loss(logits, second)


def make_regression(bins: int, limit: float) -> SymlogTwoHot | SquaredError:
    """Bins > 1: two-hot; 1: squared error in symlog space; 0: squared error (num_bins in the original)."""
    return SymlogTwoHot(bins, limit=limit) if bins > 1 else SquaredError(symlog=bins == 1)
