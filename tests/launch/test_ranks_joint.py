"""Two ranks with half of a batch each take the step that one process takes with the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rl_lab.workflows.tdmpc.losses import RunningScale
from tests.launch.rank_case import on_ranks, record_updates, repeat_updates, scale_of_share

# Float32 sums in another order: relative to the norm of a part's gradient or of a statistic.
TOLERANCE = 2e-4

EPISODES, QUANTIZER = "buffers.replay.folder=FOLDER", "components.tokenizer.quantizer"
IRIS = ["update_tokenizer", "update_world_model", "update_actor_critic"]
FAST: dict[str, tuple[list[str], list[str]]] = {
    "dreamer": (["experiment=dreamer_cartpole"], ["update"]),
    "tdmpc2": (["experiment=tdmpc2_pendulum", "controllers.critic.dropout=0"], ["update"]),
    "delta_iris": (["experiment=delta_iris_catch", EPISODES], IRIS),
}
# A mask of dropout depends on the place in the batch, so it is off; a batch of 2 sequences has some masked rows.
SLOW: dict[str, tuple[list[str], list[str]]] = {
    "dreamer_halves": (["experiment=dreamer_cartpole"], ["update_world_model", "update_controller"]),
    "dreamer_continuous": (["experiment=dreamer_cartpole", "environment=dummy_continuous"], ["update"]),
    "dreamer_mpc": (["experiment=dreamer_mpc_cartpole"], ["update"]),
    "dreamer_v1": (["experiment=dreamer_v1_dmc_vision", "environment=dummy_continuous"], ["update"]),
    "dreamer_v2": (["experiment=dreamer_v2_crafter", "environment=dummy_discrete"], ["update"]),
    "dreamer_2023": (["experiment=dreamer_dmc_proprio_2023", "environment=dummy_continuous"], ["update"]),
    "plan2explore": (["experiment=plan2explore_dmc_vision", "environment=dummy_continuous"], ["explore"]),
    "tdmpc2_discrete": (["experiment=tdmpc2_cartpole", "controllers.critic.dropout=0"], ["update"]),
    "iris": (["experiment=iris_catch", EPISODES, "algorithm.size.dropout=0"], IRIS),
    "iris_lfq": (
        ["experiment=iris_catch", EPISODES, f"components/quantizer@{QUANTIZER}=lfq", f"{QUANTIZER}.dim=4"],
        ["update_tokenizer"],
    ),
    "og_wm": (["experiment=og_wm_cartpole_pixels"], ["update_vae", "update_mdn"]),
    "diffusion_policy": (["experiment=diffusion_policy_lunarlander"], ["measure", "update"]),
    "behaviour_cloning": (["experiment=behaviour_cloning_lunarlander"], ["measure", "update"]),
}


def compare(recorded: list[dict[str, Any]], folder: Path) -> None:
    torch.save(recorded, folder / "recorded.pt")
    assert on_ranks(2, repeat_updates, str(folder)) == [0, 0]
    results = [torch.load(folder / f"rank{number}.pt", weights_only=True) for number in range(2)]
    for case, first, second in zip(recorded, *results, strict=True):
        for number, (call, one, two) in enumerate(zip(case["calls"], first, second, strict=True)):
            where = f"{case['words'][0]} update {number + 1} ({call['hook']})"
            # An optimizer that divides by the size of the gradient enlarges what rounding did in the first round.
            limit = TOLERANCE if number < len(case["calls"]) // 2 else 20 * TOLERANCE
            assert one["loss"] == pytest.approx(call["loss"], rel=limit, abs=1e-5), where
            for kind in ("gradients", "statistics"):
                assert one[kind].keys() == call[kind].keys() == two[kind].keys()
                for name, value in call[kind].items():
                    assert torch.equal(one[kind][name], two[kind][name]), f"{where}: {name} of two ranks"
                    error, size = float((one[kind][name] - value).norm()), float(value.norm())
                    assert error <= limit * size + 1e-9, f"{where}: {name} {error} of {size}"


def test_two_ranks_are_one_process_with_the_joint_batch(tmp_path: Path):
    compare([record_updates(*case) for case in FAST.values()], tmp_path)


def test_value_scale_of_two_ranks_is_that_of_all_values(tmp_path: Path):
    values = 10.0 * torch.randn(40, generator=torch.Generator().manual_seed(0))
    torch.save(values, tmp_path / "values.pt")
    assert on_ranks(2, scale_of_share, str(tmp_path)) == [0, 0]
    expected = RunningScale().update(values)
    assert expected > 1.2
    for number in range(2):
        assert torch.equal(torch.load(tmp_path / f"scale{number}.pt", weights_only=True), expected)


@pytest.mark.learning
@pytest.mark.parametrize("name", SLOW)
def test_every_workflow_on_two_ranks_is_one_process_with_the_joint_batch(name: str, tmp_path: Path):
    compare([record_updates(*SLOW[name])], tmp_path)
