"""The block that every part is made of: Linear → RMSNorm → SiLU, repeated."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rl_lab.components.nn.fast_path import fast
from rl_lab.components.nn.kernels.norm_silu import norm_silu, norm_silu_forward, norm_silu_input_gradient
from rl_lab.errors import ConfigError

# --------------------
# Weight initialisation of DreamerV3 (danijar/dreamerv3, embodied/jax/nets.py).


# A standard normal cut at ±2 has standard deviation 0.8796; this factor brings it back to 1.
TRUNCATION = 1.1368


@torch.no_grad()
def truncated_normal_(weight: torch.Tensor, fan_in: int, scale: float = 1.0) -> torch.Tensor:
    """Fill `weight` from a normal cut at two deviations, with variance scale² / fan_in. Scale 0 gives zeros."""
    if scale == 0.0:
        return weight.zero_()
    std = TRUNCATION * math.sqrt(1.0 / fan_in)
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
    return weight.mul_(scale)


# --------------------
# Linear layers with DreamerV3's initialisation: dense, and block-diagonal.


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


# --------------------
# Root-mean-square normalisation over the channels, as DreamerV3 uses it after every linear and conv layer.


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) × scale over the last axis; computed in float32, given back in x's dtype."""

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


class MLP(nn.Module):
    """`layers` blocks of `units`; with `outputs`, a last plain Linear whose weights start at `out_scale`.

    float_out: compute that one in float32 under autocast too. Where the result is a distribution, rounding it to
    bfloat16 costs what the products' own float32 sums have: a critic's value of 450 would be known to 0.2 or 0.4 only.
    (In DreamerV3's original XLA leaves such a rounding out, since a cast to float32 follows.)
    """

    def __init__(
        self,
        inputs: int,
        units: int,
        layers: int,
        *,
        outputs: int | None = None,
        out_scale: float = 1.0,
        float_out: bool = False,
    ) -> None:
        super().__init__()
        widths = [inputs] + [units] * layers
        self.linears: Any = nn.ModuleList(Linear(a, b) for a, b in itertools.pairwise(widths))
        self.norms: Any = nn.ModuleList(RMSNorm(units) for _ in range(layers))
        self.out = Linear(widths[-1], outputs, scale=out_scale) if outputs is not None else None
        self.out_features = outputs if outputs is not None else widths[-1]
        self.float_out = float_out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (…, inputs) -> (…, outputs), or (…, units) without `outputs`."""
        for linear, norm in zip(self.linears, self.norms):
            if fast():
                # The norm adds the bias: its backward pass finds the bias' gradient beside the weight's.
                x = norm_silu(F.linear(x, linear.weight), norm.weight, norm.eps, linear.bias)
            else:
                x = F.silu(norm(linear(x)))
        if self.out is None:
            return x
        if not self.float_out:
            return self.out(x)
        with torch.autocast(x.device.type, enabled=False):
            return self.out(x.float())


# --------------------
# A network whose weights are cast once, not in front of every product, and get no gradient.


class FrozenMLP:
    """What an MLP computes now, in `dtype`, with fused norms: for dreams, which use the same weights many times."""

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
        """The result, and every layer's product (N, units), which `first_product_gradient` needs."""
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
        out: torch.Tensor | None = None,  # (N, units) rows may lie apart
    ) -> torch.Tensor:
        """Gradient of the first layer's product (N, units). The input's is its product with `first_weight`."""
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
        """grad: (N, outputs) -> (N, inputs). A network of nothing hands on what it is given."""
        if not self.layers and self.out is None:
            return grad
        return self.first_product_gradient(grad, products) @ self.first_weight

    @property
    def first_weight(self) -> torch.Tensor:
        """(units, inputs) in the products' dtype."""
        return self.layers[0][0].t()
