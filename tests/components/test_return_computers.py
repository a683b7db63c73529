"""The three return computers, compared with values computed by hand and with a loop."""

import pytest
import torch

from rl_lab.components.return_computers.discounted import DiscountedReturns
from rl_lab.components.return_computers.n_step import NStepReturns
from rl_lab.components.return_computers.td_lambda import TDLambdaReturns


def one(*numbers):
    return torch.tensor([numbers])


# Four states; the reward of state 0 is never used.
REWARD = one(9.0, 1.0, 2.0, 3.0)
CONT = one(1.0, 0.5, 0.5, 0.5)
VALUE = one(10.0, 20.0, 30.0, 40.0)


def test_lambda_returns():
    # R[2] = 3 + 0.5·40 = 23;  R[1] = 2 + 0.5·(0.2·30 + 0.8·23) = 14.2;  R[0] = 1 + 0.5·(0.2·20 + 0.8·14.2) = 8.68
    assert torch.allclose(TDLambdaReturns(lam=0.8)(REWARD, CONT, VALUE), one(8.68, 14.2, 23.0))


def test_n_step_returns():
    # Two steps: R[0] = 1 + 0.5·(2 + 0.5·30) = 9.5;  R[1] = 2 + 0.5·(3 + 0.5·40) = 13.5;  R[2] has only one step
    assert torch.allclose(NStepReturns(steps=2)(REWARD, CONT, VALUE), one(9.5, 13.5, 23.0))
    assert torch.allclose(NStepReturns(steps=1)(REWARD, CONT, VALUE), one(11.0, 17.0, 23.0))


def test_discounted_returns():
    # R[2] = 3 + 0.5·40 = 23;  R[1] = 2 + 0.5·23 = 13.5;  R[0] = 1 + 0.5·13.5 = 7.75
    assert torch.allclose(DiscountedReturns()(REWARD, CONT, VALUE), one(7.75, 13.5, 23.0))
    # Without bootstrap: 3;  2 + 1.5 = 3.5;  1 + 1.75 = 2.75
    assert torch.allclose(DiscountedReturns(bootstrap=False)(REWARD, CONT, VALUE), one(2.75, 3.5, 3.0))


def test_termination_and_truncation():
    last = torch.tensor([[False, False, True, False]])
    # State 2 ends its episode; the row after it belongs to another one.
    ended = one(1.0, 0.5, 0.0, 0.5)  # terminated: no reward after it
    assert TDLambdaReturns(lam=0.8)(REWARD, ended, VALUE, last=last)[0, 1].item() == pytest.approx(2.0)
    # Truncated by a time limit: its value counts fully, not the next episode's return. R[1] = 2 + 0.5·30 = 17
    assert TDLambdaReturns(lam=0.8)(REWARD, CONT, VALUE, last=last)[0, 1].item() == pytest.approx(17.0)
    assert NStepReturns(steps=3)(REWARD, CONT, VALUE, last=last)[0, 1].item() == pytest.approx(17.0)
    assert DiscountedReturns()(REWARD, CONT, VALUE, last=last)[0, 1].item() == pytest.approx(17.0)


def slow_lambda(reward, cont, value, last, lam):
    steps = len(reward)
    out = [0.0] * steps
    out[-1] = value[-1]
    for t in range(steps - 1, 0, -1):
        mix = 0.0 if last[t] else lam
        out[t - 1] = reward[t] + cont[t] * ((1 - mix) * value[t] + mix * out[t])
    return out[:-1]


def slow_n_step(reward, cont, value, last, n):
    steps = len(reward)
    out = []
    for t in range(steps - 1):
        total, factor = 0.0, 1.0
        for k in range(1, n + 1):
            total += factor * reward[t + k]
            factor *= cont[t + k]
            if k == n or last[t + k] or t + k == steps - 1:
                total += factor * value[t + k]
                break
        out.append(total)
    return out


@pytest.mark.parametrize(
    ("computer", "slow"),
    [
        (TDLambdaReturns(lam=0.95), lambda *a: slow_lambda(*a, 0.95)),
        (TDLambdaReturns(lam=0.0), lambda *a: slow_n_step(*a, 1)),
        (NStepReturns(steps=1), lambda *a: slow_n_step(*a, 1)),
        (NStepReturns(steps=3), lambda *a: slow_n_step(*a, 3)),
        (NStepReturns(steps=50), lambda *a: slow_n_step(*a, 50)),
        (DiscountedReturns(), lambda *a: slow_n_step(*a, 50)),
    ],
)
def test_returns_match_loop(computer, slow):
    generator = torch.Generator().manual_seed(0)
    reward, value = torch.randn(2, 5, 9, generator=generator).double()
    last = torch.rand(5, 9, generator=generator) < 0.2
    terminated = last & (torch.rand(5, 9, generator=generator) < 0.5)
    cont = 0.9 * (~terminated).double()
    rows = zip(reward.tolist(), cont.tolist(), value.tolist(), last.tolist())
    expected = torch.tensor([slow(*row) for row in rows], dtype=torch.float64)
    got = computer(reward, cont, value, last=last)
    assert got.shape == (5, 8)
    assert torch.allclose(got, expected, atol=1e-6)
    none = torch.zeros_like(last)
    assert torch.allclose(computer(reward, cont, value), computer(reward, cont, value, last=none))
