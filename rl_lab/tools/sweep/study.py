"""The trials of a sweep in Optuna's SQLite file, and the folder they are in.

FOLDER/
  sweep.yaml     the definition
  sweep.db       Optuna's storage: parameters, values and states of the trials
  trials/N/      the run folder of trial N
  logs/N.txt     its output
  index.html     the page
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rl_lab.errors import ConfigError, LabError, MissingPackageError, install_line
from rl_lab.run_folder import describe_differences
from rl_lab.tools.sweep.definition import MAY_CHANGE, Definition, definition_from, read_definition
from rl_lab.utils.files import make_folder, read_jsonl, write_atomic
from rl_lab.utils.seeding import derive_seed

NAME = "sweep"  # of the study in its file
WARM_UP = 0.25  # of the budget: no trial is pruned before


def require_optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise MissingPackageError(f"rl-lab sweep needs Optuna: {install_line('optuna')}") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class SweepFolder:
    """The files of a sweep."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.definition_file = path / "sweep.yaml"
        self.database = path / "sweep.db"
        self.page = path / "index.html"

    def run_dir(self, number: int) -> Path:
        return self.path / "trials" / str(number)

    def log(self, number: int) -> Path:
        return self.path / "logs" / f"{number}.txt"

    def load(self) -> Definition | None:
        """Return the definition that the folder was made with, or None for a new one."""
        if not self.definition_file.is_file():
            return None
        return definition_from(read_definition(self.definition_file), str(self.definition_file))

    def save(self, definition: Definition) -> None:
        """Write the definition; raise ConfigError if the folder has trials of another one."""
        before = self.load()
        if before is not None:
            changed = {
                key: values
                for key, values in describe_differences(before.to_dict(), definition.to_dict()).items()
                if key.partition(".")[0].partition("[")[0] not in MAY_CHANGE
            }
            if changed:
                key, (old, new) = next(iter(sorted(changed.items())))
                raise ConfigError(
                    f"{key}: the sweep in {self.path} has {old!r}, not {new!r}: its trials could not be compared; "
                    "choose another --folder"
                )
        try:
            make_folder(self.path / "trials")
            text = yaml.safe_dump(definition.to_dict(), sort_keys=False, allow_unicode=True)
            write_atomic(self.definition_file, lambda file: file.write(text.encode()))
        except OSError as error:
            raise ConfigError(f"--folder: {self.path} cannot be written: {error}") from error

    def rows(self, number: int, metric: str) -> list[tuple[int, float]]:
        """Return the finite values of the metric that a trial's run has logged, with their steps."""
        file = self.run_dir(number) / "metrics.jsonl"
        if not file.is_file():
            return []
        found: dict[int, float] = {}
        for row in read_jsonl(file):
            value, step = row.get(metric), row.get("step")
            if isinstance(value, int | float) and isinstance(step, int | float) and math.isfinite(value):
                found[int(step)] = float(value)
        return sorted(found.items())


class Trials:
    """The study: asks for parameters, is told values, decides about pruning."""

    def __init__(self, folder: SweepFolder, definition: Definition, *, budget: int = 1) -> None:
        """budget: environment steps of a run."""
        self.optuna = require_optuna()
        self.folder = folder
        self.definition = definition
        self._open: dict[int, Any] = {}
        with quiet():
            try:
                self.study = self.optuna.create_study(
                    storage=f"sqlite:///{folder.database.resolve()}",
                    study_name=NAME,
                    direction=definition.direction,
                    pruner=self._pruner(budget),
                    load_if_exists=True,
                )
            except Exception as error:
                raise LabError(f"{folder.database} cannot be opened by Optuna: {error}") from error

    def _pruner(self, budget: int) -> Any:
        pruners = self.optuna.pruners
        if self.definition.pruner == "none":
            return pruners.NopPruner()
        warm_up = int(WARM_UP * budget)
        if self.definition.pruner == "hyperband":
            return pruners.HyperbandPruner(min_resource=max(1, warm_up), max_resource=max(2, budget))
        startup = max(1, self.definition.startup // 2)
        return pruners.MedianPruner(n_startup_trials=startup, n_warmup_steps=warm_up)

    def all(self) -> list[Any]:
        return list(self.study.get_trials(deepcopy=False))

    def in_state(self, *names: str) -> list[Any]:
        return [trial for trial in self.all() if trial.state.name in names]

    def ask(self) -> Any:
        """Return a new trial with parameters.

        The sampler is seeded by the number of trials, so that a sweep that was stopped asks for the same as one that
        was not.
        """
        number = len(self.all())
        with quiet():
            self.study.sampler = self.optuna.samplers.TPESampler(
                seed=derive_seed(self.definition.seed, "sweep", number) & 0x7FFFFFFF,
                n_startup_trials=self.definition.startup,
                multivariate=True,
            )
            trial = self.study.ask()
            for parameter in self.definition.search:
                parameter.suggest(trial)
        self._open[trial.number] = trial
        return trial

    def open(self, number: int) -> Any:
        """Return a running trial by its number, to report to; another process may have begun it."""
        if number not in self._open:
            with quiet():
                self._open[number] = self.optuna.trial.Trial(self.study, self.frozen(number)._trial_id)
        return self._open[number]

    def report(self, number: int, *, prune: bool) -> bool:
        """Report the new values of a running trial; return whether it should be pruned."""
        trial = self.open(number)
        known = self.frozen(number).intermediate_values
        new = [
            (step, value)
            for step, value in self.folder.rows(number, self.definition.metric)
            if step not in known
        ]
        for step, value in new:
            trial.report(value, step)
        return bool(new) and prune and bool(trial.should_prune())

    def tell(self, number: int, state: str) -> float | None:
        """End a trial: complete, pruned or fail. Return its value."""
        self.report(number, prune=False)
        values = [value for _, value in sorted(self.frozen(number).intermediate_values.items())]
        states = self.optuna.trial.TrialState
        if not values or state == "fail":
            self.study.tell(number, state=states.FAIL)
            return None
        value = values[-1]
        if self.definition.value == "best":
            value = max(values) if self.definition.direction == "maximize" else min(values)
        if state == "pruned":  # Optuna takes the last value that was reported
            self.study.tell(number, state=states.PRUNED)
        else:
            self.study.tell(number, value)
        return value

    def frozen(self, number: int) -> Any:
        """Return the record of a trial."""
        return next(trial for trial in self.all() if trial.number == number)

    @property
    def best(self) -> Any | None:
        """Return the best complete trial, or None."""
        done = self.in_state("COMPLETE")
        sign = 1.0 if self.definition.direction == "maximize" else -1.0
        return max(done, key=lambda trial: sign * trial.value, default=None)

    def importances(self) -> dict[str, float]:
        """Return the share of each parameter in the spread of the values, by PED-ANOVA; {} if it has too few trials."""
        if len(self.in_state("COMPLETE")) < 4 or len(self.definition.search) < 2:
            return {}
        with quiet(), contextlib.suppress(ValueError, RuntimeError, ZeroDivisionError):
            found = self.optuna.importance.get_param_importances(self.study)
            return {name: float(value) for name, value in found.items() if math.isfinite(value)}
        return {}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide Optuna's notes about experimental features."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
