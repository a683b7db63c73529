from __future__ import annotations

import pytest
import torch
from torch import nn

from rl_lab.errors import CheckpointError, ConfigError
from rl_lab.utils.checkpoint.matching import SHOWN, load_matching, partial_load


def parts(width: int = 3) -> dict[str, nn.Module]:
    return {"encoder": nn.Linear(2, width), "decoder": nn.Sequential(nn.Linear(width, 2), nn.ReLU())}


def states(modules: dict[str, nn.Module]) -> dict:
    return {name: module.state_dict() for name, module in modules.items()}


def test_loads_modules_and_dicts_of_modules():
    source, target = parts(), parts()
    load_matching(target, states(source), prefix="components")
    assert torch.equal(target["encoder"].weight, source["encoder"].weight)
    single = nn.Linear(2, 3)
    load_matching(single, source["encoder"].state_dict(), prefix="encoder")
    assert torch.equal(single.bias, source["encoder"].bias)


def test_mismatch_lists_all_differences():
    source, target = parts(width=3), parts(width=5)
    source["head"] = nn.Linear(1, 1)
    target["tail"] = nn.Linear(1, 1)
    state = states(source)
    del state["decoder"]["0.bias"]
    state["encoder"]["extra"] = torch.ones(1)
    before = target["encoder"].bias.clone()
    with pytest.raises(CheckpointError) as caught:
        load_matching(target, state, prefix="components")
    message = str(caught.value)
    assert "components does not match the checkpoint" in message
    assert "components.encoder.weight: (3, 2) in the checkpoint, (5, 2) in the model" in message
    assert "missing in the checkpoint (2):" in message and "components.decoder.0.bias" in message
    assert "components.tail (every key)" in message and "components.head (every key)" in message
    assert "components.encoder.extra" in message
    assert "size mismatch" not in message  # torch's words
    assert torch.equal(target["encoder"].bias, before)


def test_long_lists_are_shortened():
    big = nn.Sequential(*(nn.Linear(1, 1) for _ in range(40)))
    with pytest.raises(CheckpointError, match=f"and {80 - SHOWN} more"):
        load_matching(big, {}, prefix="model")


def test_parts_without_weights_are_optional():
    source, target = nn.Linear(1, 1), nn.Linear(1, 1)
    load_matching({"relu": nn.ReLU(), "lin": target}, {"lin": source.state_dict()})
    assert torch.equal(target.weight, source.weight) and torch.equal(target.bias, source.bias)


def test_state_of_wrong_type():
    with pytest.raises(CheckpointError, match=r"'c\.encoder' is of type int in the checkpoint"):
        load_matching({"encoder": nn.Linear(1, 1)}, {"encoder": 3}, prefix="c")
    with pytest.raises(CheckpointError, match="int in the checkpoint, a tensor in the model"):
        load_matching(nn.Linear(1, 1), {"weight": 1, "bias": torch.ones(1)}, prefix="c")


class GroupedState:
    """Loads like an optimizer: not a module, and with an opinion of its own."""

    def __init__(self) -> None:
        self.groups = 1

    def state_dict(self) -> dict:
        return {"groups": self.groups}

    def load_state_dict(self, state: dict) -> None:
        if state["groups"] != self.groups:
            raise ValueError("loaded state dict has a different number of parameter groups\nand more lines")


def test_optimizers_check_their_own_state():
    load_matching({"model": GroupedState()}, {"model": {"groups": 1}}, prefix="optimizers")
    with pytest.raises(
        CheckpointError, match=r"optimizers\.model does not match the checkpoint: .*parameter groups$"
    ):
        load_matching({"model": GroupedState()}, {"model": {"groups": 2}}, prefix="optimizers")


def test_partial_load():
    source, target = parts(), parts()
    actor, saved_actor = nn.Linear(1, 1), nn.Linear(1, 1)
    state = {"components": states(source), "controllers": {"actor": saved_actor.state_dict()}}
    untouched = target["decoder"][0].weight.clone()
    loaded = partial_load(state, {"path": "x", "components": ["encoder"]}, target, {"actor": actor})
    assert loaded == ["components.encoder"]
    assert torch.equal(target["encoder"].weight, source["encoder"].weight)
    assert torch.equal(target["decoder"][0].weight, untouched)
    loaded = partial_load(state, {"components": "all", "controllers": "actor"}, target, {"actor": actor})
    assert loaded == ["components.encoder", "components.decoder", "controllers.actor"]
    assert torch.equal(actor.weight, saved_actor.weight)


def test_partial_load_errors():
    state = {"components": states(parts()), "controllers": {}}
    with pytest.raises(ConfigError, match=r"'encodr'.*Did you mean 'encoder'"):
        partial_load(state, {"components": ["encodr"]}, parts(), {})
    with pytest.raises(ConfigError, match=r"load\.component .*Did you mean 'components'"):
        partial_load(state, {"component": ["encoder"]}, parts(), {})
    with pytest.raises(
        CheckpointError, match=r"load\.controllers names 'actor', which the checkpoint does not have"
    ):
        partial_load(state, {"controllers": ["actor"]}, parts(), {"actor": nn.Linear(1, 1)})
    with pytest.raises(ConfigError, match="names nothing"):
        partial_load(state, {"path": "x"}, parts(), {})
    with pytest.raises(CheckpointError, match=r"\(3, 2\) in the checkpoint, \(4, 2\) in the model"):
        partial_load(state, {"components": ["encoder"]}, parts(width=4), {})
