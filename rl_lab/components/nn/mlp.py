"""The block that every part is made of: Linear → RMSNorm → SiLU, repeated."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rl_lab.components.nn.fast_path import fast
from rl_lab.components.nn.kernels.norm_silu import norm_silu
from rl_lab.components.nn.linear import Linear
from rl_lab.components.nn.norm import RMSNorm


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
