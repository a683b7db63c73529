"""Keeps a run's learning curve as CSV and JSON in docs/results; result_figures.py draws them.

    python scripts/dev/keep_result.py keep RUN NAME --commit C --command "rl-lab train …" --machine docs/results/tdmpc_h200.json

RUN is a run folder or a metrics.jsonl. The JSON holds the evaluations, what was published (`--published 100000:962`, in
frames) and from where, and how long it took from the first logged line on.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

from rl_lab.tools.report.curves import Metrics

RESULTS = Path(__file__).parents[2] / "docs" / "results"
# Column -> metric. Those that a run never logged are left out.
COLUMNS = {
    "train_return": "collect/return_mean",
    "eval_return": "eval/return_mean",
    "max_reward": "eval/max_reward",
    "success": "eval/success",
    "imagined_return": "controller/return_mean",
    "entropy": "controller/entropy",
    "model_loss": "train/loss",
    "generation_best": "controller/best",
    "generation_mean": "controller/mean",
    "kl": "train/kl",
    "height_error": "train/loss/reconstruction/height",
    "orientations_error": "train/loss/reconstruction/orientations",
    "velocity_error": "train/loss/reconstruction/velocity",
    "pixel_error": "train/tokenizer/pixel_error",
    "token_loss": "train/world_model/loss/tokens",
    "token_accuracy": "train/world_model/token_accuracy",
    "dreamed_reward": "controller/reward_mean",
    "policy_entropy": "controller/policy_entropy",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    keep_parser = commands.add_parser("keep")
    keep_parser.add_argument("run", type=Path)
    keep_parser.add_argument("name")
    keep_parser.add_argument("--commit", required=True)
    keep_parser.add_argument("--command", required=True)
    keep_parser.add_argument("--machine", type=Path, required=True, help="a kept result whose machine it was")
    keep_parser.add_argument("--title", default="", help="of the picture")
    keep_parser.add_argument("--note", default="")
    keep_parser.add_argument("--published", nargs="*", default=[], help="frames:return")
    keep_parser.add_argument("--source", default="", help="of the published points")
    keep_parser.add_argument(
        "--evaluation", type=Path, nargs="*", default=[], help="JSON files of rl-lab eval"
    )
    keep_parser.add_argument(
        "--bin", type=int, default=0, help="frames over which training episodes are averaged; 0: not at all"
    )
    options = parser.parse_args()
    keep(options)


def keep(options: argparse.Namespace) -> None:
    path = options.run / "metrics.jsonl" if options.run.is_dir() else options.run
    metrics = Metrics.read(path)
    begin = min(float(row["time"]) for row in metrics.rows)
    columns = {name: key for name, key in COLUMNS.items() if key in metrics.names()}
    with (RESULTS / f"{options.name}.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", "frames", "updates", "seconds", *columns])
        for row in metrics.rows:
            values = [row.get(key) for key in columns.values()]
            if any(value is not None for value in values):
                counters = [row["step"], row.get("frames"), row.get("updates"), round(row["time"] - begin, 1)]
                writer.writerow([*counters, *("" if v is None else round(float(v), 4) for v in values)])
    counter = "frames" if metrics.last("frames") else "updates"  # a run on stored data has no frames
    evaluations = metrics.curve("eval/return_mean", over=counter).finite()
    result: dict[str, Any] = {
        "title": options.title or options.name,
        "commit": options.commit,
        "machine": json.loads(options.machine.read_text())["machine"],
        "command": options.command,
        "minutes": round((max(float(row["time"]) for row in metrics.rows) - begin) / 60, 1),
        "steps": metrics.last("step"),
        "frames": metrics.last("frames"),
        "updates": metrics.last("updates"),
        f"evaluations_by_{counter}": {str(int(x)): round(y, 1) for x, y in zip(evaluations.x, evaluations.y)},
        "published_by_frames": {
            frames: float(value) for frames, value in (pair.split(":") for pair in options.published)
        },
        "published_source": options.source,
        "note": options.note,
        "curve": f"{options.name}.csv",
    }
    if options.bin:
        result["training_episodes_by_frames"] = binned(metrics.rows, options.bin)
    if options.evaluation:
        result["final_evaluations"] = {file.stem: json.loads(file.read_text()) for file in options.evaluation}
    (RESULTS / f"{options.name}.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(f"kept {options.name}: {len(metrics.rows)} lines, {len(evaluations)} evaluations")


def binned(rows: list[dict[str, Any]], frames: int) -> dict[str, float]:
    """Mean return of the training episodes that ended in each stretch of so many frames, by the stretch's end."""
    sums: dict[int, list[float]] = {}
    before = 0.0  # episodes so far: how many a line's mean is of
    for row in rows:
        if (mean := row.get("collect/return_mean")) is not None:
            count = row["collect/episodes"] - before
            place = sums.setdefault(-(-int(row["frames"]) // frames) * frames, [0.0, 0.0])
            place[0], place[1] = place[0] + mean * count, place[1] + count
            before = row["collect/episodes"]
    return {str(end): round(total / count, 2) for end, (total, count) in sums.items()}


if __name__ == "__main__":
    main()
