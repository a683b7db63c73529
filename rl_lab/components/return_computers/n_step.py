"""n-step returns: n rewards, then the value. The call is described in td_lambda.py."""

from __future__ import annotations

import torch


class NStepReturns:
    """R[t] = r[t+1] + cont[t+1] · (r[t+2] + … + cont[t+n] · value[t+n]); shorter where the episode or data ends."""

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
        # What state t is worth to the state before it: its value, then one more reward with every round.
        worth = value
        for _ in range(self.steps - 1):
            ahead = torch.cat([reward[:, 1:] + cont[:, 1:] * worth[:, 1:], value[:, -1:]], 1)
            worth = ahead if last is None else torch.where(last, value, ahead)
        return reward[:, 1:] + cont[:, 1:] * worth[:, 1:]
