"""Protocols: the methods by which the parts of a run call each other.

The loop, the tools and the workflows know a part by its Protocol and not by its class, so a part of your own needs no
base class. `rl_lab.contracts` has one check for each Protocol, which your tests can call; docs/contracts.md explains
them. A Protocol marked `runtime_checkable` is also an *ability*: `isinstance(workflow, WorldModel)` asks whether a
workflow has these methods.

The module does not import torch (tensors appear in annotations only).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch

    from rl_lab.records import (
        ActMode,
        AnyHook,
        ArraySpec,
        Batch,
        BatchSpec,
        CollectResult,
        Episode,
        EpisodeTracker,
        ImaginedStep,
        Quantized,
        RowIndex,
        Transitions,
        UpdateResult,
    )

    Tensors = Mapping[str, torch.Tensor]
    State = dict[str, torch.Tensor]
    Phase = Mapping[str, Any]  # name, type, progress, iteration, set, freeze, collect
    Latent = Any  # a tensor (R, …), or a dict of tensors


# ---------------------------------------------------------------- acting


class Policy(Protocol):
    """Chooses actions. Called by the Collector, the Evaluator, play and `load_agent`.

    Optional: `before_act(mode)` writes values that change between calls to the device; `act_captures = False` if `act`
    cannot be captured as a CUDA graph; `act_variant(policy_state, is_first) -> int` if a call does one of several
    computations: each is captured by itself, and `act` reads which one from `mode.variant`.
    """

    def act(
        self, obs: State, policy_state: State, is_first: torch.Tensor, mode: ActMode
    ) -> tuple[torch.Tensor, State, State]:
        """obs: name -> (N, …), is_first: (N,) bool -> actions (N, …), next policy state, columns to store (N, …).

        Where `is_first`, the given state is ignored. All randomness comes from `mode.generator`.
        """

    def initial_policy_state(self, num_envs: int) -> State:
        """Return the state before the first step, (N, …) each."""


@runtime_checkable
class SelectsActions(Protocol):
    """The short form of a policy: no memory, host arrays in and out."""

    def select_action(self, obs: Mapping[str, np.ndarray]) -> Any:
        """obs: name -> (N, …) -> actions (N, …)."""


@runtime_checkable
class InspectablePolicy(Protocol):
    """A policy that shows what it expects."""

    def inspect_policy(self, state: State) -> State:
        """State of `act` or `dream_act` -> name -> (N,), such as `value` and `entropy`."""


class VectorEnvironment(Protocol):
    """N environments that the Collector steps; `VectorEnv` and `WorldModelEnv` are two.

    Optional: `failure` (the error that ends the run), `schedule(seeds)`, `normalizer`, `frame()`.
    """

    @property
    def num_envs(self) -> int: ...
    @property
    def is_first(self) -> np.ndarray:
        """(N,) bool: whether the last observation is from a reset."""

    @property
    def last_obs(self) -> dict[str, np.ndarray]: ...
    @property
    def last_dones(self) -> np.ndarray: ...

    def reset(self, *, seed: int | None = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]: ...
    def step_async(self, actions: Any) -> None: ...
    def step_wait(
        self,
    ) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]: ...
    def get_state(self) -> dict[str, Any]: ...
    def set_state(self, state: Mapping[str, Any]) -> list[int]:
        """Continue from `get_state`; return the environments that had to start a new episode instead."""

    def close(self) -> None: ...


class RowCollector(Protocol):
    """The Collector, as a workflow's `collect_step` sees it."""

    @property
    def tracker(self) -> EpisodeTracker: ...

    def step(self, policy: Policy, mode: ActMode) -> CollectResult:
        """Step all environments once with the policy's actions, and return the rows."""


# ---------------------------------------------------------------- workflows


class Workflow(Policy, Protocol):
    """The methods of a workflow that the loop calls; `WorldModelWorkflow` has all of them."""

    def hooks(self) -> Mapping[str, AnyHook]: ...
    def collect_mode(self, phase: Phase) -> ActMode: ...
    def report(self, batch: Batch) -> Mapping[str, Any]: ...
    def finished_episodes(self) -> list[Episode]: ...
    def get_state(self) -> dict[str, Any]: ...
    def set_state(self, state: Mapping[str, Any]) -> None: ...


class CollectStep(Protocol):
    """A workflow's own `collect_step`, which steps the environments itself."""

    def __call__(self, step: int, *, phase: Phase) -> CollectResult | None: ...


