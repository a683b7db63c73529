"""Policies that are not trained: the random policy, named experts, and your own function or class.

An expert is a function or a class of `module:name`:

    def expert(obs): return action                        # no memory

    class Expert:                                         # one instance for each episode
        def act(self, obs): return action

`obs` is one observation of `make_env`: an array, or a dict if the environment has several. The action is an index from
zero, or for continuous actions a vector within the environment's own bounds.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rl_lab.errors import ConfigError, LabError, closest, unexpected
from rl_lab.records import ActMode, Spec

Expert = Callable[[Any], Any]


class RandomPolicy:
    """Uniformly random actions."""

    act_captures = False

    def __init__(self, spec: Spec) -> None:
        self.action = spec.action

    def act(
        self, obs: dict[str, torch.Tensor], policy_state: Any, is_first: torch.Tensor, mode: ActMode
    ) -> tuple[torch.Tensor, Any, dict[str, torch.Tensor]]:
        count, action = len(is_first), self.action
        uniform = torch.rand(count, max(1, *action.shape, 1), generator=mode.generator)
        if action.kind == "continuous":
            return 2 * uniform - 1, policy_state, {}
        chosen = (uniform * torch.tensor(action.choices)).long()
        return chosen if action.shape else chosen[:, 0], policy_state, {}

    def initial_policy_state(self, num_envs: int) -> dict[str, torch.Tensor]:
        return {}


class ExpertPolicy:
    """Calls an expert for each environment, with a new instance for each episode if it is a class.

    An error of the expert ends the collection with a message that names it.
    """

    act_captures = False

    def __init__(self, name: str, make: Callable[[], Expert], spec: Spec) -> None:
        self.name, self.spec = name, spec
        self._make = make
        self._experts: dict[int, Expert] = {}

    def act(
        self, obs: dict[str, torch.Tensor], policy_state: Any, is_first: torch.Tensor, mode: ActMode
    ) -> tuple[torch.Tensor, Any, dict[str, torch.Tensor]]:
        arrays = {name: value.cpu().numpy() for name, value in obs.items()}
        actions = [
            self._action(env, {name: value[env] for name, value in arrays.items()}, bool(first))
            for env, first in enumerate(is_first.tolist())
        ]
        action = torch.from_numpy(np.stack(actions))
        if mode.epsilon:
            random, _, _ = RandomPolicy(self.spec).act(obs, {}, is_first, mode)
            chosen = torch.rand(len(action), generator=mode.generator) < mode.epsilon
            action = torch.where(chosen.view(-1, *[1] * (action.ndim - 1)), random.to(action.dtype), action)
        return action, policy_state, {}

    def initial_policy_state(self, num_envs: int) -> dict[str, torch.Tensor]:
        return {}

    def remember(self, env: int, observations: Mapping[str, np.ndarray]) -> None:
        """Show a new instance the observations (K, …) of an open episode, so that a resumed one continues exactly."""
        for step in range(len(next(iter(observations.values())))):
            self._action(env, {name: value[step] for name, value in observations.items()}, step == 0)

    def _action(self, env: int, obs: dict[str, np.ndarray], is_first: bool) -> np.ndarray:
        if is_first or env not in self._experts:
            self._experts[env] = self._make()
        given = next(iter(obs.values())) if len(obs) == 1 else obs
        try:
            return lab_action(self._experts[env](given), self.spec)
        except LabError as error:
            raise LabError(f"expert {self.name}: {error}") from None
        except Exception as error:
            raise LabError(f"expert {self.name} failed: {unexpected(error)}") from error


def lab_action(value: Any, spec: Spec) -> np.ndarray:
    """Convert an action in the environment's units to the lab's form."""
    action = spec.action
    array = np.asarray(value)
    if array.size != max(1, int(np.prod(action.shape))):
        raise LabError(f"an action has {array.size} values, but {spec.name} takes shape {action.shape}")
    if not np.isfinite(array.astype(np.float64)).all():
        raise LabError(f"an action is not finite: {array}")
    array = array.reshape(action.shape)
    if action.kind != "continuous":
        if np.any(array != array.astype(np.int64)) or np.any(
            (array < 0) | (array >= np.array(action.choices))
        ):
            raise LabError(f"action {array} is not an index below {action.choices}")
        return np.asarray(array, dtype=np.int64)
    low, high = np.array(action.low or -1.0), np.array(action.high or 1.0)
    bounded = np.isfinite(low) & np.isfinite(high)
    scaled = np.where(bounded, 2 * (array - low) / np.where(bounded, high - low, 1) - 1, array)
    return np.clip(scaled, -1, 1).astype(np.float32)


# --- Named experts --------------------------------------------------------------------------------


@dataclass(frozen=True)
class NamedExpert:
    """An expert that comes with the lab, and the task that it solves."""

    task: str
    text: str
    act: Callable[[Any, Spec], Any]  # observation, spec -> action


def _lunar_lander(obs: np.ndarray, spec: Spec) -> Any:
    from gymnasium.envs.box2d.lunar_lander import heuristic

    stand_in = SimpleNamespace(unwrapped=SimpleNamespace(continuous=spec.action.kind == "continuous"))
    return heuristic(stand_in, obs)


def _cartpole(obs: np.ndarray, spec: Spec) -> int:
    """Push to the side to which the pole falls; a small lean brings the cart back to the middle."""
    position, speed, angle, turn = (float(x) for x in obs)
    return int(angle + 0.5 * turn + 0.04 * position + 0.08 * speed > 0)


def _pendulum(obs: np.ndarray, spec: Spec) -> np.ndarray:
    """Pump energy until the pendulum is nearly upright, then hold it with a PD controller."""
    cosine, sine, turn = (float(x) for x in obs)
    angle = np.arctan2(sine, cosine)
    if cosine > 0.85 and abs(turn) < 4:
        torque = -12.0 * angle - 3.0 * turn
    else:
        energy = turn * turn / 6 + 5.0 * (cosine - 1)  # 0 when it reaches the top without speed
        torque = -2.0 * np.sign(energy) * (np.sign(turn) or 1.0)
    return np.array([np.clip(torque, -2, 2)], np.float32)


def _mountain_car(obs: np.ndarray, spec: Spec) -> Any:
    """Accelerate in the direction of motion."""
    forward = float(obs[1]) >= 0
    if spec.action.kind == "continuous":
        return np.array([1.0 if forward else -1.0], np.float32)
    return 2 if forward else 0


def _catch(obs: np.ndarray, spec: Spec) -> int:
    """Move under the ball. The ball is red and green, the paddle in the last row is blue."""
    red, blue = obs[0].astype(int), obs[2].astype(int)
    ball, paddle = np.argwhere(red > 200), np.argwhere(blue > 200)
    if not len(ball) or not len(paddle):
        return 1
    side = ball[:, 1].mean() - paddle[:, 1].mean()
    return 1 if abs(side) < 1 else (2 if side > 0 else 0)


def _lock(obs: np.ndarray, spec: Spec) -> int:
    """Enter the next digit of the combination; any after the end, when the lock is open."""
    from rl_lab.environments.suites.dummy import Lock

    return int(np.append(Lock(digits=len(obs) - 1).combination, 0)[obs.argmax()])


EXPERTS = {
    "lunar_lander": NamedExpert(
        "LunarLander-v3", "Gymnasium's heuristic; lands in most episodes", _lunar_lander
    ),
    "cartpole": NamedExpert("CartPole-v1", "a linear rule; return 500", _cartpole),
    "pendulum": NamedExpert("Pendulum-v1", "swing-up by energy, then PD control", _pendulum),
    "mountain_car": NamedExpert("MountainCar-v0", "accelerate in the direction of motion", _mountain_car),
    "catch": NamedExpert("dummy/catch", "move under the ball; return 3", _catch),
    "lock": NamedExpert("dummy/lock", "the combination; return 1", _lock),
}


def make_expert(name: str, spec: Spec) -> ExpertPolicy:
    """Return the policy of a named expert or of `module:name`."""
    if ":" not in name:
        if name not in EXPERTS:
            raise ConfigError(f"expert '{name}' is unknown.{closest(name, EXPERTS)}")
        known = EXPERTS[name]
        return ExpertPolicy(name, lambda: lambda obs: known.act(obs, spec), spec)
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ConfigError(f"expert {name}: the module cannot be imported ({error})") from None
    except AttributeError:
        public = [each for each in dir(importlib.import_module(module)) if not each.startswith("_")]
        raise ConfigError(
            f"expert {name}: {module} has no '{attribute}'.{closest(attribute, public)}"
        ) from None
    if inspect.isclass(found):
        if not hasattr(found, "act"):
            raise ConfigError(f"expert {name}: the class has no method act(obs)")
        kind: Any = found
        return ExpertPolicy(name, lambda: kind().act, spec)
    if not callable(found):
        raise ConfigError(f"expert {name} is a {type(found).__name__}, not a function or class")
    return ExpertPolicy(name, lambda: found, spec)
