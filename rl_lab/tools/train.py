"""`rl-lab train`: compose a config from the command line and train."""

from __future__ import annotations

import argparse
import os
import sys

EPILOG = """examples:
  rl-lab train                                          the default experiment
  rl-lab train +experiment=dreamer_cartpole debug=tiny  a test run of some seconds
  rl-lab train environment=pendulum experiment.seed=1   other environment, other seed
  rl-lab train --multirun experiment.seed=0,1,2         several runs
  rl-lab train launch=slurm launch.partition=gpu        as a SLURM job
  rl-lab train --cfg job --resolve                      print the config and stop"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides and group choices")
    parser.add_argument("--cfg", "-c", choices=("job",), help="print the config and stop")
    parser.add_argument("--resolve", action="store_true", help="with --cfg: resolve interpolations")
    parser.add_argument("--package", "-p", help="with --cfg: only this part, e.g. training (or _global_)")
    parser.add_argument(
        "--multirun", "-m", action="store_true", help="one run per combination of a,b,c values"
    )
    parser.add_argument(
        "--config-dir",
        "-cd",
        action="append",
        default=[],
        help="a folder of your own configs (may be repeated)",
    )


def main(args: argparse.Namespace) -> int:
    if args.multirun:
        from rl_lab.config.multirun import multirun

        multirun(args.overrides, args.config_dir)
        return 0
    from rl_lab.config.compose import compose_config

    config = compose_config(args.overrides, config_dirs=args.config_dir)
    if args.cfg:
        print(_config_text(config, args.resolve, args.package), end="")
        return 0
    if config.launch.name == "slurm":
        from rl_lab.config.multirun import submit_one

        submit_one(config, args.overrides, args.config_dir)
        return 0
    from rl_lab.training import ignore_output_errors, train_config

    result = train_config(config, args.overrides)
    if result.interrupted:  # that has been printed; a job of SLURM has to know
        from rl_lab.utils.stopping import STOPPED_VARIABLE

        return int(os.environ.get(STOPPED_VARIABLE, 0))
    for line in result.summary():
        ignore_output_errors(print)(line)
    return 0


def _config_text(config: object, resolve: bool, package: str | None) -> str:
    """Return the config as YAML with `_dims` filled in from the environment."""
    from omegaconf import DictConfig, OmegaConf

    from rl_lab.config.compose import fill_dims
    from rl_lab.errors import ConfigError, MissingPackageError, closest
    from rl_lab.run_environments import environment_spec

    assert isinstance(config, DictConfig)
    OmegaConf.set_struct(config, False)
    try:
        fill_dims(config, environment_spec(config))
    except MissingPackageError as error:
        print(f"# _dims not filled: {error}", file=sys.stderr)
    part: object = config
    if package and package != "_global_":
        part = OmegaConf.select(config, package)
        if part is None:
            raise ConfigError(
                f"--package {package}: the config has no such part.{closest(package, [str(k) for k in config])}"
            )
    return OmegaConf.to_yaml(part, resolve=resolve)
