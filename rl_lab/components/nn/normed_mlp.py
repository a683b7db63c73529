"""MLPs of TD-MPC, alone and in ensembles: Linear → LayerNorm → Mish, several inputs (nicklashansen/tdmpc2 layers.py).

A string describes what follows a layer's matrix product: `norm+mish`, `norm+tanh`, `elu` (no norm),
`norm+simnorm`, `plain`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from rl_lab.components.nn.fast_path import compiled_pointwise
from rl_lab.errors import ConfigError, closest

GROUP = 8  # nicklashansen/tdmpc2 config.yaml: simnorm_dim
FUSED = ("mish", "simnorm")  # activations of kernels/norm_activate.py


def simnorm(x: torch.Tensor, group: int = GROUP) -> torch.Tensor:
    """Softmax of each group of `group` values, (…, L) -> (…, L) (Lavoie et al. 2023; TD-MPC2, equation 5)."""
    return torch.softmax(x.unflatten(-1, (-1, group)), -1).flatten(-2)


class SimNorm(nn.Module):
    """`simnorm` as a module. It bounds the latent, so that rollouts of the dynamics cannot diverge."""

    def __init__(self, group: int = GROUP) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (…, L), L divisible by `group` -> (…, L)."""
        return simnorm(x, self.group)

    def extra_repr(self) -> str:
        return f"group={self.group}"


EPS = 1e-5  # torch's LayerNorm
STD = 0.02  # initial standard deviation of every weight: nicklashansen/tdmpc2 common/init.py
ACTIVATIONS = ("mish", "elu", "tanh", "relu", "simnorm", "plain")
INITS = ("normal", "orthogonal")


def activate(x: torch.Tensor, activation: str, group: int) -> torch.Tensor:
    """x: (…, F) -> (…, F)."""
    if activation == "simnorm":
        return simnorm(x, group)
    if activation == "plain":
        return x
    return torch.tanh(x) if activation == "tanh" else getattr(F, activation)(x)


def norm_activate(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    activation: str,
    group: int,
    out: torch.Tensor | None = None,
    *,
    fast: bool,
) -> torch.Tensor:
    """LayerNorm over the last axis, then the activation: x (rows, F), weight and bias (F,) -> (rows, F).

    x is overwritten if gradients are disabled: this halves the memory traffic.
    """
    if fast and activation in FUSED:
        from rl_lab.components.kernels.norm_activate import fused_norm_activate

        out = x if out is None and not torch.is_grad_enabled() else out
        alone = x.unsqueeze(0), None, weight.unsqueeze(0), bias.unsqueeze(0)
        where = None if out is None else out.unsqueeze(0)
        return fused_norm_activate(*alone, EPS, activation, group, where).squeeze(0)
    y = activate(F.layer_norm(x, x.shape[-1:], weight, bias, EPS), activation, group)
    return y if out is None else out.copy_(y)


def pad_to(x: torch.Tensor, width: int) -> torch.Tensor:
    """Pad the last axis with zeros up to `width`."""
    assert x.shape[-1] <= width, f"{x.shape[-1]} values do not fit into {width}"
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


@compiled_pointwise
def cast_wide(x: torch.Tensor, dtype: torch.dtype, width: int) -> torch.Tensor:
    """Cast to `dtype` and pad the last axis with zeros up to `width`."""
    return pad_to(x.to(dtype), width)


def padding(width: int, multiple: int) -> int:
    """The padding that makes `width` a multiple of `multiple`."""
    return -width % multiple


def parse_layer(kind: str) -> tuple[bool, str]:
    """`norm+mish` -> (True, "mish")."""
    norm, _, activation = kind.rpartition("+")
    if activation not in ACTIVATIONS or norm not in ("", "norm"):
        known = [*ACTIVATIONS, *(f"norm+{name}" for name in ACTIVATIONS)]
        raise ConfigError(f"'{kind}' is not a kind of layer.{closest(kind, known)}")
    return norm == "norm", activation


def initialise(weight: torch.Tensor, init: str) -> torch.Tensor:
    """Fill a weight (out, in): `normal` as TD-MPC2 does, `orthogonal` as TD-MPC did."""
    if init not in INITS:
        raise ConfigError(f"layer init is '{init}'.{closest(init, INITS)}")
    if init == "orthogonal":
        return nn.init.orthogonal_(weight)
    return nn.init.trunc_normal_(weight, std=STD)


