"""Hyperparameters of Dreamer: the keys of `algorithm.*`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypedDict

from rl_lab.errors import ConfigError
from rl_lab.workflows.settings import INTERPOLATED, Settings, check_parts

LossScales = TypedDict(
    "LossScales",
    {
        "reconstruction": float,  # for every observation
        "reward": float,
        "continue": float,
        "dynamics": float,
        "representation": float,
        "actor": float,
        "critic": float,
        "replay_value": float,
    },
)


@dataclass(frozen=True)
class Size:
    """Widths, which the parts in the config refer to."""

    deter: int
    hidden: int
    stoch: int
    classes: int
    blocks: int
    depth: int
    units: int
    bins: int
    bin_limit: float
    layers: int = 0  # of heads, actor and critic in the 2023 version


@dataclass(frozen=True)
class DreamerSettings(Settings):
    """configs/algorithm/dreamer.yaml describes each field and has the published values."""

    algorithm: ClassVar[str] = "dreamer"

    learning_rate: float
    batch_size: int
    batch_length: int
    replay_context: int
    sampler: str
    imagination_horizon: int
    imagination_last: int
    discount_horizon: float
    entropy: float
    free_nats: float
    slow_critic_rate: float
    max_grad_norm: float
    loss_scales: Annotated[dict[str, float], LossScales]
    grad_acc_steps: int = 1
    # Switches of earlier versions; the defaults are those of today, for configs that were saved before these existed.
    free_mean: bool = False
    discount_in_continue: bool = True
    first_continue: Literal["predicted", "real"] = "predicted"
    own_reward: bool = False
    critic_start: int = 0
    reward_transform: Literal["none", "tanh", "sign"] = "none"
    reward_gradient: bool = True
    replay_value_gradient: bool = True
    actor_critic_gradient: bool = False
    clip_norms: dict[str, float] | None = None
    layer: str = INTERPOLATED
    init: str = INTERPOLATED
    bias: bool = INTERPOLATED
    # For the parts and phases in the config.
    size: Size = INTERPOLATED
    train_ratio: float | None = INTERPOLATED
    seed_steps: int = INTERPOLATED  # decisions before the first update, with phases=prefilled and seeded
    updates_per_env_step: float = INTERPOLATED  # with phases=seeded
    pretrain_updates: int = INTERPOLATED

    def check(self) -> None:
        if self.replay_context not in (0, 1):
            raise ConfigError(
                f"algorithm.replay_context is {self.replay_context}: set it to 0 or 1 (stored latents)"
            )
        check_parts(self.grad_acc_steps, self.batch_size)
        if self.batch_length < 2:
            raise ConfigError("algorithm.batch_length must be at least 2: a return needs a next step")
        if not 0 <= self.imagination_last <= self.batch_length or self.imagination_last == 1:
            raise ConfigError(
                f"algorithm.imagination_last is {self.imagination_last}: set it to 0 (every step) "
                f"or to a value from 2 to batch_length ({self.batch_length})"
            )
        if not 0 <= self.critic_start < self.imagination_horizon:
            raise ConfigError(
                f"algorithm.critic_start is {self.critic_start}: set it to 0, or to 1 to leave out the first state"
            )
        if self.own_reward and self.imagination_horizon < 2:
            raise ConfigError("algorithm.imagination_horizon must be at least 2 with own_reward=true")
        if self.own_reward and self.loss_scales["replay_value"]:
            raise ConfigError(
                "algorithm.loss_scales.replay_value must be 0 with own_reward=true: the loss on replayed rewards "
                "has the other convention of values"
            )

    @property
    def discount(self) -> float:
        return 1.0 - 1.0 / self.discount_horizon

    @property
    def starts(self) -> int:
        """Number of last steps of each sequence from which imagination starts."""
        return self.imagination_last or self.batch_length


@dataclass(frozen=True)
class Explore:
    """Of the ensemble and the phases, which refer to it."""

    policy: str  # explore, or random as the baseline
    steps: int
    updates: int
    members: int
    layers: int
    units: int


@dataclass(frozen=True)
class ExploreSettings(DreamerSettings):
    """With configs/algorithm/plan2explore.yaml."""

    algorithm: ClassVar[str] = "plan2explore"

    explore: Explore = INTERPOLATED


@dataclass(frozen=True)
class Plan:
    """Of the planner, which refers to it."""

    iterations: int
    samples: int
    policy_samples: int
    elites: int
    temperature: float
    min_std: float
    max_std: float
    momentum: float


@dataclass(frozen=True)
class DreamerMPCSettings(DreamerSettings):
    """With configs/algorithm/dreamer_mpc.yaml."""

    algorithm: ClassVar[str] = "dreamer_mpc"

    plan: Plan = INTERPOLATED
    horizon: int = INTERPOLATED  # of plans, if the planner refers to it
