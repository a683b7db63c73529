"""MLPs of TD-MPC: Linear → LayerNorm → Mish, with several inputs side by side (nicklashansen/tdmpc2 common/layers.py).

A hidden layer is described by a word: `norm+mish`, `norm+tanh`, `elu` (no norm), `norm+simnorm`, or `plain`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from rl_lab.components.nn.fast_path import fast, piece
from rl_lab.components.nn.kernels.norm_activate import FUSED, fused_norm_activate
from rl_lab.errors import ConfigError, closest

# --------------------
# Simplicial normalisation: a latent vector as groups of probabilities (Lavoie et al. 2023; TD-MPC2, equation 5).


GROUP = 8  # nicklashansen/tdmpc2 config.yaml: simnorm_dim


def simnorm(x: torch.Tensor, group: int = GROUP) -> torch.Tensor:
    """Softmax inside each group of neighbours: (…, L) -> (…, L), every group summing to 1."""
    return torch.softmax(x.unflatten(-1, (-1, group)), -1).flatten(-2)


class SimNorm(nn.Module):
    """`simnorm` as a module. It bounds the latent, so that a rollout of the dynamics cannot run away."""

    def __init__(self, group: int = GROUP) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (…, L), L divisible by the group -> (…, L)."""
        return simnorm(x, self.group)

    def extra_repr(self) -> str:
        return f"group={self.group}"


EPS = 1e-5  # torch's LayerNorm
STD = 0.02  # initial deviation of every weight: nicklashansen/tdmpc2 common/init.py
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
) -> torch.Tensor:
    """LayerNorm over the last axis, then the activation: x (rows, F), weight and bias (F,) -> (rows, F).

    x may be overwritten, where no gradient needs it: half the memory to pass through.
    """
    if fast() and activation in FUSED:
        out = x if out is None and not torch.is_grad_enabled() else out
        alone = x.unsqueeze(0), None, weight.unsqueeze(0), bias.unsqueeze(0)
        where = None if out is None else out.unsqueeze(0)
        return fused_norm_activate(*alone, EPS, activation, group, where).squeeze(0)
    y = activate(F.layer_norm(x, x.shape[-1:], weight, bias, EPS), activation, group)
    return y if out is None else out.copy_(y)


def pad_to(x: torch.Tensor, width: int) -> torch.Tensor:
    """Zeros behind the last axis up to `width`."""
    assert x.shape[-1] <= width, f"{x.shape[-1]} numbers do not fit into {width}"
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


@piece
def cast_wide(x: torch.Tensor, dtype: torch.dtype, width: int) -> torch.Tensor:
    """Into another number format, with zeros behind the last axis up to `width`."""
    return pad_to(x.to(dtype), width)


def missing(width: int, multiple: int) -> int:
    """What `width` lacks to be a multiple."""
    return -width % multiple


def parse_layer(word: str) -> tuple[bool, str]:
    """`norm+mish` -> (True, "mish")."""
    norm, _, activation = word.rpartition("+")
    if activation not in ACTIVATIONS or norm not in ("", "norm"):
        known = [*ACTIVATIONS, *(f"norm+{name}" for name in ACTIVATIONS)]
        raise ConfigError(f"no layer is called '{word}'.{closest(word, known)}")
    return norm == "norm", activation


def initialise(weight: torch.Tensor, init: str) -> torch.Tensor:
    """Fill a weight (out, in): `normal` as TD-MPC2 does, `orthogonal` as TD-MPC did."""
    if init not in INITS:
        raise ConfigError(f"no initialisation is called '{init}'.{closest(init, INITS)}")
    if init == "orthogonal":
        return nn.init.orthogonal_(weight)
    return nn.init.trunc_normal_(weight, std=STD)


