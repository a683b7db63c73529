"""`VectorEnv`: N environments, stepped in worker processes or in this process, with exact resume.

Autoreset mode is Gymnasium's NEXT_STEP: the step after the end of an episode ignores its action, resets, and
returns reward 0 and no flags. Results do not depend on the number of workers: the seed of every episode is
derived from the run's seed, the environment's index and the episode's number.

An environment that fails (it raises, returns an unusable row, its process dies or hangs) is restarted; see
`worker_pool`. Its open episode ends with an additional row: the last observation repeated, reward 0,
truncated. The next step is a reset, as after any end of an episode.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from rl_lab.environments.env_runner import IDLE, Segment, StepArrays, episode_seed
from rl_lab.environments.faults import RestartLimit
from rl_lab.environments.spec import action_space, observation_space
from rl_lab.environments.worker_pool import Infos, WorkerPool
from rl_lab.errors import CheckpointError, ConfigError, LabError
from rl_lab.records import ActionSpec, Spec

if TYPE_CHECKING:
    from rl_lab.environments.normalizer import ObservationNormalizer
    from rl_lab.environments.remote_worker import StartRemote

INITIAL_CAPACITY = 64  # actions of an `ActionHistory`
# Environment time per vector step that justifies a process: two wake-ups take 0.02 to 0.2 ms, depending on
# the machine.
MIN_WORK_PER_PROCESS_S = 500e-6

Observations = dict[str, np.ndarray]  # name -> (N, …)
StepResult = tuple[Observations, np.ndarray, np.ndarray, np.ndarray, Infos]


class VectorEnv(gymnasium.vector.VectorEnv[dict[str, np.ndarray], Any, np.ndarray]):
    """Vector environment with Gymnasium's vector interface, dict observations, exact resume and restarts.

    factory:  called in the worker with `render` (bool); returns one environment with the lab's wrappers
    workers:  number of processes; 0: step in this process; None: see `default_workers`
    copy:     True: return new arrays; False: return views that are valid until the next `step_async`
    infos:    "log": only the sums of `log/` infos of finished episodes (`infos["log"][index]`);
              "all": also each environment's info of this step (`infos["env"][index]`)
    timeout:  maximum seconds of one environment call in a worker process (five times as long for the first
              calls); None: no limit
    restarts: number of allowed restarts. After one more failure the current step is still completed, so that
              a checkpoint can be saved, and the next step raises EnvironmentFaultError.
    history_limit: maximum number of actions kept for exact resume; a longer episode is not resumed but
                   restarted
    remote:   starts the workers on other machines (see remote_worker.py)
    lanes:    True: the environments are in another interpreter, in as many processes as `workers` says, and
              none here (see lanes.py); `factory.in_lane(number)` is the factory for one of these processes

    `infos["closed"]` (index -> reason) lists the episodes that a failure ended in this step.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 (as in Gymnasium)
    spec: Spec  # type: ignore[assignment]  # shapes and types; Gymnasium's EnvSpec describes one environment

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
        remote: StartRemote | None = None,
        lanes: bool = False,
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
        self.is_first = np.ones(num_envs, bool)  # whether each current observation is from a reset
        self.history = ActionHistory(spec.action, num_envs, history_limit)
        self._reported_forgotten = False
        self._started = False
        self._in_flight = False
        self._ended = np.zeros(num_envs, bool)
        self._reset_continues = np.zeros(num_envs, bool)
        self._frame: np.ndarray | None = None
        self.pool = WorkerPool(
            factory,
            num_envs,
            spec=spec,
            num_workers=self.num_workers,
            seed=seed,
            options={"all_infos": infos == "all", "render": render},
            timeout=timeout,
            restarts=restarts or RestartLimit(),
            remote=remote,
            lanes=lanes,
        )

    # ---------------------------------------------------------------- stepping

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, Infos]:
        """Start an episode in every environment.

        Episodes are numbered from 0 in the first call and with a seed; otherwise the next episodes start.
        """
        self._ready("reset")
        pool = self.pool
        if seed is not None or not self._started:
            pool.seed = pool.seed if seed is None else seed
            pool.episodes = np.zeros(self.num_envs, np.int64)
        else:
            pool.episodes = pool.episodes + 1
        infos = pool.reset(range(self.num_envs), options)
        self.history.reset(range(self.num_envs))
        self.is_first = np.ones(self.num_envs, bool)
        self._started = pool.trusted = True
        return self._read_arrays(), infos

    def step_async(self, actions: Any) -> None:
        """Send actions (N, …), as described by `spec.action`; the environments start to step immediately."""
        if not self._started:
            raise LabError("step_async(): call reset() before the first step")
        self._ready("step_async")
        self._write_actions(actions)
        self._in_flight = True
        self.pool.send_step(self._ended)

    def step_wait(self) -> StepResult:
        """Wait for the step; return observations, reward (N,), terminated (N,), truncated (N,), infos."""
        if not self._in_flight:
            raise LabError("step_wait(): no action is in flight, call step_async() first")
        arrays, was_reset = self.pool.arrays, self._ended
        infos = self.pool.receive_step(was_reset)
        self._in_flight = False
        self.history.record(arrays.action, was_reset, self._reset_continues)
        if self.history.overflowed and not self._reported_forgotten:
            self._report_forgotten()
        self.is_first = was_reset
        obs = self._read_arrays(without=infos.get("closed"))
        if self.copy:
            return obs, arrays.reward.copy(), arrays.terminated.copy(), arrays.truncated.copy(), infos
        return obs, arrays.reward, arrays.terminated, arrays.truncated, infos

    def step(self, actions: Any) -> StepResult:
        self.step_async(actions)
        return self.step_wait()

    def schedule(self, seeds: Mapping[int, int | None]) -> None:
        """Truncate the episodes of these environments; the next step uses these seeds. None: idle.

        For callers that choose the episodes, such as an evaluator. An idle environment is not stepped and
        keeps its last row until it is scheduled again. Scheduled episodes cannot be resumed.
        """
        self._ready("schedule")
        arrays = self.pool.arrays
        for env, seed in seeds.items():
            arrays.truncated[env] = not arrays.terminated[env]
            arrays.reset_continues[env] = False
            self.pool.scheduled_seeds[env] = IDLE if seed is None else seed
        self._read_arrays(only=())

    @property
    def restarts(self) -> int:
        """Number of restarts since the start of the run."""
        return self.pool.faults.total

    @property
    def failure(self) -> LabError | None:
        """The error that the next step raises, after too many failures; `get_state` still works."""
        return self.pool.faults.failure

    def listen(self, report: Callable[[str], None], *, trusted: bool = False) -> None:
        """Send messages to `report`, not `warnings`. trusted: allow restarts in the first reset, too."""
        self.pool.faults.report = report
        self.pool.trusted = self.pool.trusted or trusted

    def take_side_failures(self) -> list[str]:
        """Return the tracebacks of videos that failed since the last call."""
        failures, self.pool.side_failures = self.pool.side_failures, []
        return failures

    def worker_pids(self) -> list[int]:
        """Process ids of the workers, in the order of their environments; empty without worker processes.

        With another interpreter on this machine, these are its processes.
        """
        return [pid for worker in self.pool.workers if (pid := getattr(worker, "pid", None)) is not None]

    def render(self) -> tuple[np.ndarray, ...]:
        """Return the frames that are rendered, as Gymnasium does: a tuple with that of environment 0."""
        return (self.frame(),)

    def frame(self) -> np.ndarray:
        """Return the frame of environment 0, (H, W, 3) uint8; the last one again if it has just failed."""
        self._ready("render")
        if self.render_mode is None:
            raise LabError("render(): rendering is off, create the environment with make_env(…, render=True)")
        frame = self.pool.render()
        frame = np.asarray(self._frame if frame is None else frame)
        if frame.ndim != 3:
            raise LabError(
                f"{self.spec.name} renders no frames: its render() returned {type(frame[()]).__name__}"
            )
        self._frame = frame
        return frame

    def action_names(self) -> list[str]:
        """Return what the environment calls its actions or axes (`metadata["action_names"]`); [] if it does not say."""
        self._ready("action_names")
        return self.pool.action_names()

    def close(self, **kwargs: Any) -> None:
        """Close the environments and stop the workers. Can be called more than once."""
        self.closed = True
        self.pool.close()

    def __repr__(self) -> str:
        return f"VectorEnv({self.spec.name}, num_envs={self.num_envs}, workers={self.num_workers})"

    __str__ = __repr__

    def __enter__(self) -> VectorEnv:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---------------------------------------------------------------- exact resume

    def get_state(self) -> dict[str, Any]:
        """Return seeds, episode numbers, actions, counts and statistics (see `state_of`)."""
        self._idle("get_state")
        if not self._started:
            raise LabError("get_state(): call reset() first")
        return state_of(self)

    def set_state(self, state: Mapping[str, Any]) -> list[int]:
        """Restore a state: reset each environment with its episode's seed and replay its actions.

        Returns the environments that are not bit-identical afterwards or had too many actions; these start
        their next episode.
        """
        self._ready("set_state")
        restarted, diverged = restore_state(self, state)
        self._started = self.pool.trusted = True
        self._read_arrays(only=restarted)
        return diverged

    def _read_arrays(
        self, *, only: Sequence[int] | None = None, without: Mapping[int, str] | None = None
    ) -> Observations:
        """Read the arrays. The normalizer counts all rows, those in `only`, or all except `without`."""
        arrays = self.pool.arrays
        self._ended = arrays.terminated | arrays.truncated
        self._reset_continues = arrays.reset_continues & self._ended
        self.last_dones = self._ended.copy()
        obs = arrays.obs
        if self.normalizer is not None:
            rows = None
            if only is not None or without or self.pool.reset_pending:
                rows = np.full(self.num_envs, only is None)
                rows[list(only or ())] = True
                rows[[*(without or ()), *self.pool.reset_pending]] = False
            self.normalizer.update(obs, rows)
            obs = self.normalizer(obs)
        self.last_obs = {name: array.copy() for name, array in obs.items()} if self.copy else dict(obs)
        return self.last_obs

    def _report_forgotten(self) -> None:
        self._reported_forgotten = True
        self.pool.faults.report(
            f"{self.spec.name}: an episode has more than environment.history_limit={self.history.limit} actions; its "
            "actions are no longer kept, so it cannot be resumed and a new episode will start instead"
        )

    def _write_actions(self, actions: Any) -> None:
        actions = np.asarray(actions)
        target = self.pool.arrays.action
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
            raise LabError(f"{what}(): the environment is closed")
        if self._in_flight:
            raise LabError(f"{what}(): actions are in flight, call step_wait() first")


