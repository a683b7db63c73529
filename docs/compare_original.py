"""Puts a run beside one of the authors' own code at the same settings: CSV and picture in docs/results.

    python docs/compare_original.py OURS/metrics.jsonl THEIRS/metrics.jsonl NAME --title "…"

THEIRS is what danijar/dreamerv3 writes (`--logger.outputs jsonl --logger.filter '.*'`). Both average over what they log at
once, so a line stands at the middle of its interval.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

from rl_lab.tools.figure_style import colors, figure_file, legend

RESULTS = Path(__file__).parent / "results"
# Column -> (metric here, metrics there, which are summed)
COLUMNS = {
    "entropy": ("controller/entropy", ["train/ent/action"]),
    "value": ("controller/value_mean", ["train/val"]),
    "return": ("controller/return_mean", ["train/tar"]),
    "dreamed_reward": ("controller/reward_mean", ["train/rew"]),
    "kl": ("train/kl", ["train/loss/dyn"]),
    "reconstruction": ("", ["train/loss/height", "train/loss/orientations", "train/loss/velocity"]),
    "reward_loss": ("train/loss/reward", ["train/loss/rew"]),
    "replay_value_loss": ("controller/loss/replay_value", ["train/loss/repval"]),
    "posterior_entropy": ("train/posterior_entropy", ["train/rep_ent"]),
}
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
        lines.append(line)
        before = row["updates"]
    return lines


def theirs(path: Path) -> list[Line]:
    """`updates` there is a mean over the interval already; their steps count frames, two to a decision here."""
    lines = []
    for row in read(path):
        if "train/loss/dyn" in row:
            line = {"updates": row["train/opt/updates"], "decisions": row["step"] / 2}
            line |= {name: sum(row[key] for key in keys) for name, (_, keys) in COLUMNS.items()}
            lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ours", type=Path)
    parser.add_argument("theirs", type=Path)
    parser.add_argument("name")
    parser.add_argument("--title", default="")
    options = parser.parse_args()
    curves = {"RL Lab": ours(options.ours), "danijar/dreamerv3": theirs(options.theirs)}
    with (RESULTS / f"{options.name}.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["code", "updates", "decisions", *COLUMNS])
        for code, lines in curves.items():
            writer.writerows([code, *(f"{line[key]:.5g}" for key in line)] for line in lines)
    with figure_file(RESULTS / f"{options.name}.png", 9.0, 6.5) as figure:
        handles = []
        for place, column in enumerate(COLUMNS):
            axes = figure.add_subplot(3, 3, place + 1)
            handles = [
                axes.plot([x["updates"] for x in lines], [x[column] for x in lines], color=color)[0]
                for color, lines in zip(colors(), curves.values())
            ]
            axes.set_title(column.replace("_", " "), fontsize=9)
            if place >= len(COLUMNS) - 3:
                axes.set_xlabel("updates", fontsize=8)
        legend(figure, handles, list(curves), "outside lower center")
        figure.suptitle(options.title, fontsize=10)
    print(f"kept {options.name}: {', '.join(f'{len(v)} lines of {k}' for k, v in curves.items())}")


if __name__ == "__main__":
    main()
