"""`train` and `resume`: from a config to a finished run folder."""

from __future__ import annotations

import contextlib
import shlex
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rl_lab.build import Run, build_run, instantiate
from rl_lab.config.checks import check_config
from rl_lab.config.compose import (
    change_key,
    compose_config,
    known_choices,
    name_by_task,
    resolve_config,
    select,
    to_plain,
    unread,
)
from rl_lab.config.saved import check_same_config, check_same_spec, drop_unread, refuse_unsafe
from rl_lab.config.trust import check_training
from rl_lab.environments.native import NativeForm
from rl_lab.environments.suites.gym import PYTHON, name_task, remember
from rl_lab.errors import (
    CheckpointError,
    ConfigError,
    LabError,
    RunFolderLostError,
    RunLockedError,
    one_line,
    one_line_errors,
    require_choice,
    unexpected,
)
from rl_lab.orchestration.run_log import STOP_WHEN
from rl_lab.orchestration.run_state import saved_ranks
from rl_lab.orchestration.update_check import UpdateWatch, check_updates
from rl_lab.records import Spec
from rl_lab.run_environments import probe_environment
from rl_lab.run_folder import RunFolder, describe_differences, new_run_folder, output_root
from rl_lab.utils import ranks
from rl_lab.utils.checkpoint.loading import Loaded, load_weights
from rl_lab.utils.checkpoint.manager import CheckpointManager
from rl_lab.utils.checkpoint.matching import partial_load
from rl_lab.utils.files import RunLock, absolute, read_json
from rl_lab.utils.logger import ExperimentLogger, SilentLogger
from rl_lab.utils.progress import Progress, clock_time, point_of


@dataclass
class RunResult:
    """Result of `train` and `resume`."""

    path: Path
    interrupted: bool
    counters: dict[str, int] = field(default_factory=dict)
    return_mean: float | None = None  # of the last logged training episodes
    eval_return_mean: float | None = None  # of the last evaluation, if there was one
    best_return: float | None = None  # of the best evaluation, whose weights are in best.pt
    best_step: int | None = None
    best_updates: int | None = None
    seconds: float = 0.0  # of training, since this call began it
    steps_here: int = 0  # environment steps of this call; a resumed run has more
    ended: str | None = None  # which callback ended the run before its last step, and why
    first_rank: bool = True  # False: of another process of torchrun, which prints nothing

    def summary(self) -> list[str]:
        """Lines for the end of a run: what was done, how fast, the best evaluation, and what to do next."""
        steps, updates = self.counters.get("env_steps", 0), self.counters.get("updates", 0)
        parts = [f"{steps:,} steps and {updates:,} updates"]
        if self.seconds and self.steps_here:
            parts[0] += f" in {clock_time(self.seconds)} ({self.steps_here / self.seconds:,.0f} steps/s)"
        if self.best_return is not None:
            at = f" at {point_of(self.best_step, self.best_updates)}" if self.best_step is not None else ""
            parts.append(f"best evaluation {self.best_return:,.1f}{at}")
        if not self.first_rank:
            return []
        lines = [f"done: {', '.join(parts)}"]
        if self.ended:
            more = f"; rl-lab resume {shlex.quote(shown_path(self.path))} {STOP_WHEN}=null continues"
            lines.append(f"  ended early by {self.ended}{more * self.ended.startswith(STOP_WHEN)}")
        if self.best_return is not None:
            run = shlex.quote(shown_path(self.path))
            for verb, what in NEXT:
                lines.append(f"  {f'rl-lab {verb} {run}':<{len(run) + 16}}  {what}")
        return lines

    def __repr__(self) -> str:
        state = "stopped" if self.interrupted else "ended early" if self.ended else "finished"
        best = "" if self.best_return is None else f", best evaluation {self.best_return:,.1f}"
        at = point_of(self.counters.get("env_steps", 0), self.counters.get("updates"))
        return f"RunResult({str(self.path)!r}, {state} at {at}{best})"


NEXT = (
    ("eval", "20 new episodes: scores with intervals, videos"),
    ("report", "curves, scores and media as one HTML page"),
    ("play", "watch its agent, or play in its world model: -w --web"),
)
OWN_ENVIRONMENT = "dreamer_gym"  # the experiment of `train(env=MyEnv)`
Overrides = str | Sequence[str] | Mapping[str, Any]


