"""What a token world model asks of the network that reads its sequence.

A backbone sees embeddings only. Token tables, positions, heads and the order of tokens stay outside; its state is
opaque: a dict of tensors, each with the batch first. A backbone initialises itself when it is made (nobody else may, or loaded
weights would be lost).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

State = dict[str, torch.Tensor]


class SequenceBackbone(Protocol):
    """Causal: result t depends on embeddings 0 … t alone."""

    # Made as backbone(dim=…, length=…): the config names it with `_partial_: true`, the world model knows both numbers.
    dim: int  # width of embeddings and results
    seeds: int  # numbers that `forward` wants for dropout; 0: none

    def __call__(self, x: torch.Tensor, seeds: torch.Tensor | None = None) -> torch.Tensor:
        """A whole sequence at once, for training: (B, T, dim) -> (B, T, dim)."""

    def init_state(self, size: int) -> State:
        """Before the first token of `size` sequences."""

    def step(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """The next T tokens (B, T, dim): their results (B, T, dim) and the state after them.

        What the given state holds may be overwritten: copy it first where it is still wanted (`copy_state`).
        """


def copy_state(state: State) -> State:
    return {name: value.clone() for name, value in state.items()}


# --------------------
# A GRU as the sequence backbone of a token world model: constant memory, no limit on the length of a dream.


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
