"""The last layer of heads and policy is float32 under bfloat16 autocast."""

from __future__ import annotations

import torch

from rl_lab.components.controllers.dreamer import DreamerActorController
from rl_lab.components.nn.heads import ContinueHead, TwoHotHead
from rl_lab.components.nn.mlp import MLP, FrozenMLP
from rl_lab.records import ActionSpec, ArraySpec, Spec

SPEC = Spec("heads", {"x": ArraySpec((3,), "float32")}, ActionSpec("continuous", (2,)))


def test_outputs_are_float32_under_autocast():
    torch.manual_seed(0)
    feature = torch.randn(8, 16)
    heads = (
        TwoHotHead(features=16, units=32, layers=1, out_scale=1.0),
        ContinueHead(features=16, units=32, layers=1),
        DreamerActorController(spec=SPEC, features=16, units=32, out_scale=1.0),
    )
    for head in heads:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = head(feature)
        assert result.dtype == torch.float32
        assert not torch.equal(result, result.bfloat16().float())


def test_small_logit_change_moves_value():
    """Adding 0.001 to the logit of a bin near 450 changes the value; bfloat16 would round it away."""
    head = TwoHotHead(features=1, units=1, layers=1)
    logits = torch.full((255,), -5.0)
    lower, _ = head.two_hot.encode(torch.tensor(450.0))
    logits[lower], logits[lower + 1] = 9.0, 9.2
    raised = logits.clone()
    raised[lower + 1] += 0.001
    assert 0.0 < (head.mean(raised) - head.mean(logits)).item() < 0.1
    assert head.mean(raised.bfloat16()) == head.mean(logits.bfloat16())


def test_frozen_mlp_matches_mlp():
    torch.manual_seed(0)
    for float_out in (False, True):
        mlp = MLP(16, 32, 2, outputs=5, float_out=float_out)
        x = torch.randn(8, 16)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            expected = mlp(x)
            found = FrozenMLP(mlp, torch.bfloat16)(x.bfloat16())
        assert found.dtype == expected.dtype == (torch.float32 if float_out else torch.bfloat16)
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_frozen_mlp_gradient_matches_autograd():
    torch.manual_seed(0)
    for outputs, float_out in ((None, False), (5, False), (5, True)):
        mlp = MLP(16, 32, 3, outputs=outputs, float_out=float_out)
        x = torch.randn(8, 16, requires_grad=True)
        grad = torch.randn(8, mlp.out_features)
        (expected,) = torch.autograd.grad(mlp(x), x, grad)
        frozen = FrozenMLP(mlp, torch.float32)
        with torch.no_grad():
            _, products = frozen.traced(x)
            found = frozen.first_product_gradient(grad, products) @ frozen.first_weight
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
