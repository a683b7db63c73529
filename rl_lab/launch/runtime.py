"""Which process this is, on which device, and how gradients of several processes become one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from rl_lab.errors import ConfigError


@dataclass(frozen=True)
class Runtime:
    """One process of a run. Started plainly there is one; under torchrun there are `world_size`."""

    device: torch.device
    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def average_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Mean of the gradients over all processes; nothing to do when there is one."""
        if self.world_size == 1:
            return
        for parameter in parameters:
            if parameter.grad is not None:
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad.div_(self.world_size)


def resolve_device(name: str) -> torch.device:
    """`auto | cpu | cuda | cuda:N | mps` to a device that exists, or a message that says what does."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"experiment.device is '{name}'; it can be auto, cpu, cuda, cuda:N or mps"
        ) from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigError(
                f"experiment.device is '{name}', but this machine has {count} CUDA devices; try auto"
            )
        return torch.device("cuda", device.index or 0)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("experiment.device is 'mps', which this machine does not have; try auto")
    return device


def resolve_precision(name: str, device: torch.device) -> torch.dtype:
    """`auto | float32 | bfloat16`: auto takes bfloat16 where the GPU has it."""
    if name == "auto":
        capable = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if capable else torch.float32
    if name not in ("float32", "bfloat16"):
        raise ConfigError(f"training.precision is '{name}'; it can be auto, float32 or bfloat16")
    return torch.float32 if name == "float32" else torch.bfloat16
