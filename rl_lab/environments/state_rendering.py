"""Images of states that were observed or predicted: the environment's own renderer, with its state set from them.

`state_drawer(factory)` returns a `StateDrawer` for environments whose picture follows from the observation: CartPole,
MountainCar, Acrobot and Pendulum of Gymnasium, and the tasks of the DeepMind Control Suite in `DMC`. The place of a
body that walks is not observed there, so it is drawn at the origin.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np

from rl_lab.environments.normalizer import ObservationNormalizer

Arrays = Mapping[str, np.ndarray]


class StateDrawer:
    """Draws observations with an environment of its own, which is never stepped.

    set_state:  sets the state of `env` from an observation; raises if the observation does not determine it
    normalizer: of the observations, which is inverted first
    """

    def __init__(
        self,
        env: gymnasium.Env,
        set_state: Callable[[Any, Arrays], None],
        normalizer: ObservationNormalizer | None = None,
    ) -> None:
        self.env = env
        self._inner: Any = env.unwrapped
        self._set_state = set_state
        self._normalizer = normalizer

    def draw(self, obs: Arrays) -> np.ndarray | None:
        """Return (H, W, 3) uint8, or None if this observation has no picture."""
        known = obs if self._normalizer is None else self._normalizer.inverse(obs)
        finite = {name: np.nan_to_num(np.asarray(value, np.float64)) for name, value in known.items()}
        try:
            self._set_state(self._inner, finite)
            image = np.asarray(self._inner.render())
        except Exception:  # a predicted state that the renderer cannot show
            return None
        return image if image.ndim == 3 and image.dtype == np.uint8 else None

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.env.close()


def state_drawer(
    factory: Callable[[bool], gymnasium.Env], normalizer: ObservationNormalizer | None = None
) -> StateDrawer | None:
    """Return the drawer of an environment, or None if a picture does not follow from its observations.

    factory: of `make.env_factory`; the environment that it creates is checked with an observation of its own
    """
    if not _may_be_drawn(getattr(factory, "task", None)):
        return None  # not created: it may be a robot
    try:
        env = factory(True)
    except Exception:  # no renderer on this machine, or no such argument
        return None
    set_state = _set_state_of(env.unwrapped)
    if set_state is None or not _is_state(env.observation_space):
        env.close()
        return None
    drawer = StateDrawer(env, set_state, None)
    try:
        obs, _ = env.reset(seed=0)
        shown = drawer.draw(obs)
    except Exception:
        shown = None
    if shown is None:
        drawer.close()
        return None
    drawer._normalizer = normalizer
    return drawer


def _may_be_drawn(task: Any) -> bool:
    """Whether a task is a registered one of classic control, or one of a domain in `DMC`."""
    if isinstance(task, gymnasium.envs.registration.EnvSpec):
        return str(task.entry_point).startswith("gymnasium.envs.classic_control")
    return isinstance(task, tuple) and task[0] in DMC


def _is_state(space: gymnasium.Space) -> bool:
    """Whether no observation is an image, which shows itself."""
    parts = space.spaces.values() if isinstance(space, gymnasium.spaces.Dict) else [space]
    return all(part.dtype != np.uint8 for part in parts)


def _set_state_of(inner: Any) -> Callable[[Any, Arrays], None] | None:
    module, name = type(inner).__module__, type(inner).__name__
    if module.startswith("gymnasium.envs.classic_control"):
        return CLASSIC.get(name)
    if module == "rl_lab.environments.suites.dmc":
        return DMC.get(inner.domain)
    return None


# --- Classic control of Gymnasium ------------------------------------------------------------------------


def _vector(obs: Arrays, size: int) -> np.ndarray:
    """Return the only vector of an observation; ValueError if it has another size (stacked or cut)."""
    (value,) = obs.values()
    if value.shape != (size,):
        raise ValueError(f"an observation of {size} values is needed, not {value.shape}")
    return value


def _set_cart_pole(env: Any, obs: Arrays) -> None:
    env.state = tuple(_vector(obs, 4))


def _set_mountain_car(env: Any, obs: Arrays) -> None:
    env.state = np.asarray(_vector(obs, 2))


def _set_pendulum(env: Any, obs: Arrays) -> None:
    cosine, sine, speed = _vector(obs, 3)
    env.state, env.last_u = np.array([np.arctan2(sine, cosine), speed]), None


def _set_acrobot(env: Any, obs: Arrays) -> None:
    cosine1, sine1, cosine2, sine2, *speeds = _vector(obs, 6)
    env.state = np.array([np.arctan2(sine1, cosine1), np.arctan2(sine2, cosine2), *speeds])


CLASSIC: dict[str, Callable[[Any, Arrays], None]] = {
    "CartPoleEnv": _set_cart_pole,
    "MountainCarEnv": _set_mountain_car,
    "Continuous_MountainCarEnv": _set_mountain_car,
    "PendulumEnv": _set_pendulum,
    "AcrobotEnv": _set_acrobot,
}

# --- DeepMind Control Suite ------------------------------------------------------------------------------


def _set_positions(physics: Any, positions: np.ndarray, first: int = 0) -> None:
    """Set qpos from `first` on; those before it are not observed."""
    if len(positions) != physics.model.nq - first:
        raise ValueError(f"{physics.model.nq - first} positions are needed, not {len(positions)}")
    physics.data.qpos[:first] = 0.0
    physics.data.qpos[first:] = positions
    physics.forward()


def _joint_angles(physics: Any, bodies: list[int], angles: np.ndarray) -> dict[int, float]:
    """Return index of qpos -> hinge angle, from the angles of bodies about the y axis, parents first."""
    model = physics.model
    physics.data.qpos[:] = 0.0
    physics.forward()
    rest = {body: _angle_y(physics, body) for body in range(model.nbody)}
    absolute, found = dict(rest), {}
    for body, angle in zip(bodies, angles, strict=True):
        parent = int(model.body_parentid[body])
        first = int(model.body_jntadr[body])
        hinges = [j for j in range(first, first + int(model.body_jntnum[body])) if model.jnt_type[j] == 3]
        turned = (angle - absolute[parent]) - (rest[body] - rest[parent])
        turned = (turned + np.pi) % (2 * np.pi) - np.pi
        found[int(model.jnt_qposadr[hinges[-1]])] = float(np.sign(model.jnt_axis[hinges[-1], 1]) * turned)
        absolute[body] = angle
    return found


def _angle_y(physics: Any, body: int) -> float:
    matrix = physics.data.xmat[body]
    return float(np.arctan2(matrix[2], matrix[8]))


def _set_angles(physics: Any, bodies: list[int], angles: np.ndarray) -> None:
    """Set the hinges, and every other position to zero."""
    found = _joint_angles(physics, bodies, angles)
    physics.data.qpos[:] = 0.0
    for index, angle in found.items():
        physics.data.qpos[index] = angle
    physics.forward()


def _dmc_cartpole(physics: Any, obs: Arrays) -> None:
    cart, poles = obs["position"][0], obs["position"][1:].reshape(-1, 2)  # cosine and sine of each pole
    _set_angles(physics, list(range(2, physics.model.nbody)), np.arctan2(poles[:, 1], poles[:, 0]))
    physics.data.qpos[0] = cart
    physics.forward()


def _dmc_pendulum(physics: Any, obs: Arrays) -> None:
    cosine, sine = obs["orientation"]
    _set_angles(physics, [physics.model.name2id("pole", "body")], np.array([np.arctan2(sine, cosine)]))


def _dmc_acrobot(physics: Any, obs: Arrays) -> None:
    bodies = [physics.model.name2id(name, "body") for name in ("upper_arm", "lower_arm")]
    sines, cosines = obs["orientations"].reshape(2, 2)
    _set_angles(physics, bodies, np.arctan2(sines, cosines))


def _dmc_walker(physics: Any, obs: Arrays) -> None:
    cosines, sines = obs["orientations"].reshape(-1, 2).T
    _set_angles(physics, list(range(1, physics.model.nbody)), np.arctan2(sines, cosines))
    physics.named.data.qpos["rootz"] += obs["height"].item() - physics.named.data.xpos["torso", "z"]
    physics.forward()


def _dmc_reacher(physics: Any, obs: Arrays) -> None:
    _set_positions(physics, obs["position"])
    physics.named.model.geom_pos["target", :2] = physics.named.data.geom_xpos["finger", :2] + obs["to_target"]
    physics.forward()


def _dmc_all(physics: Any, obs: Arrays) -> None:
    _set_positions(physics, obs["position"])


def _dmc_all_but_place(physics: Any, obs: Arrays) -> None:
    _set_positions(physics, obs["position"], first=1)


def _on_physics(function: Callable[[Any, Arrays], None]) -> Callable[[Any, Arrays], None]:
    return lambda env, obs: function(env.physics, obs)


# Domain -> how its state follows from `observe=proprio`. Others do not observe how the body lies in space.
DMC: dict[str, Callable[[Any, Arrays], None]] = {
    "acrobot": _on_physics(_dmc_acrobot),
    "ball_in_cup": _on_physics(_dmc_all),
    "cartpole": _on_physics(_dmc_cartpole),
    "cheetah": _on_physics(_dmc_all_but_place),
    "hopper": _on_physics(_dmc_all_but_place),
    "pendulum": _on_physics(_dmc_pendulum),
    "point_mass": _on_physics(_dmc_all),
    "reacher": _on_physics(_dmc_reacher),
    "walker": _on_physics(_dmc_walker),
}

# --- Names of the values of a state ----------------------------------------------------------------------

# Prefix of a registered id -> names of the elements of its vector.
STATE_NAMES = {
    "CartPole": ("cart position", "cart velocity", "pole angle", "pole velocity"),
    "MountainCar": ("position", "velocity"),
    "Pendulum": ("cosine", "sine", "velocity"),
    "Acrobot": ("cosine 1", "sine 1", "cosine 2", "sine 2", "velocity 1", "velocity 2"),
    "LunarLander": ("x", "y", "velocity x", "velocity y", "angle", "angular velocity", "leg 1", "leg 2"),
}


def state_names(task: str, obs: Arrays) -> list[str]:
    """Return a name of each element of the vectors in an observation, in their order."""
    sizes = {name: int(np.size(value)) for name, value in obs.items()}
    known = next((names for prefix, names in STATE_NAMES.items() if task.startswith(prefix)), ())
    if list(sizes) == ["vector"] and sizes["vector"] == len(known):
        return list(known)
    return [name if size == 1 else f"{name} {index}" for name, size in sizes.items() for index in range(size)]
