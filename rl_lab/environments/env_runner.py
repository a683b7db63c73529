"""`EnvRunner` steps environments, in the trainer's or in a worker process; `StepArrays` is the shared memory.

This module does not import torch, so that a worker process starts in milliseconds and needs little memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import heap
from multiprocessing.connection import Connection
from typing import Any

import gymnasium
import numpy as np

from rl_lab.environments.faults import PeerLost
from rl_lab.environments.spec import ObservationCheck, UnusableRow, finite_number, flag
from rl_lab.environments.wrappers import add_log
from rl_lab.errors import LabError, one_line
from rl_lab.records import ArraySpec, Spec
from rl_lab.utils.seeding import derive_seed
from rl_lab.utils.stopping import STOP

ALIGNMENT = 64  # a cache line: two workers never write to the same line
NUM_BUFFERS = 2
STEP = b"s"  # the most common command and reply are one byte each
DONE = b"d"
IDLE = -1  # instead of a seed: the environment is not reset and keeps its last row

Reply = dict[str, Any]
Segment = tuple[int, np.ndarray]  # the seed of a reset, and the actions (K, …) that followed it


def episode_seed(run_seed: int, env: int, episode: int) -> int:
    """Return the seed that environment number `env` is reset with for its episode number `episode`."""
    return derive_seed(run_seed, "env", env, episode) & 0x7FFFFFFF  # some environments accept only 31 bits


class EnvironmentFailure(Exception):
    """An environment raised in its constructor or in `render`; holds its index and the traceback as text."""

    def __init__(self, index: int, text: str) -> None:
        super().__init__(index, text)
        self.index = index
        self.text = text


class Slot:
    """One environment, with the log sums and the step count of its current episode."""

    __slots__ = ("env", "far", "game", "index", "log", "steps", "to_native")

    def __init__(self, index: int) -> None:
        self.index = index
        self.env: gymnasium.Env | None = None  # None: failed or not yet created; the next reset creates it
        self.game: Any = None  # the innermost environment, if it has `reset_continues`
        self.far: Any = None  # the innermost environment, if it has `begin_step` (see `interpreters.peer`)
        self.to_native: Any = None  # converts an action of the agent to one for `begin_step`
        self.log: dict[str, float] = {}
        self.steps = 0  # calls of `step` in the current episode


class EnvRunner:
    """Steps some of the N environments; reads actions from and writes results to `StepArrays`.

    Every command returns a dict with the command's own result and

        log        index -> sums of the `log/` infos of the episode that just ended
        faults     index -> traceback of an environment that raised; it is closed and its row is not written
        unusable   index -> why the row of an environment is unusable; it is closed and its row is not written
    lost       number of a process that died -> (kind, what, advice, indices of its environments)
        side       index -> traceback of a video that failed; the environment goes on
        env        index -> info, with `all_infos`

    Any exception of an environment is a fault, including `SystemExit`; only KeyboardInterrupt is raised
    again.

    lazy: create each environment at its first reset, so that an exception in its constructor is a fault, too
    """

    def __init__(
        self,
        factory: Callable[[bool], gymnasium.Env],
        indices: Sequence[int],
        arrays: StepArrays,
        *,
        all_infos: bool = False,
        render: bool = False,
        lazy: bool = False,
    ) -> None:
        self.factory = factory
        self.arrays = arrays
        self.all_infos = all_infos
        self.render_frames = render
        self.slots = [Slot(index) for index in indices]
        self._check_obs = ObservationCheck(arrays.obs)
        for slot in () if lazy else self.slots:
            try:
                with _with_index(slot.index):
                    self._make(slot)
            except EnvironmentFailure:
                self.close()  # those before it, which may have processes
                raise

    def call(self, command: str, *args: Any) -> Reply:
        return getattr(self, command)(*args)

    def reset(self, envs: Sequence[int], options: dict[str, Any] | None = None) -> Reply:
        """Reset these environments with the seeds in the shared memory."""
        reply: Reply = {}
        for slot in self.slots:
            if slot.index in envs:
                try:
                    self._begin(slot, self.arrays.obs, options, reply)
                except BaseException as error:
                    self._fail(slot, error, reply)
                self.arrays.call_counts[slot.index] += 1
        return reply

    def step(self, *, begun: bool = False) -> Reply:
        """Step each environment; reset it instead if its last row is terminated or truncated.

        begun: `begin_steps` was called
        """
        reply: Reply = {}
        arrays = self.arrays
        obs, terminated, truncated = arrays.obs, arrays.terminated, arrays.truncated
        if not begun:
            self.begin_steps()
        for slot in self.slots:
            index = slot.index
            try:
                if terminated[index] or truncated[index]:
                    if arrays.seed[index] != IDLE:
                        self._begin(slot, obs, None, reply)
                else:
                    self._step(slot, obs, arrays.action[index], reply)
            except BaseException as error:
                self._fail(slot, error, reply)
            arrays.call_counts[index] += 1
        return reply

    def begin_steps(self) -> None:
        """Send the actions to environments in other processes, so that all of them step at the same time."""
        arrays = self.arrays
        peers = []
        for slot in self.slots:
            index = slot.index
            if slot.far is None or slot.env is None or arrays.terminated[index] or arrays.truncated[index]:
                continue
            if slot.far.begun:  # the trainer's own process begins the steps of all workers first
                continue
            try:
                slot.far.begin_step(slot.to_native(arrays.action[index]))
            except Exception:  # `step` raises it again
                continue
            if slot.far.peer not in peers:
                peers.append(slot.far.peer)
        for peer in peers:
            peer.send_steps()

    def replay(self, histories: Mapping[int, Sequence[Segment]]) -> Reply:
        """Replay open games: index -> episodes of a game, each with the seed of its reset and its actions.

        `failed` lists the environments that ended early or raised. Infos are dropped: they were returned the
        first time.
        """
        failed = []
        for slot in self.slots:
            if slot.index not in histories:
                continue
            try:
                if not self._replay(slot, histories[slot.index]):
                    failed.append(slot.index)
            except BaseException as error:
                self._fail(slot, error, {})
                failed.append(slot.index)
        return {"failed": failed}

    def render(self) -> Reply:
        """Return the frame of the first environment, or no frame if it failed and was not reset yet."""
        slot = self.slots[0]
        if slot.env is None:
            return {}
        with _with_index(slot.index):
            return {"frame": np.asarray(slot.env.render())}

    def action_names(self) -> Reply:
        """Return the names that the first environment gives its actions in `metadata["action_names"]`, if any."""
        env = self.slots[0].env
        inner = None if env is None else env.unwrapped
        names = (getattr(inner, "metadata", None) or {}).get("action_names") or getattr(
            inner, "action_names", ()
        )
        return {"names": [str(name)[:40] for name in names] if isinstance(names, list | tuple) else []}

    def close(self) -> None:
        """Close all environments; an exception in `close` is only a warning, since nothing depends on it."""
        for slot in self.slots:
            if slot.env is not None:
                try:
                    slot.env.close()
                except BaseException as error:
                    _reraise_interrupt(error)
                    warnings.warn(
                        f"environment {slot.index} raised {one_line(error)} in close()", stacklevel=2
                    )

    def _make(self, slot: Slot) -> gymnasium.Env:
        slot.env = self.factory(self.render_frames and slot.index == 0)
        inner = slot.env.unwrapped
        slot.game = inner if hasattr(inner, "reset_continues") else None
        slot.far = inner if hasattr(inner, "begin_step") else None
        if slot.far is not None:
            slot.to_native = slot.env.get_wrapper_attr("begin_action")  # of StandardAction
        return slot.env

    @staticmethod
    def _running_env(slot: Slot) -> gymnasium.Env:
        if slot.env is None:
            raise RuntimeError(f"environment {slot.index} has no open episode")
        return slot.env

    def _begin(
        self, slot: Slot, obs_arrays: dict[str, np.ndarray], options: dict[str, Any] | None, reply: Reply
    ) -> None:
        arrays, index = self.arrays, slot.index
        slot.steps = 0
        env = slot.env or self._make(slot)
        if slot.game is not None and slot.game.reset_continues and not arrays.reset_continues[index]:
            options = {**(options or {}), "restart": True}
        STOP.begin_call()
        try:
            obs, info = env.reset(seed=int(arrays.seed[index]), options=options)
        finally:
            STOP.end_call()
        for array, value in zip(obs_arrays.values(), self._check_obs(obs)):
            array[index] = value
        arrays.reward[index] = 0.0
        arrays.terminated[index] = False
        arrays.truncated[index] = False
        arrays.reset_continues[index] = False
        slot.log = {}
        self._report_side_failure(slot, reply)
        if self.all_infos:
            reply.setdefault("env", {})[index] = info

    def _step(self, slot: Slot, obs_arrays: dict[str, np.ndarray], action: Any, reply: Reply) -> None:
        arrays, index = self.arrays, slot.index
        slot.steps += 1
        STOP.begin_call()
        try:
            obs, reward, terminated, truncated, info = self._running_env(slot).step(action)
        finally:
            STOP.end_call()
        values, reward = self._check_obs(obs), finite_number("reward", reward)
        terminated, truncated = flag("terminated", terminated), flag("truncated", truncated)
        add_log(slot.log, info)
        for array, value in zip(obs_arrays.values(), values):
            array[index] = value
        arrays.reward[index] = reward
        if terminated or truncated:
            arrays.terminated[index] = terminated
            arrays.truncated[index] = truncated
            arrays.reset_continues[index] = slot.game is not None and slot.game.reset_continues
            if slot.log:
                reply.setdefault("log", {})[index] = slot.log
            self._report_side_failure(slot, reply)
        if self.all_infos:
            reply.setdefault("env", {})[index] = info

    @staticmethod
    def _report_side_failure(slot: Slot, reply: Reply) -> None:
        take_failure = getattr(slot.env, "take_failure", None)  # of an EpisodeVideo, the outermost wrapper
        failure = take_failure() if take_failure is not None else ""
        if failure:
            reply.setdefault("side", {})[slot.index] = failure

    def _replay(self, slot: Slot, segments: Sequence[Segment]) -> bool:
        """Replay one game; return whether its episodes ended at the same steps as before."""
        arrays, index = self.arrays, slot.index
        for position, (seed, actions) in enumerate(segments):
            if position == 0:
                arrays.reset_continues[index] = False
            elif not arrays.reset_continues[index]:
                return False
            arrays.seed[index] = seed
            self._begin(slot, arrays.obs, None, {})
            for action in actions.astype(arrays.action.dtype):
                if arrays.terminated[index] or arrays.truncated[index]:
                    return False
                self._step(slot, arrays.obs, action, {})
                arrays.call_counts[index] += 1
        return True

    @staticmethod
    def _fail(slot: Slot, error: BaseException, reply: Reply) -> None:
        """Close the environment and report the error; call this inside `except`."""
        _reraise_interrupt(error)
        if isinstance(error, UnusableRow):
            when = f"at step {slot.steps} of the episode" if slot.steps else "at the reset of the episode"
            reply.setdefault("unusable", {})[slot.index] = f"{error} {when}"
        elif isinstance(error, PeerLost):
            lost = reply.setdefault("lost", {})
            lost.setdefault(error.peer, (error.kind, error.what, error.advice, []))[3].append(slot.index)
        else:
            text = getattr(error, "far_traceback", "") or traceback.format_exc()
            reply.setdefault("faults", {})[slot.index] = text
        env, slot.env = slot.env, None
        if env is not None:
            try:
                env.close()
            except BaseException as close_error:  # the first error is the one to report
                _reraise_interrupt(close_error)


def _reraise_interrupt(error: BaseException) -> None:
    """Raise KeyboardInterrupt again: Ctrl-C stops the trainer, not an environment."""
    if isinstance(error, KeyboardInterrupt):
        raise error


@contextlib.contextmanager
def _with_index(index: int) -> Iterator[None]:
    """Convert any exception inside the block into an `EnvironmentFailure` with this index."""
    try:
        yield
    except BaseException as error:
        _reraise_interrupt(error)
        raise EnvironmentFailure(index, traceback.format_exc()) from error


def worker_main(
    connection: Connection, payload: bytes, memory: Any, spec: Spec, num_envs: int, environ: dict[str, str]
) -> None:
    """Run a worker process: create the environments, answer commands, exit when the pipe closes."""
    # Ctrl-C and signals to the process group reach every process. The trainer decides when to stop; a worker
    # that exits earlier would lose its open episodes.
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):
        if hasattr(signal, name):  # some systems do not have the last two
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    os.environ.update(environ)  # the fork server still has the variables of its start
    end_with_trainer(connection)
    runner: EnvRunner | None = None

    def build() -> Reply:
        nonlocal runner
        factory, indices, options = pickle.loads(payload)
        runner = EnvRunner(factory, indices, StepArrays(spec, num_envs, memory), **options)
        return {}

    try:
        connection.send_bytes(_reply(build))
        while runner is not None:
            message = connection.recv_bytes()
            if message == STEP:
                connection.send_bytes(_reply(runner.step))
            else:
                command, args = pickle.loads(message)
                connection.send_bytes(_reply(runner.call, command, *args))
    except (EOFError, OSError):
        if runner is not None:
            runner.close()


def _reply(function: Callable[..., Reply], *args: Any) -> bytes:
    try:
        reply = function(*args)
        return pickle.dumps(reply) if reply else DONE
    except EnvironmentFailure as failure:
        return pickle.dumps({"error": (failure.index, failure.text)})
    except BaseException as error:
        _reraise_interrupt(error)
        return pickle.dumps({"error": (-1, traceback.format_exc())})


# --- The end of the trainer ------------------------------------------------------------------------------

CLOSE_TIMEOUT_S = 5.0  # a worker that has not closed its environments by then is killed
PR_SET_PDEATHSIG = 1


def end_with_trainer(connection: Connection) -> None:
    """End this worker soon after the trainer, even if a call of an environment never returns.

    The trainer's death closes the pipe. A worker that waits for a command then closes its environments and
    exits. One whose environment hangs is ended by a thread, or, if the call holds the interpreter's lock, by
    the kernel.
    """
    trainer = multiprocessing.parent_process()
    fork_server = os.getppid()
    if trainer is not None and trainer.pid != fork_server:
        _end_with_fork_server()
    if hasattr(select, "poll"):
        threading.Thread(target=_watch_trainer, args=(connection.fileno(), fork_server), daemon=True).start()


def _watch_trainer(pipe: int, parent: int) -> None:
    closed = select.poll()
    closed.register(pipe, 0)  # only its end is reported, not its messages
    while not closed.poll(1000 * CLOSE_TIMEOUT_S):
        if os.getppid() != parent:
            signal.alarm(0)  # the fork server has ended, but the trainer lives
    time.sleep(CLOSE_TIMEOUT_S)
    os._exit(1)


def _end_with_fork_server() -> None:
    """Let the kernel send SIGUSR2 when the fork server ends, and end this process 12 s later.

    The fork server ends with the trainer once no worker holds the pipe that keeps it alive. No Python code
    runs while a call holds the interpreter's lock, so the handler is the C library's `alarm`, which takes the
    signal's number as its seconds.
    """
    from multiprocessing import forkserver

    with contextlib.suppress(AttributeError, TypeError, OSError):  # names that are not public
        os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
        forkserver._forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        libc.signal.restype = ctypes.c_void_p
        libc.signal(signal.SIGUSR2, ctypes.cast(libc.alarm, ctypes.c_void_p))
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGUSR2), 0, 0, 0)


# --- Shared memory ---------------------------------------------------------------------------------------


class StepArrays:
    """Actions, observations, rewards and flags of N environments: views of one shared memory block.

    Observations are double-buffered: while workers write one buffer, the other one holds the previous
    observations, which stay intact even if a worker dies during a write.

    buffers:         two dicts, name -> (N, …); `obs` is the current one
    action (N, …); reward (N,) float32; terminated, truncated (N,) bool
    seed:            (N,) int64, seed of each environment's next reset; written by the trainer
    reset_continues: (N,) bool, whether the next reset continues the game of the last episode
    call_counts:     (N,) int64, completed calls of each environment: distinguishes a slow worker from a
                     hanging one
    """

    def __init__(self, spec: Spec, num_envs: int, memory: Any = None) -> None:
        block = (
            np.zeros(self.nbytes(spec, num_envs), np.uint8)
            if memory is None
            else np.frombuffer(memory, np.uint8)
        )
        arrays: dict[str, np.ndarray] = {}
        offset = 0
        for name, column in _columns(spec).items():
            shape, dtype = (num_envs, *column.shape), np.dtype(column.dtype)
            size = int(np.prod(shape)) * dtype.itemsize
            arrays[name] = block[offset : offset + size].view(dtype).reshape(shape)
            offset += _aligned(size)
        self.buffers = [
            {name: arrays[f"obs/{buffer}/{name}"] for name in spec.observations}
            for buffer in range(NUM_BUFFERS)
        ]
        self.action = arrays["action"]
        self.reward = arrays["reward"]
        self.terminated = arrays["terminated"]
        self.truncated = arrays["truncated"]
        self.seed = arrays["seed"]
        self.reset_continues = arrays["reset_continues"]
        self.call_counts = arrays["call_counts"]
        self._current = arrays["current"]

    @property
    def obs(self) -> dict[str, np.ndarray]:
        return self.buffers[self._current[0]]

    def swap(self) -> None:
        """Make the other buffer the current one."""
        self._current[0] = 1 - self._current[0]

    def repeat(self, env: int) -> None:
        """Copy the previous observation of an environment into the current buffer."""
        old, new = self.buffers[1 - self._current[0]], self.obs
        for name, array in new.items():
            array[env] = old[name][env]

    @staticmethod
    def nbytes(spec: Spec, num_envs: int) -> int:
        return sum(
            _aligned(num_envs * int(np.prod(column.shape)) * np.dtype(column.dtype).itemsize)
            for column in _columns(spec).values()
        )


def shared_memory(context: Any, spec: Spec, num_envs: int) -> Any:
    """Allocate a memory block for `StepArrays` that worker processes inherit.

    It is an unlinked memory-mapped file: it has no name, so it is freed however the run ends. It lies in
    /dev/shm, or in the folder of temporary files where that is read-only, missing or too small.
    """
    size = StepArrays.nbytes(spec, num_envs)
    try:
        return context.RawArray(ctypes.c_byte, size)
    except OSError:
        heap.Arena._dir_candidates = []  # type: ignore[attr-defined]  # the temporary files remain
    try:
        return context.RawArray(ctypes.c_byte, size)
    except OSError as error:
        raise LabError(
            f"environment.workers: no memory can be shared with worker processes ({error}): make /dev/shm or TMPDIR "
            "writable, or set environment.workers=0"
        ) from error


def _columns(spec: Spec) -> dict[str, ArraySpec]:
    rows = spec.row_columns()
    columns = {
        f"obs/{buffer}/{name}": column
        for buffer in range(NUM_BUFFERS)
        for name, column in spec.observations.items()
    }
    columns |= {name: rows[name] for name in ("action", "reward", "terminated", "truncated")}
    scalars = dict.fromkeys(("seed", "call_counts", "current"), ArraySpec((), "int64"))
    return {**columns, **scalars, "reset_continues": ArraySpec((), "bool")}


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
