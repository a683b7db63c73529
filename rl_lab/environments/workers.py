"""The trainer's side of an `EnvRunner`: one here, or one in a worker process. Both are sent to, then asked."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
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
_STEP_COMMAND = ("step", ())


class Worker(Protocol):
    """Some of the N environments. Commands are methods of `EnvRunner`; every `send` is followed by a `receive`."""

    indices: Sequence[int]

    def send(self, command: str, *args: Any) -> None: ...
    def send_step(self) -> None: ...
    def receive(self, timeout: float | None = None) -> Reply: ...
    def close(self) -> None: ...


class LocalWorker:
    """Environments in this process; the work is done when the answer is asked for."""

    def __init__(self, make_runner: Callable[[], EnvRunner], indices: Sequence[int]) -> None:
        self.indices = indices
        self._command: tuple[str, tuple[Any, ...]] = _STEP_COMMAND
        try:
            self._runner = make_runner()
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
    """Environments in a process of their own. The first `receive` answers whether they could be built."""

    def __init__(
        self,
        factory: Callable[[bool], gymnasium.Env],
        indices: Sequence[int],
        *,
        spec: Spec,
        num_envs: int,
        memory: Any,
        all_infos: bool,
        render: bool,
    ) -> None:
        self.indices = indices
        payload = _pickled((factory, list(indices), all_infos, render))
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

    def send(self, command: str, *args: Any) -> None:
        self._send(pickle.dumps((command, args)))

    def send_step(self) -> None:
        self._send(STEP)

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # a dead worker is noticed when its answer is awaited
            self.connection.send_bytes(message)

    def receive(self, timeout: float | None = None) -> Reply:
        """The answer to the last `send`; LabError when the environment raised, or its process died or is late."""
        try:
            if timeout is not None and not self.connection.poll(timeout):
                raise LabError(f"{self._names()} gave no answer for {timeout:g} s")
            message = self.connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise self._death() from error
        if message == DONE:
            return {}
        reply: Reply = pickle.loads(message)
        if "error" in reply:
            raise failure_message(*reply["error"])
        return reply

    def close(self) -> None:
        """Close the pipe: the worker closes its environments and leaves, after the step it may be in."""
        self.connection.close()

    def join(self) -> None:
        """Wait until the process is gone; kill it when it does not go."""
        self.process.join(GRACE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def _names(self) -> str:
        first, last = self.indices[0], self.indices[-1]
        return f"environment {first}" if first == last else f"the worker of environments {first} to {last}"

    def _death(self) -> LabError:
        self.process.join(1.0)
        code = self.process.exitcode
        return LabError(
            f"{self._names()} died (exit code {code}). A negative code is a signal; -9 often means that memory ran "
            "out: lower environment.num_envs. environment.workers=0 runs it in this process, to see more."
        )


def failure_message(index: int, text: str) -> LabError:
    """The error of an environment as one that names it."""
    where = f"environment {index}" if index >= 0 else "an environment worker"
    return LabError(f"{where} raised: {text.strip().splitlines()[-1]}\n\n{text.strip()}")


def make_local_worker(
    factory: Callable[[bool], gymnasium.Env],
    arrays: StepArrays,
    num_envs: int,
    *,
    all_infos: bool,
    render: bool,
) -> LocalWorker:
    indices = range(num_envs)
    return LocalWorker(
        lambda: EnvRunner(factory, indices, arrays, all_infos=all_infos, render=render), indices
    )


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
