"""The workers of a vector environment: asked together, and made again when they fail.

An environment that fails (it raised, gave a row that cannot be used, its process died or does not answer) loses its open
episode. The row that never came is written here: the last observation once more, reward 0, truncated. An environment
that fails to begin an episode tries the next one's seed, until it begins or too much has failed.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import select
import signal
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import gymnasium
import numpy as np

from rl_lab.environments.env_runner import (
    DONE,
    REST,
    STEP,
    EnvironmentFailure,
    EnvRunner,
    Reply,
    Segment,
    StepArrays,
    episode_seed,
    shared_memory,
    worker_main,
)
from rl_lab.environments.faults import FaultLog, RestartLimit, last_line
from rl_lab.errors import LabError
from rl_lab.records import Spec

# --------------------
# The trainer's side of an `EnvRunner`: one here, or one in a worker process. Both are sent to, then asked.


PACKAGE_PARENT = Path(__file__).parents[2]
GRACE_S = 5.0  # for environments to close in, before their process is killed
GLANCE_S = 0.05  # an answer that takes longer is watched for progress
FIRST_PATIENCE = 5  # times the usual timeout: a process starts, imports and makes its environments
_STEP_COMMAND = ("step", ())


class WorkerLost(Exception):
    """A worker process is gone, or must go.

    kind: "died" or "hung"; what: "was killed by SIGKILL", for a sentence that begins with who; advice: more of it
    """

    def __init__(self, kind: str, who: str, what: str, advice: str = "") -> None:
        super().__init__(kind, who, what)
        self.kind = kind
        self.who = who
        self.what = what
        self.advice = advice


class Worker(Protocol):
    """Some of the N environments. Commands are methods of `EnvRunner`; every `send` is followed by a `receive`."""

    indices: Sequence[int]

    def send(self, command: str, *args: Any) -> None: ...
    def send_step(self) -> None: ...
    def receive(self, timeout: float | None = None) -> Reply: ...
    def close(self) -> None: ...


class LocalWorker:
    """Environments in this process; the work is done when the answer is asked for. No timeout can stop it."""

    def __init__(
        self,
        factory: Callable[[bool], gymnasium.Env],
        indices: Sequence[int],
        arrays: StepArrays,
        options: dict[str, Any],
    ) -> None:
        self.indices = indices
        self._command: tuple[str, tuple[Any, ...]] = _STEP_COMMAND
        try:
            self._runner = EnvRunner(factory, indices, arrays, **options)
        except EnvironmentFailure as failure:
            raise failure_message(failure.index, failure.text) from failure.__cause__

    def send(self, command: str, *args: Any) -> None:
        self._command = (command, args)

    def send_step(self) -> None:
        self._command = _STEP_COMMAND

    def receive(self, timeout: float | None = None) -> Reply:
        command, args = self._command
        try:
            return self._runner.call(command, *args)
        except EnvironmentFailure as failure:
            raise failure_message(failure.index, failure.text) from failure.__cause__

    def close(self) -> None:
        self._runner.close()


class ProcessWorker:
    """Environments in a process of their own.

    options: keywords of `EnvRunner`. Unless they are lazy, `built` must be called before the first command.
    """

    def __init__(
        self,
        factory: Callable[[bool], gymnasium.Env],
        indices: Sequence[int],
        arrays: StepArrays,
        options: dict[str, Any],
        *,
        spec: Spec,
        num_envs: int,
        memory: Any,
    ) -> None:
        self.indices = indices
        payload = _pickled((factory, list(indices), options))
        context = start_context()
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=worker_main,
            args=(theirs, payload, memory, spec, num_envs, dict(os.environ)),
            name=f"env-worker-{indices[0]}",
            daemon=True,
        )
        with _apart_from_main():
            self.process.start()
        theirs.close()  # ours is now the only other end: a death on either side is seen at once on the other
        self._ticks = arrays.ticks[indices[0] : indices[-1] + 1]
        self._built = False
        self._young = True  # nothing but the building has been answered
        self._wait = _waiter(self.connection)

    def send(self, command: str, *args: Any) -> None:
        self._send(pickle.dumps((command, args)))

    def send_step(self) -> None:
        self._send(STEP)

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # a dead worker is noticed when its answer is awaited
            self.connection.send_bytes(message)

    def built(self, timeout: float | None = None) -> None:
        """Wait until the environments are made."""
        self._built = True
        self._take(timeout)

    def receive(self, timeout: float | None = None) -> Reply:
        """The answer to the last `send`.

        WorkerLost when the process died, or when no call of an environment came back for `timeout` seconds (several
        times as long for the first answer); LabError for what an environment raised and could not report as a fault.
        """
        if not self._built:
            self.built(timeout)
        reply = self._take(timeout)
        self._young = False
        return reply

    def _take(self, timeout: float | None) -> Reply:
        if timeout is not None:
            self._await(timeout * FIRST_PATIENCE if self._young else timeout)
        try:
            message = self.connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise self._death() from error
        if message == DONE:
            return {}
        reply: Reply = pickle.loads(message)
        if "error" in reply:
            raise failure_message(*reply["error"])
        return reply

    def _await(self, timeout: float) -> None:
        """Return when there is something to read; WorkerLost when nothing moves for that long."""
        glance = min(GLANCE_S, timeout)
        if self._wait(glance):
            return
        ticks = self._ticks.tolist()
        while not self._wait(timeout - glance):
            glance, before, ticks = 0.0, ticks, self._ticks.tolist()
            if ticks == before:
                raise WorkerLost("hung", self._names(), f"gave no answer for {timeout:g} s")

    def close(self) -> None:
        """Close the pipe: the worker closes its environments and leaves, after the step it may be in."""
        self.connection.close()

    def join(self) -> None:
        """Wait until the process is gone; kill it when it does not go."""
        self.process.join(GRACE_S)
        if self.process.is_alive():
            self.kill()

    def kill(self) -> None:
        """End it at once: nothing is written to the shared memory after this."""
        self.process.kill()
        self.process.join()
        self.connection.close()

    def _names(self) -> str:
        first, last = self.indices[0], self.indices[-1]
        return f"environment {first}" if first == last else f"the worker of environments {first} to {last}"

    def _death(self) -> WorkerLost:
        self.process.join(1.0)
        code = self.process.exitcode
        if code is not None and code < 0:
            what = f"was killed by {_signal_name(-code)}"
        else:
            what = "closed its pipe" if code is None else f"ended with exit code {code}"
        advice = (
            "If nobody sent that signal, memory may have run out: lower environment.num_envs."
            if code == -signal.SIGKILL
            else "environment.workers=0 runs it in the trainer's process, to see more."
        )
        return WorkerLost("died", self._names(), what, advice)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _waiter(connection: Any) -> Callable[[float], bool]:
    """Seconds -> whether something can be read. `Connection.poll` builds a selector for every call."""
    if not hasattr(select, "poll"):
        return lambda seconds: bool(connection.poll(seconds))
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return lambda seconds: bool(poll.poll(seconds * 1000.0))


def failure_message(index: int, text: str) -> LabError:
    """The error of an environment as one that names it."""
    where = f"environment {index}" if index >= 0 else "an environment worker"
    return LabError(f"{where} raised: {text.strip().splitlines()[-1]}\n\n{text.strip()}")


def start_context() -> Any:
    """How worker processes start: never by forking this one, which may hold CUDA and threads.

    The fork server imports Gymnasium once and then forks; where there is none, each worker starts afresh.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rl_lab.environments.preload"])
    return context


def _pickled(value: Any) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        raise LabError(
            f"this environment factory cannot be sent to worker processes ({error}): give an import path such as "
            "'my_module:make_env', or set workers=0"
        ) from error


@contextlib.contextmanager
def _apart_from_main() -> Iterator[None]:
    """Start workers with this package but without the user's script.

    multiprocessing would run the script again in each worker: with it torch, and everything that no
    `if __name__ == "__main__"` guards. What the environments need of it travels by value. The fork server of
    older Pythons looks for modules in its own search path only, which may lack ours.
    """
    main, search_path = sys.modules["__main__"], os.environ.get("PYTHONPATH")
    sys.modules["__main__"] = types.ModuleType("__main__")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(PACKAGE_PARENT), *([search_path] if search_path else [])])
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        if search_path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = search_path


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