@one_line_errors()
def train(
    experiment: str | None = None,
    overrides: Overrides = (),
    *,
    debug: str | None = None,
    env: Any = None,
    callbacks: Sequence[Any] = (),
    config_dirs: Sequence[Path | str] = (),
    say: Callable[[str], None] = print,
) -> RunResult:
    """Train an experiment by name.

    rl_lab.train("dreamer_cartpole", debug="tiny")
    rl_lab.train("dreamer_cartpole", ["training.total_timesteps=2000", "experiment.seed=1"])
    rl_lab.train("dreamer_gym", {"training.total_timesteps": 20000}, env=MyEnv)

    overrides: words of the command line, as a list or one string, or a dict of keys and values
    debug:     "tiny": the smallest network and 100 steps, to see in seconds that everything runs; the word debug=tiny
    env:       the environment: a class, a function that creates one, a Gymnasium id or an import path. A class of a
               notebook or of the running script is sent to worker processes by value; a later `resume` or `evaluate`
               in another program has to pass it again.
    callbacks: objects with methods of `rl_lab.Callback`, called during training; `resume` has to get them again
    """
    items = override_words(overrides)
    if debug is not None:
        require_choice("debug", debug, known_choices("debug", config_dirs))
        items = list(dict.fromkeys([f"debug={debug}", *items]))
    if env is not None:
        items = [*environment_words(env), *items]
    if experiment or env is not None:
        items.insert(0, f"experiment={experiment or OWN_ENVIRONMENT}")
    return train_config(compose_config(items, config_dirs=config_dirs), items, say=say, callbacks=callbacks)


def override_words(overrides: Overrides) -> list[str]:
    """Return `key=value` words; a string is split as a shell does."""
    if isinstance(overrides, str):
        return shlex.split(overrides)
    if isinstance(overrides, Mapping):
        return [f"{key}={_value_text(key, value)}" for key, value in overrides.items()]
    return list(overrides)


def environment_words(env: Any) -> list[str]:
    """Return the words that choose an environment given as a class, a function or a name."""
    return ["environment=gym", f"environment.task={name_task(env)}"]


def _value_text(key: str, value: Any) -> str:
    """Return a value of Python in the form of an override; a string is passed as it is."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if key == "environment.task":
        return name_task(value)
    if isinstance(value, str | int | float | Path):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{_value_text('', v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_value_text("", item) for item in value) + "]"
    raise ConfigError(f"{key} is a {type(value).__name__}: overrides are text, numbers, lists, dicts or None")


def train_config(
    config: DictConfig,
    overrides: Sequence[str] = (),
    *,
    say: Callable[[str], None] = print,
    callbacks: Sequence[Any] = (),
) -> RunResult:
    """Train a composed config in a new run folder; an existing `run_dir` is resumed. Under torchrun, with all ranks."""
    with ranks.join(str(select(config, "experiment.device"))):
        return _train_config(config, overrides, say if ranks.is_first() else _say_nothing, callbacks)


def _say_nothing(text: str) -> None:
    """For the ranks other than the first."""


def _train_config(
    config: DictConfig, overrides: Sequence[str], say: Callable[[str], None], callbacks: Sequence[Any]
) -> RunResult:
    if select(config, "launch.name") == "pack":
        raise ConfigError(
            "launch=pack is for several runs: add --multirun and values such as experiment.seed=0,1"
        )
    if select(config, "launch.name") == "slurm":
        raise ConfigError("launch=slurm submits jobs from the command line: use rl-lab train … launch=slurm")
    _make_paths_absolute(config)
    name_by_task(config, overrides)
    run_dir = _run_dir(config)
    if run_dir is not None and ranks.from_first(run_dir.exists):
        return _resume_existing(run_dir, config, say, callbacks)
    if run_dir is not None:
        ranks.from_first(run_dir.check_free)
    sentence = unread(config)
    if sentence:
        say(sentence)
    spec, form = probe_environment(config)
    resolve_config(config, spec)
    made: list[RunFolder] = []
    path = ranks.from_first(lambda: _make_folder(config, run_dir, made))
    folder = made[0] if made else RunFolder(path)
    say = ignore_output_errors(say)
    try:
        with _lock(folder) as lock:
            with _report_write_errors(folder):
                ranks.from_first(lambda: folder.create(config, spec, list(overrides), form))
                # Sent to the other ranks: the first one deletes the folder again if it cannot begin.
                spec, form = ranks.from_first(lambda: _saved_form(folder))
            resizing = NativeForm(form).automatic_resizing()
            if resizing:
                say(resizing)
            return _run(folder, config, spec, form, say, lock, callbacks=callbacks)
    except (RunLockedError, RunFolderLostError):
        raise  # another process uses the folder
    except LabError:
        if ranks.is_first() and folder.discard_if_unused() and not folder.path.exists():
            say(f"the run failed before it stored anything: removed {folder.path}")
        raise


def _make_folder(config: DictConfig, run_dir: RunFolder | None, made: list[RunFolder]) -> Path:
    """Create the run folder, append it to `made`, and return its path."""
    folder = run_dir or new_run_folder(output_root(config.output_root))
    try:
        folder.make()
    except OSError as error:
        raise ConfigError(f"run_dir: cannot create the run folder {folder.path}: {error}") from error
    made.append(folder)
    return folder.path


def _saved_form(folder: RunFolder) -> tuple[Spec, Any]:
    """Return the environment's spec and native form from the run folder; runs of older versions have no form."""
    return folder.load_spec(), read_json(folder.form_file) if folder.form_file.is_file() else None


