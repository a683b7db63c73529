"""Train, and go on training: from a config to a finished run folder."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rl_lab.build import Run, build_run, environment_spec
from rl_lab.compose import compose_config, resolve_config
from rl_lab.errors import CheckpointError, ConfigError, LabError
from rl_lab.orchestration.profiling import Trace
from rl_lab.run_folder import RunFolder, describe_differences, new_run_folder, output_root
from rl_lab.utils.checkpoint import CheckpointManager, Loaded, partial_load
from rl_lab.utils.files import RunLock
from rl_lab.utils.logger import ExperimentLogger
from rl_lab.utils.progress import Progress

# What may differ when a run is resumed: how long and how visibly it runs, not what it computes.
SAFE_ON_RESUME = (
    "training.total_timesteps",
    "training.log",
    "training.evaluate",
    "training.report",
    "training.checkpoint",
    "training.on_nonfinite",
    "training.on_save_failure",
    "training.profile",
    "training.resume_path",
    "training.threads",
    "experiment.device",
    "logging",
    "wandb",
    "environment.workers",
    "buffers.*.storage",
    "buffers.*.folder",
    "buffers.offline.path",
    "environment.eval",
    "run_dir",
    "output_root",
)


@dataclass
class RunResult:
    """What `train` gives back."""

    path: Path
    interrupted: bool
    counters: dict[str, int] = field(default_factory=dict)
    return_mean: float | None = None  # of the last logged training episodes
    eval_return_mean: float | None = None  # of the last evaluation, where there was one


def train(
    experiment: str | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    config_dirs: Sequence[Path | str] = (),
    say: Callable[[str], None] = print,
) -> RunResult:
    """Train an experiment by name.

    rl_lab.train("dreamer_cartpole", ["training.total_timesteps=2000", "experiment.seed=1"])
    """
    words = [f"{k}={v}" for k, v in overrides.items()] if isinstance(overrides, Mapping) else list(overrides)
    if experiment:
        words.insert(0, f"experiment={experiment}")
    return train_config(compose_config(words, config_dirs=config_dirs), words, say=say)


def train_config(
    config: DictConfig, overrides: Sequence[str] = (), *, say: Callable[[str], None] = print
) -> RunResult:
    """Train a composed config in a new run folder; an existing `run_dir` is resumed."""
    if config.run_dir:
        folder = RunFolder(str(config.run_dir))
        if folder.exists():
            return _resume_same(folder, config, say)
    spec = environment_spec(config)
    resolve_config(config, spec)
    folder = (
        RunFolder(str(config.run_dir)) if config.run_dir else new_run_folder(output_root(config.output_root))
    )
    folder.path.mkdir(parents=True, exist_ok=True)
    with RunLock(folder.path):
        folder.create(config, spec, list(overrides))
        try:
            return _run(folder, config, say)
        except LabError:
            folder.discard_if_unused()
            raise


def resume(
    run: Path | str, overrides: Sequence[str] = (), *, say: Callable[[str], None] = print
) -> RunResult:
    """Go on with a run from its newest good checkpoint. Only safe keys may change."""
    folder = RunFolder(run)
    config = folder.load_config()
    before = OmegaConf.to_container(config)
    for word in overrides:
        path, _, value = word.lstrip("+").partition("=")
        if OmegaConf.select(config, path, default="_missing_") == "_missing_":
            raise ConfigError(f"the run's config has no key '{path}'")
        OmegaConf.update(config, path, _parse(value))
    return _resume_changed(folder, before, config, say)


def _plain(node: DictConfig) -> Any:
    return OmegaConf.to_container(node, resolve=True)


def _parse(value: str) -> Any:
    import yaml

    return yaml.safe_load(value) if value else None


def _resume_same(folder: RunFolder, config: DictConfig, say: Callable[[str], None]) -> RunResult:
    """The command was given again with the same run folder."""
    saved = folder.load_config()
    resolve_config(config, folder.load_spec())
    return _resume_changed(folder, OmegaConf.to_container(saved), config, say)


def _resume_changed(
    folder: RunFolder, before: Any, config: DictConfig, say: Callable[[str], None]
) -> RunResult:
    after: Any = OmegaConf.to_container(config)
    differences = describe_differences(before, after)
    for path, (old, new) in sorted(differences.items()):
        if not any(fnmatch(path, safe) or fnmatch(path, f"{safe}.*") for safe in SAFE_ON_RESUME):
            raise ConfigError(
                f"{path} was {old!r} in this run and cannot become {new!r} on resume; "
                f"safe to change: {', '.join(SAFE_ON_RESUME)}. For anything else start a new run "
                "(load: {path: …} takes weights over)"
            )
        if path not in ("run_dir", "output_root"):
            say(f"resume: {path}: {old!r} -> {new!r}")
    with RunLock(folder.path):
        return _run(folder, config, say)


def _run(folder: RunFolder, config: DictConfig, say: Callable[[str], None]) -> RunResult:
    """Build, restore what there is, run, and say where everything lies. The caller holds the lock."""
    keep = config.training.checkpoint
    checkpoints = CheckpointManager(
        folder.checkpoints, keep=int(keep.keep), keep_weights=int(keep.keep_weights), on_warning=say
    )
    explicit = config.training.resume_path
    loaded: Loaded | None = None
    if checkpoints.has_any():  # of this run: where it stands counts more than where it came from
        loaded = checkpoints.load()
    elif explicit:
        loaded = CheckpointManager.load_file(Path(str(explicit)), on_warning=say)
        if "phase_state" not in loaded.state:
            raise CheckpointError(
                f"{explicit} holds weights only, so there is no training to resume; "
                f"load.path={explicit} starts a new run from them"
            )
    logger = ExperimentLogger(
        folder.path,
        tensorboard=bool(config.logging.tensorboard),
        wandb_mode=str(config.wandb.mode),
        wandb_options={"project": config.wandb.project, "name": config.experiment.name},
        resume_step=loaded.step if loaded else None,
        resume_bytes=int(loaded.info.get("metrics_bytes", 0)) if loaded else 0,
    )
    progress = Progress(mode=str(config.logging.progress), title=str(config.experiment.name))
    run = None
    try:
        say(f"run folder: {folder.path}")
        run = build_run(
            config,
            folder.load_spec(),
            logger=logger,
            checkpoints=checkpoints,
            progress=progress,
            say=progress.say,
        )
        if config.load.path:
            _load_weights(config, run)
        if loaded is not None:
            empty = checkpoints.restore_buffers(loaded, run.orchestrator.storage.buffers)
            run.orchestrator.restore(loaded.state, empty_buffers=empty)
            say(f"resumed at step {loaded.state['global_step']} from {loaded.path}")
        if config.training.profile:
            run.orchestrator.trace = Trace(
                folder.path / "profile" / "trace.json", int(config.training.profile)
            )
        _describe_memory(run, say)
        with progress:
            run.orchestrator.run()
    finally:
        logger.close()
        if run is not None:
            run.close()
    return _finish(folder, run, say)


def _load_weights(config: DictConfig, run: Run) -> None:
    """Start from another run's weights: the parts that `load:` names, or all that both runs have."""
    named = {key: value for key, value in _plain(config.load).items() if value is not None}
    if set(named) == {"path"}:
        named |= {"components": "all", "controllers": "all"}
    loaded = CheckpointManager.load_file(Path(str(named["path"])), weights=True, on_warning=warnings.warn)
    components = dict(run.context.components.items())
    partial_load(loaded.state, named, components, dict(run.context.controller_manager.modules()))


