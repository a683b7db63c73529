from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rl_lab.errors import LabError
from rl_lab.run_folder import RunFolder
from rl_lab.tools.report import command as report
from rl_lab.tools.report.page import LARGEST_EMBEDDED
from rl_lab.tools.report.runs import config_differences, find_runs, load_runs, summarize
from rl_lab.utils.checkpoint.manifest import CHECKPOINT_VERSION, write_manifest
from tests.tools.broken_runs import BREAKAGES, break_run, write_huge_png, write_short_metrics
from tests.tools.conftest import write_gif

MakeRun = Callable[..., Path]


def assert_is_figure(path: Path) -> None:
    with Image.open(path) as image:
        assert 800 <= image.width <= 2400 and 200 <= image.height <= 6000
        pixels = np.asarray(image.convert("L"))
    assert pixels.std() > 3, "nothing was drawn"


def assert_needs_no_network(page: str) -> None:
    assert not re.search(r"""(src|href|srcset|action)\s*=\s*["']?\s*(https?:)?//""", page)
    assert "<script" not in page and "<link" not in page and "@import" not in page
    assert not re.search(r"url\(\s*['\"]?(https?:)?//", page)


def test_one_run(make_run: MakeRun) -> None:
    run = make_run()
    paths = report.write_report([run])
    assert paths[0] == run / "report" / "index.html" and paths[1] == run / "report" / "curve.png"
    assert all(path.is_file() for path in paths) and len(set(paths)) == len(paths)
    for path in paths[1:]:
        assert_is_figure(path)
    page = paths[0].read_text()
    assert_needs_no_network(page)
    for text in (
        "dreamer_cartpole",
        "CartPole-v1",
        "20,000",
        "10,000",
        "5 min 07 s",
        "64.5",
        "0123456789abcdef",
    ):
        assert text in page, text
    assert "99999999" not in page, "the torn line counts for nothing"
    assert page.count("data:image/png;base64,") == 2 * (len(paths) - 1), "one for wide pages, one for phones"
    assert page.count("data:image/gif;base64,") == 1
    assert "eval episode, step 20,000" in page


def test_several_seeds_and_variants(make_run: MakeRun, tmp_path: Path) -> None:
    make_run(seed=0), make_run(seed=1), make_run(seed=1, train_ratio=64)
    paths = report.write_report([tmp_path / "outputs"], out=tmp_path / "all")
    assert paths[0] == tmp_path / "all" / "index.html"
    for path in paths[1:]:
        assert_is_figure(path)
    page = paths[0].read_text()
    assert_needs_no_network(page)
    for text in ("dreamer_cartpole train_ratio=32, seed 0", "dreamer_cartpole train_ratio=32, seed 1"):
        assert text in page
    assert "dreamer_cartpole train_ratio=64" in page
    assert "95 % bootstrap interval" in page and "probability of improvement" in page
    assert {"aggregates.png", "profiles.png"} <= {path.name for path in paths}
    assert "algorithm.train_ratio" in page and "difference" in page


def test_report_folder_of_several_runs(make_run: MakeRun, tmp_path: Path, monkeypatch) -> None:
    runs = [make_run(lines=12, media=False), make_run(lines=12, seed=1, media=False)]
    monkeypatch.chdir(tmp_path)
    assert report.write_report(runs)[0] == Path("report/index.html")
    assert (tmp_path / "report" / "curve.png").is_file()


def test_report_of_a_sweep_is_in_its_folder(make_run: MakeRun, tmp_path: Path, monkeypatch) -> None:
    runs = [make_run(lines=12, media=False), make_run(lines=12, seed=1, media=False)]
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    for number, run in enumerate(runs):
        run.rename(sweep / str(number))
    monkeypatch.chdir(tmp_path)
    index = report.write_report([sweep])[0]
    assert index == sweep / "report" / "index.html" and index.is_file() and not (tmp_path / "report").exists()
    assert report.write_report(["sweep"])[0] == Path("sweep/report/index.html")  # it is no run


def test_groups(make_run: MakeRun) -> None:
    folders = [make_run(seed=seed, train_ratio=ratio, lines=5) for seed, ratio in ((0, 32), (1, 32), (0, 8))]
    runs = load_runs([RunFolder(folder) for folder in folders])
    assert [run.group for run in runs] == ["dreamer_cartpole train_ratio=32"] * 2 + [
        "dreamer_cartpole train_ratio=8"
    ]
    assert len({run.label for run in runs}) == 3
    assert config_differences(runs)["algorithm.train_ratio"] == [32, 32, 8]
    twins = load_runs([RunFolder(folders[0]), RunFolder(make_run(seed=0, lines=5))])
    assert twins[0].group == twins[1].group == "dreamer_cartpole"
    assert twins[0].label != twins[1].label


