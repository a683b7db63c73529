"""λ-returns: a weighted average of all n-step returns (Sutton 1988; DreamerV3, equation 5).

The three return computers have the same arguments, so that a config can exchange them:

    returns = computer(reward, cont, value, last=None)

    reward  (B, T)    reward[:, t] arrived together with state t; reward[:, 0] is not used
    cont    (B, T)    weight of what follows state t: discount × (1 − terminated[:, t]), or a prediction of it
    value   (B, T)    value of state t, for bootstrapping
    last    (B, T)    True if state t is the last of its episode: the next row is of another episode, so the
                      return is bootstrapped with value[:, t] (times cont[:, t])
    returns (B, T-1)  of states 0 … T-2

The end of the sequence is bootstrapped with value[:, -1].
"""

from __future__ import annotations

import torch

from rl_lab.components.kernels.reverse_scan import reverse_scan


class TDLambdaReturns:
    """R[t] = r[t+1] + cont[t+1] · ((1 − λ) · value[t+1] + λ · R[t+1])."""

    def __init__(self, *, lam: float = 0.95) -> None:
        self.lam = lam

    def __call__(
        self,
        reward: torch.Tensor,
        cont: torch.Tensor,
        value: torch.Tensor,
        *,
        last: torch.Tensor | None = None,
    ) -> torch.Tensor:
        reward, cont = reward[:, 1:], cont[:, 1:]
        # Everything outside the recurrence is computed for all steps at once; one multiply-add per step
        # remains.
        gain = cont * self.lam if last is None else cont * self.lam * (~last[:, 1:])
        base = reward + (cont - gain) * value[:, 1:]
        return reverse_scan(base, gain, value[:, -1])
