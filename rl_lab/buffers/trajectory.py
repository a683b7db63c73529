"""TrajectoryAdapter: converts trajectories of plain environment steps to stored rows.

Plain step k has the observation o_k, the action a_k, and the reward r_k and end d_k that *follow* the action.
A stored row has what the environment returned together, so row k has the reward and end of step k-1.

    row k  =  o_k,  reward r_{k-1},  terminated / truncated d_{k-1},  is_first,  action a_k

The environments reset on the step after an end (Gymnasium's AutoresetMode.NEXT_STEP). With an end at step 2:

    step         0        1        2        3         4
    observation  o_0      o_1      o_2      o_3       o_4        o_3 is the last observation of the episode,
    action       a_0      a_1      a_2      (ignored) a_4        o_4 the first of the next one
    then         r_0      r_1      r_2 end  0         r_4

    row          0        1        2        3         4
    obs          o_0      o_1      o_2      o_3       o_4
    reward       0        r_0      r_1      r_2       0
    ended        no       no       no       yes       no
    is_first     yes      no       no       no        yes
    action       a_0      a_1      a_2      zeros     a_4

No step is dropped: the adapter keeps the last reward and end of each environment for the next call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rl_lab.errors import ConfigError, closest
from rl_lab.records import OBS_PREFIX, ArraySpec, Spec

ENDS = ("dones", "terminated", "truncated")
ONE_HOT_TOLERANCE = 1e-3  # one-hot samples with a straight-through gradient have rounding errors


class TrajectoryAdapter:
    """Converts plain steps of N environments to rows; it keeps the last reward and end of each environment.

    extras: further columns of the trajectory, which the buffer stores unchanged
    """

    def __init__(self, spec: Spec, extras: Mapping[str, ArraySpec] | None = None) -> None:
        self.spec = spec
        self.extras = dict(extras or {})
        self._reward: np.ndarray | None = None  # (N,) of the last step; None before the first call
        self._terminated = self._truncated = np.zeros(0, dtype=bool)
        self._first = np.zeros(0, dtype=bool)  # whether the next row is the first of an episode

    def convert(self, trajectory: Mapping[str, Any] | None) -> dict[str, np.ndarray] | None:
        """Return the rows for `buffer.add`, or None if the trajectory is empty.

        trajectory: observations (one array, or a dict by name), actions (indices or one-hot), rewards, and
            `dones` and / or `terminated`, `truncated`; each (N, …), or (N, T, …) for T steps. `dones` alone
            counts as terminated: it cannot express a time limit.
        returns: columns (N, …), or (N, T, …) as in the trajectory
        """
        if trajectory is None:
            return None
        self._check_keys(trajectory)
        observations, lead = self._observations(trajectory["observations"])
        if 0 in lead:
            return None
        reward = _shaped("rewards", _array(trajectory["rewards"]), lead).astype(np.float32)
        terminated, truncated = self._ends(trajectory, lead)
        rows = {OBS_PREFIX + name: value for name, value in observations.items()}
        rows["action"] = self._actions(_array(trajectory["actions"]), lead)
        for name, spec in self.extras.items():
            rows[name] = _shaped(name, _array(trajectory[name]), (*lead, *spec.shape))
        steps = 1 if len(lead) == 1 else lead[1]
        arrived = self._shift(*(value.reshape(lead[0], steps) for value in (reward, terminated, truncated)))
        rows |= {name: value.reshape(lead) for name, value in arrived.items()}
        rows["action"][rows["terminated"] | rows["truncated"]] = 0
        return rows

    def restart(self, streams: Sequence[int] | None = None) -> None:
        """Start a new episode with the next row of these environments (None: all), which the caller reset."""
        if self._reward is not None:
            which = slice(None) if streams is None else list(streams)
            self._reward[which] = 0
            self._terminated[which] = self._truncated[which] = False
            self._first[which] = True

    def get_state(self) -> dict[str, Any]:
        if self._reward is None:
            return {}
        flags = {"terminated": self._terminated, "truncated": self._truncated, "first": self._first}
        return {
            name: torch.from_numpy(value.copy()) for name, value in {"reward": self._reward, **flags}.items()
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        if not state:
            self._reward = None
            return
        self._reward, self._terminated, self._truncated, self._first = (
            state[name].numpy().copy() for name in ("reward", "terminated", "truncated", "first")
        )

    def _shift(
        self, reward: np.ndarray, terminated: np.ndarray, truncated: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Convert the results of steps (N, T) to the columns of rows (N, T); see the module docstring."""
        streams = len(reward)
        if self._reward is None:
            self._reward = np.zeros(streams, dtype=np.float32)
            self._terminated, self._truncated = np.zeros(streams, dtype=bool), np.zeros(streams, dtype=bool)
            self._first = np.ones(streams, dtype=bool)
        if len(self._reward) != streams:
            raise ConfigError(
                f"trajectory has {streams} environments, but the previous one had {len(self._reward)}"
            )

        def delayed(last: np.ndarray, values: np.ndarray) -> np.ndarray:
            return np.concatenate([last[:, None], values[:, :-1]], axis=1)

        arrived = {
            "reward": delayed(self._reward, reward),
            "terminated": delayed(self._terminated, terminated),
            "truncated": delayed(self._truncated, truncated),
        }
        ended = arrived["terminated"] | arrived["truncated"]
        arrived["is_first"] = delayed(self._first, ended)
        if np.any(reward[ended] != 0) or np.any((terminated | truncated)[ended]):
            raise ConfigError(
                "trajectory has a reward or another end in the step after an episode's end, so this step was not a "
                "reset: use environments that reset on the next step (rl_lab.make_env, or Gymnasium's "
                "AutoresetMode.NEXT_STEP)"
            )
        self._reward = reward[:, -1].copy()
        self._terminated, self._truncated = terminated[:, -1].copy(), truncated[:, -1].copy()
        self._first = ended[:, -1].copy()
        return arrived

    def _check_keys(self, trajectory: Mapping[str, Any]) -> None:
        known = ("observations", "actions", "rewards", *ENDS, *self.extras)
        for key in trajectory:
            if key not in known:
                raise ConfigError(f"trajectory key '{key}' is unknown.{closest(key, known)}")
        needed = ["observations", "actions", "rewards", *self.extras]
        if not {"terminated", "truncated"} <= set(trajectory):
            needed.append("dones")
        missing = [key for key in needed if key not in trajectory]
        if missing:
            raise ConfigError(f"trajectory key '{missing[0]}' is missing; the keys are {sorted(trajectory)}")

    def _observations(self, given: Any) -> tuple[dict[str, np.ndarray], tuple[int, ...]]:
        """Return the observations by name, and the leading dimensions (N,) or (N, T) of all arrays."""
        specs = self.spec.observations
        named = dict(given) if isinstance(given, Mapping) else dict.fromkeys(list(specs)[:1], given)
        if set(named) != set(specs):
            raise ConfigError(f"observations are {sorted(named)}, but the environment has {sorted(specs)}")
        arrays = {name: _array(named[name]) for name in specs}
        name, spec = next(iter(specs.items()))
        timed = arrays[name].ndim == len(spec.shape) + 2
        lead = arrays[name].shape[: 2 if timed else 1]
        for name, spec in specs.items():
            value = _shaped(f"observations '{name}'", arrays[name], (*lead, *spec.shape))
            if not np.can_cast(value.dtype, spec.dtype, "same_kind"):
                raise ConfigError(
                    f"observations '{name}' are {value.dtype}, but the environment has {spec.dtype}"
                )
            arrays[name] = value.astype(spec.dtype, copy=False)
        return arrays, lead

    def _ends(self, trajectory: Mapping[str, Any], lead: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        given = {
            name: _shaped(name, _array(trajectory[name]), lead).astype(bool)
            for name in ENDS
            if name in trajectory
        }
        dones = given.get("dones")
        if "terminated" in given and "truncated" in given:
            either = given["terminated"] | given["truncated"]
            if dones is not None and np.any(dones != either):
                raise ConfigError(
                    "'dones' differs from 'terminated' or 'truncated'; remove 'dones' from the trajectory"
                )
            return given["terminated"], given["truncated"]
        assert dones is not None
        if "terminated" in given:
            return given["terminated"], dones & ~given["terminated"]
        truncated = given.get("truncated", np.zeros(lead, dtype=bool))
        return dones & ~truncated, truncated

    def _actions(self, value: np.ndarray, lead: tuple[int, ...]) -> np.ndarray:
        """Return the actions in the stored form, as a copy."""
        action = self.spec.action
        stored = (*lead, *action.shape)
        if action.kind == "continuous":
            return _shaped("actions", value, stored).astype(np.float32)
        if value.shape != stored and value.shape == (*lead, action.size):
            value = self._from_one_hot(value)
        elif value.shape != stored:
            raise ConfigError(
                f"actions have shape {value.shape}, but {stored} (indices) or {(*lead, action.size)} (one-hot) is expected"
            )
        indices = value.astype(np.int64)
        choices = np.array(action.choices) if action.shape else action.choices[0]
        if np.any(indices != value) or np.any(indices < 0) or np.any(indices >= choices):
            raise ConfigError(
                f"actions must be integers from 0, below {action.choices}; got {value.reshape(-1)[:8]}"
            )
        return indices

    def _from_one_hot(self, value: np.ndarray) -> np.ndarray:
        """Convert concatenated one-hot vectors to indices, (…, sum of choices) -> (…,) or (…, k)."""
        indices = []
        for choice in np.split(value, np.cumsum(self.spec.action.choices)[:-1], axis=-1):
            index = choice.argmax(-1)
            exact = np.eye(choice.shape[-1])[index]
            if np.abs(choice - exact).max() > ONE_HOT_TOLERANCE:
                raise ConfigError(
                    "actions have the shape of one-hot vectors, but each vector needs a single 1"
                )
            indices.append(index)
        return np.stack(indices, axis=-1) if self.spec.action.shape else indices[0]


def _array(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _shaped(what: str, value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if value.shape != shape:
        raise ConfigError(
            f"{what} have shape {value.shape}, but {shape} is expected (environments, then time)"
        )
    return value
