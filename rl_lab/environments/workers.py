"""Workers of a vector environment: `LocalWorker` in this process, `ProcessWorker` in one of its own."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pickle
import select
import signal
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import gymnasium

from rl_lab.environments.env_runner import (
    CLOSE_TIMEOUT_S,
    DONE,
    STEP,
    EnvironmentFailure,
    EnvRunner,
    Reply,
    StepArrays,
    worker_main,
)
from rl_lab.environments.faults import signal_name
from rl_lab.errors import LabError
from rl_lab.records import Spec
from rl_lab.utils.files import ensure_current_folder
from rl_lab.utils.stopping import GRACE_S, STOP

PACKAGE_PARENT = Path(__file__).parents[2]
FIRST_POLL_S = 0.05  # after this wait the progress of the worker is monitored
POLL_S = 0.5  # between two looks at its progress
FIRST_REPLY_FACTOR = 5  # times the timeout: the process starts, imports and creates its environments
_STEP_COMMAND = ("step", ())


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
