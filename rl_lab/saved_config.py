"""The config of a run that already has checkpoints: what may change, and whether it is still the one trained with."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rl_lab.errors import ConfigError
from rl_lab.records import Spec
from rl_lab.run_folder import describe_differences
from rl_lab.utils.jsonl import json_safe

# What may differ when a run is resumed: how long and how visibly it runs, not what it computes.
SAFE_ON_RESUME = (
    "training.total_timesteps",
    "training.log",
    "training.evaluate",
    "training.report",
    "training.checkpoint",
    "training.on_nonfinite",
    "training.on_save_failure",
    "training.on_damaged_replay",
    "training.profile",
    "training.resume_path",
    "training.threads",
    "experiment.device",
    "logging",
    "wandb",
    "environment.workers",
    "environment.timeout",
    "environment.restarts",
    "environment.history_limit",
    "environment.video_every",
    "buffers.*.storage",
    "buffers.*.folder",
    "buffers.offline.path",
    "environment.eval",
    "run_dir",
    "output_root",
)


def is_safe(path: str) -> bool:
    return any(fnmatch(path, safe) or fnmatch(path, f"{safe}.*") for safe in SAFE_ON_RESUME)


def difference_from(trained: Mapping[str, Any] | None, config: Mapping[str, Any]) -> str:
    """What of a plain config is not as a checkpoint was trained with, in a sentence; "" when nothing is.

    A config.yaml that was edited or damaged since would go on as another run, silently. trained: from the
    checkpoint's manifest; older ones have none.
    """
    if trained is None:
        return ""
    for path, (old, new) in sorted(describe_differences(trained, json_safe(config)).items()):
        if not is_safe(path):
            return f"{path} is {new!r}, but the checkpoint was trained with {old!r}"
    return ""


def check_same_spec(file: Path, trained: Mapping[str, Any] | None, spec: Spec) -> None:
    """The shapes that a run's folder states are those that its checkpoint was trained with."""
    if trained is not None and trained != json_safe(spec.to_dict()):
        raise ConfigError(f"{file} has changed: it has {spec.to_dict()}, but the checkpoint {trained}")


def check_same_config(file: Path, trained: Mapping[str, Any] | None, config: Mapping[str, Any]) -> None:
    difference = difference_from(trained, config)
    if difference:
        raise ConfigError(f"{file} has changed: {difference}. Put it back, or start a new run")
