"""Recurrent backbones: steps equal complete sequences, outputs are causal, and the maths by loops."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from rl_lab.components.dynamics.backbones import (
    CfCBackbone,
    CfCCell,
    GRUBackbone,
    LSTMBackbone,
    SelectiveBlock,
    StateSpaceBackbone,
    scan,
)

BACKBONES = {"gru": GRUBackbone, "lstm": LSTMBackbone, "cfc": CfCBackbone, "state_space": StateSpaceBackbone}
B, T, DIM = 2, 9, 16


@torch.no_grad()
@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("parts", [(1,) * T, (4, 1, 3, 1)])
def test_steps_equal_complete_sequence(name: str, parts: tuple[int, ...]):
    torch.manual_seed(0)
    backbone = BACKBONES[name](dim=DIM, layers=2, length=T)
    x = torch.randn(B, T, DIM)
    complete, state, found = backbone(x), backbone.init_state(B), []
    for part in x.split(parts, 1):
        hidden, state = backbone.step(part, state)
        found.append(hidden)
    torch.testing.assert_close(torch.cat(found, 1), complete, atol=1e-5, rtol=1e-4)
    assert all(len(value) == B for value in state.values())
    changed = x.clone()
    changed[:, 5:] += 1.0
    torch.testing.assert_close(backbone(changed)[:, :5], complete[:, :5])
    assert not torch.allclose(backbone(changed)[:, 5:], complete[:, 5:])


@pytest.mark.parametrize("name", BACKBONES)
def test_every_weight_gets_a_gradient(name: str):
    backbone = BACKBONES[name](dim=DIM, layers=1, length=T)
    (backbone(torch.randn(B, T, DIM)) * torch.randn(B, T, DIM)).sum().backward()
    for key, parameter in backbone.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, key


def test_cfc_cell_by_hand():
    """Hasani et al. 2022, equation 10 with a shared layer (scaled tanh) and elapsed time 1."""
    cell = CfCCell(1, 1)
    with torch.no_grad():
        cell.shared.weight.copy_(torch.tensor([[0.5, -1.0]]))
        cell.shared.bias.fill_(0.1)
        cell.heads.weight.copy_(torch.tensor([[1.0], [2.0], [-1.0]]))
        cell.heads.bias.copy_(torch.tensor([0.0, 0.5, 0.2]))
        x, h = torch.tensor([[0.4]]), torch.tensor([[0.3]])
        z = 1.7159 * torch.tanh(torch.tensor(0.666 * (0.5 * 0.4 - 0.3 + 0.1)))
        gate = torch.sigmoid(-z + 0.2)
        wanted = (1 - gate) * torch.tanh(z) + gate * torch.tanh(2 * z + 0.5)
        torch.testing.assert_close(cell(x, h), wanted.view(1, 1))


@pytest.mark.parametrize("length", [1, 2, 7, 16])
def test_scan_by_a_loop(length: int):
    generator = torch.Generator().manual_seed(length)
    keep, added = (torch.rand(3, length, 4, generator=generator) for _ in range(2))
    first = torch.rand(3, 4, generator=generator)
    h, wanted = first, []
    for t in range(length):
        h = keep[:, t] * h + added[:, t]
        wanted.append(h)
    torch.testing.assert_close(scan(keep, added, first), torch.stack(wanted, 1))


@torch.no_grad()
def test_selective_block_by_a_loop():
    """The recurrence of Mamba, channel by channel, step by step."""
    torch.manual_seed(0)
    block = SelectiveBlock(4, expand=2, states=3, kernel=2)
    x = torch.randn(1, 5, 4)
    out, last, _ = block(x, torch.zeros(1, 8, 3), torch.zeros(1, 8, 1))
    inputs, gate = block.enter(block.norm(x))[0].chunk(2, -1)  # (5, 8)
    h, before, weight = torch.zeros(8, 3), torch.zeros(8), block.conv.weight[:, 0]
    for t in range(5):
        u = F.silu(weight[:, 0] * before + weight[:, 1] * inputs[t] + block.conv.bias)
        before = inputs[t]
        rank, b, c = block.select(u).split([1, 3, 3])
        delta = F.softplus(block.delta(rank))
        for channel in range(8):
            for n in range(3):
                decay = torch.exp(-delta[channel] * (n + 1))
                h[channel, n] = decay * h[channel, n] + delta[channel] * b[n] * u[channel]
        y = (h * c).sum(-1) + u
        torch.testing.assert_close(
            out[0, t], x[0, t] + block.leave(y * F.silu(gate[t])), atol=1e-5, rtol=1e-4
        )
    torch.testing.assert_close(last[0], h, atol=1e-5, rtol=1e-4)
