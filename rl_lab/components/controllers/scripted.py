"""Scripted experts: policies without weights, as a source of demonstrations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rl_lab.errors import ConfigError, MissingPackageError, install_line
from rl_lab.records import ActMode, Spec

State = dict[str, torch.Tensor]


class LunarLanderExpert:
    """The controller that Gymnasium ships with LunarLander, for its continuous and its discrete form."""

    act_captures = False  # host code

    def __init__(self, *, spec: Spec) -> None:
        shapes = [array.shape for array in spec.observations.values()]
        continuous = spec.action.kind == "continuous"
        if shapes != [(8,)] or (spec.action.shape if continuous else spec.action.choices) not in ((2,), (4,)):
            raise ConfigError(
                f"controllers.expert: LunarLanderExpert acts in LunarLander-v3 only, not in {spec.name}"
            )
        try:
            from gymnasium.envs.box2d.lunar_lander import heuristic
        except Exception as error:  # Gymnasium raises its own error if Box2D is missing
            raise MissingPackageError(f"LunarLanderExpert needs Box2D: {install_line('box2d')}") from error
        self._heuristic: Any = heuristic
        self._lander = SimpleNamespace(unwrapped=SimpleNamespace(continuous=continuous))

    def initial_policy_state(self, num_envs: int) -> State:
        return {}

    def act(
        self, obs: State, policy_state: State, is_first: torch.Tensor, mode: ActMode
    ) -> tuple[torch.Tensor, State, State]:
        (states,) = (value.cpu().numpy() for value in obs.values())
        actions = np.stack([np.asarray(self._heuristic(self._lander, state)) for state in states])
        action = torch.from_numpy(actions).to(is_first.device)
        return (action.float() if action.is_floating_point() else action.long()), policy_state, {}
