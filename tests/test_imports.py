"""Imports point one way, and the light things stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "rl_lab"
SHARED = {"records", "errors", "episode_tracker", "utils"}
# room -> rooms of rl_lab that it may import
ALLOWED = {
    "records": set(),
    "errors": set(),
    "episode_tracker": set(),
    "utils": {"errors"},
    "environments": SHARED,
    "buffers": SHARED,
    "components": SHARED,
    "launch": SHARED,
    "workflows": SHARED | {"components", "launch"},
    "orchestration": SHARED | {"buffers"},
}
ALGORITHMS = ("dreamer", "tdmpc", "iris", "diffusion_policy", "og_wm")


def rooms() -> list[tuple[str, Path]]:
    files = [(file.relative_to(PACKAGE).parts[0].removesuffix(".py"), file) for file in PACKAGE.rglob("*.py")]
    return [(room, file) for room, file in files if room in ALLOWED]


@pytest.mark.parametrize(("room", "file"), rooms(), ids=lambda value: getattr(value, "name", value))
def test_imports_point_one_way(room: str, file: Path):
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "rl_lab" and len(parts) > 1 and parts[1] != room:
                assert parts[1] in ALLOWED[room], f"{file.name} ({room}) imports {name}"


def test_no_algorithm_is_named_where_none_may_be():
    free = {"workflows", "configs", "components"}
    for file in PACKAGE.rglob("*.py"):
        room = file.relative_to(PACKAGE).parts[0]
        if room in free or file.name == "__init__.py":
            continue
        tree = ast.parse(file.read_text())
        names = {node.id.lower() for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {
            node.name.lower() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        for algorithm in ALGORITHMS:
            assert not [name for name in names if algorithm in name], f"{file} names {algorithm}"


def test_importing_rl_lab_loads_no_torch():
    code = "import sys, rl_lab, rl_lab.cli; sys.exit('torch' in sys.modules or 'hydra' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_help_is_quick():
    """The bar is 0.5 s on an idle machine; tests share theirs, so the best of a few tries counts."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        result = subprocess.run([sys.executable, "-m", "rl_lab", "--help"], capture_output=True, text=True)
        times.append(time.perf_counter() - start)
        assert result.returncode == 0
        for verb in ("train", "resume", "eval", "play", "report", "collect", "bench", "list", "doctor"):
            assert verb in result.stdout
    assert min(times) < 0.5
