"""Environments of tensors on a GPU: what crosses to the host in a vector step, and the rows of the CPU."""

from __future__ import annotations

import pytest
import torch

from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.environments import make_env
from rl_lab.orchestration.collector import Collector
from rl_lab.records import ActMode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
N, STEPS = 1024, 20


class Stay:
    """Acts 1, without a state."""

    act_captures = False

    def initial_policy_state(self, count):
        return {}

    def act(self, obs, state, is_first, mode):
        return torch.ones(len(is_first), dtype=torch.int64, device=is_first.device), state, {}


def test_observations_stay_on_the_gpu():
    """Per vector step: one copy of five numbers per environment to the host, one of `is_first` back."""
    env = make_env("tensor/catch", N, batched=True, device="cuda", seed=1)
    collector = Collector(env, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    buffer = ReplayBuffer(
        env.spec.row_columns(), capacity=N * 64, num_streams=N, device="cuda", storage="device"
    )
    collector.reset()
    policy = Stay()

    def step():
        buffer.add(collector.step(policy, ActMode()).trajectory)

    for _ in range(3):
        step()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    down = sum("Memcpy DtoH" in name for name in names)
    up = sum("Memcpy HtoD" in name for name in names)
    assert down == STEPS and up <= STEPS
    image = buffer.read(0, STEPS).columns["obs/image"]
    assert image.is_cuda and image.float().std() > 0


def test_same_dynamics_as_on_the_cpu():
    envs = [make_env("tensor/cartpole", 64, batched=True, device=device) for device in ("cpu", "cuda")]
    for env in envs:
        env.reset()
    envs[1].simulator.variables.copy_(envs[0].simulator.variables)
    for step in range(30):
        action = torch.full((64,), step % 2)
        (left, *flags, _), (right, *same, _) = (env.step(action.to(env.device)) for env in envs)
        alive = ~(envs[0].is_first | envs[1].is_first.cpu())
        torch.testing.assert_close(left["state"][alive], right["state"].cpu()[alive], rtol=1e-5, atol=1e-6)
        if flags[1].any() or flags[2].any() or same[1].any():
            break  # new episodes have other starts
    assert step > 5
