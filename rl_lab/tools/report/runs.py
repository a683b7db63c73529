"""What a report knows of a run folder: config, metrics, checkpoints, media, and which runs are seeds of one thing."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rl_lab.errors import CheckpointError, LabError, one_line
from rl_lab.run_folder import RunFolder, find_run, output_root
from rl_lab.tools.published import Task
from rl_lab.tools.report.curves import Metrics
from rl_lab.utils.checkpoint.manifest import read_manifest

# Config paths that do not make two runs different experiments.
OF_ONE_RUN = (
    "experiment.seed",
    "experiment.device",
    "run_dir",
    "output_root",
    "training.resume_path",
    "logging.",
    "wandb.",
)
# And those that do not make two methods different: what each task needs of its own.
OF_THE_TASK = ("environment.", "_dims.")
MEDIA_SUFFIXES = (".gif", ".mp4", ".webm", ".png", ".jpg", ".jpeg")


@dataclass
class RunData:
    """One run as it lies on disk now; it may still be going on."""

    folder: RunFolder
    config: dict[str, Any]  # flat: dotted path -> value
    metrics: Metrics
    label: str = ""  # of this run among those reported: unique
    group: str = ""  # what it is one seed of: a method on a task
    method: str = ""  # what is compared over tasks

    @property
    def name(self) -> str:
        return str(self.config.get("experiment.name", self.folder.path.name))

    @property
    def seed(self) -> Any:
        return self.config.get("experiment.seed")

    @property
    def task(self) -> Task:
        return Task.from_config(self.config)

    @property
    def workflow(self) -> str:
        target = str(self.config.get("workflow._target_", "")).rpartition(".")[2]
        return target.removesuffix("Workflow") or self.name

    @cached_property
    def summary(self) -> Summary:
        return summarize(self)


@dataclass
class Summary:
    """The headline of a run. None: not logged."""

    steps: int = 0
    total_steps: int | None = None
    frames: int = 0
    updates: int = 0
    eval_last: float | None = None
    eval_last_std: float | None = None
    eval_best: tuple[float, float] | None = None  # value, step
    train_last: float | None = None
    seconds: float | None = None
    steps_per_second: float | None = None
    checkpoints: list[str] = field(default_factory=list)
    code: str = ""


def find_runs(names: Sequence[str | Path], root: str | None = None) -> list[RunFolder]:
    """Run folders by name; a folder above several stands for all of them; no name: the newest run or sweep."""
    if not names:
        return _newest(output_root(root))
    found: dict[Path, RunFolder] = {}
    for name in names:
        path = Path(name).expanduser()
        below = [] if (path / "config.yaml").is_file() else runs_below(path)
        for run in below or [find_run(path, output_root(root))]:
            found[run.path] = run
    return list(found.values())


def _newest(root: Path) -> list[RunFolder]:
    """The newest run under the root; of a sweep, all of its runs."""
    sweeps = sorted((root / "multirun").glob("*/*"), key=lambda folder: folder.stat().st_mtime)
    in_sweep = runs_below(sweeps[-1]) if sweeps else []
    try:
        alone = find_run(None, root)
    except LabError:
        if in_sweep:
            return in_sweep
        raise
    newest = max((run.config_file.stat().st_mtime for run in in_sweep), default=0.0)
    return in_sweep if newest > alone.config_file.stat().st_mtime else [alone]


def runs_below(path: Path) -> list[RunFolder]:
    """Runs up to four folders down: a day, a sweep, a folder of sweeps, all outputs."""
    files = []
    # Unlike glob, os.walk passes over a folder that is deleted meanwhile.
    for place, folders, _ in os.walk(path, followlinks=True):
        if len(Path(place).relative_to(path).parts) == 4:
            folders.clear()
        file = Path(place, "config.yaml")
        if Path(place) != path and file.is_file() and not file.parent.name.startswith("."):
            files.append(file)
    return [RunFolder(file.parent) for file in sorted(files)]


def load_runs(folders: Sequence[RunFolder], by: str = "config") -> list[RunData]:
    """Read the runs and say which belong together.

    by: what makes two runs of one task the same thing but for the seed: "config" (everything they were configured
    with), "experiment" (its name) or "workflow".
    """
    return _group([_read_run(folder) for folder in folders], by)


def load_readable(
    folders: Sequence[RunFolder], by: str = "config"
) -> tuple[list[RunData], dict[str, Exception]]:
    """The runs that can be read, as `load_runs` gives them; of each other one a sentence, and what it comes from."""
    runs, left_out = [], {}
    for folder in folders:
        try:
            run = _read_run(folder)
            _ = run.summary, run.task  # read here, where the run that is at fault is known
            runs.append(run)
        except Exception as error:
            left_out[why_not(folder, error)] = error
    return _group(runs, by), left_out


def why_not(folder: RunFolder, error: Exception) -> str:
    """One sentence about a run that cannot be drawn, which starts with the path."""
    return str(error) if isinstance(error, LabError) else f"{folder.path} cannot be drawn: {one_line(error)}"


def _read_run(folder: RunFolder) -> RunData:
    return RunData(folder, _read_config(folder), Metrics.read(folder.metrics))


def _group(runs: list[RunData], by: str) -> list[RunData]:
    if by == "config":
        _group_by_config(runs)
    else:
        _group_by_name(runs, by)
    for run in runs:
        same = sum(other.group == run.group for other in runs) > 1
        run.label = f"{run.group}, seed {run.seed}" if same else run.group
    _make_unique(runs)
    return runs


def _group_by_config(runs: Sequence[RunData]) -> None:
    for attribute, apart in (("group", OF_ONE_RUN), ("method", (*OF_ONE_RUN, *OF_THE_TASK))):
        identities = [
            tuple(
                sorted((path, str(value)) for path, value in run.config.items() if not path.startswith(apart))
            )
            for run in runs
        ]
        distinct = list(dict.fromkeys(identities))
        for run, identity in zip(runs, identities):
            rivals = [runs[identities.index(other)] for other in distinct if other != identity]
            rivals = [rival for rival in rivals if rival.name == run.name]
            setattr(run, attribute, run.name + _distinction(run, rivals, apart))


def _group_by_name(runs: Sequence[RunData], by: str) -> None:
    tasks = {run.task.full_name for run in runs}
    for run in runs:
        run.method = run.name if by == "experiment" else run.workflow
        run.group = run.method if len(tasks) == 1 else f"{run.method} on {run.task.full_name}"


def _read_config(folder: RunFolder) -> dict[str, Any]:
    """The config as it stands in the folder: also one of an older lab, which could not be trained on today."""
    import yaml

    try:
        plain = yaml.safe_load(folder.config_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise LabError(f"{folder.config_file} cannot be read as YAML: {one_line(error)}") from error
    if not isinstance(plain, dict):
        raise LabError(f"{folder.config_file} holds no config")
    return flatten(plain)


def flatten(config: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted paths; empty mappings and lists are values."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _distinction(run: RunData, rivals: Sequence[RunData], apart: tuple[str, ...]) -> str:
    """What tells a run from others of the same experiment: as few values as do it."""
    texts: list[str] = []
    paths = [path for path in config_differences([run, *rivals]) if not path.startswith((*apart, "_dims"))]
    for path in sorted(paths, key=_tells):
        value = run.config.get(path)
        left = [rival for rival in rivals if rival.config.get(path) == value]
        if len(left) < len(rivals):
            texts.append(f"{path.rpartition('.')[2]}={value}")
            rivals = left
    return " ".join(["", *texts])


def _tells(path: str) -> int:
    """The task tells most, and how long a run was least."""
    return 0 if path == "environment.task" else 2 if path.startswith("training.") else 1


def _make_unique(runs: Sequence[RunData]) -> None:
    for run in runs:
        twins = [other for other in runs if other.label == run.label]
        if len(twins) > 1:
            for number, twin in enumerate(twins, start=1):
                twin.label += f" #{number}"


def config_differences(runs: Sequence[RunData]) -> dict[str, list[Any]]:
    """Config paths whose values are not the same in all runs -> value by run (missing: None)."""
    paths = dict.fromkeys(path for run in runs for path in run.config)
    values = {path: [run.config.get(path) for run in runs] for path in paths}
    return {path: row for path, row in values.items() if any(value != row[0] for value in row)}


def summarize(run: RunData) -> Summary:
    metrics = run.metrics
    steps = int(metrics.last("step") or 0)
    seconds = metrics.seconds()
    rates = metrics.curve("time/env_steps_per_second").finite().y
    speed = float(rates.mean()) if len(rates) else None
    if seconds:
        covered = metrics.curve("step")
        speed = float(covered.x[-1] - covered.x[0]) / seconds
    total = run.config.get("training.total_timesteps")
    if isinstance(total, float) and not math.isfinite(total):
        raise LabError(
            f"{run.folder.config_file} has training.total_timesteps: {total}, which is no number of steps"
        )
    return Summary(
        steps=steps,
        total_steps=int(total) if isinstance(total, int | float) else None,
        frames=int(metrics.last("frames") or 0),
        updates=int(metrics.last("updates") or 0),
        eval_last=metrics.last("eval/return_mean"),
        eval_last_std=metrics.last("eval/return_std"),
        eval_best=metrics.best("eval/return_mean"),
        train_last=metrics.last("collect/return_mean"),
        seconds=seconds,
        steps_per_second=speed,
        checkpoints=_checkpoints(run.folder),
        code=_code(run.folder),
    )


def _checkpoints(folder: RunFolder) -> list[str]:
    """One line per checkpoint, from the manifests; damaged ones are named as such."""
    lines = []
    for file in sorted(folder.checkpoints.glob("*.json")):
        try:
            manifest = read_manifest(file)
            size = manifest["state"]["bytes"] / 1e6
            size += (
                sum(f["bytes"] for e in manifest["buffers"].values() for f in e.get("files", {}).values())
                / 1e6
            )
            lines.append(f"{file.stem}: step {manifest['step']:,}, {manifest['kind']}, {size:,.1f} MB")
        except (CheckpointError, KeyError, TypeError, AttributeError, ValueError) as error:
            lines.append(f"{file.stem}: {error}")
    return lines


def _code(folder: RunFolder) -> str:
    try:
        text = (folder.path / "code.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    first, _, rest = text.partition("\n")
    return first + (", with uncommitted changes" if rest.strip() else "")


def newest_media(run: RunData, limit: int) -> list[Path]:
    """Videos and pictures of a run, newest first."""
    files = [
        (changed, file)
        for file, changed in files_below(run.folder.media)
        if file.suffix.lower() in MEDIA_SUFFIXES
    ]
    files.sort(key=lambda pair: (pair[0], pair[1].name), reverse=True)
    return [file for _, file in files[:limit]]


def files_below(folder: Path) -> Iterator[tuple[Path, float]]:
    """Every file with its time of change, without those that are deleted meanwhile and links that lead nowhere."""
    for place, _, names in os.walk(folder):
        for name in names:
            file = Path(place, name)
            try:
                found = file.stat()
            except OSError:
                continue
            if stat.S_ISREG(found.st_mode):
                yield file, found.st_mtime
