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

import contextlib
import itertools
import math
import multiprocessing
import os
import pickle
import select
import signal
import sys
import tempfile
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import gymnasium
import numpy as np

from rl_lab.environments.env_runner import (
    CLOSE_TIMEOUT_S,
    DONE,
    IDLE,
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
from rl_lab.environments.faults import FaultLog, RestartLimit, last_line, signal_name
from rl_lab.errors import LabError
from rl_lab.records import Spec
from rl_lab.utils.files import ensure_current_folder
from rl_lab.utils.stopping import GRACE_S, STOP

if TYPE_CHECKING:
    from rl_lab.environments.remote_worker import StartRemote

PACKAGE_PARENT = Path(__file__).parents[2]
FIRST_POLL_S = 0.05  # after this wait the progress of the worker is monitored
POLL_S = 0.5  # between two looks at its progress
FIRST_REPLY_FACTOR = 5  # times the timeout: the process starts, imports and creates its environments
_STEP_COMMAND = ("step", ())

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


# --- Workers ---------------------------------------------------------------------------------------------


class WorkerLost(Exception):
    """A worker process died or hangs.

    kind:      "died" or "hung"
    who, what: subject and predicate of the message ("environment 2", "was killed by SIGKILL")
    advice:    an additional sentence
    """

    def __init__(self, kind: str, who: str, what: str, advice: str = "") -> None:
        super().__init__(kind, who, what)
        self.kind = kind
        self.who = who
        self.what = what
        self.advice = advice


class Worker(Protocol):
    """Handle to an `EnvRunner` with some of the N environments, in this process or in another one.

    Commands are methods of `EnvRunner`; every `send` is followed by a `receive`.
    """

    indices: Sequence[int]

    def send(self, command: str, *args: Any) -> None: ...
    def send_step(self) -> None: ...
    def receive(self, timeout: float | None = None) -> Reply: ...
    def close(self) -> None: ...


class DistantWorker(Worker, Protocol):
    """A worker that can be lost: in another process, here or on another machine."""

    def wait_built(self, timeout: float | None = None) -> None: ...
    def join(self) -> None: ...
    def kill(self) -> None: ...


class LocalWorker:
    """Environments in this process. `receive` runs the command; the timeout is ignored."""

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
        self._runner.begin_steps()

    def receive(self, timeout: float | None = None) -> Reply:
        command, args = self._command
        try:
            return self._runner.call(command, *args)
        except EnvironmentFailure as failure:
            raise failure_message(failure.index, failure.text) from failure.__cause__

    def close(self) -> None:
        self._runner.close()


class ProcessWorker:
    """Environments in a separate process.

    options: keyword arguments of `EnvRunner`; unless `lazy` is set, call `wait_built` before the first
             command
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
        payload = pickled((factory, list(indices), options))
        context = start_context()
        self.connection, worker_end = context.Pipe()
        self.process = context.Process(
            target=worker_main,
            args=(worker_end, payload, memory, spec, num_envs, dict(os.environ)),
            name=f"env-worker-{indices[0]}",
            daemon=True,
        )
        with _start_conditions():
            self.process.start()
        worker_end.close()  # with one open end per process, each side sees the other's death as EOF
        self._call_counts = arrays.call_counts[indices[0] : indices[-1] + 1]
        self._is_built = False
        self._before_first_reply = True  # only the construction has been acknowledged
        self._poll = _poll_function(self.connection)

    @property
    def pid(self) -> int | None:
        pid: int | None = self.process.pid
        return pid

    def send(self, command: str, *args: Any) -> None:
        self._send(pickle.dumps((command, args)))

    def send_step(self) -> None:
        self._send(STEP)

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # `receive` detects and reports a dead worker
            self.connection.send_bytes(message)

    def wait_built(self, timeout: float | None = None) -> None:
        """Wait until the environments are created."""
        self._is_built = True
        self._receive_message(timeout)

    def receive(self, timeout: float | None = None) -> Reply:
        """Return the reply to the last `send`.

        Raises WorkerLost if the process died, or if no environment call returned for `timeout` seconds
        (`FIRST_REPLY_FACTOR` times as long for the first reply), and LabError if an environment raised an
        exception that is not reported as a fault.
        """
        if not self._is_built:
            self.wait_built(timeout)
        reply = self._receive_message(timeout)
        self._before_first_reply = False
        return reply

    def _receive_message(self, timeout: float | None) -> Reply:
        if timeout is not None and self._before_first_reply:
            timeout *= FIRST_REPLY_FACTOR
        self._wait_for_message(timeout)
        try:
            message = self.connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise self._lost() from error
        if message == DONE:
            return {}
        reply: Reply = pickle.loads(message)
        if "error" in reply:
            raise failure_message(*reply["error"])
        return reply

    def _wait_for_message(self, timeout: float | None) -> None:
        """Wait until a message can be read; raise WorkerLost if no call returns within `timeout`.

        After a request to stop, a worker is waited for during the grace time only.
        """
        limit = math.inf if timeout is None else timeout
        waited = min(FIRST_POLL_S, limit)
        if self._poll(waited):
            return
        counts = self._call_counts.tolist()
        # The waits are summed, not read from a clock: time in which this process was suspended does not count.
        while not self._poll(wait := min(POLL_S, max(limit - waited, 0.0))):
            waited += wait
            before, counts = counts, self._call_counts.tolist()
            if counts != before:
                waited = 0.0
            elif waited >= limit:
                raise WorkerLost("hung", self._name(), f"did not answer for {limit:g} s")
            elif STOP.overdue():
                raise WorkerLost(
                    "hung", self._name(), f"did not answer within {GRACE_S:g} s of the request to stop"
                )

    def close(self) -> None:
        """Close the pipe; the worker finishes its current step, closes its environments and exits."""
        self.connection.close()

    def join(self) -> None:
        """Wait for the process to exit; kill it after `CLOSE_TIMEOUT_S`."""
        self.process.join(CLOSE_TIMEOUT_S)
        if self.process.is_alive():
            self.kill()

    def kill(self) -> None:
        """Kill the process; it does not write to the shared memory after this returns."""
        self.process.kill()
        self.process.join()
        self.connection.close()

    def _name(self) -> str:
        return worker_name(self.indices)

    def _lost(self) -> WorkerLost:
        self.process.join(1.0)
        code = self.process.exitcode
        if code is not None and code < 0:
            what = f"was killed by {signal_name(-code)}"
        else:
            what = "closed its pipe" if code is None else f"ended with exit code {code}"
        advice = (
            "If nobody sent that signal, the machine may be out of memory: lower environment.num_envs."
            if code == -signal.SIGKILL
            else "Set environment.workers=0 to debug it in the trainer's process."
        )
        return WorkerLost("died", self._name(), what, advice)


AnyWorker = LocalWorker | DistantWorker


def worker_name(indices: Sequence[int]) -> str:
    first, last = indices[0], indices[-1]
    return f"environment {first}" if first == last else f"the worker of environments {first} to {last}"


def _poll_function(connection: Any) -> Callable[[float], bool]:
    """Return a function: timeout in seconds -> whether a message can be read.

    It is faster than `Connection.poll`, which creates a selector in every call.
    """
    if not hasattr(select, "poll"):
        return lambda seconds: bool(connection.poll(seconds))
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return lambda seconds: bool(poll.poll(seconds * 1000.0))


def failure_message(index: int, text: str) -> LabError:
    """Return the error of an environment, with its index and its traceback."""
    where = f"environment {index}" if index >= 0 else "an environment worker"
    return LabError(f"{where} raised: {text.strip().splitlines()[-1]}\n\n{text.strip()}")


def start_context() -> Any:
    """Return the multiprocessing context for workers: "forkserver", or "spawn" where it is not available.

    Not "fork": this process may hold a CUDA context and threads. The fork server imports Gymnasium only once.
    It listens at a socket in the folder for temporary files, so without a short name for that it is "spawn".
    """
    available = "forkserver" in multiprocessing.get_all_start_methods()
    if not available or _short_temporary_folder() is None:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rl_lab.environments.preload"])
    return context


# The name of a socket has at most 107 bytes (macOS: 103); multiprocessing adds about 32 to that of the folder.
LONGEST_TEMPORARY_FOLDER = 70


def _short_temporary_folder() -> str | None:
    """Return a folder for the fork server's socket: that of temporary files if its name is short enough."""
    try:
        usual = tempfile.gettempdir()
    except OSError:  # none can be written
        return None
    for folder in (usual, "/tmp", "/var/tmp", os.environ.get("XDG_RUNTIME_DIR", ""), "/dev/shm"):
        usable = os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)
        if usable and len(os.fsencode(folder)) <= LONGEST_TEMPORARY_FOLDER:
            return folder
    return None


def pickled(value: Any) -> bytes:
    """Return the value for a worker process; functions and classes of a script by value."""
    import cloudpickle

    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        raise LabError(
            f"the environment factory cannot be sent to worker processes ({error}): use an import path such as "
            "'my_module:make_env', or set environment.workers=0"
        ) from error


@contextlib.contextmanager
def _start_conditions() -> Iterator[None]:
    """Start workers that can import this package and do not run the user's script.

    multiprocessing would execute the script again in each worker, with its torch import and all code that no
    `if __name__ == "__main__"` guards. Objects of the script that the environments need are pickled by value.
    The fork server of older Python versions only uses its own search path, which may not contain this
    package.

    A start also needs a current folder that exists, and a short name for the fork server's socket.
    """
    ensure_current_folder()
    main, search_path, temporary = sys.modules["__main__"], os.environ.get("PYTHONPATH"), tempfile.tempdir
    sys.modules["__main__"] = types.ModuleType("__main__")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(PACKAGE_PARENT), *([search_path] if search_path else [])])
    tempfile.tempdir = _short_temporary_folder() or temporary
    try:
        yield
    finally:
        tempfile.tempdir = temporary
        sys.modules["__main__"] = main
        if search_path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = search_path
