"""Builds a run from a resolved config: parts, buffers, workflow, Orchestrator. Environments: run_environments.py.

This module may import every package. Errors in a config are raised here, before the first step.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from rl_lab.config.compose import to_plain
from rl_lab.environments.make import env_config_options
from rl_lab.environments.vector import FourValueEnv, VectorEnv
from rl_lab.errors import ConfigError, LabError, closest, one_line, reject_unknown, require_choice
from rl_lab.orchestration.collector import Collector
from rl_lab.orchestration.orchestrator import Orchestrator, Settings
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.orchestration.phases import EVERY_KEYS, Cadences, Every, HookInfo, PhaseDefinition, parse_phases
from rl_lab.orchestration.run_log import RunLog
from rl_lab.orchestration.run_state import RunState
from rl_lab.orchestration.side_jobs import SideJobs
from rl_lab.orchestration.update_check import check_batches
from rl_lab.orchestration.updates import HookRunner, Runner, Storage, TransformRunner
from rl_lab.protocols import CollectStep
from rl_lab.records import AnyHook, EvolveHook, PlainHook, Spec, TransformHook
from rl_lab.run_environments import (
    build_evaluator,
    cluster_options,
    population_environment,
    training_environment,
)
from rl_lab.utils import ranks
from rl_lab.utils.checkpoint.manager import CheckpointManager
from rl_lab.utils.device import asks_for_tensor_float, resolve_device
from rl_lab.utils.metrics import Stopwatch
from rl_lab.utils.seeding import Generators, derive_seed, seed_everything
from rl_lab.workflows.base import WorldModelWorkflow
from rl_lab.workflows.context import ControllerManager, WorkflowContext, WorldModelComponents

if TYPE_CHECKING:
    from rl_lab.orchestration.remote_collector import RemoteCollector


@dataclass
class Run:
    """A built run, ready for `orchestrator.run()`."""

    config: DictConfig
    spec: Spec
    context: WorkflowContext
    workflow: Any
    orchestrator: Orchestrator
    cluster: Any = None  # with launch=ray

    def close(self) -> None:
        if self.context.train_environment is not None:
            self.context.train_environment.close()
        for buffer in self.context.buffers.values():
            if hasattr(buffer, "close"):  # it has open files
                buffer.close()
        if self.cluster is not None:
            self.cluster.close()


def build_run(
    config: DictConfig,
    spec: Spec,
    *,
    logger: Any,
    checkpoints: CheckpointManager | None,
    progress: Any = None,
    say: Callable[[str], None] = print,
) -> Run:
    """Build a training run from a resolved config; with several ranks, this rank's part of it."""
    require_choice("training.global_batch", config.training.get("global_batch", "fixed"), ("fixed", "scaled"))
    if ranks.size() > 1:
        from rl_lab.launch.ranks import rank_config

        config = rank_config(config)
    training = config.training
    seed = int(config.experiment.seed)
    device = resolve_device(str(config.experiment.device))
    torch.set_num_threads(int(training.threads))
    generators = Generators(seed, ranks.rank(), device=device)
    stopwatch = Stopwatch()

    components, controllers = build_parts(config, spec, device)
    optimizers = build_optimizers(config, components, controllers)
    workflow = build_workflow(config)
    # The Collector copies what it keeps; a workflow with its own collect_step gets copies of the arrays.
    collect_step = own_collect_step(workflow)
    cluster = None
    if OmegaConf.select(config, "launch.name") == "ray":
        from rl_lab import remote_parts

        if ranks.size() > 1:
            raise ConfigError("launch=ray cannot be combined with torchrun: use one of them")
        cluster = remote_parts.connect(config, say)
    environment: Any
    collector: Collector | RemoteCollector
    if cluster is None:
        environment = training_environment(
            config, spec, copy=collect_step is not None, logger=logger, say=say, device=device
        )
        if collect_step is not None and getattr(environment, "on_device", False):
            raise ConfigError(
                f"environment.batched=true needs the Collector, but {type(workflow).__name__} steps its "
                "environments itself: set environment.batched=false"
            )
        collector = Collector(
            environment,
            device=device,
            generator=generators.device("collect"),
            capture=bool(config.training.capture),
            stopwatch=stopwatch,
        )
    else:
        collector = remote_parts.remote_collector(
            config,
            spec,
            cluster,
            workflow=workflow,
            parts={"components": dict(components.items()), "controllers": dict(controllers.items())},
            updates=lambda: scheduler.totals["updates"],
            device=device,
            say=say,
            stopwatch=stopwatch,
        )
        environment = collector.environment
    if ranks.size() > 1 and environment.normalizer is not None:
        environment.normalizer.share()
    first_observation = collector.reset()

    buffers: dict[str, Any] = {}
    context = WorkflowContext(
        config=config,
        device=device,
        spec=spec,
        components=components,
        controller_manager=controllers,
        optimizers=optimizers,
        buffers=buffers,
        train_environment=FourValueEnv(environment) if unpacks_four_values(workflow) else environment,
        collector=collector,
        checkpoint_manager=checkpoints,
        experiment_logger=logger,
        initial_observation=first_observation,
        initial_dones=environment.last_dones,
        trains=True,
    )
    workflow.initialize(context)
    if not ranks.is_first():  # the same weights, and other random numbers from here on
        seed_everything(derive_seed(seed, "rank", ranks.rank()))
    # The workflow decides which extra columns are stored, so the buffers are built after it.
    home = checkpoints.folder.parent / "buffers" if checkpoints is not None else None
    home = home / f"rank{ranks.rank()}" if home is not None and not ranks.is_first() else home
    buffers.update(build_buffers(config, spec, workflow.policy_columns(), device, home=home, say=say))
    collector.rows_on_host |= any(getattr(b, "on_host", False) for b in buffers.values())

    hooks = workflow.hooks()
    check_batches(hooks, spec.row_columns())
    storage = Storage(
        buffers,
        hooks,
        spec=spec,
        generators=generators,
        device=device,
        prefetch=_prefetch(training, buffers, device),
    )
    phases = parse_phases(to_plain(training.phases), hook_infos(hooks), buffers, workflow.resolve_hook)
    _check_phases(
        phases, workflow, {**dict(components.items()), **dict(controllers.items())}, buffers, config
    )
    _check_temperatures(workflow, training, phases)
    total = int(training.total_timesteps) if training.total_timesteps else None
    scheduler = PhaseScheduler(phases, total_timesteps=total, is_ready=storage.ready)
    runners = build_runners(
        config,
        hooks,
        storage,
        environment,
        device,
        generators=generators,
        stopwatch=stopwatch,
        say=say,
        cluster=cluster,
    )
    orchestrator = Orchestrator(
        workflow=workflow,
        scheduler=scheduler,
        storage=storage,
        runners=runners,
        log=RunLog(
            logger,
            progress=progress,
            stopwatch=stopwatch,
            frames_per_step=spec.action_repeat,
            total_steps=total,
            gauges=lambda: {"collect/env_restarts": environment.restarts},
        ),
        run_state=RunState(
            workflow=workflow,
            scheduler=scheduler,
            components=dict(components.items()),
            controller_manager=controllers,
            optimizers=optimizers,
            generators=generators,
            storage=storage,
            collector=collector,
        ),
        collector=collector,
        own_collect_step=collect_step,
        cadences=_possible_cadences(build_cadences(training), workflow, phases, say),
        settings=Settings(
            seed=seed,
            eval_episodes=int(training.evaluate.episodes),
            eval_sample=bool(training.evaluate.sample),
            eval_temperature=eval_temperature(training),
            eval_video=bool(training.evaluate.video),
            on_nonfinite=_choice("training.on_nonfinite", training.on_nonfinite, ("stop", "continue")),
            on_save_failure=_choice(
                "training.on_save_failure", training.on_save_failure, ("stop", "continue")
            ),
        ),
        environment=environment,
        side_jobs=SideJobs(str(training.get("on_side_failure", "continue")), say=say),
        checkpoints=checkpoints,
        evaluator=build_evaluator(
            config,
            device,
            normalizer=environment.normalizer,
            say=say,
            **cluster_options(config, cluster, "evaluation"),
        ),
        say=say,
    )
    return Run(config, spec, context, workflow, orchestrator, cluster)


