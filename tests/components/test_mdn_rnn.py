import math

import pytest
import torch

from rl_lab.components.dynamics.mdn_rnn import LSTM, MDNRNN, Mixture
from rl_lab.records import ActionSpec, ArraySpec, Spec

CONTINUOUS = ActionSpec("continuous", (3,), low=(-1.0, 0.0, 0.0), high=(1.0, 1.0, 1.0))
DISCRETE = ActionSpec("discrete", (), (4,))


def make(action: ActionSpec = CONTINUOUS, **options) -> MDNRNN:
    torch.manual_seed(0)
    return MDNRNN(spec=Spec("x", {"image": ArraySpec((3, 64, 64), "uint8")}, action), **options)


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_mdn_rnn_parameter_count():
    assert count(make(reward_head=False, done_head=False)) == 422_368
    assert count(make()) == 422_368 + 2 * 257


def test_mixture_log_prob_matches_loop():
    """Float64 loop over dimensions and components."""
    generator = torch.Generator().manual_seed(0)
    raw = 2.0 * torch.randn(2, 3, 4 * 3 * 5, generator=generator)
    value = 2.0 * torch.randn(2, 3, 4, generator=generator)
    fast = Mixture.from_raw(raw, 5).log_prob(value)
    assert fast.shape == (2, 3, 4)
    for b in range(2):
        for t in range(3):
            for d in range(4):
                numbers = raw[b, t].double().view(4, 3, 5)[d]
                logits, means, log_stds = (row.tolist() for row in numbers)
                total = sum(math.exp(logit) for logit in logits)
                density = 0.0
                for logit, mean, log_std in zip(logits, means, log_stds):
                    std = math.exp(log_std)
                    scaled = (float(value[b, t, d]) - mean) / std
                    density += (
                        math.exp(logit) / total * math.exp(-0.5 * scaled**2) / (std * math.sqrt(2 * math.pi))
                    )
                assert fast[b, t, d].item() == pytest.approx(math.log(density), rel=1e-5, abs=1e-5)


def test_log_prob_is_finite_far_away():
    far = Mixture.from_raw(torch.zeros(1, 3 * 5), 5).log_prob(torch.full((1, 1), 1e4))
    assert torch.isfinite(far).all()


def test_mixture_sampling():
    raw = torch.tensor([math.log(0.25), math.log(0.75), -2.0, 3.0, math.log(0.5), math.log(0.1)])
    mixture = Mixture.from_raw(raw.expand(40_000, 6), 2)
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(40_000, 1, generator=generator)
    normal = torch.randn(40_000, 1, generator=generator)
    sample = mixture.sample(uniform, normal)
    low = sample[sample < 1.0]
    assert len(low) / 40_000 == pytest.approx(0.25, abs=0.01)
    assert low.mean().item() == pytest.approx(-2.0, abs=0.02) and low.std().item() == pytest.approx(
        0.5, abs=0.02
    )
    # Low temperature: mean of the likelier component. High: equal weights, std grows with the square root.
    cold = mixture.sample(uniform, normal, 1e-4)
    assert torch.allclose(cold, torch.tensor(3.0), atol=0.01)
    hot = mixture.sample(uniform, normal, 4.0)
    share = 0.25**0.25 / (0.25**0.25 + 0.75**0.25)
    assert (hot < 1.0).float().mean().item() == pytest.approx(share, abs=0.02)
    assert hot[hot > 1.5].std().item() == pytest.approx(0.2, abs=0.02)


def test_sampled_component_stays_in_range():
    mixture = Mixture.from_raw(torch.zeros(1, 9), 3)
    sample = mixture.sample(torch.ones(1, 1), torch.zeros(1, 1))
    assert sample.item() == 0.0