def _describe_memory(run: Run, say: Callable[[str], None]) -> None:
    """What the run will hold: replay, and the model with its gradients and optimizer state."""
    for name, buffer in run.orchestrator.storage.buffers.items():
        say(f"memory: {name}: {buffer.describe()}")
    modules = [run.context.components, *(m for _, m in run.context.controller_manager.modules())]
    parameters = sum(p.numel() for m in modules for p in m.parameters())
    # Weights, gradients and two optimizer moments in float32; a captured graph keeps the update's activations.
    say(f"memory: model: {parameters:,} parameters, about {parameters * 16 / 2**20:.1f} MiB to train")
    if any(runner.capture.enabled for runner in run.orchestrator.runners.values()):
        say("memory: graph: one update's activations; measured and said when a hook is captured")


def _finish(folder: RunFolder, run: Run, say: Callable[[str], None]) -> RunResult:
    orchestrator = run.orchestrator
    if orchestrator.interrupted:
        say(f"stopped and saved; go on with: {Path(sys.argv[0]).name or 'rl-lab'} resume {folder.path}")
    return RunResult(
        path=folder.path,
        interrupted=orchestrator.interrupted,
        counters=dict(orchestrator.scheduler.totals),
        return_mean=orchestrator.log.last_return,
        eval_return_mean=orchestrator.log.last_evaluation,
    )
