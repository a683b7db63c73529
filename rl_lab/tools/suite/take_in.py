"""Takes finished runs into the results folder of a suite, so that they count as done.

Two kinds of files: results of another suite folder, and the JSON files that scripts/dev/keep_result.py keeps in
docs/results. Of the latter, the command says which method the run is of, or the key `suite_method`.
"""

from __future__ import annotations

import csv
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_lab.errors import ConfigError, LabError, one_line
from rl_lab.tools.published import RETURN
from rl_lab.tools.suite.definition import Method, Planned, Suite
from rl_lab.tools.suite.results import DONE, FORMAT, PARTIAL, SuiteFolder, check_result, without_paths
from rl_lab.utils.files import read_json

# Words of a command that change what is computed; all others are budget, cadence, output or speed.
OF_THE_METHOD = ("size=", "tdmpc_size=", "algorithm.", "components", "controllers.", "buffers.", "optimizers")


def take_in(suite: Suite, folder: SuiteFolder, files: Sequence[Path]) -> Iterator[str]:
    """Write a result for each file; yield one line about each. The first file that does not fit is an error."""
    folder.make()
    for file in files:
        content = read_json(file)
        if not isinstance(content, Mapping):
            raise LabError(f"{file} is not a result of a run")
        if "method" in content and "name" in content:
            method = suite.method(str(content["method"]))
            if method is None:
                raise LabError(
                    f"{file} is of method {content['method']}, which suite {suite.name} does not have"
                )
            result = {**content, "config": without_paths(content.get("config"))}
        else:
            try:
                result = kept_result(suite, file, content)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise LabError(f"{file} is not a kept result: {one_line(error)}") from None
        check_result(result, str(file))
        written = folder.write(result)
        state = (
            f"{result['status']}, {int(result.get('frames') or 0):,} frames"
            if written
            else "not taken: a longer one is there"
        )
        yield f"{result['name']}: {state}"


def kept_result(suite: Suite, file: Path, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a JSON file of scripts/dev/keep_result.py."""
    words = shlex.split(str(kept.get("command", "")).partition(";")[0])
    given = dict(word.lstrip("+").split("=", 1) for word in words if "=" in word)
    method = _named_method(suite, file, kept) or _method(suite, file, words, given)
    task = given.get("environment.task", method.tasks[0])
    seed = int(given.get("experiment.seed", kept.get("seed", 0)))
    curve = _curve(file, kept)
    frames = int(kept.get("frames") or max((row["frames"] for row in curve), default=0))
    budget = method.task_frames.get(task, method.frames)
    if method.score.metric != RETURN:
        raise ConfigError(
            f"{file}: score.metric of {method.name} is {method.score.metric}; kept results have returns"
        )
    planned = Planned(method, task, seed, budget)
    final = _final(kept, frames)
    episodes = _training(kept, curve)
    evaluations = [
        {"frames": int(at), "return_mean": float(value)}
        for at, value in (kept.get("evaluations_by_frames") or {}).items()
    ]
    score, at = _score(method, episodes, evaluations, final, frames)
    minutes = kept.get("minutes")
    return {
        "format": FORMAT,
        "name": planned.name,
        "suite": suite.name,
        "method": method.name,
        "title": method.title,
        "task": task,
        "seed": seed,
        "status": DONE if budget is None or frames >= budget else PARTIAL,
        "score": score,
        "score_frames": at,
        "score_from": method.score.describe(),
        "frames": frames,
        "budget_frames": budget,
        "steps": int(kept.get("steps") or (final or {}).get("step") or 0),
        "updates": int(kept.get("updates") or 0),
        "seconds": round(float(minutes) * 60, 1) if minutes else None,
        "gpu_hours": None,  # how much of the GPU a run beside others took was not measured
        "evaluations": evaluations,
        "training_episodes": episodes,
        "final_evaluation": final,
        "command": kept.get("command"),
        "commit": kept.get("commit"),
        "machine": kept.get("machine"),
        "note": kept.get("note") or kept.get("stopped"),
        "taken_from": file.name,
    }


def _named_method(suite: Suite, file: Path, kept: Mapping[str, Any]) -> Method | None:
    """Return the method that a kept result names with `suite_method`; None without that key.

    It is for runs whose command says something else today: of a script, or of an experiment that has changed since.
    """
    if "suite_method" not in kept:
        return None
    name = kept["suite_method"]
    if name is None:
        raise ConfigError(
            f"{file}: suite_method is null: its experiment has changed since, and no suite has what it ran"
        )
    method = suite.method(str(name))
    if method is None:
        raise ConfigError(f"{file} is of method {name}, which suite {suite.name} does not have")
    return method


def _method(suite: Suite, file: Path, words: Sequence[str], given: Mapping[str, str]) -> Method:
    """Return the method that the command of a kept run is of."""
    own = {word.lstrip("+") for word in words if word.lstrip("+").startswith(OF_THE_METHOD)}
    for method in suite.methods:
        wanted = {word.lstrip("+") for word in method.overrides if word.lstrip("+").startswith(OF_THE_METHOD)}
        if method.experiment == given.get("experiment") and wanted == own:
            return method
    experiment = given.get("experiment")
    named = f"experiment {experiment}" if experiment else "no experiment (its command names none)"
    raise ConfigError(
        f"{file} is of {named} with {', '.join(sorted(own)) or 'its defaults'}, which no method of suite "
        f"{suite.name} has"
    )


def _curve(file: Path, kept: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return the rows of the CSV file beside a kept JSON file."""
    name = str(kept.get("curve") or "")
    if Path(name).name != name:
        raise ValueError(f"its curve is {name[:100]!r}, which is not the name of a file beside it")
    place = file.parent / name
    if not name or not place.is_file():
        return []
    with place.open(encoding="utf-8", newline="") as opened:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(opened)]


def _training(kept: Mapping[str, Any], curve: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Return training returns by frames: as kept in intervals, or the lines of the curve."""
    binned = kept.get("training_episodes_by_frames")
    if binned:
        return [{"frames": int(at), "return_mean": float(value)} for at, value in binned.items()]
    return [
        {"frames": int(row["frames"]), "return_mean": row["train_return"]}
        for row in curve
        if "train_return" in row
    ]


def _final(kept: Mapping[str, Any], frames: int) -> dict[str, Any] | None:
    """Return the evaluation after training, preferring the last checkpoint and sampled actions."""
    found = kept.get("final_evaluations") or ({"one": kept["evaluation"]} if "evaluation" in kept else {})
    if not found:
        return None
    chosen = max(
        found.values(), key=lambda item: (item.get("checkpoint", "last") == "last", bool(item.get("sample")))
    )
    keep = ("episodes", "step", "sample", "seed", "returns", "lengths", "return_mean", "return_std")
    return {key: chosen[key] for key in keep if key in chosen} | {"frames": frames}


def _score(
    method: Method,
    episodes: Sequence[Mapping[str, float]],
    evaluations: Sequence[Mapping[str, float]],
    final: Mapping[str, Any] | None,
    frames: int,
) -> tuple[float | None, int | None]:
    if method.score.source == "train":
        recent = [row["return_mean"] for row in episodes if row["frames"] > frames - method.score.window]
        return (sum(recent) / len(recent), frames) if recent else (None, None)
    if method.score.source == "final":
        return (float(final["return_mean"]), frames) if final else (None, None)
    return (evaluations[-1]["return_mean"], int(evaluations[-1]["frames"])) if evaluations else (None, None)
