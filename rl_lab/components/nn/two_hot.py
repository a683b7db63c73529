"""Two-hot regression on exponentially spaced bins (DreamerV3, "symexp twohot").

A number is represented by the two bins around it, weighted so that their mean is the number itself; the network is
trained with cross entropy, so that the size of the target does not set the size of the gradient.

The first DreamerV3 weighted and averaged the bins' logarithms ("symlog_disc" of 2023): symexp(Σ p·symlog bin). The two
agree where the network is sure; where it is not, the mean of the logarithms is the lower one for returns above 0.
"""

from __future__ import annotations

import torch
from torch import nn

from rl_lab.components.nn.fast_path import fast
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
