"""Pictures of observations: their own images, the environment's renderer, or labelled bars."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rl_lab.environments.state_rendering import StateDrawer, state_names
from rl_lab.records import Spec
from rl_lab.tools.play.frame import has_image, observation_image


class Pictures:
    """Shows observations of one environment, real and dreamt alike.

    drawer: draws states with the environment's renderer; None: it cannot be set, or was not asked for
    """

    def __init__(self, spec: Spec, drawer: StateDrawer | None = None) -> None:
        self.spec = spec
        self.drawer = drawer

    def show(self, obs: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the best picture of an observation, (H, W, 3) uint8."""
        if self.draws(obs):
            assert self.drawer is not None
            drawn = self.drawer.draw(obs)
            if drawn is not None:
                return drawn
        return self.values(obs)

    def values(self, obs: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the image that is observed, or the values as bars."""
        return observation_image(obs, () if has_image(obs) else state_names(self.spec.name, obs))

    def draws(self, obs: Mapping[str, np.ndarray]) -> bool:
        """Whether `show` draws values as a picture."""
        return self.drawer is not None and bool(obs) and not has_image(obs)

    def close(self) -> None:
        if self.drawer is not None:
            self.drawer.close()
