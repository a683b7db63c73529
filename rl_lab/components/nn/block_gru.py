"""A GRU whose memory is split into blocks: most of its weights connect a block to itself (DreamerV3, 2025 form)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from rl_lab.components.nn.linear import BlockLinear
from rl_lab.components.nn.mlp import MLP
from rl_lab.components.nn.norm import RMSNorm


class BlockGRU(nn.Module):
    """One hidden block layer before the gates; every block also sees the inputs and a summary of the whole memory."""

    def __init__(self, deter: int, hidden: int, *, inputs: int, blocks: int) -> None:
        super().__init__()
        self.blocks = blocks
        self.deter_in = MLP(deter, hidden, 1)
        self.layer = BlockLinear(deter + blocks * (hidden + inputs), deter, blocks=blocks)
        self.norm = RMSNorm(deter)
        self.gates = BlockLinear(deter, 3 * deter, blocks=blocks)

    def forward(self, deter: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        """deter: (B, D), inputs: (B, …) of `inputs` width together -> next deter (B, D)."""
        shared = torch.cat([self.deter_in(deter), *inputs], -1).unsqueeze(1).expand(-1, self.blocks, -1)
        memory = deter.unflatten(-1, (self.blocks, -1))  # (B, g, D/g)
        y = self.layer(torch.cat([memory, shared], -1))
        y = F.silu(self.norm(y.flatten(-2))).unflatten(-1, (self.blocks, -1))
        # Split inside each block, not across the whole width.
        reset, candidate, update = self.gates(y).chunk(3, -1)  # (B, g, D/g) each
        candidate = torch.tanh(torch.sigmoid(reset) * candidate)
        update = torch.sigmoid(update - 1.0)
        return torch.lerp(memory, candidate.to(memory.dtype), update.to(memory.dtype)).flatten(-2)
