"""The results folder of a suite, and the result of one run as a small JSON file.

    FOLDER/
    ├── results/METHOD.TASK.seedN.json    scores, curve, config, commit, machine; status done | partial | failed
    ├── weights/METHOD.TASK.seedN/        bfloat16 weights in parts (--weights)
    ├── claims/                           who works on what
    ├── logs/METHOD.TASK.seedN.txt        output of each run
    ├── runs/METHOD.TASK.seedN/           run folders (--runs puts them elsewhere)
    └── suite.jsonl                       what was started, finished and stopped, with times

`results`, `weights` and `logs` are what to keep; the run folders are needed only to continue unfinished runs.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from rl_lab.environments.suites.crafter import crafter_score
from rl_lab.errors import CheckpointError, ConfigError, LabError
from rl_lab.tools.published import RETURN
from rl_lab.tools.suite.definition import Planned, Score, Suite
from rl_lab.utils.files import json_safe, read_json, read_jsonl, write_json_atomic
from rl_lab.utils.untrusted import LinkError, check_links, control_characters, strings

FORMAT = 1
DONE, PARTIAL, FAILED, MISSING = "done", "partial", "failed", "missing"
CURVE_POINTS = 40  # of training episodes in a result file
ACHIEVEMENT = "collect/achievement_"
OF_THE_MACHINE = ("run_dir", "output_root", "hydra")  # keys of a config


class SuiteFolder:
    """Paths and files of a suite's results folder."""

    def __init__(self, path: Path | str, runs: Path | str | None = None) -> None:
        self.path = Path(path).expanduser().resolve()
        self.results = self.path / "results"
        self.weights = self.path / "weights"
        self.claims = self.path / "claims"
        self.logs = self.path / "logs"
        self.runs = Path(runs).expanduser().resolve() if runs else self.path / "runs"
        self.events = self.path / "suite.jsonl"

    def make(self) -> None:
        """Create the folder. Links out of it are refused: results and logs would be written elsewhere."""
        if self.path.is_dir():
            try:
                check_links(self.path, skip=("runs",))
            except LinkError as error:
                raise ConfigError(f"--folder: {str(error).partition(' and is not followed')[0]}") from None
        try:
            self.results.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--folder {self.path} cannot be written: {error}") from error

    def run_dir(self, name: str) -> Path:
        return self.runs / name

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.txt"

    def result_file(self, name: str) -> Path:
        return self.results / f"{name}.json"

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the result of a run, or None if there is none; LabError if it is damaged."""
        file = self.result_file(name)
        if not file.is_file():
            return None
        return read_result(file)

    def read_all(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Return every result, and one sentence about each file that cannot be read."""
        found, bad = [], []
        for file in sorted(self.results.glob("*.json")):
            try:
                found.append(read_result(file))
            except LabError as error:
                bad.append(str(error))
        return found, bad

    def write(self, result: Mapping[str, Any]) -> bool:
        """Write a result; return False if the folder has one of the same run that went further.

        A run that starts again on another machine, without its run folder, must not replace a longer curve.
        """
        check_result(result, "the result")
        name = str(result["name"])
        with contextlib.suppress(LabError):
            before = self.read(name)
            if before is not None and _further(before, result):
                return False
        write_json_atomic(self.result_file(name), json_safe(result))
        return True

    def event(self, what: str, **values: Any) -> None:
        """Append one line to suite.jsonl."""
        row = {"time": round(time.time(), 1), "event": what, **values}
        with contextlib.suppress(OSError), self.events.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _further(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    if before["status"] == DONE and now["status"] != DONE:
        return int(now.get("budget_frames") or 0) <= int(before.get("frames") or 0)
    return int(before.get("frames") or 0) > int(now.get("frames") or 0)


def read_result(file: Path) -> dict[str, Any]:
    """Read a result file; LabError if it is damaged or not one."""
    try:
        result = read_json(file)
    except CheckpointError as error:
        raise LabError(str(error)) from error
    required = ("name", "method", "task", "seed", "status")
    if not isinstance(result, dict) or any(key not in result for key in required):
        raise LabError(f"{file} is not the result of a run of a suite: remove it from the folder")
    check_result(result, str(file))
    return result


_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,200}")  # a file name, and no path


