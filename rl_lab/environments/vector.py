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

from rl_lab.environments.env_runner import REST, Segment, StepArrays, episode_seed
from rl_lab.environments.faults import RestartLimit
from rl_lab.environments.normalizer import ObservationNormalizer
from rl_lab.environments.spec import action_space, observation_space
from rl_lab.environments.worker_pool import Crew, Infos, ProcessWorker
from rl_lab.errors import CheckpointError, ConfigError, LabError
from rl_lab.records import ActionSpec, Spec

# --------------------
# Where N environments stand, as plain data, and back there again.
#
# seed, episode        of the run; number of the episode that each environment is in
# actions, cuts        since each true beginning; where resets cut them that only continued a game. With the episodes'
# seeds they are replayed. An environment whose next step resets it truly needs none.
# last                 the rows that arrived last: what a replay is compared with, bit for bit
# goes_on              (N,) bool: the next reset continues the game
# forgotten, unbegun   environments with too many actions to keep; with a reset due that had failed
# restarts             counters of failures
# normalizer           observation statistics, or None


def state_of(env: VectorEnv) -> dict[str, Any]:
    import torch

    crew, rows = env.crew, _rows(env.crew.arrays)
    ended = rows["terminated"] | rows["truncated"]
    replayed = ~(ended & ~crew.arrays.goes_on)
    forgotten = env.history.forgotten & replayed
    kept = [
        env.history.get(index)
        if replayed[index] and not forgotten[index]
        else (env.history.get(index)[0][:0], [])
        for index in range(env.num_envs)
    ]
    return {
        "seed": crew.seed,
        "episode": torch.from_numpy(crew.episodes.copy()),
        "actions": [torch.from_numpy(actions) for actions, _ in kept],
        "cuts": [cuts for _, cuts in kept],
        "last": {name: torch.from_numpy(array.copy()) for name, array in rows.items()},
        "goes_on": torch.from_numpy(crew.arrays.goes_on & ended),
        "forgotten": np.flatnonzero(forgotten).tolist(),
        "unbegun": sorted(crew.unbegun),
        "restarts": crew.faults.get_state(),
        "normalizer": None if env.normalizer is None else env.normalizer.get_state(),
    }


