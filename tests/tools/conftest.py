"""Run folders written by hand, as a run leaves them (no training needed to test what reads them), and a browser."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def write_run(
    folder: Path,
    *,
    name: str = "dreamer_cartpole",
    seed: int = 0,
    steps: int = 20_000,
    lines: int = 100,
    train_ratio: int = 32,
    evaluations: int = 10,
    media: bool = True,
    environment: str = "task: CartPole-v1, num_envs: 4",
    workflow: str = "rl_lab.workflows.dreamer.workflow.DreamerWorkflow",
    level: float | None = None,  # the return that it ends with; None: by its name
) -> Path:
    """A run that learns: `lines` log lines, some evaluations, a torn last line, a GIF."""
    rng = np.random.default_rng(seed + 17)
    (folder / "media" / "episodes" / "test").mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"experiment: {{name: {name}, seed: {seed}, device: cpu}}\n"
        f"algorithm: {{train_ratio: {train_ratio}, batch_size: 16}}\n"
        f"environment: {{{environment}}}\n"
        f"workflow: {{_target_: {workflow}}}\n"
        f"training: {{total_timesteps: {steps}, phases: [{{name: joint}}]}}\n"
        f"run_dir: {folder}\n"
    )
    (folder / "code.txt").write_text("commit 0123456789abcdef\n\ndiff --git a b\n")
    rows: list[dict[str, Any]] = []
    for line in range(1, lines + 1):
        step = steps * line // lines
        done = line / lines
        top = 470 if level is None else level
        reached = 20 + (330 if name.startswith("iris") else top) / (
            1 + math.exp(-12 * (done - 0.45 - 0.03 * seed))
        )
        counters = {
            "step": step,
            "frames": step,
            "updates": step // 2,
            "time": round(1_700_000_000 + 3.1 * line, 3),
        }
        rows.append(
            counters
            | {
                "train/loss/observation": 2.0 * math.exp(-4 * done) + 0.05 * rng.random(),
                "train/loss/reward": 1.5 * math.exp(-9 * done) + 0.001 * rng.random(),
                "train/loss/dynamics": 1.0 + 0.6 * math.exp(-3 * done) + 0.02 * rng.standard_normal(),
                "train/gradient_norm": float(abs(rng.standard_cauchy())) + 0.5,
                "controller/entropy": 0.69 * (1 - 0.7 * done) + 0.02 * rng.standard_normal(),
                "controller/value_mean": reached / 10 + rng.standard_normal(),
                "collect/return_mean": min(500.0, max(9.0, reached + 40 * rng.standard_normal())),
                "collect/length_mean": min(500.0, max(9.0, reached)),
                "collect/episodes": step // 200,
                "time/env_steps_per_second": 65 + 8 * rng.standard_normal(),
                "time/updates_per_second": 32 + 4 * rng.standard_normal(),
                "time/env_wait_share": 0.06,
                "time/act_share": 0.17,
                "time/sample_share": 0.03,
                "time/update_share": 0.66,
                "time/log_share": 0.01,
                "time/update_ms": 20 + rng.random(),
                "workflow/phase_progress": done,
            }
        )
        if evaluations and line % max(1, lines // evaluations) == 0:
            mean = min(500.0, reached + 15)
            rows.append(
                counters
                | {"eval/return_mean": mean, "eval/return_std": 60 * (1 - done) + 5, "eval/length_mean": mean}
            )
    if lines > 10:
        rows[5]["train/loss/reward"] = "NaN"
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text + '{"step": 99999999, "collect/return_mean": 1e9, "tr')
    if media:
        write_gif(folder / "media" / "episodes" / "test" / "eval_episode_000020000.gif", seed)
    return folder


def write_phases(run: Path, phases: str, steps: Sequence[tuple[int, int]]) -> Path:
    """Give a run of `write_run` these phases; steps: (environment step, number of the phase that begins at it)."""
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("[{name: joint}]", phases))
    lines = [line for line in (run / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    rows = [json.loads(line) for line in lines]
    start = {"step": 0, "frames": 0, "updates": 0, "time": 1_700_000_000.0}
    for step, number in steps:
        at = max((place for place, row in enumerate(rows) if row["step"] <= step), default=-1)
        counters = {key: (rows[at] if at >= 0 else start)[key] for key in start}
        rows.insert(at + 1, {**counters, "workflow/phase": float(number)})
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def write_gif(path: Path, seed: int = 0, size: int = 64, frames: int = 12) -> Path:
    from PIL import Image

    pictures = []
    for frame in range(frames):
        pixels = np.full((size, size, 3), 235, np.uint8)
        at = (frame * size // frames + 7 * seed) % (size - 10)
        pixels[size - 18 : size - 8, at : at + 10] = (0, 114, 178)
        pictures.append(Image.fromarray(pixels))
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=60, loop=0)
    return path


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """make_run(seed=1, …) -> a run folder under tmp_path/outputs."""
    made: list[Path] = []

    def make(at: str | None = None, **options: Any) -> Path:
        made.append(write_run(tmp_path / "outputs" / (at or f"2026-11-15/12-00-{len(made):02d}"), **options))
        return made[-1]

    return make


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium, driven by Playwright."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("not run: needs Chromium (apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="not run: needs the package playwright")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()