def default_workers(num_envs: int, step_seconds: float | None = None) -> int:
    """Return the default number of processes: one per available core, at most one per environment.

    A single environment runs in this process, and so do environments whose steps are shorter than a message
    to a worker (`step_seconds` is an estimate; None: unknown). More processes than cores are not faster, not
    even for long steps of varying length (measured with Crafter: 2, 4 and 8 processes on 2 cores).
    """
    if num_envs == 1 or multiprocessing.current_process().daemon:  # a daemon process cannot have children
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    worthwhile = num_envs if step_seconds is None else int(num_envs * step_seconds / MIN_WORK_PER_PROCESS_S)
    return min(num_envs, cores, worthwhile)


# --- Action history --------------------------------------------------------------------------------------


class ActionHistory:
    """Actions since the last full reset of each environment, kept for exact resume.

    With the seeds of the episodes these actions reproduce the state of an environment. A reset that continues
    a game (a lost life ended the episode but not the game) only marks a cut: the state still depends on all
    actions since the start of the game. Actions beyond `limit` are counted but not kept; the environment is
    then `forgotten` until its next full reset.
    """

    def __init__(self, action: ActionSpec, num_envs: int, limit: int = 100_000) -> None:
        choices = max(action.choices, default=0)
        compact = np.uint8 if choices <= 256 else np.int32
        dtype = np.float32 if action.kind == "continuous" else compact
        self.limit = limit
        self.lengths = np.zeros(num_envs, np.int64)  # actions since the last full reset
        self._cuts: list[list[int]] = [[] for _ in range(num_envs)]
        # The last entry is a dummy for actions beyond the limit.
        self._actions = np.zeros((num_envs, min(INITIAL_CAPACITY, limit) + 1, *action.shape), dtype)
        self._envs = np.arange(num_envs)
        self._longest = 0  # upper bound of `lengths`; exact only after it was recomputed
        self.overflowed = False  # whether any environment was forgotten at any time

    @property
    def forgotten(self) -> np.ndarray:
        """(N,) bool: whether there are more actions than the limit, so that they cannot be replayed."""
        return self.lengths > self.limit

    def record(self, actions: np.ndarray, was_reset: np.ndarray, continued: np.ndarray) -> None:
        """Add one vector step.

        was_reset: (N,) bool, environments that were reset instead of stepped
        continued: (N,) bool, which of these resets continued the game of the previous episode
        """
        capacity = self._actions.shape[1] - 1
        if self._longest >= capacity:
            self._longest = int(self.lengths.max())
            if self._longest >= capacity and capacity < self.limit:
                self._grow(self._longest + 1)
        index = self.lengths
        if self._longest >= self.limit:
            index = np.minimum(index, self.limit)
            self.overflowed = self.overflowed or bool(index.max(initial=0) >= self.limit)
        self._actions[self._envs, index] = actions
        self.lengths += 1
        self._longest += 1
        for env in np.flatnonzero(was_reset):
            self._reset(int(env), bool(continued[env]))

    def _reset(self, env: int, continued: bool) -> None:
        if continued:
            self.lengths[env] -= 1  # a reset ignores its action
            if self.lengths[env] <= self.limit:
                self._cuts[env].append(int(self.lengths[env]))
        else:
            self.lengths[env] = 0
            self._cuts[env] = []

    def reset(self, envs: Sequence[int]) -> None:
        """Clear the history of these environments after a full reset."""
        for env in envs:
            self._reset(env, continued=False)

    def get(self, env: int) -> tuple[np.ndarray, list[int]]:
        """Return a copy of the actions (length, …) of one environment, and the positions of the cuts."""
        return self._actions[env, : self.lengths[env]].copy(), list(self._cuts[env])

    def set(self, env: int, actions: np.ndarray, cuts: Sequence[int] = ()) -> None:
        """Restore what `get` returned."""
        self._grow(len(actions))
        self._actions[env, : len(actions)] = actions
        self.lengths[env] = len(actions)
        self._cuts[env] = [int(cut) for cut in cuts]
        self._longest = max(self._longest, len(actions))

    def _grow(self, length: int) -> None:
        """Double the capacity until it holds `length` actions, plus the dummy entry."""
        capacity = self._actions.shape[1] - 1
        if length <= capacity:
            return
        while capacity < length:
            capacity = max(1, 2 * capacity)
        capacity = max(min(capacity, self.limit), length)
        added = np.zeros(
            (self._actions.shape[0], capacity + 1 - self._actions.shape[1], *self._actions.shape[2:]),
            self._actions.dtype,
        )
        self._actions = np.concatenate([self._actions, added], axis=1)


