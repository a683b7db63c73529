from __future__ import annotations

import torch

from rl_lab.components.dynamics.deterministic_mlp import DeterministicMLP


def test_rollout_matches_steps():
    torch.manual_seed(0)
    dynamics = DeterministicMLP(3, 2, units=8, layers=1)
    latent, actions = torch.randn(4, 3), torch.randn(4, 5, 2)
    rollout = dynamics.imagine(latent, actions)
    assert rollout.shape == (4, 6, 3)
    step = latent
    for t in range(5):
        assert torch.equal(rollout[:, t], step)
        step = dynamics(step, actions[:, t])
    assert torch.equal(rollout[:, 5], step)
    rollout.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in dynamics.parameters())


def test_without_residual():
    dynamics = DeterministicMLP(3, 2, units=8, layers=1, residual=False)
    zero = dynamics(torch.zeros(1, 3), torch.zeros(1, 2))
    assert torch.equal(dynamics.mlp(torch.zeros(1, 5)), zero)
