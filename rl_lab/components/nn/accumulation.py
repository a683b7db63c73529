"""Gradient accumulation: the gradient of a batch from equal parts of it, to save memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from rl_lab.records import Batch

Tensors = Mapping[str, torch.Tensor]
Metrics = dict[str, torch.Tensor]
LossOfPart = Callable[[], tuple[torch.Tensor, Metrics]]


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