# --- State for exact resume ------------------------------------------------------------------------------


def state_of(env: VectorEnv) -> dict[str, Any]:
    """Return the state of a vector environment for a checkpoint.

    seed, episode        seed of the run; number of each environment's current episode
    actions, cuts        actions since the last full reset, and where resets continued the game (see
                         `ActionHistory`); empty for an environment whose next step is a full reset
    last                 the last rows; a replay must reproduce them bit for bit
    goes_on              (N,) bool: the next reset continues the game
    forgotten, unbegun   environments with more actions than the history keeps; with a failed reset
    restarts             counts of restarts, by kind
    normalizer           observation statistics, or None
    """
    import torch

    pool, rows = env.pool, _rows(env.pool.arrays)
    ended = rows["terminated"] | rows["truncated"]
    replayed = ~(ended & ~pool.arrays.reset_continues)
    forgotten = env.history.forgotten & replayed
    kept = [
        env.history.get(index)
        if replayed[index] and not forgotten[index]
        else (env.history.get(index)[0][:0], [])
        for index in range(env.num_envs)
    ]
    return {
        "seed": pool.seed,
        "episode": torch.from_numpy(pool.episodes.copy()),
        "actions": [torch.from_numpy(actions) for actions, _ in kept],
        "cuts": [cuts for _, cuts in kept],
        "last": {name: torch.from_numpy(array.copy()) for name, array in rows.items()},
        "goes_on": torch.from_numpy(pool.arrays.reset_continues & ended),
        "forgotten": np.flatnonzero(forgotten).tolist(),
        "unbegun": sorted(pool.reset_pending),
        "restarts": pool.faults.get_state(),
        "normalizer": None if env.normalizer is None else env.normalizer.get_state(),
    }


