"""Strict loading of weights into modules: everything or nothing, and one error that lists all differences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rl_lab.errors import CheckpointError, ConfigError, closest

SHOWN = 12  # differences of one kind that a message lists


def load_matching(
    target: nn.Module | Mapping[str, Any], state: Mapping[str, Any], *, prefix: str = ""
) -> None:
    """Load a state_dict into a module, or {name: state_dict} into {name: module}, strictly.

    Nothing is loaded unless everything matches. CheckpointError lists missing keys, unexpected keys and
    mismatched shapes.
    """
    if isinstance(target, nn.Module):
        pairs = {prefix: (target, state)}
        missing, unexpected = [], []
    else:
        names = {name: f"{prefix}.{name}" if prefix else name for name in {**target, **state}}
        missing = [
            f"{names[name]} (every key)" for name in target if name not in state and _has_state(target[name])
        ]
        unexpected = [f"{names[name]} (every key)" for name in state if name not in target]
        pairs = {names[name]: (part, state[name]) for name, part in target.items() if name in state}
    shapes: list[str] = []
    for name, (part, part_state) in pairs.items():
        _compare(name, part, part_state, missing, unexpected, shapes)
    if missing or unexpected or shapes:
        raise CheckpointError(_difference(prefix, missing, unexpected, shapes))
    for name, (part, part_state) in pairs.items():
        try:
            part.load_state_dict(part_state)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            first_line = str(error).strip().split("\n")[0][:300]
            raise CheckpointError(
                f"{name or 'this model'} does not match the checkpoint: {first_line}"
            ) from None


def partial_load(
    state: Mapping[str, Any],
    load_spec: Mapping[str, Any],
    components: Any,
    controllers: Any,
) -> list[str]:
    """Load only the parts named in `load: {path: …, components: [encoder], controllers: [actor]}`.

    components, controllers: {name: module}, or anything with `items()`. In the config, "all" instead of a
    list loads every part that both the run and the checkpoint have. Returns the loaded parts, such as
    "components.encoder".
    """
    unknown = [key for key in load_spec if key not in ("path", "components", "controllers")]
    if unknown:
        known = ("path", "components", "controllers")
        raise ConfigError(f"load.{unknown[0]} is not a key of load.{closest(str(unknown[0]), known)}")
    plan: list[tuple[str, dict[str, Any], Mapping[str, Any]]] = []
    for group, parts in (
        ("components", dict(components.items())),
        ("controllers", dict(controllers.items())),
    ):
        saved = state.get(group, {})
        names = load_spec.get(group) or []
        if names == "all":
            names = [name for name in parts if name in saved]
        elif isinstance(names, str):
            names = [names]
        for name in names:
            if name not in parts:
                raise ConfigError(
                    f"load.{group} names '{name}', which this run does not have.{closest(name, parts)}"
                )
            if name not in saved:
                raise CheckpointError(
                    f"load.{group} names '{name}', which the checkpoint does not have.{closest(name, saved)}"
                )
        plan.append((group, {name: parts[name] for name in names}, {name: saved[name] for name in names}))
    if not any(parts for _, parts, _ in plan):
        raise ConfigError("load names nothing to load: add components: [...] or controllers: [...]")
    for group, parts, saved in plan:
        load_matching(parts, saved, prefix=group)
    return [f"{group}.{name}" for group, parts, _ in plan for name in parts]


def _has_state(part: Any) -> bool:
    return bool(part.state_dict()) if hasattr(part, "state_dict") else False


def _compare(
    name: str, part: Any, state: Any, missing: list[str], unexpected: list[str], shapes: list[str]
) -> None:
    """Append the differences between a module and its state to the three lists."""
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"'{name}' is of type {type(state).__name__} in the checkpoint, not a state_dict"
        )
    if not hasattr(part, "load_state_dict"):
        raise CheckpointError(f"'{name}' ({type(part).__name__}) has no weights to load")
    if not isinstance(part, nn.Module):
        return  # for example an optimizer: its own load_state_dict checks
    own = part.state_dict()
    dot = f"{name}." if name else ""
    missing += [dot + key for key in own if key not in state]
    unexpected += [f"{dot}{key}" for key in state if key not in own]
    for key in own:
        ours, theirs = own[key], state.get(key)
        if not isinstance(ours, torch.Tensor) or theirs is None or nn.parameter.is_lazy(ours):
            continue
        if not isinstance(theirs, torch.Tensor):
            shapes.append(f"{dot}{key}: {type(theirs).__name__} in the checkpoint, a tensor in the model")
        elif ours.shape != theirs.shape:
            shapes.append(
                f"{dot}{key}: {tuple(theirs.shape)} in the checkpoint, {tuple(ours.shape)} in the model"
            )


def _difference(prefix: str, missing: list[str], unexpected: list[str], shapes: list[str]) -> str:
    lines = [f"{prefix or 'this model'} does not match the checkpoint:"]
    for title, items in (
        ("missing in the checkpoint", missing),
        ("missing in the model", unexpected),
        ("different shapes", shapes),
    ):
        if items:
            lines.append(f"  {title} ({len(items)}):")
            lines += [f"    {item}" for item in items[:SHOWN]]
            if len(items) > SHOWN:
                lines.append(f"    … and {len(items) - SHOWN} more")
    lines.append("Use the config of the checkpoint's run, or load parts of it (load: {components: [...]}).")
    return "\n".join(lines)