def test_summary(make_run: MakeRun) -> None:
    folder = make_run(steps=1000, lines=50, evaluations=5)
    manifest = {"version": CHECKPOINT_VERSION, "step": 900, "kind": "full", "buffers": {}, "info": {}}
    manifest["state"] = {"file": "step_000000900.pt", "bytes": 2_500_000, "crc32": 0}
    write_manifest(folder / "checkpoints" / "step_000000900.json", manifest)
    (folder / "checkpoints" / "best.json").write_text("{torn")
    summary = summarize(load_runs([RunFolder(folder)])[0])
    assert (summary.steps, summary.frames, summary.updates, summary.total_steps) == (1000, 1000, 500, 1000)
    assert summary.seconds == pytest.approx(3.1 * 49) and summary.steps_per_second == pytest.approx(
        980 / (3.1 * 49)
    )
    assert summary.eval_best is not None and summary.eval_best[0] == summary.eval_last
    assert "step_000000900: step 900, full, 2.5 MB" in summary.checkpoints
    assert any("damaged" in line for line in summary.checkpoints)
    assert summary.code == "commit 0123456789abcdef, with uncommitted changes"


def test_run_without_metrics(make_run: MakeRun) -> None:
    run = make_run(lines=0, media=False)
    paths = report.write_report([run])
    assert "No episode has ended yet" in paths[0].read_text()
    (run / "metrics.jsonl").unlink()
    assert report.write_report([run])[1].stat().st_size > 1000


def test_evaluations_constants_and_captions(make_run: MakeRun) -> None:
    run = make_run(lines=20)
    lines = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if line.endswith("}")
    ]
    still = [json.dumps({**line, "train/nonfinite": 0.0, "train/extra": 1.5}) for line in lines]
    (run / "metrics.jsonl").write_text("\n".join(still) + "\n")
    result = {
        "step": 9006,
        "episodes": 20,
        "seed": 1,
        "sample": True,
        "return_mean": 363.9,
        "return_std": 57.5,
    }
    result["return_intervals"] = {"mean": [338.0, 389.0]}
    (run / "report").mkdir(exist_ok=True)
    (run / "report" / "eval_000009006_seed1.json").write_text(json.dumps(result))
    (run / "report" / "eval_000009007_seed1.json").write_text("{}")  # damaged: left out
    write_gif(run / "media" / "reconstructions" / "report_open_loop_image_000000100.gif")
    page = report.write_report([run])[0].read_text()
    assert "Evaluations" in page and "9,006" in page and "338.0 to 389.0" in page and "9,007" not in page
    assert "Constant: train/extra 1.5, train/nonfinite 0" in page
    assert "framed green while the model observes, red while it dreams" in page


def test_keys_choose_metrics(make_run: MakeRun) -> None:
    run = make_run(lines=20, media=False)
    paths = report.write_report([run], keys=["train/loss/*", "controller/entropy"])
    assert {path.name for path in paths} >= {"metrics_train.png", "metrics_other.png"}
    assert "Training" in paths[0].read_text()
    with pytest.raises(LabError, match=r"train/los.*Did you mean"):
        report.write_report([run], keys=["train/los/reward"])


def test_large_media_are_linked(make_run: MakeRun) -> None:
    run = make_run(name="'<b>x</b>'", lines=5, media=False)
    video = run / "media" / "episodes" / "test" / "a long#film_000000005.mp4"
    video.write_bytes(b"\0" * LARGEST_EMBEDDED)
    (run / "media" / "recordings").mkdir()
    (run / "media" / "recordings" / "short.mp4").write_bytes(b"\0" * 100)
    page = report.write_report([run])[0].read_text()
    assert 'href="../media/episodes/test/a%20long%23film_000000005.mp4"' in page
    assert '<video src="data:video/mp4;base64,' in page
    assert "<b>x</b>" not in page and "&lt;b&gt;x&lt;/b&gt;" in page


def test_excess_media_are_linked(make_run: MakeRun, monkeypatch) -> None:
    from rl_lab.tools.report import page as report_page

    run = make_run(lines=5, media=False)
    folder = run / "media" / "recordings"
    folder.mkdir()
    for number in range(3):
        (folder / f"film_{number:09d}.mp4").write_bytes(b"\0" * 1000)
    monkeypatch.setattr(report_page, "ALL_EMBEDDED", 2500)
    page = report.write_report([run], keys=["train/loss/reward"])[0].read_text()
    assert page.count("data:video/mp4") == 2 and page.count('href="../media/recordings/') == 1


