"""λ-returns: a blend of all n-step returns (Sutton 1988; DreamerV3, equation 5).

The three return computers share one call, so that a config can swap them:

    returns = computer(reward, cont, value, last=None)

    reward  (B, T)    reward[:, t] arrived together with state t; reward[:, 0] is not used
    cont    (B, T)    how much of what follows state t counts: discount × (1 − terminated[:, t]), or a prediction of it
    value   (B, T)    value of state t, to bootstrap with
    last    (B, T)    True where state t is the last of its episode: what lies beyond is another one, and state t's
                      value stands in for it (cont decides whether it counts)
    returns (B, T-1)  of states 0 … T-2

The sequence's own end is bootstrapped with value[:, -1].
"""

from __future__ import annotations

import torch

from rl_lab.components.nn.kernels.recurrence import reverse_recurrence


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
        # All that does not recur, at once; one multiply-add per step remains.
        gain = cont * self.lam if last is None else cont * self.lam * (~last[:, 1:])
        base = reward + (cont - gain) * value[:, 1:]
        return reverse_recurrence(base, gain, value[:, -1])
