"""Reading `algorithm.*`: what every workflow's settings ask of the config, and say in the same words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from rl_lab.errors import ConfigError, reject_unknown


def require_all(settings: type, algorithm: Mapping[str, Any], group: str) -> None:
    """Every field of the dataclass `settings` must stand in `algorithm`; configs/algorithm/<group>.yaml has them."""
    missing = [item.name for item in fields(settings) if item.name not in algorithm]
    if missing:
        raise ConfigError(
            f"the config lacks algorithm.{', algorithm.'.join(missing)}: "
            f"add `- /algorithm: {group}` to the experiment's defaults, which states them all"
        )


def read_loss_scales(
    algorithm: Mapping[str, Any], losses: Sequence[str], *, complete: bool = True
) -> dict[str, float]:
    """`algorithm.loss_scales`: a number for each loss, or (complete=False) for some of them."""
    scales = {str(key): float(value) for key, value in algorithm["loss_scales"].items()}
    reject_unknown("algorithm.loss_scales", scales, losses)
    lacking = sorted(set(losses) - set(scales))
    if complete and lacking:
        raise ConfigError(f"algorithm.loss_scales lacks {', '.join(lacking)}")
    return scales
