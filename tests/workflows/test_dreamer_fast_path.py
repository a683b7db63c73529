"""The fast path equals the plain path: on a CPU with the kernels' torch form, on a GPU with the kernels."""

from __future__ import annotations

import pytest
import torch

from rl_lab.components.kernels.pool_norm_silu import fold, unfold
from rl_lab.components.kernels.reverse_scan import reverse_scan
from rl_lab.components.nn import conv as folded_conv
from rl_lab.components.nn.conv import convolve, fold_weight, upsample_weight
from rl_lab.components.nn.fast_path import use_fast_path
from rl_lab.records import ActMode, ArraySpec, Spec
from rl_lab.workflows.dreamer.report import training_rollouts
from tests.workflows.dreamer_case import (
    CONTINUOUS,
    EARLY,
    MULTI,
    PARTS,
    image_spec,
    make_batch,
    make_dreamer,
    run_hook,
    vector_spec,
)


def jittered(workflow):
    """Norm scales and biases away from their initial 1 and 0, so that errors in them are visible."""
    generator = torch.Generator().manual_seed(3)
    for name in PARTS:
        for parameter in getattr(workflow, name).parameters():
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return workflow


def both(spec: Spec) -> Spec:
    return Spec("both", {**image_spec().observations, "vector": ArraySpec((4,), "float32")}, spec.action)


@pytest.mark.parametrize("hook", ["update", "update_world_model", "update_controller"])
@pytest.mark.parametrize(
    "spec", [vector_spec(), vector_spec(CONTINUOUS), image_spec(action=MULTI), both(vector_spec())]
)
def test_fast_update_equals_plain(spec: Spec, hook: str):
    assert_fast_is_plain(spec, hook)


def test_fast_update_equals_plain_2023():
    assert_fast_is_plain(vector_spec(CONTINUOUS), "update", **EARLY)


CELL_2023 = {
    "algorithm__layer": "layer+silu",
    "algorithm__init": "fan_avg",
    "algorithm__bias": False,
    "components__rssm__cell": "layer_norm_gru",
    "components__rssm__initial": "learned",
    "components__encoder__images": "strided",
    "components__decoder__images": "strided",
}


def test_fast_update_equals_plain_with_parts_that_stay_plain():
    assert_fast_is_plain(image_spec(), "update", **CELL_2023)


def assert_fast_is_plain(spec: Spec, hook: str, **changes) -> None:
    results = {}
    for choice in ("off", "on"):
        workflow = jittered(make_dreamer(spec, training__fast_path=choice, **changes))
        assert workflow.fast == (choice == "on")
        update = run_hook(workflow, hook)
        gradients = {
            f"{name}.{key}": parameter.grad
            for name in PARTS
            for key, parameter in getattr(workflow, name).named_parameters()
            if parameter.grad is not None
        }
        results[choice] = update.metrics, gradients, update.write_back
    plain, quick = results["off"], results["on"]
    assert plain[0].keys() == quick[0].keys() and plain[1].keys() == quick[1].keys()
    for name, value in plain[0].items():
        assert float(quick[0][name]) == pytest.approx(float(value), rel=1e-5, abs=1e-6), name
    for name, gradient in plain[1].items():
        error = (quick[1][name] - gradient).norm() / gradient.norm().clamp(min=1e-4)
        assert error < 1e-4, f"{name}: {error}"
    if plain[2] is not None:
        assert torch.equal(quick[2]["stoch"], plain[2]["stoch"])
        assert torch.allclose(quick[2]["deter"].float(), plain[2]["deter"].float(), atol=1e-2)


def test_fast_acting_and_imagination_equal_plain():
    results = []
    for choice in ("off", "on"):
        workflow = jittered(make_dreamer(image_spec(), training__fast_path=choice))
        batch = make_batch(workflow)
        obs = {"image": batch.obs["image"][:, 0]}
        mode = ActMode(generator=torch.Generator().manual_seed(1))
        action, state, _ = workflow.act(
            obs, workflow.initial_policy_state(2), torch.tensor([True, False]), mode
        )
        dream = training_rollouts(workflow, batch, 4, torch.Generator().manual_seed(2))
        results.append((action, state["deter"], dream.action, dream.reward, dream.obs["image"] / 2.55e6))
    for plain, quick in zip(*results):
        assert torch.allclose(plain.float(), quick.float(), atol=1e-4)


def test_folding_is_exact_and_reversible():
    x = torch.randn(2, 4, 6, 3)
    assert torch.equal(unfold(fold(x)), x)
    weight = torch.randn(5, 3, 5, 5)
    plain = convolve(x, weight)
    assert torch.allclose(unfold(convolve(fold(x), fold_weight(weight))), plain, atol=1e-4)
    upsampled = x.repeat_interleave(2, 1).repeat_interleave(2, 2)
    assert torch.allclose(
        unfold(convolve(x, upsample_weight(weight))), convolve(upsampled, weight), atol=1e-4
    )


@pytest.mark.parametrize("limit", [0, 5])
def test_wide_layers_are_not_folded(monkeypatch, limit: int):
    workflow = jittered(make_dreamer(image_spec(), training__fast_path="on"))
    obs = make_batch(workflow).obs
    assert workflow.encoder.parts[0].fast
    folded = workflow.encoder(obs)
    monkeypatch.setattr(folded_conv, "FOLD_UP_TO", limit)
    assert torch.allclose(workflow.encoder(obs), folded, atol=1e-4)
    use_fast_path(False, workflow.encoder)
    assert torch.allclose(workflow.encoder(obs), folded, atol=1e-4)


def test_reverse_recurrence_by_hand():
    base, gain = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, 0.5, 2.0]])
    # y2 = 3 + 2·10 = 23, y1 = 2 + 0.5·23 = 13.5, y0 = 1 + 0.5·13.5 = 7.75
    assert reverse_scan(base, gain, torch.tensor([10.0])).tolist() == [[7.75, 13.5, 23.0]]
