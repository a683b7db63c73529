"""Monte-Carlo returns: the discounted sum of rewards. See td_lambda.py for the arguments."""

from __future__ import annotations

import torch

from rl_lab.components.return_computers.td_lambda import TDLambdaReturns


class DiscountedReturns:
    """R[t] = r[t+1] + cont[t+1] · R[t+1].

    bootstrap: use the value where the data ends before the episode does
    """

    def __init__(self, *, bootstrap: bool = True) -> None:
        self.bootstrap = bootstrap
        self._sum = TDLambdaReturns(lam=1.0)

    def __call__(
        self,
        reward: torch.Tensor,
        cont: torch.Tensor,
        value: torch.Tensor,
        *,
        last: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._sum(reward, cont, value if self.bootstrap else torch.zeros_like(value), last=last)
