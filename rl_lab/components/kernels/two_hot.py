"""Two-hot logits over bins: cross entropy, mean, and the return of a sequence, each direction one pass over the logits.

Arithmetic is float32; the loss' gradient is written in the logits' dtype, without a float32 copy of them on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl_lab.components.kernels.triton_jit import cdiv, jit, next_power_of_2, tl
from rl_lab.components.nn.fast_path import kernel_without_gradient
from rl_lab.components.nn.two_hot import symexp

RETURN_ROWS = 4  # sequences of a program of `two_hot_return`
Saved = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def two_hot_encode(target: torch.Tensor, bins: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of the bin below (…), and the weight of the bin above it (…). Beyond the ends: the last bin."""
    target = target.float().clamp(bins[0], bins[-1]).contiguous()
    lower = (torch.bucketize(target, bins, right=True) - 1).clamp(0, len(bins) - 2)
    below, above = bins[lower], bins[lower + 1]
    return lower, (target - below) / (above - below)


def two_hot_loss_forward(
    logits: torch.Tensor,  # (…, K)
    bins: torch.Tensor,  # (K,) float32, ascending
    targets: Sequence[torch.Tensor],  # one or two, (…) each
) -> tuple[torch.Tensor, Saved]:
    """-> sum of the losses (…), and for the backward pass: log sum (…), bins below (n, …), weights of the bins above (n, …)."""
    if logits.is_cuda:
        return _two_hot_loss_cuda(logits, bins, targets)
    log_sum = torch.logsumexp(logits.float(), -1)
    codes = [two_hot_encode(target, bins) for target in targets]
    lower, weight = (torch.stack(part) for part in zip(*codes, strict=True))
    loss = torch.zeros_like(log_sum)
    for low, w in codes:
        pair = logits.gather(-1, torch.stack([low, low + 1], -1)).float() - log_sum.unsqueeze(-1)
        loss = loss - ((1.0 - w) * pair[..., 0] + w * pair[..., 1])
    return loss, (log_sum, lower, weight)


def two_hot_loss_backward(grad: torch.Tensor, logits: torch.Tensor, saved: Saved) -> torch.Tensor:
    """Gradient of the logits (…, K) from that of the loss (…)."""
    if logits.is_cuda:
        return _two_hot_loss_backward_cuda(grad, logits, saved)
    log_sum, lower, weight = saved
    result = torch.exp(logits.float() - log_sum.unsqueeze(-1)) * len(lower)
    for low, w in zip(lower, weight, strict=True):
        result.scatter_add_(-1, torch.stack([low, low + 1], -1), torch.stack([w - 1.0, -w], -1))
    return (grad.unsqueeze(-1) * result).to(logits.dtype)


