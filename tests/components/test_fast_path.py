from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from rl_lab.components.controllers.dreamer import DreamerActorController, DreamerCriticController
from rl_lab.components.controllers.mpc_planner import MPCPlanner
from rl_lab.components.nn.fast_path import compiled_pointwise, compiling, resolve_fast_path, use_fast_path
from rl_lab.components.nn.mlp import MLP
from rl_lab.components.nn.optim import LaProp
from rl_lab.errors import ConfigError
from rl_lab.records import ActionSpec, ArraySpec, Spec

SPEC = Spec(
    "test", {"vector": ArraySpec((4,), "float32")}, ActionSpec("continuous", (2,), (), (-1.0,), (1.0,))
)


def test_fast_or_plain_can_be_read_off_every_layer():
    actor = DreamerActorController(spec=SPEC, features=4, units=8)
    critic = DreamerCriticController(features=4, units=8)
    optimizer, planner = LaProp(actor.parameters()), MPCPlanner(spec=SPEC)
    layers = [actor.mlp, actor.policy, critic.head.mlp, critic.head.two_hot, critic.slow.network.mlp]
    parts = [*layers, optimizer, planner]
    assert not any(part.fast for part in parts)
    use_fast_path(True, actor, critic, optimizer, planner)
    assert all(part.fast for part in parts)
    use_fast_path(False, critic)
    assert [part.fast for part in parts] == [True, True, False, False, False, True, True]


def test_other_attributes_called_fast_are_left_alone():
    net = nn.ModuleDict({"fast": nn.Linear(2, 2), "slow": MLP(2, 2, 1)})
    weights = net["fast"]
    use_fast_path(True, net)
    assert net["fast"] is weights and net["slow"].fast


def test_compiling_is_a_separate_switch():
    calls = []

    @compiled_pointwise
    def double(x: torch.Tensor) -> torch.Tensor:
        calls.append(torch.compiler.is_compiling())
        return 2 * x

    with compiling(False):
        double(torch.ones(2))
    assert calls == [False]


def test_compiling_does_not_change_which_warnings_are_shown(monkeypatch: pytest.MonkeyPatch):
    """A package that the compiler imports asked for every deprecation: 2 million lines in a run's log."""

    def compiler(function, **options):
        def call(x: torch.Tensor) -> torch.Tensor:
            warnings.simplefilter("always")
            return function(x)

        return call

    monkeypatch.setattr(torch, "compile", compiler)
    double = compiled_pointwise(lambda x: 2 * x)
    before = list(warnings.filters)
    with compiling():
        assert double(torch.ones(2)).tolist() == [2.0, 2.0]
    assert warnings.filters == before


def test_fast_path_setting():
    assert resolve_fast_path("on", "cpu") and not resolve_fast_path("auto", "cpu")
    assert not resolve_fast_path(False, "cpu") and resolve_fast_path(True, "cpu")
    with pytest.raises(ConfigError, match="auto, on, off"):
        resolve_fast_path("maybe", "cpu")
