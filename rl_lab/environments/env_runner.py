"""What steps the environments: in the trainer's process, or in a worker process of its own.

Nothing here imports torch: a worker starts in milliseconds and stays small.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import gymnasium
import numpy as np

from rl_lab.environments.spec import ObservationCheck, UnusableRow, finite_number, flag
from rl_lab.environments.wrappers import add_log
from rl_lab.errors import one_line
from rl_lab.records import ArraySpec, Spec
from rl_lab.utils.seeding import derive_seed

# --------------------
# The memory that the trainer and the environments' workers share: everything of a vector step but the infos.


ALIGNMENT = 64  # a cache line: two workers do not write to one line at the borders of an array
HALVES = 2


class StepArrays:
    """Actions, observations, rewards and flags of N environments, views of one block.

    Observations lie there twice and take turns: while workers write one half, the other still holds what the trainer
    was given last, whole, whatever happens to a worker in the middle of a write.

    halves:   two dicts, name -> (N, …); `obs` is the one in turn
    action (N, …); reward (N,) float32; terminated, truncated (N,) bool
    seed:     (N,) int64, of each environment's next reset; written by the trainer
    goes_on:  (N,) bool, whether the next reset will continue the game that the last episode was part of
    ticks:    (N,) int64, calls of each environment that came back: how the trainer tells slow from stuck
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
        self.halves = [
            {name: arrays[f"obs/{half}/{name}"] for name in spec.observations} for half in range(HALVES)
        ]
        self.action = arrays["action"]
        self.reward = arrays["reward"]
        self.terminated = arrays["terminated"]
        self.truncated = arrays["truncated"]
        self.seed = arrays["seed"]
        self.goes_on = arrays["goes_on"]
        self.ticks = arrays["ticks"]
        self._turn = arrays["turn"]

    @property
    def obs(self) -> dict[str, np.ndarray]:
        return self.halves[self._turn[0]]

    def turn(self) -> None:
        """The other half is written next."""
        self._turn[0] = 1 - self._turn[0]

    def repeat(self, env: int) -> None:
        """Put the observation before this one in its place."""
        old, new = self.halves[1 - self._turn[0]], self.obs
        for name, array in new.items():
            array[env] = old[name][env]

    @staticmethod
    def nbytes(spec: Spec, num_envs: int) -> int:
        return sum(
            _aligned(num_envs * int(np.prod(column.shape)) * np.dtype(column.dtype).itemsize)
            for column in _columns(spec).values()
        )


def shared_memory(context: Any, spec: Spec, num_envs: int) -> Any:
    """A block for `StepArrays` that worker processes inherit.

    It is an unlinked file mapped into memory: it has no name, so nothing is left behind however a run ends.
    """
    return context.RawArray(ctypes.c_byte, StepArrays.nbytes(spec, num_envs))


def _columns(spec: Spec) -> dict[str, ArraySpec]:
    rows = spec.row_columns()
    columns = {
        f"obs/{half}/{name}": column for half in range(HALVES) for name, column in spec.observations.items()
    }
    columns |= {name: rows[name] for name in ("action", "reward", "terminated", "truncated")}
    numbers = dict.fromkeys(("seed", "ticks", "turn"), ArraySpec((), "int64"))
    return {**columns, **numbers, "goes_on": ArraySpec((), "bool")}


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


STEP = b"s"  # the common command and the common answer travel as one byte
DONE = b"d"
REST = -1  # in the place of a seed: the environment waits where it is

Reply = dict[str, Any]
Segment = tuple[int, np.ndarray]  # the seed of a reset, and the actions (K, …) that followed it


def episode_seed(run_seed: int, env: int, episode: int) -> int:
    """What an environment is reset with for its episode of that number."""
    return derive_seed(run_seed, "env", env, episode) & 0x7FFFFFFF  # some take only 31 bits


class EnvironmentFailure(Exception):
    """An environment raised where nothing can take its place; carries its index and the traceback as text."""

    def __init__(self, index: int, text: str) -> None:
        super().__init__(index, text)
        self.index = index
        self.text = text


