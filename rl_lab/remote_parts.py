"""The parts of a run that `launch=ray` puts on a cluster: collectors, and environments of evaluation and populations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from rl_lab.config.compose import select, to_plain
from rl_lab.environments.make import env_config_options, make_env
from rl_lab.errors import ConfigError
from rl_lab.orchestration.collector import Collector
from rl_lab.orchestration.remote_collector import Chunk, Order, RemoteCollector, RemoteEnvironments, stacked
from rl_lab.records import Spec
from rl_lab.utils.checkpoint.matching import load_matching
from rl_lab.utils.seeding import derive_seed
from rl_lab.workflows.base import WorldModelWorkflow


def connect(config: DictConfig, say: Callable[[str], None]) -> Any:
    """Return the cluster of the run, or None without one."""
    if select(config, "launch.name") != "ray":
        return None
    from rl_lab.launch.ray_cluster import RayCluster

    launch = to_plain(config.launch)
    environments = int(config.environment.num_envs)
    if launch["collectors"] > environments:
        raise ConfigError(
            f"launch.collectors={launch['collectors']}, but there are environment.num_envs={environments} to share"
        )
    if config.environment.get("normalize_observations"):
        raise ConfigError(
            "environment.normalize_observations is true: its statistics are kept beside the environments, which "
            "launch=ray puts on other machines; set it to false or use launch=single"
        )
    return RayCluster(launch["address"], cpus=float(launch["cpus"]), say=say)


def environment_options(config: DictConfig, cluster: Any, use: str) -> dict[str, Any]:
    """Return the make_env options for environments of evaluation or population on the cluster, or {} without one."""
    launch = to_plain(config.launch) if "launch" in config else {}
    if cluster is None or launch[use] != "cluster":
        return {}
    return {"remote": cluster.start, "workers": int(launch["collectors"])}


def remote_collector(
    config: DictConfig,
    spec: Spec,
    cluster: Any,
    *,
    parts: Mapping[str, Mapping[str, Any]],  # components and controllers
    workflow: Any,
    updates: Callable[[], int],
    device: torch.device,
    say: Callable[[str], None],
    stopwatch: Any = None,
) -> RemoteCollector:
    """Create the collector whose environments are on the cluster."""
    if type(workflow).collect_step is not WorldModelWorkflow.collect_step:
        raise ConfigError(
            f"launch=ray: {type(workflow).__name__} steps the environments itself, in its collect_step, so collectors "
            "elsewhere cannot; use launch=single"
        )
    launch = to_plain(config.launch)
    plain = to_plain(config)

    def start(number: int, envs: np.ndarray, incarnation: int) -> Any:
        options = {"config": plain, "spec": spec.to_dict(), "number": number, "incarnation": incarnation}
        return cluster.start(f"{__name__}:CollectorWorker", {**options, "num_envs": len(envs)})

    def publish() -> Any:
        weights = {
            group: {
                name: {key: value.detach().cpu().clone() for key, value in part.state_dict().items()}
                for name, part in members.items()
                if isinstance(part, nn.Module)
            }
            for group, members in parts.items()
        }
        return cluster.put({**weights, "workflow": workflow.get_state()})

    return RemoteCollector(
        RemoteEnvironments(int(config.environment.num_envs), spec),
        int(launch["collectors"]),
        start=start,
        publish=publish,
        updates=updates,
        device=device,
        chunk=int(launch["chunk"]),
        max_staleness=None if launch["max_staleness"] is None else int(launch["max_staleness"]),
        timeout=float(launch["timeout"]),
        restarts=int(launch["restarts"]),
        say=say,
        stopwatch=stopwatch,
    )


class CollectorWorker:
    """In a process of the cluster: environments, and a copy of the policy with weights by version."""

    def __init__(
        self, config: dict[str, Any], spec: dict[str, Any], number: int, incarnation: int, num_envs: int
    ) -> None:
        from rl_lab.build import assemble_workflow
        from rl_lab.config.compose import register_resolvers

        register_resolvers()
        node = OmegaConf.create(config)
        torch.set_num_threads(int(node.training.threads))
        seed = int(node.experiment.seed)
        self.workflow = assemble_workflow(node, Spec.from_dict(spec), torch.device("cpu"), optimizers=False)
        context = self.workflow.context
        context.components.eval()
        context.controller_manager.eval()
        options = env_config_options(to_plain(node.environment))
        options |= {"num_envs": num_envs, "workers": 0, "copy": False}
        options |= {"seed": derive_seed(seed, "train", number, incarnation)}
        self.environment = make_env(**options)
        self.environment.listen(print, trusted=True)
        generator = torch.Generator().manual_seed(derive_seed(seed, "collect", number, incarnation))
        self.collector = Collector(self.environment, device="cpu", generator=generator, capture=False)
        self.version: int | None = None
        self.collector.reset()

    def collect(self, weights: Mapping[str, Any], order: Order) -> Chunk:
        """Load the weights if they are new, and collect a chunk."""
        if self.version != order.version:
            context = self.workflow.context
            components = {k: v for k, v in context.components.items() if isinstance(v, nn.Module)}
            load_matching(components, weights["components"], prefix="components")
            load_matching(
                dict(context.controller_manager.modules()), weights["controllers"], prefix="controllers"
            )
            self.workflow.set_state(weights["workflow"])
            self.version = order.version
        if order.restart:
            self.collector.receive()
            self.collector.reset()
        columns: dict[str, list[Any]] = {}
        logs, closed = [], []
        for _ in range(order.steps):
            self.collector.receive()
            received = self.collector.received
            assert received is not None
            logs.append({env: dict(log) for env, log in received.logs.items()})
            closed.append(list(received.closed))
            result = self.collector.step(self.workflow, order.mode)
            for name, values in (result.trajectory or {}).items():
                copied = values.clone() if isinstance(values, torch.Tensor) else np.array(values)
                columns.setdefault(name, []).append(copied)
        rows = {name: stacked(values) for name, values in columns.items()}
        return Chunk(rows, logs, closed, order.version, self.environment.restarts)
