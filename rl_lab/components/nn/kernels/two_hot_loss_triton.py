"""Triton kernels of two_hot_loss.py. Imported on CUDA only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl


@triton.jit
def _place(row, inner, outer_stride, inner_stride):
    """Where a row of two levels of a batch begins: a slice of a bigger tensor is read as it lies."""
    return (row // inner).to(tl.int64) * outer_stride + (row % inner) * inner_stride


@triton.jit
def _encoded(target, bins, inside, column, K: tl.constexpr):
    first = tl.load(bins)
    last = tl.load(bins + K - 1)
    # Chosen, not minimum and maximum: what is no number stays none.
    target = tl.where(target < first, first, target)
    target = tl.where(target > last, last, target)
    b = tl.load(bins + column, mask=inside, other=0.0)
    higher = (b[None, :] > target[:, None]) & inside[None, :]
    lower = K - 1 - tl.sum(higher.to(tl.int32), 1)
    lower = tl.where(lower < 0, 0, tl.where(lower > K - 2, K - 2, lower))
    below = tl.load(bins + lower)
    return lower, (target - below) / (tl.load(bins + lower + 1) - below)


@triton.jit
def _forward_kernel(
    logits, bins, first, second, loss, log_sum, lower, weight, rows, inner,
    logits_outer, logits_inner, first_outer, first_inner, second_outer, second_inner,
    K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TARGETS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < K
    known = row < rows
    at = logits + _place(row, inner, logits_outer, logits_inner)
    mask = known[:, None] & inside[None, :]
    x = tl.load(at[:, None] + column[None, :], mask=mask, other=-float("inf")).to(tl.float32)
    top = tl.where(known, tl.max(x, 1), 0.0)
    log_total = tl.log(tl.sum(tl.exp(x - top[:, None]), 1))
    total = tl.zeros((ROWS,), tl.float32)
    for which in tl.static_range(TARGETS):
        if which == 0:
            place = first + _place(row, inner, first_outer, first_inner)
        else:
            place = second + _place(row, inner, second_outer, second_inner)
        target = tl.load(place, mask=known, other=0.0).to(tl.float32)
        low, w = _encoded(target, bins, inside, column, K)
        below = tl.load(at + low, mask=known, other=0.0).to(tl.float32)
        above = tl.load(at + low + 1, mask=known, other=0.0).to(tl.float32)
        total -= (1.0 - w) * (below - top - log_total) + w * (above - top - log_total)
        tl.store(lower + which * rows + row, low, mask=known)
        tl.store(weight + which * rows + row, w, mask=known)
    tl.store(loss + row, total, mask=known)
    tl.store(log_sum + row, top + log_total, mask=known)


@triton.jit
def _backward_kernel(
    grad, logits, log_sum, lower, weight, out, rows, inner,
    grad_outer, grad_inner, logits_outer, logits_inner,
    K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TARGETS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    known = row < rows
    mask = known[:, None] & (column[None, :] < K)
    at = logits + _place(row, inner, logits_outer, logits_inner)
    x = tl.load(at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    g = tl.load(grad + _place(row, inner, grad_outer, grad_inner), mask=known, other=0.0).to(tl.float32)
    y = tl.exp(x - tl.load(log_sum + row, mask=known, other=0.0)[:, None]) * TARGETS
    for which in tl.static_range(TARGETS):
        low = tl.load(lower + which * rows + row, mask=known, other=0)[:, None]
        w = tl.load(weight + which * rows + row, mask=known, other=0.0)[:, None]
        y -= tl.where(column[None, :] == low, 1.0 - w, tl.where(column[None, :] == low + 1, w, 0.0))
    place = out + row[:, None].to(tl.int64) * K + column[None, :]
    tl.store(place, (g[:, None] * y).to(out.dtype.element_ty), mask=mask)


def _tiles(rows: int, bins: int) -> tuple[int, int, int]:
    """Padded width, rows of a program, warps."""
    block = triton.next_power_of_2(bins)
    # One warp keeps its rows' sums to itself: no barrier. Few rows are spread over the chip.
    group = 1 if rows <= 4096 else max(1, min(4, 1024 // block))
    return block, group, 1 if block <= 1024 else 4


def _levels(tensor: torch.Tensor, batch: torch.Size) -> torch.Tensor:
    """(*batch, …) as (outer, inner, …): a batch of two levels as it lies, others copied where they must be."""
    return tensor if len(batch) == 2 else tensor.reshape(1, batch.numel(), *tensor.shape[len(batch) :])


def _logits(logits: torch.Tensor) -> torch.Tensor:
    return _levels(logits if logits.stride(-1) == 1 else logits.contiguous(), logits.shape[:-1])


def forward(
    logits: torch.Tensor, bins: torch.Tensor, targets: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    assert len(targets) in (1, 2) and all(target.shape == logits.shape[:-1] for target in targets)
    batch, count = logits.shape[:-1], len(targets)
    loss, log_sum = (torch.empty(batch, dtype=torch.float32, device=logits.device) for _ in range(2))
    lower = torch.empty((count, *batch), dtype=torch.int32, device=logits.device)
    weight = torch.empty((count, *batch), dtype=torch.float32, device=logits.device)
    x, first, second = _logits(logits), _levels(targets[0], batch), _levels(targets[-1], batch)
    rows = batch.numel()
    block, group, warps = _tiles(rows, len(bins))
    _forward_kernel[(triton.cdiv(rows, group),)](
        x, bins, first, second, loss, log_sum, lower, weight, rows, x.shape[1],
        x.stride(0), x.stride(1), *first.stride(), *second.stride(),
        K=len(bins), BLOCK=block, ROWS=group, TARGETS=count, num_warps=warps,
    )  # fmt: skip
    return loss, (log_sum, lower, weight)


def backward(
    grad: torch.Tensor, logits: torch.Tensor, saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    log_sum, lower, weight = saved
    batch, bins = logits.shape[:-1], logits.shape[-1]
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    x, grad = _logits(logits), _levels(grad, batch)
    rows = batch.numel()
    block, group, warps = _tiles(rows, bins)
    _backward_kernel[(triton.cdiv(rows, group),)](
        grad, x, log_sum, lower, weight, out, rows, x.shape[1], *grad.stride(), x.stride(0), x.stride(1),
        K=bins, BLOCK=block, ROWS=group, TARGETS=len(lower), num_warps=warps,
    )  # fmt: skip
    return out
