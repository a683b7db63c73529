"""`rl-lab sweep`: search hyperparameters with Optuna; the same command continues."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rl_lab.errors import ConfigError
from rl_lab.tools.sweep.definition import (
    DIRECTIONS,
    PRUNERS,
    VALUES,
    Definition,
    definition_from,
    read_definition,
    split_words,
)

EPILOG = """examples:
  rl-lab sweep --folder outputs/sweeps/lr +experiment=dreamer_cartpole \\
      'algorithm.learning_rate=tag(log,interval(1e-4,1e-2))' algorithm.train_ratio=16,32,64 --trials 30
  rl-lab sweep sweep.yaml --folder outputs/sweeps/lr       the settings are in a file
  rl-lab sweep --folder outputs/sweeps/lr                  continue what was stopped
  rl-lab sweep --folder outputs/sweeps/lr --trials 60      more trials
  rl-lab sweep --folder outputs/sweeps/lr --page           write the page again

ranges: key=1,2,3   key=range(1,9,2)   key=interval(0.1,0.9)   key=int(interval(1,8))   key=tag(log,interval(1e-5,1e-3))"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument(
        "words", nargs="*", metavar="FILE.yaml|key=value", help="a definition, overrides of every run, ranges"
    )
    parser.add_argument("--folder", type=Path, help="of the sweep (default: outputs/sweeps/NAME)")
    parser.add_argument("--trials", type=int, help="how many in all (default: 20)")
    parser.add_argument("--metric", help="what a trial is judged by (default: eval/return_mean)")
    parser.add_argument("--direction", choices=DIRECTIONS, help="default: maximize")
    parser.add_argument("--value", choices=VALUES, help="which of a run's evaluations counts (default: last)")
    parser.add_argument("--pruner", choices=PRUNERS, help="how bad trials are ended early (default: median)")
    parser.add_argument("--startup", type=int, help="random trials before the search (default: 10)")
    parser.add_argument("--seed", type=int, help="of the search (default: 0)")
    parser.add_argument(
        "--at-once", type=int, default=1, metavar="N", help="trials at a time on each GPU (default: 1)"
    )
    parser.add_argument(
        "--mps", choices=("auto", "on", "off"), default="auto", help="NVIDIA's Multi-Process Service"
    )
    parser.add_argument("--page", action="store_true", help="write the page and run nothing")
    parser.add_argument("--config-dir", action="append", default=[], help="a folder of your own configs")


def main(args: argparse.Namespace) -> int:
    from rl_lab.tools.sweep.runner import SweepRunner, check_definition
    from rl_lab.tools.sweep.study import SweepFolder, Trials, require_optuna

    require_optuna()
    if args.at_once < 1:
        raise ConfigError(f"--at-once must be at least 1, not {args.at_once}")
    folder = SweepFolder(args.folder or default_folder(args.words))
    definition = build_definition(args, folder)
    if args.page:
        from rl_lab.tools.sweep.page import write_sweep_page

        if not folder.database.is_file():
            raise ConfigError(f"--folder: {folder.path} has no sweep")
        print(write_sweep_page(folder, Trials(folder, definition)))
        return 0
    budget = check_definition(definition)
    folder.save(definition)
    runner = SweepRunner(folder, definition, budget=budget, at_once=args.at_once, mps=args.mps)
    try:
        summary = runner.run()
    finally:
        from rl_lab.tools.sweep.page import write_sweep_page

        page = write_sweep_page(folder, runner.trials)
    parts = [f"{summary.complete} complete", f"{summary.pruned} pruned", f"{len(summary.failed)} failed"]
    print(f"sweep: {', '.join(parts)}; page: {page}")
    best = runner.trials.best
    if best is not None:
        print(f"best: trial {best.number} with {best.value:.6g}; its run: {folder.run_dir(best.number)}")
        print("  rl-lab train " + " ".join(definition.words(best.params)))
    if summary.interrupted:
        print(f"stopped; continue with: rl-lab sweep --folder {folder.path}")
    return 0


def build_definition(args: argparse.Namespace, folder: Any) -> Definition:
    """Return the definition of the file and the words; without any, that of the folder."""
    files = [word for word in args.words if word.endswith((".yaml", ".yml")) and "=" not in word]
    words = [word for word in args.words if word not in files]
    if len(files) > 1:
        raise ConfigError(f"{files[1]}: one file describes a sweep, and {files[0]} is one already")
    for word in words:
        if "=" not in word and not word.startswith("~"):
            raise ConfigError(f"'{word}' is no key=value and no YAML file")
    settings: dict[str, Any] = read_definition(Path(files[0])) if files else {}
    if not files and not words:
        saved = folder.load()
        if saved is None:
            raise ConfigError(
                f"--folder: {folder.path} has no sweep to continue: name a file, or overrides and ranges"
            )
        settings = saved.to_dict()
    fixed, search = split_words(words)
    settings["overrides"] = [*(settings.get("overrides") or []), *fixed]
    settings["search"] = {**(settings.get("search") or {}), **search}
    for name in ("trials", "metric", "direction", "value", "pruner", "startup", "seed"):
        if getattr(args, name) is not None:
            settings[name] = getattr(args, name)
    if args.config_dir:
        settings["config_dirs"] = [str(Path(item).absolute()) for item in args.config_dir]
    return definition_from(settings, files[0] if files else "sweep")


def default_folder(words: list[str]) -> Path:
    """Return outputs/sweeps/NAME; the name is that of the file, or of the experiment."""
    from rl_lab.run_folder import output_root

    names = [Path(word).stem for word in words if word.endswith((".yaml", ".yml")) and "=" not in word]
    names += [word.partition("=")[2] for word in words if word.lstrip("+").startswith("experiment=")]
    if not names:
        raise ConfigError("--folder is missing: name the sweep to continue, or an +experiment=NAME")
    return output_root(None) / "sweeps" / names[0]
