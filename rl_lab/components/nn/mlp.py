"""MLPs of Dreamer: Linear → RMSNorm → SiLU, initialised as in danijar/dreamerv3, embodied/jax/nets.py.

A `LayerStyle` selects the norm, the activation and the initial weights of earlier versions.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rl_lab.errors import ConfigError, require_choice

# A standard normal truncated at ±2 has standard deviation 0.8796; this factor scales it to 1.
TRUNCATION = 1.1368


@torch.no_grad()
def truncated_normal_(weight: torch.Tensor, fan_in: float, scale: float = 1.0) -> torch.Tensor:
    """Fill `weight` from a normal truncated at ±2 std, with variance scale² / fan_in; scale 0: zeros."""
    if scale == 0.0:
        return weight.zero_()
    std = TRUNCATION * math.sqrt(1.0 / fan_in)
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
    return weight.mul_(scale)


INITS = ("fan_in", "fan_avg", "glorot")
NORMS = ("rms", "layer", "none")
ACTIVATIONS = ("silu", "elu", "relu")


@dataclass(frozen=True)
class LayerStyle:
    """Norm, activation and initial weights of layers.

    norm: rms (2024, today) | layer (2023, DreamerV2 on Crafter; eps 1e-3) | none (v1, v2)
    act:  silu | elu | relu
    init: fan_in (2024, today): truncated normal of variance 1 / fan-in; fan_avg (2023): the same with the mean of
          fan-in and fan-out, uniform in output layers; glorot (v1, v2): uniform of variance 1 / mean fan
    bias: whether layers with a norm have a bias; in the 2023 version they have none
    """

    norm: str = "rms"
    act: str = "silu"
    init: str = "fan_in"
    bias: bool = True

    @property
    def fused(self) -> bool:
        """Whether the fused scan and imagination compute such layers."""
        return (self.norm, self.act, self.bias) == ("rms", "silu", True)

    @property
    def fused_norm(self) -> bool:
        """Whether one kernel computes the norm and the activation."""
        return (self.norm, self.act) in (("rms", "silu"), ("layer", "silu"), ("layer", "elu"))

    def norm_activate(self, norm: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Activation of the norm of x + bias, in one kernel. x: (…, features) -> (…, features)."""
        # The norm adds the bias: its backward pass computes both gradients together.
        if isinstance(norm, RMSNorm):
            from rl_lab.components.kernels.norm_silu import norm_silu

            return norm_silu(x, norm.weight, norm.eps, bias)
        from rl_lab.components.kernels.norm_activate import norm_activate_rows

        assert isinstance(norm, LayerNorm)
        return norm_activate_rows(x, bias, norm.weight, norm.bias, norm.eps, self.act)

    def make_norm(self, features: int) -> nn.Module:
        if self.norm == "none":
            return nn.Identity()
        return RMSNorm(features) if self.norm == "rms" else LayerNorm(features)

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        if self.act == "silu":
            return F.silu(x)
        return F.elu(x) if self.act == "elu" else F.relu(x)

    def linear(self, inputs: int, outputs: int) -> Linear:
        """A layer that is followed by the norm and the activation."""
        return Linear(inputs, outputs, bias=self.bias or self.norm == "none", init=self.init)

    def output(self, inputs: int, outputs: int, *, scale: float = 1.0, parts: int = 1) -> Linear:
        """An output layer."""
        return Linear(inputs, outputs, scale=scale, init=output_init(self.init), parts=parts)


TODAY = LayerStyle()


def layer_style(layer: str = "rms+silu", init: str = "fan_in", bias: bool = True) -> LayerStyle:
    """The style of the config keys `layer` (`norm+activation`, or the activation alone), `init` and `bias`."""
    norm, _, act = layer.rpartition("+")
    known = [*ACTIVATIONS, *(f"{norm}+{act}" for norm in ("rms", "layer") for act in ACTIVATIONS)]
    require_choice("layer", layer, known)
    require_choice("init", init, INITS)
    return LayerStyle(norm or "none", act, init, bias)