def check_result(result: Mapping[str, Any], source: str) -> None:
    """Raise LabError for values that no result has: it may be a stranger's file. The name becomes a file name."""
    for path, text in strings(dict(result)):
        if path in ("name", "method", "task", "status", "title") and control_characters(text):
            raise LabError(f"{source}: {path} has control characters")
    for key, valid in _VALID.items():
        value = result.get(key)
        if not valid(value):
            raise LabError(f"{source}: {key} is {ascii(value)[:100]}, which no result of a suite has")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return value is None or (_is_number(value) and 0 <= value < math.inf)


def _is_score(value: Any) -> bool:
    """None, a number, or what `json_safe` writes for a number that is not finite."""
    return value is None or _is_number(value) or value in ("NaN", "Infinity", "-Infinity")


def _is_curve(value: Any) -> bool:
    return value is None or (
        isinstance(value, list)
        and all(
            isinstance(row, Mapping)
            and {"frames", "return_mean"} <= row.keys()
            and _is_count(row["frames"])
            and _is_score(row["return_mean"])
            for row in value
        )
    )


_VALID: dict[str, Callable[[Any], bool]] = {
    "name": lambda value: isinstance(value, str) and bool(_NAME.fullmatch(value)),
    "method": lambda value: isinstance(value, str),
    "task": lambda value: isinstance(value, str),
    "seed": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "status": lambda value: value in (DONE, PARTIAL, FAILED),
    **dict.fromkeys(("frames", "budget_frames", "steps", "updates", "seconds", "gpu_hours"), _is_count),
    **dict.fromkeys(("score", "score_frames"), _is_score),
    **dict.fromkeys(("evaluations", "training_episodes"), _is_curve),
}


def status_of(planned: Planned, result: Mapping[str, Any] | None) -> str:
    """Return done, partial, failed or missing; a budget that was raised since makes a done run partial."""
    if result is None:
        return MISSING
    if result["status"] == DONE and planned.frames and int(result.get("frames") or 0) < planned.frames:
        return PARTIAL
    return str(result["status"])


# --- Building a result from a run folder ---


