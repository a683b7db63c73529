"""An LSTM layer as TensorFlow's basic cell has it: one bias, and a forget gate that starts open."""

from __future__ import annotations

import torch
from torch import nn

State = dict[str, torch.Tensor]  # h, c: (N, units)


class LSTM(nn.LSTM):
    """One layer, batch first. torch's second bias is a buffer of zeros: it would add nothing but parameters.

    The fused call (cuDNN on a GPU) takes whole sequences; `step` is one step of the same weights.
    """

    weight_ih_l0: torch.Tensor
    weight_hh_l0: torch.Tensor
    bias_ih_l0: torch.Tensor
    bias_hh_l0: torch.Tensor

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__(inputs, units, batch_first=True)
        zeros = torch.zeros_like(self.bias_hh_l0)
        del self.bias_hh_l0
        self.register_buffer("bias_hh_l0", zeros, persistent=False)
        self._init_flat_weights()
        nn.init.xavier_uniform_(self.weight_ih_l0)
        nn.init.xavier_uniform_(self.weight_hh_l0)
        with torch.no_grad():
            self.bias_ih_l0.zero_()
            self.bias_ih_l0[units : 2 * units] = 1.0  # gates are input, forget, cell, output

    def initial_state(self, size: int) -> State:
        zeros = self.weight_hh_l0.new_zeros(size, self.hidden_size)
        return {"h": zeros, "c": zeros.clone()}

    def step(self, x: torch.Tensor, state: State) -> State:
        """x: (N, inputs) -> the next state."""
        h, c = torch.lstm_cell(
            x,
            (state["h"], state["c"]),
            self.weight_ih_l0,
            self.weight_hh_l0,
            self.bias_ih_l0,
            self.bias_hh_l0,
        )
        return {"h": h, "c": c}

    def sequence(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """x: (B, T, inputs) -> h after each step (B, T, units), and the last state."""
        out, (h, c) = self(x, (state["h"].unsqueeze(0), state["c"].unsqueeze(0)))
        return out, {"h": h.squeeze(0), "c": c.squeeze(0)}
