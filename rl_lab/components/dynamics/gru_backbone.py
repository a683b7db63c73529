"""A GRU as the sequence backbone of a token world model: constant memory, no limit on the length of a dream."""

from __future__ import annotations

import torch
from torch import nn

from rl_lab.components.dynamics.sequence_backbone import State


class GRUBackbone(nn.Module):
    """`layers` GRU layers of the embeddings' own width, then a norm. It has no dropout, and any `length` is within its reach."""

    seeds = 0

    def __init__(self, *, dim: int, layers: int = 2, length: int | None = None) -> None:
        super().__init__()
        self.dim = dim
        self.gru = nn.GRU(dim, dim, layers, batch_first=True)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor, seeds: torch.Tensor | None = None) -> torch.Tensor:
        """x: (B, T, dim) -> (B, T, dim)."""
        return self.norm(self.gru(x)[0])

    def init_state(self, size: int) -> State:
        weight = self.norm.weight
        return {"hidden": weight.new_zeros(size, self.gru.num_layers, self.dim)}

    def step(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """x: (B, T, dim): the results, and the state after them."""
        out, hidden = self.gru(x, state["hidden"].transpose(0, 1).contiguous().to(x.dtype))
        return self.norm(out), {**state, "hidden": hidden.transpose(0, 1)}
