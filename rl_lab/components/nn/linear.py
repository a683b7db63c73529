"""Linear layers with DreamerV3's initialisation: dense, and block-diagonal."""

from __future__ import annotations

import torch
from torch import nn

from rl_lab.components.nn.init import truncated_normal_
from rl_lab.errors import ConfigError


class Linear(nn.Linear):
    """A dense layer: truncated-normal weights, zero bias. `scale` multiplies the initial weights."""

    def __init__(self, inputs: int, outputs: int, *, scale: float = 1.0, bias: bool = True) -> None:
        self._scale = scale
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        truncated_normal_(self.weight, self.in_features, self._scale)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class BlockLinear(nn.Module):
    """`blocks` dense layers side by side: block g of the output sees block g of the input only."""

    def __init__(self, inputs: int, outputs: int, *, blocks: int, scale: float = 1.0) -> None:
        super().__init__()
        if inputs % blocks or outputs % blocks:
            raise ConfigError(
                f"a block layer of {blocks} blocks needs input and output widths it divides, "
                f"not {inputs} and {outputs}: change algorithm.size.blocks or the widths"
            )
        self.blocks = blocks
        self.weight = nn.Parameter(torch.empty(blocks, inputs // blocks, outputs // blocks))
        self.bias = nn.Parameter(torch.zeros(blocks, 1, outputs // blocks))
        # The fan-in is the full input width, not one block's: that is how the original initialises it.
        truncated_normal_(self.weight, inputs, scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (N, blocks, inputs / blocks) -> (N, blocks, outputs / blocks)."""
        return torch.baddbmm(self.bias, x.transpose(0, 1), self.weight).transpose(0, 1)