def own_collect_step(workflow: WorldModelWorkflow) -> CollectStep | None:
    """Return the workflow's `collect_step` if it has one of its own; else the loop calls the Collector."""
    overridden = type(workflow).collect_step is not WorldModelWorkflow.collect_step
    return workflow.collect_step if overridden else None


def unpacks_four_values(workflow: WorldModelWorkflow) -> bool:
    """Return whether its class contains `obs, reward, done, info = ….step(…)`, with four values instead of five."""
    for cls in type(workflow).__mro__[: -len(WorldModelWorkflow.__mro__)]:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        except (OSError, TypeError, SyntaxError):  # no source: a class made at run time
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                called, target = node.value.func, node.targets[0]
                steps = isinstance(called, ast.Attribute) and called.attr == "step"
                if steps and isinstance(target, ast.Tuple) and len(target.elts) == 4:
                    return True
    return False


def build_runners(
    config: DictConfig,
    hooks: Mapping[str, AnyHook],
    storage: Storage,
    environment: VectorEnv,
    device: torch.device,
    *,
    generators: Generators,
    stopwatch: Stopwatch,
    say: Callable[[str], None],
    cluster: Any = None,
) -> dict[str, Runner]:
    """Create the runner of each hook, by its kind."""
    capture = bool(config.training.capture)
    runners: dict[str, Runner] = {}
    for name, hook in hooks.items():
        generator = generators.device(f"hook/{name}")  # of every hook: a checkpoint has all of them
        if isinstance(hook, TransformHook):
            runners[name] = TransformRunner(name, hook, storage=storage)
        elif not isinstance(hook, EvolveHook):
            if isinstance(hook, PlainHook) and ranks.size() > 1:
                raise ConfigError(
                    f"{name} is a plain update, whose gradients cannot be averaged over {ranks.size()} ranks: train "
                    "with one process, or declare it in hooks() with a step that calls optimizer_step"
                )
            runners[name] = HookRunner(
                name,
                hook,
                device=device,
                generator=generator,
                storage=storage,
                capture=capture,
                tensor_float=asks_for_tensor_float(config.training.precision),
                stopwatch=stopwatch,
                say=say,
            )
    evolutions = {name: hook for name, hook in hooks.items() if isinstance(hook, EvolveHook)}
    if evolutions:
        from rl_lab.orchestration.evolution import EvolveRunner, Generations

        generations = Generations(
            functools.partial(
                population_environment,
                config,
                environment,
                say,
                **cluster_options(config, cluster, "population"),
            ),
            seed=int(config.experiment.seed),
            say=say,
            capture=capture,
        )
        for name, evolution in evolutions.items():
            runners[name] = EvolveRunner(name, evolution, generations, device=device, storage=storage)
    return {name: runners[name] for name in hooks}


