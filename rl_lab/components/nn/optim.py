"""Optimizers: LaProp with adaptive gradient clipping (DreamerV3), and AdamW with weight-decay groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from rl_lab.components.kernels.triton_jit import cdiv, jit, tl
from rl_lab.errors import ConfigError, require_choice

SCHEDULES = ("const", "linear", "cosine")
CHUNK = 2048  # elements of one parameter that a program updates

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


class LaProp(torch.optim.Optimizer):
    """Adaptive gradient clipping → LaProp → learning rate (danijar/dreamerv3, embodied/jax/opt.py).

    LaProp (Ziyin et al. 2020) normalizes the gradient by its running size *before* the momentum, Adam after.
    Written for CUDA graphs: step counts and learning rate are device tensors, the host reads nothing, all
    parameters are updated by foreach calls, or by one kernel on the fast path.

    lr:        float or 0-d tensor, reached by linear warm-up from 0 over `warmup` updates
    agc:       limits a gradient's norm to agc × the norm of its parameter (at least `agc_floor`); 0: off
    nesterov:  the momentum looks one update ahead
    weight_decay: × the learning rate, subtracted from weights in each update; biases, norms and other vectors are exempt
    schedule:  of the learning rate from the end of the warm-up to update `anneal`: const | linear, to a tenth |
               cosine, to 0 (the original: to 0.1 × lr of the rate); these and the two above: danijar/dreamerv3 agent.py,
               `_make_opt`
    found_inf: attribute, as of torch's fused optimizers: while it is a non-zero 0-d tensor, a step changes
               neither parameters nor state
    """

    fast = False  # one kernel for all parameters; see fast_path.py
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
        nesterov: bool = False,
        weight_decay: float = 0.0,
        schedule: str = "const",
        anneal: int = 0,
    ) -> None:
        require_choice("optimizers.model.schedule", schedule, SCHEDULES)
        if schedule != "const" and anneal <= warmup:
            raise ConfigError(
                f"optimizers.model.anneal is {anneal}: set it to the update where the learning rate stops falling, more "
                f"than warmup ({warmup}), with schedule={schedule}"
            )
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": (float(betas[0]), float(betas[1])),
            "eps": eps,
            "agc": agc,
            "agc_floor": agc_floor,
            "warmup": warmup,
            # with this, torch moves loaded step counts to the parameter's device, as a captured step needs
            "capturable": True,
        }
        # What is not used is left out: the state of an optimizer stays as it was before these existed.
        if nesterov or weight_decay:
            defaults |= {"nesterov": nesterov, "weight_decay": weight_decay}
        if schedule != "const":
            defaults |= {"schedule": schedule, "anneal": anneal}
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

        # `active` is 1, or 0 if this update is masked: the gradient is then 0 and both decays are 1.
        active = torch.ones_like(steps[0]) if self.found_inf is None else (self.found_inf == 0).to(steps[0])
        grads = [p.grad for p in params if p.grad is not None]
        ratios = self._clip_ratios(group, params, grads)
        # A list: torch would convert a single 0-d tensor to a number on the host.
        torch._foreach_add_(steps, [active] * len(steps))
        # (parameters,): a parameter that joins later has its own warm-up and bias correction
        count = torch.stack(steps)
        rate = group["lr"] * active
        if group["warmup"]:
            rate = rate * ((count - 1.0) / group["warmup"]).clamp(max=1.0)
        if group.get("schedule", "const") != "const":
            rate = rate * annealed(
                group["schedule"], count - 1.0 - group["warmup"], group["anneal"] - group["warmup"]
            )
        # If its first update is masked, a parameter still counts 0 steps: keep the unused corrections finite.
        count = count.clamp(min=1.0)
        # 1 - beta^count by expm1, which avoids float32 cancellation for small counts.
        scale1 = rate / -torch.expm1(count * math.log(beta1))
        scale2 = (-torch.expm1(count * math.log(beta2))).rsqrt()

        nesterov, decay = group.get("nesterov", False), group.get("weight_decay", 0.0)
        plain = nesterov or decay or not self.fast or not active.is_cuda
        fused = None if plain else self._fused_update(params, square, momentum)
        if fused is not None:
            fused(grads, torch.stack([ratios, scale1, scale2]), active, group["betas"], group["eps"])
            return
        grads = list(torch._foreach_div(grads, list(ratios.unbind())))
        if self.found_inf is not None:
            # Not a product: 0 × NaN is NaN.
            grads = [grad.masked_fill(active == 0, 0.0) for grad in grads]
        torch._foreach_mul_(square, 1.0 - active * (1.0 - beta2))
        torch._foreach_addcmul_(square, grads, grads, value=1.0 - beta2)
        size = torch._foreach_sqrt(square)
        torch._foreach_mul_(size, list(scale2.unbind()))
        torch._foreach_add_(size, group["eps"])
        torch._foreach_mul_(momentum, 1.0 - active * (1.0 - beta1))
        torch._foreach_addcdiv_(momentum, grads, size, value=1.0 - beta1)
        ahead = momentum
        if nesterov:
            ahead = list(torch._foreach_mul(momentum, beta1))
            torch._foreach_addcdiv_(ahead, grads, size, value=1.0 - beta1)
        change = torch._foreach_mul(ahead, list(scale1.unbind()))
        which = [index for index, p in enumerate(params) if is_decayed(p)] if decay else []
        if which:
            rates = (rate * decay).expand(len(params)).unbind()
            shrink = torch._foreach_mul([params[index] for index in which], [rates[index] for index in which])
            torch._foreach_add_([change[index] for index in which], shrink)
        torch._foreach_sub_(params, change)

    @staticmethod
    def _clip_ratios(
        group: dict[str, Any], params: list[torch.Tensor], grads: list[torch.Tensor]
    ) -> torch.Tensor:
        """Divisors of the gradients, (parameters,), at least 1."""
        if not group["agc"]:
            return torch.ones(len(params), device=params[0].device)
        limits = torch.stack(torch._foreach_norm(params)).clamp(min=group["agc_floor"]) * group["agc"]
        return (torch.stack(torch._foreach_norm(grads)) / limits).clamp(min=1.0)

    def _fused_update(
        self, params: list[torch.Tensor], square: list[torch.Tensor], momentum: list[torch.Tensor]
    ) -> FusedUpdate | None:
        """The fused kernel; None if unavailable, as addresses cannot be uploaded during graph capture."""
        first = params[0].data_ptr()
        update = self._fused.get(first)
        if update is None or update.key != _addresses(params, square, momentum):
            if torch.cuda.is_current_stream_capturing() or not _kernel_fits(params):
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


def annealed(schedule: str, updates: torch.Tensor, duration: int) -> torch.Tensor:
    """Share of the learning rate after these updates, (parameters,), which may be negative during the warm-up."""
    progress = (updates / duration).clamp(0.0, 1.0)
    if schedule == "linear":
        return 1.0 - 0.9 * progress
    return 0.5 * (1.0 + torch.cos(math.pi * progress))


def is_decayed(parameter: torch.Tensor) -> bool:
    """Whether weight decay applies: to the weights of dense layers and convolutions."""
    return parameter.ndim >= 2 and not getattr(parameter, "no_decay", False)


# --- LaProp's fused update ---


class FusedUpdate:
    """The update of fixed parameters (float32, dense) with fixed moments of the same layout, in one launch.

    Parameters and their moments are passed by address, so they stay tensors of their own; gradients, whose
    addresses change, are copied into one buffer first.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        square: Sequence[torch.Tensor],
        momentum: Sequence[torch.Tensor],
    ) -> None:
        self.key = _addresses(params, square, momentum)
        device = params[0].device
        sizes = [p.numel() for p in params]
        counts = [cdiv(size, CHUNK) for size in sizes]
        places = [(which, place) for which, count in enumerate(counts) for place in range(count)]
        self.addresses = torch.tensor(self.key, dtype=torch.int64, device=device)
        self.chunks = torch.tensor(places, dtype=torch.int32, device=device)
        self.sizes = torch.tensor(sizes, dtype=torch.int32, device=device)
        self.gradients = torch.zeros((len(places), CHUNK), dtype=torch.float32, device=device)
        slots = self.gradients.split(counts)
        # In the memory order of their parameters.
        self.views = [
            torch.as_strided(slot, p.shape, p.stride(), slot.storage_offset())
            for slot, p in zip(slots, params)
        ]

    def __call__(
        self,
        gradients: Sequence[torch.Tensor],
        scalars: torch.Tensor,  # (3, parameters): what to divide the gradient by, learning rate, 1 / √(1 - β2^t)
        go: torch.Tensor,  # 0-d: 1, or 0 where nothing may change
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        torch._foreach_copy_(self.views, list(gradients))
        _laprop_kernel[(len(self.chunks),)](
            self.addresses,
            self.chunks,
            self.sizes,
            scalars,
            go,
            self.gradients,
            len(self.sizes),
            1.0 - betas[0],
            1.0 - betas[1],
            eps,
            CHUNK=CHUNK,
        )


def _addresses(*tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """One row for each parameter; where they change, a new `FusedUpdate` is needed."""
    return tuple(zip(*([t.data_ptr() for t in column] for column in tensors), strict=True))


def _kernel_fits(params: Sequence[torch.Tensor]) -> bool:
    """Whether the kernel can update these parameters in the order of their memory."""
    return all(
        p.dtype == torch.float32
        and (p.is_contiguous() or p.is_contiguous(memory_format=torch.channels_last))
        and 0 < p.numel() < 2**31
        for p in params
    )


@jit
def _laprop_kernel(
    addresses,  # (parameters, 3) int64: of parameter, square, momentum
    chunks,  # (chunks, 2) int32: parameter, index of the chunk in it
    sizes,  # (parameters,) int32
    scalars,  # (3, parameters): ratio, rate, root
    go,
    gradients,  # (chunks, CHUNK)
    count,
    rest1,
    rest2,
    eps,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    which = tl.load(chunks + 2 * chunk)
    lanes = tl.arange(0, CHUNK)
    i = tl.load(chunks + 2 * chunk + 1) * CHUNK + lanes
    inside = i < tl.load(sizes + which)
    parameter = tl.load(addresses + 3 * which).to(tl.pointer_type(tl.float32)) + i
    square = tl.load(addresses + 3 * which + 1).to(tl.pointer_type(tl.float32)) + i
    momentum = tl.load(addresses + 3 * which + 2).to(tl.pointer_type(tl.float32)) + i
    ratio = tl.load(scalars + which)
    rate = tl.load(scalars + count + which)
    root = tl.load(scalars + 2 * count + which)
    on = tl.load(go)

    g = tl.load(gradients + chunk.to(tl.int64) * CHUNK + lanes, mask=inside, other=0.0) / ratio
    g = tl.where(on > 0.0, g, 0.0)  # not a product with 0, which would keep a NaN
    s = tl.load(square, mask=inside, other=0.0) * (1.0 - on * rest2) + rest2 * (g * g)
    m = tl.load(momentum, mask=inside, other=0.0) * (1.0 - on * rest1)
    m += rest1 * (g / (tl.sqrt(s) * root + eps))
    tl.store(square, s, mask=inside)
    tl.store(momentum, m, mask=inside)
    tl.store(parameter, tl.load(parameter, mask=inside, other=0.0) - m * rate, mask=inside)


# --- Weight decay ---


def exempt_from_decay(module: nn.Module) -> None:
    """Mark biases, norms and embedding tables, which `decayed_adamw` does not decay (minGPT's groups).

    Weights of convolutions get a mark of their own, because IRIS and Δ-IRIS treat them differently.
    """
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            table = isinstance(part, nn.Embedding | nn.LayerNorm | nn.GroupNorm)
            if table or "bias" in name or parameter.ndim < 2:
                parameter.no_decay = True  # type: ignore[attr-defined]
            elif isinstance(part, nn.Conv2d):
                parameter.of_convolution = True  # type: ignore[attr-defined]


def decayed_adamw(
    parameters: Iterable[nn.Parameter],
    *,
    lr: float,
    weight_decay: float = 0.0,
    decay_convolutions: bool = True,
    **options: Any,
) -> torch.optim.AdamW:
    """AdamW in two parameter groups: no weight decay for those marked by `exempt_from_decay`.

    decay_convolutions: False exempts their weights too. The default is that of saved runs without this key,
                        whose optimizer state has these groups
    """

    def is_exempt(parameter: nn.Parameter) -> bool:
        convolution = getattr(parameter, "of_convolution", False) and not decay_convolutions
        return convolution or getattr(parameter, "no_decay", False)

    listed = list(parameters)
    decayed, exempt = [p for p in listed if not is_exempt(p)], [p for p in listed if is_exempt(p)]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": exempt, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, **options)
