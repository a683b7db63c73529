"""The dream report: its measures by hand, a model that knows the answer, and tiny runs from end to end."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import rl_lab
from rl_lab.cli import main
from rl_lab.errors import LabError
from rl_lab.records import Batch, Dreamed
from rl_lab.run_folder import RunFolder
from rl_lab.tools import statistics
from rl_lab.tools.dream_report.command import measure
from rl_lab.tools.dream_report.errors import (
    SHARPEST,
    Rows,
    curves,
    cut_segments,
    ends_found,
    observation_errors,
    open_loop,
    psnr,
    repeat_last,
    ssim,
    worst,
)
from rl_lab.tools.dream_report.page import content, draw_strips, worst_strips

CPU = torch.device("cpu")
SIDE = 12


def episode(steps: int, start: int = 0, terminated: bool = True) -> Rows:
    """Counts: the picture's brightness, the number and the reward are all the row's number; the action is it too."""
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
    """A model that knows how to count on from the action before; `off` is how wrong it is from the second step on."""

    def __init__(self, off: float = 0.0, end_at: float | None = None) -> None:
        self.off = off
        self.end_at = end_at

    def dream_start(self, batch: Batch, *, generator: Any = None) -> dict[str, torch.Tensor]:
        return {"steps": torch.zeros(len(batch.reward))}

    def dream_step(self, state: dict[str, torch.Tensor], action: torch.Tensor, *, generator: Any = None):
        count, steps = action.float() + 1, state["steps"] + 1
        wrong = count + self.off * (steps > 1)
        image = wrong.clamp(0, 255).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, SIDE, SIDE)
        ends = torch.zeros_like(count) if self.end_at is None else (count == self.end_at).float()
        return {"steps": steps}, Dreamed(wrong, ends, {"image": image, "vector": wrong[:, None]})


# ---------------------------------------------------------------- measures


def test_ssim_by_hand():
    """Flat pictures have no structure to differ in: what is left is (2ab + C₁) / (a² + b² + C₁)."""
    first, second = torch.full((1, 1, 16, 16), 0.25), torch.full((1, 1, 16, 16), 0.75)
    expected = (2 * 0.25 * 0.75 + 1e-4) / (0.25**2 + 0.75**2 + 1e-4)
    assert ssim(first, second).item() == pytest.approx(expected, rel=5e-4)  # float32
    noise = torch.rand(2, 3, 20, 24, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ssim(noise, noise), torch.ones(2))
    assert ssim(noise, 1 - noise).max() < 0  # the negative
    assert ssim(torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4, 4)).item() == pytest.approx(1.0)


def test_ssim_equals_a_slow_loop():
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
    assert psnr(torch.tensor([0.01, 1.0, 0.0])).tolist() == pytest.approx([20.0, 0.0, SHARPEST])
    dark, light = torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.full((2, 3, 8, 8), 51, dtype=torch.uint8)
    assert observation_errors(dark, light)["mse"].tolist() == pytest.approx([0.04, 0.04])  # 51 / 255 = 0.2
    assert observation_errors(torch.zeros(1, 2), torch.tensor([[3.0, 1.0]])) == {"mse": torch.tensor([5.0])}


def test_ratio_band_draws_whole_clusters():
    sums, counts = np.array([[0.0, 3.0], [4.0, 0.0]]), np.array([[2, 1], [2, 0]])
    value, low, high = statistics.ratio_band(sums, counts)
    assert value.tolist() == [1.0, 3.0]
    assert (low[0], high[0]) == (0.0, 2.0)  # both draws of the first cluster, or of the second
    assert (low[1], high[1]) == (3.0, 3.0)
    alone = statistics.ratio_band(sums[:1], counts[:1])
    assert alone[0].tolist() == [0.0, 3.0] and np.isnan(alone[1]).all()
    assert np.isnan(statistics.ratio_band(np.zeros((2, 1)), np.zeros((2, 1)))[0]).all()


# ---------------------------------------------------------------- segments


def test_segments_by_hand():
    cuts = cut_segments([episode(9)], context=3, horizon=4, each=2)
    assert cuts.start.tolist() == [0, 4]  # 10 rows; 4 · 0.618 steps before the end, so two are left to dream
    assert cuts.context.obs["vector"][:, :, 0].tolist() == [[0, 1, 2], [4, 5, 6]]
    assert cuts.action.tolist() == [[2, 3, 4, 5], [6, 7, 8, 9]]
    assert cuts.obs["vector"][0, :, 0].tolist() == [3, 4, 5, 6] and cuts.reward[0].tolist() == [3, 4, 5, 6]
    assert cuts.mask.tolist() == [[True] * 4, [True, True, True, False]]
    assert cuts.terminated[1].tolist()[:3] == [False, False, True]
    assert cuts.context.is_first.tolist() == [[True, False, False], [False] * 3]


def test_ends_lie_all_over_the_horizon():
    cuts = cut_segments([episode(40) for _ in range(20)], context=2, horizon=10, each=3)
    steps = np.nonzero((cuts.terminated & cuts.mask).numpy())[1]
    assert len(steps) == 20 and len(set(steps.tolist())) >= 8


def test_episodes_that_are_too_short_are_left_out_or_said():
    cuts = cut_segments([episode(2), episode(8)], context=4, horizon=3, each=4)
    assert set(cuts.episode.tolist()) == {1}
    with pytest.raises(LabError, match="smaller --context"):
        cut_segments([episode(2)], context=4, horizon=3, each=4)


# ---------------------------------------------------------------- open loop


def test_a_model_that_knows_has_no_error():
    cuts = cut_segments([episode(30), episode(30, start=100)], context=3, horizon=5, each=4)
    dream = open_loop(Counter(end_at=30), cuts, samples=2, seed=0, device=CPU)
    found = curves(dream, cuts)
    assert found["image mse"].overall == 0.0 and found["image psnr"].overall == pytest.approx(SHARPEST)
    assert found["image ssim"].overall == pytest.approx(1.0) and found["reward error"].overall == 0.0
    told = ends_found(dream, cuts)
    assert (
        told["ends"] == 2 and told["found"] == 0.5 and told["false"] == 0.0
    )  # it knows of the end at 30, not at 130
    assert dream.obs["image"].shape == (len(cuts), 5, 3, SIDE, SIDE)


def test_errors_stand_where_they_were_made():
    cuts = cut_segments([episode(20), episode(20, start=50)], context=2, horizon=4, each=2)
    found = curves(open_loop(Counter(off=10), cuts, samples=1, seed=0, device=CPU), cuts)
    assert found["reward error"].value.tolist() == pytest.approx([0.0, 10.0, 10.0, 10.0])
    assert found["vector mse"].value.tolist() == pytest.approx([0.0, 100.0, 100.0, 100.0])
    assert found["image mse"].value[1] == pytest.approx((10 / 255) ** 2)


def test_what_any_model_should_beat():
    cuts = cut_segments([episode(20)], context=2, horizon=4, each=1)
    floor = curves(repeat_last(cuts), cuts)
    assert floor["vector mse"].value.tolist() == [1.0, 4.0, 9.0, 16.0]  # the count runs away
    assert floor["end accuracy"].overall == 1.0


def test_the_worst_are_long_and_of_different_episodes():
    cuts = cut_segments(
        [episode(30), episode(30, start=100), episode(3, start=200)], context=2, horizon=6, each=3
    )
    dream = open_loop(Counter(), cuts, samples=1, seed=0, device=CPU)
    errors = dream.errors["vector mse"]
    errors[cuts.episode == 0] = 5.0
    errors[cuts.episode == 2] = 100.0  # greatest, but with hardly a step to show
    chosen = worst(dream, cuts, "vector mse", 3)
    assert [int(cuts.episode[index]) for index in chosen] == [0, 1, 2]


# ---------------------------------------------------------------- from end to end


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """Two tiny models of a picture and a vector, one of another environment, and a run without a model."""
    root = tmp_path_factory.mktemp("dream")
    quiet = ["logging.progress=off", "logging.tensorboard=false", "training.report.every_env_steps=null"]
    quiet += ["training.evaluate.every_env_steps=null", "training.total_timesteps=16", "debug=tiny"]
    pictures = ["environment=dummy_dict", "components/encoder=dict"]
    for seed in (1, 2):
        rl_lab.train(None, [*quiet, *pictures, f"experiment.seed={seed}", f"run_dir={root / str(seed)}"])
    rl_lab.train(None, [*quiet, f"run_dir={root / 'other'}"])
    rl_lab.train("random_cartpole", [*quiet, f"run_dir={root / 'random'}"])
    return [root / name for name in ("1", "2", "other", "random")]


def test_one_command_one_table_one_picture(runs: list[Path], tmp_path: Path, capsys):
    words = ["--episodes", "6", "--horizon", "5", "--context", "2", "--out", str(tmp_path / "dream")]
    assert main(["report", "--dream", *map(str, runs), *words]) == 0
    printed = capsys.readouterr().out
    assert "image psnr" in printed and "ends found" in printed and "nothing changes" in printed
    assert "only like can be compared with like" in printed and "no model that can be stepped" in printed
    content = json.loads((tmp_path / "dream" / "dream.json").read_text())
    assert [model["label"] for model in content["models"]] == [
        "dreamer_cartpole, seed 1",
        "dreamer_cartpole, seed 2",
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
    with Image.open(tmp_path / "dream" / "dream.png") as picture:
        assert picture.width > 1200 and np.asarray(picture.convert("L")).std() > 10
    page = (tmp_path / "dream" / "index.html").read_text()
    assert "Worst predictions of" in page and not re.search(r'(src|href)="(https?:)?//', page)


def test_the_same_seed_dreams_the_same(runs: list[Path]):
    options: dict[str, Any] = {"episodes": 2, "horizon": 3, "context": 2, "samples": 2, "policy": "random"}
    first, second = (content(measure([RunFolder(runs[0])], **options)) for _ in range(2))
    assert first == second and first["episodes"]["source"] == "played at random"


def test_stored_episodes_and_another_player(runs: list[Path], tmp_path: Path):
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
    assert measure(model, episodes=2, policy=str(runs[1]), **options).source == f"played by {runs[1]}"
    with pytest.raises(LabError, match="cannot play: it is of CartPole-v1"):
        measure(model, episodes=2, policy=str(runs[2]), **options)


def test_vectors_are_drawn_as_lines(runs: list[Path], tmp_path: Path):
    found = measure([RunFolder(runs[2])], episodes=2, horizon=4, context=2)
    assert set(found.curves["dreamer_cartpole"]) == {"vector mse", "reward error", "end accuracy"}
    (strips,) = worst_strips(found).values()
    assert "worst of dreamer_cartpole: vector mse" in strips[0].title
    draw_strips(found.dreams, found.cuts, strips[:1], tmp_path / "lines.png")
    with Image.open(tmp_path / "lines.png") as picture:
        assert np.asarray(picture.convert("L")).std() > 10


def test_mistakes_are_said(runs: list[Path]):
    with pytest.raises(LabError, match="none of these runs has a world model"):
        measure([RunFolder(runs[3])])
    model = [RunFolder(runs[0])]
    with pytest.raises(LabError, match="--horizon must be at least 1"):
        measure(model, horizon=0)
    with pytest.raises(LabError, match="at least 1, or a path"):
        measure(model, episodes=0)
    with pytest.raises(LabError, match="there is no data at"):
        measure(model, episodes="nowhere")
    with pytest.raises(LabError, match="two things"):
        main(["report", "--dream", "--serve", "--debug"])
