"""Actions of a bounded normal policy, without gradient: many tiny pieces of arithmetic on a few numbers, as one kernel."""

from __future__ import annotations

import torch

from rl_lab.components.nn.fast_path import fast_without_gradient


def sample_normal(
    raw: torch.Tensor,  # (…, 2d): before tanh the means, before their bounds the deviations
    noise: torch.Tensor,  # (…, d) standard normal
    min_std: float,
    max_std: float,
    temperature: float,
) -> torch.Tensor:
    """Actions (…, d) float32."""
    if fast_without_gradient(raw):
        from rl_lab.components.nn.kernels import normal_action_triton

        return normal_action_triton.sample_normal(raw, noise, min_std, max_std, temperature)
    mean, std = bounded_normal(raw, min_std, max_std)
    return mean + std * temperature * noise


def bounded_normal(raw: torch.Tensor, min_std: float, max_std: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation (…, d) each, float32, differentiable."""
    mean, std = raw.float().chunk(2, -1)
    return torch.tanh(mean), (max_std - min_std) * torch.sigmoid(std + 2.0) + min_std


def limit_action(action: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Actions (…, d) limited to [-1, 1], as a dream's dynamics read them; no gradient through the limit."""
    if fast_without_gradient(action):
        from rl_lab.components.nn.kernels import normal_action_triton

        return normal_action_triton.limit_action(action, dtype)
    return (action / action.detach().abs().clamp(min=1.0)).to(dtype)
