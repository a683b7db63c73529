"""rl-lab data: info, check and convert, with errors of one sentence and nothing half-written."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import rl_lab
from rl_lab.buffers.formats.dataset import open_dataset
from rl_lab.cli import main
from tests.buffers.formats.format_helpers import SPECS, assert_equal, assert_same, episodes, write

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return write(tmp_path / "data", SPECS["both"], "lab")


def test_info(stored: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["data", "info", str(stored), "--sheet", str(tmp_path / "sheet.png")]) == 0
    printed = capsys.readouterr().out
    for text in (
        "format lab, 3 episodes, 15 steps",
        "uint8 (3, 16, 8)",
        "continuous, [-2.0, 0.0] to [2.0, 4.0] in the environment",
        "from test",
    ):
        assert text in printed
    returns = [episode.total_reward for episode in episodes(SPECS["both"])]
    assert f"{np.mean(returns):.2f}"[:4] in printed
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    assert sheet.shape == (3 * 98, 8 * 98, 3)
    first = np.moveaxis(episodes(SPECS["both"])[0].observations["image"][0], 0, -1)
    assert np.array_equal(sheet[1:97:6, 1:97:12], first)  # enlarged without interpolation


def test_info_of_a_run(tmp_path: Path, capsys: Capture) -> None:
    """The replay of a run, in a ring and on disk: the same episodes."""
    found = []
    for buffer in ("world_model_sequence", "episodes"):
        words = ["experiment=random_cartpole", "debug=tiny", "logging.progress=off", f"buffer={buffer}"]
        rl_lab.train(None, [*words, f"run_dir={tmp_path / buffer}"])
        assert main(["data", "info", str(tmp_path / buffer)]) == 0
        with open_dataset(tmp_path / buffer) as data:
            assert data.spec.action.choices == (2,)
            ended = [e for e in data if e.terminated[-1]]
        found.append(sorted(ended, key=lambda e: e.observations["vector"].tobytes()))
    assert len(found[0]) == len(found[1]) >= 3
    for left, right in zip(*found):
        assert_equal(left, right)


def test_check_names_every_fault(tmp_path: Path, stored: Path, capsys: Capture) -> None:
    assert main(["data", "check", str(stored)]) == 0
    assert "3 episodes, 15 steps are intact" in capsys.readouterr().out
    bad = episodes(SPECS["vector"])
    path = write(tmp_path / "files", SPECS["vector"], "npz", bad)
    for number, change in ((0, {"rewards": np.full(5, np.nan)}), (2, {"observations": np.zeros((4, 3))})):
        file = path / f"{number:06d}.npz"
        with np.load(file) as archive:
            content = {name: archive[name] for name in archive.files}
        np.savez(file, **{**content, **change})
    assert main(["data", "check", str(path)]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert "000000.npz: 'rewards' (float64) must be finite" in printed[0]
    assert "000002.npz: observation 'vector' has shape (4, 3), but 9 rewards need 10 or 9" in printed[1]
    assert printed[2].endswith("2 faults in 3 episodes")
    assert main(["data", "check", str(stored), "--env", "CartPole-v1"]) == 1
    assert (
        "'vector' has shape (6, 3), but 5 rewards and the environment need (6, 4)" in capsys.readouterr().out
    )


@pytest.mark.parametrize("target", ["npz", "minari", "robomimic"])
def test_convert_there_and_back(stored: Path, tmp_path: Path, capsys: Capture, target: str) -> None:
    if target != "npz":
        pytest.importorskip("h5py")
    there = tmp_path / ("there.hdf5" if target == "robomimic" else "there")
    assert main(["data", "convert", str(stored), str(there), "--to", target]) == 0
    assert "3 episodes, 15 steps" in capsys.readouterr().out
    assert main(["data", "convert", str(there), str(tmp_path / "back")]) == 0
    with open_dataset(tmp_path / "back") as back:
        assert_same(back, episodes(SPECS["both"]))
        assert back.spec.to_dict() == SPECS["both"].to_dict()


def test_convert_selects(stored: Path, tmp_path: Path) -> None:
    words = [
        "data",
        "convert",
        str(stored),
        str(tmp_path / "some"),
        "--keep",
        "vector",
        "--rename",
        "vector=state",
    ]
    given = episodes(SPECS["both"])
    least = sorted(episode.total_reward for episode in given)[1]
    assert main([*words, "--min-return", str(least)]) == 0
    with open_dataset(tmp_path / "some") as some:
        assert list(some.spec.observations) == ["state"]
        expected = [episode for episode in given if episode.total_reward >= least]
        assert [len(episode) for episode in some] == [len(episode) for episode in expected]
        assert some.episode(0).observations["state"].tobytes() == expected[0].observations["vector"].tobytes()


def test_errors_are_one_sentence(stored: Path, tmp_path: Path, capsys: Capture) -> None:
    out = str(tmp_path / "out")
    for words, text in (
        (["info"], "PATH is missing"),
        (["info", str(tmp_path / "no")], "does not exist"),
        (["info", str(tmp_path)], "has no known format"),
        (["info", str(stored), "extra"], "takes one path"),
        (["convert", str(stored)], "TARGET is missing"),
        (["convert", str(stored), str(stored)], "exists: choose another name"),
        (["convert", str(stored), out, "--to", "hdf"], "format 'hdf' is unknown"),
        (
            ["convert", str(stored), out, "--rename", "vektor=a"],
            "no observation is called 'vektor'. Did you mean 'vector'",
        ),
        (["convert", str(stored), out, "--rename", "a"], "--rename a: write OLD=NEW"),
        (["convert", str(stored), out, "--units", "environment"], "--units does not apply to the format lab"),
        (["convert", str(stored), out, "--min-return", "1e9"], "there is no episode to write"),
        (
            ["convert", str(stored), out, "--env", "CartPole-v1"],
            "'vector' has shape (6, 3)",
        ),
        (["check", str(stored), "--episodes", "0"], "--episodes must be at least 1"),
    ):
        assert main(["data", *words]) == 1, words
        error = capsys.readouterr().err
        assert text in error and error.count("\n") == 1, words
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


def test_damaged_data_is_reported(stored: Path, capsys: Capture) -> None:
    chunk = next(stored.glob("chunk-*"))
    with open(chunk, "r+b") as file:
        file.seek(chunk.stat().st_size - 20)
        file.write(os.urandom(8))
    assert main(["data", "check", str(stored)]) == 1
    assert "episode 2: a file is damaged" in capsys.readouterr().out


def test_formats(capsys: Capture) -> None:
    assert main(["data", "formats"]) == 0
    printed = capsys.readouterr().out
    assert "minari" in printed and "reads, writes" in printed