class Slot:
    """One environment and what is summed of its episode."""

    __slots__ = ("env", "game", "index", "log", "steps")

    def __init__(self, index: int) -> None:
        self.index = index
        self.env: gymnasium.Env | None = None  # None: failed, or not made yet; it is made when it next begins
        self.game: Any = None  # the innermost environment, where it has `reset_continues`
        self.log: dict[str, float] = {}
        self.steps = 0  # calls of `step` in this episode


class EnvRunner:
    """Steps some of the N environments, reading actions from and writing results to `StepArrays`.

    Every answer is a dict: `log` (index -> sums of `log/` infos of the episode that just ended), `faults` (index ->
    traceback of one that raised and is gone; its row is not written), `unusable` (index -> what is wrong with the row of
    one that is gone for it; it is not written either), `env` (index -> info, when all are asked for), or what the command
    is for. Raising means any exception: `sys.exit()` ends an environment, not the trainer. Ctrl-C alone is passed on.

    lazy: make each environment when it first begins, so that one that cannot be made is a fault like any other
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
        self._checked = ObservationCheck(arrays.obs)
        for slot in () if lazy else self.slots:
            with _naming(slot.index):
                self._make(slot)

    def call(self, command: str, *args: Any) -> Reply:
        return getattr(self, command)(*args)

    def reset(self, envs: Sequence[int], options: dict[str, Any] | None = None) -> Reply:
        """Begin episodes in these environments, with the seeds that lie in the shared memory."""
        reply: Reply = {}
        for slot in self.slots:
            if slot.index in envs:
                try:
                    self._begin(slot, self.arrays.obs, options, reply)
                except BaseException as error:
                    self._fail(slot, error, reply)
                self.arrays.ticks[slot.index] += 1
        return reply

    def step(self) -> Reply:
        """One step of each environment; one whose last row is an end begins its next episode instead."""
        reply: Reply = {}
        arrays = self.arrays
        obs, terminated, truncated = arrays.obs, arrays.terminated, arrays.truncated
        for slot in self.slots:
            index = slot.index
            try:
                if terminated[index] or truncated[index]:
                    if arrays.seed[index] != REST:
                        self._begin(slot, obs, None, reply)
                else:
                    self._step(slot, obs, arrays.action[index], reply)
            except BaseException as error:
                self._fail(slot, error, reply)
            arrays.ticks[index] += 1
        return reply

    def replay(self, histories: Mapping[int, Sequence[Segment]]) -> Reply:
        """Go through open games again: index -> the episodes of a game, each the seed of its reset and its actions.

        `failed` lists those that ended early or raised on the way. Infos were passed on the first time.
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
        """What the first environment looks like now; nothing when it has failed and not begun again."""
        slot = self.slots[0]
        if slot.env is None:
            return {}
        with _naming(slot.index):
            return {"frame": np.asarray(slot.env.render())}

    def close(self) -> None:
        """Close every environment; what one raises then is a warning, for nothing is asked of it any more."""
        for slot in self.slots:
            if slot.env is not None:
                try:
                    slot.env.close()
                except BaseException as error:
                    _unless_interrupted(error)
                    warnings.warn(
                        f"environment {slot.index} raised {one_line(error)} when it was closed", stacklevel=2
                    )

    def _make(self, slot: Slot) -> gymnasium.Env:
        slot.env = self.factory(self.render_frames and slot.index == 0)
        inner = slot.env.unwrapped
        slot.game = inner if hasattr(inner, "reset_continues") else None
        return slot.env

    @staticmethod
    def _open(slot: Slot) -> gymnasium.Env:
        if slot.env is None:
            raise RuntimeError(f"environment {slot.index} has no open episode")
        return slot.env

    def _begin(
        self, slot: Slot, obs_arrays: dict[str, np.ndarray], options: dict[str, Any] | None, reply: Reply
    ) -> None:
        arrays, index = self.arrays, slot.index
        slot.steps = 0
        env = slot.env or self._make(slot)
        if slot.game is not None and slot.game.reset_continues and not arrays.goes_on[index]:
            options = {**(options or {}), "restart": True}
        obs, info = env.reset(seed=int(arrays.seed[index]), options=options)
        for array, value in zip(obs_arrays.values(), self._checked(obs)):
            array[index] = value
        arrays.reward[index] = 0.0
        arrays.terminated[index] = False
        arrays.truncated[index] = False
        arrays.goes_on[index] = False
        slot.log = {}
        if self.all_infos:
            reply.setdefault("env", {})[index] = info

    def _step(self, slot: Slot, obs_arrays: dict[str, np.ndarray], action: Any, reply: Reply) -> None:
        arrays, index = self.arrays, slot.index
        slot.steps += 1
        obs, reward, terminated, truncated, info = self._open(slot).step(action)
        values, reward = self._checked(obs), finite_number("reward", reward)
        terminated, truncated = flag("terminated", terminated), flag("truncated", truncated)
        add_log(slot.log, info)
        for array, value in zip(obs_arrays.values(), values):
            array[index] = value
        arrays.reward[index] = reward
        if terminated or truncated:
            arrays.terminated[index] = terminated
            arrays.truncated[index] = truncated
            arrays.goes_on[index] = slot.game is not None and slot.game.reset_continues
            if slot.log:
                reply.setdefault("log", {})[index] = slot.log
        if self.all_infos:
            reply.setdefault("env", {})[index] = info

    def _replay(self, slot: Slot, segments: Sequence[Segment]) -> bool:
        """Whether everything went as it did before: ends only where an episode of the game ended."""
        arrays, index = self.arrays, slot.index
        for number, (seed, actions) in enumerate(segments):
            if number == 0:
                arrays.goes_on[index] = False
            elif not arrays.goes_on[index]:
                return False
            arrays.seed[index] = seed
            self._begin(slot, arrays.obs, None, {})
            for action in actions.astype(arrays.action.dtype):
                if arrays.terminated[index] or arrays.truncated[index]:
                    return False
                self._step(slot, arrays.obs, action, {})
                arrays.ticks[index] += 1
        return True

    @staticmethod
    def _fail(slot: Slot, error: BaseException, reply: Reply) -> None:
        """Inside `except`: give the environment up and report why."""
        _unless_interrupted(error)
        if isinstance(error, UnusableRow):
            when = f"at step {slot.steps} of the episode" if slot.steps else "at the reset of the episode"
            reply.setdefault("unusable", {})[slot.index] = f"{error} {when}"
        else:
            reply.setdefault("faults", {})[slot.index] = traceback.format_exc()
        env, slot.env = slot.env, None
        if env is not None:
            try:
                env.close()
            except BaseException as again:  # it has failed already
                _unless_interrupted(again)


