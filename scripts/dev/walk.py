"""How many files a reader of one algorithm walks through, and how finely the package is cut.

    python scripts/dev/walk.py                       # the code of this checkout
    python scripts/dev/walk.py --code ../other       # the code of another checkout
    python scripts/dev/walk.py --verbose             # with the names: of modules with one importer, of files executed
    python scripts/dev/walk.py --only iris_catch dreamer_crafter

Of each experiment, trained with debug=tiny until torch first computes a gradient:

    imported    modules of rl_lab that were imported
    executed    files of rl_lab of which a function or the body of a class ran
    called      files of rl_lab of which a function ran
    yaml        config files that Hydra composed, without debug=tiny

Of the package: its .py files, and modules that exactly one other module of rl_lab imports (anywhere in its text) and
that no config names by `_target_`: each is a part of its importer that a reader must open a second file for.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

CHECKOUT = Path(__file__).resolve().parents[2]
EXPERIMENTS = ("dreamer_cartpole", "tdmpc2_cartpole", "iris_catch", "og_wm_catch")
WORDS = (
    "debug=tiny",
    "experiment.device=cpu",
    "logging.progress=off",
    "logging.tensorboard=false",
    "run_dir=run",
)
MARK = "result: "


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(EXPERIMENTS), metavar="NAME", help="experiments")
    parser.add_argument("--code", type=Path, default=CHECKOUT, help="the checkout whose rl_lab is counted")
    parser.add_argument("--verbose", action="store_true", help="names beside the numbers")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    code = options.code.resolve()
    if options.worker:
        walk(options.worker, code)
    package = code / "rl_lab"
    unknown = sorted(set(options.only) - {file.stem for file in package.rglob("experiment/*.yaml")})
    if unknown:
        parser.error(f"--only: no experiment is called {', '.join(unknown)}")
    one = one_importer(package)
    print(f"{code}: {len(list(package.rglob('*.py')))} .py files, {len(one)} modules with one importer")
    if options.verbose:
        print(*(f"  {module} <- {importer}" for module, importer in sorted(one.items())), sep="\n")
    columns = ("imported", "executed", "called", "yaml")
    print(f"{'experiment':<28}" + "".join(f"{column:>10}" for column in columns))
    failed = False
    for name in options.only:
        found = in_process(name, code)
        if isinstance(found, str):
            failed = True
            print(f"{name:<28} not counted: {found}")
            continue
        print(f"{name:<28}" + "".join(f"{len(found[column]):>10}" for column in columns), flush=True)
        if options.verbose:
            print(*(f"  {column}: {' '.join(found[column])}" for column in columns), sep="\n")
    return int(failed)


# ---------------------------------------------------------------- the package


def one_importer(package: Path) -> dict[str, str]:
    """Modules that one module of the package imports and no config names -> that one."""
    files = {module_name(file, package): file for file in package.rglob("*.py")}
    importers: dict[str, set[str]] = {name: set() for name in files}
    for name, file in files.items():
        for imported in imports(file, name) & files.keys() - {name}:
            importers[imported].add(name)
    named = {target.rpartition(".")[0] for target in targets(package)}
    return {
        name: next(iter(who))
        for name, who in importers.items()
        if len(who) == 1 and name not in named and files[name].name != "__init__.py"
    }


def module_name(file: Path, package: Path) -> str:
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: Path, name: str) -> set[str]:
    """Everything that import statements of a file may mean as modules, also those in functions or for types only."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = name.split(".")[: -node.level + (file.name == "__init__.py") or None]
                base = ".".join([*above, *filter(None, [base])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found


def targets(package: Path) -> set[str]:
    """Every `_target_` of the package's configs."""
    pattern = re.compile(r"_target_:\s*[\"']?([\w.]+)")
    return {target for file in package.rglob("*.yaml") for target in pattern.findall(file.read_text())}


# ---------------------------------------------------------------- one run


def in_process(name: str, code: Path) -> dict[str, list[str]] | str:
    """`walk` in a new process that imports the chosen checkout; the last line it printed where it fails."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(code),
        "OMP_NUM_THREADS": "1",
        "SDL_VIDEODRIVER": "dummy",
    }
    command = [sys.executable, "-P", __file__, "--worker", name, "--code", str(code)]
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    for line in result.stdout.splitlines():
        if line.startswith(MARK):
            answer: dict[str, list[str]] = json.loads(line.removeprefix(MARK))
            return answer
    return (result.stderr.strip() or result.stdout.strip() or "no output").splitlines()[-1]


def walk(name: str, code: Path) -> NoReturn:
    """Train in ./run until the first gradient, print what was imported and executed, and end the process."""
    import torch

    import rl_lab

    root = str(Path(rl_lab.__file__).resolve().parent)
    if root != str(code / "rl_lab"):
        raise SystemExit(f"rl_lab comes from {root}, not from {code}")
    gradients = {
        function.__code__
        for function in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
    }
    yaml = composed(name)  # before the profile: it is no part of what training executes
    executed: set[str] = set()
    called: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        body = frame.f_code
        if event != "call":
            return
        if body in gradients:
            found = {"imported": modules(root), "executed": executed, "called": called, "yaml": yaml}
            print(MARK + json.dumps({key: sorted(value) for key, value in found.items()}), flush=True)
            os._exit(0)  # environments and threads need no orderly end
        if body.co_filename.startswith(root + os.sep) and body.co_name != "<module>":
            file = os.path.relpath(body.co_filename, root)
            executed.add(file)
            if body.co_flags & 0x2:  # CO_NEWLOCALS: a function, not the body of a class
                called.add(file)

    threading.setprofile(note)
    sys.setprofile(note)
    from rl_lab.cli import main as command

    status = command(["train", f"experiment={name}", *WORDS])
    raise SystemExit(status or "the run ended without a gradient")


def modules(root: str) -> set[str]:
    """Names of imported modules whose files lie under the package."""
    return {
        name
        for name, module in list(sys.modules.items())
        if str(getattr(module, "__file__", None) or "").startswith(root + os.sep)
    }


def composed(name: str) -> set[str]:
    """Config files of the experiment, by Hydra's own list of defaults."""
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    with initialize_config_module("rl_lab.configs", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        result = loader.compute_defaults_list("config", [f"experiment={name}"], RunMode.RUN)
    paths = {default.config_path for default in result.defaults if default.config_path}
    return {path for path in paths if not path.startswith("hydra/")}


if __name__ == "__main__":
    sys.exit(main())
