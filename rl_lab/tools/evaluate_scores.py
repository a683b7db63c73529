"""What the episodes of an evaluation come to: statistics, normalised scores, one line an episode."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_lab.environments.crafter import ACHIEVEMENT, crafter_score
from rl_lab.episode_tracker import Episode, return_statistics
from rl_lab.tools.published import Task, normalisation
from rl_lab.tools.statistics import describe
from rl_lab.tools.words import bounds, number


def summary(episodes: Sequence[Episode], task: Task, seed: int) -> dict[str, Any]:
    """Everything that is said of the episodes, for JSON. The same episodes and seed give the same."""
    returns = [episode.episode_return for episode in episodes]
    found = describe(returns, seed=seed)
    result: dict[str, Any] = return_statistics(list(episodes))
    result |= {
        "return_median": found["median"],
        "return_iqm": found["iqm"],
        "return_intervals": found["intervals"],
        "interval_level": found["level"],
    }
    scale = normalisation(task)
    if scale is not None:
        scores = describe([float(scale(value)) for value in returns], seed=seed)
        result["normalised"] = {
            "name": scale.name,
            **{key: scores[key] for key in ("mean", "std", "median", "iqm", "min", "max", "intervals")},
            "zero_at": scale.low,
            "one_at": scale.high,
            "source": scale.source,
        }
    success = {
        key.removeprefix(ACHIEVEMENT): value for key, value in result.items() if key.startswith(ACHIEVEMENT)
    }
    if success:
        result["crafter_score"] = crafter_score(success)
    result["returns"] = returns
    result["lengths"] = [episode.length for episode in episodes]
    return result


def episode_lines(episodes: Sequence[Episode], task: Task) -> str:
    """The episodes as CSV: number, environment, return, length, normalised score, and what the environment told."""
    scale = normalisation(task)
    told = sorted({key for episode in episodes for key in episode.log})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["episode", "env", "return", "length", *(["normalised"] if scale else []), *told])
    for index, episode in enumerate(episodes):
        scored = [repr(float(scale(episode.episode_return)))] if scale else []
        logs = [episode.log.get(key, "") for key in told]
        writer.writerow([index, episode.env, repr(episode.episode_return), episode.length, *scored, *logs])
    return text.getvalue()


HEADER = ("", "mean", "std", "median", "IQM", "min", "max", "95 % of the mean", "95 % of the IQM")


def table(result: dict[str, Any]) -> list[list[str]]:
    """Rows under HEADER: return, normalised score, length."""
    spans = result["return_intervals"]
    rows = [
        ["return"]
        + [number(result[f"return_{key}"]) for key in ("mean", "std", "median", "iqm", "min", "max")]
        + [_span(spans["mean"]), _span(spans["iqm"])]
    ]
    scores = result.get("normalised")
    if scores:
        rows.append(
            [scores["name"]]
            + [number(scores[key]) for key in ("mean", "std", "median", "iqm", "min", "max")]
            + [_span(scores["intervals"]["mean"]), _span(scores["intervals"]["iqm"])]
        )
    lengths = np.array(result["lengths"], dtype=np.float64)
    rows.append(
        ["length"]
        + [number(float(value)) for value in (lengths.mean(), lengths.std(), np.median(lengths))]
        + ["", number(float(lengths.min())), number(float(lengths.max())), "", ""]
    )
    return rows


def _span(pair: list[float] | None) -> str:
    return bounds(*pair) if pair else bounds(None, None)
