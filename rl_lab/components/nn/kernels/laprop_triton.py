"""Triton kernel of LaProp's step (nn/optim.py): every parameter in one launch. Imported on CUDA only.

Parameters and their moments are found by address, so they stay tensors of their own; gradients, whose addresses change,
are copied side by side first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

CHUNK = 2048  # numbers of one parameter that a program updates


@triton.jit
def _update_kernel(
    addresses,  # (parameters, 3) int64: of parameter, square, momentum
    chunks,  # (chunks, 2) int32: parameter, place in it
    sizes,  # (parameters,) int32
    numbers,  # (3, parameters): ratio, rate, root
    go,
    gradients,  # (chunks, CHUNK)
    count,
    rest1,
    rest2,
    eps,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    which = tl.load(chunks + 2 * chunk)
    lanes = tl.arange(0, CHUNK)
    i = tl.load(chunks + 2 * chunk + 1) * CHUNK + lanes
    inside = i < tl.load(sizes + which)
    parameter = tl.load(addresses + 3 * which).to(tl.pointer_type(tl.float32)) + i
    square = tl.load(addresses + 3 * which + 1).to(tl.pointer_type(tl.float32)) + i
    momentum = tl.load(addresses + 3 * which + 2).to(tl.pointer_type(tl.float32)) + i
    ratio = tl.load(numbers + which)
    rate = tl.load(numbers + count + which)
    root = tl.load(numbers + 2 * count + which)
    on = tl.load(go)

    g = tl.load(gradients + chunk.to(tl.int64) * CHUNK + lanes, mask=inside, other=0.0) / ratio
    g = tl.where(on > 0.0, g, 0.0)  # chosen away: a product with 0 would keep a NaN
    s = tl.load(square, mask=inside, other=0.0) * (1.0 - on * rest2) + rest2 * (g * g)
    m = tl.load(momentum, mask=inside, other=0.0) * (1.0 - on * rest1)
    m += rest1 * (g / (tl.sqrt(s) * root + eps))
    tl.store(square, s, mask=inside)
    tl.store(momentum, m, mask=inside)
    tl.store(parameter, tl.load(parameter, mask=inside, other=0.0) - m * rate, mask=inside)


def addresses_of(*tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """One row for each parameter; where they change, a new `FusedUpdate` is needed."""
    return tuple(zip(*([t.data_ptr() for t in column] for column in tensors), strict=True))


class FusedUpdate:
    """The step of fixed parameters (float32, dense) with fixed moments of the same layout."""

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        square: Sequence[torch.Tensor],
        momentum: Sequence[torch.Tensor],
    ) -> None:
        self.key = addresses_of(params, square, momentum)
        device = params[0].device
        sizes = [p.numel() for p in params]
        counts = [triton.cdiv(size, CHUNK) for size in sizes]
        places = [(which, place) for which, count in enumerate(counts) for place in range(count)]
        self.addresses = torch.tensor(self.key, dtype=torch.int64, device=device)
        self.chunks = torch.tensor(places, dtype=torch.int32, device=device)
        self.sizes = torch.tensor(sizes, dtype=torch.int32, device=device)
        self.gradients = torch.zeros((len(places), CHUNK), dtype=torch.float32, device=device)
        rooms = self.gradients.split(counts)
        # In the memory order of their parameters, whatever that is.
        self.views = [
            torch.as_strided(room, p.shape, p.stride(), room.storage_offset())
            for room, p in zip(rooms, params)
        ]

    def __call__(
        self,
        gradients: Sequence[torch.Tensor],
        numbers: torch.Tensor,  # (3, parameters): what to divide the gradient by, learning rate, 1 / √(1 - β2^t)
        go: torch.Tensor,  # 0-d: 1, or 0 where nothing may change
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        torch._foreach_copy_(self.views, list(gradients))
        _update_kernel[(len(self.chunks),)](
            self.addresses,
            self.chunks,
            self.sizes,
            numbers,
            go,
            self.gradients,
            len(self.sizes),
            1.0 - betas[0],
            1.0 - betas[1],
            eps,
            CHUNK=CHUNK,
        )


def fits(params: Sequence[torch.Tensor]) -> bool:
    """Whether parameters can be walked through in the order of their memory."""
    return all(
        p.dtype == torch.float32
        and (p.is_contiguous() or p.is_contiguous(memory_format=torch.channels_last))
        and 0 < p.numel() < 2**31
        for p in params
    )