def restore_state(env: VectorEnv, state: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Replay the saved actions; return the environments that started a new episode and those that diverged.

    Environments diverge if they are not deterministic or had more actions than the history keeps; they start
    a new episode, too.
    """
    pool, arrays = env.pool, env.pool.arrays
    count = len(state["actions"])
    if count != env.num_envs:
        raise CheckpointError(
            f"environment.num_envs={env.num_envs}: the checkpoint has {count} environments; set environment.num_envs={count}"
        )
    pool.seed = int(state["seed"])
    pool.episodes = np.array(state["episode"], dtype=np.int64)
    pool.faults.set_state(state.get("restarts", {}))
    _restore_statistics(env, state.get("normalizer"))
    saved = {name: np.asarray(value) for name, value in state["last"].items()}
    reset_continues = np.array(state.get("goes_on", np.zeros(count)), dtype=bool)
    cuts = state.get("cuts") or [[]] * count
    reset_pending, diverged = set(state.get("unbegun", ())), set(state.get("forgotten", ()))
    # The next step of these environments is a full reset.
    awaiting_reset = (saved["terminated"] | saved["truncated"]) & ~reset_continues
    histories: dict[int, list[Segment]] = {}
    for index in set(range(count)) - reset_pending - diverged - set(np.flatnonzero(awaiting_reset).tolist()):
        actions = np.asarray(state["actions"][index])
        env.history.set(index, actions, cuts[index])
        histories[index] = _segments(env, index, actions, cuts[index])
    diverged |= pool.replay(histories)
    rows = _rows(arrays)
    for index in np.flatnonzero(awaiting_reset).tolist():
        for name, array in rows.items():
            array[index] = saved[name][index]
    arrays.reset_continues[awaiting_reset] = False
    restarted: set[int] = set()
    while True:  # one pass, unless a worker dies during the resets
        for index in set(range(count)) - reset_pending - diverged:
            same = all(rows[name][index].tobytes() == saved[name][index].tobytes() for name in rows)
            if not same or arrays.reset_continues[index] != reset_continues[index]:
                diverged.add(index)
        missing = sorted((reset_pending | diverged) - restarted)
        if not missing:
            break
        pool.episodes[missing] += 1
        pool.reset(missing)
        restarted |= set(missing)
    env.history.reset(sorted(restarted))
    first = [index in restarted or _at_reset(histories.get(index, [])) for index in range(count)]
    env.is_first = np.array(first, dtype=bool)
    return sorted(restarted), sorted(diverged)


def _segments(env: VectorEnv, index: int, actions: np.ndarray, cuts: Sequence[int]) -> list[Segment]:
    """Return the episodes of an open game; their numbers are consecutive and the last one is open."""
    first = int(env.pool.episodes[index]) - len(cuts)
    parts = np.split(actions, [int(cut) for cut in cuts])
    return [
        (episode_seed(env.pool.seed, index, first + position), part) for position, part in enumerate(parts)
    ]


def _at_reset(segments: Sequence[Segment]) -> bool:
    return bool(segments) and len(segments[-1][1]) == 0


def _restore_statistics(env: VectorEnv, statistics: Mapping[str, Any] | None) -> None:
    if (statistics is None) != (env.normalizer is None):
        raise CheckpointError(
            f"environment.normalize_observations must be {str(statistics is not None).lower()}, as in the checkpoint"
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


# --- Four values -----------------------------------------------------------------------------------------


class FourValueEnv:
    """A VectorEnv whose `step` returns `obs, reward, done, info`, as Gym's did before version 0.26.

    `info["terminated"]` and `info["truncated"]` say why an episode ended. Everything else is the VectorEnv's.
    """

    def __init__(self, environment: VectorEnv) -> None:
        self.environment = environment

    def step(self, actions: Any) -> tuple[Observations, np.ndarray, np.ndarray, Infos]:
        obs, reward, terminated, truncated, infos = self.environment.step(actions)
        return (
            obs,
            reward,
            terminated | truncated,
            {**infos, "terminated": terminated, "truncated": truncated},
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.environment, name)
