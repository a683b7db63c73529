"""A small Dreamer built from the shipped configs, and batches for it."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from rl_lab.build import assemble_workflow
from rl_lab.config.checks import CONFIG_FOLDER
from rl_lab.config.compose import register_resolvers
from rl_lab.records import ActionSpec, ArraySpec, Batch, Spec
from rl_lab.workflows.dreamer.workflow import DreamerWorkflow
from tests.workflows.random_rows import changed_parts as changed_parts
from tests.workflows.random_rows import random_columns

DISCRETE = ActionSpec("discrete", (), (3,))
MULTI = ActionSpec("multi_discrete", (2,), (2, 3))
CONTINUOUS = ActionSpec("continuous", (2,), low=(-1.0, -1.0), high=(1.0, 1.0))
TINY = {
    "deter": 16,
    "hidden": 8,
    "stoch": 3,
    "classes": 4,
    "blocks": 2,
    "depth": 2,
    "units": 8,
    "bins": 41,
    "bin_limit": 20.0,
}
# How the parts of dreamer_dmc_proprio_settings_2023 differ
EARLY = {
    "algorithm__size__blocks": 1,
    "components__rssm__action_layers": 0,
    "components__reward_head__space": "symlog",
    "controllers__critic__space": "symlog",
}
PARTS = ("encoder", "rssm", "decoder", "reward_head", "continue_head", "actor", "critic")


def vector_spec(action: ActionSpec = DISCRETE) -> Spec:
    return Spec("vector", {"vector": ArraySpec((4,), "float32")}, action)


def image_spec(size: int = 16, action: ActionSpec = DISCRETE) -> Spec:
    return Spec("image", {"image": ArraySpec((3, size, size), "uint8")}, action)


def dreamer_config(**changes: Any) -> DictConfig:
    """The shipped parts with tiny sizes; `changes` are dotted paths with __ for the dot."""
    register_resolvers()

    config = OmegaConf.load(CONFIG_FOLDER / "algorithm" / "dreamer.yaml")
    assert isinstance(config, DictConfig)
    config.experiment, config.training = {"seed": 0}, {"precision": "float32"}
    config.algorithm.size = dict(TINY)
    config.algorithm.update(
        {"batch_size": 2, "batch_length": 5, "imagination_horizon": 3, "learning_rate": 1e-2}
    )
    config.optimizers.model.warmup = 0
    for path, value in changes.items():
        OmegaConf.update(config, path.replace("__", "."), value, merge=False, force_add=True)
    OmegaConf.resolve(config)
    return config


def make_dreamer(spec: Spec | None = None, **changes: Any) -> DreamerWorkflow:
    """Everything that acts or learns; no collector, buffers, environments or logger."""
    spec = spec or vector_spec()
    config = dreamer_config(**changes)
    workflow: DreamerWorkflow = assemble_workflow(config, spec, torch.device("cpu"))
    return workflow


def make_batch(
    workflow: DreamerWorkflow, *, size: int | None = None, rows: int | None = None, seed: int = 0
) -> Batch:
    """Random rows with a few episode ends, as replay would give them."""
    spec, settings = workflow.spec, workflow.settings
    size = size or settings.batch_size
    rows = rows or settings.batch_length + settings.replay_context
    generator = torch.Generator().manual_seed(seed)
    columns = random_columns(spec, size, rows, generator)
    columns["reward"] = torch.randn(size, rows, generator=generator)
    for flag in ("terminated", "truncated", "is_first"):
        columns[flag] = torch.rand(size, rows, generator=generator) < 0.1
    if settings.replay_context:
        rssm = workflow.rssm
        columns["deter"] = torch.randn(size, rows, rssm.deter, generator=generator).to(torch.bfloat16)
        columns["stoch"] = torch.randint(rssm.classes, (size, rows, rssm.stoch), generator=generator).to(
            torch.uint8
        )
    return Batch(columns)


def draw_noise(workflow: DreamerWorkflow, hook: str, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """What the loop would draw for one call of a hook."""
    generator = torch.Generator().manual_seed(seed)
    return {
        key: (torch.rand if item.kind == "uniform" else torch.randn)(item.shape, generator=generator)
        for key, item in workflow.hooks()[hook].noise.items()
    }


def run_hook(
    workflow: DreamerWorkflow, name: str, batch: Batch | None = None, *, seed: int = 0, phase: Any = None
) -> Any:
    """One call of a hook, with scalars and noise as the loop would give them."""
    hook = workflow.hooks()[name]
    noise = draw_noise(workflow, name, seed=seed)
    scalars = {key: torch.tensor(value) for key, value in hook.scalars(phase or {}, {}).items()}
    return hook.step(batch if batch is not None else make_batch(workflow), scalars, noise)


def weights(workflow: DreamerWorkflow) -> dict[str, dict[str, torch.Tensor]]:
    """A copy of every part's state."""
    return {
        name: {key: value.clone() for key, value in getattr(workflow, name).state_dict().items()}
        for name in PARTS
    }
