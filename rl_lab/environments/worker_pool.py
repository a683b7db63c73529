"""`WorkerPool` sends commands to the workers of a vector environment and restarts failed environments.

When a worker process dies or does not answer within the timeout:

1. The pool kills the process and starts a new one, which creates its environments at their next reset. (If an
   environment raises or returns an unusable row, its process stays and only this environment is created
   again.)
2. The open episode of each affected environment ends with a row that the pool writes: the last observation
   repeated, reward 0, truncated.
3. The next step resets these environments with the seed of their next episode. If a reset fails, the pool
   tries the seed of the episode after it, until a reset succeeds or `RestartLimit` is exceeded.
4. After too many restarts the current step is still completed, so that a checkpoint can be saved; the next
   call raises EnvironmentFaultError. A failure in the very first reset raises at once.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from rl_lab.environments.env_runner import (
    IDLE,
    Reply,
    Segment,
    StepArrays,
    episode_seed,
    shared_memory,
)
from rl_lab.environments.faults import FaultLog, RestartLimit, last_line
from rl_lab.environments.workers import (
    AnyWorker,
    DistantWorker,
    LocalWorker,
    ProcessWorker,
    WorkerLost,
    start_context,
    worker_name,
)
from rl_lab.errors import LabError
from rl_lab.records import Spec
from rl_lab.utils.stopping import STOP

if TYPE_CHECKING:
    from rl_lab.environments.remote_worker import StartRemote

Infos = dict[str, Any]


class WorkerPool:
    """N environments in `num_workers` processes (0: in this process), with their shared arrays and fault log.

    options:  `all_infos` and `render`, for `EnvRunner`
    timeout:  maximum seconds of one environment call in a worker process; None: no limit
    restarts: how many restarts are allowed before the run stops
    remote:   starts objects in processes elsewhere; the workers are then such objects (see remote_worker.py)
    lanes:    the factory's environments are in other processes already, one for each worker (see lanes.py)
    """

    def __init__(
        self,
        factory: Callable[[bool], gymnasium.Env],
        num_envs: int,
        *,
        spec: Spec,
        num_workers: int,
        seed: int,
        options: dict[str, Any],
        timeout: float | None,
        restarts: RestartLimit,
        remote: StartRemote | None = None,
        lanes: bool = False,
    ) -> None:
        self.num_envs = num_envs
        self._remote = remote
        self._lanes = lanes and num_workers > 0
        self.timeout = timeout
        self.faults = FaultLog(restarts)
        self.trusted = False  # True: restart environments that fail in the first reset, too
        self.side_failures: list[str] = []  # tracebacks of videos that failed, until they are taken
        self.reset_pending: set[int] = set()  # environments whose reset failed when the limit was exceeded
        self.seed = seed
        self.episodes = np.zeros(num_envs, np.int64)  # number of each environment's current episode
        self.scheduled_seeds: dict[int, int] = {}  # seeds for the next episodes; IDLE: start none
        self._factory = factory
        self._spec = spec
        self._options = options
        self._memory: Any = None
        if num_workers and remote is None and not self._lanes:
            self._memory = shared_memory(start_context(), spec, num_envs)
        self.arrays = StepArrays(spec, num_envs, self._memory)
        self.workers: list[AnyWorker] = []
        self.close = weakref.finalize(self, _close_workers, self.workers, os.getpid())  # at exit too
        for indices in np.array_split(np.arange(num_envs), num_workers or 1):
            self.workers.append(self._make_worker(indices.tolist()))
        for worker in self.workers:
            if not isinstance(worker, LocalWorker):
                self._wait_until_built(worker)

    def _make_worker(self, indices: Sequence[int], *, lazy: bool = False) -> AnyWorker:
        options = {**self._options, "lazy": lazy}
        if self._remote is not None:
            from rl_lab.environments.remote_worker import RemoteWorker

            return RemoteWorker(
                self._remote,
                self._factory,
                indices,
                self.arrays,
                options,
                spec=self._spec,
                num_envs=self.num_envs,
            )
        if self._lanes:
            from rl_lab.environments.lanes import LaneWorker

            factory: Any = self._factory
            return LaneWorker(factory.in_lane(indices[0]), indices, self.arrays, options)
        if self._memory is None:
            return LocalWorker(self._factory, indices, self.arrays, options)
        return ProcessWorker(
            self._factory,
            indices,
            self.arrays,
            options,
            spec=self._spec,
            num_envs=self.num_envs,
            memory=self._memory,
        )

    def _wait_until_built(self, worker: DistantWorker) -> None:
        try:
            worker.wait_built(self.timeout)
        except WorkerLost as lost:
            self.close()
            raise LabError(f"{lost.who} {lost.what} during its construction. {lost.advice}") from None
        except LabError:
            self.close()
            raise

    # ---------------------------------------------------------------- commands

    def send_step(self, ended: np.ndarray) -> None:
        """Send a step to all environments; those in `ended` (N,) bool start their next episode instead."""
        restarting = np.flatnonzero(ended)
        if restarting.size:
            self.episodes[restarting] += 1
            self._write_seeds(restarting)
        self.arrays.swap()
        for worker in self.workers:
            worker.send_step()

    def receive_step(self, ended: np.ndarray) -> Infos:
        """Return the infos; `closed` (index -> reason) lists the episodes that a failure ended."""
        return self._gather(self.workers, ended)

    def reset(self, envs: Sequence[int], options: dict[str, Any] | None = None) -> Infos:
        """Reset these environments fully, to the episodes numbered in `episodes`."""
        resetting = np.zeros(self.num_envs, bool)
        resetting[envs] = True
        for env in envs:
            self.scheduled_seeds.pop(env, None)
        received = set(range(self.num_envs)) - set(envs)
        return self._gather(self._send_reset(envs, options), resetting, options, received)

    def replay(self, histories: Mapping[int, Sequence[Segment]]) -> set[int]:
        """Replay open games (see `EnvRunner.replay`); return the environments that diverged."""
        workers = self._workers_of(histories)
        for worker in workers:
            worker.send("replay", {env: histories[env] for env in worker.indices if env in histories})
        failed: set[int] = set()
        for worker in workers:
            reply, faults = self._receive(worker)
            failed |= set(reply.get("failed", ())) | faults.keys()
        if self.faults.failure:
            raise self.faults.failure
        return failed & histories.keys()

    def render(self) -> Any:
        """Return a frame of environment 0, or None if it has no open episode."""
        return self._ask("render").get("frame")

    def action_names(self) -> list[str]:
        """Return the names of the actions that environment 0 gives, or []."""
        return list(self._ask("action_names").get("names", []))

    def _ask(self, command: str) -> Reply:
        worker = self.workers[0]
        worker.send(command)
        try:
            return worker.receive(self.timeout)
        except WorkerLost as lost:
            self.close()
            raise LabError(f"{lost.who} {lost.what} during {command}(). {lost.advice}") from None

    def _write_seeds(self, envs: Any) -> None:
        for env in envs:
            seed = self.scheduled_seeds.get(int(env))
            if seed is None:
                seed = episode_seed(self.seed, int(env), int(self.episodes[env]))
            elif seed != IDLE:
                del self.scheduled_seeds[int(env)]
            self.arrays.seed[env] = seed

    def _send_reset(self, envs: Sequence[int], options: dict[str, Any] | None) -> list[AnyWorker]:
        self._write_seeds(envs)
        self.arrays.reset_continues[envs] = False
        workers = self._workers_of(envs)
        for worker in workers:
            worker.send("reset", [env for env in worker.indices if env in envs], options)
        return workers

    def _workers_of(self, envs: Any) -> list[AnyWorker]:
        return [worker for worker in self.workers if any(env in envs for env in worker.indices)]

    # ---------------------------------------------------------------- replies

    def _gather(
        self,
        workers: Sequence[AnyWorker],
        resetting: np.ndarray,
        options: dict[str, Any] | None = None,
        received: Collection[int] = (),
    ) -> Infos:
        """Wait for one reply of each worker and return the merged infos.

        resetting: (N,) bool, environments whose reply is the first row of an episode
        received:  environments whose row has already arrived; if they fail now, that row becomes truncated
        """
        infos: Infos = {}
        arrays = self.arrays
        for attempt in itertools.count(1):
            retry: list[int] = []
            for worker in tuple(workers):
                reply, faults = self._receive(worker, resetting, attempt)
                for key, value in reply.items():
                    infos.setdefault(key, {}).update(value)
                for env, why in faults.items():
                    if resetting[env]:
                        retry += [] if arrays.seed[env] == IDLE else [env]
                        continue
                    if env not in received:
                        self._write_placeholder_row(env, truncated=True)
                    elif arrays.terminated[env] or arrays.truncated[env]:
                        continue
                    else:  # its process died during the retry of another environment
                        arrays.truncated[env] = True
                    infos.setdefault("closed", {})[env] = why
            if not retry:
                break
            if self.faults.failure:
                for env in retry:
                    self._write_placeholder_row(env, truncated=False)
                self.reset_pending |= set(retry)
                break
            received = set(range(self.num_envs))
            self.episodes[retry] += 1
            workers = self._send_reset(retry, options)
        return infos

    def _receive(
        self, worker: AnyWorker, resetting: np.ndarray | None = None, attempt: int = 1
    ) -> tuple[Reply, dict[int, str]]:
        """Wait for a worker; return its reply and, for each environment that failed, index -> reason."""
        try:
            reply = worker.receive(self.timeout)
        except WorkerLost as lost:
            assert not isinstance(worker, LocalWorker)
            worker.kill()
            consecutive = attempt if resetting is not None and resetting[list(worker.indices)].all() else 0
            self._record_fault(
                lost.kind, lost.who, lost.what, f". {lost.advice}" if lost.advice else "", consecutive
            )
            if not self.faults.failure:
                self._replace(worker)
            return {}, dict.fromkeys(worker.indices, lost.what)
        except LabError:
            self.close()
            raise
        self.side_failures += reply.pop("side", {}).values()
        ended: dict[int, str] = {}
        tracebacks: dict[int, str] = reply.pop("faults", {})
        faults = {env: f"raised {last_line(text)}" for env, text in tracebacks.items()}
        for env, text in reply.pop("unusable", {}).items():
            faults[env] = f"returned an unusable row: {text}"
        for kind, what, advice, envs in reply.pop("lost", {}).values():
            consecutive = attempt if resetting is not None and resetting[envs].all() else 0
            self._record_fault(kind, worker_name(envs), what, f". {advice}" if advice else "", consecutive)
            ended.update(dict.fromkeys(envs, what))
        for env, what in faults.items():
            consecutive = attempt if resetting is not None and resetting[env] else 0
            detail = f"\n\n{tracebacks[env].strip()}" if env in tracebacks else ""
            self._record_fault("raised", f"environment {env}", what, detail, consecutive)
        return reply, {**faults, **ended}

    def _replace(self, worker: DistantWorker) -> None:
        try:
            self.workers[self.workers.index(worker)] = self._make_worker(worker.indices, lazy=True)
        except (OSError, EOFError) as error:  # out of memory, or too many processes
            self.faults.stop(
                f"environments {list(worker.indices)}: a new worker process cannot be started: {error}"
            )

    def _record_fault(self, kind: str, who: str, what: str, detail: str, consecutive: int) -> None:
        if consecutive and not self.trusted:
            self.close()  # nothing is lost yet, and the environment itself is most likely broken
            raise LabError(f"{who} {what}{detail}")
        if STOP.overdue():  # a restart would take time that the process may not have
            self.faults.give_up(kind, who, what, detail)
        else:
            self.faults.record(kind, who, what, detail=detail, consecutive=consecutive)

    def _write_placeholder_row(self, env: int, *, truncated: bool) -> None:
        arrays = self.arrays
        arrays.repeat(env)
        arrays.reward[env] = 0.0
        arrays.terminated[env] = False
        arrays.truncated[env] = truncated
        arrays.reset_continues[env] = False


def _close_workers(workers: list[AnyWorker], owner: int) -> None:
    if os.getpid() != owner:  # a forked child must not stop the trainer's workers
        return
    for worker in workers:
        worker.close()
    for worker in workers:
        if not isinstance(worker, LocalWorker):
            worker.join()
    workers.clear()
