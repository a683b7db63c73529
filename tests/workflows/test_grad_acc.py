"""`algorithm.grad_acc_steps`: the gradient of a batch in two parts is that of the whole batch, for every workflow."""

from __future__ import annotations

import pytest
import torch

from rl_lab.components.nn.moving_averages import ReturnNormalizer
from rl_lab.errors import ConfigError
from tests.launch.rank_case import built, record_updates, repeat

# Not IRIS, which has a test of its own (test_iris.py), nor Plan2Explore's ensemble: their masked means are those of
# each part.
CASES: dict[str, tuple[list[str], list[str]]] = {
    "dreamer": (["experiment=dreamer_cartpole"], ["update", "update_world_model", "update_controller"]),
    "tdmpc2": (["experiment=tdmpc2_pendulum", "controllers.critic.dropout=0"], ["update"]),
    "og_wm": (["experiment=og_wm_cartpole_pixels"], ["update_vae", "update_mdn"]),
}
MORE: dict[str, tuple[list[str], list[str]]] = {
    "dreamer_v2": (["experiment=dreamer_v2_dmc_vision", "environment=dummy_continuous"], ["update"]),
    "diffusion_policy": (["experiment=diffusion_policy_lunarlander"], ["measure", "update"]),
    "behaviour_cloning": (["experiment=behaviour_cloning_lunarlander"], ["measure", "update"]),
}


def check_parts_equal_the_whole(words: list[str], hooks: list[str]) -> None:
    case = record_updates(words, hooks)
    case["words"] = [*words, "algorithm.grad_acc_steps=2"]
    for number, (call, parts) in enumerate(zip(case["calls"], repeat(case))):
        where = f"{words[0]} update {number + 1} ({call['hook']})"
        assert parts["loss"] == pytest.approx(call["loss"], rel=1e-4, abs=1e-5), where
        assert parts["gradients"].keys() == call["gradients"].keys()
        for name, gradient in call["gradients"].items():
            error = float((parts["gradients"][name] - gradient).norm())
            assert error <= 2e-4 * float(gradient.norm()) + 1e-7, f"{where}: {name} {error}"
        for name, value in call["statistics"].items():
            assert torch.allclose(parts["statistics"][name], value, rtol=2e-4, atol=1e-5), f"{where}: {name}"


@pytest.mark.parametrize("name", CASES)
def test_two_parts_of_a_batch_are_the_whole(name: str, monkeypatch: pytest.MonkeyPatch):
    # Dreamer's parts have the scale of the returns from before the update (docs/howto/scale.md), so it is fixed here.
    # The averages after the update are compared.
    monkeypatch.setattr(ReturnNormalizer, "scale", lambda self: torch.full_like(self.low, 3.0))
    check_parts_equal_the_whole(*CASES[name])


@pytest.mark.learning
@pytest.mark.parametrize("name", MORE)
def test_two_parts_of_a_batch_are_the_whole_in_other_workflows(name: str):
    check_parts_equal_the_whole(*MORE[name])


@pytest.mark.parametrize("experiment", ["dreamer_cartpole", "tdmpc2_pendulum", "og_wm_cartpole_pixels"])
def test_unequal_parts_are_refused(experiment: str):
    with pytest.raises(
        ConfigError, match=r"algorithm.grad_acc_steps is 7: choose a divisor of algorithm.batch_size"
    ):
        built([f"experiment={experiment}", "algorithm.grad_acc_steps=7"], ["update"])
