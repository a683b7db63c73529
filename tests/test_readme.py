"""The commands and the Python example of the README run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import rl_lab
from rl_lab.cli import main

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", README, re.S)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("rl-lab ")]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("readme") / "run"
    rl_lab.train("dreamer_cartpole", ["debug=tiny", "logging.progress=off", f"run_dir={folder}"])
    return folder


@pytest.mark.parametrize("command", commands())
def test_command_runs(command: str, run: Path, tmp_path: Path):
    words = shlex.split(command)[1:]
    verb = words[0]
    if verb == "train":
        words += [word for word in ("debug=tiny", "logging.progress=off") if word not in words]
        words.append("algorithm.train_ratio=4")
    elif verb == "resume":
        words = ["resume", str(run), "training.total_timesteps=110"]
    elif verb in ("eval", "report"):
        words.append(str(run))
    elif verb == "play":
        words += [str(run), "--video", "--steps", "10"]
    if verb == "eval":
        words += ["--episodes", "2"]
    assert main(words) == 0


def test_python_example_runs(monkeypatch, tmp_path: Path):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    namespace: dict = {}
    exec(code, namespace)
    assert namespace["env"].action_space.contains(namespace["action"])


def test_makefile_has_readme_targets():
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo:", "test:", "test-learning:", "lint:"):
        assert f"\n{target}" in makefile
