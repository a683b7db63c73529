"""N environments side by side, over worker processes or in this one.

Autoreset is Gymnasium's NextStep: the step after an episode's end ignores its action, resets, and returns reward
0 and no flags. The results do not depend on the number of workers: every episode is reset with a seed made of
the run's seed, the environment's index and the episode's number.
"""

from __future__ import annotations

import multiprocessing
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from rl_lab.environments.history import ActionHistory
from rl_lab.environments.shared import StepArrays, shared_memory
from rl_lab.environments.spec import action_space, observation_space
from rl_lab.environments.workers import ProcessWorker, Worker, make_local_worker, start_context
from rl_lab.errors import CheckpointError, ConfigError, LabError
from rl_lab.records import Spec

# Work per vector step that a process of its own is worth: two wake-ups take 0.02 to 0.2 ms, by machine.
WORKTIME_S = 500e-6

Observations = dict[str, np.ndarray]  # name -> (N, …)
Infos = dict[str, Any]
StepResult = tuple[Observations, np.ndarray, np.ndarray, np.ndarray, Infos]


class VectorEnv:
    """The lab's vector environment: Gymnasium's vector interface, dict observations, exact resume.

    factory: called in the worker with `render` (bool), gives one environment with the lab's wrappers around it
    workers: number of processes; 0 steps in this process; None chooses (see `default_workers`)
    copy:    True returns fresh arrays; False returns views that hold until the next `step_async`
    infos:   "log" passes on only the sums of `log/` infos of episodes that ended (`infos["log"][index]`);
             "all" adds every environment's own info of this step (`infos["env"][index]`)
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 (Gymnasium's name and form)

    def __init__(
        self,
        factory: Callable[[bool], gymnasium.Env],
        num_envs: int,
        *,
        spec: Spec,
        workers: int | None = None,
        seed: int = 0,
        render: bool = False,
        copy: bool = True,
        infos: str = "log",
    ) -> None:
        self.num_envs = num_envs
        self.spec = spec
        self.copy = copy
        self.render_mode = "rgb_array" if render else None
        self.single_observation_space = observation_space(spec.observations)
        self.single_action_space = action_space(spec.action)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.num_workers = min(default_workers(num_envs) if workers is None else workers, num_envs)
        self.closed = False
        self.last_obs: Observations = {}
        self.last_dones = np.zeros(num_envs, bool)
        self._seed = seed
        self._started = False
        self._in_flight = False
        self._ended = np.zeros(num_envs, bool)
        self._history = ActionHistory(spec.action, num_envs)
        self._workers: list[Worker] = []
        self._close = weakref.finalize(self, _close_workers, self._workers, os.getpid())  # at exit too
        self._start(factory, all_infos=infos == "all", render=render)

    def _start(self, factory: Callable[[bool], gymnasium.Env], *, all_infos: bool, render: bool) -> None:
        num_envs = self.num_envs
        if self.num_workers == 0:
            self._arrays = StepArrays(self.spec, num_envs)
            self._workers.append(
                make_local_worker(factory, self._arrays, num_envs, all_infos=all_infos, render=render)
            )
            return
        memory = shared_memory(start_context(), self.spec, num_envs)
        self._arrays = StepArrays(self.spec, num_envs, memory)
        for share in np.array_split(np.arange(num_envs), self.num_workers):
            self._workers.append(
                ProcessWorker(
                    factory,
                    share.tolist(),
                    spec=self.spec,
                    num_envs=num_envs,
                    memory=memory,
                    all_infos=all_infos,
                    render=render,
                )
            )
        self._gather()

    # ---------------------------------------------------------------- stepping

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, Infos]:
        """Begin an episode in every environment.

        With a seed, or the first time, the episodes are counted from 0; later without one, the next begin.
        """
        self._idle("reset")
        if seed is not None or not self._started:
            self._seed = self._seed if seed is None else seed
            episodes = np.zeros(self.num_envs, np.int64)
        else:
            episodes = self._arrays.episode + 1
        infos = self._begin(range(self.num_envs), episodes, options)
        self._started = True
        self._history.clear()
        return self._received(), infos

    def step_async(self, actions: Any) -> None:
        """Send actions (N, …), as `spec.action` describes them; the environments start at once."""
        if not self._started:
            raise LabError("call reset() before the first step")
        self._idle("step_async")
        self._write_actions(actions)
        self._in_flight = True
        for worker in self._workers:
            worker.send_step()

    def step_wait(self) -> StepResult:
        """What the last actions led to: observations, reward (N,), terminated (N,), truncated (N,), infos."""
        if not self._in_flight:
            raise LabError("step_wait() without step_async(): no action is in flight")
        infos = self._gather()
        self._in_flight = False
        arrays = self._arrays
        self._history.record(arrays.action, self._ended)
        obs = self._received()
        if self.copy:
            return obs, arrays.reward.copy(), arrays.terminated.copy(), arrays.truncated.copy(), infos
        return obs, arrays.reward, arrays.terminated, arrays.truncated, infos

    def step(self, actions: Any) -> StepResult:
        self.step_async(actions)
        return self.step_wait()

    @property
    def is_first(self) -> np.ndarray:
        """(N,) bool: whether the current observation of each environment came from a reset."""
        return self._history.lengths == 0

    def render(self) -> np.ndarray:
        """(H, W, 3) uint8: what environment 0 looks like now."""
        self._idle("render")
        if self.render_mode is None:
            raise LabError("this environment was made without rendering: make_env(…, render=True)")
        self._workers[0].send("render")
        frame = np.asarray(self._receive(self._workers[0])["frame"])
        if frame.ndim != 3:
            raise LabError(
                f"{self.spec.name} renders no frames: its render() gave {type(frame[()]).__name__}"
            )
        return frame

    def close(self) -> None:
        """End the workers and close the environments. Safe to call again."""
        self.closed = True
        self._close()

    def __enter__(self) -> VectorEnv:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---------------------------------------------------------------- exact resume

    def get_state(self) -> dict[str, Any]:
        """Seed, episode numbers and the actions since each reset; the last results, to check a replay against."""
        import torch

        self._idle("get_state")
        if not self._started:
            raise LabError("call reset() before get_state()")
        arrays = self._arrays
        return {
            "seed": self._seed,
            "episode": torch.from_numpy(arrays.episode.copy()),
            "actions": [torch.from_numpy(self._history.get(env)) for env in range(self.num_envs)],
            "last": {name: torch.from_numpy(array.copy()) for name, array in self._compared().items()},
        }

    def set_state(self, state: Mapping[str, Any]) -> list[int]:
        """Go on from `get_state`: reset each environment with its episode's seed and replay its actions.

        Returns the environments that did not come out equal to the last bit; they begin their next episode.
        """
        self._idle("set_state")
        if len(state["actions"]) != self.num_envs:
            raise CheckpointError(
                f"the checkpoint has {len(state['actions'])} environments and this run has {self.num_envs}: "
                f"set environment.num_envs={len(state['actions'])}"
            )
        self._seed = int(state["seed"])
        episodes = np.array(state["episode"], dtype=np.int64)
        histories = [np.asarray(actions) for actions in state["actions"]]
        for worker in self._workers:
            worker.send(
                "replay", self._seed, {env: (int(episodes[env]), histories[env]) for env in worker.indices}
            )
        different = set(self._gather()["failed"])
        now, then = self._compared(), {name: np.asarray(value) for name, value in state["last"].items()}
        for env in range(self.num_envs):
            if any(name not in then or now[name][env].tobytes() != then[name][env].tobytes() for name in now):
                different.add(env)
            else:
                self._history.set(env, histories[env])
        if different:
            self._begin(sorted(different), episodes + 1)
            for env in different:
                self._history.lengths[env] = 0
        self._started = True
        self._received()
        return sorted(different)

    def _compared(self) -> dict[str, np.ndarray]:
        arrays = self._arrays
        last = {"obs/" + name: array for name, array in arrays.obs.items()}
        return {
            **last,
            "reward": arrays.reward,
            "terminated": arrays.terminated,
            "truncated": arrays.truncated,
        }

    # ---------------------------------------------------------------- workers

    def _begin(
        self, envs: Sequence[int], episodes: np.ndarray, options: dict[str, Any] | None = None
    ) -> Infos:
        wanted = {int(env): int(episodes[env]) for env in envs}
        for worker in self._workers:
            worker.send(
                "reset", self._seed, {env: wanted[env] for env in worker.indices if env in wanted}, options
            )
        return self._gather()

    def _gather(self) -> Infos:
        """One answer of every worker, merged by environment."""
        infos: Infos = {}
        for worker in self._workers:
            for key, value in self._receive(worker).items():
                if key not in infos:
                    infos[key] = value
                elif isinstance(value, list):
                    infos[key].extend(value)
                else:
                    infos[key].update(value)
        return infos

    def _receive(self, worker: Worker, timeout: float | None = None) -> dict[str, Any]:
        """The one place that waits for a worker. A failure ends all of them: their steps no longer agree."""
        try:
            return worker.receive(timeout)
        except LabError:
            self.close()
            raise

    def _received(self) -> Observations:
        arrays = self._arrays
        self._ended = arrays.terminated | arrays.truncated
        self.last_dones = self._ended.copy()
        self.last_obs = (
            {name: array.copy() for name, array in arrays.obs.items()} if self.copy else dict(arrays.obs)
        )
        return self.last_obs

    def _write_actions(self, actions: Any) -> None:
        actions = np.asarray(actions)
        target = self._arrays.action
        if actions.shape != target.shape:
            raise ConfigError(f"{self.spec.name} takes actions of shape {target.shape}, not {actions.shape}")
        try:
            np.copyto(target, actions, casting="same_kind")
        except TypeError:
            raise ConfigError(f"{self.spec.name} takes {target.dtype} actions, not {actions.dtype}") from None

    def _idle(self, what: str) -> None:
        if self.closed:
            raise LabError(f"{what}() on an environment that was closed")
        if self._in_flight:
            raise LabError(f"{what}() while actions are in flight: call step_wait() first")


def default_workers(num_envs: int, step_seconds: float | None = None) -> int:
    """How many processes to use: one per core that this one may use, and at most one per environment.

    A single environment stays in this process, and so do some whose steps are known to be so short that a
    message to a worker would take longer (`step_seconds`, a rough figure; None: not known).
    """
    if num_envs == 1 or multiprocessing.current_process().daemon:  # a daemon may not have children
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    worthwhile = num_envs if step_seconds is None else int(num_envs * step_seconds / WORKTIME_S)
    return min(num_envs, cores, worthwhile)


def _close_workers(workers: list[Worker], owner: int) -> None:
    if os.getpid() != owner:  # a fork of the trainer must not end the trainer's workers
        return
    for worker in workers:
        worker.close()
    for worker in workers:
        if isinstance(worker, ProcessWorker):
            worker.join()
    workers.clear()
