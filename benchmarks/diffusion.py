"""Diffusion Policy: milliseconds per update and per action chunk, captured and eager, beside diffusers' loop.

Random demonstrations; the published networks for Push-T (--sizes low_dim image). A chunk is one plan of all
environments: 16 DDIM steps and 100 DDPM steps, with 1 and 50 environments. `diffusers` runs the same U-Net
eagerly with its scheduler, where it is installed. On a GPU, `captured` is a CUDA graph of the whole chunk.

    rl-lab bench diffusion [--sizes low_dim image] [--envs 1 50] [--samplers ddim:16 ddpm:100] [--rounds 10]
                           [--updates 20] [--device auto]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from rl_lab.buffers.batches import BatchStream
from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.build import assemble_workflow
from rl_lab.config.compose import compose_config, resolve_config
from rl_lab.orchestration.collector import ActRunner
from rl_lab.orchestration.updates import HookRunner
from rl_lab.records import ActionSpec, ActMode, ArraySpec, Spec
from rl_lab.utils.device import resolve_device

Row = dict[str, Any]
ACTION = ActionSpec("continuous", (2,), low=(0.0, 0.0), high=(512.0, 512.0))
SPECS = {
    "low_dim": Spec("keypoints", {"vector": ArraySpec((20,), "float32")}, ACTION),
    "image": Spec(
        "pixels", {"image": ArraySpec((3, 96, 96), "uint8"), "agent_pos": ArraySpec((2,), "float32")}, ACTION
    ),
}
BATCH = {"low_dim": 256, "image": 64}  # as published
# As published; the experiment has its own.
HORIZONS = ["algorithm.horizon=16", "algorithm.observation_horizon=2", "algorithm.action_horizon=8"]
WARM_UP = 5  # calls; the fourth is captured


def run(argv: list[str]) -> list[Row]:
    parser = argparse.ArgumentParser(
        prog="rl-lab bench diffusion",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--sizes", nargs="+", default=["low_dim", "image"], choices=["low_dim", "image", "small"]
    )
    parser.add_argument("--envs", nargs="+", type=int, default=[1, 50])
    parser.add_argument("--samplers", nargs="+", default=["ddim:16", "ddpm:100"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(argv)
    device = resolve_device(options.device)
    rows: list[Row] = []
    for size in options.sizes:
        spec = SPECS.get(size, SPECS["low_dim"])
        workflow = built(size, spec, device)
        buffer = demonstrations(spec, device)
        workflow.hooks()["measure"].step(buffer.read(0, buffer.total_rows))
        for capture in (False, True) if device.type == "cuda" else (False,):
            name = f"{size} update {'captured' if capture else 'eager'}"
            rows.append(row(name, time_updates(workflow, buffer, device, capture, options.updates)))
        for sampler in options.samplers:
            kind, _, steps = sampler.partition(":")
            for envs in options.envs:
                rows += chunk_rows(workflow, spec, device, size, kind, int(steps), envs, options.rounds)
    return rows


def row(name: str, milliseconds: float) -> Row:
    return {"name": name, "value": milliseconds, "unit": "ms"}


def built(size: str, spec: Spec, device: torch.device) -> Any:
    words = ["experiment=diffusion_policy_lunarlander", f"size={size}", f"experiment.device={device.type}"]
    words += [f"algorithm.batch_size={BATCH.get(size, 64)}", "algorithm.learning_rate=1.0e-4", *HORIZONS]
    config = compose_config(words)
    OmegaConf.set_struct(config, False)
    config.controllers.pop("expert")
    return assemble_workflow(resolve_config(config, spec), spec, device)


def demonstrations(spec: Spec, device: torch.device, steps: int = 1000) -> ReplayBuffer:
    """Ten episodes of random rows."""
    rng = np.random.default_rng(0)
    buffer = ReplayBuffer(spec.row_columns(), capacity=steps, num_streams=1, device=device)
    rows: dict[str, Any] = {}
    for name, array in spec.observations.items():
        shape = (1, steps, *array.shape)
        image = array.dtype == "uint8"
        rows[f"obs/{name}"] = (rng.integers(0, 256, shape) if image else rng.standard_normal(shape)).astype(
            array.dtype
        )
    flags = {flag: np.zeros((1, steps), bool) for flag in ("terminated", "truncated", "is_first")}
    flags["is_first"][:, ::100] = flags["truncated"][:, 99::100] = True
    action = rng.uniform(-1, 1, (1, steps, 2)).astype(np.float32)
    buffer.add({**rows, **flags, "action": action, "reward": np.zeros((1, steps), np.float32)})
    return buffer


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def median_ms(call: Callable[[], Any], device: torch.device, count: int) -> float:
    times = []
    for _ in range(count):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def time_updates(
    workflow: Any, buffer: ReplayBuffer, device: torch.device, capture: bool, count: int
) -> float:
    hook = workflow.hooks()["update"]
    runner = HookRunner(
        "update", hook, device=device, generator=torch.Generator(device).manual_seed(0), capture=capture
    )
    stream = BatchStream(buffer, hook.batch, torch.Generator().manual_seed(0), device=device)

    def update() -> None:
        runner.run(stream, {}, {})

    for _ in range(WARM_UP):
        update()
    return median_ms(update, device, count)


def chunk_rows(
    workflow: Any, spec: Spec, device: torch.device, size: str, kind: str, steps: int, envs: int, rounds: int
) -> list[Row]:
    object.__setattr__(workflow.settings, "sampler", kind)
    object.__setattr__(workflow.settings, "sampling_steps", steps)
    workflow.steps = workflow.schedule.sampling_steps(steps)
    rng = np.random.default_rng(0)
    obs = {
        name: rng.integers(0, 256, (envs, *array.shape), dtype=np.uint8)
        if array.dtype == "uint8"
        else rng.standard_normal((envs, *array.shape), dtype=np.float32)
        for name, array in spec.observations.items()
    }
    first = np.ones(envs, bool)  # every call plans for all
    title, rows = f"{size} {kind} {steps}, {envs} envs", []
    for capture in (False, True) if device.type == "cuda" else (False,):
        runner = ActRunner(workflow, device=device, capture=capture)
        mode = ActMode(generator=torch.Generator(device).manual_seed(0))

        def plan(runner: ActRunner = runner, mode: ActMode = mode) -> None:
            runner(obs, None, first, mode)

        for _ in range(WARM_UP if capture else 1):
            plan()
        rows.append(row(f"{title} {'captured' if capture else 'eager'}", median_ms(plan, device, rounds)))
    loop = diffusers_loop(workflow, obs, device, kind, steps)
    if loop is not None:
        loop()
        rows.append(row(f"{title} diffusers", median_ms(loop, device, rounds)))
    return rows


def diffusers_loop(
    workflow: Any, obs: dict[str, np.ndarray], device: torch.device, kind: str, steps: int
) -> Callable[[], Any] | None:
    """The loop of real-stanford/diffusion_policy's `conditional_sample`, with our networks; None without diffusers."""
    try:
        from diffusers import DDIMScheduler, DDPMScheduler
    except ModuleNotFoundError:
        return None
    options = {"num_train_timesteps": 100, "beta_schedule": "squaredcos_cap_v2", "clip_sample": True}
    scheduler = DDPMScheduler(**options) if kind == "ddpm" else DDIMScheduler(**options)
    scheduler.set_timesteps(steps)
    s = workflow.settings
    seen = {
        name: torch.from_numpy(value).to(device).repeat_interleave(s.observation_horizon, 0)
        for name, value in obs.items()
    }

    @torch.no_grad()
    def sample() -> torch.Tensor:
        features = workflow._features(seen, slow=True)
        x = torch.randn(len(features), s.horizon, workflow.spec.action.size, device=device)
        for step in scheduler.timesteps:
            at = torch.full((len(x),), int(step), device=device)
            x = scheduler.step(workflow.policy(x, at, features, slow=True), step, x).prev_sample
        return x

    return sample
