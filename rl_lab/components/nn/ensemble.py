"""Several small networks of one shape, computed together: stacked weights, one batched product per layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from rl_lab.components.nn.fast_path import fast
from rl_lab.components.nn.kernels.norm_activate import FUSED, fused_norm_activate
from rl_lab.components.nn.normed_mlp import EPS, activate, initialise, missing, pad_to, parse_layer

Weights = list[
    dict[str, torch.Tensor]
]  # by layer: input0, input1, …, bias, and scale, shift where it has a norm


def norm_activate_stacked(
    x: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor, shift: torch.Tensor, activation: str
) -> torch.Tensor:
    """As `norm_activate`, with a norm for each member: x (E, rows, F), bias, scale and shift (E, 1, F)."""
    if fast() and activation in FUSED:
        start = None if bias is None else bias.squeeze(1)
        out = None if torch.is_grad_enabled() else x
        return fused_norm_activate(
            x, start, scale.squeeze(1), shift.squeeze(1), EPS, activation, group=1, out=out
        )
    x = F.layer_norm(x if bias is None else x + bias, x.shape[-1:], None, None, EPS)
    return activate(torch.addcmul(shift, x, scale), activation, 1)


class EnsembleMLP(nn.Module):
    """`members` independent MLPs; the last layer starts at zero where `zero`."""

    def __init__(
        self,
        members: int,
        inputs: Sequence[int],
        units: int,
        outputs: int,
        *,
        hidden: Sequence[str] = ("norm+mish", "norm+mish"),
        init: str = "normal",
        zero: bool = True,
    ) -> None:
        super().__init__()
        self.members = members
        self.units = units
        self.outputs = outputs
        self.words = [*hidden, "plain"]
        widths: list[int] = list(inputs)
        for number, word in enumerate(self.words):
            last = number == len(hidden)
            self._add_layer(number, widths, outputs if last else units, word, init=init, zero=zero and last)
            widths = [units]

    def _add_layer(
        self, number: int, inputs: Sequence[int], outputs: int, word: str, *, init: str, zero: bool
    ) -> None:
        joint = torch.empty(self.members, outputs, sum(inputs))
        for weight in joint:
            weight.zero_() if zero else initialise(weight, init)
        for place, part in enumerate(joint.split(list(inputs), -1)):
            stacked = torch.empty(self.members, inputs[place], outputs)
            self._add(f"input{place}", number, stacked.copy_(part.transpose(1, 2)))
        self._add("bias", number, torch.zeros(self.members, 1, outputs))
        if parse_layer(word)[0]:
            self._add("scale", number, torch.ones(self.members, 1, outputs))
            self._add("shift", number, torch.zeros(self.members, 1, outputs))

    def _add(self, name: str, layer: int, value: torch.Tensor) -> None:
        self.register_parameter(f"{name}_{layer}", nn.Parameter(value))

    def widen(self, multiple: int) -> None:
        """Zeros beside the weights until their widths are multiples, as for a Layer."""
        last = len(self.words) - 1
        for name, value in list(self.named_parameters()):
            kind, _, layer = name.rpartition("_")
            # A norm over the outputs must not see zeros that are not there.
            normed = parse_layer(self.words[int(layer)])[0] or int(layer) != last
            more = 0 if normed else missing(self.outputs, multiple)
            rows = missing(value.shape[1], multiple) if kind.startswith("input") else 0
            padded = F.pad(value.detach(), (0, more, 0, rows))
            setattr(self, name, nn.Parameter(padded, requires_grad=False))

    def weights(self) -> Weights:
        """The tensors of each layer, (E, …) each. In a slow copy they are buffers."""
        tensors = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        layers: Weights = [{} for _ in self.words]
        for name, value in tensors.items():
            kind, _, layer = name.rpartition("_")
            layers[int(layer)][kind] = value
        return layers

    def select(self, index: torch.Tensor) -> Weights:
        """The weights of some members, detached: index (K,) -> tensors (K, …)."""
        return [
            {name: value.detach().index_select(0, index) for name, value in layer.items()}
            for layer in self.weights()
        ]

    def forward(
        self,
        *parts: torch.Tensor,  # (…, inputs[i]) each
        weights: Weights | None = None,  # of members chosen by `select`; None: all members
        dropout: torch.Tensor | None = None,  # (E, rows, units) uniform, with `rate`
        rate: float = 0.0,
    ) -> torch.Tensor:
        """-> (E, …, outputs). Dropout falls on the first layer, before its norm, as in TD-MPC2."""
        batch = parts[0].shape[:-1]
        layers = self.weights() if weights is None else weights
        members = len(layers[0]["bias"])
        x = [part.reshape(1, -1, part.shape[-1]).expand(members, -1, -1) for part in parts]
        for number, (layer, word) in enumerate(zip(layers, self.words)):
            y = torch.bmm(pad_to(x[0], layer["input0"].shape[1]), layer["input0"])
            for place in range(1, len(x)):
                # In place: added by the product itself, without a copy of y before it.
                weight = layer[f"input{place}"]
                y = y.baddbmm_(pad_to(x[place], weight.shape[1]).to(y.dtype), weight.to(y.dtype))
            bias: torch.Tensor | None = layer.get("bias")  # who has taken it out adds it later
            if number == 0 and dropout is not None and rate > 0.0:
                y, bias = (y + layer["bias"]) * ((dropout >= rate) * (1.0 / (1.0 - rate))), None
            has_norm, activation = parse_layer(word)
            if has_norm:
                y = norm_activate_stacked(y, bias, layer["scale"], layer["shift"], activation)
            else:
                y = activate(y if bias is None else y + bias, activation, 1)
            x = [y]
        return x[0][..., : self.outputs].unflatten(1, batch)
