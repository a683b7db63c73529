"""Hyperparameters of TD-MPC, read from `algorithm.*`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from rl_lab.errors import ConfigError, reject_unknown, require_choice
from rl_lab.workflows.settings import read_loss_scales, require_all

LOSSES = ("consistency", "reward", "value", "termination")
BOUNDARIES = ("pad", "within")
SCHEDULES = ("steps", "min_std", "horizon")


def discount_for(length: float, *, low: float, high: float, denominator: float = 5.0) -> float:
    """Discount for episodes of T = `length` decisions: γ = clip((T/5 − 1)/(T/5), low, high).

    nicklashansen/tdmpc2 tdmpc2.py: shorter episodes get a smaller discount.
    """
    fraction = length / denominator
    return min(max((fraction - 1.0) / fraction, low), high)


@dataclass(frozen=True)
class PlanSchedule:
    """Planner values that change linearly during the first `steps` decisions of training (TD-MPC)."""

    steps: int
    min_std: tuple[float, float]
    horizon: tuple[int, int]

    def at(self, step: int) -> dict[str, float]:
        fraction = min(max(step / self.steps, 0.0), 1.0)
        std, horizon = (first + fraction * (last - first) for first, last in (self.min_std, self.horizon))
        return {"min_std": std, "horizon": float(int(horizon))}


@dataclass(frozen=True)
class TDMPCSettings:
    """configs/algorithm/tdmpc2.yaml and tdmpc.yaml describe each field and have the published values."""

    learning_rate: float
    batch_size: int
    horizon: int
    sampler: str
    boundary: Literal["pad", "within"]
    rho: float
    discount: float | str
    discount_min: float
    discount_max: float
    episode_length: int | tuple[int, ...]
    entropy: float
    max_grad_norm: float
    target_rate: float
    target_encoder: bool
    scale_values: bool
    episodic: bool
    loss_limit: float
    loss_scales: dict[str, float]
    plan_schedule: PlanSchedule | None

    @classmethod
    def from_config(cls, algorithm: Mapping[str, Any]) -> TDMPCSettings:
        algorithm = {"boundary": "within", **algorithm}  # of runs that were saved before this key existed
        require_all(cls, algorithm, "tdmpc2")
        length = algorithm["episode_length"]
        per_task = isinstance(length, Sequence)
        settings = cls(
            learning_rate=float(algorithm["learning_rate"]),
            batch_size=int(algorithm["batch_size"]),
            horizon=int(algorithm["horizon"]),
            sampler=str(algorithm["sampler"]),
            boundary=cast(Literal["pad", "within"], str(algorithm["boundary"])),
            rho=float(algorithm["rho"]),
            discount="auto" if algorithm["discount"] == "auto" else float(algorithm["discount"]),
            discount_min=float(algorithm["discount_min"]),
            discount_max=float(algorithm["discount_max"]),
            episode_length=tuple(int(item) for item in length) if per_task else int(length),
            entropy=float(algorithm["entropy"]),
            max_grad_norm=float(algorithm["max_grad_norm"]),
            target_rate=float(algorithm["target_rate"]),
            target_encoder=bool(algorithm["target_encoder"]),
            scale_values=bool(algorithm["scale_values"]),
            episodic=bool(algorithm["episodic"]),
            loss_limit=float(algorithm["loss_limit"]),
            loss_scales=read_loss_scales(algorithm, LOSSES),
            plan_schedule=_schedule(algorithm["plan_schedule"]),
        )
        require_choice("algorithm.boundary", settings.boundary, BOUNDARIES)
        if settings.horizon < 1:
            raise ConfigError(f"algorithm.horizon is {settings.horizon}: set it to at least 1")
        return settings

    def discounts(self, tasks: int) -> list[float]:
        """The discount of each task."""
        if self.discount != "auto":
            return [float(self.discount)] * tasks
        lengths = self.episode_length
        if isinstance(lengths, int):
            lengths = (lengths,) * tasks
        if len(lengths) != tasks:
            raise ConfigError(
                f"algorithm.episode_length has {len(lengths)} entries for {tasks} tasks: "
                "set one length, or one per task"
            )
        return [discount_for(n, low=self.discount_min, high=self.discount_max) for n in lengths]


def _schedule(node: Mapping[str, Any] | None) -> PlanSchedule | None:
    if not node:
        return None
    reject_unknown("algorithm.plan_schedule", node, SCHEDULES)
    std, horizon = node["min_std"], node["horizon"]
    return PlanSchedule(
        int(node["steps"]), (float(std[0]), float(std[1])), (int(horizon[0]), int(horizon[1]))
    )