class Layer(nn.Module):
    """Dense layer on several inputs, then norm and activation as `kind` describes.

    There is one weight per input: nothing is concatenated, and the widths stay aligned for tensor cores.
    """

    fast = False  # norm and activation in one kernel; see fast_path.py
    weight0: torch.Tensor

    def __init__(
        self,
        inputs: Sequence[int],
        outputs: int,
        kind: str = "plain",
        *,
        init: str = "normal",
        zero: bool = False,
        group: int = GROUP,
    ) -> None:
        super().__init__()
        self.has_norm, self.activation = parse_layer(kind)
        self.group = group
        if self.activation == "simnorm" and outputs % group:
            raise ConfigError(
                f"a latent of {outputs} cannot be split into groups of {group}: change one of them"
            )
        joint = torch.empty(outputs, sum(inputs))
        joint = joint.zero_() if zero else initialise(joint, init)
        self.parts = len(inputs)
        self.outputs = outputs
        for index, part in enumerate(joint.split(list(inputs), 1)):
            self.register_parameter(f"weight{index}", nn.Parameter(part.clone()))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.norm = nn.LayerNorm(outputs, eps=EPS) if self.has_norm else None

    def widen(self, multiple: int) -> None:
        """Pad the weights with zeros to multiples, as tensor cores need; for copies that are not trained."""
        # Outputs are not padded before a norm: the zeros would change its mean and variance.
        more = 0 if self.has_norm or self.activation == "simnorm" else padding(self.outputs, multiple)
        for index in range(self.parts):
            weight = getattr(self, f"weight{index}").detach()
            padded = F.pad(weight, (0, padding(weight.shape[1], multiple), 0, more))
            setattr(self, f"weight{index}", nn.Parameter(padded, requires_grad=False))
        self.bias = nn.Parameter(F.pad(self.bias.detach(), (0, more)), requires_grad=False)

    def forward(self, *parts: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """parts: (rows, inputs[i]) each -> (rows, outputs), written to `out` if given (may be a slice)."""
        return self.finish(self.product(*parts), out)

    def product(self, *parts: torch.Tensor) -> torch.Tensor:
        """The matrix product before norm and activation: (rows, outputs)."""
        assert len(parts) == self.parts, f"a layer of {self.parts} inputs got {len(parts)}"
        x = F.linear(pad_to(parts[0], self.weight0.shape[1]), self.weight0, self.bias)
        for index in range(1, self.parts):
            weight = getattr(self, f"weight{index}")
            # In place: the product adds to x without copying it first.
            x = x.addmm_(pad_to(parts[index], weight.shape[1]).to(x.dtype), weight.t().to(x.dtype))
        return x if x.shape[-1] == self.outputs else x[..., : self.outputs]

    def finish(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Norm and activation of the product x (rows, outputs), which may be overwritten."""
        if self.norm is not None:
            norm = self.norm.weight, self.norm.bias
            return norm_activate(x, *norm, self.activation, self.group, out, fast=self.fast)
        x = activate(x, self.activation, self.group)
        return x if out is None else out.copy_(x)

    def finish_groups(
        self, x: torch.Tensor, bias: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `finish`, with one bias per group: x (G, rows, outputs), bias (G, outputs). No gradients."""
        if self.norm is not None and self.fast and self.activation in FUSED:
            from rl_lab.components.kernels.norm_activate import fused_norm_activate

            norm = self.norm.weight.unsqueeze(0), self.norm.bias.unsqueeze(0)
            out = x if out is None and not torch.is_grad_enabled() else out
            return fused_norm_activate(x, bias, *norm, EPS, self.activation, self.group, out)
        where = None if out is None else out.flatten(0, 1)
        return self.finish((x + bias.unsqueeze(1)).flatten(0, 1), where).view_as(x)


class NormedMLP(nn.Module):
    """Hidden layers of `units`, then one of `outputs`.

    inputs:  widths of the inputs
    hidden:  kind of each hidden layer
    out:     kind of the last layer
    zero:    the last weights start at zero, so that all initial predictions are equal
    """

    def __init__(
        self,
        inputs: Sequence[int],
        units: int,
        outputs: int,
        *,
        hidden: Sequence[str] = ("norm+mish", "norm+mish"),
        out: str = "plain",
        init: str = "normal",
        zero: bool = False,
        group: int = GROUP,
    ) -> None:
        super().__init__()
        self.inputs = list(inputs)
        self.outputs = outputs
        layers: list[Layer] = []
        widths: Sequence[int] = self.inputs
        for kind in hidden:
            layers.append(Layer(widths, units, kind, init=init, group=group))
            widths = [units]
        layers.append(Layer(widths, outputs, out, init=init, zero=zero, group=group))
        self.layers = nn.ModuleList(layers)

    def forward(self, *parts: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """parts: (…, inputs[i]) each -> (…, outputs), written to `out` (rows, outputs) if given."""
        batch = parts[0].shape[:-1]
        x: tuple[torch.Tensor, ...] = tuple(part.reshape(-1, part.shape[-1]) for part in parts)
        *first, last = self.layers
        for layer in first:
            x = (layer(*x),)
        return last(*x, out=out).unflatten(0, batch)


# ---------------------------------------------------------------- ensembles
# Stacked weights: one batched matrix product per layer.

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
        parameter = nn.Parameter(value)
        if not name.startswith("input"):
            parameter.no_decay = True  # type: ignore[attr-defined]  # three axes, but no weight: see LaProp
        self.register_parameter(f"{name}_{layer}", parameter)

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
