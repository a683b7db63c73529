"""The context that a workflow receives in `initialize`: config, parts, optimizers, buffers, environments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from rl_lab.components.nn.fast_path import resolve_fast_path, use_fast_path
from rl_lab.errors import ConfigError, closest
from rl_lab.records import Spec

if TYPE_CHECKING:
    import torch
    from omegaconf import DictConfig


class WorldModelComponents(nn.Module):
    """The parts under `components:` in the config, as attributes: `context.components.encoder`."""

    def __init__(self, parts: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._names: list[str] = []
        for name, part in (parts or {}).items():
            self._names.append(name)
            setattr(self, name, part)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            names = self.__dict__.get("_names", [])
            raise AttributeError(
                f"components.{name} does not exist: add it to the config.{closest(name, names)}"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def items(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in self._names]


@dataclass(frozen=True)
class WorkflowContext:
    """Everything a workflow may use. Tools that only act (play, eval) leave the fields for training empty."""

    config: DictConfig
    device: torch.device
    spec: Spec
    components: WorldModelComponents
    controller_manager: ControllerManager
    optimizers: Mapping[str, Any] = field(default_factory=dict)
    buffers: Mapping[str, Any] = field(default_factory=dict)
    train_environment: Any = None
    eval_environment: Any = None
    collector: Any = None
    checkpoint_manager: Any = None
    experiment_logger: Any = None
    initial_observation: Any = None
    initial_dones: Any = None
    global_step: int = 0
    trains: bool = False  # False for an agent that only acts and has no optimizers

    def modules(self) -> list[nn.Module]:
        """All components and controllers with parameters."""
        return [self.components, *(module for _, module in self.controller_manager.modules())]

    def count_parameters(self) -> int:
        """Number of parameters of all components and controllers."""
        return sum(p.numel() for module in self.modules() for p in module.parameters())

    def component(self, name: str, *methods: str) -> Any:
        """The component of that name. Raises if it lacks one of the methods, which the workflow will call."""
        return _checked("components", name, dict(self.components.items()), methods)

    def controller(self, name: str, *methods: str) -> Any:
        return _checked("controllers", name, dict(self.controller_manager.items()), methods)

    def optimizer(self, name: str) -> Any:
        """The optimizer of that name; None for an agent that was loaded only to act."""
        if (self.trains or self.optimizers) and name not in self.optimizers:
            raise ConfigError(
                f"optimizers.{name} is missing and this workflow needs it: add it to the config."
                f"{closest(name, self.optimizers)}"
            )
        return self.optimizers.get(name)

    def use_fast_path(self) -> bool:
        """Choose the fast or the plain form of all parts, by `training.fast_path`; return whether it is fast."""
        fast = resolve_fast_path(self.config.training.get("fast_path", "auto"), self.device)
        controllers = (part for _, part in self.controller_manager.items())
        use_fast_path(fast, self.components, *controllers, *self.optimizers.values())
        return fast

    def check_trained(
        self,
        parts: Mapping[str, Iterable[nn.Parameter]],
        optimizers: Mapping[str, torch.optim.Optimizer],
        main: str = "model",
    ) -> None:
        """Raise if no optimizer trains a part: it would silently keep its initial weights.

        main: the name of the optimizer that the error message starts with
        """
        if not self.trains:
            return
        optimized = {id(p) for o in optimizers.values() for group in o.param_groups for p in group["params"]}
        untrained = [
            name
            for name, own in parts.items()
            if any(p.requires_grad and id(p) not in optimized for p in own)
        ]
        if untrained:
            key = f"optimizers.{main}" + (".modules" if main in optimizers else " is missing")
            raise ConfigError(
                f"{key}: no optimizer trains {', '.join(untrained)} "
                f"(optimizers found: {', '.join(optimizers) or 'none'}); "
                "add them to the `modules` of one (to keep weights fixed, use a phase's `freeze`)"
            )


def _checked(group: str, name: str, parts: Mapping[str, Any], methods: tuple[str, ...]) -> Any:
    if name not in parts:
        raise ConfigError(
            f"{group}.{name} is missing and this workflow needs it: add it to the config."
            f"{closest(name, parts)}"
        )
    part = parts[name]
    missing = [method for method in methods if not callable(getattr(part, method, None))]
    if missing:
        raise ConfigError(
            f"{group}.{name} ({type(part).__name__}) has no {', '.join(f'{m}()' for m in missing)}, "
            "which this workflow calls: choose another part or add the method"
        )
    return part


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
