"""Several runs from one command: Hydra's multirun over our `train_config`.

    rl-lab train -m experiment.seed=0,1,2                                                one after the other
    rl-lab train -m experiment.seed=0,1,2 hydra/launcher=joblib hydra.launcher.n_jobs=3  side by side (extra: sweep)

The runs lie in one folder, numbered. A run that fails does not stop the others; Ctrl-C stops them all. The same command
with `hydra.sweep.dir=FOLDER` goes on with what was stopped.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_lab.config.compose import (
    check_targets,
    compose_config,
    explain,
    normalise_override,
    register_resolvers,
    with_search_path,
)
from rl_lab.errors import ConfigError, LabError
from rl_lab.run_folder import output_root
from rl_lab.utils.files import read_jsonl

FAILED = ".failed.txt"  # behind a run's number: why it failed


@dataclass
class Sweep:
    """What came of a multirun."""

    path: Path
    runs: list[Path] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)  # number of the run -> why


@hydra.main(version_base="1.3", config_path="pkg://rl_lab.configs", config_name="config")
def _job(config: DictConfig) -> float | None:
    """One run of the sweep, in Hydra's folder for it; its return is what an optimising sweeper would see."""
    from rl_lab.training import train_config

    register_resolvers()
    check_targets(config)
    job = HydraConfig.get()
    folder = Path(job.runtime.output_dir)
    note = folder.parent / f"{job.job.num}{FAILED}"
    note.unlink(missing_ok=True)
    OmegaConf.set_struct(config, False)
    config.run_dir = str(folder)
    side_by_side = job.runtime.choices.get("hydra/launcher") != "basic"
    if side_by_side and config.logging.progress == "auto":
        config.logging.progress = "plain"  # live displays would overwrite each other

    def say(message: str) -> None:
        with contextlib.suppress(OSError):  # a terminal that is gone must not end the sweep
            print(f"#{job.job.num} {message}" if side_by_side else message, flush=True)

    say(f"run {job.job.num}: {' '.join(job.overrides.task)}")
    try:
        result = train_config(config, list(job.overrides.task), say=say)
    except LabError as error:
        note.write_text(f"{error}\n")
        with contextlib.suppress(OSError):
            folder.rmdir()  # Hydra made it for this run; it stays if anything is in it
        print(f"error: run {job.job.num}: {error}", file=sys.stderr, flush=True)
        return None
    if result.interrupted:
        raise KeyboardInterrupt  # whoever stopped this run means the sweep
    return result.eval_return_mean if result.eval_return_mean is not None else result.return_mean


def multirun(overrides: Sequence[str], config_dirs: Sequence[Path | str] = ()) -> Sweep:
    """Run every combination, say what came of each, and raise if one failed."""
    register_resolvers()
    words = with_search_path([normalise_override(word) for word in overrides], config_dirs)
    # A mistake that all runs share is said once, before any begins.
    config = compose_config(_first_of_each(words), config_dirs=config_dirs)
    folder, words = _sweep_folder(words, config.output_root)
    try:
        with _as_hydra_sees_it(words):
            _job()
    except LabError:
        raise
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, words, config_dirs)) from error
    except KeyboardInterrupt:
        print(f"stopped; the same command with hydra.sweep.dir={folder} goes on", file=sys.stderr)
        raise
    sweep = collect(folder)
    for line in describe(sweep):
        print(line)
    if sweep.failures:
        reasons = "; ".join(f"run {number}: {reason}" for number, reason in sweep.failures.items())
        raise LabError(
            f"{len(sweep.failures)} of {len(sweep.failures) + len(sweep.runs)} runs failed: {reasons}"
        )
    return sweep


def collect(folder: Path) -> Sweep:
    """The runs and failures that lie in a sweep's folder, by number."""
    runs = [path.parent for path in folder.glob("*/config.yaml")]
    notes = {path.name.removesuffix(FAILED): path.read_text().strip() for path in folder.glob(f"*{FAILED}")}
    return Sweep(
        folder,
        sorted((run for run in runs if run.name not in notes), key=_by_number),
        dict(sorted(notes.items(), key=lambda item: _by_number(Path(item[0])))),
    )


def describe(sweep: Sweep) -> Iterator[str]:
    """A line for each run, with what sets it apart and its last return; then what to do with them."""
    words = {run: (run / "config" / "overrides.txt").read_text().split("\n") for run in sweep.runs}
    common = set.intersection(*(set(lines) for lines in words.values())) if words else set()
    for run in sweep.runs:
        own = " ".join(word for word in words[run] if word not in common)
        shown = _last_return(run)
        yield f"{run.name}  {own}" + (f"  return {shown:.1f}" if shown is not None else "")
    if sweep.runs:
        yield f"all of them: rl-lab report {sweep.path}"


def _last_return(run: Path) -> float | None:
    rows = read_jsonl(run / "metrics.jsonl") if (run / "metrics.jsonl").is_file() else []
    for key in ("eval/return_mean", "collect/return_mean"):
        found = [row[key] for row in rows if isinstance(row.get(key), float | int)]
        if found:
            return float(found[-1])
    return None


def _by_number(path: Path) -> tuple[int, str]:
    return (int(path.name) if path.name.isdigit() else sys.maxsize, path.name)


def _sweep_folder(words: list[str], configured: str | None) -> tuple[Path, list[str]]:
    """Where the runs go, and the words that tell Hydra so: as given, else under the outputs, by date and time."""
    given = [word.partition("=")[2] for word in words if word.lstrip("+").startswith("hydra.sweep.dir=")]
    if given:
        return Path(given[-1].strip("'\"")), words
    now = datetime.now()
    day = output_root(configured) / "multirun" / now.strftime("%Y-%m-%d")
    folder = day / now.strftime("%H-%M-%S")
    number = 0
    while folder.exists():  # two sweeps that start in one second
        number += 1
        folder = day / f"{now:%H-%M-%S}-{number}"
    folder.mkdir(parents=True)
    return folder, [*words, "hydra.sweep.dir='" + str(folder).replace("\\", "\\\\").replace("'", "\\'") + "'"]


def _first_of_each(words: Sequence[str]) -> list[str]:
    """The overrides of the first run of the sweep; nothing where only Hydra can tell."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(words))
        first = []
        for override, word in zip(parsed, words):
            if override.is_sweep_override():
                value = next(iter(override.sweep_string_iterator()))
                word = f"{word.partition('=')[0]}={value}"
            if not word.lstrip("+~").startswith("hydra"):
                first.append(word)
        return first
    except (HydraException, NotImplementedError, StopIteration, ValueError):
        return []


@contextmanager
def _as_hydra_sees_it(words: Sequence[str]) -> Iterator[None]:
    """Hydra reads sys.argv, and with this variable lets errors through instead of printing and leaving."""
    before, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [before[0], "--multirun", *words]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = before
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error