class Layer(nn.Module):
    """One dense layer on inputs side by side, then norm and activation as the word says.

    The weight is kept in one piece per input: no concatenation, and the widths stay those that matrix units like.
    """

    weight0: torch.Tensor

    def __init__(
        self,
        inputs: Sequence[int],
        outputs: int,
        word: str = "plain",
        *,
        init: str = "normal",
        zero: bool = False,
        group: int = GROUP,
    ) -> None:
        super().__init__()
        self.has_norm, self.activation = parse_layer(word)
        self.group = group
        if self.activation == "simnorm" and outputs % group:
            raise ConfigError(f"a latent of {outputs} does not divide into groups of {group}")
        joint = torch.empty(outputs, sum(inputs))
        joint = joint.zero_() if zero else initialise(joint, init)
        self.parts = len(inputs)
        self.outputs = outputs
        for place, part in enumerate(joint.split(list(inputs), 1)):
            self.register_parameter(f"weight{place}", nn.Parameter(part.clone()))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.norm = nn.LayerNorm(outputs, eps=EPS) if self.has_norm else None

    def widen(self, multiple: int) -> None:
        """Zeros beside the weights until their widths are multiples: what matrix units need. For copies that only predict."""
        # A norm over the outputs must not see zeros that are not there.
        more = 0 if self.has_norm or self.activation == "simnorm" else missing(self.outputs, multiple)
        for place in range(self.parts):
            weight = getattr(self, f"weight{place}").detach()
            padded = F.pad(weight, (0, missing(weight.shape[1], multiple), 0, more))
            setattr(self, f"weight{place}", nn.Parameter(padded, requires_grad=False))
        self.bias = nn.Parameter(F.pad(self.bias.detach(), (0, more)), requires_grad=False)

    def forward(self, *parts: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """parts: (rows, inputs[i]) each -> (rows, outputs), or written to `out`, whose rows may lie apart."""
        return self.finish(self.product(*parts), out)

    def product(self, *parts: torch.Tensor) -> torch.Tensor:
        """What stands before norm and activation: (rows, outputs)."""
        assert len(parts) == self.parts, f"a layer of {self.parts} inputs was given {len(parts)}"
        x = F.linear(pad_to(parts[0], self.weight0.shape[1]), self.weight0, self.bias)
        for place in range(1, self.parts):
            weight = getattr(self, f"weight{place}")
            # In place: added by the product itself, without a copy of x before it.
            x = x.addmm_(pad_to(parts[place], weight.shape[1]).to(x.dtype), weight.t().to(x.dtype))
        return x if x.shape[-1] == self.outputs else x[..., : self.outputs]

    def finish(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Norm and activation of a product (rows, outputs), which may be overwritten."""
        if self.norm is not None:
            return norm_activate(x, self.norm.weight, self.norm.bias, self.activation, self.group, out)
        x = activate(x, self.activation, self.group)
        return x if out is None else out.copy_(x)

    def finish_groups(
        self, x: torch.Tensor, bias: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `finish`, where groups of rows lack a bias, each its own: (G, rows, outputs), (G, outputs). No gradients."""
        if self.norm is not None and fast() and self.activation in FUSED:
            norm = self.norm.weight.unsqueeze(0), self.norm.bias.unsqueeze(0)
            out = x if out is None and not torch.is_grad_enabled() else out
            return fused_norm_activate(x, bias, *norm, EPS, self.activation, self.group, out)
        where = None if out is None else out.flatten(0, 1)
        return self.finish((x + bias.unsqueeze(1)).flatten(0, 1), where).view_as(x)


class NormedMLP(nn.Module):
    """Layers of `units`, then one of `outputs`: plain, or as `out` says.

    inputs:  widths of the inputs, one after the other
    hidden:  a word for each hidden layer
    zero:    the last weights start at zero, so that the first predictions are alike
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
        for word in hidden:
            layers.append(Layer(widths, units, word, init=init, group=group))
            widths = [units]
        layers.append(Layer(widths, outputs, out, init=init, zero=zero, group=group))
        self.layers = nn.ModuleList(layers)

    def forward(self, *parts: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """parts: (…, inputs[i]) each, all with the same batch axes -> (…, outputs); with one of them also to `out`."""
        batch = parts[0].shape[:-1]
        x: tuple[torch.Tensor, ...] = tuple(part.reshape(-1, part.shape[-1]) for part in parts)
        *first, last = self.layers
        for layer in first:
            x = (layer(*x),)
        return last(*x, out=out).unflatten(0, batch)
