"""Modules in another number format, kept beside the ones that are trained."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

WIDTH = 8  # numbers of two bytes that a matrix unit loads at once


class CastCopy:
    """`parts[name]` computes in `dtype`; `refresh` brings its weights up to date in a few kernels.

    Acting reads every weight many times and changes none: one cast per call instead of one in front of every product,
    and activations that stay in the small format throughout. In the format of the originals it is the originals.
    Weights of odd widths get zeros beside them (`widen`): without, products in the small format take the slow way.
    Buffers (bins of a two-hot code) keep theirs. Nothing of it belongs into a checkpoint.
    """

    def __init__(self, parts: Mapping[str, nn.Module], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._sources: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._widened: list[tuple[torch.Tensor, torch.Tensor]] = []  # (a part of the copy, its source)
        if dtype == torch.float32:
            self.parts = dict(parts)
            return
        self.parts = {name: copy.deepcopy(part).requires_grad_(False) for name, part in parts.items()}
        for name, part in self.parts.items():
            for module in part.modules():
                widen: Any = getattr(module, "widen", None)
                if widen is not None:
                    widen(WIDTH)
            for source, target in zip(parts[name].parameters(), part.parameters(), strict=True):
                target.data = target.data.to(dtype)
                if target.shape == source.shape:
                    self._sources.append(source.detach())
                    self._targets.append(target.data)
                else:
                    room = target.data[tuple(slice(size) for size in source.shape)]
                    self._widened.append((room, source.detach()))
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)
        for target, source in self._widened:
            target.copy_(source)
