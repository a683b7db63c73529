"""`rl-lab bench X`: run benchmarks/X.py of the checkout and print its rows; --json writes them to a file.

A benchmark is a file with `run(argv: list[str]) -> list[dict]`; each row is {"name", "value", "unit"}. One that takes
long has `run(argv, file)` and writes the file of --json after each of its parts (`ResultFile`).
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rl_lab.errors import LabError, checkout, closest, one_line
from rl_lab.tools.doctor import commit, describe_machine
from rl_lab.tools.terminal import print_table
from rl_lab.utils.files import read_json, write_json_atomic

if TYPE_CHECKING:
    import torch

Row = dict[str, Any]


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
    result = run_benchmark(args.name, options, picked.json)
    rows = [(row["name"], _number(row["value"]), row["unit"]) for row in result["rows"]]
    print_table(rows, header=("name", "value", "unit"), right=(1,))
    if picked.json is not None:
        write_json_atomic(picked.json, result)
        print(f"written to {picked.json}")
    return 0


def run_benchmark(name: str, options: Sequence[str] = (), path: Path | None = None) -> dict[str, Any]:
    """Run one benchmark; returns the content for `--json`. path: of that file"""
    module = load_benchmark(name)
    file = ResultFile(name, options, path)
    by_parts = len(inspect.signature(module.run).parameters) > 1
    return file.content(module.run(list(options), file) if by_parts else module.run(list(options)))


class ResultFile:
    """The file of `--json`, for a benchmark that writes it after each part, so that an interrupted call keeps them.

    Tensors that rows were measured with are in a file beside it, with the suffix .safetensors.

    path: None: nothing is read or written
    """

    def __init__(self, benchmark: str, options: Sequence[str] = (), path: Path | None = None) -> None:
        self.benchmark, self.path, self.commit = benchmark, path, commit() or None
        self.command = shlex.join(["rl-lab", "bench", benchmark, *options])

    def content(self, rows: Sequence[Any]) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "commit": self.commit,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": describe_machine(),
            "command": self.command,
            "rows": [_checked(self.benchmark, row) for row in rows],
        }

    def write(self, rows: Sequence[Any], tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """Write all rows so far, and all tensors."""
        if self.path is not None:
            if tensors is not None:
                from rl_lab.utils.checkpoint.safetensors import write_tensors

                write_tensors(self.path.with_suffix(".safetensors"), tensors, {})
            write_json_atomic(self.path, self.content(rows))

    def earlier(self) -> tuple[list[str], list[Row], dict[str, torch.Tensor]] | None:
        """Options, rows and tensors that an earlier call of the same commit wrote on this machine; None: there are none.

        As in scripts/dev/train_seeds.py, files that differ from the commit count as the same if it was so before.
        """
        if self.path is None or not self.path.is_file():
            return None
        from rl_lab.utils.checkpoint.safetensors import read_tensors

        try:
            found, wanted = read_json(self.path), self.content([])
            other = [key for key in ("benchmark", "commit", "machine") if found[key] != wanted[key]]
            if other or self.commit is None:
                key = other[0] if other else "commit"
                print(
                    f"{self.path}: its rows are measured again: its {key} is {found[key]}, now {wanted[key]}"
                )
                return None
            tensors, _ = read_tensors(self.path.with_suffix(".safetensors"))
            return shlex.split(found["command"])[3:], list(found["rows"]), tensors
        except (
            LabError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
        ) as error:  # damaged, or another file
            print(f"{self.path}: its rows are measured again: {one_line(error)}")
            return None


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
