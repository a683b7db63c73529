"""Run folders as a report reads them: config, metrics, checkpoints, media, and groups of seeds."""

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
from rl_lab.utils.progress import point_of
from rl_lab.utils.untrusted import open_regular, read_yaml_text

# Config paths that may differ between seeds of one experiment.
OF_ONE_RUN = (
    "experiment.seed",
    "experiment.device",
    "run_dir",
    "output_root",
    "training.resume_path",
    "logging.",
    "wandb.",
)
# Config paths that may differ between tasks of one method.
OF_THE_TASK = ("environment.", "_dims.")
MEDIA_SUFFIXES = (".gif", ".mp4", ".webm", ".png", ".jpg", ".jpeg")


@dataclass
class RunData:
    """One run as it is on disk now; it may still be training."""

    folder: RunFolder
    config: dict[str, Any]  # flat: dotted path -> value
    metrics: Metrics
    label: str = ""  # unique within the report
    group: str = ""  # a method on a task; runs of one group are its seeds
    method: str = ""  # compared over tasks

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
    """Summary values of a run. None: not logged."""

    steps: int = 0
    total_steps: int | None = None
    frames: int = 0
    updates: int = 0
    eval_last: float | None = None
    eval_last_std: float | None = None
    eval_best: tuple[float, int, int] | None = None  # value, step, updates
    train_last: float | None = None
    seconds: float | None = None
    steps_per_second: float | None = None
    checkpoints: list[str] = field(default_factory=list)
    code: str = ""


def find_runs(names: Sequence[str | Path], root: str | None = None) -> list[RunFolder]:
    """Return run folders by name; a parent folder means all runs below it.

    No name: the newest run or sweep.
    """
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
    """Return the newest run under the root, or all runs of the newest sweep."""
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
    """Return the runs up to four levels below `path` (a day, a sweep, a folder of sweeps, all outputs)."""
    files = []
    # Unlike glob, os.walk ignores folders that are deleted during the walk.
    for place, folders, _ in os.walk(path, followlinks=True):
        if len(Path(place).relative_to(path).parts) == 4:
            folders.clear()
        file = Path(place, "config.yaml")
        if Path(place) != path and file.is_file() and not file.parent.name.startswith("."):
            files.append(file)
    return [RunFolder(file.parent) for file in sorted(files)]


def load_runs(folders: Sequence[RunFolder], by: str = "config") -> list[RunData]:
    """Read the runs and group them.

    by: what two runs of a task must share to count as seeds of one method: "config" (everything except the
    seed), "experiment" (its name) or "workflow".
    """
    return _group([_read_run(folder) for folder in folders], by)


def load_readable(
    folders: Sequence[RunFolder], by: str = "config"
) -> tuple[list[RunData], dict[str, Exception]]:
    """Return the readable runs, as `load_runs` does, and sentence -> exception of the others."""
    runs, left_out = [], {}
    for folder in folders:
        try:
            run = _read_run(folder)
            _ = run.summary, run.task  # computed here, so that an error is attributed to this run
            runs.append(run)
        except Exception as error:
            left_out[plot_problem(folder, error)] = error
    return _group(runs, by), left_out


def plot_problem(folder: RunFolder, error: Exception) -> str:
    """Return one sentence about a run that cannot be plotted; it starts with the path."""
    return (
        str(error) if isinstance(error, LabError) else f"{folder.path} cannot be plotted: {one_line(error)}"
    )


def _read_run(folder: RunFolder) -> RunData:
    folder.check_links(replay=False)
    return RunData(folder, read_config(folder), Metrics.read(folder.metrics))


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
    for attribute, ignored in (("group", OF_ONE_RUN), ("method", (*OF_ONE_RUN, *OF_THE_TASK))):
        identities = [
            tuple(
                sorted(
                    (path, str(value)) for path, value in run.config.items() if not path.startswith(ignored)
                )
            )
            for run in runs
        ]
        distinct = list(dict.fromkeys(identities))
        for run, identity in zip(runs, identities):
            others = [runs[identities.index(other)] for other in distinct if other != identity]
            others = [other for other in others if other.name == run.name]
            setattr(run, attribute, run.name + _distinction(run, others, ignored))


