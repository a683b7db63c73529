"""A small TD-MPC built from the shipped configs, and batches for it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from rl_lab.build import assemble_workflow
from rl_lab.config.checks import CONFIG_FOLDER
from rl_lab.config.compose import compose_config
from rl_lab.records import ActionSpec, ArraySpec, Batch, Spec
from rl_lab.workflows.tdmpc.workflow import TDMPCWorkflow
from tests.workflows.random_rows import changed_parts as changed_parts
from tests.workflows.random_rows import random_columns

CONTINUOUS = ActionSpec("continuous", (2,), low=(-1.0, -1.0), high=(1.0, 1.0))
DISCRETE = ActionSpec("discrete", (), (3,))
MULTI = ActionSpec("multi_discrete", (2,), (2, 3))
TINY = {
    "encoder_units": 8,
    "encoder_layers": 2,
    "units": 16,
    "latent": 16,
    "members": 3,
    "bins": 21,
    "bin_limit": 5.0,
}
PLAN = {"iterations": 2, "samples": 12, "policy_samples": 3, "elites": 4}


def vector_spec(action: ActionSpec = CONTINUOUS) -> Spec:
    return Spec("vector", {"vector": ArraySpec((4,), "float32")}, action)


def task_spec(tasks: int = 3) -> Spec:
    observations = {
        "vector": ArraySpec((4,), "float32"),
        "task": ArraySpec((tasks,), "float32"),
        "action_mask": ArraySpec((2,), "float32"),
    }
    return Spec("several", observations, CONTINUOUS)


def image_spec(size: int = 32) -> Spec:
    return Spec("image", {"image": ArraySpec((3, size, size), "uint8")}, CONTINUOUS)


@cache
def composed(experiment: str) -> DictConfig:
    return compose_config([f"experiment={experiment}"])


def tdmpc_config(experiment: str = "tdmpc2_dmc_state", **changes: Any) -> DictConfig:
    """A shipped experiment with tiny sizes; `changes` are dotted paths with __ for the dot."""
    config = copy.deepcopy(composed(experiment))
    bins = 0 if config.algorithm.size.bins == 0 else TINY["bins"]
    config.algorithm.size = {**TINY, "bins": bins}
    config.algorithm.plan = {**config.algorithm.plan, **PLAN}
    config.algorithm.update({"batch_size": 4, "learning_rate": 1e-3})
    config.training.precision = "float32"
    for path, value in changes.items():
        OmegaConf.update(config, path.replace("__", "."), value, merge=False, force_add=True)
    return config


def make_tdmpc(
    spec: Spec | None = None, experiment: str = "tdmpc2_dmc_state", **changes: Any
) -> TDMPCWorkflow:
    """Everything that acts or learns; no collector, buffers, environments or logger."""
    spec = spec or vector_spec()
    config = tdmpc_config(experiment, **changes)
    OmegaConf.update(config, "_dims", {"action": spec.action.size}, force_add=True)
    if spec.action.kind != "continuous":
        policy = OmegaConf.load(CONFIG_FOLDER / "controller/tdmpc_categorical_policy.yaml")
        OmegaConf.update(config, "controllers.policy", policy, merge=False)
    OmegaConf.resolve(config)
    workflow: TDMPCWorkflow = assemble_workflow(config, spec, torch.device("cpu"))
    return workflow


def make_batch(workflow: TDMPCWorkflow, *, size: int | None = None, seed: int = 0) -> Batch:
    """Random rows inside episodes, as replay would give them."""
    spec, settings = workflow.spec, workflow.settings
    size, rows = size or settings.batch_size, settings.horizon + 1
    generator = torch.Generator().manual_seed(seed)
    columns = random_columns(spec, size, rows, generator)
    if "task" in spec.observations:
        tasks = spec.observations["task"].shape[0]
        index = torch.arange(size) % tasks
        columns["obs/task"] = torch.eye(tasks)[index].unsqueeze(1).expand(-1, rows, -1).clone()
        mask = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])[index % 3]
        columns["obs/action_mask"] = mask.unsqueeze(1).expand(-1, rows, -1).clone()
    columns["reward"] = torch.randn(size, rows, generator=generator)
    none = torch.zeros(size, rows, dtype=torch.bool)
    columns |= {"terminated": none.clone(), "truncated": none.clone(), "is_first": none.clone()}
    columns["terminated"][::2, -1] = True  # termination is in the last row of an episode
    return Batch(columns)


def padded(batch: Batch, lengths: Sequence[int], *, fill: float = 0.0) -> Batch:
    """The same sequences with only their first rows real; all columns behind them are `fill`."""
    columns = {key: value.clone() for key, value in batch.columns.items()}
    mask = torch.arange(batch.reward.shape[1]) < torch.tensor(lengths)[:, None]
    for key, value in columns.items():
        if key not in ("priority", "weight"):
            value[~mask] = bool(fill) if value.dtype == torch.bool else fill
    return Batch(columns, mask=mask)


def hook_noise(workflow: TDMPCWorkflow, name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        key: (torch.rand if item.kind == "uniform" else torch.randn)(item.shape, generator=generator)
        for key, item in workflow.hooks()[name].noise.items()
    }


def run_hook(
    workflow: TDMPCWorkflow, name: str, batch: Batch | None = None, *, seed: int = 0, phase: Any = None
) -> Any:
    """One call of a hook, with scalars and noise as the loop would give them."""
    hook = workflow.hooks()[name]
    scalars = {key: torch.tensor(value) for key, value in hook.scalars(phase or {}, {}).items()}
    batch = batch if batch is not None else make_batch(workflow)
    return hook.step(batch, scalars, hook_noise(workflow, name, seed))


def parts_of(workflow: TDMPCWorkflow) -> dict[str, torch.nn.Module]:
    names = ("encoder", "dynamics", "reward_head", "critic", "policy", "termination_head", "task_embedding")
    parts = {name: getattr(workflow, name) for name in names}
    return {name: part for name, part in parts.items() if part is not None}


def weights(workflow: TDMPCWorkflow) -> dict[str, dict[str, torch.Tensor]]:
    """A copy of every part's state."""
    return {
        name: {key: value.clone() for key, value in part.state_dict().items()}
        for name, part in parts_of(workflow).items()
    }


