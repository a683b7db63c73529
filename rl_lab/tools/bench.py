"""`rl-lab bench X`: run benchmarks/X.py of the checkout and print its rows; --json writes them to a file.

A benchmark is a file with `run(argv: list[str]) -> list[dict]`; each row is {"name", "value", "unit"}.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_lab.errors import LabError, checkout, closest
from rl_lab.tools.doctor import commit, describe_machine
from rl_lab.tools.terminal import print_table
from rl_lab.utils.files import write_json_atomic


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="benchmark to run (default: list all)")
    # All words after the name are collected here, and main extracts `--json`: argparse cannot do both.
    parser.add_argument(
        "options", nargs=argparse.REMAINDER, help="options of the benchmark (NAME --help shows them)"
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="also write the rows, with commit and machine"
    )


def main(args: argparse.Namespace) -> int:
    if args.name is None:
        for name, text in describe_benchmarks().items():
            print(f"{name}  {text}")
        return 0
    picker = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    picker.add_argument("--json", type=Path, default=args.json)
    picked, options = picker.parse_known_args(args.options)
    result = run_benchmark(args.name, options)
    rows = [(row["name"], _number(row["value"]), row["unit"]) for row in result["rows"]]
    print_table(rows, header=("name", "value", "unit"), right=(1,))
    if picked.json is not None:
        write_json_atomic(picked.json, result)
        print(f"written to {picked.json}")
    return 0


def run_benchmark(name: str, options: Sequence[str] = ()) -> dict[str, Any]:
    """Run one benchmark; returns the content for `--json`."""
    module = load_benchmark(name)
    rows = [_checked(name, row) for row in module.run(list(options))]
    return {
        "benchmark": name,
        "commit": commit() or None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "command": " ".join(["rl-lab", "bench", name, *options]),
        "rows": rows,
    }


def load_benchmark(name: str) -> ModuleType:
    """Import benchmarks/<name>.py by its path."""
    folder = benchmark_folder()
    known = benchmark_files(folder)
    if name not in known:
        raise LabError(f"'{name}': there is no benchmark of that name in {folder}.{closest(name, known)}")
    module_name = f"rl_lab_benchmark_{name}"
    spec = importlib.util.spec_from_file_location(module_name, known[name])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and worker processes look up their module here
    spec.loader.exec_module(module)
    if not callable(getattr(module, "run", None)):
        raise LabError(f"{known[name]} has no function run(argv) that returns rows of name, value and unit")
    return module


def benchmark_folder() -> Path:
    root = checkout()
    if root is None or not (root / "benchmarks").is_dir():
        raise LabError(
            "benchmarks are part of the source tree, but this rl_lab is installed without it: clone the repository, "
            "run `pip install -e .` in it, then run rl-lab bench again"
        )
    return root / "benchmarks"


def benchmark_files(folder: Path) -> dict[str, Path]:
    """Return name -> file; names that start with an underscore are skipped."""
    return {file.stem: file for file in sorted(folder.glob("*.py")) if not file.stem.startswith("_")}


def describe_benchmarks() -> dict[str, str]:
    """Return name -> first line of its docstring, without importing it."""
    import ast

    texts = {}
    for name, file in benchmark_files(benchmark_folder()).items():
        docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        texts[name] = docstring.partition("\n")[0]
    return texts


def _checked(benchmark: str, row: Any) -> dict[str, Any]:
    """Validate a row: name, value and unit are required; a value that is not finite becomes null."""
    fits = isinstance(row, Mapping) and {"name", "value", "unit"} <= set(row)
    value: Any = row["value"] if fits else None
    if hasattr(value, "item"):  # numpy and torch scalars
        value = value.item()
    if not fits or (value is not None and (isinstance(value, bool) or not isinstance(value, int | float))):
        raise LabError(
            f"benchmark '{benchmark}' returned a row that is not name, value (a number) and unit: {row!r}"
        )
    finite = value is not None and math.isfinite(value)
    extra = {key: item for key, item in row.items() if key not in ("name", "value", "unit")}
    return {"name": str(row["name"]), "value": value if finite else None, "unit": str(row["unit"]), **extra}


def _number(value: float | int | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= 1e5:
        return f"{value:,.0f}"
    return f"{value:.4g}"
