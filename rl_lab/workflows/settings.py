"""Helpers that read `algorithm.*` for the settings of every workflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from rl_lab.errors import ConfigError, reject_unknown


def require_all(settings: type, algorithm: Mapping[str, Any], group: str) -> None:
    """Raise unless `algorithm` has every field of the dataclass; configs/algorithm/<group>.yaml does."""
    missing = [item.name for item in fields(settings) if item.name not in algorithm]
    if missing:
        raise ConfigError(
            f"algorithm.{', algorithm.'.join(missing)}: not in the config; "
            f"add `- /algorithm: {group}` to the experiment's defaults, which sets all of them"
        )


def read_loss_scales(
    algorithm: Mapping[str, Any], losses: Sequence[str], *, complete: bool = True
) -> dict[str, float]:
    """`algorithm.loss_scales`: one factor for each loss, or for some of them (complete=False)."""
    scales = {str(key): float(value) for key, value in algorithm["loss_scales"].items()}
    reject_unknown("algorithm.loss_scales", scales, losses)
    missing = sorted(set(losses) - set(scales))
    if complete and missing:
        raise ConfigError(f"algorithm.loss_scales has no value for {', '.join(missing)}: add one")
    return scales
