"""On a GPU: LaProp's one kernel against its foreach form."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rl_lab.components.nn.fast_path import use_fast_path
from rl_lab.components.nn.optim import LaProp

pytestmark = pytest.mark.gpu

SHAPES = [(3, 5), (2048,), (2049,), (4, 3, 2, 2), (1,), (300, 70)]


def make(agc: float) -> tuple[list[nn.Parameter], LaProp]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in SHAPES]
    parameters[3].data = parameters[3].data.to(memory_format=torch.channels_last)
    return parameters, LaProp(parameters, lr=torch.tensor(0.05, device="cuda"), warmup=3, agc=agc)


def set_gradients(parameters: list[nn.Parameter], step: int) -> torch.Tensor:
    """Large and small ones; the first and the fifth update are masked, and hold a NaN."""
    generator = torch.Generator("cuda").manual_seed(step)
    masked = step in (0, 4)
    for parameter in parameters:
        size = 30.0 if step % 3 == 0 else 0.1
        parameter.grad = torch.randn(parameter.shape, generator=generator, device="cuda") * size
    if masked:
        parameters[1].grad[5] = float("nan")  # type: ignore[index]
    return torch.tensor(float(masked), device="cuda")


@pytest.mark.parametrize("agc", [0.3, 0.0])
def test_one_kernel_gives_the_numbers_of_many(agc: float):
    many, plain = make(agc)
    one, fused = make(agc)
    use_fast_path(True, fused)
    for step in range(8):
        for parameters, optimizer in ((many, plain), (one, fused)):
            optimizer.found_inf = set_gradients(parameters, step)
            optimizer.step()
        torch.testing.assert_close(one, many, rtol=1e-5, atol=1e-6)
        for a, b in zip(one, many):
            torch.testing.assert_close(fused.state[a], plain.state[b], rtol=1e-5, atol=1e-6)
    assert fused._fused and not plain._fused


def test_a_loaded_state_is_used():
    """Loading gives the moments new addresses."""
    first, optimizer = make(0.3)
    second, other = make(0.3)
    use_fast_path(True, optimizer, other)
    optimizer.found_inf = set_gradients(first, 1)
    optimizer.step()
    other.found_inf = set_gradients(second, 2)
    other.step()
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for a, b in zip(first, second):
        b.data.copy_(a.data)
    for parameters, chosen in ((first, optimizer), (second, other)):
        chosen.found_inf = set_gradients(parameters, 3)
        chosen.step()
    torch.testing.assert_close(second, first, rtol=0.0, atol=0.0)
