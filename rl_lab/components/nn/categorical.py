"""Categorical variables: uniform mixture, sampling from given noise, straight-through gradients, KL, entropy.

Probabilities and log probabilities are float32. The caller draws the random values, so that a captured CUDA
graph and an eager call can use the same ones.
"""

from __future__ import annotations

import torch


def unimix_probs(logits: torch.Tensor, unimix: float = 0.01) -> torch.Tensor:
    """Softmax mixed with the uniform distribution: (…, C) -> (…, C); no class ever has probability 0."""
    probs = torch.softmax(logits.float(), -1)
    return probs if unimix == 0.0 else probs * (1.0 - unimix) + unimix / logits.shape[-1]


def sample_index(probs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Inverse of the cumulative distribution: probs (…, C), noise (…) uniform in [0, 1) -> (…) int64."""
    # Only C-1 cumulative values are compared: where rounding leaves the sum below 1, the last class takes the
    # rest.
    cumulative = torch.cumsum(probs, -1)[..., :-1]
    return (cumulative <= noise.unsqueeze(-1)).sum(-1)


def one_hot(index: torch.Tensor, classes: int) -> torch.Tensor:
    """(…) integers -> (…, classes) float32, without the device-to-host check of `F.one_hot`."""
    return (index.unsqueeze(-1) == torch.arange(classes, device=index.device)).float()


def straight_through(probs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """One-hot sample with the gradient of the probabilities: probs (…, C), noise (…) -> (…, C)."""
    sample = one_hot(sample_index(probs.detach(), noise), probs.shape[-1])
    # Summed in this order, the added term is exactly 0 in the forward pass.
    return sample + (probs - probs.detach()) if probs.requires_grad else sample


def kl_divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p ‖ q) of S independent variables: (…, S, C) log probabilities -> (…), summed over the variables."""
    return (log_p.exp() * (log_p - log_q)).sum((-2, -1))


def entropy(log_p: torch.Tensor) -> torch.Tensor:
    """Entropy of S independent variables: (…, S, C) log probabilities -> (…)."""
    return -(log_p.exp() * log_p).sum((-2, -1))
