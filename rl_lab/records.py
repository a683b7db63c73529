"""Dataclasses shared by all packages of rl_lab: specs, batches, results, hooks, episodes.

The module does not import torch (tensors appear in annotations only), because the scheduler, the
environments' worker processes and the command line import it.

Letters used for shapes everywhere: N environments, B batch, T time, H horizon, C×H×W images.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, ItemsView, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import numpy as np

from rl_lab.errors import BatchNameError, closest

if TYPE_CHECKING:
    import torch

    from rl_lab.protocols import Evolvable


# Columns of every stored row, in addition to observations ("obs/<name>") and extras of the policy.
ROW_COLUMNS = ("action", "reward", "terminated", "truncated", "is_first")
OBS_PREFIX = "obs/"
# Key of a loaded config's `environment`: why it must not be created, if the run was made elsewhere (config/trust.py).
REFUSED = "_refused_"


@dataclass(frozen=True)
class ArraySpec:
    """Shape and NumPy dtype name of one array, without batch dimensions."""

    shape: tuple[int, ...]
    dtype: str

    def to_dict(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "dtype": self.dtype}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ArraySpec:
        return cls(shape=tuple(int(n) for n in data["shape"]), dtype=str(data["dtype"]))


@dataclass(frozen=True)
class ActionSpec:
    """Format of an action as it is stored and sent to the environment.

    discrete:        shape (),  int64, `choices` = (n,)
    multi_discrete:  shape (k,), int64, `choices` = (n_1, …, n_k)
    continuous:      shape (d,), float32 in [-1, 1]; the environment's wrapper maps it to `low`…`high`
    """

    kind: Literal["discrete", "multi_discrete", "continuous"]
    shape: tuple[int, ...]
    choices: tuple[int, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    @property
    def dtype(self) -> str:
        return "float32" if self.kind == "continuous" else "int64"

    @property
    def size(self) -> int:
        """Width of the action as network input: concatenated one-hot choices, or the vector itself."""
        return self.shape[0] if self.kind == "continuous" else sum(self.choices)

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "shape": list(self.shape),
            "choices": list(self.choices),
            "low": list(self.low),
            "high": list(self.high),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ActionSpec:
        return cls(
            kind=data["kind"],
            shape=tuple(data["shape"]),
            choices=tuple(data["choices"]),
            low=tuple(data["low"]),
            high=tuple(data["high"]),
        )


@dataclass(frozen=True)
class Spec:
    """Observations and actions of an environment: the source of all shapes of parts, buffers and `_dims`."""

    name: str
    observations: dict[str, ArraySpec]
    action: ActionSpec
    action_repeat: int = 1  # environment frames per agent decision

    @property
    def num_actions(self) -> int:
        """Number of discrete choices, or the width of a continuous action."""
        return self.action.size

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "observations": {key: spec.to_dict() for key, spec in self.observations.items()},
            "action": self.action.to_dict(),
            "action_repeat": self.action_repeat,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Spec:
        return cls(
            name=data["name"],
            observations={key: ArraySpec.from_dict(s) for key, s in data["observations"].items()},
            action=ActionSpec.from_dict(data["action"]),
            action_repeat=int(data["action_repeat"]),
        )

    def row_columns(self) -> dict[str, ArraySpec]:
        """Return the columns of one stored row, without the policy's extras."""
        columns = {OBS_PREFIX + key: spec for key, spec in self.observations.items()}
        columns["action"] = ArraySpec(self.action.shape, self.action.dtype)
        columns["reward"] = ArraySpec((), "float32")
        for flag in ("terminated", "truncated", "is_first"):
            columns[flag] = ArraySpec((), "bool")
        return columns


