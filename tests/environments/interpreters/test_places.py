"""Named interpreters: made from pinned lists, listed, removed; half of one is not taken for a whole one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rl_lab.cli import main
from rl_lab.environments.interpreters import places
from rl_lab.errors import ConfigError, LabError
from rl_lab.tools.doctor import check_interpreters


@pytest.fixture
def small(tmp_path, monkeypatch):
    """One named interpreter, `small`, whose installation is a link to this Python."""
    lists = tmp_path / "pins"
    lists.mkdir()
    (lists / "small.txt").write_text("# a small list\nnumpy==1.26.4\n")
    monkeypatch.setattr(places, "PINS", lists)
    monkeypatch.setenv("RL_LAB_CACHE", str(tmp_path / "cache"))
    commands = []

    def run(name, command):
        commands.append(command)
        if "venv" in command:
            python = Path(command[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.symlink_to(sys.executable)

    monkeypatch.setattr(places, "_run", run)
    return commands


def test_lists_pin_every_package():
    assert {"metaworld", "old_gym", "dmc", "memory_maze"} <= set(places.known_names())
    for name in places.known_names():
        first, *lines = places.pins(name).read_text().splitlines()
        assert first.startswith("# ") and places.describe(name)
        for line in lines:
            assert re.fullmatch(r"==[\w.]+", str(Requirement(line).specifier)), line
    pinned = {name: places.pins(name).read_text() for name in ("metaworld", "dmc")}
    assert "mujoco==3.3.0" in pinned["metaworld"] and "mujoco==3.17.0" in pinned["dmc"]  # cannot share a venv


def test_create_list_and_remove(small, capsys):
    with pytest.raises(
        ConfigError, match=r"environment\.python=small is not on this machine yet: rl-lab envs create small"
    ):
        places.place_of("small", None)
    assert main(["envs", "create", "small"]) == 0
    venv, install = small
    assert venv[1:3] == ["-m", "venv"] and install[-1] == str(places.PINS / "small.txt")
    place = places.place_of("small", None)
    assert place.python == str(places.cache_folder() / "small" / "bin" / "python")
    assert main(["envs", "create", "small"]) == 0 and len(small) == 2  # it is there already
    assert main(["envs"]) == 0
    assert "ready" in capsys.readouterr().out
    assert [(item.level, item.name) for item in check_interpreters()] == [("ok", "small")]
    (places.PINS / "small.txt").write_text("# a small list\nnumpy==2.0.0\n")
    assert places.state("small") == "outdated"
    assert check_interpreters()[0].level == "warn"
    assert main(["envs", "create", "small"]) == 0 and len(small) == 4
    assert main(["envs", "remove", "small"]) == 0
    assert places.state("small") == "missing"
    assert [(item.level, item.name) for item in check_interpreters()] == [("-", "none")]
    assert main(["envs", "remove", "small"]) == 1
    assert main(["envs", "create", "smal"]) == 1
    assert main(["envs", "create"]) == 1
    assert "name one of small" in capsys.readouterr().err


def test_an_interrupted_creation_leaves_nothing(small, monkeypatch):
    run = places._run

    def fails(name, command):
        run(name, command)
        if "pip" in command:
            raise KeyboardInterrupt

    monkeypatch.setattr(places, "_run", fails)
    with pytest.raises(KeyboardInterrupt):
        places.create("small")
    assert places.state("small") == "missing"
    folder = places.cache_folder() / "small"
    (folder / "bin").mkdir(parents=True)  # as `kill -9` would leave it
    assert places.state("small") == "incomplete"
    with pytest.raises(ConfigError, match="is incomplete: rl-lab envs create small"):
        places.place_of("small", None)
    monkeypatch.setattr(places, "_run", run)
    places.create("small")
    assert places.state("small") == "ready"


def test_errors_of_pip_are_one_sentence(small, monkeypatch):
    monkeypatch.undo()
    done = subprocess.CompletedProcess(
        [], 1, stderr="noise\nERROR: No matching distribution found for x==1\n"
    )
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    with pytest.raises(
        LabError, match="'old_gym' could not be created: ERROR: No matching distribution found for x==1"
    ):
        places._run("old_gym", ["python", "-m", "pip", "install"])