class TwoHotCrossEntropy(torch.autograd.Function):
    """`two_hot_loss_forward` with its gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, bins: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        loss, saved = two_hot_loss_forward(logits, bins, targets)
        ctx.save_for_backward(logits, *saved)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, *saved = ctx.saved_tensors
        gradient = two_hot_loss_backward(grad, logits, tuple(saved))
        return gradient, *[None] * (len(ctx.needs_input_grad) - 1)


def two_hot_cross_entropy(
    logits: torch.Tensor, bins: torch.Tensor, target: torch.Tensor, second: torch.Tensor | None = None
) -> torch.Tensor:
    """Logits (…, K), bins (K,), targets (…), which get no gradient -> (…) float32."""
    targets = (target,) if second is None else (target, second)
    result: torch.Tensor = TwoHotCrossEntropy.apply(logits, bins, *targets)
    return result


@jit
def _row_offset(row, inner, outer_stride, inner_stride):
    """Offset of a row in a batch of two dimensions, which may be a slice of a bigger tensor."""
    return (row // inner).to(tl.int64) * outer_stride + (row % inner) * inner_stride


@jit
def _encode(target, bins, inside, column, K: tl.constexpr):
    first = tl.load(bins)
    last = tl.load(bins + K - 1)
    # `where`, not minimum and maximum: NaN stays NaN.
    target = tl.where(target < first, first, target)
    target = tl.where(target > last, last, target)
    b = tl.load(bins + column, mask=inside, other=0.0)
    higher = (b[None, :] > target[:, None]) & inside[None, :]
    lower = K - 1 - tl.sum(higher.to(tl.int32), 1)
    lower = tl.where(lower < 0, 0, tl.where(lower > K - 2, K - 2, lower))
    below = tl.load(bins + lower)
    return lower, (target - below) / (tl.load(bins + lower + 1) - below)


@jit
def _loss_kernel(
    logits, bins, first, second, loss, log_sum, lower, weight, rows, inner,
    logits_outer, logits_inner, first_outer, first_inner, second_outer, second_inner,
    K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TARGETS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < K
    known = row < rows
    at = logits + _row_offset(row, inner, logits_outer, logits_inner)
    mask = known[:, None] & inside[None, :]
    x = tl.load(at[:, None] + column[None, :], mask=mask, other=-float("inf")).to(tl.float32)
    top = tl.where(known, tl.max(x, 1), 0.0)
    log_total = tl.log(tl.sum(tl.exp(x - top[:, None]), 1))
    total = tl.zeros((ROWS,), tl.float32)
    for which in tl.static_range(TARGETS):
        if which == 0:
            place = first + _row_offset(row, inner, first_outer, first_inner)
        else:
            place = second + _row_offset(row, inner, second_outer, second_inner)
        target = tl.load(place, mask=known, other=0.0).to(tl.float32)
        low, w = _encode(target, bins, inside, column, K)
        below = tl.load(at + low, mask=known, other=0.0).to(tl.float32)
        above = tl.load(at + low + 1, mask=known, other=0.0).to(tl.float32)
        total -= (1.0 - w) * (below - top - log_total) + w * (above - top - log_total)
        tl.store(lower + which * rows + row, low, mask=known)
        tl.store(weight + which * rows + row, w, mask=known)
    tl.store(loss + row, total, mask=known)
    tl.store(log_sum + row, top + log_total, mask=known)


@jit
def _loss_backward_kernel(
    grad, logits, log_sum, lower, weight, out, rows, inner,
    grad_outer, grad_inner, logits_outer, logits_inner,
    K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TARGETS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    known = row < rows
    mask = known[:, None] & (column[None, :] < K)
    at = logits + _row_offset(row, inner, logits_outer, logits_inner)
    x = tl.load(at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    g = tl.load(grad + _row_offset(row, inner, grad_outer, grad_inner), mask=known, other=0.0).to(tl.float32)
    y = tl.exp(x - tl.load(log_sum + row, mask=known, other=0.0)[:, None]) * TARGETS
    for which in tl.static_range(TARGETS):
        low = tl.load(lower + which * rows + row, mask=known, other=0)[:, None]
        w = tl.load(weight + which * rows + row, mask=known, other=0.0)[:, None]
        y -= tl.where(column[None, :] == low, 1.0 - w, tl.where(column[None, :] == low + 1, w, 0.0))
    place = out + row[:, None].to(tl.int64) * K + column[None, :]
    tl.store(place, (g[:, None] * y).to(out.dtype.element_ty), mask=mask)


def _loss_tiles(rows: int, bins: int) -> tuple[int, int, int]:
    """Padded width, rows of a program, warps."""
    block = next_power_of_2(bins)
    # One warp keeps its rows' sums to itself: no barrier. Few rows are spread over the chip.
    group = 1 if rows <= 4096 else max(1, min(4, 1024 // block))
    return block, group, 1 if block <= 1024 else 4


def _two_dims(tensor: torch.Tensor, batch: torch.Size) -> torch.Tensor:
    """(*batch, …) as (outer, inner, …): a batch of two dimensions as it is, others reshaped."""
    return tensor if len(batch) == 2 else tensor.reshape(1, batch.numel(), *tensor.shape[len(batch) :])


def _logit_rows(logits: torch.Tensor) -> torch.Tensor:
    return _two_dims(logits if logits.stride(-1) == 1 else logits.contiguous(), logits.shape[:-1])


def _two_hot_loss_cuda(
    logits: torch.Tensor, bins: torch.Tensor, targets: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Saved]:
    assert len(targets) in (1, 2) and all(target.shape == logits.shape[:-1] for target in targets)
    batch, count = logits.shape[:-1], len(targets)
    loss, log_sum = (torch.empty(batch, dtype=torch.float32, device=logits.device) for _ in range(2))
    lower = torch.empty((count, *batch), dtype=torch.int32, device=logits.device)
    weight = torch.empty((count, *batch), dtype=torch.float32, device=logits.device)
    x, first, second = _logit_rows(logits), _two_dims(targets[0], batch), _two_dims(targets[-1], batch)
    rows = batch.numel()
    block, group, warps = _loss_tiles(rows, len(bins))
    _loss_kernel[(cdiv(rows, group),)](
        x, bins, first, second, loss, log_sum, lower, weight, rows, x.shape[1],
        x.stride(0), x.stride(1), *first.stride(), *second.stride(),
        K=len(bins), BLOCK=block, ROWS=group, TARGETS=count, num_warps=warps,
    )  # fmt: skip
    return loss, (log_sum, lower, weight)


def _two_hot_loss_backward_cuda(grad: torch.Tensor, logits: torch.Tensor, saved: Saved) -> torch.Tensor:
    log_sum, lower, weight = saved
    batch, bins = logits.shape[:-1], logits.shape[-1]
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    x, grad = _logit_rows(logits), _two_dims(grad, batch)
    rows = batch.numel()
    block, group, warps = _loss_tiles(rows, bins)
    _loss_backward_kernel[(cdiv(rows, group),)](
        grad, x, log_sum, lower, weight, out, rows, x.shape[1], *grad.stride(), x.stride(0), x.stride(1),
        K=bins, BLOCK=block, ROWS=group, TARGETS=len(lower), num_warps=warps,
    )  # fmt: skip
    return out


def two_hot_mean(logits: torch.Tensor, positive: torch.Tensor, *, fast: bool) -> torch.Tensor:
    """The mean of two-hot logits. logits: (…, 2 P + 1), positive: (P,) the bins above 0, mirrored below it -> (…) float32.

    Each pair ±b is subtracted before anything is summed, so that equal logits give exactly 0: a plain sum would
    leave rounding error of the largest bins (4.9e8) in the result.
    """
    if fast and kernel_without_gradient(logits):
        return _two_hot_mean_cuda(logits, positive)
    probs = torch.softmax(logits.float(), -1)
    half = len(positive)
    # Multiplied and summed, not a matrix product: autocast would do that in bfloat16.
    return ((probs[..., half + 1 :] - probs[..., :half].flip(-1)) * positive).sum(-1)


@jit
def _mean_kernel(
    logits, positive, out, rows, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < HALF
    mask = (row[:, None] < rows) & inside[None, :]
    middle = row.to(tl.int64) * (2 * HALF + 1) + HALF
    at = middle[:, None] + 1 + column[None, :]
    mirrored = middle[:, None] - 1 - column[None, :]
    # Rows beyond the last may have any value: they are not stored.
    m = tl.load(logits + middle, mask=row < rows, other=0.0).to(tl.float32)
    x = tl.load(logits + at, mask=mask, other=-float("inf")).to(tl.float32)
    y = tl.load(logits + mirrored, mask=mask, other=-float("inf")).to(tl.float32)
    top = tl.maximum(tl.max(tl.maximum(x, y), 1), m)
    x = tl.exp(x - top[:, None])
    y = tl.exp(y - top[:, None])
    total = tl.sum(x + y, 1) + tl.exp(m - top)
    b = tl.load(positive + column, mask=inside, other=0.0)
    tl.store(out + row, tl.sum((x - y) * b[None, :], 1) / total, mask=row < rows)


def _two_hot_mean_cuda(logits: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    out = torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device)
    rows, block = out.numel(), next_power_of_2(len(positive))
    # One warp keeps its rows' sums to itself: no barrier. Few rows are spread over the chip.
    group = 1 if rows <= 4096 else max(1, min(4, 512 // block))
    _mean_kernel[(cdiv(rows, group),)](
        logits.contiguous(), positive, out, rows, HALF=len(positive), BLOCK=block, ROWS=group,
        num_warps=1 if block <= 512 else 4,
    )  # fmt: skip
    return out


def two_hot_return(
    rewards: torch.Tensor,  # (H, R, K) logits of H steps
    values: torch.Tensor,  # (E, R, K) logits of E critics, which are averaged
    bias: torch.Tensor | None,  # (E, K) to be added to the values' logits
    bins: torch.Tensor,  # (K,) in symlog space
    weight: torch.Tensor,  # (R, H + 1) discounts
    worst: float,  # replaces NaN
) -> torch.Tensor:
    """Discounted return of sequences whose rewards and final values are two-hot logits. -> (R,) float32."""
    if rewards.is_cuda:
        return _two_hot_return_cuda(rewards, values, bias, bins, weight, worst)
    ends = values.float() if bias is None else values.float() + bias.float().unsqueeze(1)
    total = (weight[:, :-1].t() * _decode(rewards.float(), bins)).sum(0)
    return (total + weight[:, -1] * _decode(ends, bins).mean(0)).nan_to_num(nan=worst, neginf=worst)


def _decode(logits: torch.Tensor, bins: torch.Tensor) -> torch.Tensor:
    return symexp((torch.softmax(logits, -1) * bins).sum(-1))


@jit
def _symexp_mean(x, b, inside):
    x = tl.where(inside[None, :], x, float("-inf"))
    e = tl.exp(x - tl.max(x, 1)[:, None])
    mean = tl.sum(e * b[None, :], 1) / tl.sum(e, 1)
    size = tl.exp(tl.abs(mean)) - 1.0
    return tl.where(mean < 0.0, -size, size)


@jit
def _return_kernel(
    rewards, values, bias, bins, weight, out, rows,
    reward_step, reward_row, value_member, value_row, worst,
    H: tl.constexpr, E: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < K
    mask = (row[:, None] < rows) & inside[None, :]
    b = tl.load(bins + column, mask=inside, other=0.0)
    at = row[:, None].to(tl.int64)
    total = tl.zeros((ROWS,), tl.float32)
    for t in tl.static_range(H):
        x = tl.load(rewards + t * reward_step + at * reward_row + column[None, :], mask=mask, other=0.0)
        w = tl.load(weight + row * (H + 1) + t, mask=row < rows, other=0.0)
        total += w * _symexp_mean(x.to(tl.float32), b, inside)
    last = tl.load(weight + row * (H + 1) + H, mask=row < rows, other=0.0)
    for member in tl.static_range(E):
        x = tl.load(values + member * value_member + at * value_row + column[None, :], mask=mask, other=0.0)
        x = x.to(tl.float32)
        if HAS_BIAS:
            x += tl.load(bias + member * K + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        total += last / E * _symexp_mean(x, b, inside)
    total = tl.where(total == total, total, worst)
    tl.store(out + row, total, mask=row < rows)


def _two_hot_return_cuda(
    rewards: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    bins: torch.Tensor,
    weight: torch.Tensor,
    worst: float,
) -> torch.Tensor:
    steps, rows, count = rewards.shape
    out = torch.empty(rows, dtype=torch.float32, device=rewards.device)
    bias = None if bias is None else bias.contiguous()
    _return_kernel[(cdiv(rows, RETURN_ROWS),)](
        rewards, values, values if bias is None else bias, bins, weight.contiguous(), out, rows,
        rewards.stride(0), rewards.stride(1), values.stride(0), values.stride(1), worst,
        H=steps, E=len(values), K=count, BLOCK=next_power_of_2(count), ROWS=RETURN_ROWS,
        HAS_BIAS=bias is not None, num_warps=4,
    )  # fmt: skip
    return out