def _unless_interrupted(error: BaseException) -> None:
    """Ctrl-C in the middle of an environment's code is meant for the trainer."""
    if isinstance(error, KeyboardInterrupt):
        raise error


@contextlib.contextmanager
def _naming(index: int) -> Iterator[None]:
    """Whatever an environment raises inside becomes an `EnvironmentFailure`."""
    try:
        yield
    except BaseException as error:
        _unless_interrupted(error)
        raise EnvironmentFailure(index, traceback.format_exc()) from error


def worker_main(
    connection: Connection, payload: bytes, memory: Any, spec: Spec, num_envs: int, environ: dict[str, str]
) -> None:
    """Body of a worker process: build, answer commands, leave when the trainer closes the pipe or dies."""
    # Ctrl-C and a terminated process group reach every process; the trainer decides when to stop, and a worker
    # that left earlier would take the open episode with it.
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):
        if hasattr(signal, name):  # the last two are not on every system
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    os.environ.update(environ)  # the fork server keeps the variables of the moment it was started
    runner: EnvRunner | None = None

    def build() -> Reply:
        nonlocal runner
        factory, indices, options = pickle.loads(payload)
        runner = EnvRunner(factory, indices, StepArrays(spec, num_envs, memory), **options)
        return {}

    try:
        connection.send_bytes(_answer(build))
        while runner is not None:
            message = connection.recv_bytes()
            if message == STEP:
                connection.send_bytes(_answer(runner.step))
            else:
                command, args = pickle.loads(message)
                connection.send_bytes(_answer(runner.call, command, *args))
    except (EOFError, OSError):
        if runner is not None:
            runner.close()


def _answer(function: Callable[..., Reply], *args: Any) -> bytes:
    try:
        reply = function(*args)
        return pickle.dumps(reply) if reply else DONE
    except EnvironmentFailure as failure:
        return pickle.dumps({"error": (failure.index, failure.text)})
    except BaseException as error:
        _unless_interrupted(error)
        return pickle.dumps({"error": (-1, traceback.format_exc())})
