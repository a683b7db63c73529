"""Ensembles of MLPs with stacked weights: one batched matrix product per layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from rl_lab.components.nn.normed_mlp import EPS, FUSED, activate, initialise, pad_to, padding, parse_layer

# For each layer: input0, input1, …, bias, and scale, shift if the layer has a norm.
Weights = list[dict[str, torch.Tensor]]


def norm_activate_stacked(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    activation: str,
    *,
    fast: bool,
) -> torch.Tensor:
    """As `norm_activate`, with one norm per member: x (E, rows, F), bias, scale and shift (E, 1, F)."""
    if fast and activation in FUSED:
        from rl_lab.components.kernels.norm_activate import fused_norm_activate

        start = None if bias is None else bias.squeeze(1)
        out = None if torch.is_grad_enabled() else x
        return fused_norm_activate(
            x, start, scale.squeeze(1), shift.squeeze(1), EPS, activation, group=1, out=out
        )
    x = F.layer_norm(x if bias is None else x + bias, x.shape[-1:], None, None, EPS)
    return activate(torch.addcmul(shift, x, scale), activation, 1)


class EnsembleMLP(nn.Module):
    """`members` independent MLPs; with `zero` the last layer's weights start at zero."""

    fast = False  # norm and activation in one kernel; see fast_path.py

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
        self.layer_kinds = [*hidden, "plain"]
        widths: list[int] = list(inputs)
        for number, kind in enumerate(self.layer_kinds):
            last = number == len(hidden)
            self._add_layer(number, widths, outputs if last else units, kind, init=init, zero=zero and last)
            widths = [units]

    def _add_layer(
        self, number: int, inputs: Sequence[int], outputs: int, kind: str, *, init: str, zero: bool
    ) -> None:
        joint = torch.empty(self.members, outputs, sum(inputs))
        for weight in joint:
            weight.zero_() if zero else initialise(weight, init)
        for index, part in enumerate(joint.split(list(inputs), -1)):
            stacked = torch.empty(self.members, inputs[index], outputs)
            self._add(f"input{index}", number, stacked.copy_(part.transpose(1, 2)))
        self._add("bias", number, torch.zeros(self.members, 1, outputs))
        if parse_layer(kind)[0]:
            self._add("scale", number, torch.ones(self.members, 1, outputs))
            self._add("shift", number, torch.zeros(self.members, 1, outputs))

    def _add(self, name: str, layer: int, value: torch.Tensor) -> None:
        self.register_parameter(f"{name}_{layer}", nn.Parameter(value))

    def widen(self, multiple: int) -> None:
        """Pad the weights with zeros to multiples of `multiple`, as `Layer.widen` does."""
        last = len(self.layer_kinds) - 1
        for name, value in list(self.named_parameters()):
            kind, _, layer = name.rpartition("_")
            # Outputs are not padded before a norm: the zeros would change its mean and variance.
            normed = parse_layer(self.layer_kinds[int(layer)])[0] or int(layer) != last
            more = 0 if normed else padding(self.outputs, multiple)
            rows = padding(value.shape[1], multiple) if kind.startswith("input") else 0
            padded = F.pad(value.detach(), (0, more, 0, rows))
            setattr(self, name, nn.Parameter(padded, requires_grad=False))

    def weights(self) -> Weights:
        """The tensors of each layer, (E, …) each. In a `SlowCopy` they are buffers."""
        tensors = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        layers: Weights = [{} for _ in self.layer_kinds]
        for name, value in tensors.items():
            kind, _, layer = name.rpartition("_")
            layers[int(layer)][kind] = value
        return layers

    def select(self, index: torch.Tensor) -> Weights:
        """Detached weights of the selected members: index (K,) -> tensors (K, …)."""
        return [
            {name: value.detach().index_select(0, index) for name, value in layer.items()}
            for layer in self.weights()
        ]

    def forward(
        self,
        *parts: torch.Tensor,  # (…, inputs[i]) each
        weights: Weights | None = None,  # from `select`; None: all members
        dropout: torch.Tensor | None = None,  # (E, rows, units) uniform, with `rate`
        rate: float = 0.0,
    ) -> torch.Tensor:
        """-> (E, …, outputs). Dropout is applied to the first layer, before its norm, as in TD-MPC2."""
        batch = parts[0].shape[:-1]
        layers = self.weights() if weights is None else weights
        members = len(layers[0]["bias"])
        x = [part.reshape(1, -1, part.shape[-1]).expand(members, -1, -1) for part in parts]
        for number, (layer, kind) in enumerate(zip(layers, self.layer_kinds)):
            y = torch.bmm(pad_to(x[0], layer["input0"].shape[1]), layer["input0"])
            for index in range(1, len(x)):
                # In place: the product adds to y without copying it first.
                weight = layer[f"input{index}"]
                y = y.baddbmm_(pad_to(x[index], weight.shape[1]).to(y.dtype), weight.to(y.dtype))
            bias: torch.Tensor | None = layer.get("bias")  # a caller that removed it adds it later
            if number == 0 and dropout is not None and rate > 0.0:
                y, bias = (y + layer["bias"]) * ((dropout >= rate) * (1.0 / (1.0 - rate))), None
            has_norm, activation = parse_layer(kind)
            if has_norm:
                norm = layer["scale"], layer["shift"]
                y = norm_activate_stacked(y, bias, *norm, activation, fast=self.fast)
            else:
                y = activate(y if bias is None else y + bias, activation, 1)
            x = [y]
        return x[0][..., : self.outputs].unflatten(1, batch)
