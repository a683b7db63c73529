"""Table, JSON and picture of controllers evolved in the dream at several temperatures (scripts/og_wm_dream.sh).

    python scripts/dev/dream_temperatures.py RUN --json docs/results/take_cover.json --picture docs/results/take_cover.png

RUN has networks/ (the run that trained V and M) and a temperature_T/ with score.json for each temperature.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

from rl_lab.tools.doctor import commit, describe_machine
from rl_lab.tools.report.curves import Metrics
from rl_lab.tools.report.figures import COLORS, figure_file, legend
from rl_lab.utils.files import write_json_atomic

# Score in the real game, mean and standard deviation of 100 episodes; Ha and Schmidhuber 2018 (arXiv 1803.10122), the
# table of take cover.
PUBLISHED = {
    "vizdoom/take_cover": {
        "random": (210.0, 108.0),
        "0.1": (193.0, 58.0),
        "0.5": (196.0, 50.0),
        "1.0": (868.0, 511.0),
        "1.15": (1092.0, 556.0),
        "1.3": (753.0, 139.0),
    }
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--picture", type=Path, required=True)
    parser.add_argument("--command", default="", help="with which RUN was made")
    parser.add_argument("--note", default="")
    options = parser.parse_args()
    result = collect(options.run)
    result |= {
        "command": options.command or f"scripts/og_wm_dream.sh {options.run.name}",
        "note": options.note,
    }
    write_json_atomic(options.json, result)
    draw(options.picture, result)
    print(table(result))


def collect(run: Path) -> dict[str, Any]:
    config = yaml.safe_load((run / "networks" / "config.yaml").read_text())
    networks = Metrics.read(run / "networks" / "metrics.jsonl")
    task, rows = "", []
    for folder in sorted(run.glob("temperature_*"), key=lambda path: float(path.name.partition("_")[2])):
        metrics = Metrics.read(folder / "metrics.jsonl")
        score = json.loads((folder / "score.json").read_text())
        task = score["task"]
        rows.append(
            {
                "temperature": folder.name.partition("_")[2],
                "score": {
                    key: score[key] for key in ("return_mean", "return_std", "episodes", "seed", "checkpoint")
                },
                "returns": score["returns"],
                "dream": points(metrics, "controller/mean"),
                "dream_best": points(metrics, "controller/best"),
                "environment": points(metrics, "eval/return_mean"),
                "minutes": minutes(metrics),
            }
        )
    return {
        "task": task,
        "commit": commit(),
        "machine": describe_machine(),
        "stages": config["algorithm"]["stages"],
        "evolution": config["algorithm"]["evolution"],
        "size": config["algorithm"]["size"],
        "random": random_score(networks),
        "networks_minutes": minutes(networks),
        "published": PUBLISHED.get(task, {}),
        "temperatures": rows,
    }


def points(metrics: Metrics, name: str) -> list[list[float]]:
    """Generation and value; a run has one update per generation."""
    curve = metrics.curve(name, over="updates").finite()
    return [[float(x), round(float(y), 2)] for x, y in zip(curve.x, curve.y)]


def minutes(metrics: Metrics) -> float:
    times = [float(row["time"]) for row in metrics.rows]
    return round((max(times) - min(times)) / 60, 1)


def random_score(metrics: Metrics) -> dict[str, float]:
    """Mean return of the random rollouts that V and M were trained on."""
    total = before = 0.0
    for row in metrics.rows:
        if (mean := row.get("collect/return_mean")) is not None:
            total += mean * (row["collect/episodes"] - before)
            before = row["collect/episodes"]
    return {"return_mean": round(total / before, 1), "episodes": before}


def table(result: dict[str, Any]) -> str:
    lines = ["| Temperature | In the dream | In the environment | Published |", "| --- | --- | --- | --- |"]
    published = {name: f"{mean:,.0f} ± {std:,.0f}" for name, (mean, std) in result["published"].items()}
    first = f"{result['random']['return_mean']:,.0f}"
    lines.append(f"| random actions | – | {first} | {published.get('random', '–')} |")
    for row in result["temperatures"]:
        score, name = row["score"], row["temperature"]
        real = f"{score['return_mean']:,.0f} ± {score['return_std']:,.0f}"
        dream = f"{row['dream'][-1][1]:,.0f}" if row["dream"] else "not logged"
        lines.append(f"| {name} | {dream} | {real} | {published.get(name, '–')} |")
    return "\n".join(lines)


def draw(picture: Path, result: dict[str, Any]) -> None:
    rows = [row for row in result["temperatures"] if row["dream"]]
    with figure_file(picture, 9.0, 3.4) as figure:
        left, right = figure.subplots(1, 2)
        handles: dict[str, Any] = {}
        for place, (row, color) in enumerate(zip(rows, COLORS)):
            temperature, score = row["temperature"], row["score"]
            curve = left.plot(*zip(*row["dream"]), color=color, linewidth=1.4)[0]
            handles[f"temperature {temperature}"] = curve
            if row["environment"]:
                left.plot(*zip(*row["environment"]), "o", color=color, markersize=4)
            right.errorbar(place, score["return_mean"], score["return_std"], fmt="s", color=color, capsize=3)
            if temperature in result["published"]:
                handles["published"] = right.errorbar(
                    place + 0.2,
                    *result["published"][temperature],
                    fmt="D",
                    color="#9aa0a6",
                    markersize=4,
                    capsize=2,
                )
        left.set_title(
            "Evolution: mean return in the dream (points: in the environment)", loc="left", fontsize=9
        )
        left.set_xlabel("generation")
        left.set_ylabel("return")
        handles["random actions"] = right.axhline(
            result["random"]["return_mean"], color="#24292e", linewidth=0.9
        )
        right.set_xticks(range(len(rows)), [row["temperature"] for row in rows])
        right.set_xlabel("temperature")
        right.set_title("Score in the environment, mean ± standard deviation", loc="left", fontsize=9)
        legend(figure, list(handles.values()), list(handles), "outside lower left")
    print(f"drawn: {picture}")


if __name__ == "__main__":
    main()