class _NoLock:
    """Of the ranks other than the first, which holds the lock of the run folder."""

    def check(self) -> None: ...


def _lock(folder: RunFolder) -> contextlib.AbstractContextManager[RunLock | _NoLock]:
    return RunLock(folder.path) if ranks.is_first() else contextlib.nullcontext(_NoLock())


@one_line_errors()
def resume(
    run: Path | str,
    overrides: Overrides = (),
    *,
    env: Any = None,
    callbacks: Sequence[Any] = (),
    trust: bool = False,
    say: Callable[[str], None] = print,
) -> RunResult:
    """Continue a run from its newest intact checkpoint. Only the keys in SAFE_ON_RESUME may change.

    env:   the class or function that `train` was given, if the run is continued by another program than began it
    callbacks: objects that `train` was given, or others; their states are found by their names
    trust: build parts that are not registered, and follow links, also of a run that was not made here
           (SECURITY.md); the run then counts as made here
    """
    folder = RunFolder(run)
    if env is not None:
        use_environment(folder, env, trust=trust)
    config = _load_saved(folder, say, trust=trust)
    _make_paths_absolute(config)
    before = OmegaConf.to_container(config)
    for override in override_words(overrides):
        path, _, value = override.lstrip("+").partition("=")
        change_key(config, path, value)
    _make_paths_absolute(config)
    if not folder.trusted:
        check_training(to_plain(config))
    with ranks.join(str(config.experiment.device)):
        tell = say if ranks.is_first() else _say_nothing
        return _resume_changed(folder, before, config, tell, callbacks, trust=trust)


def use_environment(folder: RunFolder, env: Any, *, trust: bool = False) -> None:
    """Make `env` the environment that a saved run names, if the run was given a Python object."""
    config = folder.load_config(trust=trust, environment=False)
    task, given = str(select(config, "environment.task")), name_task(env)
    prefix, _, name = task.partition(":")
    if prefix == PYTHON and not isinstance(env, str):
        remember(name, env)
    elif task != given:
        raise ConfigError(f"env: {folder.path} was trained in {task}, not in {given}: leave env out")


