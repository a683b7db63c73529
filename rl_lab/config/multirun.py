"""Several runs from one command: Hydra's multirun with `train_config`.

    rl-lab train -m experiment.seed=0,1,2                       # sequential
    rl-lab train -m experiment.seed=0,1,2 hydra/launcher=joblib # parallel (extra: sweep)
    rl-lab train -m experiment.seed=0,1,2 launch=pack           # launch.per_gpu runs at a time on each GPU
    rl-lab train -m experiment.seed=0,1,2 launch=slurm          # a SLURM job for each run (extra: slurm)

The runs are numbered subfolders of one folder. A run that fails does not stop the others; Ctrl-C stops all of
them. The same command with `hydra.sweep.dir=FOLDER` continues the runs that were stopped.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
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

from rl_lab.config.checks import check_rules
from rl_lab.config.choices import choices
from rl_lab.config.compose import (
    check_targets,
    compose_config,
    explain,
    normalise_override,
    register_resolvers,
    to_plain,
    with_search_path,
)
from rl_lab.errors import ConfigError, LabError
from rl_lab.launch.pack import Ended, Job, Mps, Pack, find_gpus, interruptible
from rl_lab.run_folder import new_run_folder, output_root
from rl_lab.utils.files import read_jsonl
from rl_lab.utils.progress import clock_time

FAILED = ".failed.txt"  # suffix of the file with the error of a run


@dataclass
class Sweep:
    """Results of a multirun."""

    path: Path
    runs: list[Path] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)  # number of the run -> error


@dataclass
class Plan:
    """The runs of a sweep, for its headlines: number of each, time left, and only the words that differ."""

    combinations: list[list[str]] = field(default_factory=list)  # empty: only Hydra can list them
    begun: float = field(default_factory=time.monotonic)

    def headline(self, number: int, words: Sequence[str]) -> str:
        """Return "run 2 of 6: experiment.seed=1 · about 4:10 left", for the run with this number from 0."""
        count = len(self.combinations)
        common = set.intersection(*map(set, self.combinations)) if count > 1 else set()
        own = " ".join(word for word in words if word not in common)
        if not count:
            return f"run {number}: {own}"
        return f"run {number}, {number + 1} of {count}: {own}{self.left(number)}"

    def left(self, done: int) -> str:
        """Return the time that the other runs take if they take as long as those that are done, or ""."""
        if not 0 < done < len(self.combinations):
            return ""
        seconds = (time.monotonic() - self.begun) / done * (len(self.combinations) - done)
        return f" · about {clock_time(seconds)} left"


_plan = Plan()


@hydra.main(version_base="1.3", config_path="pkg://rl_lab.configs", config_name="config")
def _job(config: DictConfig) -> float | None:
    """Run one job of the sweep in Hydra's folder for it; return its mean return, for optimizing sweepers."""
    from rl_lab.training import train_config

    register_resolvers()
    check_targets(config)
    job = HydraConfig.get()
    folder = Path(job.runtime.output_dir)
    failure = folder.parent / f"{job.job.num}{FAILED}"
    failure.unlink(missing_ok=True)
    OmegaConf.set_struct(config, False)
    config.run_dir = str(folder)
    parallel = job.runtime.choices.get("hydra/launcher") != "basic"
    if parallel and config.logging.progress == "auto":
        config.logging.progress = "plain"  # live displays would overwrite each other

    def say(message: str) -> None:
        with contextlib.suppress(OSError):  # a closed terminal must not end the sweep
            print(f"#{job.job.num} {message}" if parallel else message, flush=True)

    say(_plan.headline(int(job.job.num), list(job.overrides.task)))
    try:
        result = train_config(config, list(job.overrides.task), say=say)
    except LabError as error:
        failure.write_text(f"{error}\n", encoding="utf-8")
        with contextlib.suppress(OSError):
            folder.rmdir()  # Hydra created it for this run; only an empty folder is removed
        print(f"error: run {job.job.num}: {error}", file=sys.stderr, flush=True)
        return None
    if result.interrupted:
        raise KeyboardInterrupt  # the signal is meant for the complete sweep
    return result.eval_return_mean if result.eval_return_mean is not None else result.return_mean


def multirun(overrides: Sequence[str], config_dirs: Sequence[Path | str] = ()) -> Sweep:
    """Run every combination, print a summary, and raise LabError if a run failed."""
    register_resolvers()
    items = with_search_path([normalise_override(override) for override in overrides], config_dirs)
    # An error that all runs share is reported once, before the first run.
    config = compose_config(_first_of_each(items), config_dirs=config_dirs)
    folder, items = _sweep_folder(items, config.output_root)
    global _plan
    _plan = Plan(_listed(items))
    try:
        if config.launch.name == "pack":
            _run_packed(items, folder, config.launch)
        elif config.launch.name == "slurm":
            _submit_all(items, folder, config.launch)
            if not config.launch.wait:
                print(f"the same command with hydra.sweep.dir={folder} continues runs that were cancelled")
                return Sweep(folder)
        else:
            with _hydra_arguments(items), choices():
                _job()
    except LabError:
        raise
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, items, config_dirs)) from error
    except KeyboardInterrupt:
        print(f"stopped; the same command with hydra.sweep.dir={folder} continues", file=sys.stderr)
        raise
    sweep = read_sweep(folder)
    for line in summary(sweep):
        print(line)
    if sweep.failures:
        reasons = "; ".join(f"run {number}: {reason}" for number, reason in sweep.failures.items())
        raise LabError(
            f"{folder}: {len(sweep.failures)} of {len(sweep.failures) + len(sweep.runs)} runs failed: {reasons}"
        )
    return sweep