def build_cadences(training: DictConfig) -> Cadences:
    known = {
        *EVERY_KEYS,
        "keep",
        "keep_weights",
        "epoch_weights",
        "episodes",
        "sample",
        "temperature",
        "video",
    }
    cadences = {}
    for name in ("log", "evaluate", "report", "checkpoint"):
        node = to_plain(training[name]) or {}
        reject_unknown(f"training.{name}", node, known)
        cadences[name] = Every.from_config(node)
    epochs = training.checkpoint.get("epoch_weights")
    cadences["epoch_weights"] = Every.from_config({"every_cycles": epochs or None})
    return Cadences(**cadences)


def _possible_cadences(
    cadences: Cadences, workflow: Any, phases: list[PhaseDefinition], say: Callable[[str], None]
) -> Cadences:
    """Remove evaluation, and say so, if the workflow has no policy to call; a hook `evaluate` is an error."""
    if workflow.can_act:
        return cadences
    for phase in phases:
        if any(use.kind == "evaluate" for use in phase.hooks):
            raise ConfigError(f"phase '{phase.name}' has the hook evaluate, but {workflow.cannot_act}")
    if cadences.evaluate is not None:
        say(f"training.evaluate is ignored: {workflow.cannot_act}")
    return replace(cadences, evaluate=None)


def eval_temperature(training: DictConfig) -> float:
    """`training.evaluate.temperature`; 1 for runs that were saved before it existed."""
    return float(training.evaluate.get("temperature", 1.0))


