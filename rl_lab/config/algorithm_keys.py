"""Keys of `algorithm` that nothing reads: refused, or for a workflow without declared settings, reported once.

A key is read by the workflow, if its `settings_type` has it, or by an interpolation such as `${algorithm.size.units}`.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rl_lab.errors import ConfigError, closest
from rl_lab.workflows.settings import unknown_keys

INTERPOLATED = re.compile(r"\balgorithm\.([A-Za-z_][\w.]*)")
RELATIVE = re.compile(r"\$\{(\.+)([A-Za-z_][\w.]*)")


def check_algorithm(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a key that neither the workflow nor an interpolation reads.

    config: plain, with its interpolations
    """
    workflow = workflow_class(config)
    schema = getattr(workflow, "settings_type", None)
    section = config.get("algorithm")
    if schema is None or not isinstance(section, Mapping):
        return
    used = interpolated_keys(config)
    for path, known in unknown_keys(schema, section, "algorithm"):
        for leaf in _leaves(_at(config, path), path):
            if not _is_used(leaf, used):
                own = "" if _is_ours(workflow) else f" Your own keys are fields of {schema.__name__}."
                key = leaf.rpartition(".")[2]
                raise ConfigError(
                    f"{leaf} is not a key that {workflow.__name__} reads.{closest(key, known)}{own}"
                )


def unread_keys(config: Mapping[str, Any]) -> list[str]:
    """Keys that neither the code of a workflow without declared settings nor an interpolation mentions."""
    workflow = workflow_class(config)
    section = config.get("algorithm")
    if workflow is None or getattr(workflow, "settings_type", None) is not None:
        return []
    used, text = interpolated_keys(config), _source(workflow)
    return [
        leaf
        for leaf in _leaves(section if isinstance(section, Mapping) else {}, "algorithm")
        if not _is_used(leaf, used) and text is not None
        if not re.search(rf"\b{re.escape(leaf.rpartition('.')[2])}\b", text)
    ]


def workflow_class(config: Mapping[str, Any]) -> Any:
    """The class that `workflow._target_` names, or None; `rl_lab.build` reports why it cannot be imported."""
    from hydra.utils import get_class

    node = config.get("workflow")
    try:
        return get_class(str(node["_target_"])) if isinstance(node, Mapping) else None
    except Exception:  # an import runs the user's module, which may raise anything
        return None


def interpolated_keys(config: Mapping[str, Any]) -> set[str]:
    """Paths of `algorithm` that interpolations anywhere in the config refer to."""
    used = set()
    for path, value in _items(config, ()):
        if not isinstance(value, str) or "${" not in value:
            continue
        used |= {f"algorithm.{key}".rstrip(".") for key in INTERPOLATED.findall(value)}
        for dots, key in RELATIVE.findall(value):
            used.add(".".join([*path[: -len(dots)], key]))
    return used


def _is_used(path: str, used: set[str]) -> bool:
    parts = path.split(".")
    return any(".".join(parts[:count]) in used for count in range(2, len(parts) + 1))


def _leaves(node: Any, path: str) -> Iterator[str]:
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}")
    elif path != "algorithm":
        yield path


def _items(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    children = (
        node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    )
    for key, value in children:
        yield from _items(value, (*path, str(key)))
    if not isinstance(node, Mapping | list):
        yield path, node


def _at(config: Mapping[str, Any], path: str) -> Any:
    node: Any = config
    for key in path.split("."):
        node = next(value for name, value in node.items() if str(name) == key)
    return node


def _is_ours(workflow: type) -> bool:
    return workflow.__module__.partition(".")[0] == "rl_lab"


def _source(workflow: type) -> str | None:
    """The source of a workflow's modules and of the others in their packages, or None if it cannot be read."""
    own = {parent.__module__ for parent in workflow.__mro__ if parent.__module__ not in ("builtins", "abc")}
    packages = {name.partition(".")[0] for name in own} - {"rl_lab", "__main__"}
    modules = {name for name in sys.modules if name in own or name.partition(".")[0] in packages}
    try:
        return "\n".join(
            inspect.getsource(sys.modules[name]) for name in sorted(modules) if name in sys.modules
        )
    except (OSError, TypeError):
        return None