def _run_packed(overrides: Sequence[str], folder: Path, launch: DictConfig) -> None:
    """Run every combination in a process of its own, `launch.per_gpu` at a time on each GPU."""
    check_rules({"launch": to_plain(launch)}, "launch.")
    combinations = _combinations(overrides)
    folder.mkdir(parents=True, exist_ok=True)
    waiting = [
        _packed_job(number, words, folder, 1.0 / launch.per_gpu) for number, words in enumerate(combinations)
    ]
    done = 0
    gpus = find_gpus()
    where = ", ".join(gpu.name for gpu in gpus) or "no GPU"
    print(
        f"{len(waiting)} runs, {launch.per_gpu} at a time on {where}; the output of run N is in {folder}/N.log"
    )
    mps = Mps(str(launch.mps) if gpus and launch.per_gpu > 1 else "off")
    with interruptible() as signals, mps:
        pack = Pack(
            [gpu.index for gpu in gpus],
            threads=int(launch.threads),
            variables=mps.environment,
        )
        with pack:
            while (waiting or pack.running) and not signals:
                while waiting and pack.fits(waiting[0]):
                    job = waiting.pop(0)
                    (folder / f"{job.name}{FAILED}").unlink(missing_ok=True)
                    pack.start(job)
                    number = int(job.name)
                    print(_plan.headline(number, combinations[number]).partition(" · about")[0], flush=True)
                for ended in pack.poll():
                    _packed_end(ended, folder)
                    done += 1
                    if left := _plan.left(done):
                        print(f"{done} of {len(combinations)} runs are done{left}", flush=True)
                time.sleep(0.2)
            if signals:
                pack.stop()
                raise KeyboardInterrupt


def _submit_all(overrides: Sequence[str], folder: Path, launch: DictConfig) -> None:
    """Submit every combination as a SLURM job; with `launch.wait`, wait for them."""
    from rl_lab.launch.slurm import check_settings, submit, wait

    settings = to_plain(launch)
    check_rules({"launch": settings}, "launch.")
    check_settings(settings)
    combinations = _combinations(overrides)
    folder.mkdir(parents=True, exist_ok=True)
    for number, words in enumerate(combinations):
        (folder / f"{number}{FAILED}").unlink(missing_ok=True)
        print(_plan.headline(number, words))
    runs = {
        str(number): train_command(words, folder / str(number)) for number, words in enumerate(combinations)
    }
    jobs = submit(runs, settings, (folder / "slurm").resolve())
    if launch.wait:
        for name, error in wait(jobs, list(runs)).items():
            (folder / f"{name}{FAILED}").write_text(f"{error}\n", encoding="utf-8")


def submit_one(config: DictConfig, overrides: Sequence[str], config_dirs: Sequence[Path | str] = ()) -> Path:
    """Submit one run as a SLURM job; return its run folder. An existing `run_dir` is continued."""
    from rl_lab.launch.slurm import check_settings, submit, wait

    settings = to_plain(config.launch)
    check_rules({"launch": settings}, "launch.")
    check_settings(settings)
    root = output_root(config.output_root)
    folder = Path(config.run_dir) if config.run_dir else new_run_folder(root).path
    words = [word for word in overrides if not word.lstrip("+").startswith("run_dir=")]
    command = train_command(with_search_path(words, config_dirs), folder)
    jobs = submit({folder.name: command}, settings, (root / "slurm").resolve())
    print(f"run folder: {folder}")
    if config.launch.wait:
        for error in wait(jobs, [folder.name]).values():
            raise LabError(f"{folder}: {error}")
    return folder


