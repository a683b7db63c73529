"""Small IRIS and Δ-IRIS workflows built from the shipped configs, and batches for them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from rl_lab.build import assemble_workflow
from rl_lab.config.compose import compose_config, resolve_config
from rl_lab.records import ActionSpec, ArraySpec, Batch, Spec
from tests.workflows.random_rows import changed_parts as changed_parts

SIDE = 16
PARTS = ("tokenizer", "world_model", "actor_critic")
KINDS = ("iris", "delta_iris")
SPEC = Spec("images", {"image": ArraySpec((3, SIDE, SIDE), "uint8")}, ActionSpec("discrete", (), (3,)))


@cache
def composed(kind: str, *words: str) -> Any:
    overrides = [
        f"experiment={kind}_catch",
        "debug=tiny",
        "training.precision=float32",
        "experiment.device=cpu",
    ]
    if kind == "iris":  # four tokens of these larger images
        overrides += ["algorithm.size.levels=4", "algorithm.size.tokens=4"]
    return resolve_config(compose_config([*overrides, *words]), SPEC)


def make_workflow(kind: str, *words: str) -> Any:
    """Everything that acts or learns; no collector, buffers, environments or logger."""
    return assemble_workflow(composed(kind, *words), SPEC, torch.device("cpu"))


def make_batch(size: int, rows: int, *, seed: int = 0, pad: str = "") -> Batch:
    """Random rows; with `pad` the last sequence has padding on that side."""
    generator = torch.Generator().manual_seed(seed)
    columns = {
        "obs/image": torch.randint(0, 256, (size, rows, 3, SIDE, SIDE), generator=generator).to(torch.uint8),
        "action": torch.randint(3, (size, rows), generator=generator),
        "reward": torch.randint(-1, 2, (size, rows), generator=generator).float(),
    }
    for key in ("terminated", "truncated", "is_first"):
        columns[key] = torch.zeros(size, rows, dtype=torch.bool)
    mask = torch.ones(size, rows, dtype=torch.bool)
    if pad:
        padded = slice(rows // 2, None) if pad == "right" else slice(None, rows // 2)
        mask[-1, padded] = False
        for value in columns.values():
            value[-1, padded] = 0
    return Batch(columns, mask=mask)


def hook_batch(workflow: Any, name: str, seed: int = 0) -> Batch:
    spec = workflow.hooks()[name].batch
    return make_batch(spec.size, spec.rows, seed=seed, pad="left" if spec.pad == "left" else "right")


def hook_noise(workflow: Any, name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        key: torch.rand(item.shape, generator=generator) for key, item in workflow.hooks()[name].noise.items()
    }


def scalars(workflow: Any) -> dict[str, torch.Tensor]:
    return {"entropy": torch.tensor(workflow.settings.entropy), "learning_rate_scale": torch.tensor(1.0)}


def run_hook(workflow: Any, name: str, *, seed: int = 0, batch: Batch | None = None) -> Any:
    """One call of an update hook, with noise as the loop would give it."""
    batch = hook_batch(workflow, name, seed) if batch is None else batch
    return workflow.hooks()[name].step(batch, scalars(workflow), hook_noise(workflow, name, seed))


def weights(workflow: Any) -> dict[str, dict[str, torch.Tensor]]:
    return {
        name: {key: value.clone() for key, value in getattr(workflow, name).state_dict().items()}
        for name in PARTS
    }
