from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rl_lab.cli import main
from rl_lab.errors import ConfigError
from rl_lab.tools import play
from rl_lab.tools.play.episodes import read_video
from rl_lab.tools.play.launch import headless, options_from
from rl_lab.tools.play.shell import long_flags

ROOT = Path(__file__).resolve().parents[3]


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    play.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "mode", "control"),
    [
        ((), "real", "agent"),
        (("--human",), "real", "human"),
        (("-w",), "dream", "human"),
        (("-a",), "dream", "agent"),
        (("-e",), "episodes", "agent"),
        (("--both",), "both", "agent"),
        (("--both", "--human"), "both", "human"),
    ],
)
def test_flags(words: tuple[str, ...], mode: str, control: str):
    options = options_from(parsed(*words, "-r", "--header", "-s", "-f", "5"))
    assert (options.mode, options.control) == (mode, control)
    assert options.parts and options.header and options.save and options.fps == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-w", "-a"), "cannot be combined"),
        (("--split", "train"), "--split needs -e"),
        (("-f", "0"), "--fps must be at least 1"),
        (("--horizon", "0"), "--horizon"),
    ],
)
def test_conflicting_flags(words: tuple[str, ...], message: str):
    with pytest.raises(ConfigError, match=message):
        options_from(parsed(*words))


def test_play_sh_flags():
    assert long_flags(["-h"]) == ["--header"]
    assert long_flags(["RUN", "-wrh", "-f", "5", "--web"]) == [
        "RUN",
        "-w",
        "-r",
        "--header",
        "-f",
        "5",
        "--web",
    ]
    assert long_flags(["-e", "-s", "-f5", "--help", "-"]) == ["-e", "-s", "-f5", "--help", "-"]


def test_headless(monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    assert headless() is sys.platform.startswith("linux")
    monkeypatch.setenv("DISPLAY", ":0")
    assert not headless()
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    assert headless()


def videos(run: Path) -> dict[str, Path]:
    """Return the newest video of each mode."""
    found = sorted((run / "media" / "recordings").glob("*.mp4"), key=lambda file: file.stat().st_mtime)
    return {file.name.split("_")[2]: file for file in found}


def test_video_without_display(trained: Path, capsys, monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    for words in (
        ["-s"],
        ["-w", "--horizon", "6"],
        ["-a", "-r", "--header", "--flush", "3"],
        ["--both", "-r"],
    ):
        assert main(["play", str(trained), *words, "--steps", "8", "--seed", "1"]) == 0
    out = capsys.readouterr().out
    assert out.count("no display: writing a video instead") == 4
    assert out.count("so the agent plays") == 1 and out.count("so -s does nothing here") == 1
    made = videos(trained)
    assert set(made) == {"real", "dream", "both"}
    assert len(read_video(made["real"])) == 9 and read_video(made["both"]).shape[2] > 900  # three panels
    with np.load(made["real"].with_suffix(".npz")) as episode:
        assert episode["observations"].shape == (9, 3, 64, 64) and episode["actions"].shape == (8,)
    # Recordings can be replayed, and dreams can start from recordings and from replay.
    assert main(["play", str(trained), "-e", "--split", "recordings", "--steps", "3"]) == 0
    for start in ("episodes", "replay"):
        words = ["-a", "--start", start, "--context", "2", "--steps", "2", "--best-action", "--ends", "never"]
        assert main(["play", str(trained), *words]) == 0


def test_missing_inputs(trained: Path, capsys, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    assert main(["play", str(trained), "-e", "--split", "train"]) == 1
    assert "has no recorded episode" in capsys.readouterr().err
    assert main(["play", str(trained), "-a", "--ends", "often"]) == 1
    assert "use sample, never" in capsys.readouterr().err
    assert main(["play", str(tmp_path / "nowhere")]) == 1
    assert "is not a run" in capsys.readouterr().err


def test_play_scripts(trained: Path):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    result = subprocess.run(
        [str(ROOT / "scripts" / "play.sh"), "-ah", "--steps", "2"],
        cwd=trained.parents[2],  # holds outputs/
        env={**os.environ, "SDL_VIDEODRIVER": "dummy", "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert str(trained) in result.stdout
    own = trained / "scripts" / "play.sh"
    assert 'rl_lab.tools.play.shell "$(dirname "$0")/.." "$@"' in own.read_text() and os.access(own, os.X_OK)
