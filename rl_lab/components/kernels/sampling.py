"""Samples from given noise, each in one pass: classes from logits, categorical latents, bounded normal actions."""

from __future__ import annotations

import torch

from rl_lab.components.kernels.triton_jit import cdiv, jit, next_power_of_2, tl
from rl_lab.components.nn.categorical import one_hot, sample_index, unimix_probs
from rl_lab.components.nn.fast_path import kernel_without_gradient

MAX_CLASSES = 8192  # classes that a program of `sample_logits` holds
ACTION_BLOCK = 256  # elements of a program


def sample_logits(logits: torch.Tensor, noise: torch.Tensor, *, fast: bool) -> torch.Tensor:
    """logits: (B, C), noise: (B,) uniform in [0, 1) -> (B,) int64; `categorical.sample_index` of their softmax."""
    if fast and logits.is_cuda and logits.shape[1] <= MAX_CLASSES:
        return _sample_logits_cuda(logits.contiguous(), noise)
    return sample_index(torch.softmax(logits.float(), -1), noise)


@jit
def _sample_logits_kernel(logits, noise, stride, index, C, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(logits + row * C + column, mask=column < C, other=-float("inf")).to(tl.float32)
    chance = tl.exp(value - tl.max(value, 0))
    borders = tl.cumsum(chance / tl.sum(chance, 0), 0)
    # The last class takes what rounding leaves above the sum.
    below = (borders <= tl.load(noise + row * stride)) & (column < C - 1)
    tl.store(index + row, tl.sum(below.to(tl.int32), 0).to(tl.int64))


def _sample_logits_cuda(logits: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    size, classes = logits.shape
    index = torch.empty(size, dtype=torch.int64, device=logits.device)
    block = next_power_of_2(classes)
    _sample_logits_kernel[(size,)](logits, noise, noise.stride(0), index, classes, BLOCK=block, num_warps=4)
    return index


def categorical_sample(
    logits: torch.Tensor,  # (B, S·C)
    bias: torch.Tensor,  # (S·C,) float32
    noise: torch.Tensor,  # (B, S) uniform; rows may be strided
    unimix: float,
    out: torch.Tensor | None = None,  # (B, S·C) rows may be strided
) -> tuple[torch.Tensor, torch.Tensor]:
    """Categorical latents with a uniform mixture: probabilities (B, S, C) float32, and the one-hot sample (B, S·C) in the logits' dtype."""
    if logits.is_cuda:
        return _categorical_sample_cuda(logits, bias, noise, unimix, out)
    variables = noise.shape[-1]
    probs = unimix_probs((logits.float() + bias).unflatten(-1, (variables, -1)), unimix)
    sample = one_hot(sample_index(probs, noise), probs.shape[-1]).flatten(-2)
    return probs, sample.to(logits.dtype) if out is None else out.copy_(sample)


def categorical_sample_backward(
    probs: torch.Tensor,  # (B, S, C) as given by `categorical_sample`
    grad_probs: torch.Tensor | None,  # (B, S, C) of the probabilities; rows may be strided
    grad_sample: torch.Tensor,  # (B, S·C) of the sample; rows may be strided
    product: torch.Tensor | None,  # (B, S·C) of the sample too, through the next step's product
    unimix: float,
    low: torch.dtype,
) -> torch.Tensor:
    """Gradient of the logits (B, S·C): the sample's gradient is passed straight through to the probabilities."""
    if probs.is_cuda:
        return _categorical_sample_backward_cuda(probs, grad_probs, grad_sample, product, unimix, low)
    parts = [grad for grad in (grad_sample, product, grad_probs) if grad is not None]
    g = sum(grad.reshape(probs.shape).float() for grad in parts) * (1.0 - unimix)
    soft = (probs - unimix / probs.shape[-1]) / (1.0 - unimix)
    return (soft * (g - (g * soft).sum(-1, keepdim=True))).flatten(-2).to(low)


@jit
def _categorical_kernel(
    logits, bias, noise, probs, sample, logits_stride, noise_stride, sample_stride, unimix,
    S: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, VARIABLES: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    variable = tl.program_id(1) * VARIABLES + tl.arange(0, VARIABLES)
    column = tl.arange(0, BLOCK)
    at = variable[:, None] * C + column[None, :]
    inside = (variable[:, None] < S) & (column[None, :] < C)
    x = tl.load(logits + b.to(tl.int64) * logits_stride + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias + at, mask=inside, other=0.0)
    x = tl.where(inside, x, -float("inf"))
    x = tl.exp(x - tl.max(tl.where(variable[:, None] < S, x, 0.0), 1)[:, None])
    x = tl.where(inside, x, 0.0)
    p = x / tl.maximum(tl.sum(x, 1)[:, None], 1e-38) * (1.0 - unimix) + unimix / C
    p = tl.where(inside, p, 0.0)
    tl.store(probs + b.to(tl.int64) * (S * C) + at, p, mask=inside)
    u = tl.load(noise + b.to(tl.int64) * noise_stride + variable, mask=variable < S, other=0.0)
    # Borders of all classes but the last, which takes what rounding leaves above the sum.
    below = (tl.cumsum(p, 1) <= u[:, None]) & (column[None, :] < C - 1)
    index = tl.sum(below.to(tl.int32), 1)
    chosen = (column[None, :] == index[:, None]).to(sample.dtype.element_ty)
    tl.store(sample + b.to(tl.int64) * sample_stride + at, chosen, mask=inside)


@jit
def _categorical_backward_kernel(
    probs, grad_probs, grad_sample, product, out, gp_stride, gs_stride, unimix,
    S: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, VARIABLES: tl.constexpr,
    HAS_PROBS: tl.constexpr, HAS_PRODUCT: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    variable = tl.program_id(1) * VARIABLES + tl.arange(0, VARIABLES)
    column = tl.arange(0, BLOCK)
    at = variable[:, None] * C + column[None, :]
    inside = (variable[:, None] < S) & (column[None, :] < C)
    row = b.to(tl.int64) * (S * C) + at
    g = tl.load(grad_sample + b.to(tl.int64) * gs_stride + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_PROBS:
        g += tl.load(grad_probs + b.to(tl.int64) * gp_stride + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_PRODUCT:
        g += tl.load(product + row, mask=inside, other=0.0).to(tl.float32)
    g = g * (1.0 - unimix)
    soft = tl.load(probs + row, mask=inside, other=0.0)
    soft = tl.where(inside, (soft - unimix / C) / (1.0 - unimix), 0.0)
    result = soft * (g - tl.sum(g * soft, 1)[:, None])
    tl.store(out + row, result.to(out.dtype.element_ty), mask=inside)


def _categorical_grid(batch: int, variables: int, classes: int) -> tuple[tuple[int, int], int, int]:
    block = next_power_of_2(classes)
    group = max(1, min(next_power_of_2(variables), 512 // block))
    return (batch, cdiv(variables, group)), block, group


def _categorical_sample_cuda(
    logits: torch.Tensor, bias: torch.Tensor, noise: torch.Tensor, unimix: float, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, variables = noise.shape
    classes = logits.shape[-1] // variables
    probs = torch.empty((batch, variables, classes), dtype=torch.float32, device=logits.device)
    sample = torch.empty_like(logits) if out is None else out
    grid, block, group = _categorical_grid(batch, variables, classes)
    _categorical_kernel[grid](
        logits, bias, noise, probs, sample, logits.stride(0), noise.stride(0), sample.stride(0), unimix,
        S=variables, C=classes, BLOCK=block, VARIABLES=group, num_warps=2,
    )  # fmt: skip
    return probs, sample


def _categorical_sample_backward_cuda(
    probs: torch.Tensor,
    grad_probs: torch.Tensor | None,
    grad_sample: torch.Tensor,
    product: torch.Tensor | None,
    unimix: float,
    low: torch.dtype,
) -> torch.Tensor:
    batch, variables, classes = probs.shape
    out = torch.empty((batch, variables * classes), dtype=low, device=probs.device)
    grid, block, group = _categorical_grid(batch, variables, classes)
    _categorical_backward_kernel[grid](
        probs, probs if grad_probs is None else grad_probs, grad_sample, probs if product is None else product, out,
        0 if grad_probs is None else grad_probs.stride(0), grad_sample.stride(0), unimix,
        S=variables, C=classes, BLOCK=block, VARIABLES=group,
        HAS_PROBS=grad_probs is not None, HAS_PRODUCT=product is not None, num_warps=2,
    )  # fmt: skip
    return out


def sample_normal(
    raw: torch.Tensor,  # (…, 2d): means before tanh, standard deviations before their bounds
    noise: torch.Tensor,  # (…, d) standard normal
    min_std: float,
    max_std: float,
    temperature: float,
    *,
    fast: bool,
) -> torch.Tensor:
    """Actions (…, d) float32."""
    if fast and kernel_without_gradient(raw):
        return _sample_normal_cuda(raw, noise, min_std, max_std, temperature)
    mean, std = bounded_normal(raw, min_std, max_std)
    return mean + std * temperature * noise


def bounded_normal(raw: torch.Tensor, min_std: float, max_std: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation (…, d) each, float32, differentiable."""
    mean, std = raw.float().chunk(2, -1)
    return torch.tanh(mean), (max_std - min_std) * torch.sigmoid(std + 2.0) + min_std


def limit_action(action: torch.Tensor, dtype: torch.dtype, *, fast: bool) -> torch.Tensor:
    """Actions (…, d) limited to [-1, 1], as the dynamics read them in imagination; no gradient through the limit."""
    if fast and kernel_without_gradient(action):
        return _limit_action_cuda(action, dtype)
    return (action / action.detach().abs().clamp(min=1.0)).to(dtype)


@jit
def _bounded_normal_kernel(raw, noise, out, count, D, low, width, temperature, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    at = raw + (i // D) * (2 * D) + i % D
    mean = 2.0 * tl.sigmoid(2.0 * tl.load(at, mask=inside, other=0.0).to(tl.float32)) - 1.0  # tanh
    std = width * tl.sigmoid(tl.load(at + D, mask=inside, other=0.0).to(tl.float32) + 2.0) + low
    tl.store(out + i, mean + std * temperature * tl.load(noise + i, mask=inside, other=0.0), mask=inside)


@jit
def _limit_action_kernel(action, out, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(action + i, mask=i < count, other=0.0)
    value = value / tl.maximum(tl.abs(value), 1.0)
    tl.store(out + i, value.to(out.dtype.element_ty), mask=i < count)


def _sample_normal_cuda(
    raw: torch.Tensor, noise: torch.Tensor, min_std: float, max_std: float, temperature: float
) -> torch.Tensor:
    out = torch.empty(noise.shape, dtype=torch.float32, device=raw.device)
    count = out.numel()
    _bounded_normal_kernel[(cdiv(count, ACTION_BLOCK),)](
        raw.contiguous(), noise.contiguous(), out, count, noise.shape[-1], min_std, max_std - min_std,
        temperature, BLOCK=ACTION_BLOCK,
    )  # fmt: skip
    return out


def _limit_action_cuda(action: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(action.shape, dtype=dtype, device=action.device)
    count = out.numel()
    _limit_action_kernel[(cdiv(count, ACTION_BLOCK),)](action.contiguous(), out, count, BLOCK=ACTION_BLOCK)
    return out
