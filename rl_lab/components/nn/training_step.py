"""The training step: gradients, also from parts of a batch, masking of non-finite updates, optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from rl_lab.records import Batch
from rl_lab.utils import ranks

Tensors = Mapping[str, torch.Tensor]
Metrics = dict[str, torch.Tensor]
LossOfPart = Callable[[], tuple[torch.Tensor, Metrics]]


class NonFiniteGuard(nn.Module):
    """Counts updates on the device, and records which were masked because a value was not finite.

    All state is 0-d tensors, so that an update needs no device-to-host copy; `report` reads them when metrics
    are logged.
    """

    updates: torch.Tensor  # updates attempted
    masked: torch.Tensor  # updates masked
    first_masked: torch.Tensor  # index of the first masked update, -1: none
    last_masked: torch.Tensor  # index of the latest masked update, -1: none

    def __init__(self) -> None:
        super().__init__()
        for name, value in (("updates", 0), ("masked", 0), ("first_masked", -1), ("last_masked", -1)):
            self.register_buffer(name, torch.full((), value, dtype=torch.int64))

    @torch.no_grad()
    def check(self, *values: torch.Tensor) -> torch.Tensor:
        """Count one update; returns a 0-d float: 1 if any of the 0-d values is not finite, else 0."""
        bad = ~torch.isfinite(torch.stack([value.detach().float() for value in values])).all()
        self.masked.add_(bad)
        self.last_masked.copy_(torch.where(bad, self.updates, self.last_masked))
        self.first_masked.copy_(torch.where(bad & (self.first_masked < 0), self.updates, self.first_masked))
        self.updates.add_(1)
        return bad.float()

    def report(self) -> dict[str, int]:
        """The four counters, copied to the host."""
        return {name: int(buffer) for name, buffer in self.named_buffers()}


class Gradients(NamedTuple):
    """Gradients of one loss; parameters that the loss does not depend on are left out."""

    loss: torch.Tensor  # 0-d, detached
    found: list[tuple[torch.nn.Parameter, torch.Tensor]]


def find_gradients(loss: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> Gradients:
    """Gradients of a loss (0-d) without storing them in `.grad`, for concurrent backward passes."""
    trained = [p for p in parameters if p.requires_grad]
    if not trained or not loss.requires_grad:
        return Gradients(loss.detach(), [])
    found = zip(trained, torch.autograd.grad(loss, trained, allow_unused=True))
    return Gradients(loss.detach(), [(p, gradient) for p, gradient in found if gradient is not None])


def join_gradients(parts: Sequence[Gradients]) -> Gradients:
    """Combine the gradients of losses of disjoint parameters."""
    return Gradients(
        torch.stack([part.loss for part in parts]).sum(), [x for part in parts for x in part.found]
    )


def prepare_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Turn learning rates into device tensors and make Adam-like optimizers capturable in a CUDA graph.

    `initial_lr` keeps the configured learning rate: each update sets lr = initial_lr × scale. Called before
    every step, because loading a state dict replaces the groups; it returns early once a group is prepared.
    """
    for group in optimizer.param_groups:
        device = group["params"][0].device
        lr = group["lr"]
        if isinstance(lr, torch.Tensor) and lr.device == device:
            continue
        group.setdefault("initial_lr", float(lr))
        group["lr"] = torch.as_tensor(lr, dtype=torch.float32).to(device)
        if "capturable" in group and device.type == "cuda":
            group["capturable"] = True


