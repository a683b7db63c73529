"""Rewards as three classes: negative, none, positive. For games whose rewards are worth their sign."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from rl_lab.components.nn.categorical import sample_index
from rl_lab.components.nn.symlog_two_hot import SymlogTwoHot


class SignReward(nn.Module):
    """Logits (…, 3)."""

    width = 3

    def loss(self, logits: torch.Tensor, reward: torch.Tensor) -> torch.Tensor:
        """Cross entropy to the reward's sign: (…, 3), (…) -> (…)."""
        target = (torch.sign(reward) + 1.0).long()
        return F.cross_entropy(logits.float().flatten(0, -2), target.flatten(), reduction="none").view_as(
            target
        )

    def draw(self, logits: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """A sample: (…, 3), (…) uniform -> (…) in {-1, 0, 1}."""
        return sample_index(torch.softmax(logits.float(), -1), noise).float() - 1.0


class TwoHotReward(SymlogTwoHot):
    """The reward itself, by two-hot regression in symlog space; what is drawn is its mean."""

    def draw(self, logits: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return self.mean(logits)


def make_reward(kind: str, bins: int, limit: float) -> SignReward | TwoHotReward:
    """For kind sign or two_hot, the latter with `bins` over symlog ±limit."""
    return SignReward() if kind == "sign" else TwoHotReward(bins, limit=limit)