def check_temperature(workflow: Any, path: str, temperature: float) -> None:
    """Raise ConfigError for a temperature that the workflow's `act` would ignore."""
    if temperature != 1.0 and not getattr(workflow, "has_temperature", False):
        raise ConfigError(
            f"{path} must be 1, not {temperature}: {type(workflow).__name__} has no policy that samples at a "
            "temperature"
        )


def _check_temperatures(workflow: Any, training: DictConfig, phases: list[PhaseDefinition]) -> None:
    collect = to_plain(training.get("collect")) or {}
    reject_unknown("training.collect", collect, {"temperature"})
    check_temperature(workflow, "training.collect.temperature", float(collect.get("temperature", 1.0)))
    evaluate = eval_temperature(training)
    check_temperature(workflow, "training.evaluate.temperature", evaluate)
    if evaluate != 1.0 and not training.evaluate.sample:
        raise ConfigError(
            f"training.evaluate.temperature is {evaluate}, but actions are not sampled: "
            "set training.evaluate.sample=true"
        )
    for phase in phases:
        for use in phase.hooks:
            temperature = float(use.options.get("temperature", 1.0))
            check_temperature(workflow, f"phase '{phase.name}': collect.temperature", temperature)


def _check_phases(
    phases: list[PhaseDefinition],
    workflow: Any,
    parts: Mapping[str, Any],
    buffers: Mapping[str, Any],
    config: DictConfig,
) -> None:
    """Check that parts, settings and buffers named by the phases exist and can be used."""
    for phase in phases:
        for name in phase.freeze:
            if name not in parts:
                raise ConfigError(
                    f"phase '{phase.name}' freezes an unknown part '{name}'.{closest(name, parts)}"
                )
        for path in phase.set:
            if path not in workflow.phase_settings:
                raise ConfigError(
                    f"phase '{phase.name}' sets '{path}', which {type(workflow).__name__} does not read from phases."
                    f"{closest(path, workflow.phase_settings)}"
                )
        if phase.collects and not config.buffers:
            raise ConfigError(
                f"phase '{phase.name}' collects, but the config has no buffers: add one under buffers"
            )
        target = next(iter(phase.buffer), "")
        if phase.collects and getattr(buffers.get(target), "read_only", False):
            raise ConfigError(
                f"phase '{phase.name}' would collect into '{target}', which is read-only: put another buffer first"
            )


def _prefetch(training: DictConfig, buffers: Mapping[str, Any], device: torch.device) -> int:
    if training.prefetch != "auto":
        return int(training.prefetch)
    host = any(getattr(buffer, "on_host", False) for buffer in buffers.values())
    return 1 if host and device.type == "cuda" else 0


def _choice(path: str, value: Any, allowed: tuple[str, ...]) -> str:
    require_choice(path, value, allowed)
    return str(value)


# ---------------------------------------------------------------- workflow and its parts


def build_workflow(config: DictConfig) -> WorldModelWorkflow:
    workflow = instantiate("workflow", config.workflow)
    if not isinstance(workflow, WorldModelWorkflow):
        raise ConfigError(
            f"workflow._target_: {type(workflow).__name__} is not a workflow: "
            "make it a subclass of rl_lab.workflows.base.WorldModelWorkflow"
        )
    return workflow


def assemble_workflow(
    config: DictConfig,
    spec: Spec,
    device: torch.device,
    *,
    optimizers: bool = True,
    load: Callable[[WorldModelComponents, ControllerManager], None] | None = None,
) -> Any:
    """Create a workflow with its parts, without environment, collector, buffers or logger.

    optimizers: False for inference. load: loads weights before the workflow is initialized.
    """
    components, controllers = build_parts(config, spec, device)
    if load is not None:
        load(components, controllers)
    context = WorkflowContext(
        config=config,
        device=device,
        spec=spec,
        components=components,
        controller_manager=controllers,
        optimizers=build_optimizers(config, components, controllers) if optimizers else {},
        trains=optimizers,
    )
    workflow = build_workflow(config)
    workflow.initialize(context)
    return workflow


def hook_infos(hooks: Mapping[str, AnyHook]) -> dict[str, HookInfo]:
    # One update replays a batch on every rank.
    return {
        name: HookInfo(hook.kind, hook.batch.replayed_steps * ranks.size() if hook.batch else 0)
        for name, hook in hooks.items()
    }


