"""On a GPU: work beside other work gives the numbers of work in order, also when recorded."""

from __future__ import annotations

import pytest
import torch

from rl_lab.components.nn.fast_path import SideStream

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


def chain(x: torch.Tensor, fast: bool, steps: int = 12) -> torch.Tensor:
    """Two lanes and the current stream, each with something long to do and with memory that is used again."""

    def one(value: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            value = torch.tanh(value @ value.T) @ value / 512.0
        return value

    late = SideStream(one, x, fast=fast, device=DEVICE, stream=1)
    for _ in range(steps):
        side = SideStream(one, x, fast=fast, device=DEVICE)
        here = one(x + 1.0)
        x = torch.sin(here + side.join())
        x = x + late.join()
        late = SideStream(one, x, fast=fast, device=DEVICE, stream=1)
    return x + late.join()


def test_lanes_give_the_numbers_of_work_in_order():
    x = torch.randn(512, 256, device=DEVICE) / 16.0
    with torch.no_grad():
        expected = chain(x, fast=False)
        for _ in range(3):
            assert torch.equal(chain(x, fast=True), expected)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = chain(x, fast=True)
    for _ in range(3):
        graph.replay()
        assert torch.equal(found, expected)
