import math
import re

import pytest
import torch
from torch import nn

from rl_lab.components.nn.mlp import BlockLinear
from rl_lab.components.nn.optim import LaProp, is_decayed
from rl_lab.errors import ConfigError


def slow_laprop(
    parameter,
    gradients,
    *,
    lr,
    warmup,
    agc=0.3,
    floor=1e-3,
    beta1=0.9,
    beta2=0.999,
    eps=1e-20,
    nesterov=False,
    schedule="const",
    anneal=0,
    decay=0.0,
):
    """Scalar loop as in the paper, with clipping."""
    values = parameter.flatten().tolist()
    square, momentum = [0.0] * len(values), [0.0] * len(values)
    for step, gradient in enumerate(gradients, start=1):
        flat = gradient.flatten().tolist()
        size = math.sqrt(sum(g * g for g in flat))
        own = math.sqrt(sum(v * v for v in values))
        shrink = max(1.0, size / (agc * max(floor, own))) if agc else 1.0
        rate = lr * (min(1.0, (step - 1) / warmup) if warmup else 1.0)
        if step - 1 > warmup and schedule != "const":
            done = min(1.0, (step - 1 - warmup) / (anneal - warmup))
            rate = lr * (1 - 0.9 * done) if schedule == "linear" else lr * (1 + math.cos(math.pi * done)) / 2
        for i, g in enumerate(flat):
            g = g / shrink
            square[i] = beta2 * square[i] + (1 - beta2) * g * g
            u = g / (math.sqrt(square[i] / (1 - beta2**step)) + eps)
            momentum[i] = beta1 * momentum[i] + (1 - beta1) * u
            ahead = beta1 * momentum[i] + (1 - beta1) * u if nesterov else momentum[i]
            values[i] -= rate * (ahead / (1 - beta1**step) + decay * values[i])
    return torch.tensor(values).reshape(parameter.shape)


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("agc", [0.0, 0.3])
def test_laprop_matches_loop(warmup, agc):
    generator = torch.Generator().manual_seed(0)
    starts = [
        torch.randn(3, 2, generator=generator),
        torch.zeros(4),
        torch.randn(2, generator=generator) * 20,
    ]
    gradients = [
        [torch.randn(s.shape, generator=generator) * scale for scale in (1, 0.1, 5, 1e-3, 1)] for s in starts
    ]
    parameters = [nn.Parameter(s.clone()) for s in starts]
    optimizer = LaProp(parameters, lr=0.05, agc=agc, warmup=warmup)
    for step in range(5):
        for parameter, series in zip(parameters, gradients):
            parameter.grad = series[step].clone()
        optimizer.step()
    for parameter, start, series in zip(parameters, starts, gradients):
        expected = slow_laprop(start, series, lr=0.05, warmup=warmup, agc=agc)
        assert torch.allclose(parameter, expected, atol=1e-5)


def test_adaptive_gradient_clipping():
    parameter = nn.Parameter(torch.tensor([3.0, 4.0]))  # norm 5: gradient norms up to 1.5 are not clipped
    optimizer = LaProp([parameter], lr=1.0)
    parameter.grad = torch.tensor([0.0, 30.0])
    (ratio,) = optimizer._clip_ratios(optimizer.param_groups[0], [parameter], [parameter.grad])
    assert torch.allclose(parameter.grad / ratio, torch.tensor([0.0, 1.5]))


def test_late_parameter_has_own_step_count():
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = LaProp([first, second], lr=0.1, agc=0.0, warmup=0)
    gradients = [torch.tensor([1.0, -2.0]) * k for k in range(1, 6)]
    for step, gradient in enumerate(gradients):
        first.grad = gradient.clone()
        second.grad = gradient.clone() if step >= 3 else None
        optimizer.step()
    assert torch.allclose(first, slow_laprop(torch.ones(2), gradients, lr=0.1, warmup=0, agc=0.0))
    assert torch.allclose(second, slow_laprop(torch.ones(2), gradients[3:], lr=0.1, warmup=0, agc=0.0))


