"""y[t] = base[t] + gain[t] · y[t+1], backwards in time: the recurrence of returns, in one kernel on CUDA."""

from __future__ import annotations

import torch

from rl_lab.components.kernels.triton_jit import cdiv, jit, tl

ROWS = 32  # rows of a program


def reverse_scan(base: torch.Tensor, gain: torch.Tensor, final: torch.Tensor) -> torch.Tensor:
    """base, gain: (B, T) float32, final: (B,) stands for y[T] -> y (B, T). No gradient on CUDA."""
    if base.is_cuda and not torch.is_grad_enabled():
        return _reverse_scan_cuda(base, gain, final)
    result, results = final, []
    for base_t, gain_t in zip(reversed(base.unbind(1)), reversed(gain.unbind(1))):
        result = torch.addcmul(base_t, gain_t, result)
        results.append(result)
    return torch.stack(results[::-1], 1)


@jit
def _reverse_scan_kernel(
    base, gain, final, out, rows, base_stride, gain_stride, T: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < rows
    y = tl.load(final + row, mask=mask, other=0.0)
    for back in range(T):
        t = T - 1 - back
        b = tl.load(base + row * base_stride + t, mask=mask, other=0.0)
        y = b + tl.load(gain + row * gain_stride + t, mask=mask, other=0.0) * y
        tl.store(out + row * T + t, y, mask=mask)


def _reverse_scan_cuda(base: torch.Tensor, gain: torch.Tensor, final: torch.Tensor) -> torch.Tensor:
    base, gain, final = base.contiguous(), gain.contiguous(), final.contiguous()
    rows, steps = base.shape
    out = torch.empty_like(base)
    _reverse_scan_kernel[(cdiv(rows, ROWS),)](
        base, gain, final, out, rows, base.stride(0), gain.stride(0), T=steps, ROWS=ROWS, num_warps=1
    )
    return out
