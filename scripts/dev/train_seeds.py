"""Trains experiments on several seeds from the checkout of any commit and keeps their evaluations.

    python scripts/dev/train_seeds.py CHECKOUT docs/results/catch_now.json iris_catch delta_iris_catch --seeds 0 1 2
    python scripts/dev/train_seeds.py . docs/results/steady.json dreamer_cartpole_steady --dream
    python scripts/dev/train_seeds.py . docs/results/gym.json dreamer_gym --words environment.task=Acrobot-v1

One run at a time, each in a process of its own that imports the package from CHECKOUT. After each run the JSON is
written anew, and runs that it already has from the same commit are not repeated. It holds the evaluations during
training, the evaluation of the best checkpoint on 40 new episodes (--episodes) and the CPU time, which other work on the machine
changes little. --dream: also what `rl-lab report --dream` measures on episodes of the agent, with its last weights: the
mean squared error of dreamed observations over 30 steps, and that of repeating the last observation. --words: further
words of the training command, kept in the row; one file may have rows of several tasks. --curves: metrics whose values
during training are kept too, such as collect/return_mean.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rl_lab.tools.doctor import describe_machine
from rl_lab.utils.files import write_json_atomic

QUIET = ("logging.progress=off", "logging.tensorboard=false", "environment.workers=0")
EVALUATION = ("--checkpoint", "best", "--seed", "1", "--no-video", "--episodes")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("json", type=Path)
    parser.add_argument("experiments", nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--dream", action="store_true")
    parser.add_argument("--words", nargs="+", default=[])
    parser.add_argument("--episodes", type=int, default=40)
    parser.add_argument("--curves", nargs="+", default=[])
    args = parser.parse_args()
    commit = git(args.checkout, "rev-parse", "HEAD") + (
        "-dirty" if git(args.checkout, "diff", "HEAD") else ""
    )
    result: dict[str, Any] = {
        "benchmark": "train_seeds",
        "commit": commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "command": "rl-lab train +experiment=EXPERIMENT experiment.seed=SEED "
        + " ".join((*QUIET, "[WORDS]")),
        "evaluation": "rl-lab eval RUN " + " ".join((*EVALUATION, str(args.episodes))),
        "rows": [],
    }
    if args.json.exists() and (old := json.loads(args.json.read_text()))["commit"] == commit:
        result = old
    done = {(row["name"], row["seed"], tuple(row.get("words", []))) for row in result["rows"]}
    for seed in args.seeds:  # all experiments on the first seed, then on the second: an early end is even
        for name in args.experiments:
            if (name, seed, tuple(args.words)) not in done:
                result["rows"].append(one_run(args, name, seed))
                write_json_atomic(args.json, result)
                print(json.dumps(result["rows"][-1]), flush=True)


def one_run(args: argparse.Namespace, name: str, seed: int) -> dict[str, Any]:
    """Train and evaluate; returns the curve of returns, the final evaluation and the CPU time."""
    checkout, words = args.checkout, args.words
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        seeded = [f"+experiment={name}", f"experiment.seed={seed}"]
        call(checkout, ["train", *seeded, *QUIET, *words, f"run_dir={run}"])
        after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - began
        call(checkout, ["eval", str(run), *EVALUATION, str(args.episodes), "--json", str(run / "final.json")])
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        curve = values(lines, "eval/return_mean")
        final = json.loads((run / "final.json").read_text())
        dreamed = dream_errors(checkout, run) if args.dream else {}
    cpu = (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)
    return {
        "name": name,
        "seed": seed,
        **({"words": words} if words else {}),
        "best_return_mean": final["return_mean"],
        "best_return_std": final["return_std"],
        "evaluations": curve,
        **({"curves": {name: values(lines, name) for name in args.curves}} if args.curves else {}),
        "cpu_s": round(cpu, 1),
        "wall_s": round(wall, 1),
        **dreamed,
    }


def values(lines: list[dict[str, Any]], name: str) -> list[list[float]]:
    """Steps and values of a metric."""
    return [[line["step"], line[name]] for line in lines if line.get(name) is not None]


def dream_errors(checkout: Path, run: Path) -> dict[str, float]:
    call(checkout, ["report", str(run), "--dream"])
    found = json.loads((run / "report" / "dream" / "dream.json").read_text())
    (name,) = (name for name in found["nothing_changes"] if name.endswith(" mse"))
    return {
        "dream_mse": found["models"][0]["metrics"][name]["overall"],
        "dream_mse_nothing_changes": found["nothing_changes"][name]["overall"],
    }


def call(checkout: Path, words: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
    with tempfile.TemporaryDirectory() as elsewhere:
        subprocess.run(
            [sys.executable, "-m", "rl_lab", *words], env=environment, cwd=elsewhere, check=True, stdout=2
        )


def git(checkout: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(checkout), *words], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
