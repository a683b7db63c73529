"""Hyperparameters of IRIS and Δ-IRIS, read from `algorithm.*`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, cast

from rl_lab.errors import ConfigError, reject_unknown, require_choice
from rl_lab.workflows.settings import require_all

PADS = ("right", "left", "both")


@dataclass(frozen=True)
class PartSettings:
    """Batches and gradient steps of one of the three parts."""

    batch_size: int
    batch_length: int  # tokenizer: rows; world model: blocks; actor-critic: burn-in rows
    sampler: str
    pad: Literal["right", "left", "both"]
    max_grad_norm: float
    grad_acc_steps: int

    @classmethod
    def from_config(cls, name: str, node: Mapping[str, Any]) -> PartSettings:
        known = [item.name for item in fields(cls)]
        reject_unknown(f"algorithm.{name}", node, known)
        missing = [key for key in known if key not in node]
        if missing:
            raise ConfigError(
                f"algorithm.{name}.{missing[0]} is missing: add it as in configs/algorithm/iris.yaml"
            )
        require_choice(f"algorithm.{name}.pad", node["pad"], PADS)
        part = cls(
            batch_size=int(node["batch_size"]),
            batch_length=int(node["batch_length"]),
            sampler=str(node["sampler"]),
            pad=cast(Literal["right", "left", "both"], str(node["pad"])),
            max_grad_norm=float(node["max_grad_norm"]),
            grad_acc_steps=int(node["grad_acc_steps"]),
        )
        if part.grad_acc_steps < 1 or part.batch_size % part.grad_acc_steps:
            raise ConfigError(
                f"algorithm.{name}.grad_acc_steps is {part.grad_acc_steps}: "
                f"choose a divisor of batch_size ({part.batch_size})"
            )
        return part


@dataclass(frozen=True)
class IrisSettings:
    """configs/algorithm/iris.yaml and delta_iris.yaml describe each field and have the published values."""

    tokenizer: PartSettings
    world_model: PartSettings
    actor_critic: PartSettings
    imagination_horizon: int
    bootstrap_frame: bool  # whether one more frame is imagined, whose value bootstraps
    discount: float
    entropy: float
    mask_ended: bool
    target_rate: float  # of the moving average that provides the targets; 0: none
    collect_epsilon: float
    learning_rate: float
    model_precision: str  # of tokenizer and world model
    policy_precision: str  # of the actor-critic's convolutions

    @classmethod
    def from_config(cls, algorithm: Mapping[str, Any]) -> IrisSettings:
        # What runs did that were saved before these settings existed.
        algorithm = {"policy_precision": "float32", "bootstrap_frame": False, **algorithm}
        require_all(cls, algorithm, "iris")
        names = ("tokenizer", "world_model", "actor_critic")
        parts = {name: PartSettings.from_config(name, algorithm[name]) for name in names}
        settings = cls(
            **parts,
            imagination_horizon=int(algorithm["imagination_horizon"]),
            bootstrap_frame=bool(algorithm["bootstrap_frame"]),
            discount=float(algorithm["discount"]),
            entropy=float(algorithm["entropy"]),
            mask_ended=bool(algorithm["mask_ended"]),
            target_rate=float(algorithm["target_rate"]),
            collect_epsilon=float(algorithm["collect_epsilon"]),
            learning_rate=float(algorithm["learning_rate"]),
            model_precision=str(algorithm["model_precision"]),
            policy_precision=str(algorithm["policy_precision"]),
        )
        if settings.imagined_frames < 2:
            least = 2 - settings.bootstrap_frame
            raise ConfigError(
                f"algorithm.imagination_horizon must be at least {least}: the last frame is only used to "
                "bootstrap"
            )
        return settings

    @property
    def imagined_frames(self) -> int:
        """Frames of an imagined trajectory, with the real one it starts from; the last only bootstraps."""
        return self.imagination_horizon + self.bootstrap_frame
