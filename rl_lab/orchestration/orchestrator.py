"""The training loop: ask the scheduler for the next action, run it, then log, evaluate, report and save.

An online phase repeats two actions:

    collect   Collector.step -> Storage.store          one row per environment
    update    HookRunner.run                           sample -> step -> write back

The loop does not depend on the algorithm: workflow, buffers and logger are passed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl_lab.errors import (
    CheckpointError,
    ConfigError,
    EnvironmentFaultError,
    LabError,
    RunFolderLostError,
    one_line,
    unexpected,
)
from rl_lab.orchestration.collector import Collector
from rl_lab.orchestration.evaluator import Evaluator
from rl_lab.orchestration.phase_scheduler import PhaseScheduler, TimeLeft
from rl_lab.orchestration.phases import Cadences, Every, HookUse, PhaseDefinition
from rl_lab.orchestration.run_log import ENDED_EARLY, STOP_WHEN, RunLog
from rl_lab.orchestration.run_state import RunState, share_statistics, state_of_rank, with_state_of_ranks
from rl_lab.orchestration.side_jobs import SideJobs
from rl_lab.orchestration.update_check import UpdateWatch
from rl_lab.orchestration.updates import Runner, Storage, TransformRunner
from rl_lab.protocols import CollectStep, VectorEnvironment, Workflow
from rl_lab.utils import ranks
from rl_lab.utils.checkpoint.manager import CheckpointManager
from rl_lab.utils.seeding import derive_seed
from rl_lab.utils.stopping import stop_on_signals

if TYPE_CHECKING:
    from rl_lab.orchestration.callbacks import Callbacks
    from rl_lab.orchestration.diagnostics import Trace
    from rl_lab.orchestration.remote_collector import RemoteCollector

# A mistake in the config that shows before this much work is not worth a checkpoint: a new run is quicker.
MISTAKE_S = 60.0
QUIET_STEPS = 500  # of each environment without the end of an episode, before that is said


@dataclass
class Settings:
    """Settings of a run that belong neither to the algorithm nor to its phases."""

    seed: int = 0
    eval_episodes: int = 10
    eval_sample: bool = False
    eval_temperature: float = 1.0
    eval_video: bool = False
    on_nonfinite: str = "stop"  # stop | continue
    on_save_failure: str = "continue"  # stop | continue


@dataclass
class Orchestrator:
    """Runs the training loop. All its parts are passed in, so that a test can replace each of them."""

    workflow: Workflow
    scheduler: PhaseScheduler
    storage: Storage | None
    runners: Mapping[str, Runner]  # by name of the hook
    log: RunLog
    run_state: RunState
    collector: Collector | RemoteCollector | None = None
    own_collect_step: CollectStep | None = None  # of a workflow that steps the environments itself
    cadences: Cadences = field(default_factory=Cadences)
    settings: Settings = field(default_factory=Settings)
    checkpoints: CheckpointManager | None = None
    evaluator: Evaluator | None = None
    environment: VectorEnvironment | None = None  # of training
    trace: Trace | None = None
    watch: UpdateWatch | None = None
    info: Mapping[str, Any] = field(default_factory=dict)  # added to the manifest of every checkpoint
    callbacks: Callbacks | None = None
    check_folder: Callable[[], None] = lambda: None  # raises if the run folder is not this run's any more
    side_jobs: SideJobs = field(default_factory=SideJobs)
    say: Callable[[str], None] = print
    interrupted: bool = False

    def __post_init__(self) -> None:
        self._running_phase: PhaseDefinition | None = None
        self._reported_shortages: set[str] = set()  # hooks
        self._succeeded: set[str] = set()  # actions that have succeeded at least once
        self._best_return = float("-inf")
        self._best_step: int | None = None
        self._best_updates: int | None = None
        self._activity: str | None = None  # what a long action is doing, for the progress display
        self._time_left: TimeLeft | None = None
        self._saved_at: dict[str, int] = {}
        self._logged_at: list[int] = []  # `_work_done` at the last log line
        self._step_open = False  # environments were stepped, and their rows are not stored yet
        self._began = (time.monotonic(), dict(self.scheduler.totals))
        self._callback_states: dict[str, Any] = {}
        self._told = False  # that no episode has ended
        self.ended: str | None = None  # which callback ended the run before its last step, and why

    # ---------------------------------------------------------------- the loop

    def run(self) -> None:
        """Run all phases, or until a signal requests a stop."""
        self.log.begin(self.scheduler.totals)
        self._began = (time.monotonic(), dict(self.scheduler.totals))
        self._time_left = TimeLeft(self.scheduler)
        self.tick()
        with stop_on_signals(self._interrupt), self._save_on_failure():
            self._call_back("on_begin")
            ended_before = self.ended is not None
            while not self._all_stop():
                action = self.scheduler.next_action()
                phase = self.scheduler.current_phase()
                if phase is not self._running_phase:
                    self._enter(phase)
                self._run_due_cadences()  # next_action() may have ended a cycle
                if action is None or phase is None:
                    break
                try:
                    self.run_action(action, phase)
                except Exception as error:
                    if self.interrupted and isinstance(error, EnvironmentFaultError) and ranks.size() == 1:
                        break  # an environment hangs: save without its answer
                    self._explain_first_failure(action, phase, error)
                    raise
                self._succeeded.add(action)
                self._run_due_cadences()
                self.tick()
                if self.trace is not None:
                    with self._side_job("profile"):
                        self.trace.tick(self.scheduler.totals)
            self._finish(ended_now=self.ended is not None and not ended_before)

    def run_action(self, action: str, phase: PhaseDefinition) -> None:
        """Run one action and report it to the scheduler."""
        if action == "collect":
            self._collect(phase)
        elif action == "evaluate":
            use = next(use for use in phase.hooks if use.name == "evaluate")
            self.evaluate(episodes=use.options.get("episodes"), required=phase.type == "eval_only")
            self.scheduler.advance(action)
        else:
            done = self.runners[action].perform(phase, self.scheduler, self._should_stop)
            if done is not None:
                if done.steps:
                    share_statistics(getattr(self.environment, "normalizer", None))
                self.scheduler.advance(action, steps=done.steps, done=done.finished)

    def _collect(self, phase: PhaseDefinition) -> None:
        """Step the environments once and store the rows."""
        view = self.scheduler.view()
        if self.own_collect_step is not None:
            self._step_open = True
            result = self.own_collect_step(self.scheduler.totals["env_steps"], phase=view)
            finished = self.workflow.finished_episodes()
        else:
            assert self.collector is not None, "a phase collects, but this run was built without a Collector"
            result = self.collector.step(self.workflow, self.workflow.collect_mode(view))
            self._step_open = True
            finished = self.collector.tracker.drain()
        if result is None:
            raise LabError(
                f"phase '{phase.name}' has the hook collect, but {type(self.workflow).__name__}.collect_step "
                "returned None: return a CollectResult, or remove the hook"
            )
        if result.trajectory is not None and self.storage is not None:
            self.storage.store(phase, result.trajectory)
        self._step_open = False
        with self._side_job("log"):
            self.log.collected(result.metrics, finished)
        take_failures = getattr(self.environment, "take_side_failures", None)
        for failure in take_failures() if take_failures is not None else ():
            self.side_jobs.failed("training video", self.scheduler.totals["env_steps"], failure)
        steps, episodes = ranks.host_sum([result.steps, max(result.episodes, len(finished))])
        share_statistics(getattr(self.environment, "normalizer", None))
        if self.storage is not None and ranks.size() > 1:
            self.storage.forget_ready()
        self.scheduler.advance("collect", steps=int(steps), episodes=int(episodes))
        for name in self.scheduler.skipped - self._reported_shortages:
            self._reported_shortages.add(name)
            shortage = self.storage.shortage(name, phase) if self.storage is not None else "no buffers"
            self.say(f"{name} waits for data: {shortage}")
        if self.watch is not None:
            self.watch.collected(finished, self.scheduler, phase)

    def _explain_first_failure(self, action: str, phase: PhaseDefinition, error: Exception) -> None:
        """Raise ConfigError if the first call of an action failed with an error that nobody foresaw."""
        from rl_lab.orchestration.diagnostics import is_out_of_memory

        if isinstance(error, LabError) or action in self._succeeded or is_out_of_memory(error):
            return
        raise ConfigError(
            f"phase '{phase.name}': the first '{action}' failed, because parts of the config do not "
            f"fit together or because {type(self.workflow).__name__} has a bug: {unexpected(error)}"
        ) from error

    # ---------------------------------------------------------------- phases

    def _enter(self, phase: PhaseDefinition | None) -> None:
        """Start a phase: freeze its parts, check that an offline phase has enough data, log that it begins."""
        for name in self._running_phase.freeze if self._running_phase else ():
            self._part(name).requires_grad_(True)
        self._running_phase = phase
        if phase is None:
            return
        for name in phase.freeze:
            self._part(name).requires_grad_(False)
        if phase.type == "offline":
            for use in phase.hooks:
                if use.kind == "update":
                    self._require_data(use, phase)
        if len(self.scheduler.phases) > 1:
            with self._side_job("log"):
                self.log.begin_phase(self.scheduler.totals, self._headline())

    def _require_data(self, use: HookUse, phase: PhaseDefinition) -> None:
        shortage = self.storage.shortage(use.name, phase) if self.storage is not None else ""
        if shortage:
            raise LabError(
                f"phase '{phase.name}' is offline and has too little data for {use.name}: {shortage}"
            )

    def _part(self, name: str) -> Any:
        parts = dict(self.run_state.components)
        if self.run_state.controller_manager is not None:
            parts |= dict(self.run_state.controller_manager.items())
        return parts[name]

    # ---------------------------------------------------------------- progress

    @property
    def best(self) -> tuple[float, int | None] | None:
        """Return and step of the best evaluation, or None; the step is None if an older version saved the run."""
        return None if self._best_return == float("-inf") else (self._best_return, self._best_step)

    @property
    def best_updates(self) -> int | None:
        """Updates before the best evaluation; None if there is none, or if an older version saved the run."""
        return self._best_updates

    def tick(self) -> None:
        """Show the counters on the progress display, if it was not drawn a moment ago."""
        self.log.tick(self.scheduler.totals, self._headline)

    def _headline(self) -> dict[str, Any]:
        """What the progress display shows of phases, epochs and time left."""
        phase, phases = self.scheduler.current_phase(), self.scheduler.phases
        shown: dict[str, Any] = {
            "phase": phase.name if phase else "done",
            "phase_progress": self.scheduler.progress(),
            "activity": self._activity,
        }
        if len(phases) > 1:
            assert self._time_left is not None
            share, left = self._time_left.estimate()
            index = self.scheduler.phase_index()
            shown |= {"phase_number": min(index + 1, len(phases)), "phases": len(phases), "share": share}
            shown |= {"seconds_left": left, "epochs": max(item.iteration for item in phases) + 1}
            shown["epoch"] = phases[min(index, len(phases) - 1)].iteration + 1
        return shown

    @contextmanager
    def _doing(self, activity: str) -> Iterator[None]:
        self._activity = activity
        self.tick()
        try:
            yield
        finally:
            self._activity = None

    # ---------------------------------------------------------------- cadences

    def _run_due_cadences(self) -> None:
        cadences = self.cadences
        # If only the cycle counter changed, the previous line has the same values.
        if self._is_due(cadences.log) and self._logged_at != self._work_done():
            self.write_log()
        if self._is_due(cadences.evaluate):
            self.evaluate()
        if self._is_due(cadences.report):
            self.report()
        if self._is_due(cadences.checkpoint):
            self.save()
        if self._is_due(cadences.epoch_weights):
            self.save_epoch_weights()

    def _is_due(self, cadence: Every | None) -> bool:
        """Return whether a counter has passed a multiple of the cadence since the last call that returned True."""
        if cadence is None or not cadence.due(self.scheduler.totals):
            return False
        self.check_folder()
        cadence.fired(self.scheduler.totals)
        return True

    def _side_job(self, name: str, *, required: bool = False) -> AbstractContextManager[None]:
        return self.side_jobs.guard(name, self.scheduler.totals["env_steps"], required=required)

    def _work_done(self) -> list[int]:
        return [self.scheduler.totals["env_steps"], *self.scheduler.hook_calls.values()]

    def write_log(self, *, last: bool = False) -> dict[str, float]:
        self._logged_at = self._work_done()
        phase = self.scheduler.current_phase()
        meters = [(runner.hook.prefix, runner.meter) for runner in self.runners.values()]
        metrics = self.log.write(
            self.scheduler.totals,
            meters,
            phase=phase.name if phase else "done",
            progress=self.scheduler.progress(),
            failures=self.side_jobs.metrics(),
            guard=self._side_job("log"),
            last=last,
            headline=self._headline(),
        )
        self._call_back("on_log", metrics)
        self._tell_without_episodes()
        self._check_finite(metrics)
        return metrics

    def evaluate(self, episodes: int | None = None, *, required: bool = False) -> dict[str, float]:
        """Run evaluation episodes, log their returns, and save the weights if they are the best so far.

        returns: the metrics, empty if the evaluation failed; required: then raise instead
        """
        if self.evaluator is None:
            raise ConfigError("hook 'evaluate' needs an Evaluator, but this run was built without one")
        if not ranks.is_first():
            return {}
        step = self.scheduler.totals["env_steps"]
        held_out = self.storage.buffers.get("eval") if self.storage is not None else None
        count = episodes or self.settings.eval_episodes
        evaluation = None

        def on_rows(rows: Mapping[str, Any]) -> None:
            if held_out is not None:
                held_out.add(rows)
            self.tick()

        with self._side_job("evaluation", required=required), self._doing(f"evaluating {count} episodes"):
            evaluation = self.evaluator.run(
                self.workflow,
                episodes=count,
                label=step,
                sample=self.settings.eval_sample,
                temperature=self.settings.eval_temperature,
                video=self.settings.eval_video,
                on_rows=on_rows,
            )
        if evaluation is None:
            return {}
        metrics = evaluation.metrics()
        with self._side_job("log"):
            self.log.evaluation(metrics, self.scheduler.totals)
        with self._side_job("video"):
            if evaluation.video_error is not None:
                raise evaluation.video_error
            if evaluation.frames:
                frames = np.stack(evaluation.frames).transpose(0, 3, 1, 2)
                self.log.logger.video("eval/episode", frames, step=step, fps=30, folder="episodes/test")
        if metrics["eval/return_mean"] >= self._best_return:  # on a tie, prefer the longer trained weights
            self._best_return, self._best_step = metrics["eval/return_mean"], step
            self._best_updates = self.scheduler.totals["updates"]
            self.save(tag="best")
        self._call_back("on_evaluation", metrics)
        return metrics

    def report(self) -> None:
        """Log the workflow's report on one batch, sampled with a generator of its own."""
        phase = self.scheduler.current_phase()
        if not ranks.is_first():
            return
        specs = [runner.hook.batch for runner in self.runners.values() if runner.hook.batch is not None]
        if phase is None or not specs or self.storage is None:
            return
        spec = replace(specs[0], sampler="uniform")
        held_out = self.storage.buffers.get("eval")
        source = held_out if held_out is not None and held_out.ready(spec) else self.storage.source(phase)
        if not source.ready(spec):
            return
        step = self.scheduler.totals["env_steps"]
        generator = torch.Generator().manual_seed(derive_seed(self.settings.seed, "report", step))
        report: Mapping[str, Any] = {}
        with self._side_job("report"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator.initial_seed())
            report = self.workflow.report(source.sample(spec, generator=generator))
        scalars: dict[str, float] = {}
        for name, value in report.items():
            with self._side_job("report"):
                self._log_reported(name, value, step, scalars)
        if scalars:
            with self._side_job("log"):
                self.log.logger.scalars(scalars, **self.log.counters(self.scheduler.totals))
            self._call_back("on_log", scalars)

    def _tell_without_episodes(self) -> None:
        """Say once that no episode has ended: returns are logged when one has, so there are none to see."""
        steps, environments = self.scheduler.totals["env_steps"], getattr(self.environment, "num_envs", 0)
        if self._told or not environments or self.scheduler.totals["episodes"]:
            return
        if steps >= QUIET_STEPS * environments:
            self._told = True
            self.say(
                f"no episode has ended after {steps // environments:,} steps of each of {environments} environments, and "
                "returns are shown when one has: environment.time_limit ends episodes earlier"
            )

    def _log_reported(self, name: str, value: Any, step: int, scalars: dict[str, float]) -> None:
        """Log an image (C, H, W) or a video (T, C, H, W) of the report, or add its number to `scalars`."""
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
        if getattr(array, "ndim", 0) == 3:
            self.log.logger.image(f"report/{name}", array, step=step, folder="reconstructions")
        elif getattr(array, "ndim", 0) == 4:
            folder = "episodes/imagination" if name.startswith("imagination") else "reconstructions"
            self.log.logger.video(f"report/{name}", array, step=step, fps=15, folder=folder)
        else:
            scalars[f"report/{name}"] = float(array)

    # ---------------------------------------------------------------- checkpoints and stopping

    def save(self, tag: str | None = None, *, last: bool = False) -> None:
        """Write a checkpoint; with a `tag` ("best") only weights. A failed save keeps earlier checkpoints.

        last: this is the final checkpoint, so a failure is an error whatever `on_save_failure` is.
        """
        if self.checkpoints is None or (tag is not None and not ranks.is_first()):
            return
        self.check_folder()
        state = self.run_state.gather({"cadences": self.cadences.get_state(), **self._own_state()})
        if self._step_open:
            _abandon_episodes(state["collector"])
        if tag is None:
            state = with_state_of_ranks(state)
        buffers: Mapping[str, Any] = {}
        if self.storage is not None and tag is None:
            buffers = self.storage.buffers
        self.log.logger.flush()
        info = {
            "metrics_bytes": self.log.logger.metrics_bytes(),
            "best_return": self._best_return,
            "updates": self.scheduler.totals["updates"],
            **self.info,
        }
        step, save = self.scheduler.totals["env_steps"], self.checkpoints.save
        try:
            if tag is None:  # no rank goes on before the checkpoint is whole, or none has it
                path = ranks.together(lambda: save(step, state, buffers, info=info))[0]
            else:
                path = save(step, state, buffers, info=info, tag=tag)
        except CheckpointError as error:
            if last or self.settings.on_save_failure == "stop":
                raise
            self.say(f"checkpoint not saved, training continues: {error}")
        else:
            self._saved_at = dict(self.scheduler.totals) if tag is None else self._saved_at
            self._call_back("on_save", path)

    def save_epoch_weights(self) -> None:
        """Save the weights at the end of this cycle in a file of their own."""
        self.save(tag=f"epoch_{self.scheduler.totals['cycles']}")

    def restore(self, state: Mapping[str, Any], *, empty_buffers: Sequence[str] = ()) -> None:
        """Continue from a checkpoint's state; `empty_buffers` are buffers whose rows were not restored."""
        state = state_of_rank(state)
        self.run_state.restore(state, empty_buffers)
        self._reported_shortages = set(self.scheduler.skipped)
        self.cadences.set_state(state["cadences"])
        own = state["orchestrator"]
        for name, runner in self._transforms().items():
            runner.position = int(own["transforms"].get(name, 0))
        self._best_return = float(own["best_return"])
        self._best_step, self._best_updates = own.get("best_step"), own.get("best_updates")
        self._logged_at = [int(count) for count in own.get("logged_at", [])]
        self.side_jobs.set_state(own.get("side_failures", {}))
        self._callback_states = dict(own.get("callbacks", {}))
        if self.callbacks is not None:
            self.callbacks.set_state(self._callback_states)
        if "log" in own:  # checkpoints since 2026-11-18
            self.log.set_state(own["log"]["line"])
            for name, meter in own["log"]["meters"].items():
                self.runners[name].meter.set_state(meter)

    def _own_state(self) -> dict[str, Any]:
        return {
            "orchestrator": {
                "transforms": {name: runner.position for name, runner in self._transforms().items()},
                "best_return": self._best_return,
                "best_step": self._best_step,
                "best_updates": self._best_updates,
                "logged_at": list(self._logged_at),
                "side_failures": self.side_jobs.get_state(),
                "callbacks": self._states_of_callbacks(),
                # A run that is killed and resumed writes the lines of an uninterrupted one.
                "log": {
                    "line": self.log.get_state(),
                    "meters": {name: runner.meter.get_state() for name, runner in self.runners.items()},
                },
            }
        }

    def _transforms(self) -> dict[str, TransformRunner]:
        return {name: runner for name, runner in self.runners.items() if isinstance(runner, TransformRunner)}

    def _interrupt(self) -> None:
        self.interrupted = True

    def _should_stop(self) -> bool:
        return self.interrupted

    def end_early(self, name: str, reason: str) -> None:
        """End the run after the current action as if all its steps were done; the first reason counts."""
        if self.ended is None:
            self.ended = f"{name}: {reason}"

    def _call_back(self, method: str, *arguments: Any) -> None:
        if self.callbacks is not None:
            self.callbacks.call(self, method, *arguments)

    def _states_of_callbacks(self) -> dict[str, Any]:
        """Of this process, and those of objects that it was not given, for a later one."""
        if self.callbacks is None:
            return {name: state for name, state in self._callback_states.items() if name != STOP_WHEN}
        return self.callbacks.get_state(self.side_jobs, self.scheduler.totals["env_steps"])

    def _all_stop(self) -> bool:
        """Whether any rank was asked to stop, or a callback ended the run; all ranks save after the same action."""
        interrupted, ended = ranks.host_sum([self.interrupted, self.ended is not None])
        self.interrupted = interrupted > 0
        if ended and self.ended is None:  # callbacks are called on the first rank only
            self.ended = ""
        return self.interrupted or ended > 0

    def _finish(self, *, ended_now: bool = False) -> None:
        """Write the last log line and checkpoint, and close the environments of evolution.

        ended_now: a callback ended the run; metrics.jsonl has it, so that reports do not wait for further steps
        """
        self.check_folder()
        if self.log.logger is not None and self._logged_at != self._work_done():
            self.write_log(last=True)
        if self.scheduler.current_phase() is None:
            self.ended = None  # all steps were done anyway
        elif ended_now and self.ended and not self.interrupted:
            with self._side_job("log"):
                counters = self.log.counters(self.scheduler.totals)
                self.log.logger.scalars({ENDED_EARLY: 1.0}, **counters)
            self._saved_at = {}  # else a resumed run would drop this line: it follows the checkpoint
        self._call_back("on_end")
        for name, runner in self.runners.items():
            with self._side_job(f"closing {name}"):
                runner.close()
        if self.trace is not None:
            with self._side_job("profile"):
                self.trace.close()
        if self._saved_at != self.scheduler.totals:
            self.save(last=True)
        if self.side_jobs.counts:
            self.say(self.side_jobs.summary())

    def _check_finite(self, metrics: Mapping[str, float]) -> None:
        """Stop or report if updates were non-finite: hooks skip them on the device and count them."""
        bad = {key: value for key, value in metrics.items() if key.endswith("nonfinite") and value > 0}
        if not bad:
            return
        message = (
            f"{', '.join(bad)}: some updates had a non-finite loss or gradient and were skipped, "
            f"up to update {self.scheduler.totals['updates']}"
        )
        if self.settings.on_nonfinite == "stop":
            self.save()
            raise LabError(message + "; lower the learning rate, or set training.on_nonfinite=continue")
        self.say(message)

    @contextmanager
    def _save_on_failure(self) -> Iterator[None]:
        """Save a checkpoint before an error ends the run. A second Ctrl-C ends it without one."""
        try:
            yield
        except (Exception, SystemExit) as error:
            if self._is_worth_saving(error):
                try:
                    self.save()
                except Exception as second:  # what broke the run may break the save, too
                    self.say(f"the state at the end of the run was not saved: {one_line(second)}")
            raise

    def _is_worth_saving(self, error: BaseException) -> bool:
        """Return whether there is new work that a resumed run can use."""
        start, counters = self._began
        if (
            ranks.size() > 1  # the others are elsewhere, and a checkpoint needs all of them
            or isinstance(error, (CheckpointError, RunFolderLostError))
            or self._saved_at == self.scheduler.totals
        ):
            return False
        if isinstance(error, EnvironmentFaultError):
            return True
        if isinstance(error, ConfigError) and time.monotonic() - start < MISTAKE_S:
            return False
        return self.scheduler.totals != counters


def _abandon_episodes(collector: dict[str, Any]) -> None:
    """Let a resumed run start new episodes: the last rows of the open ones were not stored."""
    environment = collector.get("environment", {})
    if "forgotten" in environment:
        environment["forgotten"] = list(range(len(environment["actions"])))
