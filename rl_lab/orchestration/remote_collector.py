"""Collectors elsewhere: each has a share of the environments and a copy of the policy, and sends chunks of rows.

`RemoteCollector` has the interface of `Collector`: a call of `step` returns one row for each of the N environments. It
takes them from the chunks of K collectors, which collect the next chunk meanwhile. So the scheduler counts steps as
always, and the train ratio is what the config says.

A chunk is asked for when the one before it begins to be used. It is collected with the weights of that moment, so a
row is stored at most two chunks of updates after its weights were published. If one is older than `max_staleness`, the
rest of its chunk is dropped, and its environments start new episodes; chunks are shortened so that this is rare.

A collector that is lost is replaced, with new episodes. What it had sent is stored; only its open episodes end early.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from rl_lab.errors import CheckpointError, EnvironmentFaultError
from rl_lab.protocols import Policy
from rl_lab.records import ActMode, CollectResult, EpisodeTracker
from rl_lab.utils.metrics import Stopwatch
from rl_lab.utils.stopping import STOP

POLL_S = 0.5  # between two looks at a request to stop


@dataclass(frozen=True)
class Order:
    """What a collector is asked for. restart: begin new episodes before."""

    steps: int
    mode: ActMode
    version: int  # updates when its weights were published
    restart: bool = False


@dataclass
class Chunk:
    """T vector steps of one collector."""

    rows: Mapping[str, Any]  # name -> (T, n, …): arrays, and tensors where NumPy lacks the type
    logs: Sequence[Mapping[int, Mapping[str, float]]]  # of each step: by environment of the collector
    closed: Sequence[Sequence[int]]  # of each step: environments whose episode a failure ended
    version: int
    restarts: int = 0  # of environments, since the collector began


class Remote(Protocol):
    """An object in another process: every `call` is followed by a `result`.

    `result` raises ConnectionError if the process is lost, TimeoutError if it does not answer.
    """

    def call(self, method: str, *args: Any) -> None: ...
    def ready(self, seconds: float = 0.0) -> bool: ...
    def result(self, seconds: float | None = None) -> Any: ...
    def kill(self) -> None: ...


@dataclass
class Part:
    """One collector: its environments, its process and the rows that it has sent."""

    envs: np.ndarray  # indices of its environments
    remote: Remote | None = None
    incarnation: int = -1  # how often it was started; part of its seeds
    chunk: Chunk | None = None
    position: int = 0  # of the next row of `chunk`
    asked: bool = False
    losses: int = 0  # in a row, without a chunk
    env_restarts: int = 0  # of the incarnations before


@dataclass
class RemoteEnvironments:
    """What a run asks its training environment for, where the environments are elsewhere."""

    num_envs: int
    spec: Any
    restarts: int = 0
    normalizer: Any = None
    closed: bool = False
    last_obs: dict[str, np.ndarray] = field(default_factory=dict)
    last_dones: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    on_close: Callable[[], None] = lambda: None

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.on_close()


class RemoteCollector:
    """Rows of N environments from K collectors in other processes; see the module's docstring.

    start:   (number, its environments, incarnation) -> a new collector
    publish: stores the current weights for all collectors; returns what stands for them in calls
    updates: number of updates so far: the version of the weights
    """

    def __init__(
        self,
        environment: RemoteEnvironments,
        collectors: int,
        *,
        start: Callable[[int, np.ndarray, int], Remote],
        publish: Callable[[], Any],
        updates: Callable[[], int],
        device: torch.device | str,
        chunk: int = 32,
        max_staleness: int | None = None,
        timeout: float = 600.0,
        restarts: int = 3,
        say: Callable[[str], None] = print,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self.environment = environment
        self.device = torch.device(device)
        self.rows_on_host = True
        self.policy_state: dict[str, torch.Tensor] | None = None
        self.tracker = EpisodeTracker(environment.num_envs)
        self.parts = [Part(envs) for envs in np.array_split(np.arange(environment.num_envs), collectors)]
        self.start = start
        self.publish = publish
        self.updates = updates
        self.chunk = chunk
        self.max_staleness = max_staleness
        self.timeout = timeout
        self.restarts = restarts
        self.say = say
        self.stopwatch = stopwatch or Stopwatch()
        self.lost = 0  # collectors that were replaced
        self.dropped = 0  # rows that were too old
        self._published: tuple[int, Any] | None = None
        self._rows = 0  # vector steps since the last chunk was asked for, and updates then
        self._updates_before = 0
        self._updates_per_row = 0.0
        environment.on_close = self.close

    def reset(self) -> dict[str, np.ndarray]:
        """Start the collectors. Their first rows are those of resets."""
        for number, part in enumerate(self.parts):
            self._start(number, part)
        return {}

    def receive(self) -> None:
        """Nothing is in flight that a checkpoint would need."""

    @torch.no_grad()
    def step(self, policy: Policy, mode: ActMode) -> CollectResult:
        """Return the next row of every environment; ask for the next chunks."""
        with self.stopwatch("env_wait"):
            for number, part in enumerate(self.parts):
                self._fill(number, part, mode)
        now = self.updates()
        staleness, pieces = [], []
        logs: dict[int, dict[str, float]] = {}
        closed: list[int] = []
        for part in self.parts:
            chunk, t = part.chunk, part.position
            assert chunk is not None
            pieces.append({name: values[t] for name, values in chunk.rows.items()})
            logs |= {int(part.envs[env]): dict(log) for env, log in chunk.logs[t].items()}
            closed += [int(part.envs[env]) for env in chunk.closed[t]]
            staleness.append(now - chunk.version)
            part.position += 1
        self._rows += 1
        rows = {name: _joined([piece[name] for piece in pieces]) for name in pieces[0]}
        counted = ~rows["is_first"]
        # The first row of a new episode: what a lost collector had not ended is not counted.
        self.tracker.returns[rows["is_first"]] = 0.0
        self.tracker.lengths[rows["is_first"]] = 0
        ended = rows["terminated"] | rows["truncated"]
        episodes = self.tracker.update(rows["reward"], ended, counted, logs, closed)
        metrics = {
            "collect/staleness": float(np.mean(staleness)),
            "collect/staleness_max": float(max(staleness)),
            "collect/chunk": float(np.mean([len(part.chunk.logs) for part in self.parts if part.chunk])),
            "collect/collectors_lost": float(self.lost),
            "collect/dropped_rows": float(self.dropped),
        }
        return CollectResult(
            steps=int(counted.sum()), episodes=episodes, metrics=metrics, trajectory=self._placed(rows)
        )

    def _placed(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Return the rows as a Collector does: on the device unless the buffer is in host memory."""
        if self.rows_on_host or self.device.type == "cpu":
            return rows
        return {name: torch.as_tensor(values).to(self.device) for name, values in rows.items()}

    # ---------------------------------------------------------------- chunks

    def _fill(self, number: int, part: Part, mode: ActMode) -> None:
        """Make sure that a collector has a row that is fresh enough."""
        while True:
            chunk = part.chunk
            if chunk is not None and part.position < len(chunk.logs):
                if not self._too_old(chunk):
                    return
                self._drop(number, part, mode)
                continue
            if not part.asked:
                self._ask(part, mode)
            taken = self._take(number, part)
            if taken is None:
                continue
            if self._too_old(taken):
                part.chunk, part.position = taken, 0
                self._drop(number, part, mode)
                continue
            part.chunk, part.position, part.losses = taken, 0, 0
            self._ask(part, mode)  # the next one is collected while this one is used

    def _too_old(self, chunk: Chunk) -> bool:
        return self.max_staleness is not None and self.updates() - chunk.version > self.max_staleness

    def _drop(self, number: int, part: Part, mode: ActMode) -> None:
        """Drop the waiting rows of a collector, which then begins new episodes with the newest weights."""
        if part.asked:
            taken = self._take(number, part)
            self.dropped += 0 if taken is None else len(taken.logs) * len(part.envs)
        if part.chunk is not None:
            self.dropped += (len(part.chunk.logs) - part.position) * len(part.envs)
        part.chunk, part.position = None, 0
        self._ask(part, mode, restart=True)

    def _ask(self, part: Part, mode: ActMode, *, restart: bool = False) -> None:
        now = self.updates()
        if self._published is None or self._published[0] != now:
            self._published = (now, self.publish())
        version, weights = self._published
        order = Order(self._length(now), replace(mode, generator=None), version, restart)
        assert part.remote is not None
        part.remote.call("collect", weights, order)
        part.asked = True

    def _length(self, now: int) -> int:
        """Return how many steps to ask for: two chunks of updates should not exceed the limit."""
        if self._rows:
            self._updates_per_row = (now - self._updates_before) / self._rows
            self._rows, self._updates_before = 0, now
        if self.max_staleness is None or self._updates_per_row == 0:
            return self.chunk
        return max(1, min(self.chunk, int(self.max_staleness / (2 * self._updates_per_row))))

    def _take(self, number: int, part: Part) -> Chunk | None:
        """Wait for a chunk; None: the collector was lost and has been replaced."""
        remote = part.remote
        assert remote is not None
        part.asked = False
        waited = 0.0
        try:
            while not remote.ready(POLL_S):
                waited += POLL_S
                if waited >= self.timeout:
                    raise TimeoutError(f"did not answer for {self.timeout:g} s")
                if STOP.overdue():
                    raise EnvironmentFaultError(
                        f"collector {number} did not answer within the grace time of the request to stop"
                    )
            chunk: Chunk = remote.result()
        except (ConnectionError, TimeoutError) as error:
            self._replace(number, part, str(error))
            return None
        self.environment.restarts += chunk.restarts - part.env_restarts
        part.env_restarts = chunk.restarts
        return chunk

    # ---------------------------------------------------------------- starting and replacing

    def _start(self, number: int, part: Part) -> None:
        part.incarnation += 1
        part.remote = self.start(number, part.envs, part.incarnation)
        part.asked, part.chunk, part.position, part.env_restarts = False, None, 0, 0

    def _replace(self, number: int, part: Part, why: str) -> None:
        part.losses += 1
        self.lost += 1
        if part.losses > self.restarts:
            raise EnvironmentFaultError(
                f"launch.restarts: collector {number} was lost {part.losses} times in a row before it sent a row: {why}"
            )
        self.say(f"collector {number} was lost and is replaced; its open episodes end: {why}")
        if part.remote is not None:
            part.remote.kill()
        self._start(number, part)

    def close(self) -> None:
        for part in self.parts:
            if part.remote is not None:
                part.remote.kill()
                part.remote = None

    # ---------------------------------------------------------------- checkpoints

    def get_state(self) -> dict[str, Any]:
        """Return what a resumed run needs: its collectors begin new episodes with seeds of their own."""
        return {
            "incarnations": [part.incarnation for part in self.parts],
            "tracker": self.tracker.get_state(),
            "lost": self.lost,
            "dropped": self.dropped,
        }

    def set_state(self, state: Mapping[str, Any]) -> list[int]:
        """Continue from a checkpoint, also of another number of collectors; all environments start new episodes."""
        self.tracker.set_state(state["tracker"])
        if len(self.tracker.returns) != self.environment.num_envs:
            raise CheckpointError(
                f"environment.num_envs={self.environment.num_envs}: the checkpoint has "
                f"{len(self.tracker.returns)} environments; set environment.num_envs={len(self.tracker.returns)}"
            )
        before = max(state.get("incarnations", [0]))
        self.lost, self.dropped = int(state.get("lost", 0)), int(state.get("dropped", 0))
        for number, part in enumerate(self.parts):
            if part.remote is not None:
                part.remote.kill()
            part.incarnation = before
            self._start(number, part)
        self._published = None
        self.say("the collectors start new episodes: those that were open ended with the stopped run")
        return []


def _joined(pieces: Sequence[Any]) -> Any:
    """Join the rows of all collectors; copied, since arrays of the cluster's store cannot be written."""
    if isinstance(pieces[0], torch.Tensor):
        return torch.cat(list(pieces))
    return np.concatenate(pieces)


def stacked(steps: Sequence[Any]) -> Any:
    """Stack values of T steps: an array, or a tensor where NumPy lacks the type (bfloat16)."""
    if isinstance(steps[0], torch.Tensor) and steps[0].dtype is torch.bfloat16:
        return torch.stack(list(steps))
    return np.stack([np.asarray(step) for step in steps])