def optimizer_step(
    loss: torch.Tensor,  # 0-d
    optimizers: Sequence[torch.optim.Optimizer],
    parts: Mapping[str, Sequence[torch.nn.Parameter]],  # for the gradient norms
    *,
    guard: NonFiniteGuard,
    learning_rate_scale: torch.Tensor | None = None,  # 0-d
    max_grad_norm: float | None = None,
    clip_norms: Sequence[float] = (),  # of the gradients of each optimizer; 0: no limit
    # Changes the averaged gradients in place, before their norm is taken.
    limit_gradients: Callable[[list[torch.Tensor]], None] | None = None,
    # Gradients of further losses; called after the backward pass of `loss`.
    extra_gradients: Callable[[], Gradients] | None = None,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Backward pass, then one step of every optimizer with gradients. Fixed shapes, no device-to-host copies.

    With several ranks (utils/ranks.py) the gradients and the loss are averaged over them, so that all take the same
    step, or mask it.

    A non-finite loss or gradient norm masks the step on the device: by `found_inf` if the optimizer supports
    it (LaProp, torch's fused optimizers), else by zero gradients (momentum then still decays and changes the
    weights slightly).

    returns: metrics (0-d, detached; `loss` is the sum of all losses) and the flag, 1.0 if masked.
    """
    for optimizer in optimizers:
        prepare_optimizer(optimizer)
        optimizer.zero_grad(set_to_none=True)
    if loss.requires_grad:  # False if all of its parameters are frozen
        loss.backward()
    loss = loss.detach()
    if extra_gradients is not None:
        more = extra_gradients()
        loss = loss + more.loss
        _add_gradients(more)
    gradients = [
        p.grad for o in optimizers for group in o.param_groups for p in group["params"] if p.grad is not None
    ]
    if ranks.active():
        loss = loss.clone()
        ranks.average_over_ranks_([*gradients, loss])
    if limit_gradients is not None:
        limit_gradients(gradients)

    metrics, norm = gradient_norms(parts)
    masked = guard.check(loss, norm)
    if max_grad_norm is not None:
        torch._foreach_mul_(gradients, (max_grad_norm / norm.clamp(min=1e-6)).clamp(max=1.0))
    for optimizer, limit in zip(optimizers, clip_norms):
        clip_gradients(optimizer, limit)
    for optimizer in optimizers:
        if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            _masked_step(optimizer, masked, learning_rate_scale)
    metrics.update(nonfinite=masked, loss=loss)
    return metrics, masked


def clip_gradients(optimizer: torch.optim.Optimizer, limit: float) -> None:
    """Scale the gradients of an optimizer's parameters down to this norm; 0: no limit."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if limit and grads:
        norm = torch.stack(torch._foreach_norm(grads)).square().sum().sqrt()
        torch._foreach_mul_(grads, (limit / norm.clamp(min=1e-6)).clamp(max=1.0))


def _add_gradients(more: Gradients) -> None:
    both = [(p.grad, gradient) for p, gradient in more.found if p.grad is not None]
    for p, gradient in more.found:
        if p.grad is None:
            p.grad = gradient
    if both:
        torch._foreach_add_([grad for grad, _ in both], [gradient for _, gradient in both])


def gradient_norms(
    parts: Mapping[str, Sequence[torch.nn.Parameter]],
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Metrics `grad_norm/<part>` of parts with gradients and `grad_norm`; and the latter (0-d)."""
    present = {name: [p.grad for p in params if p.grad is not None] for name, params in parts.items()}
    present = {name: grads for name, grads in present.items() if grads}
    squares = torch.stack(torch._foreach_norm([g for grads in present.values() for g in grads])).square()
    sums = [chunk.sum() for chunk in squares.split([len(grads) for grads in present.values()])]
    total = squares.sum().sqrt()
    metrics = {f"grad_norm/{name}": value.sqrt() for name, value in zip(present, sums)}
    return {**metrics, "grad_norm": total}, total


def _masked_step(
    optimizer: torch.optim.Optimizer, masked: torch.Tensor, learning_rate_scale: torch.Tensor | None
) -> None:
    for group in optimizer.param_groups:
        if learning_rate_scale is not None:
            group["lr"].copy_(learning_rate_scale * group["initial_lr"])
    supports_mask = hasattr(optimizer, "found_inf") or optimizer.defaults.get("fused")
    if supports_mask:
        optimizer.found_inf = masked  # type: ignore[attr-defined]
    else:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = torch.where(masked > 0, 0.0, p.grad)
    optimizer.step()


# ---------------------------------------------------------------- gradient accumulation
# The gradient of a batch from equal parts of it, to save memory.


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    """Split the sequences of a batch into `parts` equal parts."""
    if parts == 1:
        return [batch]
    columns = {name: value.chunk(parts) for name, value in batch.columns.items()}
    masks = batch.mask.chunk(parts) if batch.mask is not None else (None,) * parts
    return [Batch({name: value[i] for name, value in columns.items()}, mask=masks[i]) for i in range(parts)]


def split_noise(
    noise: Tensors, parts: int, dims: Mapping[str, int | None] | None = None
) -> list[dict[str, torch.Tensor]]:
    """Split noise along the dimension of the batch, or of the parts.

    dims: name -> that dimension, if it is not the first; None: all parts get the same
    """
    dims = dims or {}
    chunks = {
        name: (value,) * parts if (dim := dims.get(name, 0)) is None else value.chunk(parts, dim)
        for name, value in noise.items()
    }
    return [{name: value[i] for name, value in chunks.items()} for i in range(parts)]


def accumulated_loss(
    loss: Callable[[Batch, dict[str, torch.Tensor]], tuple[torch.Tensor, Metrics]],
    batch: Batch,
    noise: Tensors,
    parameters: Sequence[torch.nn.Parameter],
    parts: int,
) -> tuple[torch.Tensor, Metrics]:
    """Mean loss (0-d) and metrics over `parts` parts of a batch; its backward pass gives the mean gradient."""
    if parts == 1:
        return loss(batch, dict(noise))
    shares = zip(split_batch(batch, parts), split_noise(noise, parts))
    return mean_of_parts([lambda share=share: loss(*share) for share in shares], parameters)  # type: ignore[misc]


def mean_of_parts(
    losses: Sequence[LossOfPart], parameters: Sequence[torch.nn.Parameter]
) -> tuple[torch.Tensor, Metrics]:
    """Mean (0-d) and metrics of the losses of equal parts of a batch; its backward pass gives the mean gradient.

    To save memory, the graph of each part is freed before the next one is built. The returned scalar has the
    value of the loss and is linear in the parameters with the mean gradient as slope, so `optimizer_step` can
    treat it like any loss.
    """
    if len(losses) == 1:
        return losses[0]()
    parts = len(losses)
    trained = [p for p in parameters if p.requires_grad]
    gradients = [torch.zeros_like(p) for p in trained]
    total, sums = torch.zeros((), device=trained[0].device), dict[str, torch.Tensor]()
    for loss in losses:
        value, metrics = loss()
        for accumulated, gradient in zip(
            gradients, torch.autograd.grad(value / parts, trained, allow_unused=True)
        ):
            if gradient is not None:
                accumulated += gradient
        total = total + value.detach() / parts
        for name, item in metrics.items():
            sums[name] = sums.get(name, 0.0) + item / parts
    slope = torch.stack([(p * g).sum() for p, g in zip(trained, gradients)]).sum()
    return slope + (total - slope.detach()), sums