@dataclass(frozen=True)
class BatchSpec:
    """The batch that one call of a hook samples from a buffer.

    A batch has `context + length` rows per sequence; the first `context` rows only provide the initial state.
    boundary: "cross"  sequences continue across episode ends, marked by `is_first`;
              "within" sequences stay inside one episode;
              "pad"    sequences start (pad="right") or end (pad="left") at any row and stop at the episode
                       boundary; rows beyond it are zero, with `mask` False. pad="both" places the window at
                       random around any row (buffers/episodes only).
    least:    real rows that a padded sequence has at least; 2: every sequence has a transition.
    sampler:  "uniform", "online" (new sequences first, then uniform), "first" (sequences begin with the first
              row of an episode), or another sampler of the buffer; the part after a colon names the consumer
              whose counts it uses ("episodes:world_model").
    keys:     columns to fetch; None fetches all.
    """

    size: int
    length: int
    context: int = 0
    boundary: Literal["cross", "within", "pad"] = "cross"
    pad: Literal["right", "left", "both"] = "right"
    sampler: str = "uniform"
    keys: tuple[str, ...] | None = None
    least: int = 1

    @property
    def rows(self) -> int:
        return self.context + self.length

    @property
    def stored_rows(self) -> int:
        """Stored rows that a sequence needs: all of them, or `least` if the rest is padded."""
        return self.least if self.boundary == "pad" else self.rows

    @property
    def replayed_steps(self) -> int:
        """Environment steps in one batch: the unit of `replayed_steps_per_env_step`."""
        return self.size * self.length


@dataclass(frozen=True)
class RowIndex:
    """Source of a batch: stream (environment) and absolute position of the first row of each sequence.

    Positions count all rows ever added: a position before the oldest row of the ring buffer has been
    overwritten, and a late write-back to it is dropped.
    """

    stream: torch.Tensor  # (B,) int64
    position: torch.Tensor  # (B,) int64
    buffer: torch.Tensor | None = None  # (B,) int64: index of the buffer in a mix; None for a single buffer


