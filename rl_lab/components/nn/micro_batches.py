"""One update from several smaller batches: less memory, the same gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from rl_lab.records import Batch

Tensors = Mapping[str, torch.Tensor]
Metrics = dict[str, torch.Tensor]


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    """The sequences of a batch in `parts` equal shares."""
    if parts == 1:
        return [batch]
    columns = {name: value.chunk(parts) for name, value in batch.columns.items()}
    masks = batch.mask.chunk(parts) if batch.mask is not None else (None,) * parts
    return [Batch({name: value[i] for name, value in columns.items()}, mask=masks[i]) for i in range(parts)]


def split_noise(noise: Tensors, parts: int) -> list[dict[str, torch.Tensor]]:
    """Random numbers likewise: their first dimension is the batch's, or counts the shares."""
    chunks = {name: value.chunk(parts) for name, value in noise.items()}
    return [{name: value[i] for name, value in chunks.items()} for i in range(parts)]


def accumulated(
    loss: Callable[[Batch, dict[str, torch.Tensor]], tuple[torch.Tensor, Metrics]],
    batch: Batch,
    noise: Tensors,
    parameters: Sequence[torch.nn.Parameter],
    parts: int,
) -> tuple[torch.Tensor, Metrics]:
    """The mean loss (0-d) and mean metrics over `parts` shares of a batch; its backward pass gives their mean gradient.

    Each share's graph is freed before the next is made. What is returned is as large as the loss and linear in the
    weights with the gradient as its slope, so that the one place with `backward` need not know about shares.
    """
    if parts == 1:
        return loss(batch, dict(noise))
    trained = [p for p in parameters if p.requires_grad]
    gradients = [torch.zeros_like(p) for p in trained]
    total, sums = torch.zeros((), device=trained[0].device), dict[str, torch.Tensor]()
    for share, numbers in zip(split_batch(batch, parts), split_noise(noise, parts)):
        value, metrics = loss(share, numbers)
        for kept, found in zip(gradients, torch.autograd.grad(value / parts, trained, allow_unused=True)):
            if found is not None:
                kept += found
        total = total + value.detach() / parts
        for name, item in metrics.items():
            sums[name] = sums.get(name, 0.0) + item / parts
    slope = torch.stack([(p * g).sum() for p, g in zip(trained, gradients)]).sum()
    return slope + (total - slope.detach()), sums