def build_result(
    suite: Suite,
    planned: Planned,
    run_dir: Path,
    *,
    status: str,
    facts: Mapping[str, Any],  # from the process of the run: command, commit, machine, final evaluation
    segments: Sequence[Mapping[str, Any]],  # of work: start, seconds, gpu_seconds
    error: str = "",
) -> dict[str, Any]:
    """Return the content of a result file from the metrics of a run, which may be unfinished."""
    rows = read_jsonl(run_dir / "metrics.jsonl") if (run_dir / "metrics.jsonl").is_file() else []
    final = facts.get("final")
    frames = int(max((float(row.get("frames") or 0) for row in rows), default=0))
    score, score_frames = run_score(planned.method.score, rows, final)
    seconds = sum(float(segment["seconds"]) for segment in segments)
    result: dict[str, Any] = {
        "format": FORMAT,
        "name": planned.name,
        "suite": suite.name,
        "method": planned.method.name,
        "title": planned.method.title,
        "task": planned.task,
        "seed": planned.seed,
        "status": status,
        "score": score,
        "score_frames": score_frames,
        "score_from": planned.method.score.describe(),
        "score_metric": planned.method.score.metric,
        "frames": frames,
        "budget_frames": planned.frames,
        "steps": int(max((float(row.get("step") or 0) for row in rows), default=0)),
        "updates": int(max((float(row.get("updates") or 0) for row in rows), default=0)),
        "seconds": round(seconds, 1),
        # A run beside n - 1 others on a GPU takes an n-th of its time.
        "gpu_hours": round(sum(float(segment["gpu_seconds"]) for segment in segments) / 3600, 4),
        "evaluations": evaluations(rows, planned.method.score.metric),
        "training_episodes": training_episodes(
            rows, max(1, (planned.frames or frames or 1) // CURVE_POINTS), planned.method.score.metric
        ),
        "final_evaluation": final,
        "command": facts.get("command"),
        "commit": facts.get("commit"),
        "machine": facts.get("machine"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "segments": [dict(segment) for segment in segments],
        "config": _config(run_dir),
    }
    achievements = mean_of_episodes(rows, ACHIEVEMENT)
    if achievements:
        result["crafter_score"] = crafter_score(achievements)
        result["achievements"] = achievements
    if error:
        result["error"] = error
    return result


def run_score(
    score: Score, rows: Sequence[Mapping[str, Any]], final: Mapping[str, Any] | None
) -> tuple[float | None, int | None]:
    """Return the score of a run and the frames at which it counts."""
    if score.source == "final" and final is not None:
        return float(final[score.metric]), int(final["frames"])
    if score.source == "train":
        end = int(max((float(row.get("frames") or 0) for row in rows), default=0))
        recent = _episodes(rows, since=end - score.window, metric=score.metric)
        count = sum(number for _, _, number in recent)
        return (sum(mean * number for _, mean, number in recent) / count if count else None), end
    key = f"eval/{score.metric}"
    points = [(int(row["frames"]), float(row[key])) for row in rows if key in row][-score.last :]
    return (sum(value for _, value in points) / len(points), points[-1][0]) if points else (None, None)


def evaluations(rows: Sequence[Mapping[str, Any]], metric: str = RETURN) -> list[dict[str, float]]:
    """Return the evaluations during training: frames, updates, mean and standard deviation of returns, the metric."""
    return [
        {
            "frames": int(row["frames"]),
            "updates": int(row.get("updates") or 0),
            "return_mean": float(row["eval/return_mean"]),
            "return_std": float(row.get("eval/return_std", 0.0)),
            **({metric: float(row[f"eval/{metric}"])} if f"eval/{metric}" in row else {}),
        }
        for row in rows
        if "eval/return_mean" in row
    ]


def training_episodes(
    rows: Sequence[Mapping[str, Any]], width: int, metric: str = RETURN
) -> list[dict[str, float]]:
    """Return the mean return (and metric) of the training episodes that ended in each interval of `width` frames."""
    found: dict[int, dict[str, float]] = {}
    for name in dict.fromkeys((RETURN, metric)):
        sums: dict[int, list[float]] = {}
        for frames, mean, number in _episodes(rows, metric=name):
            total = sums.setdefault(-(-frames // width) * width, [0.0, 0.0])
            total[0] += mean * number
            total[1] += number
        for end, (value, count) in sums.items():
            point = found.setdefault(end, {"frames": end})
            point[name] = value / count
            point.setdefault("episodes", int(count))
    return [point for _, point in sorted(found.items())]


def mean_of_episodes(rows: Sequence[Mapping[str, Any]], prefix: str) -> dict[str, float]:
    """Return the mean over all training episodes of each logged value whose name starts with `prefix`."""
    sums: dict[str, list[float]] = {}
    before = 0.0
    for row in rows:
        if row.get("collect/return_mean") is None:
            continue
        number = float(row["collect/episodes"]) - before
        before = float(row["collect/episodes"])
        for key, value in row.items():
            if key.startswith(prefix):
                total = sums.setdefault(key.removeprefix(prefix), [0.0, 0.0])
                total[0] += float(value) * number
                total[1] += number
    return {key: total / number for key, (total, number) in sums.items() if number}


def _episodes(
    rows: Sequence[Mapping[str, Any]], since: float = -1.0, metric: str = RETURN
) -> list[tuple[int, float, float]]:
    """Return (frames, mean of the metric, number of episodes) of each log line with finished training episodes."""
    found = []
    before = 0.0  # episodes so far: a line's mean is over the episodes since the previous one
    for row in rows:
        if row.get("collect/return_mean") is None:
            continue
        number = float(row["collect/episodes"]) - before
        before = float(row["collect/episodes"])
        mean = row.get(f"collect/{metric}")
        if mean is None:
            continue
        if float(row["frames"]) > since and number > 0:
            found.append((int(row["frames"]), float(mean), number))
    return found


def _config(run_dir: Path) -> Any:
    try:
        return without_paths(yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None


def without_paths(config: Any) -> Any:
    """Return a config without the folders of the machine that it ran on."""
    if not isinstance(config, Mapping):
        return config
    return {key: value for key, value in config.items() if key not in OF_THE_MACHINE}
