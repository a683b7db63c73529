"""Triton kernels of latent.py. Imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _sample_kernel(
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


def _grid(batch: int, variables: int, classes: int) -> tuple[tuple[int, int], int, int]:
    block = triton.next_power_of_2(classes)
    group = max(1, min(triton.next_power_of_2(variables), 512 // block))
    return (batch, triton.cdiv(variables, group)), block, group


def sample_latent(
    logits: torch.Tensor, bias: torch.Tensor, noise: torch.Tensor, unimix: float, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, variables = noise.shape
    classes = logits.shape[-1] // variables
    probs = torch.empty((batch, variables, classes), dtype=torch.float32, device=logits.device)
    sample = torch.empty_like(logits) if out is None else out
    grid, block, group = _grid(batch, variables, classes)
    _sample_kernel[grid](
        logits, bias, noise, probs, sample, logits.stride(0), noise.stride(0), sample.stride(0), unimix,
        S=variables, C=classes, BLOCK=block, VARIABLES=group, num_warps=2,
    )  # fmt: skip
    return probs, sample


@triton.jit
def _sample_backward_kernel(
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


def sample_latent_backward(
    probs: torch.Tensor,
    grad_probs: torch.Tensor | None,
    grad_sample: torch.Tensor,
    product: torch.Tensor | None,
    unimix: float,
    low: torch.dtype,
) -> torch.Tensor:
    batch, variables, classes = probs.shape
    out = torch.empty((batch, variables * classes), dtype=low, device=probs.device)
    grid, block, group = _grid(batch, variables, classes)
    _sample_backward_kernel[grid](
        probs, probs if grad_probs is None else grad_probs, grad_sample, probs if product is None else product, out,
        0 if grad_probs is None else grad_probs.stride(0), grad_sample.stride(0), unimix,
        S=variables, C=classes, BLOCK=block, VARIABLES=group,
        HAS_PROBS=grad_probs is not None, HAS_PRODUCT=product is not None, num_warps=2,
    )  # fmt: skip
    return out
