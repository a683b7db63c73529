"""What a report knows of a run folder: config, metrics, checkpoints, media, and which runs are seeds of one thing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_lab.errors import CheckpointError, LabError
from rl_lab.run_folder import RunFolder, find_run, output_root
from rl_lab.tools.curves import Metrics
from rl_lab.utils.manifest import read_manifest

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
MEDIA_SUFFIXES = (".gif", ".mp4", ".webm", ".png", ".jpg", ".jpeg")


@dataclass
class RunData:
    """One run as it lies on disk now; it may still be going on."""

    folder: RunFolder
    config: dict[str, Any]  # flat: dotted path -> value
    metrics: Metrics
    label: str = ""  # of this run among those reported: unique
    group: str = ""  # what it is one seed of

    @property
    def name(self) -> str:
        return str(self.config.get("experiment.name", self.folder.path.name))

    @property
    def seed(self) -> Any:
        return self.config.get("experiment.seed")


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
    """Run folders by name; a folder above several stands for all of them; no name: the newest run."""
    if not names:
        return [find_run(None, output_root(root))]
    found: dict[Path, RunFolder] = {}
    for name in names:
        path = Path(name).expanduser()
        below = [] if (path / "config.yaml").is_file() else _runs_below(path)
        for run in below or [find_run(path, output_root(root))]:
            found[run.path] = run
    return list(found.values())


def _runs_below(path: Path) -> list[RunFolder]:
    """Runs up to three folders down: a day, a sweep, a folder of sweeps."""
    files = [file for depth in ("*", "*/*", "*/*/*") for file in path.glob(f"{depth}/config.yaml")]
    return [RunFolder(file.parent) for file in sorted(files) if not file.parent.name.startswith(".")]


def load_runs(folders: Sequence[RunFolder]) -> list[RunData]:
    """Read the runs and give each a label; runs that differ in their seed only share a group."""
    runs = [RunData(folder, _read_config(folder), Metrics.read(folder.metrics)) for folder in folders]
    identities = [
        tuple(
            sorted(
                (path, str(value)) for path, value in run.config.items() if not path.startswith(OF_ONE_RUN)
            )
        )
        for run in runs
    ]
    distinct = list(dict.fromkeys(identities))
    for run, identity in zip(runs, identities):
        rivals = [runs[identities.index(other)] for other in distinct if other != identity]
        rivals = [rival for rival in rivals if rival.name == run.name]
        run.group = run.name + _distinction(run, rivals)
        same = identities.count(identity) > 1
        run.label = f"{run.group}, seed {run.seed}" if same else run.group
    _make_unique(runs)
    return runs


def _read_config(folder: RunFolder) -> dict[str, Any]:
    from omegaconf import OmegaConf

    try:
        plain = OmegaConf.to_container(folder.load_config(), resolve=False)
    except LabError:
        raise
    except Exception as error:  # whatever the YAML parser finds wrong
        raise LabError(f"{folder.config_file} cannot be read as YAML: {error}") from error
    assert isinstance(plain, dict)
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


def _distinction(run: RunData, rivals: Sequence[RunData]) -> str:
    """What tells a run from others of the same experiment: as few values as do it."""
    texts: list[str] = []
    paths = [
        path for path in config_differences([run, *rivals]) if not path.startswith((*OF_ONE_RUN, "_dims"))
    ]
    for path in sorted(paths, key=lambda path: path.startswith("training.")):  # lengths tell least
        value = run.config.get(path)
        left = [rival for rival in rivals if rival.config.get(path) == value]
        if len(left) < len(rivals):
            texts.append(f"{path.rpartition('.')[2]}={value}")
            rivals = left
    return " ".join(["", *texts])


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
        except (CheckpointError, KeyError, TypeError, AttributeError) as error:
            lines.append(f"{file.stem}: {error}")
    return lines


def _code(folder: RunFolder) -> str:
    try:
        text = (folder.path / "code.txt").read_text()
    except OSError:
        return ""
    first, _, rest = text.partition("\n")
    return first + (", with uncommitted changes" if rest.strip() else "")


def newest_media(run: RunData, limit: int) -> list[Path]:
    """Videos and pictures of a run, newest first."""
    files = [
        file
        for file in run.folder.media.rglob("*")
        if file.suffix.lower() in MEDIA_SUFFIXES and file.is_file()
    ]
    return sorted(files, key=lambda file: (file.stat().st_mtime, file.name), reverse=True)[:limit]
