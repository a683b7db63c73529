"""A small World Models workflow built from the shipped configs, and batches for it."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from rl_lab.build import assemble_workflow
from rl_lab.config.checks import CONFIG_FOLDER
from rl_lab.config.compose import register_resolvers
from rl_lab.records import ActionSpec, ArraySpec, Batch, Spec
from rl_lab.workflows.og_wm.workflow import OriginalWorldModelsWorkflow
from tests.workflows.random_rows import changed_parts as changed_parts
from tests.workflows.random_rows import random_columns

CAR = ActionSpec("continuous", (3,), low=(-1.0, 0.0, 0.0), high=(1.0, 1.0, 1.0))
DISCRETE = ActionSpec("discrete", (), (2,))
MULTI = ActionSpec("multi_discrete", (2,), (2, 3))
PARTS = ("vae", "mdn_rnn", "controller")
PHASE = {"name": "evolve", "iteration": 0, "set": {}, "progress": 0.0}


def image_spec(action: ActionSpec = CAR, channels: int = 1) -> Spec:
    return Spec("images", {"image": ArraySpec((channels, 64, 64), "uint8")}, action)


def og_wm_config(**changes: Any) -> DictConfig:
    """The shipped parts with tiny sizes; `changes` are dotted paths with __ for the dot."""
    register_resolvers()

    config = OmegaConf.load(CONFIG_FOLDER / "algorithm" / "og_wm.yaml")
    assert isinstance(config, DictConfig)
    config.experiment, config.training = {"seed": 0}, {"precision": "float32"}
    config.algorithm.size = {"latent": 4, "depth": 2, "hidden": 8, "mixtures": 2}
    config.algorithm.evolution.update({"population": 6, "episodes": 3})
    config.algorithm.update(
        {"batch_size": 3, "batch_length": 5, "imagination_horizon": 7, "dream_context": 2}
    )
    for path, value in changes.items():
        OmegaConf.update(config, path.replace("__", "."), value, merge=False, force_add=True)
    OmegaConf.resolve(config)
    return config


def make_workflow(spec: Spec | None = None, **changes: Any) -> OriginalWorldModelsWorkflow:
    """Everything that acts or learns; no collector, buffers, environments or logger."""
    spec = spec or image_spec()
    config = og_wm_config(**changes)
    workflow: OriginalWorldModelsWorkflow = assemble_workflow(config, spec, torch.device("cpu"))
    return workflow


def make_batch(workflow: Any, size: int, rows: int, *, seed: int = 0, padded: bool = True) -> Batch:
    """Random rows, as replay would give them; the last sequence is padded behind its third row."""
    generator = torch.Generator().manual_seed(seed)
    columns = random_columns(workflow.spec, size, rows, generator)
    for key in ("mu", "logvar"):
        columns[key] = torch.randn(size, rows, workflow.vae.latent, generator=generator)
    columns["reward"] = torch.randn(size, rows, generator=generator)
    for key in ("terminated", "truncated", "is_first"):
        columns[key] = torch.zeros(size, rows, dtype=torch.bool)
    mask = torch.ones(size, rows, dtype=torch.bool)
    if padded:
        mask[-1, 3:] = False
        for value in columns.values():
            value[-1, 3:] = 0
    return Batch(columns, mask=mask)


def run_hook(workflow: Any, name: str, batch: Batch, *, seed: int = 0) -> Any:
    """One call of an update hook, with noise as the loop would give it."""
    hook = workflow.hooks()[name]
    generator = torch.Generator().manual_seed(seed)
    noise = {key: torch.randn(item.shape, generator=generator) for key, item in hook.noise.items()}
    return hook.step(batch, {}, noise)


def vae_batch(workflow: Any, seed: int = 0) -> Batch:
    batch = make_batch(workflow, workflow.settings.batch_size, 1, seed=seed, padded=False)
    return Batch({key: value for key, value in batch.columns.items() if key.startswith("obs/")})


def mdn_batch(workflow: Any, seed: int = 0) -> Batch:
    batch = make_batch(workflow, workflow.settings.batch_size, workflow.settings.batch_length + 1, seed=seed)
    return Batch({k: v for k, v in batch.columns.items() if not k.startswith("obs/")}, mask=batch.mask)


def weights(workflow: Any) -> dict[str, dict[str, torch.Tensor]]:
    return {
        name: {key: value.clone() for key, value in getattr(workflow, name).state_dict().items()}
        for name in PARTS
    }
