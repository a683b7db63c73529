"""Demonstrations with two answers to one question, small imitation workflows built from the shipped configs, updates."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.build import assemble_workflow
from rl_lab.config.compose import compose_config, resolve_config
from rl_lab.records import ActionSpec, ArraySpec, Spec, TransformHook

ACTION = ActionSpec("continuous", (2,), low=(-1.0, -1.0), high=(1.0, 1.0))
VECTOR = Spec("toy", {"vector": ArraySpec((3,), "float32")}, ACTION)
PIXELS = Spec(
    "toy", {"image": ArraySpec((3, 64, 64), "uint8"), "agent_pos": ArraySpec((2,), "float32")}, ACTION
)
TINY = {
    "diffusion_policy": {
        "size": {
            "widths": [16, 32],
            "step_width": 16,
            "observation_units": [],
            "image_features": 8,
            "keypoints": 4,
            "encoder_width": 16,
        },
        "sampling_steps": 10,
        "sampler": "ddim",
        "horizon": 8,
        "observation_horizon": 2,
        "action_horizon": 4,
    },
    "behaviour_cloning": {
        "size": {"units": [32, 32], "image_features": 8, "keypoints": 4, "encoder_width": 16},
    },
}


def demonstrations(
    spec: Spec = VECTOR, episodes: int = 20, steps: int = 12, device: str = "cpu"
) -> ReplayBuffer:
    """Each episode repeats one action: (0.5, 0.25) or (-0.5, 0.25), whatever is observed."""
    rng = np.random.default_rng(0)
    capacity = episodes * (steps + 1)
    buffer = ReplayBuffer(spec.row_columns(), capacity=capacity, num_streams=1, device=torch.device(device))
    for number in range(episodes):
        rows: dict[str, Any] = {}
        for name, array in spec.observations.items():
            shape = (1, steps + 1, *array.shape)
            image = array.dtype == "uint8"
            rows[f"obs/{name}"] = (
                rng.integers(0, 255, shape).astype(np.uint8)
                if image
                else rng.uniform(-1, 1, shape).astype(np.float32)
            )
        action = np.zeros((1, steps + 1, 2), np.float32)
        action[:, :-1] = ((-1) ** number * 0.5, 0.25)
        flags = {flag: np.zeros((1, steps + 1), bool) for flag in ("terminated", "truncated", "is_first")}
        flags["is_first"][:, 0] = flags["truncated"][:, -1] = True
        buffer.add({**rows, **flags, "action": action, "reward": np.zeros((1, steps + 1), np.float32)})
    return buffer


def built(
    algorithm: str,
    spec: Spec = VECTOR,
    *words: str,
    updates: int = 300,
    seed: int = 0,
    device: str = "cpu",
    **changes: Any,
) -> Any:
    """A small workflow; `changes` are keys of `algorithm`."""
    config = compose_config([f"experiment={algorithm}_lunarlander", f"experiment.seed={seed}", *words])
    small = {"batch_size": 32, "updates": updates, "warmup_updates": 10, "learning_rate": 3e-3}
    OmegaConf.set_struct(config, False)
    config.algorithm = OmegaConf.merge(config.algorithm, small, TINY[algorithm], changes)
    config.controllers.pop("expert")
    return assemble_workflow(resolve_config(config, spec), spec, torch.device(device))


def measured(workflow: Any, buffer: ReplayBuffer) -> Any:
    hook = workflow.hooks()["measure"]
    assert isinstance(hook, TransformHook)
    assert hook.step(buffer.read(0, buffer.total_rows)) == {}
    workflow.normalizer.measure(torch.tensor([[-1.0, -1.0], [1.0, 1.0]], device=workflow.device))
    return workflow


def trained(workflow: Any, buffer: ReplayBuffer, updates: int, seed: int = 0) -> list[float]:
    """Run the hook `update`; returns the loss of every update."""
    hook, losses = workflow.hooks()["update"], []
    generator = torch.Generator().manual_seed(seed)
    for _ in range(updates):
        batch = buffer.sample(hook.batch, generator=generator)
        scalars = {name: torch.tensor(value) for name, value in hook.scalars({}, {}).items()}
        noise = {
            name: torch.randn(spec.shape, generator=generator)
            if spec.kind == "normal"
            else torch.rand(spec.shape, generator=generator)
            for name, spec in hook.noise.items()
        }
        losses.append(float(hook.step(batch, scalars, noise).metrics["loss"]))
    return losses


def observations(spec: Spec, count: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randint(255, (count, *array.shape), generator=generator, dtype=torch.uint8)
        if array.dtype == "uint8"
        else torch.rand(count, *array.shape, generator=generator) * 2 - 1
        for name, array in spec.observations.items()
    }
