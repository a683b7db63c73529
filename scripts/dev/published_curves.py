"""Writes rl_lab/tools/published_curves.yaml: returns of every published seed at the frames that suites report.

    python scripts/dev/published_curves.py TDMPC2_REPO DREAMERV3_REPO DREAMERV2_REPO DREAMER_REPO

These are git repositories (nicklashansen/tdmpc2, danijar/dreamerv3, danijar/dreamerv2, danijar/dreamer). Only values are
taken from them.
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
    parser.add_argument("dreamerv2", type=Path)
    parser.add_argument("dreamer", type=Path)
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
        points = dreamer_points(options.dreamerv3, f"HEAD:scores/{name}-dreamerv3.json.gz", window, frames)
        lines += block(suite, observe, "DreamerV3", source, points, digits=2 if suite == "atari100k" else 0)
    lines += earlier_versions(options.dreamerv3, options.dreamerv2, options.dreamer)
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


V3_2023 = "423291a"  # the scores beside the code of 2023 (8fa35f8)


def earlier_versions(dreamerv3: Path, dreamerv2: Path, dreamer: Path) -> list[str]:
    """Blocks of Dreamer's earlier versions: DreamerV3 of 2023, V2 and V1."""
    lines: list[str] = []
    for suite, observe, agent, repository, file, window, frames in (
        (
            "atari100k",
            "",
            "DreamerV3 2023",
            dreamerv3,
            f"{V3_2023}:scores/data/atari100k_dreamerv3.json.gz",
            40_000,
            (100_000, 200_000, 280_000, 300_000, 400_000),
        ),
        (
            "dmc",
            "vision",
            "DreamerV3 2023",
            dreamerv3,
            f"{V3_2023}:scores/data/dmcvision_dreamerv3.json.gz",
            20_000,
            (100_000, 200_000, 300_000, 500_000, 1_000_000),
        ),
        (
            "dmc",
            "vision",
            "DreamerV2",
            dreamerv2,
            "HEAD:scores/dmc-vision-dreamerv2.json",
            30_000,
            (120_000, 210_000, 300_000, 510_000, 990_000),
        ),
        (
            "dmc",
            "vision",
            "DreamerV1",
            dreamer,
            "HEAD:scores/dreamer.json",
            100_000,
            (105_000, 205_000, 305_000, 505_000, 1_005_000),
        ),
    ):
        points = dreamer_points(repository, file, window, frames)
        reference, _, path = file.partition(":")
        found = commit(repository) if reference == "HEAD" else reference
        source = f"danijar/{NAMES[agent]} at {found}, {path}: mean over the {window:,} frames up to the point"
        lines += block(suite, observe, agent, source, points, digits=2 if suite == "atari100k" else 0)
    return lines


NAMES = {"DreamerV3 2023": "dreamerv3", "DreamerV2": "dreamerv2", "DreamerV1": "dreamer"}


def dreamer_points(repository: Path, file: str, window: int, frames: tuple[int, ...]) -> Points:
    """file: COMMIT:PATH of JSON rows with task, seed, xs, ys; tasks that RL Lab does not have are left out."""
    content = git(repository, "show", file)
    rows: list[dict[str, Any]] = json.loads(gzip.decompress(content) if file.endswith(".gz") else content)
    points: Points = {}
    for row in sorted(rows, key=lambda row: (row["task"], row["seed"])):
        task = row["task"].partition("_")[2]
        task = f"ball_in_{task}" if task.startswith("cup_") else task
        if task not in (*TASKS, *GAMES):
            continue
        for point in frames:
            inside = [y for x, y in zip(row["xs"], row["ys"]) if point - window < x <= point and y == y]
            if inside:
                points.setdefault(task, {}).setdefault(point, []).append(sum(inside) / len(inside))
    return points


def commit(repository: Path) -> str:
    return git(repository, "rev-parse", "--short", "HEAD").decode().strip()


def git(repository: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, check=True).stdout


if __name__ == "__main__":
    main()
