"""Side by side: the real environment and the model's open-loop prediction of it, from the same actions."""

from __future__ import annotations

import numpy as np
import torch

from rl_lab.environments.dreams import Dreams
from rl_lab.tools.play.moment import Moment, Panel
from rl_lab.tools.play.panels import difference, observation_picture
from rl_lab.tools.play.source_real import RealSource


class BothSource:
    """The agent (or you) acts in the real environment; the dream gets the same actions and never looks.

    After `horizon` steps the dream begins anew from what is real, and at every new episode.
    """

    def __init__(self, real: RealSource, dreams: Dreams, *, horizon: int) -> None:
        self.real = real
        self.dreams = dreams
        self.horizon = horizon
        self.age = 0  # steps since the dream last looked
        self._dreamt: dict[str, np.ndarray] = {}

    def reset(self) -> Moment:
        self.real.warm_up(self.real.rows.maxlen or 1)
        return self.join()

    def join(self) -> Moment:
        """Begin the dream where the real environment stands."""
        self._look()
        return Moment(self.real.observation())

    def step(self, action: np.ndarray) -> Moment:
        if self.age >= self.horizon:
            self._look()
        moment = self.real.step(action)
        dreamt = self.dreams.step(torch.as_tensor(np.asarray(moment.action))[None])
        self.age += 1
        self._dreamt = {name: value[0].cpu().numpy() for name, value in dreamt.obs.items()}
        moment.extra |= {
            "dream reward": float(dreamt.reward[0]),
            "end chance": float(dreamt.end_chance[0]),
            "error": self._error(),
            "open loop": self.age,
        }
        return moment

    def agent_action(self) -> np.ndarray:
        return self.real.agent_action()

    def think(self) -> dict[str, float]:
        return self.real.think()

    def panels(self, parts: bool) -> list[Panel]:
        real, dreamt = observation_picture(self.real.observation()), observation_picture(self._dreamt)
        shown = [Panel("real", real), Panel("dream", dreamt)]
        if not any(value.dtype == np.uint8 and value.ndim == 3 for value in self.real.observation().values()):
            shown.insert(0, Panel("environment", self.real.rendered()))  # bars alone say little
        if parts:
            shown.append(Panel("difference", difference(real, dreamt)))
        return shown

    def _look(self) -> None:
        obs = self.dreams.start(self.real.batch())
        self._dreamt = {name: value[0].cpu().numpy() for name, value in obs.items()}
        self.age = 0

    def _error(self) -> float:
        """Root mean squared error over all observations, images in [0, 1]."""
        errors = []
        for name, real in self.real.observation().items():
            if name in self._dreamt:
                scale = 255.0 if real.dtype == np.uint8 else 1.0
                gap = (real.astype(np.float32) - self._dreamt[name].astype(np.float32)) / scale
                errors.append(float(np.mean(gap**2)))
        return float(np.sqrt(np.mean(errors))) if errors else float("nan")
