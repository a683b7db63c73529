import pytest
import torch
from torch import nn

from rl_lab.components.nn.optim import LaProp
from rl_lab.components.nn.training_step import NonFiniteGuard, find_gradients, optimizer_step


def case(make_optimizer):
    torch.manual_seed(0)
    net = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 1)})
    optimizer = make_optimizer(net.parameters())
    parts = {name: list(module.parameters()) for name, module in net.items()}
    return net, optimizer, parts


def loss_of(net, x):
    return net["b"](torch.tanh(net["a"](x))).square().mean()


OPTIMIZERS = {
    "laprop": lambda p: LaProp(p, lr=1e-2, warmup=0),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "fused_adam": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step_lowers_loss_and_reports_norms(name):
    net, optimizer, parts = case(OPTIMIZERS[name])
    guard, x = NonFiniteGuard(), torch.randn(8, 3)
    before = loss_of(net, x).item()
    for _ in range(20):
        metrics, masked = optimizer_step(
            loss_of(net, x), [optimizer], parts, guard=guard, learning_rate_scale=torch.tensor(1.0)
        )
    assert loss_of(net, x).item() < before
    assert masked.item() == 0.0
    assert set(metrics) == {"grad_norm/a", "grad_norm/b", "grad_norm", "nonfinite", "loss"}
    assert metrics["grad_norm"].item() == pytest.approx(
        (metrics["grad_norm/a"].item() ** 2 + metrics["grad_norm/b"].item() ** 2) ** 0.5, rel=1e-5
    )
    assert guard.report() == {"updates": 20, "masked": 0, "first_masked": -1, "last_masked": -1}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_mask_update(name, bad):
    net, optimizer, parts = case(OPTIMIZERS[name])
    guard, x = NonFiniteGuard(), torch.randn(8, 3)
    broken = x.clone()
    broken[0, 0] = bad
    start = {key: value.clone() for key, value in net.state_dict().items()}
    metrics, masked = optimizer_step(loss_of(net, broken), [optimizer], parts, guard=guard)
    assert masked.item() == 1.0
    assert metrics["nonfinite"].item() == 1.0
    for key, value in net.state_dict().items():
        assert torch.equal(value, start[key])
    optimizer_step(loss_of(net, x), [optimizer], parts, guard=guard)
    optimizer_step(loss_of(net, broken), [optimizer], parts, guard=guard)
    for value in net.state_dict().values():
        assert torch.isfinite(value).all()
    assert guard.report() == {"updates": 3, "masked": 2, "first_masked": 0, "last_masked": 2}


def test_learning_rate_scale():
    net, _, parts = case(OPTIMIZERS["laprop"])
    optimizers = [LaProp(parts["a"], lr=1e-2, warmup=0), LaProp(parts["b"], lr=1e-3, warmup=0)]
    scale = torch.tensor(0.5)
    optimizer_step(
        loss_of(net, torch.randn(8, 3)),
        optimizers,
        parts,
        guard=NonFiniteGuard(),
        learning_rate_scale=scale,
    )
    rates = [optimizer.param_groups[0]["lr"].item() for optimizer in optimizers]
    assert rates == pytest.approx([5e-3, 5e-4])


def test_optimizers_without_gradients_are_skipped():
    net, _, parts = case(OPTIMIZERS["laprop"])
    reached = LaProp(parts["a"], lr=1e-2, warmup=0)
    other = LaProp(parts["b"], lr=1e-2, warmup=0)
    before = net["b"].weight.clone()
    metrics, _ = optimizer_step(
        net["a"](torch.randn(8, 3)).square().mean(), [reached, other], parts, guard=NonFiniteGuard()
    )
    assert "grad_norm/b" not in metrics
    assert torch.equal(net["b"].weight, before)
    assert not other.state


def test_gradient_clipping_and_averaging():
    net, _, parts = case(OPTIMIZERS["laprop"])
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    before = torch.cat([p.detach().flatten().clone() for p in net.parameters()])
    seen = []

    def halve(gradients):
        seen.append(len(gradients))
        torch._foreach_mul_(gradients, 0.5)

    metrics, _ = optimizer_step(
        100 * loss_of(net, torch.randn(8, 3)),
        [optimizer],
        parts,
        guard=NonFiniteGuard(),
        max_grad_norm=0.1,
        limit_gradients=halve,
    )
    after = torch.cat([p.detach().flatten() for p in net.parameters()])
    assert seen == [4]
    assert metrics["grad_norm"].item() > 0.1
    assert (after - before).norm().item() == pytest.approx(0.1, rel=1e-4)


def test_extra_gradients_are_added():
    x = torch.randn(8, 3)
    weights, losses = [], []
    for apart in (False, True):
        net, optimizer, parts = case(OPTIMIZERS["laprop"])

        first = loss_of(net, x)
        second = net["b"](torch.ones(2, 4)).abs().mean()  # depends on b only
        if apart:
            found = find_gradients(second, list(net.parameters()))
            assert [p is q for (p, _), q in zip(found.found, parts["b"], strict=True)] == [True, True]
            metrics, _ = optimizer_step(
                first, [optimizer], parts, guard=NonFiniteGuard(), extra_gradients=lambda found=found: found
            )
        else:
            metrics, _ = optimizer_step(first + second, [optimizer], parts, guard=NonFiniteGuard())
        weights.append([p.detach().clone() for p in net.parameters()])
        losses.append((metrics["loss"].item(), metrics["grad_norm"].item()))
    torch.testing.assert_close(weights[1], weights[0])
    assert losses[1] == pytest.approx(losses[0])


def test_frozen_parameters_get_no_gradients():
    net, _, _ = case(OPTIMIZERS["adam"])
    net.requires_grad_(False)
    found = find_gradients(net["b"](torch.ones(2, 4)).mean(), list(net.parameters()))
    assert found.found == [] and found.loss.shape == ()
