"""The workers of a vector environment: asked together, and made again when they fail.

An environment that fails (it raised, gave a row that cannot be used, its process died or does not answer) loses its open
episode. The row that never came is written here: the last observation once more, reward 0, truncated. An environment
that fails to begin an episode tries the next one's seed, until it begins or too much has failed.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from rl_lab.environments.faults import FaultLog, RestartLimit, last_line
from rl_lab.environments.shared import StepArrays, shared_memory
from rl_lab.environments.worker import REST, Reply, Segment, episode_seed
from rl_lab.environments.workers import LocalWorker, ProcessWorker, Worker, WorkerLost, start_context
from rl_lab.errors import LabError
from rl_lab.records import Spec

Infos = dict[str, Any]


class Crew:
    """N environments over `num_workers` processes (0: in this one), their shared arrays and their failures.

    options: `all_infos` and `render`, for `EnvRunner`
    timeout: seconds that one call of an environment in a worker process may take; None: any time
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
    ) -> None:
        self.num_envs = num_envs
        self.timeout = timeout
        self.faults = FaultLog(restarts)
        self.trusted = (
            False  # it has worked before: a failure at the very first reset is borne like any other
        )
        self.unbegun: set[int] = set()  # whose reset was due when too much had failed
        self.seed = seed
        self.episodes = np.zeros(num_envs, np.int64)  # number of the episode that each environment is in
        self.chosen: dict[int, int] = {}  # seeds asked for, of the next episodes; REST: none begins
        self._factory = factory
        self._spec = spec
        self._options = options
        self._memory = shared_memory(start_context(), spec, num_envs) if num_workers else None
        self.arrays = StepArrays(spec, num_envs, self._memory)
        self.workers: list[Worker] = []
        self.close = weakref.finalize(self, _close_workers, self.workers, os.getpid())  # at exit too
        for share in np.array_split(np.arange(num_envs), num_workers or 1):
            self.workers.append(self._make_worker(share.tolist()))
        for worker in self.workers:
            if isinstance(worker, ProcessWorker):
                self._wait_until_built(worker)

    def _make_worker(self, share: Sequence[int], *, lazy: bool = False) -> Worker:
        options = {**self._options, "lazy": lazy}
        if self._memory is None:
            return LocalWorker(self._factory, share, self.arrays, options)
        return ProcessWorker(
            self._factory,
            share,
            self.arrays,
            options,
            spec=self._spec,
            num_envs=self.num_envs,
            memory=self._memory,
        )

    def _wait_until_built(self, worker: ProcessWorker) -> None:
        try:
            worker.built(self.timeout)
        except WorkerLost as lost:
            self.close()
            raise LabError(f"{lost.who} {lost.what} while it was made. {lost.advice}") from None
        except LabError:
            self.close()
            raise

    # ---------------------------------------------------------------- what they are asked to do

    def send_step(self, ended: np.ndarray) -> None:
        """Let every environment step; those of `ended` (N,) bool begin their next episode instead."""
        following = np.flatnonzero(ended)
        if following.size:
            self.episodes[following] += 1
            self._write_seeds(following)
        self.arrays.turn()
        for worker in self.workers:
            worker.send_step()

    def take_step(self, ended: np.ndarray) -> Infos:
        """The answers to `send_step`. `closed` (index -> why) names the episodes that a failure ended."""
        return self._gather(self.workers, ended)

    def begin(self, envs: Sequence[int], options: dict[str, Any] | None = None) -> Infos:
        """True beginnings of the episodes numbered in `episodes`."""
        beginning = np.zeros(self.num_envs, bool)
        beginning[envs] = True
        for env in envs:
            self.chosen.pop(env, None)
        whole = set(range(self.num_envs)) - set(envs)
        return self._gather(self._send_reset(envs, options), beginning, options, whole)

    def replay(self, plans: Mapping[int, Sequence[Segment]]) -> set[int]:
        """Go through open games again (see `EnvRunner.replay`); returns those that went another way."""
        asked = self._those_of(plans)
        for worker in asked:
            worker.send("replay", {env: plans[env] for env in worker.indices if env in plans})
        failed: set[int] = set()
        for worker in asked:
            reply, faults = self._receive(worker)
            failed |= set(reply.get("failed", ())) | faults.keys()
        if self.faults.failure:
            raise self.faults.failure
        return failed & plans.keys()

    def render(self) -> Any:
        """A frame of environment 0; None when it has no open episode."""
        worker = self.workers[0]
        worker.send("render")
        try:
            return worker.receive(self.timeout).get("frame")
        except WorkerLost as lost:
            self.close()
            raise LabError(f"{lost.who} {lost.what} while it rendered. {lost.advice}") from None

    def _write_seeds(self, envs: Any) -> None:
        for env in envs:
            seed = self.chosen.get(int(env))
            if seed is None:
                seed = episode_seed(self.seed, int(env), int(self.episodes[env]))
            elif seed != REST:
                del self.chosen[int(env)]
            self.arrays.seed[env] = seed

    def _send_reset(self, envs: Sequence[int], options: dict[str, Any] | None) -> list[Worker]:
        self._write_seeds(envs)
        self.arrays.goes_on[envs] = False
        asked = self._those_of(envs)
        for worker in asked:
            worker.send("reset", [env for env in worker.indices if env in envs], options)
        return asked

    def _those_of(self, envs: Any) -> list[Worker]:
        return [worker for worker in self.workers if any(env in envs for env in worker.indices)]

    # ---------------------------------------------------------------- what they answer

    def _gather(
        self,
        asked: Sequence[Worker],
        beginning: np.ndarray,
        options: dict[str, Any] | None = None,
        whole: Collection[int] = (),
    ) -> Infos:
        """One answer of each worker asked, merged by environment.

        beginning: (N,) bool, environments whose answer is the first row of an episode
        whole:     those whose row is there already: if they fail, it becomes the end of their episode
        """
        infos: Infos = {}
        arrays = self.arrays
        for attempt in itertools.count(1):
            again: list[int] = []
            for worker in tuple(asked):
                reply, faults = self._receive(worker, beginning, attempt)
                for key, value in reply.items():
                    infos.setdefault(key, {}).update(value)
                for env, why in faults.items():
                    if beginning[env]:
                        again += [] if arrays.seed[env] == REST else [env]
                        continue
                    if env not in whole:
                        self._write_lost_row(env, truncated=True)
                    elif arrays.terminated[env] or arrays.truncated[env]:
                        continue
                    else:  # its process went down with another's new attempt
                        arrays.truncated[env] = True
                    infos.setdefault("closed", {})[env] = why
            if not again:
                break
            if self.faults.failure:
                for env in again:
                    self._write_lost_row(env, truncated=False)
                self.unbegun |= set(again)
                break
            whole = set(range(self.num_envs))
            self.episodes[again] += 1
            asked = self._send_reset(again, options)
        return infos

    def _receive(
        self, worker: Worker, beginning: np.ndarray | None = None, attempt: int = 1
    ) -> tuple[Reply, dict[int, str]]:
        """The one place that waits for a worker: its answer, and index -> why of environments that failed."""
        try:
            reply = worker.receive(self.timeout)
        except WorkerLost as lost:
            assert isinstance(worker, ProcessWorker)
            worker.kill()
            in_a_row = attempt if beginning is not None and beginning[list(worker.indices)].all() else 0
            self._note(lost.kind, lost.who, lost.what, f". {lost.advice}" if lost.advice else "", in_a_row)
            if not self.faults.failure:
                self._replace(worker)
            return {}, dict.fromkeys(worker.indices, lost.what)
        except LabError:
            self.close()
            raise
        raised: dict[int, str] = reply.pop("faults", {})
        faults = {env: f"raised {last_line(text)}" for env, text in raised.items()}
        for env, text in reply.pop("unusable", {}).items():
            faults[env] = f"gave an unusable row: {text}"
        for env, what in faults.items():
            in_a_row = attempt if beginning is not None and beginning[env] else 0
            detail = f"\n\n{raised[env].strip()}" if env in raised else ""
            self._note("raised", f"environment {env}", what, detail, in_a_row)
        return reply, faults

    def _replace(self, worker: ProcessWorker) -> None:
        try:
            self.workers[self.workers.index(worker)] = self._make_worker(worker.indices, lazy=True)
        except (OSError, EOFError) as error:  # no memory, or no process, to be had
            self.faults.stop(
                f"a new process for environments {list(worker.indices)} cannot be started: {error}"
            )

    def _note(self, kind: str, who: str, what: str, detail: str, in_a_row: int) -> None:
        if in_a_row and not self.trusted:
            self.close()  # nothing is lost yet, and most likely the environment itself is wrong
            raise LabError(f"{who} {what}{detail}")
        self.faults.note(kind, who, what, detail=detail, in_a_row=in_a_row)

    def _write_lost_row(self, env: int, *, truncated: bool) -> None:
        arrays = self.arrays
        arrays.repeat(env)
        arrays.reward[env] = 0.0
        arrays.terminated[env] = False
        arrays.truncated[env] = truncated
        arrays.goes_on[env] = False


def _close_workers(workers: list[Worker], owner: int) -> None:
    if os.getpid() != owner:  # a fork of the trainer must not end the trainer's workers
        return
    for worker in workers:
        worker.close()
    for worker in workers:
        if isinstance(worker, ProcessWorker):
            worker.join()
    workers.clear()
