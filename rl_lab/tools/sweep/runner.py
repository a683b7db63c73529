"""Runs the trials of a sweep: several at a time on each GPU, pruned while they run, continued after a stop."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_lab.errors import ConfigError, LabError
from rl_lab.launch.pack import Ended, Job, Mps, Pack, find_gpus, interruptible
from rl_lab.tools.sweep.definition import Definition, word_of
from rl_lab.tools.sweep.study import SweepFolder, Trials
from rl_lab.tools.terminal import duration, number
from rl_lab.utils.files import write_json_atomic
from rl_lab.utils.stopping import STOPPED

ONE_TRIAL = (sys.executable, "-m", "rl_lab.tools.sweep.one_trial")
POLL_SECONDS = 0.2
LOOK_SECONDS = 2.0  # between two looks at the metrics of the running trials
FIRST_FAILURES = 3  # if the first trials all fail, the sweep stops: the cause is in the experiment


@dataclass
class SweepSummary:
    """What one call did."""

    complete: int = 0
    pruned: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    interrupted: bool = False


def check_definition(definition: Definition) -> int:
    """Compose the config of a first trial and check it; return the environment steps of a run."""
    from rl_lab.build import build_cadences
    from rl_lab.config.compose import compose_config

    words = definition.words({item.name: item.first() for item in definition.search})
    config = compose_config(words, config_dirs=definition.config_dirs)
    cadence = build_cadences(config.training).evaluate
    phases = [use for phase in config.training.phases for use in phase.get("workflow_hooks") or []]
    evaluates = cadence is not None or "evaluate" in [str(use) for use in phases]
    if definition.metric.startswith("eval/") and not evaluates:
        raise ConfigError(
            f"training.evaluate.every_env_steps is null, so {definition.metric} is never logged: set it, "
            "or search by another --metric"
        )
    return int(config.training.total_timesteps or 1)


class SweepRunner:
    """One call of `rl-lab sweep`."""

    def __init__(
        self,
        folder: SweepFolder,
        definition: Definition,
        *,
        budget: int,
        at_once: int = 1,  # trials at a time on each GPU; without a GPU, on this machine
        mps: str = "auto",
        command: Sequence[str] = ONE_TRIAL,
        say: Callable[[str], None] = print,
    ) -> None:
        self.folder = folder
        self.definition = definition
        self.at_once = at_once
        self.mps = mps
        self.command = command
        self.say = say
        self.trials = Trials(folder, definition, budget=budget)
        self.summary = SweepSummary()
        self._stopping: set[int] = set()  # trials that are being pruned
        self._begin = time.monotonic()

    def run(self) -> SweepSummary:
        """Run until the study has its trials, or a signal asks for a stop."""
        open_before = [trial.number for trial in self.trials.in_state("RUNNING")]
        gpus = find_gpus()
        where = ", ".join(gpu.name for gpu in gpus) or "no GPU"
        left = self.definition.trials - self._counted()
        self.say(
            f"sweep: {max(0, left)} of {self.definition.trials} trials to do, {self.at_once} at a time on {where}; "
            f"{self.folder.path}"
        )
        if open_before:
            self.say(f"trials that were running are continued: {', '.join(map(str, open_before))}")
        mps = Mps(self.mps if gpus and self.at_once > 1 else "off", self.say)
        with interruptible() as signals, mps:
            pack = Pack([gpu.index for gpu in gpus], variables=mps.environment)
            with pack:
                looked = 0.0
                while not signals:
                    while (job := self._next(pack, open_before)) is not None:
                        pack.start(job)
                    for ended in pack.poll():
                        self._ended(ended)
                    if not pack.running and self._all_started(open_before):
                        break
                    if time.monotonic() - looked >= LOOK_SECONDS:
                        looked = time.monotonic()
                        self._look(pack)
                    time.sleep(POLL_SECONDS)
                if signals:
                    self.summary.interrupted = True
                    self.say(f"stopping {len(pack.running)} trials; they are saved and continue next time")
                    for ended in pack.stop():
                        self._ended(ended)
        return self.summary

    # ---------------------------------------------------------------- one trial

    def _counted(self) -> int:
        return len(self.trials.in_state("COMPLETE", "PRUNED", "FAIL"))

    def _all_started(self, continued: Sequence[int]) -> bool:
        return not continued and len(self.trials.all()) >= self.definition.trials

    def _next(self, pack: Pack, continued: list[int]) -> Job | None:
        """Return the next job that fits, or None; trials that were running come first."""
        share = 1.0 / self.at_once
        if not pack.fits(Job("", (), self.folder.path, share)):
            return None
        if continued:
            number_ = continued.pop(0)
        elif len(self.trials.all()) < self.definition.trials:
            number_ = int(self.trials.ask().number)
        else:
            return None
        return self._job(number_, share)

    def _job(self, trial: int, share: float) -> Job:
        values = self._values(trial)
        run_dir = str(self.folder.run_dir(trial).resolve()).replace("\\", "\\\\").replace("'", "\\'")
        order = {
            "parent": os.getpid(),
            "overrides": [
                *self.definition.words(values),
                "logging.progress=plain",
                f"run_dir='{run_dir}'",
            ],
            "config_dirs": list(self.definition.config_dirs),
        }
        file = self.folder.log(trial).with_suffix(".json")
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(file, order)
        shown = " ".join(f"{name}={_shown(value)}" for name, value in values.items())
        self.say(f"{self._clock()} trial {trial} of {self.definition.trials}: {shown}")
        return Job(str(trial), [*self.command, str(file)], self.folder.log(trial), share)

    def _values(self, trial: int) -> dict[str, Any]:
        frozen = self.trials.frozen(trial)
        missing = [item for item in self.definition.search if item.name not in frozen.params]
        if missing:  # killed between two suggestions
            opened = self.trials.open(trial)
            for item in missing:
                item.suggest(opened)
            frozen = self.trials.frozen(trial)
        return {item.name: frozen.params[item.name] for item in self.definition.search}

    def _look(self, pack: Pack) -> None:
        """Report new evaluations, and stop trials that are worse than the others were at this step."""
        for name in pack.running:
            trial = int(name)
            if trial not in self._stopping and self.trials.report(trial, prune=True):
                self._stopping.add(trial)
                self.say(f"{self._clock()} trial {trial} is pruned")
                pack.terminate(name)

    def _ended(self, ended: Ended) -> None:
        trial = int(ended.job.name)
        # Python starts and ends without a handler of signals: a process that is pruned then dies by the signal.
        if trial in self._stopping and ended.returncode in (STOPPED, -signal.SIGTERM):
            self._stopping.discard(trial)
            self.trials.tell(trial, "pruned")
            self.summary.pruned += 1
            return
        if ended.returncode == STOPPED:
            return  # it stays open in the study, and is continued
        if ended.returncode != 0:
            if self.summary.interrupted:
                return  # ended while it was being stopped; it is continued from its checkpoint
            self._failed(trial, ended.error())
            return
        value = self.trials.tell(trial, "complete")
        if value is None:
            self._failed(trial, f"its run has logged no {self.definition.metric}", tell=False)
            return
        self.summary.complete += 1
        best = self.trials.best
        note = "the best so far" if best is not None and best.number == trial else ""
        if not note and best is not None:
            note = f"best {number(best.value)} of trial {best.number}"
        self.say(
            f"{self._clock()} trial {trial}: {self.definition.metric} {number(value)} after "
            f"{duration(ended.seconds)}; {note}"
        )

    def _failed(self, trial: int, error: str, *, tell: bool = True) -> None:
        if tell:
            self.trials.tell(trial, "fail")
        self.summary.failed[trial] = error
        self.say(f"{self._clock()} trial {trial} failed: {error} (output: {self.folder.log(trial)})")
        ended = self.trials.in_state("COMPLETE", "PRUNED", "FAIL")
        if len(ended) >= FIRST_FAILURES and all(item.state.name == "FAIL" for item in ended):
            raise LabError(f"{self.folder.path}: the first {len(ended)} trials failed: {error}")

    def _clock(self) -> str:
        return f"[{(time.monotonic() - self._begin) / 60:.1f} min]"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else word_of(value)