# ---------------------------------------------------------------- all kinds of TD-MPC


SEVERAL = {
    "components__task_embedding": OmegaConf.load(CONFIG_FOLDER / "components/task_embedding/learned.yaml"),
    "algorithm__task_width": 6,
    "optimizers__model__modules": ["dynamics", "reward_head", "critic", "task_embedding"],
}
EPISODIC = {
    "algorithm__episodic": True,
    "components__termination_head": OmegaConf.load(CONFIG_FOLDER / "components/head/termination.yaml"),
    "optimizers__model__modules": ["dynamics", "reward_head", "critic", "termination_head"],
}


def pixels():
    encoder = OmegaConf.load(CONFIG_FOLDER / "components/encoder/tdmpc_pixels.yaml")
    encoder.update({"channels": 4, "kernels": [3, 3, 3], "strides": [2, 2, 2]})
    return make_tdmpc(image_spec(), components__encoder=encoder)


def first_version(**changes):
    return make_tdmpc(experiment="tdmpc_dmc", **changes)


KINDS = {
    "state": lambda: make_tdmpc(),
    "discrete": lambda: make_tdmpc(vector_spec(DISCRETE)),
    "multi_discrete": lambda: make_tdmpc(vector_spec(MULTI)),
    "pixels": pixels,
    "episodic": lambda: make_tdmpc(**EPISODIC),
    "several_tasks": lambda: make_tdmpc(task_spec(), **SEVERAL),
    "first_version": first_version,
}
