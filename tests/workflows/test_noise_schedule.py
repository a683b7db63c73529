"""The noise schedule against numbers computed by hand, and (marked `extras`) against diffusers."""

from __future__ import annotations

import math

import pytest
import torch

from rl_lab.errors import ConfigError
from rl_lab.workflows.diffusion_policy.schedule import NoiseSchedule


def test_cosine_schedule_by_hand():
    """Four steps: ᾱ(i) = f((i + 1) / 4) / f(0) with f(t) = cos²(π/2 · (t + 0.008) / 1.008), and 1 - β ≥ 0.001."""
    schedule = NoiseSchedule(4)

    def f(t: float) -> float:
        return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2

    expected = [f(0.25) / f(0), f(0.5) / f(0), f(0.75) / f(0), f(0.75) / f(0) * 0.001]
    torch.testing.assert_close(schedule.signal, torch.tensor(expected))
    assert schedule.values[0] == pytest.approx(0.847013, abs=1e-5)


def test_noise_keeps_the_variance():
    schedule = NoiseSchedule(100)
    sample, noise = torch.full((2, 3), 2.0), torch.full((2, 3), -1.0)
    noisy = schedule.add_noise(sample, noise, torch.tensor([0, 99]))
    for row, step in enumerate((0, 99)):
        signal = schedule.values[step]
        expected = 2.0 * math.sqrt(signal) - math.sqrt(1.0 - signal)
        torch.testing.assert_close(noisy[row], torch.full((3,), expected))


def test_ddim_step_by_hand():
    """ᾱ = 0.64 -> 0.81, x = 0.5, ε = 0.25: x₀ = (0.5 - 0.6 · 0.25) / 0.8 = 0.4375; 0.9 x₀ + √0.19 ε."""
    schedule = NoiseSchedule(2)
    schedule.values = [0.81, 0.64]
    x, predicted = torch.tensor([0.5, 3.0]), torch.tensor([0.25, 0.25])
    out = schedule.denoise("ddim", x, predicted, 1, 2, None)
    root = math.sqrt(0.19) * 0.25
    torch.testing.assert_close(out, torch.tensor([0.9 * 0.4375 + root, 0.9 + root]))  # the second is clipped
    torch.testing.assert_close(schedule.denoise("ddim", x, predicted, 0, 2, None)[1], torch.tensor(1.0))


def test_ddpm_step_by_hand():
    """Posterior of the clipped x₀: mean and variance of Ho et al. 2020, equations 6 and 7."""
    schedule = NoiseSchedule(2)
    schedule.values = [0.81, 0.64]
    x, predicted, noise = torch.tensor([0.5]), torch.tensor([0.25]), torch.tensor([-2.0])
    alpha = 0.64 / 0.81
    beta = 1.0 - alpha
    mean = math.sqrt(0.81) * beta / 0.36 * 0.4375 + math.sqrt(alpha) * 0.19 / 0.36 * 0.5
    out = schedule.denoise("ddpm", x, predicted, 1, 2, noise)
    torch.testing.assert_close(out, torch.tensor([mean - 2.0 * math.sqrt(0.19 / 0.36 * beta)]))
    # The last step has no noise, and its mean is x₀ itself.
    last = schedule.denoise("ddpm", x, predicted, 0, 2, noise)
    torch.testing.assert_close(last, (x - math.sqrt(0.19) * predicted) / 0.9)


def test_sampling_steps():
    schedule = NoiseSchedule(100)
    assert schedule.sampling_steps(100) == list(range(99, -1, -1))
    assert schedule.sampling_steps(16) == [6 * k for k in range(15, -1, -1)]
    with pytest.raises(ConfigError, match="sampling_steps is 101"):
        schedule.sampling_steps(101)


@pytest.mark.parametrize(("sampler", "count"), [("ddpm", 50), ("ddim", 25)])
def test_sampling_with_the_true_noise_recovers_the_sample(sampler: str, count: int):
    """A denoiser that knows x₀ = 0.3 leads there from any start."""
    schedule = NoiseSchedule(50)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 2, generator=generator)
    for step in schedule.sampling_steps(count):
        signal = schedule.values[step]
        truth = (x - math.sqrt(signal) * 0.3) / math.sqrt(1.0 - signal)
        x = schedule.denoise(sampler, x, truth, step, count, torch.randn(x.shape, generator=generator))
    torch.testing.assert_close(x, torch.full((4, 2), 0.3), atol=1e-4, rtol=0)


@pytest.mark.extras
@pytest.mark.parametrize("count", [100, 16, 8])
@pytest.mark.parametrize("sampler", ["ddpm", "ddim"])
def test_equal_to_diffusers(sampler: str, count: int):
    """The options of real-stanford/diffusion_policy @ 5ba07ac; the noise is given to both."""
    diffusers = pytest.importorskip("diffusers")
    options = {"num_train_timesteps": 100, "beta_schedule": "squaredcos_cap_v2", "clip_sample": True}
    if sampler == "ddpm":
        theirs = diffusers.DDPMScheduler(**options, variance_type="fixed_small")
    else:
        theirs = diffusers.DDIMScheduler(**options, set_alpha_to_one=True, steps_offset=0)
    ours = NoiseSchedule(100)
    torch.testing.assert_close(ours.signal, theirs.alphas_cumprod, atol=1e-6, rtol=1e-5)
    theirs.set_timesteps(count)
    assert ours.sampling_steps(count) == theirs.timesteps.tolist()

    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(3, 4, 2, generator=generator)
    sample = torch.rand(3, 4, 2, generator=generator) * 2 - 1
    step = torch.tensor([0, 40, 99])
    torch.testing.assert_close(
        ours.add_noise(sample, noise, step), theirs.add_noise(sample, noise, step), atol=1e-5, rtol=1e-5
    )
    x = y = noise
    for number, at in enumerate(ours.sampling_steps(count)):
        predicted = torch.tanh(x + number)  # any function of the sample
        extra = torch.Generator().manual_seed(number)
        drawn = torch.randn(x.shape, generator=extra)
        extra.manual_seed(number)
        arguments = {} if sampler == "ddim" else {"generator": extra}
        y = theirs.step(torch.tanh(y + number), at, y, **arguments).prev_sample
        x = ours.denoise(sampler, x, predicted, at, count, drawn)
        torch.testing.assert_close(x, y, atol=2e-5, rtol=1e-4)