def instantiate(path: str, node: Any, **extra: Any) -> Any:
    """Create the object of a config node; `extra` keywords are passed if its constructor accepts them."""
    from hydra.errors import InstantiationException
    from hydra.utils import get_object
    from hydra.utils import instantiate as hydra_instantiate

    target = node.get("_target_") if hasattr(node, "get") else None
    if not target:
        raise ConfigError(f"{path} has no _target_: set it to the class to build")
    try:
        constructor = get_object(target)
    except Exception as error:
        raise ConfigError(f"{path}._target_: cannot import '{target}': {one_line(error)}") from error
    accepted = inspect.signature(constructor).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    given = {key: value for key, value in extra.items() if key in accepted or open_ended}
    unknown = [k for k in node if not str(k).startswith("_") and k not in accepted and not open_ended]
    if unknown:
        raise ConfigError(f"{path}: {target} takes no '{unknown[0]}'.{closest(str(unknown[0]), accepted)}")
    try:
        # Partial first: Hydra would convert dataclasses in `extra` to dicts.
        make = hydra_instantiate(node, _convert_="all", _partial_=True)
        return functools.partial(make, **given) if node.get("_partial_") else make(**given)
    except LabError:
        raise
    except Exception as error:
        cause = error.__cause__ if isinstance(error, InstantiationException) and error.__cause__ else error
        raise ConfigError(f"{path}: {target} could not be built: {one_line(cause)}") from error


def build_parts(
    config: DictConfig, spec: Spec, device: torch.device
) -> tuple[WorldModelComponents, ControllerManager]:
    """Create components and controllers on the device, initialized from the run's seed."""
    seed_everything(derive_seed(int(config.experiment.seed), "weights"))
    components = {
        name: instantiate(f"components.{name}", node, spec=spec) for name, node in config.components.items()
    }
    controllers = {
        name: instantiate(f"controllers.{name}", node, spec=spec) for name, node in config.controllers.items()
    }
    return WorldModelComponents(components).to(device), ControllerManager(controllers).to(device)


def build_optimizers(
    config: DictConfig, components: WorldModelComponents, controllers: ControllerManager
) -> dict[str, Any]:
    """Create the optimizers, each with the parameters of its `modules`.

    The default of `modules` is the part with the optimizer's name; for `world_model` it is all components,
    and for `controller` all controllers.
    """
    parts = {**dict(components.items()), **dict(controllers.items())}
    modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    optimizers = {}
    for name, node in config.optimizers.items():
        if not OmegaConf.is_dict(node):
            raise ConfigError(f"optimizers.{name} is {node!r}: it must be a mapping with a _target_")
        names = node.get("modules")
        if names is None:
            groups = {"world_model": list(components), "controller": controllers.names()}
            names = groups.get(name, [name])
        for wanted in names:
            if wanted not in parts:
                raise ConfigError(
                    f"optimizers.{name}.modules has an unknown part '{wanted}'.{closest(wanted, parts)}"
                )
        named = {f"{n}.{key}": p for n in names if n in modules for key, p in modules[n].named_parameters()}
        if not named:
            raise ConfigError(
                f"optimizers.{name}.modules must include a part with parameters; {list(names)} have none"
            )
        plain = OmegaConf.masked_copy(node, [key for key in node if key != "modules"])
        partial = instantiate(f"optimizers.{name}", plain)
        optimizers[name] = partial([p for p in named.values() if p.requires_grad])
    return optimizers


def build_buffers(
    config: DictConfig,
    spec: Spec,
    extras: Mapping[str, Any],
    device: torch.device,
    *,
    home: Path | None = None,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Create the buffers of the config; the `eval` buffer has one stream per evaluation environment.

    home: folder of the run in which each buffer may store files, in a subfolder with its name
    """
    columns = {**spec.row_columns(), **extras}
    buffers = {}
    for name, node in config.buffers.items():
        options = env_config_options(to_plain(config.environment), evaluation=name == "eval")
        buffers[name] = instantiate(
            f"buffers.{name}",
            node,
            columns=columns,
            spec=spec,
            num_streams=int(options.get("num_envs", 1)),
            device=device,
            mutable=tuple(extras),
            home=None if home is None else home / str(name),
            on_warning=say,
        )
    return buffers