@runtime_checkable
class UpdatesWorldModel(Protocol):
    """Has the plain hook `update_world_model`."""

    def update_world_model(self, batch: Transitions, *, phase: Phase) -> Mapping[str, Any] | UpdateResult:
        """One gradient step on the world model; returns metrics."""


@runtime_checkable
class UpdatesController(Protocol):
    """Has the plain hook `update_controller`."""

    def update_controller(self, batch: Transitions, *, phase: Phase) -> Mapping[str, Any] | UpdateResult:
        """One gradient step on the controller; returns metrics."""


@runtime_checkable
class TracksEpisodes(Protocol):
    """Has a rollout and episode statistics of its own; both are part of a checkpoint."""

    def _snapshot_episode_tracking(self) -> dict[str, Any]: ...
    def _restore_episode_tracking(self, state: Mapping[str, Any]) -> None: ...
    def _reset_rollout_state(self, *, initial_obs: Any, initial_dones: Any = None) -> None: ...


@runtime_checkable
class WorldModel(Protocol):
    """A world model that is stepped one action at a time: by `imagine`, play, the dream report and WorldModelEnv.

    A state holds all memory, including the policy's. The first dimension of each tensor is B, the dreams.
    """

    def dream_start(self, batch: Batch, *, generator: torch.Generator | None = None) -> State:
        """Return the state after the rows of `batch` (B, T, …), which may start mid-episode.

        The action of the last row is not read: it has not been taken yet.
        """

    def dream_act(self, state: State, mode: ActMode) -> tuple[torch.Tensor, State]:
        """Return the policy's actions (B, …) in this state, and the state with the updated policy memory."""

    def dream_step(
        self, state: State, action: torch.Tensor, *, generator: torch.Generator | None = None
    ) -> tuple[State, ImaginedStep]:
        """Take (B, …) actions; return the next state and the predicted reward, end and observations."""


@runtime_checkable
class ObservationDecoder(Protocol):
    """A world model whose states can be shown."""

    def dream_observation(self, state: State) -> State:
        """Decode the state: name -> (B, …) in the format of stored observations."""


# ---------------------------------------------------------------- replay


class BatchSource(Protocol):
    """Where batches come from: a Buffer, or a mix of them."""

    @property
    def columns(self) -> Mapping[str, ArraySpec]: ...
    @property
    def device(self) -> torch.device:
        """The device of the batches."""

    @property
    def storage_device(self) -> torch.device:
        """The device of the stored rows."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory when the buffer is full."""

    def describe(self) -> str:
        """Return one line for people."""

    def ready(self, spec: BatchSpec) -> bool:
        """Return whether a batch can be drawn."""

    def shortage(self, spec: BatchSpec) -> str:
        """Return why a batch cannot be drawn yet, or "" if it can."""

    def make_batch(self, spec: BatchSpec, *, device: torch.device | str | None = None) -> Batch:
        """Return an empty batch for `sample(out=…)`; device: None is `self.device`."""

    def sample(self, spec: BatchSpec, *, generator: torch.Generator, out: Batch | None = None) -> Batch:
        """Fill `out` (or a new batch) with sequences. generator: a CPU generator."""

    def undo(self, spec: BatchSpec) -> None:
        """Undo the sampler's last draw, so that the same batch can be drawn again."""

    def write_back(self, index: RowIndex, columns: Tensors, *, offset: int) -> None:
        """Replace columns (B, L, …) of rows offset … offset+L of each sampled sequence."""


class Buffer(BatchSource, Protocol):
    """Stores rows and gives batches of sequences.

    Optional: `read_only = True` (nothing can be added), `on_host` (rows are in host memory), `close()`.
    """

    @property
    def total_rows(self) -> int:
        """Rows ever added to each stream; also the position after the newest row."""

    @property
    def oldest_position(self) -> int: ...

    def add(self, rows: Mapping[str, Any]) -> None:
        """Store one row per stream, name -> (N, …), or T rows at once, name -> (N, T, …)."""

    def read(self, position: int, count: int) -> Batch:
        """Return rows position … position+count of every stream, (N, count, …)."""

    def write(self, position: int, columns: Tensors) -> None:
        """Replace columns of consecutive rows; name -> (N, count, …)."""

    def get_state(self) -> dict[str, Any]:
        """Return the state of the samplers; `checkpoint` saves the rows."""

    def set_state(self, state: Mapping[str, Any]) -> None: ...

    def checkpoint(self, folder: Path) -> dict[str, Any]:
        """Save the rows to files of the folder; returns {"files": …, "meta": …} for JSON."""

    def restore(self, folder: Path, entry: Mapping[str, Any], *, skip_corrupt: bool = False) -> Sequence[Any]:
        """Load the rows of a checkpoint; return the files that were lost (only with skip_corrupt)."""


