"""The class of docs/howto/own_environment.md, extracted: checked, and trained from the command line."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from gymnasium.utils.env_checker import check_env

from rl_lab.environments import make_env

# Enough steps to execute every part of the page's command once.
SHORTER = [
    "training.total_timesteps=80",
    "training.evaluate.every_env_steps=null",
    "training.report.every_env_steps=null",
]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "own_environment.md"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A user's folder with my_env.py in it."""
    (code,) = re.findall(r"^`my_env.py`:\n\n```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    (tmp_path / "my_env.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_env", raising=False)
    return tmp_path


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_passes_environment_checker(project, monkeypatch):
    monkeypatch.syspath_prepend(project)
    import my_env

    check_env(my_env.Orchard(render_mode="rgb_array"), skip_render_check=True)
    with make_env("my_env:Orchard", 2, workers=1, render=True) as env:
        assert {name: spec.shape for name, spec in env.spec.observations.items()} == {
            "camera": (3, 16, 16),
            "tool": (3,),
        }
        assert env.spec.action.choices == (4, 3)
        env.reset()
        for _ in range(20):
            *_, infos = env.step(env.action_space.sample())
        assert set(infos["log"]) == {0, 1} and "log/both_right" in infos["log"][0]
        assert env.frame().shape == (16, 16, 3)


def test_trains_from_command_line(project):
    (words,) = re.findall(r"^rl-lab (train .*Orchard.*)$", PAGE.read_text(), re.M)
    done = subprocess.run(
        [sys.executable, "-m", "rl_lab", *words.split(), *SHORTER, "run_dir=run"],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert any((project / "run" / "checkpoints").iterdir())
    metrics = (project / "run" / "metrics.jsonl").read_text()
    assert "both_right" in metrics
