"""n-step returns: n rewards, then the value. See td_lambda.py for the arguments."""

from __future__ import annotations

import torch


class NStepReturns:
    """R[t] = r[t+1] + cont[t+1] · (r[t+2] + … + cont[t+n] · value[t+n]).

    The number of steps is smaller where the episode or the data ends.
    """

    def __init__(self, *, steps: int = 5) -> None:
        self.steps = steps

    def __call__(
        self,
        reward: torch.Tensor,
        cont: torch.Tensor,
        value: torch.Tensor,
        *,
        last: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # (B, T) k-step returns, starting with k = 0; each iteration adds one reward.
        returns = value
        for _ in range(self.steps - 1):
            ahead = torch.cat([reward[:, 1:] + cont[:, 1:] * returns[:, 1:], value[:, -1:]], 1)
            returns = ahead if last is None else torch.where(last, value, ahead)
        return reward[:, 1:] + cont[:, 1:] * returns[:, 1:]
