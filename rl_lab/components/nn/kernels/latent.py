"""Categorical latents from logits: uniform mixture, sample by given noise, straight-through gradient."""

from __future__ import annotations

import torch

from rl_lab.components.nn.categorical import one_hot, sample_index, unimix_probs


def sample_latent(
    logits: torch.Tensor,  # (B, S·C)
    bias: torch.Tensor,  # (S·C,) float32
    noise: torch.Tensor,  # (B, S) uniform; rows may lie apart
    unimix: float,
    out: torch.Tensor | None = None,  # (B, S·C) rows may lie apart
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities (B, S, C) float32, and the one-hot sample (B, S·C) in the logits' dtype."""
    if logits.is_cuda:
        from rl_lab.components.nn.kernels import latent_triton

        return latent_triton.sample_latent(logits, bias, noise, unimix, out)
    variables = noise.shape[-1]
    probs = unimix_probs((logits.float() + bias).unflatten(-1, (variables, -1)), unimix)
    sample = one_hot(sample_index(probs, noise), probs.shape[-1]).flatten(-2)
    return probs, sample.to(logits.dtype) if out is None else out.copy_(sample)


def sample_latent_backward(
    probs: torch.Tensor,  # (B, S, C) as given by `sample_latent`
    grad_probs: torch.Tensor | None,  # (B, S, C) of the probabilities; rows may lie apart
    grad_sample: torch.Tensor,  # (B, S·C) of the sample; rows may lie apart
    product: torch.Tensor | None,  # (B, S·C) of the sample too, through the next step's product
    unimix: float,
    low: torch.dtype,
) -> torch.Tensor:
    """Gradient of the logits (B, S·C): the sample's gradient is passed straight through to the probabilities."""
    if probs.is_cuda:
        from rl_lab.components.nn.kernels import latent_triton

        return latent_triton.sample_latent_backward(probs, grad_probs, grad_sample, product, unimix, low)
    parts = [grad for grad in (grad_sample, product, grad_probs) if grad is not None]
    g = sum(grad.reshape(probs.shape).float() for grad in parts) * (1.0 - unimix)
    soft = (probs - unimix / probs.shape[-1]) / (1.0 - unimix)
    return (soft * (g - (g * soft).sum(-1, keepdim=True))).flatten(-2).to(low)