def restore_state(env: VectorEnv, state: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Bring the environments back; returns those that began a new episode, and of these the ones that should not have.

    The latter are not deterministic, or had more actions than are kept.
    """
    crew, arrays = env.crew, env.crew.arrays
    number = len(state["actions"])
    if number != env.num_envs:
        raise CheckpointError(
            f"the checkpoint has {number} environments and this run has {env.num_envs}: set environment.num_envs={number}"
        )
    crew.seed = int(state["seed"])
    crew.episodes = np.array(state["episode"], dtype=np.int64)
    crew.faults.set_state(state.get("restarts", {}))
    _restore_statistics(env, state.get("normalizer"))
    then = {name: np.asarray(value) for name, value in state["last"].items()}
    goes_on = np.array(state.get("goes_on", np.zeros(number)), dtype=bool)
    cuts = state.get("cuts") or [[]] * number
    unbegun, different = set(state.get("unbegun", ())), set(state.get("forgotten", ()))
    asleep = (then["terminated"] | then["truncated"]) & ~goes_on  # their next step is a true beginning
    plans: dict[int, list[Segment]] = {}
    for index in set(range(number)) - unbegun - different - set(np.flatnonzero(asleep).tolist()):
        actions = np.asarray(state["actions"][index])
        env.history.set(index, actions, cuts[index])
        plans[index] = _segments(env, index, actions, cuts[index])
    different |= crew.replay(plans)
    now = _rows(arrays)
    for index in np.flatnonzero(asleep).tolist():
        for name, array in now.items():
            array[index] = then[name][index]
    arrays.goes_on[asleep] = False
    begun: set[int] = set()
    while True:  # once, unless a worker dies meanwhile and takes others with it
        for index in set(range(number)) - unbegun - different:
            same = all(now[name][index].tobytes() == then[name][index].tobytes() for name in now)
            if not same or arrays.goes_on[index] != goes_on[index]:
                different.add(index)
        missing = sorted((unbegun | different) - begun)
        if not missing:
            break
        crew.episodes[missing] += 1
        crew.begin(missing)
        begun |= set(missing)
    env.history.begin(sorted(begun))
    first = [index in begun or _at_reset(plans.get(index, [])) for index in range(number)]
    env.is_first = np.array(first, dtype=bool)
    return sorted(begun), sorted(different)


def _segments(env: VectorEnv, index: int, actions: np.ndarray, cuts: Sequence[int]) -> list[Segment]:
    """The episodes of an open game: their numbers follow one another, and the last is the open one."""
    first = int(env.crew.episodes[index]) - len(cuts)
    parts = np.split(actions, [int(cut) for cut in cuts])
    return [(episode_seed(env.crew.seed, index, first + place), part) for place, part in enumerate(parts)]


def _at_reset(segments: Sequence[Segment]) -> bool:
    return bool(segments) and len(segments[-1][1]) == 0


def _restore_statistics(env: VectorEnv, statistics: Mapping[str, Any] | None) -> None:
    if (statistics is None) != (env.normalizer is None):
        raise CheckpointError(
            f"the checkpoint was made with environment.normalize_observations={str(statistics is not None).lower()}"
        )
    if env.normalizer is not None and statistics is not None:
        env.normalizer.set_state(statistics)


def _rows(arrays: StepArrays) -> dict[str, np.ndarray]:
    observations = {"obs/" + name: array for name, array in arrays.obs.items()}
    return {
        **observations,
        "reward": arrays.reward,
        "terminated": arrays.terminated,
        "truncated": arrays.truncated,
    }


# --------------------
# The actions since each environment's last true beginning: with the episodes' seeds, all that an exact resume needs.


FIRST_CAPACITY = 64


class ActionHistory:
    """Actions of each of N environments, in the smallest dtype that holds them.

    A reset that continues a game (a life was lost, the episode ended, the game did not) only marks a cut: what follows
    depends on all that came before, back to the game's start. Actions beyond `limit` are counted and not kept: from
    then on the environment is `forgotten`, until its next true beginning.
    """

    def __init__(self, action: ActionSpec, num_envs: int, limit: int = 100_000) -> None:
        choices = max(action.choices, default=0)
        compact = np.uint8 if choices <= 256 else np.int32
        dtype = np.float32 if action.kind == "continuous" else compact
        self.limit = limit
        self.lengths = np.zeros(num_envs, np.int64)  # actions since the last true beginning
        self._cuts: list[list[int]] = [[] for _ in range(num_envs)]
        # The last place is a spare one, for actions beyond the limit.
        self._actions = np.zeros((num_envs, min(FIRST_CAPACITY, limit) + 1, *action.shape), dtype)
        self._envs = np.arange(num_envs)
        self._longest = 0  # no length is greater; exact only after it was recomputed
        self.overflown = False  # whether any environment was ever forgotten

    @property
    def forgotten(self) -> np.ndarray:
        """(N,) bool: more actions than the limit, so that they cannot be replayed."""
        return self.lengths > self.limit

    def record(self, actions: np.ndarray, began: np.ndarray, continued: np.ndarray) -> None:
        """Add one vector step.

        began: (N,) bool, those that reset instead, at their first row now; continued: which of these resets went on
        with the game of the episode before.
        """
        spare = self._actions.shape[1] - 1
        if self._longest >= spare:
            self._longest = int(self.lengths.max())
            if self._longest >= spare and spare < self.limit:
                self._grow(self._longest + 1)
        index = self.lengths
        if self._longest >= self.limit:
            index = np.minimum(index, self.limit)
            self.overflown = self.overflown or bool(index.max(initial=0) >= self.limit)
        self._actions[self._envs, index] = actions
        self.lengths += 1
        self._longest += 1
        for env in np.flatnonzero(began):
            self._begin(int(env), bool(continued[env]))

    def _begin(self, env: int, continued: bool) -> None:
        if continued:
            self.lengths[env] -= 1  # the action that a reset ignores
            if self.lengths[env] <= self.limit:
                self._cuts[env].append(int(self.lengths[env]))
        else:
            self.lengths[env] = 0
            self._cuts[env] = []

    def begin(self, envs: Sequence[int]) -> None:
        """These environments began truly, out of turn."""
        for env in envs:
            self._begin(env, continued=False)

    def get(self, env: int) -> tuple[np.ndarray, list[int]]:
        """Actions (length, …) of one environment, a copy, and where resets that continued cut them."""
        return self._actions[env, : self.lengths[env]].copy(), list(self._cuts[env])

    def set(self, env: int, actions: np.ndarray, cuts: Sequence[int] = ()) -> None:
        """Take back what `get` gave."""
        self._grow(len(actions))
        self._actions[env, : len(actions)] = actions
        self.lengths[env] = len(actions)
        self._cuts[env] = [int(cut) for cut in cuts]
        self._longest = max(self._longest, len(actions))

    def _grow(self, length: int) -> None:
        """Room for that many actions, by doubling, and for the spare one."""
        room = self._actions.shape[1] - 1
        if length <= room:
            return
        while room < length:
            room = max(1, 2 * room)
        room = max(min(room, self.limit), length)
        added = np.zeros(
            (self._actions.shape[0], room + 1 - self._actions.shape[1], *self._actions.shape[2:]),
            self._actions.dtype,
        )
        self._actions = np.concatenate([self._actions, added], axis=1)


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
