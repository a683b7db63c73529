"""Which device a process uses."""

from __future__ import annotations

import os

import torch

from rl_lab.errors import ConfigError


def resolve_device(name: str) -> torch.device:
    """`auto | cpu | cuda | cuda:N | mps` to a device that exists, or a message that says what does."""
    if torch.cuda.is_available():
        torch.backends.cudnn.benchmark = True  # shapes are fixed here: let cuDNN try its convolutions once
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
