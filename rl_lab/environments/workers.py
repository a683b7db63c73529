"""The trainer's side of an `EnvRunner`: one here, or one in a worker process. Both are sent to, then asked."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import select
import signal
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import gymnasium

from rl_lab.environments.shared import StepArrays
from rl_lab.environments.worker import DONE, STEP, EnvironmentFailure, EnvRunner, Reply, worker_main
from rl_lab.errors import LabError
from rl_lab.records import Spec

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