def test_newest_run_or_sweep(make_run: MakeRun, tmp_path: Path) -> None:
    root = tmp_path / "outputs"
    alone = make_run(lines=2, media=False)
    os.utime(alone / "config.yaml", (1_000, 1_000))
    sweep = [
        make_run(f"multirun/2026-11-15/13-00-00/{seed}", seed=seed, lines=2, media=False) for seed in (0, 1)
    ]
    assert [run.path for run in find_runs([], root=str(root))] == sweep
    for run in sweep:
        os.utime(run / "config.yaml", (500, 500))
    assert [run.path for run in find_runs([], root=str(root))] == [alone]
    assert [run.path for run in find_runs([root])] == [alone, *sweep]


def test_grouping_by_name(make_run: MakeRun) -> None:
    folders = [
        RunFolder(make_run(name=name, train_ratio=ratio, lines=5, media=False, environment=f"task: {task}"))
        for name, ratio, task in (("a", 1, "X-v0"), ("a", 2, "Y-v0"), ("b", 1, "X-v0"))
    ]
    by_experiment = load_runs(folders, "experiment")
    assert [run.method for run in by_experiment] == ["a", "a", "b"]
    assert [run.group for run in by_experiment] == ["a on X-v0", "a on Y-v0", "b on X-v0"]
    assert {run.method for run in load_runs(folders, "workflow")} == {"Dreamer"}
    by_config = load_runs(folders)
    assert by_config[0].group == "a task=X-v0" and by_config[0].method == "a train_ratio=1"


def test_find_runs(make_run: MakeRun, tmp_path: Path) -> None:
    first, second = make_run(lines=2), make_run(lines=2)
    assert [run.path for run in find_runs([tmp_path / "outputs", first])] == [first, second]
    assert find_runs([first / "checkpoints" / "last.pt"])[0].path == first
    assert find_runs([], root=str(tmp_path / "outputs"))[0].path in (first, second)
    with pytest.raises(LabError, match="is not a run"):
        find_runs([tmp_path / "nothing"])


def test_command_prints_paths(make_run: MakeRun, capsys) -> None:
    run = make_run(lines=5)
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    assert report.main(parser.parse_args([str(run)])) == 0
    printed = capsys.readouterr().out.split()
    assert str(run / "report" / "index.html") in printed and str(run / "report" / "curve.png") in printed


def test_unreadable_runs_are_left_out(make_run: MakeRun, tmp_path: Path, capsys) -> None:
    good = write_short_metrics(make_run(name="whole", lines=2, media=False))
    expected = [break_run(make_run(how, lines=2, media=False), how) for how in BREAKAGES]
    paths = report.write_report([tmp_path / "outputs"], out=tmp_path / "all")
    page, errors = paths[0].read_text(), capsys.readouterr().err
    assert "Left out" in page and "whole" in page and str(good) in page
    assert_is_figure(paths[1])
    for how, words in zip(BREAKAGES, expected):
        (line,) = (line for line in errors.splitlines() if how in line)
        assert line.startswith(f"left out: {tmp_path / 'outputs' / how}") and words in line
        assert line.removeprefix("left out: ") in page
    assert len(errors.splitlines()) == len(BREAKAGES)


@pytest.mark.parametrize("how", BREAKAGES)
def test_single_unreadable_run_raises(make_run: MakeRun, how: str) -> None:
    run = make_run(lines=2, media=False)
    words = break_run(run, how)
    with pytest.raises(LabError) as caught:
        report.write_report([run])
    text = str(caught.value)
    assert text.startswith(str(run)) and words in text and "\n" not in text


def test_several_unreadable_runs_raise(make_run: MakeRun, tmp_path: Path) -> None:
    for number in range(3):
        break_run(make_run(f"day/{number}", lines=2, media=False), "empty config")
    with pytest.raises(
        LabError, match=r"day/0/config\.yaml contains no config; 2 more runs cannot be plotted"
    ):
        report.write_report([tmp_path / "outputs"], out=tmp_path / "all")


def test_binary_code_file_and_huge_image(make_run: MakeRun) -> None:
    run = write_short_metrics(make_run(lines=2))
    (run / "code.txt").write_bytes(b"commit \xff\xfe\x00\n")
    image = write_huge_png(run / "media" / "episodes" / "test" / "frame_000000002.png")
    (run / "media" / "gone.gif").symlink_to(run / "nothing.gif")
    page = report.write_report([run])[0].read_text()
    assert "commit \ufffd" in page and page.count("data:image/gif") == 1
    assert f"{image} cannot be shown: DecompressionBombError" in page
