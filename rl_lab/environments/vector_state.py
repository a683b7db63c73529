"""Where N environments stand, as plain data, and back there again.

seed, episode        of the run; number of the episode that each environment is in
actions, cuts        since each true beginning; where resets cut them that only continued a game. With the episodes'
seeds they are replayed. An environment whose next step resets it truly needs none.
last                 the rows that arrived last: what a replay is compared with, bit for bit
goes_on              (N,) bool: the next reset continues the game
forgotten, unbegun   environments with too many actions to keep; with a reset due that had failed
restarts             counters of failures
normalizer           observation statistics, or None
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_lab.environments.shared import StepArrays
from rl_lab.environments.worker import Segment, episode_seed
from rl_lab.errors import CheckpointError

if TYPE_CHECKING:
    from rl_lab.environments.vector import VectorEnv


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
