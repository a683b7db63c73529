"""A network whose weights are cast once, not in front of every product, and get no gradient."""

from __future__ import annotations

import torch

from rl_lab.components.nn.kernels.norm_silu import norm_silu_forward, norm_silu_input_gradient
from rl_lab.components.nn.linear import Linear
from rl_lab.components.nn.mlp import MLP
from rl_lab.components.nn.norm import RMSNorm


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