def _group_by_name(runs: Sequence[RunData], by: str) -> None:
    tasks = {run.task.full_name for run in runs}
    for run in runs:
        run.method = run.name if by == "experiment" else run.workflow
        run.group = run.method if len(tasks) == 1 else f"{run.method} on {run.task.full_name}"


def read_config(folder: RunFolder) -> dict[str, Any]:
    """Read the config without validation: a run of an older RL Lab can be reported too."""
    import yaml

    try:
        plain = yaml.safe_load(read_yaml_text(folder.config_file))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise LabError(f"{folder.config_file} cannot be read as YAML: {one_line(error)}") from error
    if not isinstance(plain, dict):
        raise LabError(f"{folder.config_file} contains no config")
    return flatten(plain)


def flatten(config: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted paths; empty mappings and lists are values."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _distinction(run: RunData, others: Sequence[RunData], ignored: tuple[str, ...]) -> str:
    """Return as few config values as are needed to distinguish a run from others of the same experiment."""
    texts: list[str] = []
    paths = [path for path in config_differences([run, *others]) if not path.startswith((*ignored, "_dims"))]
    for path in sorted(paths, key=_distinction_order):
        value = run.config.get(path)
        left = [other for other in others if other.config.get(path) == value]
        if len(left) < len(others):
            names = [_names(other.config.get(path)) for other in (run, *others)]
            shown = names[0] if names[0] and names[0] not in names[1:] else value
            texts.append(f"{path.rpartition('.')[2]}={shown}")
            others = left
    return " ".join(["", *texts])


def _names(value: Any) -> str:
    """Return the names of a list of phases, which is long; "" for other values."""
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        return ""
    parts = [
        f"{item.get('repeat', 1)}×({_names(item['phases'])})"
        if "phases" in item
        else str(item.get("name", ""))
        for item in value
    ]
    return "+".join(parts)


def _distinction_order(path: str) -> int:
    """Sort key: the task first, settings of `training` last."""
    return 0 if path == "environment.task" else 2 if path.startswith("training.") else 1


def _make_unique(runs: Sequence[RunData]) -> None:
    for run in runs:
        twins = [other for other in runs if other.label == run.label]
        if len(twins) > 1:
            for number, twin in enumerate(twins, start=1):
                twin.label += f" #{number}"


def config_differences(runs: Sequence[RunData]) -> dict[str, list[Any]]:
    """Return config path -> value by run (missing: None) for paths whose values differ between runs."""
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
            f"{run.folder.config_file} has training.total_timesteps: {total}, which is not a number of steps"
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
    """Return one line per checkpoint from the manifests; damaged ones are marked."""
    lines = []
    for file in sorted(folder.checkpoints.glob("*.json")):
        try:
            manifest = read_manifest(file)
            size = manifest["state"]["bytes"] / 1e6
            size += (
                sum(f["bytes"] for e in manifest["buffers"].values() for f in e.get("files", {}).values())
                / 1e6
            )
            where = point_of(manifest["step"], manifest["info"].get("updates"))
            lines.append(f"{file.stem}: {where}, {manifest['kind']}, {size:,.1f} MB")
        except (CheckpointError, KeyError, TypeError, AttributeError, ValueError) as error:
            lines.append(f"{file.stem}: {error}")
    return lines


def _code(folder: RunFolder) -> str:
    try:
        with open_regular(folder.path / "code.txt") as file:
            text = file.read(1 << 16).decode("utf-8", errors="replace")
    except OSError:
        return ""
    first, _, rest = text.partition("\n")
    return first + (", with uncommitted changes" if rest.strip() else "")


def newest_media(run: RunData, limit: int) -> list[Path]:
    """Return videos and images of a run, newest first."""
    files = [
        (changed, file)
        for file, changed in files_below(run.folder.media)
        if file.suffix.lower() in MEDIA_SUFFIXES
    ]
    files.sort(key=lambda pair: (pair[0], pair[1].name), reverse=True)
    return [file for _, file in files[:limit]]


def files_below(folder: Path) -> Iterator[tuple[Path, float]]:
    """Yield every file with its modification time; deleted files and broken links are skipped."""
    for place, _, names in os.walk(folder):
        for name in names:
            file = Path(place, name)
            try:
                found = file.stat()
            except OSError:
                continue
            if stat.S_ISREG(found.st_mode):
                yield file, found.st_mtime