def shown_path(path: Path) -> str:
    """Return a path relative to the current folder if it is inside it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def _make_paths_absolute(config: DictConfig) -> None:
    """Make the paths of saved data absolute: a run may be resumed from another folder than it was started in."""
    stored = [f"buffers.{name}.path" for name in config.get("buffers") or {}]
    for key in ("load.path", "training.resume_path", *stored):
        value = select(config, key)
        if value and isinstance(value, str):
            OmegaConf.update(config, key, str(absolute(value)))


def _run_dir(config: DictConfig) -> RunFolder | None:
    """Return the folder of `run_dir`, or None if it is not set."""
    value = select(config, "run_dir")
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"run_dir must be a path or null, not {value!r}")
    try:
        return RunFolder(value) if value else None
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"run_dir={value!r} is not a path: {error}") from error


def _resume_existing(
    folder: RunFolder, config: DictConfig, say: Callable[[str], None], callbacks: Sequence[Any]
) -> RunResult:
    """Resume because the command was repeated with the same run folder."""
    # The composed config is built, not the saved one, whose parts only have to be the same.
    saved = _load_saved(folder, say, trust=True, workflow=select(config, "workflow._target_"))
    _make_paths_absolute(saved)
    if str(config.experiment.name).startswith(
        str(saved.experiment.name)
    ):  # an older version did not add the task
        config.experiment.name = saved.experiment.name
    resolve_config(config, folder.load_spec())
    return _resume_changed(folder, OmegaConf.to_container(saved), config, say, callbacks)


def _load_saved(
    folder: RunFolder, say: Callable[[str], None], *, trust: bool, workflow: str | None = None
) -> DictConfig:
    """The config of a run, without keys that earlier versions gave to every algorithm and this one does not read.

    workflow: the only `workflow._target_` that may be imported; None: any, since `load_config` has checked it
    """
    if folder.exported:
        raise LabError(
            f"{folder.path} is an exported agent and cannot be resumed: it has no replay and no optimizer state. "
            f"Start a new run from its weights: rl-lab train load.path={folder.weights}"
        )
    config = folder.load_config(trust=trust)
    plain: Any = OmegaConf.to_container(config)
    same = workflow is None or select(config, "workflow._target_") == workflow
    dropped = drop_unread(plain) if same else []
    if dropped:
        say(f"resume: {', '.join(dropped)} dropped from the saved config: the algorithm does not read it")
        config = OmegaConf.create(plain)
        OmegaConf.set_struct(config, True)
    return config


def _resume_changed(
    folder: RunFolder,
    before: Any,
    config: DictConfig,
    say: Callable[[str], None],
    callbacks: Sequence[Any],
    *,
    trust: bool = False,
) -> RunResult:
    folder.check_links(trust=trust)
    after: Any = to_plain(config)
    check_config(after)
    differences = describe_differences(before, after)
    refuse_unsafe(differences)
    for path, (old, new) in sorted(differences.items()):
        if path not in ("run_dir", "output_root"):
            say(f"resume: {path}: {old!r} -> {new!r}")
    with _lock(folder) as lock:
        spec, form = _saved_form(folder)
        return _run(folder, config, spec, form, say, lock, changed=bool(differences), callbacks=callbacks)


def _run(
    folder: RunFolder,
    config: DictConfig,
    spec: Spec,
    form: Mapping[str, Any] | None,
    say: Callable[[str], None],
    lock: RunLock | _NoLock,
    *,
    changed: bool = False,
    callbacks: Sequence[Any] = (),
) -> RunResult:
    """Build the run, restore its checkpoint if it has one, and train. The caller holds the lock.

    changed: config.yaml has other values; it is written once the run could be built and restored
    """
    say = ignore_output_errors(say)
    keep = config.training.checkpoint
    checkpoints = CheckpointManager(
        folder.checkpoints,
        keep=int(keep.keep),
        keep_weights=int(keep.keep_weights),
        on_damaged_replay=str(config.training.get("on_damaged_replay", "older")),
        on_warning=say,
    )
    ranks.on_lost(lambda error: _describe_lost(error, folder, checkpoints))
    loaded = _find_checkpoint(folder, config, spec, checkpoints, say)
    with _report_write_errors(folder):
        logger = _make_logger(folder, config, loaded)
    shown = str(config.logging.progress) if ranks.is_first() else "off"
    progress = Progress(mode=shown, title=str(config.experiment.name))
    run = None
    seconds, before = 0.0, 0
    try:
        say(f"run folder: {folder.path}")
        if ranks.size() > 1:
            from rl_lab.launch.ranks import describe_ranks

            say(describe_ranks(config))
        progress.__enter__()  # it shows that the run starts; `finally` ends it
        run = _build(config, spec, logger, checkpoints, progress)
        run.orchestrator.callbacks = _callbacks(config, run, callbacks)
        if not ranks.is_first():
            run.orchestrator.say = _say_nothing
        run.orchestrator.check_folder = lock.check
        run.orchestrator.side_jobs.write = folder.write_error
        native = {} if form is None else {"native": form}
        run.orchestrator.info = {"config": to_plain(config), "spec": run.spec.to_dict(), **native}
        if config.load.path and loaded is None:  # a checkpoint has the weights that became of them
            _load_weights(config, run)
        if loaded is not None:
            empty = checkpoints.restore_buffers(loaded, run.context.buffers)
            run.orchestrator.restore(loaded.state, empty_buffers=empty)
            step, updates = (loaded.state["phase_state"]["totals"][key] for key in ("env_steps", "updates"))
            at = f"step {step}" if step or not updates else point_of(step, updates)
            say(f"resumed at {at} from {loaded.path}")
            if (saved := saved_ranks(loaded.state)) != ranks.size():
                from rl_lab.launch.ranks import describe_change

                say(describe_change(saved))
        ranks.same_weights(run.context.modules())
        if changed and ranks.is_first():
            with _report_write_errors(folder):
                folder.save_config(config, signed=folder.trusted)
        elif folder.trusted and ranks.is_first():
            folder.sign()
        if loaded is None:
            _log_config(logger, config)
            _check_updates(config, run)
        if run.orchestrator.storage is not None:
            run.orchestrator.watch = UpdateWatch(run.orchestrator.storage)
        if config.training.profile and ranks.is_first():
            from rl_lab.orchestration.diagnostics import Trace

            run.orchestrator.trace = Trace(
                folder.path / "profile" / "trace.json", int(config.training.profile)
            )
        _describe_memory(run, say)
        scheduler = run.orchestrator.scheduler
        before = scheduler.totals["env_steps"]
        if loaded is not None and scheduler.current_phase() is None:
            total = max(2 * (scheduler.total_timesteps or before), 1)
            say(
                f"nothing left to do: the run has its {before:,} steps; continue with training.total_timesteps={total}"
            )
        begun = time.perf_counter()
        with progress:
            run.orchestrator.run()
        seconds = time.perf_counter() - begun
        ended = run.orchestrator.interrupted or run.orchestrator.ended is not None
        if run.orchestrator.watch is not None and not ended:
            run.orchestrator.watch.finished(run.orchestrator.scheduler)
    except ranks.RankLostError as error:
        raise ranks.RankLostError(_describe_lost(error, folder, checkpoints), quiet=error.quiet) from None
    except RunFolderLostError as lost:
        if run is None or lost.moved_to is None:
            raise
        raise _save_where_it_is(run, checkpoints, lost, say) from lost
    except LabError as error:
        if checkpoints.has_any():
            _save_traceback(folder, error)
        raise
    except (Exception, SystemExit) as error:
        from rl_lab.orchestration.diagnostics import is_out_of_memory, out_of_memory

        _save_traceback(folder, error, say)
        if isinstance(error, SystemExit):
            raise LabError(f"the run was ended by sys.exit({error.code!r}) in its own code") from error
        if is_out_of_memory(error):
            raise out_of_memory(error, run.orchestrator if run else None) from error
        raise
    finally:
        progress.close()
        logger.close()
        if run is not None:
            run.close()
    return _finish(folder, run, say, seconds, before)


def _callbacks(config: DictConfig, run: Run, given: Sequence[Any]) -> Any:
    """Return the callbacks of the config, that of `training.stop_when`, and those given in Python; None without any."""
    written = config.get("callbacks") or {}
    rule = to_plain(config.training.get("stop_when")) or {}
    if not (
        written or given or any(rule.get(key) is not None for key in ("at_least", "at_most", "patience"))
    ):
        return None
    from rl_lab.orchestration.callbacks import Callbacks, StopRule, StopWhen, named

    callbacks = {str(name): instantiate(f"callbacks.{name}", node) for name, node in written.items()}
    extra = named(given)
    for name in callbacks.keys() & extra.keys():
        raise ConfigError(
            f"callbacks.{name} is in the config and was also given in Python: leave one of them out"
        )
    callbacks |= extra
    stop = StopRule.from_config(rule)
    if stop is not None:
        orchestrator = run.orchestrator
        hooks = [use.kind for phase in orchestrator.scheduler.phases for use in phase.hooks]
        evaluates = orchestrator.cadences.evaluate is not None or "evaluate" in hooks
        callbacks[STOP_WHEN] = StopWhen(stop, evaluates=evaluates)
    return Callbacks(callbacks)


def _log_config(logger: ExperimentLogger, config: DictConfig) -> None:
    """Show the config in TensorBoard's text tab, and what runs are compared by in its HParams tab."""
    lines = OmegaConf.to_yaml(config).splitlines()
    logger.text("config", "\n".join(f"    {line}" for line in lines))  # Markdown: indented lines are code
    values = {f"algorithm.{key}": value for key, value in _leaves(to_plain(config.algorithm))}
    values |= {key: select(config, key) for key in COMPARED}
    logger.hparams(values)


