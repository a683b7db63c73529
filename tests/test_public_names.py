"""One public import for each concept: what the packages export exists, is listed once, and loads lazily."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import rl_lab

PACKAGES = ("rl_lab", "rl_lab.workflows", "rl_lab.buffers", "rl_lab.environments", "rl_lab.orchestration")


@pytest.mark.parametrize("package", PACKAGES)
def test_exports_exist_and_type_checkers_see_the_same_names(package: str) -> None:
    module = importlib.import_module(package)
    assert sorted(module.__all__) == sorted(module._MODULES)
    for name, home in module._MODULES.items():
        assert getattr(module, name) is getattr(importlib.import_module(home), name)
    tree = ast.parse(Path(str(module.__file__)).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == module._MODULES
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = module.nonsense


def test_public_functions_are_typed_and_documented() -> None:
    for name in rl_lab.__all__:
        value = getattr(rl_lab, name)
        assert value.__doc__, name
        function = value if inspect.isfunction(value) else value.__init__
        signature = inspect.signature(function)
        for parameter in list(signature.parameters.values()):
            assert (
                parameter.name in ("self", "args", "kwargs") or parameter.annotation is not parameter.empty
            ), (
                name,
                parameter,
            )
        if inspect.isfunction(value):
            assert signature.return_annotation is not signature.empty, name


def test_importing_the_packages_loads_no_torch() -> None:
    code = f"import sys, {', '.join(PACKAGES)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