class Batch(Mapping[str, Any]):
    """Sequences of stored rows, (B, T, …), with T = context + length. `len(batch)` is B.

    Columns are available as attributes (`batch.reward`) and keys (`batch["obs/vector"]`); `batch.obs` is the
    dict of observations. Reward, terminated, truncated and is_first *arrived with* the observation; `action`
    was taken after it. `batch.transitions()` has the plural names: `rewards` *followed* each action.
    """

    def __init__(
        self,
        columns: dict[str, torch.Tensor],
        index: RowIndex | None = None,
        mask: torch.Tensor | None = None,  # (B, T) bool, False in padding; None without padding
    ) -> None:
        self.columns = columns
        self.index = index
        self.mask = mask
        self.obs = {
            key.removeprefix(OBS_PREFIX): value
            for key, value in columns.items()
            if key.startswith(OBS_PREFIX)
        }

    action: torch.Tensor
    reward: torch.Tensor
    terminated: torch.Tensor
    truncated: torch.Tensor
    is_first: torch.Tensor

    def __getattr__(self, name: str) -> Any:
        columns = self.__dict__.get("columns", {})
        if name in columns:
            return columns[name]
        raise self._unknown(f"batch.{name}", name)

    def __getitem__(self, key: str) -> Any:
        try:
            return self.columns[key]
        except KeyError:
            raise self._unknown(f"batch['{key}']", key) from None

    def _unknown(self, asked: str, name: str) -> BatchNameError:
        if name in PLURAL_NAMES:
            row = PLURAL_NAMES[name]
            other = f", or the row's batch['{row}']" if row else ""
            return BatchNameError(
                f"{asked} is a name of transitions, but this batch holds stored rows: "
                f"use batch.transitions()['{name}']{other}"
            )
        return BatchNameError(f"{asked} does not exist.{closest(name, self.__dict__.get('columns', {}))}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(next(iter(self.columns.values()), ()))

    # Mapping's views would take their length from `len(batch)`.
    def keys(self) -> KeysView[str]:
        return self.columns.keys()

    def values(self) -> ValuesView[torch.Tensor]:
        return self.columns.values()

    def items(self) -> ItemsView[str, torch.Tensor]:
        return self.columns.items()

    def transitions(self) -> Transitions:
        """Return T-1 transitions, each with the reward and end that *followed* its action."""
        return Transitions(self)


# Names of transitions -> the row's column that holds the value of another time step.
PLURAL_NAMES = {
    "observations": "obs/…",
    "next_observations": "obs/…",
    "actions": "action",
    "rewards": "reward",
    "dones": "",
    "valid": "",
}
_SINGULAR_NAMES = {"obs": "observations", "action": "actions", "reward": "rewards"}
_ROW_NAMES = {*_SINGULAR_NAMES, *ROW_COLUMNS, "mask", "index", "columns"}


class Transitions(Mapping[str, Any]):
    """T-1 transitions of B sequences: what plain hooks receive. `len(batch)` is B.

    observations, actions, next_observations   (B, T-1, …); observations are one tensor when there is a single
                                               observation key, else a dict
    rewards, dones, terminated, truncated      (B, T-1): what *followed* the action
    valid                                      (B, T-1): False where the next row belongs to another episode
                                               or to padding
    every further column                       (B, T-1, …): as stored with the observation

    The names are keys (`batch["rewards"]`) and attributes (`batch.rewards`). `batch.rows` is the Batch of
    stored rows, whose names are singular.
    """

    def __init__(self, rows: Batch) -> None:
        self.rows = rows
        now = {key: value[:, :-1] for key, value in rows.obs.items()}
        following = {key: value[:, 1:] for key, value in rows.obs.items()}
        valid = ~rows.is_first[:, 1:]
        if rows.mask is not None:
            valid = valid & rows.mask[:, :-1] & rows.mask[:, 1:]
        self._values: dict[str, Any] = {
            name: value[:, :-1]
            for name, value in rows.columns.items()
            if name not in ROW_COLUMNS and not name.startswith(OBS_PREFIX)
        }
        self._values |= {
            "observations": _single(now),
            "actions": rows.action[:, :-1],
            "rewards": rows.reward[:, 1:],
            "dones": rows.terminated[:, 1:] | rows.truncated[:, 1:],
            "terminated": rows.terminated[:, 1:],
            "truncated": rows.truncated[:, 1:],
            "next_observations": _single(following),
            "valid": valid,
        }

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name in values:
            return values[name]
        raise self._unknown(f"batch.{name}", name)

    def __getitem__(self, key: str) -> Any:
        try:
            return self._values[key]
        except KeyError:
            raise self._unknown(f"batch['{key}']", key) from None

    def _unknown(self, asked: str, name: str) -> BatchNameError:
        values = self.__dict__.get("_values", {})
        if name in _ROW_NAMES or name.startswith(OBS_PREFIX):
            plural = _SINGULAR_NAMES.get(name, "observations" if name.startswith(OBS_PREFIX) else "")
            own = f"use batch['{plural}'], or " if plural else "use "
            row = f"batch.rows.{name}" if name.isidentifier() else f"batch.rows['{name}']"
            return BatchNameError(
                f"{asked} is a name of stored rows, but this batch holds transitions: {own}{row} for the rows"
            )
        return BatchNameError(f"{asked} does not exist.{closest(name, values)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.rows)

    # Mapping's views would take their length from `len(batch)`.
    def keys(self) -> KeysView[str]:
        return self._values.keys()

    def values(self) -> ValuesView[Any]:
        return self._values.values()

    def items(self) -> ItemsView[str, Any]:
        return self._values.items()

    def transitions(self) -> Transitions:
        """Return the batch itself, so that a step may be a plain or a declared hook."""
        return self


def _single(arrays: dict[str, Any]) -> Any:
    return next(iter(arrays.values())) if len(arrays) == 1 else arrays


@dataclass
class Imagined:
    """An imagined rollout of H steps from B initial states. Step 0 is the initial state.

    `reward[:, t]` and `cont[:, t]` are predicted on arrival in state t; `action[:, t]` is taken in it.
    """

    state: dict[str, torch.Tensor]  # (B, H+1, …) latent state, under the workflow's names
    action: torch.Tensor  # (B, H+1, …) or (B, H, …)
    reward: torch.Tensor | None = None  # (B, H+1)
    cont: torch.Tensor | None = (
        None  # (B, H+1) probability of continuing; includes the discount if learned so
    )
    obs: dict[str, torch.Tensor] | None = None  # decoded observations, if requested


@dataclass
class ImaginedStep:
    """Prediction of a world model for one action in each of B imagined rollouts."""

    reward: torch.Tensor  # (B,) float32
    terminated: torch.Tensor  # (B,) float32, probability that the episode ends here
    obs: dict[str, torch.Tensor] = field(
        default_factory=dict
    )  # decoded, in the stored format; empty without a decoder


@dataclass
class Quantized:
    """Vectors (M, D) replaced by codes, with straight-through gradients."""

    vectors: torch.Tensor  # (M, D)
    tokens: torch.Tensor  # (M,) int64
    loss: torch.Tensor  # (M,) loss of the quantizer; zeros if it has none
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)  # 0-d, detached


@dataclass(frozen=True)
class EarlyStop:
    """When the rollout of a candidate is ended early because it makes no progress.

    patience: steps without a reward above `reward_above`; 0: never end early
    horizon:  steps of a complete episode. Each remaining step counts as the mean reward of the last `patience`
              steps, so that ending early changes the return only slightly; 0: remaining steps count nothing
    """

    patience: int = 0
    reward_above: float = 0.0
    horizon: int = 0


@dataclass(frozen=True)
class ActMode:
    """How to choose actions: sampled or deterministic, with how much noise, and from which generator."""

    sample: bool = True
    temperature: float = 1.0
    epsilon: float = 0.0  # probability of a uniformly random action
    generator: torch.Generator | None = None
    policy: str = "agent"  # or another of the workflow's `collect_policies`
    # The result of `Policy.act_variant`, which chose a CUDA graph; None: not asked.
    variant: int | None = None


@dataclass
class CollectResult:
    """Result of `collect_step`. `trajectory` holds rows, or transitions (see buffers/trajectory.py)."""

    steps: int  # agent decisions that were executed; resets are not counted
    episodes: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    trajectory: Mapping[str, Any] | None = None
    extras: dict[str, Any] = field(default_factory=dict)


@dataclass
class UpdateResult:
    """Result of a hook: detached 0-d tensors to log, and columns to write back to the sampled rows."""

    metrics: Mapping[str, Any] = field(default_factory=dict)
    write_back: Mapping[str, torch.Tensor] | None = (
        None  # name -> (B, length, …), for the rows after the context
    )


@dataclass(frozen=True)
class NoiseSpec:
    """Noise that a hook's step needs. It is drawn before the call, so that the step is a pure function."""

    shape: tuple[int, ...]
    kind: Literal["uniform", "normal"] = "uniform"


@dataclass(frozen=True)
class Hook:
    """An update that a workflow declares: step(batch, scalars, noise) -> UpdateResult.

    The step has fixed shapes and does not synchronize with the host, so it can be captured as a CUDA graph.
    batch:    the Batch of stored rows that it samples; None: it gets None
    scalars:  called before each step; its values reach the step as device tensors
    noise:    drawn before each step; reaches the step as device tensors
    prefix:   of metrics without a prefix
    """

    step: Callable[[Any, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], UpdateResult]
    batch: BatchSpec | None = None
    scalars: Callable[[Mapping[str, Any], Mapping[str, int]], Mapping[str, float]] | None = None
    noise: Mapping[str, NoiseSpec] = field(default_factory=dict)
    prefix: str = "train"
    kind: ClassVar[str] = "update"


@dataclass(frozen=True)
class PlainHook:
    """An update that is an ordinary method, never captured: step(batch, phase=…) -> dict of floats.

    The step gets Transitions, not stored rows.
    """

    step: Callable[..., Mapping[str, Any] | UpdateResult | None]
    batch: BatchSpec | None = None
    prefix: str = "train"
    kind: ClassVar[str] = "update"


@dataclass(frozen=True)
class TransformHook:
    """Runs once over the buffer of its phase and stores columns: step(batch) -> {column: (B, T, …)}.

    batch: of `WorldModelWorkflow.report`, if this is the workflow's first hook
    """

    step: Callable[[Batch], Mapping[str, torch.Tensor]]
    batch: BatchSpec | None = None
    prefix: str = "train"
    kind: ClassVar[str] = "transform"


@dataclass(frozen=True)
class EvolveHook:
    """One generation of candidates: ask, evaluate, tell. batch: for an evolution in a world model."""

    step: Evolvable
    batch: BatchSpec | None = None
    prefix: str = "train"
    kind: ClassVar[str] = "evolve"


AnyHook: TypeAlias = Hook | PlainHook | TransformHook | EvolveHook


# ---------------------------------------------------------------- episodes


HISTORY = 100  # finished episodes that EpisodeTracker keeps


@dataclass
class Episode:
    """One finished episode. `log` holds the sums of the environment's `log/…` values."""

    episode_return: float
    length: int
    env: int = 0  # index of its environment
    log: dict[str, float] = field(default_factory=dict)


class EpisodeTracker:
    """Sums rewards per episode over N environments, and keeps the last `HISTORY` finished episodes."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.returns = np.zeros(num_envs, dtype=np.float64)
        self.lengths = np.zeros(num_envs, dtype=np.int64)
        self.history: deque[Episode] = deque(maxlen=HISTORY)
        self.total_episodes = 0
        self._new: list[Episode] = []  # since the last `drain`

    def update(
        self,
        reward: np.ndarray,  # (N,)
        done: np.ndarray,  # (N,) bool
        counted: np.ndarray | None = None,  # (N,) bool, False for reset rows
        logs: Mapping[int, Mapping[str, float]] | None = None,  # by environment, for those that ended
        failed: Collection[int] = (),  # environments whose episode ended because of a failure
    ) -> int:
        """Add one vector step; return the number of episodes that ended.

        An episode that a failure ended is counted, but its return is not kept.
        """
        self.returns += np.asarray(reward, dtype=np.float64)
        self.lengths += 1 if counted is None else np.asarray(counted, dtype=np.int64)
        ended = [int(env) for env in np.flatnonzero(done)]
        for env in ended:
            if env in failed:
                continue
            log = dict(logs[env]) if logs and env in logs else {}
            episode = Episode(float(self.returns[env]), int(self.lengths[env]), env, log)
            self.history.append(episode)
            self._new.append(episode)
        self.returns[ended] = 0.0
        self.lengths[ended] = 0
        self.total_episodes += len(ended)
        return len(ended)

    def drain(self) -> list[Episode]:
        """Return the episodes that finished since the last call."""
        new, self._new = self._new, []
        return new

    def get_state(self) -> dict[str, Any]:
        def pack(episodes: Any) -> list[list[Any]]:
            return [[e.episode_return, e.length, e.env, dict(e.log)] for e in episodes]

        return {
            "returns": self.returns.tolist(),
            "lengths": self.lengths.tolist(),
            "history": pack(self.history),
            "fresh": pack(self._new),
            "total_episodes": self.total_episodes,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.returns = np.asarray(state["returns"], dtype=np.float64)
        self.lengths = np.asarray(state["lengths"], dtype=np.int64)
        self.history = deque((Episode(*item) for item in state["history"]), maxlen=HISTORY)
        self._new = [Episode(*item) for item in state["fresh"]]
        self.total_episodes = int(state["total_episodes"])


def standard_deviation(values: np.ndarray) -> float:
    """Return the standard deviation; exactly 0 for equal values, whose mean may be rounded."""
    return 0.0 if values.min() == values.max() else float(values.std())


def return_statistics(episodes: list[Episode]) -> dict[str, float]:
    """Return mean, std, min and max of the returns, the mean length, and the mean of each `log/…` sum."""
    if not episodes:
        return {}
    returns = np.array([episode.episode_return for episode in episodes])
    statistics = {
        "return_mean": float(returns.mean()),
        "return_std": standard_deviation(returns),
        "return_min": float(returns.min()),
        "return_max": float(returns.max()),
        "length_mean": float(np.mean([episode.length for episode in episodes])),
    }
    for key in sorted({key for episode in episodes for key in episode.log}):
        statistics[key] = float(np.mean([e.log[key] for e in episodes if key in e.log]))
    return statistics
