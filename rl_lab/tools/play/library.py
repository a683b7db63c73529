"""The checkpoints and runs that a session can switch to while it is open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_lab.errors import LabError
from rl_lab.run_folder import RunFolder
from rl_lab.utils.checkpoint.loading import manifests
from rl_lab.utils.checkpoint.manifest import read_manifest
from rl_lab.utils.files import read_json
from rl_lab.utils.progress import point_of

MOST_RUNS = 20  # the newest ones beside the current run


@dataclass(frozen=True)
class Entry:
    """Weights to play with. `label` says which ones they are."""

    run: Path
    checkpoint: str  # as in --checkpoint
    label: str
    task: str

    def to_dict(self) -> dict[str, str]:
        return {"run": run_name(self.run), "task": self.task, "weights": self.label}


class Library:
    """Lists the weights near a run and opens them.

    run: the run that the session began with
    open: creates the sources of an entry
    """

    def __init__(self, run: Path, checkpoint: str, root: Path, open_entry: Callable[[Entry], Any]) -> None:
        self.root = root
        self.open_entry = open_entry
        self.entries: list[Entry] = []
        self.current = -1
        self.refresh(run, checkpoint)

    def refresh(self, run: Path, checkpoint: str) -> None:
        """List the weights of the current run, and the last ones of other runs."""
        others = [folder for folder in runs_near(run, self.root) if folder != run]
        self.entries = [*entries_of(run), *(entry for other in others for entry in entries_of(other)[:2])]
        same = [index for index, entry in enumerate(self.entries) if entry.run == run]
        exact = [index for index in same if self.entries[index].checkpoint == checkpoint]
        self.current = next(iter([*exact, *same]), -1)

    def open(self, index: int) -> Any:
        """Create the sources of an entry; LabError if there is none, or if it cannot be played."""
        if not 0 <= index < len(self.entries):
            raise LabError(f"there are {len(self.entries)} checkpoints to choose from, and no number {index}")
        entry = self.entries[index]
        opened = self.open_entry(entry)
        self.refresh(entry.run, entry.checkpoint)
        return opened

    def next_in_run(self) -> int:
        """Return the index of the next checkpoint of the current run."""
        if self.current < 0:
            return 0
        run = self.entries[self.current].run
        same = [index for index, entry in enumerate(self.entries) if entry.run == run]
        return same[(same.index(self.current) + 1) % len(same)]

    def next_run(self) -> int:
        """Return the index of the first entry of the next run."""
        runs = list(dict.fromkeys(entry.run for entry in self.entries))
        if self.current < 0 or not runs:
            return 0
        following = runs[(runs.index(self.entries[self.current].run) + 1) % len(runs)]
        return next(index for index, entry in enumerate(self.entries) if entry.run == following)


def run_name(run: Path) -> str:
    """Return "2026-11-15/14-30-05", the folder with its parent."""
    return "/".join(run.parts[-2:])


def runs_near(run: Path, root: Path) -> list[Path]:
    """Return the newest runs under `root` and beside a run, newest first."""
    configs = {*root.glob("*/*/config.yaml"), *run.parent.glob("*/config.yaml")}
    found = {}
    for file in configs:
        folder = file.parent.resolve()
        try:
            weights = RunFolder(folder).exported or any((folder / "checkpoints").glob("*.json"))
            if weights and not file.is_symlink():
                found[folder] = file.stat().st_mtime
        except OSError:  # it was deleted
            continue
    return sorted(found, key=lambda folder: found[folder], reverse=True)[:MOST_RUNS]


def entries_of(run: Path) -> list[Entry]:
    """Return the last weights of a run, the best, and those of earlier steps; of an exported agent its only ones."""
    folder = RunFolder(run)
    try:
        task = str(read_json(folder.spec_file).get("name", ""))
    except (LabError, OSError, ValueError, AttributeError):
        task = ""
    if folder.exported:
        return [Entry(run, "last", _name_of_export(folder), task)]
    steps = [file.stem for file in manifests(folder.checkpoints)]
    found = []
    if steps:
        found.append(Entry(run, "last", f"last, {_point(folder, steps[0])}", task))
    try:
        best = read_manifest(folder.checkpoints / "best.json")
        score = best["info"].get("best_return")
        where = point_of(best["step"], best["info"].get("updates"))
        words = f"best, {where}" + ("" if score is None else f" ({score:,.1f})")
        found.append(Entry(run, "best", words, task))
    except (LabError, OSError):  # no evaluation yet
        pass
    found += [Entry(run, name, f"step {_step(name):,}", task) for name in steps[1:]]
    return found


def _point(folder: RunFolder, stem: str) -> str:
    """Return "step 12,002", or "update 6,000" of a run on stored data alone."""
    step = _step(stem)
    try:
        known = {} if step else read_manifest(folder.checkpoints / f"{stem}.json")["info"]
    except (LabError, OSError):
        known = {}
    return point_of(step, known.get("updates"))


def _name_of_export(folder: RunFolder) -> str:
    """Return "boxing, step 16,000"; the step is known if the agent was scored."""
    name = folder.path.name
    try:
        scores = read_json(folder.path / "scores.json")
        return f"{name}, {point_of(int(scores['step']), scores.get('updates'))}"
    except (LabError, OSError, LookupError, TypeError, ValueError):
        return name


def _step(stem: str) -> int:
    digits = stem.removeprefix("step_")
    return int(digits) if digits.isdigit() else 0
