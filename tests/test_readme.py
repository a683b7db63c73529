"""The commands and the Python example of the README run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import urllib.request
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
    elif verb in ("eval", "report", "export"):
        words.append(str(run))
    elif verb == "play":
        words = [word for word in words if word != "--web"]  # test_instant_dream has the page
        words += [*([] if "://" in command else [str(run)]), "--video", "--steps", "10"]
    if verb in ("eval", "export"):
        words += ["--episodes", "2"]
    assert main(words) == 0


def test_python_example_runs(monkeypatch, tmp_path: Path):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    namespace: dict = {}
    exec(code, namespace)
    assert namespace["env"].action_space.contains(namespace["action"])


def test_first_page_is_short():
    lines = README.splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 120


def test_row_about_the_suites_counts_their_runs():
    """What the page that the suites' report writes says of each method: `A done, B missing of C runs`."""
    page = (ROOT / "docs" / "results.md").read_text()
    methods = re.findall(r": ((?:\d+ \w+,? )+)of (\d+) runs?\.", page)
    done = sum(int(number) for counts, _ in methods for number in re.findall(r"(\d+) done", counts))
    planned = sum(int(number) for _, number in methods)
    suites = len(re.findall(r"^## ", page, re.M))
    assert f"| {suites} benchmarks by " in README and f"| {done} of {planned} planned runs done" in README
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.M | re.S))
    empty = [name for name, text in sections.items() if not re.search(r": \d+ (done|partial)", text)]
    assert all(f"`{name}`" in README for name in empty), empty
    assert suites == len(list((ROOT / "rl_lab" / "configs" / "suite").glob("*.yaml")))


def test_makefile_has_readme_targets():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make ([\w-]+)", README, re.M)
    assert targets == ["play", "demo", "test"]
    for target in (*targets, "test-learning", "lint"):
        assert f"\n{target}:" in makefile


def test_instant_dream(tmp_path: Path):
    """`make play` without its --open: the page, and a first frame of the dream, before anything was trained."""
    websocket = pytest.importorskip("websockets.sync.client")
    (recipe,) = re.findall(r"^play:.*\n\t\$\(BIN\)/(.+)$", (ROOT / "Makefile").read_text(), re.M)
    (agent,) = re.findall(r"^AGENT \?= (\w+)$", (ROOT / "Makefile").read_text(), re.M)
    words = shlex.split(recipe.replace("$(AGENT)", agent))
    assert words[0] == "rl-lab" and words[-1] == "--open"
    command = [sys.executable, "-m", "rl_lab", *words[1:-1], "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = next(line.split()[-1] for line in process.stdout if "http://" in line)
            assert b"<title>" in urllib.request.urlopen(address, timeout=20).read()
            with websocket.connect(
                address.replace("http", "ws") + "live", origin=address.rstrip("/")
            ) as live:
                received = [live.recv(timeout=20) for _ in range(3)]
            assert any(isinstance(message, bytes) and b"PNG" in message for message in received)
        finally:
            process.terminate()
