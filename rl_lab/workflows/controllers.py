"""The named controllers (actors, critics, planners) of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rl_lab.errors import ConfigError, closest


class ControllerManager:
    """Controllers by name; sets their device and mode and returns their state for checkpoints."""

    def __init__(self, controllers: Mapping[str, Any] | None = None) -> None:
        self._controllers = dict(controllers or {})

    def __getitem__(self, name: str) -> Any:
        if name not in self._controllers:
            raise ConfigError(
                f"controllers.{name} does not exist: add it to the config.{closest(name, self._controllers)}"
            )
        return self._controllers[name]

    def __contains__(self, name: object) -> bool:
        return name in self._controllers

    def get(self, name: str, default: Any = None) -> Any:
        return self._controllers.get(name, default)

    def names(self) -> list[str]:
        return list(self._controllers)

    def items(self) -> list[tuple[str, Any]]:
        return list(self._controllers.items())

    def modules(self) -> list[tuple[str, nn.Module]]:
        return [(name, part) for name, part in self._controllers.items() if isinstance(part, nn.Module)]

    def to(self, device: torch.device | str) -> ControllerManager:
        for _, module in self.modules():
            module.to(device)
        return self

    def train(self, mode: bool = True) -> ControllerManager:
        for _, module in self.modules():
            module.train(mode)
        return self

    def eval(self) -> ControllerManager:
        return self.train(False)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        return {name: module.state_dict() for name, module in self.modules()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        for name, module in self.modules():
            module.load_state_dict(state[name])
