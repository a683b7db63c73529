"""Helpers without RL meaning: files, logging, seeding, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """`__getattr__` for a package's `__init__.py`. modules: exported name -> module that defines it.

    The package stays quick to import, and modules inside it can import one another without a cycle.
    """

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(import_module(modules[name]), name)

    return load