@pytest.mark.parametrize("action", [CONTINUOUS, DISCRETE], ids=lambda a: a.kind)
def test_fused_sequence_matches_steps(action):
    model = make(action, latent=6, hidden=16, mixtures=2)
    z = torch.randn(3, 7, 6)
    actions = torch.rand(3, 7, 3) * 2 - 1 if action is CONTINUOUS else torch.randint(4, (3, 7))
    state = {key: torch.randn(3, 16) for key in ("h", "c")}
    fused, last = model.observe_sequence(state, z, actions)
    slow, also_last = model.observe_sequence(state, z, actions, torch.zeros(3, 7, dtype=torch.bool))
    torch.testing.assert_close(fused, slow)
    for key in last:
        torch.testing.assert_close(last[key], also_last[key])
    grads = []
    for outputs in (fused, slow):
        model.zero_grad()
        outputs.square().sum().backward()
        grads.append([p.grad.clone() for p in model.lstm.parameters()])
    torch.testing.assert_close(*grads)


def test_is_first_resets_state():
    model = make(latent=6, hidden=16)
    z, actions = torch.randn(2, 5, 6), torch.rand(2, 5, 3)
    is_first = torch.zeros(2, 5, dtype=torch.bool)
    is_first[1, 3] = True
    outputs, _ = model.observe_sequence(model.reset_state(2), z, actions, is_first)
    restarted, _ = model.observe_sequence(model.reset_state(1), z[1:, 3:], actions[1:, 3:])
    torch.testing.assert_close(outputs[1:, 3:], restarted)
    through, _ = model.observe_sequence(model.reset_state(2), z, actions)
    torch.testing.assert_close(outputs[0], through[0])


def test_lstm_biases():
    lstm = LSTM(3, 4)
    assert {name for name, _ in lstm.named_parameters()} == {"weight_ih_l0", "weight_hh_l0", "bias_ih_l0"}
    assert lstm.bias_ih_l0.tolist() == [0.0] * 4 + [1.0] * 4 + [0.0] * 8
    copy = LSTM(3, 4)
    copy.load_state_dict(lstm.state_dict())
    x = torch.randn(2, 5, 3)
    torch.testing.assert_close(
        copy.sequence(x, copy.initial_state(2)), lstm.sequence(x, lstm.initial_state(2))
    )


def test_mdn_rnn_losses():
    model = make(latent=4, hidden=8, mixtures=2)
    h, z = torch.randn(2, 3, 8), torch.randn(2, 3, 4)
    prediction = model.predict(h)
    reward, terminated = torch.randn(2, 3), torch.tensor([[True, False, False], [False, False, True]])
    losses = model.losses(prediction, z, reward, terminated, done_weight=10.0)
    assert {key: value.shape for key, value in losses.items()} == dict.fromkeys(
        ("latent", "reward", "done"), (2, 3)
    )
    torch.testing.assert_close(losses["latent"], -prediction.latent.log_prob(z).mean(-1))
    plain = model.losses(prediction, z, reward, terminated, done_weight=1.0)["done"]
    torch.testing.assert_close(losses["done"] / plain, torch.where(terminated, 10.0, 1.0))
    bare = make(latent=4, hidden=8, reward_head=False, done_head=False)
    assert set(bare.losses(bare.predict(h), z, reward, terminated, done_weight=1.0)) == {"latent"}


def test_mdn_rnn_learns_rule_with_memory():
    """0, 0, 1, 1, 0, 0, …: the next value depends on more than the last one."""
    torch.manual_seed(0)
    model = make(latent=1, hidden=16, mixtures=2, reward_head=False, done_head=False)
    pattern = torch.tensor([0.0, 0.0, 1.0, 1.0] * 4)
    truth = torch.stack([pattern.roll(shift) for shift in range(4)]).unsqueeze(-1)
    actions = torch.zeros(4, 16, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for _ in range(120):
        z = truth + 0.1 * torch.randn_like(truth)
        h, _ = model.observe_sequence(model.reset_state(4), z[:, :-1], actions[:, :-1])
        loss = -model.predict(h).latent.log_prob(z[:, 1:])[:, 3:].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    h, _ = model.observe_sequence(model.reset_state(4), truth[:, :-1], actions[:, :-1])
    guess = model.predict(h).latent.sample(torch.full((4, 15, 1), 0.5), torch.zeros(4, 15, 1), 1e-3)
    assert (guess[:, 3:] - truth[:, 4:]).abs().max() < 0.3
    assert loss < -0.6  # the optimum with noise 0.1 is -0.88; without memory it is -0.19