@pytest.mark.parametrize("masked_step", [0, 2])
def test_found_inf_masks_step(masked_step):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, generator=generator)
    gradients = [torch.randn(4, generator=generator) for _ in range(4)]
    parameter = nn.Parameter(start.clone())
    optimizer = LaProp([parameter], lr=0.05, warmup=3)
    for step, gradient in enumerate(gradients):
        masked = step == masked_step
        parameter.grad = torch.full((4,), float("nan")) if masked else gradient.clone()
        optimizer.found_inf = torch.tensor(float(masked))
        optimizer.step()
    rest = [g for step, g in enumerate(gradients) if step != masked_step]
    assert torch.allclose(parameter, slow_laprop(start, rest, lr=0.05, warmup=3), atol=1e-6)
    assert optimizer.state[parameter]["step"].item() == 3


def test_state_dict_round_trip(tmp_path):
    def make():
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(5))
        return parameter, LaProp([parameter], lr=torch.tensor(0.05), warmup=3)

    def train(parameter, optimizer, steps):
        for _ in range(steps):
            parameter.grad = torch.sin(parameter.detach() * 3)
            optimizer.step()

    expected, optimizer = make()
    train(expected, optimizer, 6)
    half, optimizer = make()
    train(half, optimizer, 3)
    torch.save({"p": half, "o": optimizer.state_dict()}, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed, optimizer = make()
    resumed.data.copy_(state["p"])
    optimizer.load_state_dict(state["o"])
    train(resumed, optimizer, 3)
    assert torch.equal(resumed, expected)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("schedule", ["const", "linear", "cosine"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_switches_of_the_original_match_loop(nesterov: bool, schedule: str, weight_decay: float):
    """danijar/dreamerv3 agent.py, `_make_opt`: nesterov, wd, schedule, anneal."""
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(3, 2, generator=generator), torch.randn(4, generator=generator)]
    gradients = [[torch.randn(s.shape, generator=generator) for _ in range(8)] for s in starts]
    parameters = [nn.Parameter(s.clone()) for s in starts]
    switches = {"nesterov": nesterov, "schedule": schedule, "weight_decay": weight_decay}
    optimizer = LaProp(parameters, lr=0.05, warmup=2, anneal=6, **switches)
    for step in range(8):
        for parameter, series in zip(parameters, gradients):
            parameter.grad = series[step].clone()
        optimizer.step()
    for parameter, start, series in zip(parameters, starts, gradients):
        decay = weight_decay if start.ndim == 2 else 0.0  # a vector is a bias or the scale of a norm
        expected = slow_laprop(
            start, series, lr=0.05, warmup=2, anneal=6, nesterov=nesterov, schedule=schedule, decay=decay
        )
        assert torch.allclose(parameter, expected, atol=1e-5)


def test_unused_switches_leave_the_state_as_it_was():
    plain = LaProp([nn.Parameter(torch.ones(2))]).state_dict()["param_groups"][0]
    assert not plain.keys() & {"nesterov", "weight_decay", "schedule", "anneal"}
    used = LaProp([nn.Parameter(torch.ones(2))], weight_decay=0.1, schedule="linear", anneal=2000)
    again = LaProp([nn.Parameter(torch.ones(2))], weight_decay=0.1, schedule="linear", anneal=2000)
    again.load_state_dict(used.state_dict())
    assert again.param_groups[0]["anneal"] == 2000 and again.param_groups[0]["weight_decay"] == 0.1


def test_a_masked_step_decays_nothing():
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = LaProp([parameter], lr=0.1, warmup=0, weight_decay=0.5, nesterov=True)
    parameter.grad = torch.full((2, 2), float("nan"))
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert torch.equal(parameter, torch.ones(2, 2))


def test_which_weights_decay():
    layer = BlockLinear(4, 6, blocks=2)
    assert is_decayed(layer.weight) and not is_decayed(layer.bias)  # a bias of three axes
    found = []
    for decay in (0.0, 0.5):
        alone = nn.Parameter(torch.ones(2))  # in a group without weights
        optimizer = LaProp([alone], lr=0.1, warmup=0, weight_decay=decay)
        alone.grad = torch.ones(2)
        optimizer.step()
        found.append(alone.detach().clone())
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"schedule": "linear"}, "optimizers.model.anneal is 0: set it to the update"),
        ({"schedule": "linear", "anneal": 1000}, "more than warmup"),
        ({"schedule": "step"}, "optimizers.model.schedule"),
    ],
)
def test_schedules_that_do_not_fit(words: dict, text: str):
    with pytest.raises(ConfigError, match=re.escape(text)):
        LaProp([nn.Parameter(torch.ones(2))], **words)
