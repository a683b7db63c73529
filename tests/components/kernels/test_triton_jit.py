"""Where Triton cannot run, kernels are defined and not launched, and Triton is not imported."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_lab.components import kernels
from rl_lab.components.kernels import triton_jit
from rl_lab.components.nn import optim

FOLDER = Path(kernels.__path__[0])
FILES = sorted(path for path in FOLDER.glob("*.py") if path.stem != "__init__")
LAUNCH_EVERYTHING = """
import importlib, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for kernel in list(vars(module).values()):
        if type(kernel).__name__ == "_NoKernel":
            try:
                kernel[(1,)]
            except RuntimeError as error:
                print(error)
"""


def test_stand_ins_where_triton_is_installed_without_a_device(tmp_path: Path):
    (tmp_path / "triton.py").write_text("raise SystemExit('Triton was imported')")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{tmp_path}:{FOLDER.parents[2]}"}
    environment.pop("TRITON_INTERPRET", None)
    names = [f"{kernels.__name__}.{path.stem}" for path in FILES] + [optim.__name__]
    result = subprocess.run(
        [sys.executable, "-c", LAUNCH_EVERYTHING, *names], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    errors = result.stdout.splitlines()
    assert len(set(errors)) > 50
    assert all(error.startswith("_") or error.startswith("dropout_scale") for error in errors)
    assert all("is a Triton kernel, which needs a CUDA device" in error for error in errors)


def test_stand_in_language_has_any_public_name():
    language = triton_jit._NoLanguage()
    assert language.constexpr is language and language.math.exp is language
    assert not hasattr(language, "__wrapped__")


@pytest.mark.parametrize(("n", "power"), [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_next_power_of_2(n: int, power: int):
    assert triton_jit._next_power_of_2(n) == triton_jit.next_power_of_2(n) == power


@pytest.mark.parametrize(("x", "y", "quotient"), [(0, 4, 0), (1, 4, 1), (8, 4, 2), (9, 4, 3)])
def test_cdiv(x: int, y: int, quotient: int):
    assert triton_jit._cdiv(x, y) == triton_jit.cdiv(x, y) == quotient


@pytest.mark.parametrize("path", [*FILES, Path(optim.__file__)], ids=lambda path: path.stem)
def test_only_kernels_are_untyped(path: Path):
    """mypy lets functions of these files go untyped, because kernels must."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and "jit" not in map(ast.unparse, node.decorator_list):
            arguments = [*node.args.args, *node.args.kwonlyargs]
            untyped = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
            assert node.returns is not None and not untyped, f"{path.name}: {node.name} {untyped}"
