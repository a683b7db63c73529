"""y[t] = base[t] + gain[t] · y[t+1], backwards in time: the recurrence of returns, in one kernel on CUDA."""

from __future__ import annotations

import torch


def reverse_recurrence(base: torch.Tensor, gain: torch.Tensor, final: torch.Tensor) -> torch.Tensor:
    """base, gain: (B, T) float32, final: (B,) stands for y[T] -> y (B, T). No gradient on CUDA."""
    if base.is_cuda and not torch.is_grad_enabled():
        from rl_lab.components.nn.kernels import recurrence_triton

        return recurrence_triton.reverse_recurrence(base, gain, final)
    result, results = final, []
    for base_t, gain_t in zip(reversed(base.unbind(1)), reversed(gain.unbind(1))):
        result = torch.addcmul(base_t, gain_t, result)
        results.append(result)
    return torch.stack(results[::-1], 1)
