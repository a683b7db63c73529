"""Hyperparameters of TD-MPC and TD-MPC2: the keys of `algorithm.*`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypedDict

from rl_lab.errors import ConfigError
from rl_lab.workflows.settings import INTERPOLATED, Settings, check_parts


class LossScales(TypedDict):
    consistency: float
    reward: float
    value: float
    termination: float


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
class Plan:
    """Of the planner, which refers to it."""

    iterations: int | Literal["auto"]
    samples: int
    policy_samples: int
    elites: int
    temperature: float
    min_std: float
    max_std: float
    momentum: float


@dataclass(frozen=True)
class Size:
    """Widths, which the parts in the config refer to."""

    encoder_units: int
    encoder_layers: int
    units: int
    latent: int
    members: int
    bins: int
    bin_limit: float
    task_width: int


@dataclass(frozen=True)
class TDMPCSettings(Settings):
    """configs/algorithm/tdmpc2.yaml and tdmpc.yaml describe each field and have the published values."""

    algorithm: ClassVar[str] = "tdmpc2"

    learning_rate: float
    batch_size: int
    horizon: int
    sampler: str
    rho: float
    discount: float | Literal["auto"]
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
    loss_scales: Annotated[dict[str, float], LossScales]
    plan_schedule: PlanSchedule | None
    grad_acc_steps: int = 1
    boundary: Literal["pad", "within"] = "within"  # the default is that of runs saved before this key existed
    # For the parts, optimizers and phases in the config.
    size: Size = INTERPOLATED
    plan: Plan = INTERPOLATED
    encoder_rate: float = INTERPOLATED
    task_width: int = INTERPOLATED
    seed_steps: int = INTERPOLATED
    pretrain_updates: int = INTERPOLATED
    updates_per_env_step: float = INTERPOLATED

    def check(self) -> None:
        if self.horizon < 1:
            raise ConfigError(f"algorithm.horizon is {self.horizon}: set it to at least 1")
        check_parts(self.grad_acc_steps, self.batch_size)

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
