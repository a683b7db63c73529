"""Categorical variables: uniform mixture, sampling from given noise, straight-through gradients, KL, entropy.

Probabilities and logarithms are float32. Random numbers are arguments: drawing them is the caller's business, so that
a captured graph and an eager call can be given the same ones.
"""

from __future__ import annotations

import torch


def unimix_probs(logits: torch.Tensor, unimix: float = 0.01) -> torch.Tensor:
    """Softmax mixed with the uniform distribution: (…, C) -> (…, C); no class ever has probability 0."""
    probs = torch.softmax(logits.float(), -1)
    return probs if unimix == 0.0 else probs * (1.0 - unimix) + unimix / logits.shape[-1]


def sample_index(probs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Inverse of the cumulative distribution: probs (…, C), noise (…) uniform in [0, 1) -> (…) int64."""
    # The last class takes what rounding leaves above the sum, so only C-1 borders are compared.
    borders = torch.cumsum(probs, -1)[..., :-1]
    return (borders <= noise.unsqueeze(-1)).sum(-1)


def one_hot(index: torch.Tensor, classes: int) -> torch.Tensor:
    """(…) integers -> (…, classes) float32, without the host check of torch's own."""
    return (index.unsqueeze(-1) == torch.arange(classes, device=index.device)).float()


def straight_through(probs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """One-hot sample whose gradient is that of the probabilities: probs (…, C), noise (…) -> (…, C)."""
    sample = one_hot(sample_index(probs.detach(), noise), probs.shape[-1])
    # In this order the added term is exactly 0 in the forward pass.
    return sample + (probs - probs.detach()) if probs.requires_grad else sample


def kl_divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p ‖ q) of S independent variables: (…, S, C) log probabilities -> (…), summed over the variables."""
    return (log_p.exp() * (log_p - log_q)).sum((-2, -1))


def entropy(log_p: torch.Tensor) -> torch.Tensor:
    """Entropy of S independent variables: (…, S, C) log probabilities -> (…)."""
    return -(log_p.exp() * log_p).sum((-2, -1))
