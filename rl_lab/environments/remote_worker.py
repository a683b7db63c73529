"""Environments of a vector environment in processes elsewhere, whose memory is not shared: rows are sent.

The numbers are those of local workers: the same commands, seeds and actions, so the same rows.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import gymnasium
import numpy as np

from rl_lab.environments.env_runner import EnvironmentFailure, EnvRunner, Reply, StepArrays
from rl_lab.environments.workers import FIRST_REPLY_FACTOR, POLL_S, WorkerLost, failure_message, pickled
from rl_lab.records import Spec
from rl_lab.utils.stopping import GRACE_S, STOP

FLAGS = ("reward", "terminated", "truncated", "reset_continues", "seed", "call_counts")
INPUTS = ("action", "seed", "terminated", "truncated", "reset_continues")


class Remote(Protocol):
    """An object elsewhere, as `launch.ray_cluster.RayObject`: every `call` is followed by a `result`."""

    def call(self, method: str, *args: Any) -> None: ...
    def ready(self, seconds: float = 0.0) -> bool: ...
    def result(self, seconds: float | None = None) -> Any: ...
    def kill(self) -> None: ...


StartRemote = Callable[[str, Mapping[str, Any]], Remote]  # "module:Class", keyword arguments


class RemoteEnvironments:
    """In the process elsewhere: an `EnvRunner` with arrays of its own."""

    def __init__(self, payload: bytes, spec: dict[str, Any], num_envs: int) -> None:
        factory, self.indices, options = pickle.loads(payload)
        self.arrays = StepArrays(Spec.from_dict(spec), num_envs)
        self.failure: tuple[int, str] | None = None
        try:
            self.runner = EnvRunner(factory, self.indices, self.arrays, **options)
        except EnvironmentFailure as failure:  # told by `built`: the constructor of an actor has no answer
            self.failure = (failure.index, failure.text)

    def built(self) -> Reply:
        return {} if self.failure is None else {"error": self.failure}

    def run(
        self, command: str, args: Sequence[Any], inputs: Mapping[str, np.ndarray]
    ) -> tuple[Reply, dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Run a command of the EnvRunner; return its reply and the rows of these environments."""
        arrays, indices = self.arrays, self.indices
        for name, values in inputs.items():
            getattr(arrays, name)[indices] = values
        try:
            reply = self.runner.call(command, *args)
        except EnvironmentFailure as failure:
            reply = {"error": (failure.index, failure.text)}
        except Exception:
            reply = {"error": (-1, traceback.format_exc())}
        obs = {name: array[indices] for name, array in arrays.obs.items()}
        return reply, obs, {name: getattr(arrays, name)[indices] for name in FLAGS}

    def close(self) -> None:
        if self.failure is None:
            self.runner.close()


class RemoteWorker:
    """Handle to `RemoteEnvironments`, with the interface of the pool's workers."""

    def __init__(
        self,
        start: StartRemote,
        factory: Callable[[bool], gymnasium.Env],
        indices: Sequence[int],
        arrays: StepArrays,
        options: dict[str, Any],
        *,
        spec: Spec,
        num_envs: int,
    ) -> None:
        self.indices: Sequence[int] = list(indices)
        self.arrays = arrays
        payload = pickled((factory, list(indices), options))
        where = f"{__name__}:RemoteEnvironments"
        self.remote = start(where, {"payload": payload, "spec": spec.to_dict(), "num_envs": num_envs})
        self.remote.call("built")
        self._is_built = False

    def send(self, command: str, *args: Any) -> None:
        inputs = {name: getattr(self.arrays, name)[self.indices] for name in INPUTS}
        self.remote.call("run", command, args, inputs)

    def send_step(self) -> None:
        self.send("step")

    def wait_built(self, timeout: float | None = None) -> None:
        self._is_built = True
        reply = self._result(timeout)
        if "error" in reply:
            self._raise(reply)

    def receive(self, timeout: float | None = None) -> Reply:
        if not self._is_built:
            self.wait_built(timeout)
        reply, obs, flags = self._result(timeout)
        if "error" in reply:
            self._raise(reply)
        for name, values in obs.items():
            self.arrays.obs[name][self.indices] = values
        for name, values in flags.items():
            getattr(self.arrays, name)[self.indices] = values
        return reply

    def _raise(self, reply: Reply) -> None:
        raise failure_message(*reply["error"])

    def _result(self, timeout: float | None) -> Any:
        """Wait in parts, so that a request to stop ends a call that hangs."""
        limit = None if timeout is None else timeout * FIRST_REPLY_FACTOR  # it shares its cores with others
        who = f"the worker of environments {self.indices[0]} to {self.indices[-1]}"
        waited = 0.0
        try:
            while not self.remote.ready(POLL_S):
                waited += POLL_S
                if limit is not None and waited >= limit:
                    raise WorkerLost("hung", who, f"did not answer for {limit:g} s")
                if STOP.overdue():
                    raise WorkerLost(
                        "hung", who, f"did not answer within {GRACE_S:g} s of the request to stop"
                    )
            return self.remote.result()
        except ConnectionError as error:
            raise WorkerLost("died", who, f"was lost on the cluster: {error}") from error

    def close(self) -> None:
        self.remote.kill()

    def join(self) -> None:
        """The process was ended by `close`."""

    def kill(self) -> None:
        self.remote.kill()