def output_init(init: str) -> str:
    """The initialization of output layers: danijar/dreamerv3 @ 8fa35f8 nets.py passes them no `winit`."""
    return "glorot" if init == "fan_avg" else init


def fill_(weight: torch.Tensor, fans: tuple[int, int], init: str, scale: float = 1.0) -> torch.Tensor:
    """Initialize a weight; fans: inputs and outputs."""
    if init == "fan_in":
        return truncated_normal_(weight, fans[0], scale)
    mean = sum(fans) / 2
    if init == "fan_avg":
        return truncated_normal_(weight, mean, scale)
    limit = math.sqrt(3.0 / mean) * scale
    with torch.no_grad():
        return weight.uniform_(-limit, limit) if limit else weight.zero_()


class Linear(nn.Linear):
    """Dense layer with zero bias. `scale` multiplies the initial weights.

    init:  see LayerStyle
    parts: layers that this one stands for, side by side; each has its own fan-out
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        scale: float = 1.0,
        bias: bool = True,
        init: str = "fan_in",
        parts: int = 1,
    ) -> None:
        self._scale, self._init, self._parts = scale, init, parts
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        fill_(self.weight, (self.in_features, self.out_features // self._parts), self._init, self._scale)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class BlockLinear(nn.Module):
    """Block-diagonal layer: block g of the output depends only on block g of the input."""

    def __init__(self, inputs: int, outputs: int, *, blocks: int, scale: float = 1.0) -> None:
        super().__init__()
        if inputs % blocks or outputs % blocks:
            raise ConfigError(
                f"algorithm.size.blocks is {blocks}, which does not divide the widths {inputs} and {outputs}: "
                "change it or the widths"
            )
        self.blocks = blocks
        self.weight = nn.Parameter(torch.empty(blocks, inputs // blocks, outputs // blocks))
        self.bias = nn.Parameter(torch.zeros(blocks, 1, outputs // blocks))
        self.bias.no_decay = True  # type: ignore[attr-defined]  # three axes, but no weight: see LaProp
        # The fan-in is the full input width, not that of one block, as in the original.
        truncated_normal_(self.weight, inputs, scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (N, blocks, inputs / blocks) -> (N, blocks, outputs / blocks)."""
        return torch.baddbmm(self.bias, x.transpose(0, 1), self.weight).transpose(0, 1)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) × scale over the last axis; computed in float32, returned in x's dtype."""

    def __init__(self, features: int, *, eps: float = 1e-4) -> None:  # eps: danijar/dreamerv3 nets.py
        super().__init__()
        self.features = features
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (…, features) -> (…, features)."""
        return F.rms_norm(x.float(), (self.features,), self.weight, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.features}, eps={self.eps}"


class LayerNorm(nn.Module):
    """LayerNorm over the last axis; computed in float32, returned in x's dtype."""

    def __init__(
        self, features: int, *, eps: float = 1e-3
    ) -> None:  # eps: danijar/dreamerv3 @ 8fa35f8; Keras
        super().__init__()
        self.features, self.eps = features, eps
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (…, features) -> (…, features)."""
        return F.layer_norm(x.float(), (self.features,), self.weight, self.bias, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.features}, eps={self.eps}"


class MLP(nn.Module):
    """`layers` blocks of `units`, then with `outputs` a Linear with initial weights scaled by `out_scale`.

    style:     norm, activation and initial weights
    out_parts: see Linear

    float_out: compute that Linear in float32 under autocast too. bfloat16 logits of a distribution lose the
               precision of the float32 accumulation: a critic's value of 450 would be known only to 0.2 or
               0.4. (In the original, XLA removes such a rounding, because a cast to float32 follows.)
    """

    fast = False  # norm and activation in one kernel; see fast_path.py

    def __init__(
        self,
        inputs: int,
        units: int,
        layers: int,
        *,
        outputs: int | None = None,
        out_scale: float = 1.0,
        float_out: bool = False,
        style: LayerStyle = TODAY,
        out_parts: int = 1,
    ) -> None:
        super().__init__()
        self.style = style
        widths = [inputs] + [units] * layers
        self.linears: Any = nn.ModuleList(style.linear(a, b) for a, b in itertools.pairwise(widths))
        self.norms: Any = nn.ModuleList(style.make_norm(units) for _ in range(layers))
        self.out = (
            style.output(widths[-1], outputs, scale=out_scale, parts=out_parts)
            if outputs is not None
            else None
        )
        self.out_features = outputs if outputs is not None else widths[-1]
        self.float_out = float_out

    @property
    def has_fast_form(self) -> bool:
        return self.style.fused_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (…, inputs) -> (…, outputs), or (…, units) without `outputs`."""
        if self.fast:
            for linear, norm in zip(self.linears, self.norms):
                x = self.style.norm_activate(norm, F.linear(x, linear.weight), linear.bias)
        else:
            for linear, norm in zip(self.linears, self.norms):
                x = self.style.activate(norm(linear(x)))
        if self.out is None:
            return x
        if not self.float_out:
            return self.out(x)
        with torch.autocast(x.device.type, enabled=False):
            return self.out(x.float())