# Beside `algorithm`: what runs are compared by in TensorBoard's HParams tab.
COMPARED = (
    "experiment.name",
    "experiment.seed",
    "environment.task",
    "environment.num_envs",
    "training.total_timesteps",
    "training.precision",
)


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, node


def _make_logger(folder: RunFolder, config: DictConfig, loaded: Loaded | None) -> Any:
    if not ranks.is_first():
        return SilentLogger()
    return ExperimentLogger(
        folder.path,
        tensorboard=bool(config.logging.tensorboard),
        wandb_mode=str(config.wandb.mode),
        wandb_options={"project": config.wandb.project, "name": config.experiment.name},
        trackio=config.logging.get("trackio"),
        resume_step=loaded.step if loaded else None,
        resume_bytes=int(loaded.info.get("metrics_bytes", 0)) if loaded else 0,
    )


def _describe_lost(error: Exception, folder: RunFolder, checkpoints: CheckpointManager) -> str:
    """Add to the message about a lost rank where the run can be continued."""
    steps = checkpoints.steps()
    if not steps:
        return f"{error}; there is no checkpoint yet"
    command = ranks.command(f"resume {folder.path}")
    return f"{error}; the last whole checkpoint is that of step {steps[-1]}, continue with: {command}"


@contextlib.contextmanager
def _report_write_errors(folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LabError(f"{folder.path} cannot be written: {error}") from error


def ignore_output_errors(say: Callable[[str], None]) -> Callable[[str], None]:
    """Wrap `say`: a closed pipe or terminal, or a log file on a full disk, must not end the run."""

    def say_safely(text: str) -> None:
        with contextlib.suppress(OSError):
            say(text)

    return say_safely


def _build(
    config: DictConfig, spec: Spec, logger: Any, checkpoints: CheckpointManager, progress: Progress
) -> Run:
    """Build the run; unexpected errors are caused by the config or by a part that it names."""
    try:
        return build_run(
            config, spec, logger=logger, checkpoints=checkpoints, progress=progress, say=progress.say
        )
    except LabError:
        raise
    except Exception as error:
        from rl_lab.orchestration.diagnostics import is_out_of_memory

        if is_out_of_memory(error):
            raise
        raise ConfigError(f"config: the run cannot be built from it: {unexpected(error)}") from error


def _find_checkpoint(
    folder: RunFolder,
    config: DictConfig,
    spec: Spec,
    checkpoints: CheckpointManager,
    say: Callable[[str], None],
) -> Loaded | None:
    """Return the checkpoint that training continues from, or None for a new run."""
    if checkpoints.has_any():  # a checkpoint of this run takes precedence over training.resume_path
        loaded = checkpoints.load()
        check_same_config(folder.config_file, loaded.info.get("config"), to_plain(config))
        check_same_spec(folder.spec_file, loaded.info.get("spec"), spec)
        return loaded
    path = config.training.resume_path
    if not path:
        return None
    loaded = CheckpointManager.load_file(Path(str(path)), on_warning=say)
    if "phase_state" not in loaded.state:
        raise CheckpointError(
            f"training.resume_path={path} has weights only and cannot be resumed: use load.path={path} to "
            "start a new run from them"
        )
    return loaded


def _save_traceback(
    folder: RunFolder, error: BaseException, say: Callable[[str], None] = lambda text: None
) -> None:
    """Write the traceback to error.txt: the command line prints only one line of it."""
    with contextlib.suppress(OSError):
        file = folder.write_error("the run failed", error)
        say(f"the run failed; the complete traceback is in {file}")


def _save_where_it_is(
    run: Run, checkpoints: CheckpointManager, lost: RunFolderLostError, say: Callable[[str], None]
) -> LabError:
    """Save a run whose folder was moved to the folder's new place; return the error that ends it."""
    assert lost.moved_to is not None
    checkpoints.folder = lost.moved_to / "checkpoints"
    run.orchestrator.check_folder = lambda: None
    try:
        run.orchestrator.save(last=True)
    except Exception as error:
        return LabError(f"{lost}; its state was not saved there: {one_line(error)}")
    return LabError(f"{lost}; it was saved there, continue with: rl-lab resume {lost.moved_to}")


def _load_weights(config: DictConfig, run: Run) -> None:
    """Load weights of another run: the parts that `load:` names, or all parts that both runs have."""
    named = {key: value for key, value in to_plain(config.load).items() if value is not None}
    if set(named) == {"path"}:
        named |= {"components": "all", "controllers": "all"}
    convert = getattr(run.workflow, "published_weights", None)  # of the authors' code
    loaded = load_weights(Path(str(named["path"])), convert, warnings.warn)
    components = dict(run.context.components.items())
    partial_load(loaded.state, named, components, dict(run.context.controller_manager.modules()))
    run.workflow.weights_loaded()
    statistics = loaded.state.get("observation_statistics")
    normalizer = getattr(run.context.train_environment, "normalizer", None)
    if statistics is not None and normalizer is not None:
        normalizer.set_state(statistics)  # the weights were trained with these statistics


def _check_updates(config: DictConfig, run: Run) -> None:
    """Raise ConfigError if the run would end without an update."""
    storage, scheduler = run.orchestrator.storage, run.orchestrator.scheduler
    if storage is None:
        return
    check_updates(
        scheduler.phases,
        storage.hooks,
        storage.buffers,
        num_envs=int(config.environment.num_envs),
        ranks=ranks.size(),
        total_timesteps=scheduler.total_timesteps,
        time_limit=config.environment.get("time_limit"),
        steps_known=run.orchestrator.own_collect_step is None,
        collects_only=bool(config.load.path),
    )


def _describe_memory(run: Run, say: Callable[[str], None]) -> None:
    """Print the expected memory of the replay buffers and of the model with gradients and optimizer state."""
    for name, buffer in run.context.buffers.items():
        say(f"memory: {name}: {buffer.describe()}")
    parameters = run.context.count_parameters()
    # Weights, gradients and two optimizer moments in float32; a CUDA graph keeps the activations.
    say(f"memory: model: {parameters:,} parameters, about {parameters * 16 / 2**20:.1f} MiB to train")
    if any(runner.captures for runner in run.orchestrator.runners.values()):
        say("memory: graph: activations of one update; measured and printed when a hook is captured")


def _finish(
    folder: RunFolder, run: Run, say: Callable[[str], None], seconds: float, steps_before: int
) -> RunResult:
    orchestrator = run.orchestrator
    best = orchestrator.best
    if orchestrator.interrupted:
        say(f"stopped and saved; continue with: {ranks.command(f'resume {folder.path}')}")
    return RunResult(
        path=folder.path,
        interrupted=orchestrator.interrupted,
        counters=dict(orchestrator.scheduler.totals),
        return_mean=orchestrator.log.last_return,
        eval_return_mean=orchestrator.log.last_evaluation,
        best_return=best[0] if best else None,
        best_step=best[1] if best else None,
        best_updates=orchestrator.best_updates,
        ended=orchestrator.ended or None,
        seconds=seconds,
        steps_here=orchestrator.scheduler.totals["env_steps"] - steps_before,
        first_rank=ranks.is_first(),
    )
