"""Memory of a long tiny run: checks whether the resident size of trainer and environment workers is constant.

Trains `debug=tiny` in a separate process for the given time with frequent log lines, evaluations, reports and
checkpoints with replay, and a ring buffer that is full after a few minutes, and records the resident set size
(RSS) of every process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

SETTLED = 1 / 6  # of the time: imports, first calls, and filling of the ring buffer
WORDS = (
    "debug=tiny",
    "training.total_timesteps=1000000000",
    "buffers.replay.capacity=8000",
    "environment.workers=2",
    "training.log.every_env_steps=500",
    "training.evaluate.every_env_steps=2000",
    "training.report.every_env_steps=2000",
    "training.checkpoint.every_env_steps=1000",
    "logging.progress=off",
)
ROLES = ("trainer", "workers", "helpers")


def run(argv: list[str]) -> list[dict[str, Any]]:
    """Return rows: resident MiB at the start, after settling and at the end, and the slope between."""
    parser = argparse.ArgumentParser(prog="rl-lab bench memory", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two measurements")
    parser.add_argument("--experiment", default="dreamer_cartpole")
    parser.add_argument("--plot", type=Path, help="where to write a PNG")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        samples, steps = watch(Path(scratch) / "run", options.experiment, options.minutes, options.every)
    if options.plot is not None:
        plot(samples, options.plot)
    rows = [
        {"name": "memory/minutes", "value": samples[-1]["seconds"] / 60, "unit": "min"},
        {"name": "memory/env_steps", "value": steps, "unit": "steps"},
    ]
    for role in ROLES[:2]:
        rows += summary(role, samples)
    return rows


def watch(folder: Path, experiment: str, minutes: float, every: float) -> tuple[list[dict[str, float]], int]:
    """Train until the time is over; returns the measurements and the number of environment steps."""
    command = [sys.executable, "-m", "rl_lab", "train", f"experiment={experiment}", *WORDS]
    with open(folder.parent / "output.txt", "w+") as output:
        process = subprocess.Popen([*command, f"run_dir={folder}"], stdout=output, stderr=subprocess.STDOUT)
        samples: list[dict[str, float]] = []
        begin = time.monotonic()
        try:
            while (passed := time.monotonic() - begin) < 60 * minutes and process.poll() is None:
                samples.append({"seconds": round(passed, 1), **resident(process.pid)})
                time.sleep(every)
        finally:
            process.terminate()
            process.wait(120)
        if process.returncode != 0 or not samples:
            output.seek(0)
            raise RuntimeError(f"the run ended with status {process.returncode}:\n{output.read()[-4000:]}")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return samples, int(json.loads(lines[-1])["step"])


def resident(pid: int) -> dict[str, float]:
    """Return MiB by role. Workers are the children of the trainer's fork server."""
    sizes = dict.fromkeys(ROLES, 0.0)
    try:
        trainer = psutil.Process(pid)
        sizes["trainer"] = _mib(trainer)
        for helper in trainer.children():
            sizes["helpers"] += _mib(helper)
            sizes["workers"] += sum(_mib(worker) for worker in helper.children(recursive=True))
    except psutil.Error:
        pass
    return sizes


def _mib(process: psutil.Process) -> float:
    try:
        return process.memory_info().rss / 2**20
    except psutil.Error:  # it has just ended
        return 0.0


def summary(role: str, samples: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Return settled and final size (medians of a tenth of the time each), slope, and the complete series."""
    seconds = np.array([sample["seconds"] for sample in samples])
    sizes = np.array([sample[role] for sample in samples])
    settled = seconds >= SETTLED * seconds[-1]
    tenth = max(1, int(0.1 * len(samples)))
    after, end = float(np.median(sizes[settled][:tenth])), float(np.median(sizes[-tenth:]))
    slope = float(np.polyfit(seconds[settled], sizes[settled], 1)[0]) * 3600 if settled.sum() > 2 else None
    series = [[sample["seconds"], round(sample[role], 1)] for sample in samples]
    return [
        {"name": f"memory/{role}_settled", "value": after, "unit": "MiB"},
        {"name": f"memory/{role}_end", "value": end, "unit": "MiB", "series": series},
        {"name": f"memory/{role}_growth", "value": 100 * (end / after - 1) if after else None, "unit": "%"},
        {"name": f"memory/{role}_slope", "value": slope, "unit": "MiB/h"},
    ]


def plot(samples: list[dict[str, float]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 3.2))
    minutes = [sample["seconds"] / 60 for sample in samples]
    for role in ROLES[:2]:
        axis.plot(minutes, [sample[role] for sample in samples], label=role)
    axis.set(xlabel="minutes", ylabel="resident set, MiB", title="Memory of a tiny run")
    axis.set_ylim(bottom=0)
    axis.legend()
    axis.grid(alpha=0.3)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    plt.close(figure)