class FrozenMLP:
    """An MLP with its current weights, cast to `dtype` once, without gradients, with fused norms.

    For imagined rollouts, which use the same weights many times.
    """

    def __init__(self, mlp: MLP, dtype: torch.dtype) -> None:
        self.layers: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]] = []
        for linear, norm in zip(mlp.linears, mlp.norms):
            assert isinstance(linear, Linear) and isinstance(norm, RMSNorm)
            weight = linear.weight.detach().to(dtype).t()
            self.layers.append((weight, linear.bias.detach(), norm.weight.detach(), norm.eps))
        self.out: tuple[torch.Tensor, torch.Tensor] | None = None
        if mlp.out is not None:
            last = torch.float32 if mlp.float_out else dtype
            self.out = (mlp.out.weight.detach().to(last).t(), mlp.out.bias.detach().to(last))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: (N, inputs) -> (N, outputs), or (N, units) without a last layer."""
        return self.traced(x)[0]

    def traced(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The result, and each layer's matrix product (N, units), which `first_product_gradient` needs."""
        from rl_lab.components.kernels.norm_silu import norm_silu_forward

        products = []
        for weight, bias, norm, eps in self.layers:
            products.append(x @ weight)
            x = norm_silu_forward(products[-1], bias, norm, eps)
        if self.out is not None:
            weight, bias = self.out
            with torch.autocast(x.device.type, enabled=False):
                x = torch.addmm(bias, x.to(bias.dtype), weight)
        return x, products

    def first_product_gradient(
        self,
        grad: torch.Tensor,  # (N, outputs)
        products: list[torch.Tensor],
        out: torch.Tensor | None = None,  # (N, units), may be a slice of wider rows
    ) -> torch.Tensor:
        """Gradient of the first layer's product (N, units); the input's is this @ `first_weight`."""
        from rl_lab.components.kernels.norm_silu import norm_silu_input_gradient

        if self.out is not None:
            weight, _ = self.out
            grad = (grad.to(weight.dtype) @ weight.t()).to(products[-1].dtype)
        for n in reversed(range(len(self.layers))):
            weight, bias, norm, eps = self.layers[n]
            target = torch.empty_like(products[n]) if n > 0 or out is None else out
            grad = norm_silu_input_gradient(grad, products[n], bias, norm, eps, target)
            if n > 0:
                grad = grad @ weight.t()
        return grad

    def input_gradient(self, grad: torch.Tensor, products: list[torch.Tensor]) -> torch.Tensor:
        """grad: (N, outputs) -> (N, inputs). Without layers, grad itself."""
        if not self.layers and self.out is None:
            return grad
        return self.first_product_gradient(grad, products) @ self.first_weight

    @property
    def first_weight(self) -> torch.Tensor:
        """(units, inputs) in the dtype of the products."""
        return self.layers[0][0].t()
