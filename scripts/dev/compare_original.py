"""Puts runs beside those of the authors' own code at the same settings: CSV and picture in docs/results.

    python scripts/dev/compare_original.py NAME --ours OURS/metrics.jsonl … --theirs THEIRS/metrics.jsonl … --title "…"

THEIRS is what danijar/dreamerv3 writes (`--logger.outputs jsonl --logger.filter '.*'`); scores.jsonl beside it gives the
training episodes. Both average over what they log at once, so a line stands at the middle of its interval.
--repeat is the action repeat: their steps count frames, ours decisions. --at prints what both say there, as JSON.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

from rl_lab.tools.report.figures import colors, figure_file, legend

RESULTS = Path(__file__).parents[2] / "docs" / "results"
# Column -> (metric here, metrics there, which are summed)
COLUMNS = {
    "entropy": ("controller/entropy", ["train/ent/action"]),
    "value": ("controller/value_mean", ["train/val"]),
    "return": ("controller/return_mean", ["train/tar"]),
    "dreamed_reward": ("controller/reward_mean", ["train/rew"]),
    "kl": ("train/kl", ["train/loss/dyn"]),
    "reconstruction": (
        "",
        [f"train/loss/{name}" for name in ("height", "orientations", "velocity", "image")],
    ),
    "reward_loss": ("train/loss/reward", ["train/loss/rew"]),
    "replay_value_loss": ("controller/loss/replay_value", ["train/loss/repval"]),
    "posterior_entropy": ("train/posterior_entropy", ["train/rep_ent"]),
}
EPISODES = "training_return"
Line = dict[str, float]


def read(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ours(path: Path) -> list[Line]:
    lines, before = [], 0.0
    for row in read(path):
        if "controller/entropy" not in row:
            continue
        line = {"updates": (before + row["updates"]) / 2, "decisions": row["step"]}
        for name, (key, _) in COLUMNS.items():
            parts = [v for k, v in row.items() if k.startswith("train/loss/reconstruction/")]
            line[name] = row[key] if key else sum(parts)
        if "collect/return_mean" in row:
            line[EPISODES] = row["collect/return_mean"]
        lines.append(line)
        before = row["updates"]
    return lines


def theirs(path: Path, repeat: int) -> list[Line]:
    """`updates` there is a mean over the interval already."""
    lines = []
    for row in read(path):
        if "train/loss/dyn" in row:
            line = {"updates": row["train/opt/updates"], "decisions": row["step"] / repeat}
            line |= {name: total(row, keys) for name, (_, keys) in COLUMNS.items()}
            lines.append(line)
    for decisions, score in episodes(path.with_name("scores.jsonl"), repeat):
        min(lines, key=lambda line: abs(line["decisions"] - decisions))[EPISODES] = score
    return lines


def total(row: Line, keys: list[str]) -> float:
    """Of those that the task has (observations differ); KeyError where it has none."""
    found = [row[key] for key in keys if key in row]
    if not found:
        raise KeyError(" + ".join(keys))
    return sum(found)


def near(lines: list[Line], updates: float, column: str) -> float:
    """Mean of the two lines nearest to that many updates."""
    two = sorted(lines, key=lambda line: abs(line["updates"] - updates))[:2]
    return float(f"{sum(line[column] for line in two) / len(two):.3g}")


def episodes(path: Path, repeat: int) -> list[tuple[float, float]]:
    """Decisions and mean score of the episodes that ended within each thousand frames, the length of one in DMC."""
    found: dict[int, list[float]] = {}
    for row in read(path) if path.exists() else []:
        found.setdefault(round(row["step"] / 1000), []).append(row["episode/score"])
    return [(1000 * place / repeat, sum(scores) / len(scores)) for place, scores in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name")
    parser.add_argument("--ours", type=Path, nargs="+", required=True)
    parser.add_argument("--theirs", type=Path, nargs="+", required=True)
    parser.add_argument("--repeat", type=int, default=2, help="frames that one decision takes")
    parser.add_argument("--title", default="")
    parser.add_argument("--until", type=float, default=float("inf"), help="updates that the picture shows")
    parser.add_argument("--at", type=float, nargs="*", default=[], help="updates to compare at")
    options = parser.parse_args()
    curves = [("RL Lab", ours(path)) for path in options.ours]
    curves += [("danijar/dreamerv3", theirs(path, options.repeat)) for path in options.theirs]
    columns = [
        *COLUMNS,
        *([EPISODES] if any(EPISODES in line for _, lines in curves for line in lines) else []),
    ]
    with (RESULTS / f"{options.name}.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["code", "run", "updates", "decisions", *columns])
        for number, (code, lines) in enumerate(curves):
            for line in lines:
                values = [
                    f"{line[key]:.5g}" if key in line else "" for key in ("updates", "decisions", *columns)
                ]
                writer.writerow([code, number, *values])
    shown = [(code, [line for line in lines if line["updates"] <= options.until]) for code, lines in curves]
    draw(RESULTS / f"{options.name}.png", shown, columns, options.title)
    for updates in options.at:
        values = {column: [near(lines, updates, column) for _, lines in curves] for column in COLUMNS}
        print(json.dumps({f"{updates:.0f}": values}))
    print(f"kept {options.name}: {', '.join(f'{len(lines)} lines of {code}' for code, lines in curves)}")


def draw(path: Path, curves: list[tuple[str, list[Line]]], columns: list[str], title: str) -> None:
    names = list(dict.fromkeys(code for code, _ in curves))
    palette = dict(zip(names, colors()))
    across = 3 if len(columns) <= 9 else 4
    rows = -(-len(columns) // across)
    with figure_file(path, 3.0 * across, 2.2 * rows) as figure:
        handles: dict[str, Any] = {}
        for place, column in enumerate(columns):
            axes = figure.add_subplot(rows, across, place + 1)
            for code, lines in curves:
                points = [(line["updates"], line[column]) for line in lines if column in line]
                if points:
                    handles[code] = axes.plot(*zip(*points), color=palette[code], linewidth=1.2)[0]
            axes.set_title(column.replace("_", " "), fontsize=9)
            if place >= len(columns) - across:
                axes.set_xlabel("updates", fontsize=8)
        legend(figure, list(handles.values()), list(handles), "outside lower center")
        figure.suptitle(title, fontsize=10)


if __name__ == "__main__":
    main()
