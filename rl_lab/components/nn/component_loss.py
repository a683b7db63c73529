"""What every trained part of a token world model returns: the sum to minimise, and what it is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class LossWithIntermediateLosses:
    """loss_total (0-d) has the gradient; intermediate_losses are named, detached, and already weighted."""

    loss_total: torch.Tensor
    intermediate_losses: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, **losses: torch.Tensor) -> LossWithIntermediateLosses:
        """From weighted losses, 0-d each."""
        total = torch.stack([loss.float() for loss in losses.values()]).sum()
        return cls(total, {name: loss.detach() for name, loss in losses.items()})


def masked_mean(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Mean over the places where mask, of the leading dimensions of values, is True; 0 where there is none."""
    if mask is None:
        return values.mean()
    weight = mask.to(values.dtype)
    weight = weight.view(*mask.shape, *[1] * (values.ndim - mask.ndim)).expand_as(values)
    return (values * weight).sum() / weight.sum().clamp(min=1.0)
