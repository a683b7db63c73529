"""What steps the environments: in the trainer's process, or in a worker process of its own.

Nothing here imports torch: a worker starts in milliseconds and stays small.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import gymnasium
import numpy as np

from rl_lab.environments.shared import StepArrays
from rl_lab.environments.wrappers import LOG_PREFIX
from rl_lab.records import Spec
from rl_lab.utils.seeding import derive_seed

STEP = b"s"  # the common command and the common answer travel as one byte
DONE = b"d"

Reply = dict[str, Any]


class EnvironmentFailure(Exception):
    """An environment raised; carries its index and the traceback as text."""

    def __init__(self, index: int, text: str) -> None:
        super().__init__(index, text)
        self.index = index
        self.text = text


class Slot:
    """One environment and where it stands."""

    __slots__ = ("ended", "env", "index", "log")

    def __init__(self, index: int, env: gymnasium.Env) -> None:
        self.index = index
        self.env = env
        self.ended = False  # the next step resets
        self.log: dict[str, float] = {}


class EnvRunner:
    """Steps some of the N environments, reading actions from and writing results to `StepArrays`.

    Every answer is a dict: `log` (index -> sums of `log/` infos of the episode that just ended), `env` (index ->
    info, when all are asked for), or what the command is for.
    """

    def __init__(
        self,
        factory: Callable[[bool], gymnasium.Env],
        indices: Sequence[int],
        arrays: StepArrays,
        *,
        all_infos: bool = False,
        render: bool = False,
    ) -> None:
        self.arrays = arrays
        self.all_infos = all_infos
        self.run_seed = 0
        self.slots: list[Slot] = []
        for index in indices:
            with _naming(index):
                self.slots.append(Slot(index, factory(render and index == 0)))

    def call(self, command: str, *args: Any) -> Reply:
        return getattr(self, command)(*args)

    def reset(
        self, run_seed: int, episodes: Mapping[int, int], options: dict[str, Any] | None = None
    ) -> Reply:
        """Begin the given episodes: environment index -> episode number."""
        self.run_seed = run_seed
        reply: Reply = {}
        for slot in self.slots:
            if slot.index in episodes:
                with _naming(slot.index):
                    self._begin(slot, episodes[slot.index], options, reply)
        return reply

    def step(self) -> Reply:
        """One step of each environment; one that had ended begins its next episode instead."""
        reply: Reply = {}
        for slot in self.slots:
            try:
                if slot.ended:
                    self._begin(slot, int(self.arrays.episode[slot.index]) + 1, None, reply)
                else:
                    self._step(slot, self.arrays.action[slot.index], reply)
            except Exception as error:  # not _naming: this loop is the hot one
                raise EnvironmentFailure(slot.index, traceback.format_exc()) from error
        return reply

    def replay(self, run_seed: int, histories: Mapping[int, tuple[int, np.ndarray]]) -> Reply:
        """Go through open episodes again: index -> (episode number, actions since its reset).

        `failed` lists those that ended early or raised on the way. Infos were passed on the first time.
        """
        self.run_seed = run_seed
        failed = []
        dtype = self.arrays.action.dtype
        for slot in self.slots:
            episode, actions = histories[slot.index]
            try:
                self._begin(slot, episode, None, {})
                for action in actions.astype(dtype):
                    if slot.ended:
                        failed.append(slot.index)
                        break
                    self._step(slot, action, {})
            except Exception:
                failed.append(slot.index)
        return {"failed": failed}

    def render(self) -> Reply:
        """What the first environment looks like now."""
        with _naming(self.slots[0].index):
            return {"frame": np.asarray(self.slots[0].env.render())}

    def close(self) -> None:
        for slot in self.slots:
            slot.env.close()

    def _begin(self, slot: Slot, episode: int, options: dict[str, Any] | None, reply: Reply) -> None:
        arrays, index = self.arrays, slot.index
        seed = derive_seed(self.run_seed, "env", index, episode) & 0x7FFFFFFF  # some take only 31 bits
        obs, info = slot.env.reset(seed=seed, options=options)
        for name, array in arrays.obs.items():
            array[index] = obs[name]
        arrays.reward[index] = 0.0
        arrays.terminated[index] = False
        arrays.truncated[index] = False
        arrays.episode[index] = episode
        slot.ended = False
        slot.log = {}
        if self.all_infos:
            reply.setdefault("env", {})[index] = info

    def _step(self, slot: Slot, action: Any, reply: Reply) -> None:
        arrays, index = self.arrays, slot.index
        obs, reward, terminated, truncated, info = slot.env.step(action)
        for name, array in arrays.obs.items():
            array[index] = obs[name]
        arrays.reward[index] = reward
        arrays.terminated[index] = terminated
        arrays.truncated[index] = truncated
        for key, value in info.items():
            if key.startswith(LOG_PREFIX):
                slot.log[key] = slot.log.get(key, 0.0) + float(value)
        if terminated or truncated:
            slot.ended = True
            if slot.log:
                reply.setdefault("log", {})[index] = slot.log
        if self.all_infos:
            reply.setdefault("env", {})[index] = info


@contextlib.contextmanager
def _naming(index: int) -> Iterator[None]:
    """Whatever an environment raises inside becomes an `EnvironmentFailure`."""
    try:
        yield
    except Exception as error:
        raise EnvironmentFailure(index, traceback.format_exc()) from error


def worker_main(
    connection: Connection, payload: bytes, memory: Any, spec: Spec, num_envs: int, environ: dict[str, str]
) -> None:
    """Body of a worker process: build, answer commands, leave when the trainer closes the pipe or dies."""
    # Ctrl-C and a terminated process group reach every process; the trainer decides when to stop, and a worker
    # that left earlier would take the open episode with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ.update(environ)  # the fork server keeps the variables of the moment it was started
    runner: EnvRunner | None = None

    def build() -> Reply:
        nonlocal runner
        factory, indices, all_infos, render = pickle.loads(payload)
        arrays = StepArrays(spec, num_envs, memory)
        runner = EnvRunner(factory, indices, arrays, all_infos=all_infos, render=render)
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
    except Exception:
        return pickle.dumps({"error": (-1, traceback.format_exc())})
