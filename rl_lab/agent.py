"""A trained agent, loaded to act: no environment, buffer or optimizer is built."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.build import build_parts, build_workflow
from rl_lab.errors import CheckpointError, LabError
from rl_lab.launch.runtime import resolve_device
from rl_lab.records import OBS_PREFIX, ActMode, Spec
from rl_lab.run_folder import RunFolder, find_run, output_root
from rl_lab.utils.checkpoint import CheckpointManager, load_matching
from rl_lab.workflows.context import WorkflowContext


class Agent:
    """Acts in any number of environments; its memory follows `is_first`."""

    def __init__(self, workflow: Any, spec: Spec, device: torch.device, config: Any, step: int) -> None:
        self.workflow = workflow
        self.spec = spec
        self.device = device
        self.config = config
        self.step = step  # agent decisions that it was trained for
        self._state: dict[str, torch.Tensor] | None = None
        self._generator = torch.Generator(device).manual_seed(0)

    def reset(self, seed: int = 0) -> None:
        """Forget the episode and start the sampling noise anew."""
        self._state = None
        self._generator.manual_seed(seed)

    @torch.no_grad()
    def act(self, obs: Any, is_first: Any = None, *, sample: bool = False) -> Any:
        """The action for one observation, or (N, …) actions for (N, …) observations.

        obs: an array when there is one observation key, else a dict. Memory is kept between calls; `reset()`,
        or `is_first` (bool or (N,)), begins a new episode.
        """
        arrays = self._as_dict(obs)
        single = self._is_single(arrays)
        if single:
            arrays = {key: value[None] for key, value in arrays.items()}
        n = len(next(iter(arrays.values())))
        fresh = self._state is None
        if self._state is None:
            self._state = self.workflow.initial_policy_state(n)
        first = (
            np.full(n, fresh) if is_first is None else np.broadcast_to(np.asarray(is_first, dtype=bool), (n,))
        )
        tensors = {key: torch.as_tensor(value).to(self.device) for key, value in arrays.items()}
        flags = torch.as_tensor(np.array(first)).to(self.device)
        mode = ActMode(sample=sample, generator=self._generator)
        action, self._state, _ = self.workflow.act(tensors, self._state, flags, mode)
        actions = action.cpu().numpy()
        return actions[0] if single else actions

    def _as_dict(self, obs: Any) -> dict[str, np.ndarray]:
        if not isinstance(obs, Mapping):
            if len(self.spec.observations) != 1:
                raise LabError(
                    f"this agent needs a dict of observations: {', '.join(self.spec.observations)}"
                )
            obs = {next(iter(self.spec.observations)): obs}
        missing = [key for key in self.spec.observations if key not in obs]
        if missing:
            raise LabError(
                f"the observation lacks {missing}; the agent was trained with {list(self.spec.observations)}"
            )
        return {key: np.asarray(obs[key], dtype=spec.dtype) for key, spec in self.spec.observations.items()}

    def _is_single(self, arrays: Mapping[str, np.ndarray]) -> bool:
        for key, value in arrays.items():
            shape = self.spec.observations[key].shape
            if value.shape == shape:
                return True
            if value.shape[1:] != shape:
                raise LabError(
                    f"'{OBS_PREFIX}{key}' has shape {value.shape}; the agent was trained with {shape} "
                    f"(or (N, {', '.join(map(str, shape))}) for N environments)"
                )
        return False


def load_agent(run: Path | str | None = None, *, checkpoint: str = "last", device: str = "auto") -> Agent:
    """The agent of a run: its folder, or a checkpoint file in it; None takes the newest run in ./outputs.

    checkpoint: "last", "best", or a file name under checkpoints/.
    """
    folder = find_run(run, output_root(None))
    path = Path(run) if run is not None and str(run).endswith(".pt") else _checkpoint_path(folder, checkpoint)
    return agent_from(folder, path, device)


def agent_from(folder: RunFolder, checkpoint: Path, device: str = "auto") -> Agent:
    config = folder.load_config()
    spec = folder.load_spec()
    where = resolve_device(device)
    loaded = CheckpointManager.load_file(checkpoint, weights=True)
    components, controllers = build_parts(config, spec, where)
    load_matching(
        {name: part for name, part in components.items() if isinstance(part, torch.nn.Module)},
        loaded.state["components"],
        prefix="components",
    )
    load_matching(dict(controllers.modules()), loaded.state["controllers"], prefix="controllers")
    workflow = build_workflow(config)
    context = WorkflowContext(
        config=config, device=where, spec=spec, components=components, controller_manager=controllers
    )
    workflow.attach(context)
    workflow.initialize(context)
    workflow.set_state(loaded.state["workflow_custom"])
    components.eval()
    controllers.eval()
    return Agent(workflow, spec, where, config, int(loaded.state["global_step"]))


def _checkpoint_path(folder: RunFolder, name: str) -> Path:
    if name == "last":
        return folder.checkpoints
    path = folder.checkpoints / (name if name.endswith(".pt") else f"{name}.pt")
    if not path.is_file():
        known = sorted(file.stem for file in folder.checkpoints.glob("*.pt"))
        raise CheckpointError(
            f"no checkpoint '{name}' in {folder.path}; there are {', '.join(known) or 'none'}"
        )
    return path