def _combinations(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of every run of the sweep."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    for item in overrides:
        if item.lstrip("+").startswith(("hydra/sweeper", "hydra/launcher")):
            raise ConfigError(
                f"{item} cannot be combined with launch=pack or launch=slurm: remove one of them"
            )
    words = [item for item in overrides if not item.lstrip("+").startswith("hydra.sweep")]
    parsed = OverridesParser.create().parse_overrides(words)
    (combinations,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    return [[str(word) for word in words] for words in combinations]


def _listed(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of every run, or [] if another sweeper or launcher chooses them."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    if any(item.lstrip("+").startswith(("hydra/sweeper", "hydra/launcher")) for item in overrides):
        return []
    words = [item for item in overrides if not item.lstrip("+").startswith("hydra.sweep")]
    try:
        parsed = OverridesParser.create().parse_overrides(words)
        (combinations,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    except (HydraException, ValueError):
        return []
    return [[str(word) for word in words] for words in combinations]


def _packed_job(number: int, words: Sequence[str], folder: Path, share: float) -> Job:
    command = train_command(words, folder / str(number))
    return Job(str(number), command, folder / f"{number}.log", share)


def train_command(words: Sequence[str], run_dir: Path) -> list[str]:
    """Return the command of one run, in a process without a launcher of its own."""
    own = [word for word in words if not word.lstrip("+").startswith(("launch=", "launch.", "hydra."))]
    search = [word for word in words if word.lstrip("+").startswith("hydra.")]
    quoted = str(run_dir.resolve()).replace("\\", "\\\\").replace("'", "\\'")
    command = [sys.executable, "-m", "rl_lab", "train", *own, *search, f"run_dir='{quoted}'"]
    if not any(word.startswith("logging.progress=") for word in own):
        command.append("logging.progress=plain")
    return command


def _packed_end(ended: Ended, folder: Path) -> None:
    if ended.returncode == 0:
        print(f"run {ended.job.name}: finished after {ended.seconds:.0f} s", flush=True)
        return
    (folder / f"{ended.job.name}{FAILED}").write_text(f"{ended.error()}\n", encoding="utf-8")
    print(f"error: run {ended.job.name}: {ended.error()}", file=sys.stderr, flush=True)


def read_sweep(folder: Path) -> Sweep:
    """Return the runs and failures in the folder of a sweep, sorted by number."""
    runs = [path.parent for path in folder.glob("*/config.yaml")]
    failures = {
        path.name.removesuffix(FAILED): path.read_text(encoding="utf-8").strip()
        for path in folder.glob(f"*{FAILED}")
    }
    return Sweep(
        folder,
        sorted((run for run in runs if run.name not in failures), key=_by_number),
        dict(sorted(failures.items(), key=lambda item: _by_number(Path(item[0])))),
    )


def summary(sweep: Sweep) -> Iterator[str]:
    """Yield one line per run, with the overrides that differ and the last return; then the report command."""
    overrides = {
        run: (run / "config" / "overrides.txt").read_text(encoding="utf-8").split("\n") for run in sweep.runs
    }
    common = set.intersection(*(set(lines) for lines in overrides.values())) if overrides else set()
    for run in sweep.runs:
        own = " ".join(
            override
            for override in overrides[run]
            if override not in common and not override.startswith("run_dir=")
        )
        shown = _last_return(run)
        yield f"{run.name}  {own}" + (f"  return {shown:.1f}" if shown is not None else "")
    if sweep.runs:
        yield f"report on all runs: rl-lab report {sweep.path}"


def _last_return(run: Path) -> float | None:
    rows = read_jsonl(run / "metrics.jsonl") if (run / "metrics.jsonl").is_file() else []
    for key in ("eval/return_mean", "collect/return_mean"):
        found = [row[key] for row in rows if isinstance(row.get(key), float | int)]
        if found:
            return float(found[-1])
    return None


def _by_number(path: Path) -> tuple[int, str]:
    return (int(path.name) if path.name.isdigit() else sys.maxsize, path.name)


def _sweep_folder(overrides: list[str], configured: str | None) -> tuple[Path, list[str]]:
    """Return the folder of the sweep (`hydra.sweep.dir`, or a new one), and the overrides with it."""
    given = [item.partition("=")[2] for item in overrides if item.lstrip("+").startswith("hydra.sweep.dir=")]
    if given:
        return Path(given[-1].strip("'\"")), overrides
    now = datetime.now()
    day = output_root(configured) / "multirun" / now.strftime("%Y-%m-%d")
    folder = day / now.strftime("%H-%M-%S")
    number = 0
    while folder.exists():  # two sweeps started in the same second
        number += 1
        folder = day / f"{now:%H-%M-%S}-{number}"
    folder.mkdir(parents=True)
    return folder, [
        *overrides,
        "hydra.sweep.dir='" + str(folder).replace("\\", "\\\\").replace("'", "\\'") + "'",
    ]


def _first_of_each(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of the first run of the sweep, or none if only Hydra can parse them."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        first = []
        for override, text in zip(parsed, overrides):
            if override.is_sweep_override():
                value = next(iter(override.sweep_string_iterator()))
                text = f"{text.partition('=')[0]}={value}"
            if not text.lstrip("+~").startswith("hydra"):
                first.append(text)
        return first
    except (HydraException, NotImplementedError, StopIteration, ValueError):
        return []


@contextmanager
def _hydra_arguments(overrides: Sequence[str]) -> Iterator[None]:
    """Set sys.argv, which Hydra reads, and HYDRA_FULL_ERROR, so that it raises errors instead of exiting."""
    before, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [before[0], "--multirun", *overrides]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = before
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error
