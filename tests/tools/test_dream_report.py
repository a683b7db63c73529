"""The dream report: its metrics by hand, a model with known predictions, and tiny runs end to end."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import rl_lab
from rl_lab.cli import main
from rl_lab.errors import LabError
from rl_lab.records import Batch, ImaginedStep
from rl_lab.run_folder import RunFolder
from rl_lab.tools import statistics
from rl_lab.tools.dream_report import measure
from rl_lab.tools.dream_report.errors import (
    MAX_PSNR,
    Rows,
    curves,
    cut_segments,
    end_statistics,
    observation_errors,
    open_loop,
    psnr,
    repeat_last,
    ssim,
    worst_segments,
)
from rl_lab.tools.dream_report.page import content, draw_strips, worst_strips

CPU = torch.device("cpu")
SIDE = 12


def episode(steps: int, start: int = 0, terminated: bool = True) -> Rows:
    """An episode whose image brightness, vector, reward and action all equal the row number."""
    count = np.arange(start, start + steps + 1)
    image = np.broadcast_to(count[:, None, None, None], (steps + 1, 3, SIDE, SIDE)).astype(np.uint8)
    last = np.arange(steps + 1) == steps
    return {
        "obs/image": image,
        "obs/vector": count[:, None].astype(np.float32),
        "action": count,
        "reward": count.astype(np.float32),
        "terminated": last & terminated,
        "truncated": last & (not terminated),
        "is_first": np.arange(steps + 1) == 0,
    }


class Counter:
    """A model that predicts the last action plus one; `off` is its error from the second step on."""

    def __init__(self, off: float = 0.0, end_at: float | None = None) -> None:
        self.off = off
        self.end_at = end_at

    def dream_start(self, batch: Batch, *, generator: Any = None) -> dict[str, torch.Tensor]:
        return {"steps": torch.zeros(len(batch.reward))}

    def dream_step(self, state: dict[str, torch.Tensor], action: torch.Tensor, *, generator: Any = None):
        count, steps = action.float() + 1, state["steps"] + 1
        predicted = count + self.off * (steps > 1)
        image = predicted.clamp(0, 255).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, SIDE, SIDE)
        ends = torch.zeros_like(count) if self.end_at is None else (count == self.end_at).float()
        return {"steps": steps}, ImaginedStep(predicted, ends, {"image": image, "vector": predicted[:, None]})


# --- Metrics ---


def test_ssim_by_hand():
    """For constant images only the luminance term remains: (2ab + C₁) / (a² + b² + C₁)."""
    first, second = torch.full((1, 1, 16, 16), 0.25), torch.full((1, 1, 16, 16), 0.75)
    expected = (2 * 0.25 * 0.75 + 1e-4) / (0.25**2 + 0.75**2 + 1e-4)
    assert ssim(first, second).item() == pytest.approx(expected, rel=5e-4)  # float32
    noise = torch.rand(2, 3, 20, 24, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ssim(noise, noise), torch.ones(2))
    assert ssim(noise, 1 - noise).max() < 0  # the negative
    assert ssim(torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4, 4)).item() == pytest.approx(1.0)


def test_ssim_equals_loop():
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.rand(1, 1, 13, 14, generator=generator) for _ in range(2))
    weights = np.exp(-((np.arange(11) - 5) ** 2) / (2 * 1.5**2))
    window = np.outer(weights, weights) / np.outer(weights, weights).sum()
    values = []
    for row in range(3):
        for column in range(4):
            a, b = (x[0, 0, row : row + 11, column : column + 11].double().numpy() for x in (first, second))
            ma, mb = (window * a).sum(), (window * b).sum()
            va, vb = (window * (a - ma) ** 2).sum(), (window * (b - mb) ** 2).sum()
            cov = (window * (a - ma) * (b - mb)).sum()
            values.append(
                (2 * ma * mb + 1e-4) * (2 * cov + 9e-4) / ((ma**2 + mb**2 + 1e-4) * (va + vb + 9e-4))
            )
    assert ssim(first, second).item() == pytest.approx(np.mean(values), abs=1e-5)


def test_psnr_and_mse_by_hand():
    assert psnr(torch.tensor([0.01, 1.0, 0.0])).tolist() == pytest.approx([20.0, 0.0, MAX_PSNR])
    dark, light = torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.full((2, 3, 8, 8), 51, dtype=torch.uint8)
    assert observation_errors(dark, light)["mse"].tolist() == pytest.approx([0.04, 0.04])  # 51 / 255 = 0.2
    assert observation_errors(torch.zeros(1, 2), torch.tensor([[3.0, 1.0]])) == {"mse": torch.tensor([5.0])}


def test_ratio_band_draws_clusters():
    sums, counts = np.array([[0.0, 3.0], [4.0, 0.0]]), np.array([[2, 1], [2, 0]])
    value, low, high = statistics.ratio_band(sums, counts)
    assert value.tolist() == [1.0, 3.0]
    assert (low[0], high[0]) == (0.0, 2.0)  # both draws of the first cluster, or of the second
    assert (low[1], high[1]) == (3.0, 3.0)
    alone = statistics.ratio_band(sums[:1], counts[:1])
    assert alone[0].tolist() == [0.0, 3.0] and np.isnan(alone[1]).all()
    assert np.isnan(statistics.ratio_band(np.zeros((2, 1)), np.zeros((2, 1)))[0]).all()


# --- Segments ---


def test_segments_by_hand():
    segments = cut_segments([episode(9)], context=3, horizon=4, each=2)
    assert segments.start.tolist() == [0, 4]  # 10 rows; the last start is 4 · 0.618 steps before the end
    assert segments.context.obs["vector"][:, :, 0].tolist() == [[0, 1, 2], [4, 5, 6]]
    assert segments.action.tolist() == [[2, 3, 4, 5], [6, 7, 8, 9]]
    assert segments.obs["vector"][0, :, 0].tolist() == [3, 4, 5, 6] and segments.reward[0].tolist() == [
        3,
        4,
        5,
        6,
    ]
    assert segments.mask.tolist() == [[True] * 4, [True, True, True, False]]
    assert segments.terminated[1].tolist()[:3] == [False, False, True]
    assert segments.context.is_first.tolist() == [[True, False, False], [False] * 3]


def test_ends_are_spread_over_horizon():
    segments = cut_segments([episode(40) for _ in range(20)], context=2, horizon=10, each=3)
    steps = np.nonzero((segments.terminated & segments.mask).numpy())[1]
    assert len(steps) == 20 and len(set(steps.tolist())) >= 8


def test_short_episodes():
    segments = cut_segments([episode(2), episode(8)], context=4, horizon=3, each=4)
    assert set(segments.episode.tolist()) == {1}
    with pytest.raises(LabError, match="smaller --context"):
        cut_segments([episode(2)], context=4, horizon=3, each=4)


# --- Open loop ---


def test_perfect_model_has_no_error():
    segments = cut_segments([episode(30), episode(30, start=100)], context=3, horizon=5, each=4)
    prediction = open_loop(Counter(end_at=30), segments, samples=2, seed=0, device=CPU)
    found = curves(prediction, segments)
    assert found["image mse"].overall == 0.0 and found["image psnr"].overall == pytest.approx(MAX_PSNR)
    assert found["image ssim"].overall == pytest.approx(1.0) and found["reward error"].overall == 0.0
    ends = end_statistics(prediction, segments)
    assert (
        ends["ends"] == 2 and ends["found"] == 0.5 and ends["false"] == 0.0
    )  # it predicts the end at 30, not at 130
    assert prediction.obs["image"].shape == (len(segments), 5, 3, SIDE, SIDE)


def test_errors_by_step():
    segments = cut_segments([episode(20), episode(20, start=50)], context=2, horizon=4, each=2)
    found = curves(open_loop(Counter(off=10), segments, samples=1, seed=0, device=CPU), segments)
    assert found["reward error"].value.tolist() == pytest.approx([0.0, 10.0, 10.0, 10.0])
    assert found["vector mse"].value.tolist() == pytest.approx([0.0, 100.0, 100.0, 100.0])
    assert found["image mse"].value[1] == pytest.approx((10 / 255) ** 2)


def test_repeat_last_baseline():
    segments = cut_segments([episode(20)], context=2, horizon=4, each=1)
    baseline = curves(repeat_last(segments), segments)
    assert baseline["vector mse"].value.tolist() == [1.0, 4.0, 9.0, 16.0]  # the error grows with the count
    assert baseline["end accuracy"].overall == 1.0


def test_worst_segments():
    segments = cut_segments(
        [episode(30), episode(30, start=100), episode(3, start=200)], context=2, horizon=6, each=3
    )
    prediction = open_loop(Counter(), segments, samples=1, seed=0, device=CPU)
    errors = prediction.errors["vector mse"]
    errors[segments.episode == 0] = 5.0
    errors[segments.episode == 2] = 100.0  # the largest error, but only a short segment
    chosen = worst_segments(prediction, segments, "vector mse", 3)
    assert [int(segments.episode[index]) for index in chosen] == [0, 1, 2]


# --- End to end ---


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """Two tiny models of an image and a vector, one of another environment, and a run without a model."""
    root = tmp_path_factory.mktemp("dream")
    quiet = ["logging.progress=off", "logging.tensorboard=false", "training.report.every_env_steps=null"]
    quiet += ["training.evaluate.every_env_steps=null", "training.total_timesteps=16", "debug=tiny"]
    images = ["environment=dummy_dict", "components/encoder=dict"]
    for seed in (1, 2):
        rl_lab.train(None, [*quiet, *images, f"experiment.seed={seed}", f"run_dir={root / str(seed)}"])
    rl_lab.train(None, [*quiet, f"run_dir={root / 'other'}"])
    rl_lab.train("random_cartpole", [*quiet, f"run_dir={root / 'random'}"])
    return [root / name for name in ("1", "2", "other", "random")]


def test_dream_report_end_to_end(runs: list[Path], tmp_path: Path, capsys):
    words = ["--episodes", "6", "--horizon", "5", "--context", "2", "--out", str(tmp_path / "dream")]
    assert main(["report", "--dream", *map(str, runs), *words]) == 0
    printed = capsys.readouterr().out
    assert "image psnr" in printed and "ends found" in printed and "repeat last" in printed
    assert "so the models cannot be compared" in printed and "no model that can be stepped" in printed
    content = json.loads((tmp_path / "dream" / "dream.json").read_text())
    assert [model["label"] for model in content["models"]] == [
        "dreamer_cartpole_dict, seed 1",
        "dreamer_cartpole_dict, seed 2",
    ]
    metrics = content["models"][0]["metrics"]
    assert set(metrics) == {
        "image mse",
        "image psnr",
        "image ssim",
        "vector mse",
        "reward error",
        "end accuracy",
    }
    assert len(metrics["image mse"]["value"]) == 5 and len(content["notes"]) == 2
    lines = list(csv.DictReader((tmp_path / "dream" / "dream.csv").open()))
    assert len(lines) == 3 * 6 * 5 and {line["model"] for line in lines} >= {"nothing_changes"}
    with Image.open(tmp_path / "dream" / "dream.png") as image:
        assert image.width > 1200 and np.asarray(image.convert("L")).std() > 10
    page = (tmp_path / "dream" / "index.html").read_text()
    assert "Worst predictions of" in page and not re.search(r'(src|href)="(https?:)?//', page)


def test_same_seed_gives_same_report(runs: list[Path]):
    options: dict[str, Any] = {"episodes": 2, "horizon": 3, "context": 2, "samples": 2, "policy": "random"}
    first, second = (content(measure([RunFolder(runs[0])], **options)) for _ in range(2))
    assert first == second and first["episodes"]["source"] == "with random actions"


def test_stored_episodes_and_other_policy(runs: list[Path], tmp_path: Path):
    model = [RunFolder(runs[0])]
    options: dict[str, Any] = {"horizon": 3, "context": 2, "segments": 2}
    stored = measure(model, episodes=str(runs[1]), **options)
    assert stored.source.startswith("read from") and stored.episodes > 1
    rows = episode(6)
    np.savez(
        tmp_path / "one.npz",
        **{
            "observations/image": np.zeros((7, 3, 16, 16), np.uint8),
            "observations/vector": np.zeros((7, 3), np.float32),
        },
        actions=np.zeros((6, 2), np.int64),
        rewards=rows["reward"][1:],
        terminated=rows["terminated"][1:],
    )
    assert measure(model, episodes=str(tmp_path / "one.npz"), **options).episodes == 1
    assert measure(model, episodes=2, policy=str(runs[1]), **options).source == f"with the agent of {runs[1]}"
    with pytest.raises(LabError, match="cannot act here: its environment is CartPole-v1"):
        measure(model, episodes=2, policy=str(runs[2]), **options)


def test_vectors_are_plotted_as_lines(runs: list[Path], tmp_path: Path):
    found = measure([RunFolder(runs[2])], episodes=2, horizon=4, context=2)
    assert set(found.curves["dreamer_cartpole"]) == {"vector mse", "reward error", "end accuracy"}
    (strips,) = worst_strips(found).values()
    assert "worst of dreamer_cartpole: vector mse" in strips[0].title
    draw_strips(found.predictions, found.segments, strips[:1], tmp_path / "lines.png")
    with Image.open(tmp_path / "lines.png") as image:
        assert np.asarray(image.convert("L")).std() > 10


def test_a_run_that_cannot_be_read_is_left_out(runs: list[Path], tmp_path: Path, capsys):
    """The others are compared; a run alone is an error."""
    damaged, stranger, good = (shutil.copytree(runs[0], tmp_path / name) for name in ("a", "b", "c"))
    (damaged / "config.yaml").write_text("- 1")
    config = (stranger / "config.yaml").read_text()
    (stranger / "config.yaml").write_text(config + "anything: {_target_: os.system}\n")
    words = ["--episodes", "2", "--horizon", "3", "--out", str(tmp_path / "dream")]
    assert main(["report", "--dream", str(damaged), str(stranger), str(good), *words]) == 0
    printed = capsys.readouterr().out
    assert f"left out: {damaged / 'config.yaml'} contains no config" in printed
    assert "left out: dreamer_cartpole_dict" in printed and "os.system" in printed
    report = json.loads((tmp_path / "dream" / "dream.json").read_text())
    assert len(report["models"]) == 1 and len(report["notes"]) == 2
    for alone in (damaged, stranger):
        assert main(["report", "--dream", str(alone), *words]) == 1
        assert capsys.readouterr().err.startswith(f"error: {alone / 'config.yaml'}")
    assert main(["report", "--dream", str(damaged), str(stranger), *words]) == 1
    assert "none of these runs has a world model" in capsys.readouterr().err


def test_mistakes_are_said(runs: list[Path]):
    with pytest.raises(LabError, match="none of these runs has a world model"):
        measure([RunFolder(runs[3])])
    model = [RunFolder(runs[0])]
    with pytest.raises(LabError, match="--horizon must be at least 1"):
        measure(model, horizon=0)
    with pytest.raises(LabError, match="at least 1, or a path"):
        measure(model, episodes=0)
    with pytest.raises(LabError, match="does not exist: use a run folder"):
        measure(model, episodes="nowhere")
    with pytest.raises(LabError, match="--dream cannot be combined with --serve"):
        main(["report", "--dream", "--serve", "--debug"])
