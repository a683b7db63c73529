"""`rl-lab list`: configs, suites and benchmarks by name, each with the first comment line of its config."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import rl_lab
from rl_lab.config import compose as extensions
from rl_lab.errors import LabError, closest, install_line
from rl_lab.tools.doctor import declared, find
from rl_lab.tools.terminal import print_table

# Kind -> (config group, how to choose one on the command line).
GROUPS = {
    "experiments": ("experiment", "rl-lab train +experiment=NAME"),
    "workflows": ("workflow", "workflow=NAME in an experiment"),
    "algorithms": ("algorithm", "/algorithm: NAME in an experiment: all parts and hyperparameters"),
    "components": (
        "components",
        "components/KIND@components.PLACE=NAME; components/KIND=NAME where the place has the kind's name",
    ),
    "controllers": ("controller", "controller@controllers.PLACE=NAME"),
    "optimizers": ("optimizers", "optimizers=NAME"),
    "buffers": ("buffer", "buffer=NAME"),
    "environments": ("environment", "environment=NAME"),
    "phases": ("phases", "phases=NAME"),
    "sizes": ("size", "size=NAME, of the experiment's algorithm: size=12m"),
    "debug": ("debug", "debug=NAME"),
    "launch": ("launch", "launch=NAME: how the runs of a sweep are started"),
    "suite": ("suite", "rl-lab suite NAME: several tasks and seeds"),
}
START_HERE = [
    ("rl-lab train", "the default experiment: CartPole, minutes on a CPU"),
    ("rl-lab check my_env:MyEnv", "your own environment, and which preset fits"),
    ("rl-lab train +experiment=dreamer_gym environment.task=TASK", "any environment with vectors"),
    ("rl-lab train +experiment=dreamer_gym_vision environment.task=TASK", "any environment with images"),
    ("rl-lab list KIND", "one of the lists below: rl-lab list experiments"),
]
KINDS = (*GROUPS, "benchmarks")
PACKAGED = Path(rl_lab.__file__).resolve().parent / "configs"


@dataclass(frozen=True)
class Entry:
    """One choice: its name, its description, and its file if it is not shipped with RL Lab."""

    name: str
    text: str
    place: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=KINDS, help="one kind only (default: all)")
    parser.add_argument(
        "--config-dir",
        metavar="DIR",
        type=Path,
        action="append",
        default=[],
        help="also list this folder of configs; ./configs is always listed",
    )

    parser.add_argument("--suite", metavar="NAME", help="list every task of this suite")


def main(args: argparse.Namespace) -> int:
    if args.suite is not None:
        print("\n".join(tasks_of(args.suite)))
        return 0
    folders = config_folders(args.config_dir)
    if args.what is None:
        print_table(START_HERE, title="start here")
        print()
    for kind in (args.what,) if args.what else KINDS:
        entries, how = list_kind(kind, folders)
        if not entries and args.what is None and kind != "environments":
            continue
        print_table(
            [(entry.name, entry.text + (f"  ({entry.place})" if entry.place else "")) for entry in entries],
            title=f"{kind}: {how}" if how else kind,
        )
        if kind == "environments":
            print()
            print_table(
                describe_suites(),
                header=("suite", "", "extra", "tasks", ""),
                title="suites: environment.task=SUITE/TASK; all tasks of one: rl-lab list --suite SUITE",
            )
        if args.what is None:
            print()
    return 0


def list_kind(kind: str, folders: Sequence[Path] = (PACKAGED,)) -> tuple[list[Entry], str]:
    """Return the entries of one kind, and how to choose one."""
    if kind == "benchmarks":
        return _benchmarks(), "rl-lab bench NAME"
    group, how = GROUPS[kind]
    return list(list_configs(group, folders)), how


def config_folders(given: Sequence[Path] = ()) -> list[Path]:
    """Return the shipped configs, then the user's, then those of installed packages; each folder once."""
    for folder in given:
        if not folder.is_dir():
            raise LabError(f"--config-dir {folder}: there is no such folder")
    own = Path("configs")
    folders = [PACKAGED, *given, *([own] if own.is_dir() else []), *extensions.config_folders()]
    return list({folder.resolve(): folder for folder in folders}.values())


