"""N environments side by side, over worker processes or in this one.

Autoreset is Gymnasium's NextStep: the step after an episode's end ignores its action, resets, and returns reward
0 and no flags. The results do not depend on the number of workers: every episode is reset with a seed made of
the run's seed, the environment's index and the episode's number.

An environment that fails (it raised, gave a row that cannot be used, its process died or does not answer) is made again.
Its open episode ends with a row of its own: the last observation once more, reward 0, truncated; the step after it is the
reset, as after any end.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from rl_lab.environments.crew import REST, Crew, Infos
from rl_lab.environments.faults import RestartLimit
from rl_lab.environments.history import ActionHistory
from rl_lab.environments.normalizer import ObservationNormalizer
from rl_lab.environments.spec import action_space, observation_space
from rl_lab.environments.vector_state import restore_state, state_of
from rl_lab.environments.workers import ProcessWorker
from rl_lab.errors import ConfigError, LabError
from rl_lab.records import Spec

# Work per vector step that a process of its own is worth: two wake-ups take 0.02 to 0.2 ms, by machine.
WORKTIME_S = 500e-6

Observations = dict[str, np.ndarray]  # name -> (N, …)
StepResult = tuple[Observations, np.ndarray, np.ndarray, np.ndarray, Infos]


class VectorEnv:
    """The lab's vector environment: Gymnasium's vector interface, dict observations, exact resume, restarts.

    factory:  called in the worker with `render` (bool), gives one environment with the lab's wrappers around it
    workers:  number of processes; 0 steps in this process; None chooses (see `default_workers`)
    copy:     True returns fresh arrays; False returns views that hold until the next `step_async`
    infos:    "log" passes on only the sums of `log/` infos of episodes that ended (`infos["log"][index]`);
              "all" adds every environment's own info of this step (`infos["env"][index]`)
    timeout:  seconds that one call of an environment in a worker process may take (the first ones: five times as
              long); None: any time
    restarts: how many failures are borne. With one more, the step is still completed (so that a checkpoint can be
              taken) and the next one raises EnvironmentFaultError.
    history_limit: actions of an open episode that are kept for an exact resume; after more, it begins anew there

    `infos["closed"]` (index -> why) names the episodes that a failure ended with this step.
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
        timeout: float | None = None,
        restarts: RestartLimit | None = None,
        normalizer: ObservationNormalizer | None = None,
        history_limit: int = 100_000,
    ) -> None:
        self.num_envs = num_envs
        self.spec = spec
        self.copy = copy
        self.normalizer = normalizer
        self.render_mode = "rgb_array" if render else None
        self.single_observation_space = observation_space(spec.observations)
        self.single_action_space = action_space(spec.action)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.num_workers = min(default_workers(num_envs) if workers is None else workers, num_envs)
        self.closed = False
        self.last_obs: Observations = {}
        self.last_dones = np.zeros(num_envs, bool)
        self.is_first = np.ones(num_envs, bool)  # whether each current observation came from a reset
        self.history = ActionHistory(spec.action, num_envs, history_limit)
        self._said_forgotten = False
        self._started = False
        self._in_flight = False
        self._ended = np.zeros(num_envs, bool)
        self._goes_on = np.zeros(num_envs, bool)
        self._frame: np.ndarray | None = None
        self.crew = Crew(
            factory,
            num_envs,
            spec=spec,
            num_workers=self.num_workers,
            seed=seed,
            options={"all_infos": infos == "all", "render": render},
            timeout=timeout,
            restarts=restarts or RestartLimit(),
        )

    # ---------------------------------------------------------------- stepping

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, Infos]:
        """Begin an episode in every environment.

        With a seed, or the first time, the episodes are counted from 0; later without one, the next begin.
        """
        self._ready("reset")
        crew = self.crew
        if seed is not None or not self._started:
            crew.seed = crew.seed if seed is None else seed
            crew.episodes = np.zeros(self.num_envs, np.int64)
        else:
            crew.episodes = crew.episodes + 1
        infos = crew.begin(range(self.num_envs), options)
        self.history.begin(range(self.num_envs))
        self.is_first = np.ones(self.num_envs, bool)
        self._started = crew.trusted = True
        return self._received(), infos

    def step_async(self, actions: Any) -> None:
        """Send actions (N, …), as `spec.action` describes them; the environments start at once."""
        if not self._started:
            raise LabError("call reset() before the first step")
        self._ready("step_async")
        self._write_actions(actions)
        self._in_flight = True
        self.crew.send_step(self._ended)

    def step_wait(self) -> StepResult:
        """What the last actions led to: observations, reward (N,), terminated (N,), truncated (N,), infos."""
        if not self._in_flight:
            raise LabError("step_wait() without step_async(): no action is in flight")
        arrays, began = self.crew.arrays, self._ended
        infos = self.crew.take_step(began)
        self._in_flight = False
        self.history.record(arrays.action, began, self._goes_on)
        if self.history.overflown and not self._said_forgotten:
            self._say_forgotten()
        self.is_first = began
        obs = self._received(without=infos.get("closed"))
        if self.copy:
            return obs, arrays.reward.copy(), arrays.terminated.copy(), arrays.truncated.copy(), infos
        return obs, arrays.reward, arrays.terminated, arrays.truncated, infos

    def step(self, actions: Any) -> StepResult:
        self.step_async(actions)
        return self.step_wait()

    def schedule(self, seeds: Mapping[int, int | None]) -> None:
        """End these environments' episodes here; the next step begins others, with the seeds given. None: rest.

        For those who choose what is played: an environment that rests is not stepped, and its row stays, until it is
        scheduled again. Such episodes cannot be resumed.
        """
        self._ready("schedule")
        arrays = self.crew.arrays
        for env, seed in seeds.items():
            arrays.truncated[env] = not arrays.terminated[env]
            arrays.goes_on[env] = False
            self.crew.chosen[env] = REST if seed is None else seed
        self._received(only=())

    @property
    def restarts(self) -> int:
        """Failures that were followed by a restart, since the run began."""
        return self.crew.faults.total

    @property
    def failure(self) -> LabError | None:
        """Why the next step will raise: more failures than are borne. `get_state` still works."""
        return self.crew.faults.failure

    def listen(self, say: Callable[[str], None], *, trusted: bool = False) -> None:
        """Where messages go (else they are warnings). trusted: bear failures from the very first reset on."""
        self.crew.faults.say = say
        self.crew.trusted = self.crew.trusted or trusted

    def worker_pids(self) -> list[int]:
        """Process ids of the workers, in the order of their environments; empty when there are none."""
        workers = self.crew.workers
        return [int(w.process.pid or 0) for w in workers if isinstance(w, ProcessWorker)]

    def render(self) -> np.ndarray:
        """(H, W, 3) uint8: what environment 0 looks like now; its last frame once more if it has just failed."""
        self._ready("render")
        if self.render_mode is None:
            raise LabError("this environment was made without rendering: make_env(…, render=True)")
        frame = self.crew.render()
        frame = np.asarray(self._frame if frame is None else frame)
        if frame.ndim != 3:
            raise LabError(
                f"{self.spec.name} renders no frames: its render() gave {type(frame[()]).__name__}"
            )
        self._frame = frame
        return frame

    def close(self) -> None:
        """End the workers and close the environments. Safe to call again."""
        self.closed = True
        self.crew.close()

    def __enter__(self) -> VectorEnv:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---------------------------------------------------------------- exact resume

    def get_state(self) -> dict[str, Any]:
        """Seed, episode numbers, the actions since each beginning, counters and statistics (see `vector_state`)."""
        self._idle("get_state")
        if not self._started:
            raise LabError("call reset() before get_state()")
        return state_of(self)

    def set_state(self, state: Mapping[str, Any]) -> list[int]:
        """Go on from `get_state`: reset each environment with its episode's seed and replay its actions.

        Returns the environments that did not come out equal to the last bit, or had too many actions to keep; they
        begin their next episode.
        """
        self._ready("set_state")
        begun, different = restore_state(self, state)
        self._started = self.crew.trusted = True
        self._received(only=begun)
        return different

    def _received(
        self, *, only: Sequence[int] | None = None, without: Mapping[int, str] | None = None
    ) -> Observations:
        """Take over what lies in the arrays. The normalizer counts all rows, `only` some, or all but `without`."""
        arrays = self.crew.arrays
        self._ended = arrays.terminated | arrays.truncated
        self._goes_on = arrays.goes_on & self._ended
        self.last_dones = self._ended.copy()
        obs = arrays.obs
        if self.normalizer is not None:
            rows = None
            if only is not None or without or self.crew.unbegun:
                rows = np.full(self.num_envs, only is None)
                rows[list(only or ())] = True
                rows[[*(without or ()), *self.crew.unbegun]] = False
            self.normalizer.update(obs, rows)
            obs = self.normalizer(obs)
        self.last_obs = {name: array.copy() for name, array in obs.items()} if self.copy else dict(obs)
        return self.last_obs

    def _say_forgotten(self) -> None:
        self._said_forgotten = True
        self.crew.faults.say(
            f"{self.spec.name}: an episode has more than environment.history_limit={self.history.limit} actions; they "
            "are no longer kept, so after a resume such an environment begins a new episode"
        )

    def _write_actions(self, actions: Any) -> None:
        actions = np.asarray(actions)
        target = self.crew.arrays.action
        if actions.shape != target.shape:
            raise ConfigError(f"{self.spec.name} takes actions of shape {target.shape}, not {actions.shape}")
        try:
            np.copyto(target, actions, casting="same_kind")
        except TypeError:
            raise ConfigError(f"{self.spec.name} takes {target.dtype} actions, not {actions.dtype}") from None

    def _ready(self, what: str) -> None:
        if self.failure is not None:
            raise self.failure
        self._idle(what)

    def _idle(self, what: str) -> None:
        if self.closed:
            raise LabError(f"{what}() on an environment that was closed")
        if self._in_flight:
            raise LabError(f"{what}() while actions are in flight: call step_wait() first")


def default_workers(num_envs: int, step_seconds: float | None = None) -> int:
    """How many processes to use: one per core that this one may use, and at most one per environment.

    A single environment stays in this process, and so do some whose steps are known to be so short that a
    message to a worker would take longer (`step_seconds`, a rough figure; None: not known). More processes than
    cores were not faster for long and uneven steps either (Crafter: 2, 4 and 8 of them on 2 cores).
    """
    if num_envs == 1 or multiprocessing.current_process().daemon:  # a daemon may not have children
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    worthwhile = num_envs if step_seconds is None else int(num_envs * step_seconds / WORKTIME_S)
    return min(num_envs, cores, worthwhile)
