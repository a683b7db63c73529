import math

import pytest
import torch

from rl_lab.components.representation_learners.rssm import BlockGRU


def sigmoid(x):
    return 1.0 / (1.0 + math.exp(-x))


def activated(hidden, norm):
    rms = math.sqrt(sum(x * x for x in hidden) / len(hidden) + 1e-4)  # over the complete state, not per block
    hidden = [x / rms * w for x, w in zip(hidden, norm.weight.tolist())]
    return [x * sigmoid(x) for x in hidden]


def slow_step(gru, deter, inputs, blocks):
    """Scalar loop: gates are split within each block, in the order reset, candidate, update."""
    size = len(deter) // blocks
    summary = gru.deter_in(torch.tensor([deter]))[0].tolist()
    shared = summary + [x for part in inputs for x in part]
    hidden = []
    for g in range(blocks):
        row = deter[g * size : (g + 1) * size] + shared
        for j in range(size):
            hidden.append(
                gru.layer.bias[g, 0, j].item()
                + sum(x * gru.layer.weight[g, i, j].item() for i, x in enumerate(row))
            )
    hidden = activated(hidden, gru.norm)
    for layer, norm in zip(gru.more, gru.more_norms):
        rows = [hidden[g * size : (g + 1) * size] for g in range(blocks)]
        hidden = [
            layer.bias[g, 0, j].item() + sum(x * layer.weight[g, i, j].item() for i, x in enumerate(row))
            for g, row in enumerate(rows)
            for j in range(size)
        ]
        hidden = activated(hidden, norm)
    out = []
    for g in range(blocks):
        row = hidden[g * size : (g + 1) * size]
        gates = [
            gru.gates.bias[g, 0, k].item()
            + sum(x * gru.gates.weight[g, i, k].item() for i, x in enumerate(row))
            for k in range(3 * size)
        ]
        for j in range(size):
            reset, candidate, update = gates[j], gates[size + j], gates[2 * size + j]
            candidate = math.tanh(sigmoid(reset) * candidate)
            update = sigmoid(update - 1.0)
            out.append(update * candidate + (1.0 - update) * deter[g * size + j])
    return out


@pytest.mark.parametrize("layers", [1, 3])
def test_block_gru_matches_loop(layers: int):
    torch.manual_seed(0)
    gru = BlockGRU(6, 4, inputs=5, blocks=2, layers=layers)
    for parameter in gru.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.5)
    deter, first, second = torch.randn(3, 6), torch.randn(3, 3), torch.randn(3, 2)
    got = gru(deter, first, second)
    for row in range(3):
        expected = slow_step(gru, deter[row].tolist(), [first[row].tolist(), second[row].tolist()], 2)
        assert torch.allclose(got[row], torch.tensor(expected), atol=1e-5)


def test_untrained_gru_keeps_state():
    # The update gate has a bias of -1: an untrained cell keeps most of its state.
    gru = BlockGRU(8, 4, inputs=2, blocks=4)
    gru.gates.weight.data.zero_()
    deter = torch.rand(5, 8)
    kept = (1.0 - sigmoid(-1.0)) * deter
    assert torch.allclose(gru(deter, torch.zeros(5, 2)), kept)
