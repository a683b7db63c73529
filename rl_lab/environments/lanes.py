"""`LaneWorker`: environments of one process with another interpreter, called from the trainer's own process.

A far process has its own memory and its own cores, so a worker process between it and the trainer would only pass on
messages. The trainer sends the steps of all lanes before it reads the first answer. All that needs more than one
message for each environment runs in a thread of the lane, so that the far processes work at the same time: creating
and closing environments, resets, replays, and steps with `ActionRepeat`, rendered observations or videos.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium

from rl_lab.environments.env_runner import (
    CLOSE_TIMEOUT_S,
    EnvironmentFailure,
    EnvRunner,
    Reply,
    StepArrays,
)
from rl_lab.environments.rendering import EpisodeVideo
from rl_lab.environments.workers import POLL_S, WorkerLost, failure_message, worker_name
from rl_lab.environments.wrappers import ActionRepeat, RenderedPixels
from rl_lab.utils.stopping import GRACE_S, STOP

STOP_WAIT_S = 2.0  # after the grace time: a peer that hangs notices the request to stop itself
SEVERAL_MESSAGES = (ActionRepeat, RenderedPixels, EpisodeVideo)  # wrappers whose step asks more than once

Result = tuple[Reply, BaseException | None]


class LaneWorker:
    """Environments of one far process, with the interface of the pool's workers.

    options: keyword arguments of `EnvRunner`; call `wait_built` before the first command, unless `lazy` is set
    """

    def __init__(
        self,
        factory: Callable[[bool], gymnasium.Env],
        indices: Sequence[int],
        arrays: StepArrays,
        options: dict[str, Any],
    ) -> None:
        self.indices = indices
        self._arrays = arrays
        self._runner: EnvRunner | None = None
        self._is_built = False
        self._steps_here = False  # whether the step that was sent is finished in the caller's thread
        self._asks_once: tuple[list[gymnasium.Env | None], bool] = ([], False)
        self._commands: queue.SimpleQueue[Callable[[], Reply] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        # A daemon: a simulator that hangs must not keep the trainer from its end.
        self._thread = threading.Thread(
            target=_serve, args=(self._commands, self._results), name=f"env-lane-{indices[0]}", daemon=True
        )
        self._thread.start()
        self._commands.put(lambda: self._build(factory, options))

    def _build(self, factory: Callable[[bool], gymnasium.Env], options: dict[str, Any]) -> Reply:
        self._runner = EnvRunner(factory, self.indices, self._arrays, **options)
        return {}

    @property
    def pid(self) -> int | None:
        """Process id of the far process; None if it runs on another machine or not at all."""
        for peer in self._peers():
            return int(peer.process.pid) if peer.process is not None else None
        return None

    def wait_built(self, timeout: float | None = None) -> None:
        self._is_built = True
        self._result()

    def send(self, command: str, *args: Any) -> None:
        self._steps_here = False
        self._commands.put(lambda: self._running().call(command, *args))

    def send_step(self) -> None:
        runner = self._runner
        self._steps_here = self._is_built and runner is not None and self._one_message_each(runner)
        if self._steps_here:
            assert runner is not None
            runner.begin_steps()
        else:
            self._commands.put(lambda: self._running().step())

    def receive(self, timeout: float | None = None) -> Reply:
        """Return the reply to the last command; the environments have limits of their own (see `Peer.receive`)."""
        if self._steps_here:
            return self._running().step(begun=True)
        if not self._is_built:
            self.wait_built()
        return self._result()

    def close(self) -> None:
        self._commands.put(self._close)
        self._commands.put(None)

    def join(self) -> None:
        """Wait for the environments to be closed; end their process after `CLOSE_TIMEOUT_S`."""
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self.kill()

    def kill(self) -> None:
        """End the far process, and with it what waits for its answers."""
        for peer in self._peers():
            peer.lose("hung", "was ended")
        self._commands.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _close(self) -> Reply:
        if self._runner is not None:
            self._runner.close()
        return {}

    def _running(self) -> EnvRunner:
        assert self._runner is not None
        return self._runner

    def _peers(self) -> list[Any]:
        runner = self._runner
        slots = [] if runner is None else runner.slots
        found = [slot.far.peer for slot in slots if slot.env is not None and slot.far is not None]
        return list({id(peer): peer for peer in found}.values())

    def _one_message_each(self, runner: EnvRunner) -> bool:
        arrays, begin, end = self._arrays, self.indices[0], self.indices[-1] + 1
        if arrays.terminated[begin:end].any() or arrays.truncated[begin:end].any():
            return False
        envs = [slot.env for slot in runner.slots]
        known = self._asks_once
        if len(known[0]) != len(envs) or any(one is not two for one, two in zip(envs, known[0], strict=True)):
            self._asks_once = known = (envs, all(env is not None and _asks_once(env) for env in envs))
        return known[1]

    def _result(self) -> Reply:
        late = 0.0
        while True:
            try:
                reply, error = self._results.get(timeout=POLL_S)
                break
            except queue.Empty:
                late += POLL_S if STOP.overdue() else 0.0
            if late > STOP_WAIT_S:
                raise WorkerLost(
                    "hung",
                    worker_name(self.indices),
                    f"did not answer within {GRACE_S:g} s of the request to stop",
                )
        if isinstance(error, EnvironmentFailure):
            raise failure_message(error.index, error.text) from error.__cause__
        if error is not None:
            raise error
        return reply


def _serve(
    commands: queue.SimpleQueue[Callable[[], Reply] | None], results: queue.SimpleQueue[Result]
) -> None:
    while True:
        command = commands.get()
        if command is None:
            return
        try:
            results.put((command(), None))
        except BaseException as error:
            results.put(({}, error))
        del command  # it holds the environments


def _asks_once(env: gymnasium.Env) -> bool:
    """Return whether a step of this environment is one message."""
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, SEVERAL_MESSAGES):
            return False
        env = env.env
    return hasattr(env, "begin_step")
