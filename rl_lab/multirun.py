"""Several runs from one command: Hydra's multirun over our `train_config`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from rl_lab.compose import check_targets, normalise_override, register_resolvers


@hydra.main(version_base="1.3", config_path="configs", config_name="config")
def _job(config: DictConfig) -> float | None:
    """One run of the sweep, in Hydra's folder for it; its return is what an optimising sweeper would see."""
    from rl_lab.training import train_config

    register_resolvers()
    check_targets(config)
    job = HydraConfig.get()
    OmegaConf.set_struct(config, False)
    config.run_dir = job.runtime.output_dir
    result = train_config(config, list(job.overrides.task))
    return result.eval_return_mean if result.eval_return_mean is not None else result.return_mean


def multirun(overrides: Sequence[str], config_dirs: Sequence[Path | str] = ()) -> None:
    register_resolvers()
    words = [normalise_override(word) for word in overrides]
    folders = [word for folder in config_dirs for word in ("--config-dir", str(Path(folder).resolve()))]
    before = sys.argv
    sys.argv = [before[0], "--multirun", *folders, *words]
    try:
        _job()
    finally:
        sys.argv = before
