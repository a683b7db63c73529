"""Writes rl_lab/tools/published_curves.yaml: returns of every published seed at the frames that suites report.

    python scripts/dev/published_curves.py TDMPC2_REPO DREAMERV3_REPO

Both are git repositories (nicklashansen/tdmpc2, danijar/dreamerv3). Only values are taken from them.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import subprocess
from pathlib import Path
from typing import Any

from rl_lab.environments.suites.atari100k import GAMES
from rl_lab.environments.suites.dmc import TASKS
from rl_lab.tools.published import CURVES

Points = dict[str, dict[int, list[float]]]  # task -> frames -> one value per seed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tdmpc2", type=Path)
    parser.add_argument("dreamerv3", type=Path)
    options = parser.parse_args()
    lines = [
        "# Published returns of single seeds at the frames that suites report; written by scripts/dev/published_curves.py.",
        "# points: task: {frames: [one value per seed]}. Frames are environment frames (decisions × action repeat).",
        "curves:",
    ]
    for observe, folder, frames in (
        ("proprio", "results/tdmpc2", (100_000, 200_000, 500_000, 1_000_000)),
        ("vision", "results/tdmpc2-pixels", (100_000, 200_000, 500_000, 1_000_000)),
    ):
        source = (
            f"nicklashansen/tdmpc2 at {commit(options.tdmpc2)}, {folder}/*.csv: evaluations of 10 episodes"
        )
        points = tdmpc2_points(options.tdmpc2, folder, frames)
        lines += block("dmc", observe, "TD-MPC2", source, points, digits=1)
    for suite, observe, size, name, window, frames in (
        ("atari100k", "", "200m", "atari100k", 40_000, (100_000, 200_000, 300_000, 400_000)),
        ("dmc", "vision", "12m", "dmc_vision", 20_000, (100_000, 120_000, 200_000, 500_000, 1_000_000)),
        ("dmc", "proprio", "the 2023 version", "dmc_proprio", 20_000, (100_000, 200_000, 300_000, 500_000)),
    ):
        source = (
            f"danijar/dreamerv3 at {commit(options.dreamerv3)}, scores/{name}-dreamerv3.json.gz ({size}): training episodes "
            f"that ended in the {window:,} frames up to the point"
        )
        points = dreamer_points(options.dreamerv3, name, window, frames)
        lines += block(suite, observe, "DreamerV3", source, points, digits=2 if suite == "atari100k" else 0)
    CURVES.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"written: {CURVES} ({CURVES.stat().st_size:,} bytes)")


def block(suite: str, observe: str, agent: str, source: str, points: Points, digits: int) -> list[str]:
    lines = [f"  - suite: {suite}", *([f"    observe: {observe}"] if observe else []), f"    agent: {agent}"]
    lines += [f"    source: >-\n      {source}", "    points:"]
    for task, values in sorted(points.items()):
        shown = ", ".join(
            f"{frames}: [{', '.join(f'{round(value, digits):g}' if digits else str(round(value)) for value in seeds)}]"
            for frames, seeds in sorted(values.items())
        )
        lines.append(f"      {task}: {{{shown}}}")
    return lines


def tdmpc2_points(repository: Path, folder: str, frames: tuple[int, ...]) -> Points:
    points: Points = {}
    for name in git(repository, "ls-tree", "--name-only", "HEAD", f"{folder}/").decode().split():
        task = Path(name).stem.replace("-", "_")
        task = f"ball_in_{task}" if task.startswith("cup_") else task
        if task not in TASKS:
            continue
        rows = list(csv.DictReader(io.StringIO(git(repository, "show", f"HEAD:{name}").decode())))
        rows.sort(key=lambda row: int(row["seed"]))
        for point in frames:
            found = [float(row["reward"]) for row in rows if int(row["step"]) == point]
            if found:
                points.setdefault(task, {})[point] = found
    return points


def dreamer_points(repository: Path, name: str, window: int, frames: tuple[int, ...]) -> Points:
    rows: list[dict[str, Any]] = json.loads(
        gzip.decompress(git(repository, "show", f"HEAD:scores/{name}-dreamerv3.json.gz"))
    )
    points: Points = {}
    for row in sorted(rows, key=lambda row: (row["task"], row["seed"])):
        task = row["task"].partition("_")[2]
        if task not in (*TASKS, *GAMES):
            raise SystemExit(f"unknown task {row['task']}")
        for point in frames:
            inside = [y for x, y in zip(row["xs"], row["ys"]) if point - window < x <= point]
            if inside:
                points.setdefault(task, {}).setdefault(point, []).append(sum(inside) / len(inside))
    return points


def commit(repository: Path) -> str:
    return git(repository, "rev-parse", "--short", "HEAD").decode().strip()


def git(repository: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, check=True).stdout


if __name__ == "__main__":
    main()
