"""LaProp with adaptive gradient clipping and warm-up: DreamerV3's optimizer (danijar/dreamerv3, embodied/jax/opt.py).

LaProp (Ziyin et al. 2020) divides the gradient by its running size *before* the momentum, where Adam does so after.
Written for CUDA graphs: steps and learning rate are device tensors, nothing is read by the host, work is done in
foreach calls over all parameters, on the fast path by one kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rl_lab.components.nn.fast_path import fast

if TYPE_CHECKING:
    from rl_lab.components.nn.kernels.laprop_triton import FusedUpdate


Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


class LaProp(torch.optim.Optimizer):
    """AGC → LaProp → learning rate.

    lr:        reached after `warmup` updates on a straight line from 0; a float or a 0-d tensor
    agc:       a tensor's gradient norm is limited to agc × its own norm (at least `agc_floor`); 0 switches it off
    found_inf: attribute, as torch's fused optimizers have it: while it holds a non-zero 0-d tensor, a step changes
               nothing, neither parameters nor state
    """

    found_inf: torch.Tensor | None = None

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 4e-5,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-20,
        agc: float = 0.3,
        agc_floor: float = 1e-3,
        warmup: int = 1000,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": (float(betas[0]), float(betas[1])),
            "eps": eps,
            "agc": agc,
            "agc_floor": agc_floor,
            "warmup": warmup,
            # torch then brings loaded step counts to the parameter's device, as a captured step needs them
            "capturable": True,
        }
        super().__init__(params, defaults)
        self._fused: dict[int, FusedUpdate] = {}  # by the address of a group's first parameter

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._step_group(group, params)
        return loss

    def _step_group(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        states = [self._state(p) for p in params]
        steps = [s["step"] for s in states]
        square = [s["square"] for s in states]
        momentum = [s["momentum"] for s in states]
        beta1, beta2 = group["betas"]

        # `go` is 1, or 0 when this update is masked; then the gradient is 0 and both decays are 1.
        go = torch.ones_like(steps[0]) if self.found_inf is None else (self.found_inf == 0).to(steps[0])
        grads = [p.grad for p in params if p.grad is not None]
        ratios = self._clip_ratios(group, params, grads)
        # A list: a lone 0-d tensor would be taken for a number, and read by the host.
        torch._foreach_add_(steps, [go] * len(steps))
        # (parameters,): a part that joins later has its own warm-up and bias correction
        count = torch.stack(steps)
        rate = group["lr"] * go
        if group["warmup"]:
            rate = rate * ((count - 1.0) / group["warmup"]).clamp(max=1.0)
        # A parameter whose first update is masked still counts 0 steps: keep its unused corrections finite.
        count = count.clamp(min=1.0)
        # 1 - beta^count without the cancellation that float32 would suffer for the first counts.
        scale1 = rate / -torch.expm1(count * math.log(beta1))
        scale2 = (-torch.expm1(count * math.log(beta2))).rsqrt()

        fused = self._fused_update(params, square, momentum) if fast() and go.is_cuda else None
        if fused is not None:
            fused(grads, torch.stack([ratios, scale1, scale2]), go, group["betas"], group["eps"])
            return
        grads = list(torch._foreach_div(grads, list(ratios.unbind())))
        if self.found_inf is not None:
            # A product with 0 would keep a NaN: it has to be chosen away.
            grads = [grad.masked_fill(go == 0, 0.0) for grad in grads]
        torch._foreach_mul_(square, 1.0 - go * (1.0 - beta2))
        torch._foreach_addcmul_(square, grads, grads, value=1.0 - beta2)
        size = torch._foreach_sqrt(square)
        torch._foreach_mul_(size, list(scale2.unbind()))
        torch._foreach_add_(size, group["eps"])
        torch._foreach_mul_(momentum, 1.0 - go * (1.0 - beta1))
        torch._foreach_addcdiv_(momentum, grads, size, value=1.0 - beta1)
        torch._foreach_sub_(params, torch._foreach_mul(momentum, list(scale1.unbind())))

    @staticmethod
    def _clip_ratios(
        group: dict[str, Any], params: list[torch.Tensor], grads: list[torch.Tensor]
    ) -> torch.Tensor:
        """What each gradient is divided by, (parameters,), at least 1."""
        if not group["agc"]:
            return torch.ones(len(params), device=params[0].device)
        limits = torch.stack(torch._foreach_norm(params)).clamp(min=group["agc_floor"]) * group["agc"]
        return (torch.stack(torch._foreach_norm(grads)) / limits).clamp(min=1.0)

    def _fused_update(
        self, params: list[torch.Tensor], square: list[torch.Tensor], momentum: list[torch.Tensor]
    ) -> FusedUpdate | None:
        """One kernel for all of it. None where it cannot be had: addresses are sent only outside a recording."""
        from rl_lab.components.nn.kernels.laprop_triton import FusedUpdate, addresses_of, fits

        first = params[0].data_ptr()
        update = self._fused.get(first)
        if update is None or update.key != addresses_of(params, square, momentum):
            if torch.cuda.is_current_stream_capturing() or not fits(params):
                return None
            update = self._fused[first] = FusedUpdate(params, square, momentum)
        return update

    def _state(self, parameter: torch.Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["square"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["momentum"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


# --------------------
# Which weights decay: matrices of linear layers and convolutions do; biases, norms and tables do not (minGPT's groups).


def exempt_from_decay(module: nn.Module) -> None:
    """Mark the biases, norms and embedding tables of a network, for `decayed_adamw` to find."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            table = isinstance(part, nn.Embedding | nn.LayerNorm | nn.GroupNorm)
            if table or "bias" in name or parameter.ndim < 2:
                parameter.no_decay = True  # type: ignore[attr-defined]


def decayed_adamw(
    parameters: Iterable[nn.Parameter], *, lr: float, weight_decay: float = 0.0, **options: Any
) -> torch.optim.AdamW:
    """AdamW in two groups: marked parameters (`exempt_from_decay`) do not decay, the others do."""
    listed = list(parameters)
    decayed = [p for p in listed if not getattr(p, "no_decay", False)]
    spared = [p for p in listed if getattr(p, "no_decay", False)]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, **options)