class Sampler(Protocol):
    """Draws where sequences start. All randomness comes from the generator, so draws are reproducible."""

    def available(self) -> int:
        """Return the number of starts that can be drawn now."""

    def draw(self, count: int, generator: torch.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw stream (K,) and first position (K,), int64, with replacement; called if `available()` is not 0."""

    def undo(self) -> None:
        """Undo the last draw, except for the generator's state, which the caller restores."""

    def on_add(self, position: int) -> None:
        """Called after a row at `position` was added to every stream."""

    def get_state(self) -> dict[str, Any]: ...
    def set_state(self, state: Mapping[str, Any]) -> None: ...


class EpisodeSampler(Protocol):
    """A Sampler of complete episodes: draws an episode (K,) and its first row (K,), int64."""

    def available(self) -> int: ...
    def draw(self, count: int, generator: torch.Generator) -> tuple[np.ndarray, np.ndarray]: ...
    def undo(self) -> None: ...
    def on_add(self, position: int, is_first: np.ndarray) -> None:
        """Called after a row at `position` was added to every stream. is_first: (N,) bool."""

    def get_state(self) -> dict[str, Any]: ...
    def set_state(self, state: Mapping[str, Any]) -> None: ...


# ---------------------------------------------------------------- components


class ReturnComputer(Protocol):
    """Returns from rewards, continuation and values.

    reward  (B, T)    reward[:, t] arrived together with state t; reward[:, 0] is not used
    cont    (B, T)    weight of what follows state t: discount × (1 - terminated[:, t]), or a prediction of it
    value   (B, T)    value of state t, for bootstrapping
    last    (B, T)    True if state t is the last of its episode: the return is bootstrapped with value[:, t]
    returns (B, T-1)  of states 0 … T-2; the end of the sequence is bootstrapped with value[:, -1]
    """

    def __call__(
        self,
        reward: torch.Tensor,
        cont: torch.Tensor,
        value: torch.Tensor,
        *,
        last: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


class PlanningModel(Protocol):
    """What a planner searches. Latents are tensors (R, …) or dicts of them; actions are network inputs (R, A).

    Optional:
        noise               name -> NoiseSpec of one row, for next, value and policy; a method without one gets None
        dtype, action_width dtype of the actions; width to which they are padded with zeros
        rewards_on_arrival  False: `reward` gets None for the following latents
        TerminatingModel, ReturnModel: two abilities
    """

    def next(self, latent: Latent, action: torch.Tensor, noise: Any) -> Latent:
        """Take one step."""

    def reward(self, latent: Latent, action: torch.Tensor, following: Latent) -> torch.Tensor:
        """Rewards of H steps at once: latents (R, H, …), actions (R, H, A) -> (R, H)."""

    def value(self, latent: Latent, noise: Any) -> torch.Tensor:
        """Return after the horizon: (R,)."""

    def policy(self, latent: Latent, noise: Any) -> torch.Tensor:
        """Actions to propose: (R, A)."""


@runtime_checkable
class TerminatingModel(Protocol):
    """A PlanningModel that predicts ends."""

    def alive(self, following: Latent) -> torch.Tensor:
        """(R, …) probability that the episode continues."""


@runtime_checkable
class ReturnModel(Protocol):
    """A PlanningModel with a faster way to the value of complete sequences."""

    def returns(
        self, latent: Latent, actions: torch.Tensor, weight: torch.Tensor, noise: Any
    ) -> torch.Tensor:
        """N latents, R sequences (R, H, A), their discounts (R, H + 1) -> (R,)."""


class TotalLoss(Protocol):
    """A sum of named losses."""

    loss_total: torch.Tensor
    intermediate_losses: dict[str, torch.Tensor]


class Tokenizer(Protocol):
    """Maps frames (float, pixels in [0, 1]) to tokens and back.

    A *contextual* tokenizer encodes the change since the previous frame and also takes that frame and the action
    between the two; other tokenizers ignore both.
    """

    key: str  # name of the image observation
    num_tokens: int  # per frame
    vocab: int
    contextual: bool

    def noise_size(self, sequences: int, rows: int) -> int:
        """Number of uniform random values that `compute_loss` takes for a batch of this shape."""

    def encode(
        self, frame: torch.Tensor, previous: torch.Tensor | None = None, action: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Frame (M, C, H, W), previous frame, action between them -> (M, num_tokens)."""

    def frame_features(self, frame: torch.Tensor) -> torch.Tensor | None:
        """(M, C, H, W) -> features of a previous frame for `decode`, which can be computed in advance."""

    def decode(
        self,
        tokens: torch.Tensor,
        previous: torch.Tensor | None = None,
        action: torch.Tensor | None = None,
        features: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(M, num_tokens) -> (M, C, H, W) in [0, 1], in steps of 1/255 if the original rounds."""

    def policy_view(self, frame: torch.Tensor) -> torch.Tensor:
        """The policy's input for a real frame: its reconstruction, or the frame itself."""

    def compute_loss(
        self, batch: Batch, noise: torch.Tensor | None = None, *, learn: bool = True
    ) -> tuple[TotalLoss, dict[str, torch.Tensor]]:
        """learn: False does not update what is learned without gradients (an averaged codebook)."""


class Quantizer(Protocol):
    """A module with codes 0 … vocab - 1."""

    vocab: int
    dim: int  # width of the vectors

    def noise_size(self, vectors: int) -> int:
        """Uniform random values that `learn` takes for M vectors; 0: nothing to learn without gradients."""

    def __call__(self, vectors: torch.Tensor, mask: torch.Tensor | None = None) -> Quantized:
        """vectors: (M, D); mask: (M,) bool, vectors that count in the metrics."""

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """(…) -> (…, D)."""

    def learn(
        self, vectors: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor, noise: torch.Tensor
    ) -> None:
        """Update what is learned without gradients; called once per training step, and nowhere else."""


class SequenceBackbone(Protocol):
    """A causal sequence model on embeddings: output t depends only on embeddings 0 … t.

    The world model owns token embeddings, positions, heads and the order of tokens. The state is a dict of tensors with
    the batch first. A backbone initialises its own weights, because the world model would overwrite loaded ones. The
    config sets `_partial_: true`; the world model calls backbone(dim=…, length=…).
    """

    dim: int  # width of embeddings and outputs
    seeds: int  # number of seeds that `forward` takes for dropout; 0: no dropout

    def __call__(self, x: torch.Tensor, seeds: torch.Tensor | None = None) -> torch.Tensor:
        """A complete sequence, for training: (B, T, dim) -> (B, T, dim)."""

    def init_state(self, size: int) -> State:
        """The state before the first token of `size` sequences."""

    def step(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """The next T tokens (B, T, dim) -> outputs (B, T, dim) and the new state.

        The tensors of the given state may be overwritten; use `copy_state` to keep it.
        """


# ---------------------------------------------------------------- evolution


class Evolvable(Protocol):
    """The `step` of an EvolveHook: candidates that the loop evaluates in environments.

    Optional attributes:
        num_envs: int           number of environments (default: as many as training has)
        common_episodes: bool   all candidates share the seed of an episode
        early_stop: EarlyStop   when to end a rollout without progress (see records.py)
        act_captures = False    `act` cannot be captured as a CUDA graph
        PhasedEvolution, DreamEvolution: two abilities
    """

    episodes_per_candidate: int

    def ask(self) -> torch.Tensor:
        """Return the candidates of this generation, (P, D): the same ones until `tell` is called."""

    def act(
        self,
        candidates: torch.Tensor,
        obs: State,
        policy_state: State,
        is_first: torch.Tensor,
        mode: ActMode,
    ) -> tuple[torch.Tensor, State]:
        """Return actions for N environments, each with its own candidate: candidates (N, D)."""

    def initial_policy_state(self, num_envs: int) -> State: ...

    def tell(self, candidates: torch.Tensor, fitness: torch.Tensor) -> Mapping[str, float]:
        """Learn from the fitness (P,), higher is better; return metrics."""


@runtime_checkable
class PhasedEvolution(Protocol):
    """Reads the running phase before every generation."""

    def begin(self, phase: Phase) -> None: ...


@runtime_checkable
class DreamEvolution(Protocol):
    """With `dreams = True` it evaluates its candidates itself, in a world model, without environments."""

    dreams: bool

    def evaluate(
        self, candidates: torch.Tensor, batch: Batch, generator: torch.Generator
    ) -> tuple[torch.Tensor, int]:
        """candidates: (P, D); batch as the hook's BatchSpec says -> fitness (P,), imagined steps."""
