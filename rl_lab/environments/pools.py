"""EnvPool's environments, in C++, as single Gymnasium environments: `environment.backend=envpool` of some suites.

EnvPool can only be seeded when a pool is created. So that the seed determines the episode, as exact resume needs it,
each episode has a pool of its own, with one environment and one thread.
"""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import numpy as np

from rl_lab.errors import ConfigError, MissingPackageError, closest, install_line

BACKENDS = ("gymnasium", "envpool")
NO_LIMIT = 2**30


def require_backend(backend: Any) -> None:
    if backend not in BACKENDS:
        raise ConfigError(f"environment.backend={backend!r}:{closest(str(backend), BACKENDS)}")


class PooledEnv(gymnasium.Env):
    """One environment of EnvPool; a subclass sets the spaces and converts observations with `_read`.

    name:     its id in EnvPool
    settings: of the pool
    """

    def __init__(self, name: str, **settings: Any) -> None:
        try:
            import envpool
        except ModuleNotFoundError as error:
            raise MissingPackageError(
                f"environment.backend=envpool needs EnvPool (750 MB): {install_line('envpool')} ({error})"
            ) from error
        if name not in envpool.list_all_envs():
            raise ConfigError(
                f"environment.backend=envpool has no '{name}': set environment.backend=gymnasium"
            )
        self._name, self._settings = name, settings
        self._make_pool = envpool.make_gymnasium
        self._pool: Any = None

    def _new_pool(self, seed: int) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the precision of its bounds
            return self._make_pool(self._name, num_envs=1, num_threads=1, seed=seed, **self._settings)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.close()
        self._pool = self._new_pool(int(self.np_random.integers(2**31)))
        return self._first_of(self._pool.reset()[0]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, _ = self._pool.step(np.asarray(action)[None])
        return self._first_of(obs), float(reward[0]), bool(terminated[0]), bool(truncated[0]), {}

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _first_of(self, obs: Any) -> Any:
        return self._read({key: value[0] for key, value in obs.items()} if isinstance(obs, dict) else obs[0])

    def _read(self, obs: Any) -> Any:
        """Convert the observation of the environment; it may be a view of the pool's memory."""
        return np.array(obs)
