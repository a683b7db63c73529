"""Base class of the settings of a workflow: a frozen dataclass that is the schema of `algorithm.*`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from rl_lab.errors import ConfigError
from rl_lab.utils.settings import missing_keys, read_settings


class Settings:
    """Subclasses are frozen dataclasses; a workflow names its own as `settings_type`.

    Keys of `algorithm` that are not fields are refused when a config is composed.
    """

    algorithm: ClassVar[str] = ""  # the file configs/algorithm/<algorithm>.yaml has every field

    @classmethod
    def from_config(cls, section: Mapping[str, Any]) -> Self:
        absent = missing_keys(cls, section)
        if absent:
            raise ConfigError(
                f"algorithm.{', algorithm.'.join(absent)}: not in the config; "
                f"add `- /algorithm: {cls.algorithm}` to the experiment's defaults, which sets all of them"
            )
        settings = read_settings(cls, section, "algorithm")
        settings.check()
        return settings

    def check(self) -> None:
        """Raise ConfigError for a value that its type allows and the algorithm does not."""


def check_parts(steps: int, batch_size: int) -> None:
    """Raise ConfigError unless a batch has `algorithm.grad_acc_steps` equal parts."""
    if steps < 1 or batch_size % steps:
        raise ConfigError(
            f"algorithm.grad_acc_steps is {steps}: choose a divisor of algorithm.batch_size ({batch_size})"
        )


@dataclass(frozen=True)
class NoSettings(Settings):
    """Of a workflow that reads nothing from `algorithm`."""