def list_configs(group: str, folders: Sequence[Path] = (PACKAGED,)) -> Iterator[Entry]:
    """Yield every YAML file of a group; subfolders are part of the name ("encoder/mlp")."""
    for folder in folders:
        base = folder / group
        for file in sorted([*base.rglob("*.yaml"), *base.rglob("*.yml")], key=_natural):
            name = file.relative_to(base).with_suffix("").as_posix()
            place = "" if folder == PACKAGED else os.path.relpath(file)
            yield Entry(name, describe_config(file), place)


def describe_config(file: Path) -> str:
    """Return the first comment line that is not Hydra's `@package`, or else the first `_target_`."""
    target = ""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        return f"cannot be read: {error}"
    for line in lines:
        text = line.strip()
        if text.startswith("#"):
            words = text.lstrip("#").strip()
            if words and not words.startswith("@package"):
                return words
        elif text.startswith("_target_:") and not target:
            target = text.removeprefix("_target_:").strip()
    return target or "no description: start the file with a comment line"


def describe_suites() -> list[tuple[str, str, str, str, str]]:
    """Return (suite, "ready" or "missing", extra, some tasks, description or install command) per suite."""
    import ast
    import importlib.util

    try:
        from rl_lab.environments.task_names import suites
    except ImportError as error:
        return [("-", "missing", "", "", f"environments cannot be loaded ({error}); run rl-lab doctor")]
    extras = declared()
    rows = []
    for suite, module in sorted(suites().items()):
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            rows.append((suite, "missing", "", "", f"its module {module} was not found"))
            continue
        # Parsed, not imported: an adapter of another package may be slow to import or broken.
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        extra = _constant(tree, "EXTRA")
        missing = [
            package.name
            for requirement in (extras.of_extra(extra) if extra in extras.extras else [])
            for package in find(requirement)
            if package.version is None
        ]
        text = (ast.get_docstring(tree) or module).partition("\n")[0].removeprefix(f"Suite `{suite}`: ")
        state, text = ("missing", install_line(extra)) if missing else ("ready", text)
        module_name = _constant(tree, "MODULE")  # of a package that no extra installs
        if module_name and importlib.util.find_spec(module_name) is None:
            state, text = "missing", _constant(tree, "SETUP")
        rows.append((suite, state, extra or "-", _some(_tasks(module)), text))
    return rows


def tasks_of(suite: str) -> list[str]:
    """Return every task of a suite; LabError if it is unknown or not installed."""
    from rl_lab.environments.task_names import suites

    known = suites()
    if suite not in known:
        raise LabError(f"--suite {suite}: there is no such suite.{closest(suite, known)}")
    tasks = _tasks(known[suite])
    if not tasks:
        state, extra = next((row[1], row[2]) for row in describe_suites() if row[0] == suite)
        hint = f": {install_line(extra)}" if state == "missing" else ""
        raise LabError(f"--suite {suite}: the suite lists no tasks{hint}")
    return tasks


def _tasks(module: str) -> list[str]:
    """Return the tasks of an adapter; empty if its package is missing or broken."""
    import importlib

    try:
        return list(importlib.import_module(module).tasks())
    except Exception:
        return []


def _some(tasks: Sequence[str], count: int = 2) -> str:
    shown = ", ".join(tasks[:count])
    return f"{len(tasks)}: {shown}, …" if len(tasks) > count else shown or "-"


def _constant(tree: object, name: str) -> str:
    """Return the string that a module assigns to `name` at its top level, or ""."""
    import ast

    assert isinstance(tree, ast.Module)
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = getattr(node, "value", None)
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                return value.value
    return ""


def _natural(file: Path) -> list[tuple[int, str]]:
    """Sort key that puts 1m before 12m."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", file.as_posix())]


def _benchmarks() -> list[Entry]:
    from rl_lab.tools.bench import describe_benchmarks

    try:
        return [Entry(name, text) for name, text in describe_benchmarks().items()]
    except LabError as error:
        return [Entry("-", str(error))]
