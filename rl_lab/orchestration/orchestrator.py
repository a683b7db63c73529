"""The training loop. It asks the scheduler what is next, has it done, and keeps the run safe and visible.

It knows no algorithm: workflows, buffers and loggers are what it was given.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from rl_lab.errors import CheckpointError, ConfigError, EnvironmentFaultError, LabError, unexpected
from rl_lab.orchestration.diagnostics import Trace, is_out_of_memory
from rl_lab.orchestration.evolution import Generations
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.orchestration.phases import Cadences, HookUse, PhaseDefinition
from rl_lab.orchestration.run_log import RunLog
from rl_lab.orchestration.run_state import RunState
from rl_lab.orchestration.updates import HookRunner
from rl_lab.records import Episode
from rl_lab.utils.seeding import derive_seed

# --------------------
# Ctrl-C, SIGTERM, SIGHUP and SIGUSR1: a request to stop.
#
# It is answered at once in words, and obeyed when the action under way is done.


# A terminal that closes sends SIGHUP; SLURM warns by SIGUSR1 where it is asked to. Not every system has them.
IF_DEFAULT = tuple(getattr(signal, name) for name in ("SIGHUP", "SIGUSR1") if hasattr(signal, name))


@contextmanager
def stop_on_signals(request: Callable[[], None]) -> Iterator[None]:
    """Inside, SIGTERM, SIGINT, SIGHUP and SIGUSR1 call `request`; a second SIGINT stops at once.

    SIGHUP and SIGUSR1 only where they would end the process: one that is ignored (`nohup`), or that the program around
    us handles, stays as it is.

    It is said at once, since the action may be an evaluation of minutes, and since a run that dies of something else
    meanwhile must not look as if nobody had asked it to stop.
    """
    asked = False

    def stop(number: int, frame: Any) -> None:
        nonlocal asked
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not asked:
            _say(number)
        asked = True
        request()

    free = [number for number in IF_DEFAULT if signal.getsignal(number) is signal.SIG_DFL]
    try:
        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, *free)}
    except ValueError:  # not the main thread: whoever runs us handles signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(number: int) -> None:
    again = "; once more stops at once, unsaved" if number == signal.SIGINT else ""
    text = f"{signal.Signals(number).name}: finishing what is under way, then saving{again}\n"
    with suppress(OSError):  # nobody listens any more
        os.write(2, text.encode())  # not print: the code that was interrupted may be in the middle of one


TRANSFORM_ROWS = 256  # time steps that one call of a transform hook is given


@dataclass
class Settings:
    """Choices of a run that are neither algorithm nor curriculum."""

    seed: int = 0
    eval_episodes: int = 10
    eval_sample: bool = False
    eval_video: bool = False
    on_nonfinite: str = "stop"  # stop | continue
    on_save_failure: str = "continue"  # stop | continue


@dataclass
class Orchestrator:
    """Owns the loop. Everything it needs is injected, so a test can run it with stand-ins only."""

    workflow: Any
    scheduler: PhaseScheduler
    storage: Any
    runners: Mapping[str, HookRunner]
    log: RunLog
    run_state: RunState
    cadences: Cadences = field(default_factory=Cadences)
    settings: Settings = field(default_factory=Settings)
    checkpoints: Any = None  # CheckpointManager
    evaluator: Any = None
    generations: Generations | None = None
    trace: Trace | None = None
    info: Mapping[str, Any] = field(default_factory=dict)  # goes into every checkpoint's manifest
    say: Callable[[str], None] = print
    interrupted: bool = False

    def __post_init__(self) -> None:
        self._entered: PhaseDefinition | None = None
        self._said: set[str] = set()
        self._done: set[str] = set()  # actions that have worked once
        self._transform_positions: dict[str, int] = {}
        self._best_return = float("-inf")
        self._saved_at: dict[str, int] = {}
        self._logged_at: list[int] = []

    # ---------------------------------------------------------------- the loop

    def run(self) -> None:
        """Walk the phases to their end, or until a signal asks to stop."""
        self.log.begin(self.scheduler.totals)
        with stop_on_signals(self._interrupt), self._saved_when_environments_fail():
            while not self.interrupted:
                action = self.scheduler.next_action()
                phase = self.scheduler.current_phase()
                if phase is not self._entered:
                    self._enter(phase)
                self._follow_cadences()  # finding the next action may have ended a cycle
                if action is None or phase is None:
                    break
                try:
                    self.do(action, phase)
                except Exception as error:
                    if isinstance(error, LabError) or action in self._done or is_out_of_memory(error):
                        raise
                    raise ConfigError(
                        f"the first '{action}' of phase '{phase.name}' failed: parts of the config do not fit each "
                        f"other, or {type(self.workflow).__name__} has a mistake: {unexpected(error)}"
                    ) from error
                self._done.add(action)
                self._follow_cadences()
                if self.trace is not None:
                    self.trace.tick(self.scheduler.totals)
            self._finish()

    def do(self, action: str, phase: PhaseDefinition) -> None:
        """Carry out one action and tell the scheduler."""
        if action == "collect":
            self._collect(phase)
            return
        if action == "evaluate":
            use = next(use for use in phase.hooks if use.name == "evaluate")
            self.evaluate(episodes=use.options.get("episodes"))
            self.scheduler.advance(action)
            return
        runner = self.runners[action]
        if runner.hook.kind == "update":
            stream = self.storage.stream(action, phase) if self.storage is not None else None
            key = (phase.freeze, id(stream))
            captured = runner.capture.captured
            runner.run(stream, self.scheduler.view(), self.scheduler.totals, key=key)
            if runner.capture.captured and not captured:
                self.say(
                    f"{action} is captured: its graph holds {runner.capture.graph_bytes / 2**20:,.0f} MiB"
                )
            self.scheduler.advance(action)
        elif runner.hook.kind == "transform":
            done = self._transform(action, runner, phase)
            self.scheduler.advance(action, done=done)
        else:
            steps = self._evolve(action, runner, phase)
            if steps is not None:
                self.scheduler.advance(action, steps=steps)

    def _collect(self, phase: PhaseDefinition) -> None:
        step = self.scheduler.totals["env_steps"]
        result = self.workflow.collect_step(step, phase=self.scheduler.view())
        if result is None:
            raise LabError(f"phase '{phase.name}' asks to collect, but {type(self.workflow).__name__} cannot")
        if result.trajectory is not None and self.storage is not None:
            self.storage.store(phase, result.trajectory)
        finished: list[Episode] = getattr(self.workflow, "finished_episodes", list)()
        self.log.collected(result.metrics, finished)
        self.scheduler.advance("collect", steps=result.steps, episodes=max(result.episodes, len(finished)))
        for name in self.scheduler.skipped - self._said:
            self._said.add(name)
            self.say(f"{name} waits for data: {self.storage.shortage(name, phase)}")

    def _transform(self, name: str, runner: HookRunner, phase: PhaseDefinition) -> bool:
        """Add columns to the next stretch of the phase's buffer; True when it has been walked to its end."""
        buffer = self.storage.buffers[next(iter(phase.buffer))]
        position = max(self._transform_positions.get(name, 0), buffer.oldest_position)
        count = min(TRANSFORM_ROWS, buffer.total_rows - position)
        if count > 0:
            with torch.no_grad():
                columns = runner.hook.step(buffer.read(position, count))
            buffer.write(position, columns)
        position += max(count, 0)
        done = bool(position >= buffer.total_rows)
        self._transform_positions[name] = 0 if done else position
        return done

    def _evolve(self, name: str, runner: HookRunner, phase: PhaseDefinition) -> int | None:
        """One generation. Returns environment steps; None when a signal broke it off."""
        if self.generations is None:
            raise ConfigError(f"hook '{name}' evolves, and this run has nothing to evolve in")
        stream = self.storage.stream(name, phase) if self.storage is not None else None
        outcome = self.generations.run(
            name,
            runner.hook.step,
            number=self.scheduler.hook_calls.get(name, 0),
            phase=self.scheduler.view(),
            done=self.scheduler.counts["updates"],
            total=phase.duration_updates or phase.duration_cycles,
            device=runner.device,
            batch=stream.next() if stream is not None else None,
            should_stop=lambda: self.interrupted,
        )
        if outcome is None:
            return None
        metrics, steps = outcome
        runner.meter.add(metrics)
        return steps

    # ---------------------------------------------------------------- phases

    def _enter(self, phase: PhaseDefinition | None) -> None:
        """A phase begins: freeze what it freezes, and refuse an offline phase that has too little data."""
        for name in self._entered.freeze if self._entered else ():
            self._part(name).requires_grad_(True)
        self._entered = phase
        if phase is None:
            return
        for name in phase.freeze:
            self._part(name).requires_grad_(False)
        if phase.type == "offline":
            for use in phase.hooks:
                if use.kind == "update":
                    self._require_data(use, phase)

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

    # ---------------------------------------------------------------- cadences

    def _follow_cadences(self) -> None:
        totals = self.scheduler.totals
        for name, every in self.cadences.items():
            if every.due(totals):
                every.fired(totals)
                if name == "log" and self._logged_at == self._work_done():
                    continue  # a cycle that ends moves its counter alone: the line before this has it all
                getattr(self, {"log": "write_log", "checkpoint": "save"}.get(name, name))()

    def _work_done(self) -> list[int]:
        return [self.scheduler.totals["env_steps"], *self.scheduler.hook_calls.values()]

    def write_log(self) -> dict[str, float]:
        self._logged_at = self._work_done()
        phase = self.scheduler.current_phase()
        meters = [(runner.hook.prefix, runner.meter) for runner in self.runners.values()]
        metrics = self.log.write(
            self.scheduler.totals,
            meters,
            phase=phase.name if phase else "done",
            progress=self.scheduler.progress(),
        )
        self._check_finite(metrics)
        return metrics

    def evaluate(self, episodes: int | None = None) -> dict[str, float]:
        """Play evaluation episodes, log them, and keep the best weights."""
        if self.evaluator is None:
            raise ConfigError("there is no evaluation environment in this run")
        step = self.scheduler.totals["env_steps"]
        held_out = self.storage.buffers.get("eval") if self.storage is not None else None
        evaluation = self.evaluator.run(
            self.workflow,
            episodes=episodes or self.settings.eval_episodes,
            label=step,
            sample=self.settings.eval_sample,
            video=self.settings.eval_video,
            on_rows=held_out.add if held_out is not None else None,
        )
        metrics: dict[str, float] = evaluation.metrics()
        self.log.evaluation(metrics, self.scheduler.totals)
        if evaluation.frames:
            frames = np.stack(evaluation.frames).transpose(0, 3, 1, 2)
            self.log.logger.video("eval/episode", frames, step=step, fps=30, folder="episodes/test")
        if metrics["eval/return_mean"] >= self._best_return:  # of equals, the one that trained longer
            self._best_return = metrics["eval/return_mean"]
            self.save(tag="best")
        return metrics

    def report(self) -> None:
        """What the workflow wants to show of a batch, drawn apart from training's own sampling."""
        phase = self.scheduler.current_phase()
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
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator.initial_seed())
            shown = self.workflow.report(source.sample(spec, generator=generator))
        scalars = {}
        for name, value in shown.items():
            array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
            if getattr(array, "ndim", 0) == 3:
                self.log.logger.image(f"report/{name}", array, step=step, folder="reconstructions")
            elif getattr(array, "ndim", 0) == 4:
                folder = "episodes/imagination" if name.startswith("imagination") else "reconstructions"
                self.log.logger.video(f"report/{name}", array, step=step, fps=15, folder=folder)
            else:
                scalars[f"report/{name}"] = float(array)
        if scalars:
            self.log.logger.scalars(scalars, **self.log.counters(self.scheduler.totals))

    # ---------------------------------------------------------------- checkpoints and stopping

    def save(self, tag: str | None = None, *, last: bool = False) -> None:
        """Write a checkpoint; `tag` ("best") keeps weights only. A full disk loses nothing that was saved.

        last: nothing comes after it, so a failure is an error whatever the config says.
        """
        if self.checkpoints is None:
            return
        state = self.run_state.gather({"cadences": self.cadences.get_state(), **self._own_state()})
        buffers = self.storage.buffers if self.storage is not None and tag is None else {}
        self.log.logger.flush()
        info = {
            "metrics_bytes": self.log.logger.metrics_bytes(),
            "best_return": self._best_return,
            **self.info,
        }
        try:
            self.checkpoints.save(self.scheduler.totals["env_steps"], state, buffers, info=info, tag=tag)
        except CheckpointError as error:
            if last or self.settings.on_save_failure == "stop":
                raise
            self.say(f"checkpoint not saved, training goes on: {error}")
        else:
            self._saved_at = dict(self.scheduler.totals) if tag is None else self._saved_at

    def epoch_weights(self) -> None:
        """The weights as they are at the end of this cycle, kept beside all others."""
        self.save(tag=f"epoch_{self.scheduler.totals['cycles']}")

    def restore(self, state: Mapping[str, Any], *, empty_buffers: Sequence[str] = ()) -> None:
        """Go on from a checkpoint's state; `empty_buffers` are those whose rows did not come with it."""
        self.run_state.restore(state, empty_buffers)
        self._said = set(self.scheduler.skipped)
        self.cadences.set_state(state["cadences"])
        own = state["orchestrator"]
        self._transform_positions = {name: int(position) for name, position in own["transforms"].items()}
        self._best_return = float(own["best_return"])
        self._logged_at = [int(count) for count in own.get("logged_at", [])]

    def _own_state(self) -> dict[str, Any]:
        return {
            "orchestrator": {
                "transforms": dict(self._transform_positions),
                "best_return": self._best_return,
                "logged_at": list(self._logged_at),
            }
        }

    def _interrupt(self) -> None:
        self.interrupted = True

    def _finish(self) -> None:
        """The last line, the last checkpoint, and the environments closed."""
        if self.log.logger is not None:
            self.write_log()
        if self.generations is not None:
            self.generations.close()
        if self.trace is not None:
            self.trace.close()
        if self._saved_at != self.scheduler.totals:
            self.save(last=True)

    def _check_finite(self, metrics: Mapping[str, float]) -> None:
        """Hooks mask a non-finite update on the device and count it; here the host learns of it."""
        bad = {key: value for key, value in metrics.items() if key.endswith("nonfinite") and value > 0}
        if not bad:
            return
        message = (
            f"{', '.join(bad)}: some updates had a non-finite loss or gradient and were left out, "
            f"by update {self.scheduler.totals['updates']}"
        )
        if self.settings.on_nonfinite == "stop":
            self.save()
            raise LabError(message + "; lower the learning rate, or set training.on_nonfinite=continue")
        self.say(message)

    @contextmanager
    def _saved_when_environments_fail(self) -> Iterator[None]:
        """Environments that fail too often end the run; what was learned until then is kept."""
        try:
            yield
        except EnvironmentFaultError:
            try:
                self.save()
            except CheckpointError as error:
                self.say(f"environments fail too often, and the last checkpoint was not saved: {error}")
            raise
