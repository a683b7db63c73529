"""rl-lab collect: experts, agents, recordings, filters; a killed collection ends as an uninterrupted one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rl_lab
from rl_lab.buffers.formats.dataset import open_dataset
from rl_lab.cli import main
from rl_lab.errors import LabError
from rl_lab.records import ActionSpec, ActMode, ArraySpec, Spec
from rl_lab.tools.collect.command import EPILOG
from rl_lab.tools.collect.experts import EXPERTS, ExpertPolicy, RandomPolicy, lab_action
from rl_lab.tools.play.frame import Frame
from rl_lab.tools.play.recording import write_episode
from tests.buffers.formats.format_helpers import assert_equal


def collect(*words: str, status: int = 0) -> None:
    assert main(["collect", *words, "--workers", "0"]) == status


def assert_same_data(left: Path, right: Path) -> None:
    """The same episodes, bit by bit, in the same order, and the same lines about them."""
    with open_dataset(left) as a, open_dataset(right) as b:
        assert a.lengths.tolist() == b.lengths.tolist()
        for one, other in zip(a, b):
            assert_equal(one, other)
    assert (left / "episodes.jsonl").read_text() == (right / "episodes.jsonl").read_text()


# ---------------------------------------------------------------- policies


def test_help_and_page_name_every_expert() -> None:
    page = (Path(__file__).parents[3] / "docs" / "howto" / "demonstrations.md").read_text()
    for name in EXPERTS:
        assert name in EPILOG.splitlines()[3] and f"`{name}`" in page, name


@pytest.mark.parametrize(
    ("name", "least"),
    [("cartpole", 500), ("catch", 3), ("lock", 1), ("mountain_car", -130), ("pendulum", -400)],
)
def test_named_experts_solve_their_tasks(name: str, least: float, tmp_path: Path) -> None:
    collect(name, "--episodes", "2", "--envs", "2", "--out", str(tmp_path / "data"))
    with open_dataset(tmp_path / "data") as data:
        assert min(episode.total_reward for episode in data) >= least
        assert data.metadata["collect"]["task"] == EXPERTS[name].task
        assert data.metadata["summary"] == {
            "complete": True,
            "episodes": 2,
            "steps": int(data.lengths.sum()),
            "attempts": 2,
            "rejected": 0,
            "failed": 0,
        }


def test_lunar_lander_expert_lands(tmp_path: Path) -> None:
    pytest.importorskip("Box2D")
    collect(
        "lunar_lander",
        "--episodes",
        "3",
        "--envs",
        "3",
        "--min-return",
        "200",
        "--out",
        str(tmp_path / "data"),
    )
    with open_dataset(tmp_path / "data") as data:
        assert min(episode.total_reward for episode in data) >= 200


ARM = Spec(
    "arm", {"vector": ArraySpec((1,), "float32")}, ActionSpec("continuous", (2,), (), (-2.0, 0.0), (2.0, 4.0))
)
KEYS = Spec("keys", {"vector": ArraySpec((1,), "float32")}, ActionSpec("multi_discrete", (2,), (2, 3)))


def test_actions_of_experts_are_converted() -> None:
    assert lab_action([1.0, 4.0], ARM).tolist() == [0.5, 1.0]
    assert lab_action([9.0, 0.0], ARM).tolist() == [1.0, -1.0]  # clipped
    assert lab_action([1, 2], KEYS).tolist() == [1, 2]
    for spec, action, text in (
        (ARM, [1.0], "an action has 1 values, but arm takes shape"),
        (ARM, [1.0, np.nan], "not finite"),
        (KEYS, [1, 3], "not an index below"),
        (KEYS, [0.5, 1], "not an index below"),
    ):
        with pytest.raises(LabError, match=text):
            lab_action(action, spec)


def test_random_policy_covers_the_actions() -> None:
    mode = ActMode(generator=torch.Generator().manual_seed(0))
    first = torch.ones(500, dtype=torch.bool)
    actions, _, _ = RandomPolicy(KEYS).act({}, {}, first, mode)
    assert actions.dtype == torch.int64 and sorted(set(map(tuple, actions.tolist()))) == [
        (a, b) for a in range(2) for b in range(3)
    ]
    actions, _, _ = RandomPolicy(ARM).act({}, {}, first, mode)
    assert actions.shape == (500, 2) and -1 <= actions.min() < -0.9 and 0.9 < actions.max() <= 1


def test_epsilon_mixes_in_random_actions() -> None:
    policy = ExpertPolicy("still", lambda: lambda obs: [0.0, 2.0], ARM)
    obs = {"vector": torch.zeros(1000, 1)}
    for epsilon in (0.0, 0.25):
        mode = ActMode(epsilon=epsilon, generator=torch.Generator().manual_seed(0))
        actions, _, _ = policy.act(obs, {}, torch.ones(1000, dtype=torch.bool), mode)
        assert abs(float((actions != 0).any(1).float().mean()) - epsilon) < 0.05


EXPERT_MODULE = """
class Counter:
    "Alternates, and remembers how often it was asked."
    def __init__(self): self.calls = 0
    def act(self, obs):
        self.calls += 1
        return self.calls % 2

def broken(obs):
    return 1 / 0

value = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_experts.py").write_text(EXPERT_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_experts", raising=False)
    return "own_experts"


def test_own_class_has_one_instance_for_each_episode(module: str, tmp_path: Path) -> None:
    collect(
        f"{module}:Counter",
        "--task",
        "CartPole-v1",
        "--episodes",
        "4",
        "--envs",
        "2",
        "--out",
        str(tmp_path / "d"),
    )
    with open_dataset(tmp_path / "d") as data:
        for episode in data:
            assert episode.actions.tolist() == [(k + 1) % 2 for k in range(len(episode))]


def test_errors_are_one_sentence(module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "d"), "--task", "CartPole-v1"]
    for words, text in (
        ([f"{module}:broken", *out], "expert own_experts:broken failed: unexpected ZeroDivisionError"),
        ([f"{module}:Countr", *out], "has no 'Countr'. Did you mean 'Counter'"),
        ([f"{module}:value", *out], "is a int, not a function or class"),
        (["no_such_module:f", *out], "the module cannot be imported"),
        (["cartpol", *out], "is no run and no expert. Did you mean 'cartpole'"),
        (["random"], "--task is missing"),
        (["cartpole", "--episodes", "0"], "--episodes and --envs must be at least 1"),
        (["cartpole", "--epsilon", "2"], "--epsilon must be from 0 to 1"),
        (["cartpole", "--success", "--episodes", "1", *out], "logs no `log/success`, so use --min-return"),
    ):
        assert main(["collect", *words, "--workers", "0"]) == 1
        error = capsys.readouterr().err
        assert text in error and error.count("\n") == 1
    assert not (tmp_path / "d").exists()  # nothing half-written


# ---------------------------------------------------------------- filters and order


def test_filter_keeps_the_order_of_attempts(tmp_path: Path) -> None:
    """The accepted episodes are those of an unfiltered collection that pass, so filtering changes nothing else."""
    words = ["random", "--task", "CartPole-v1", "--envs", "3"]
    collect(*words, "--episodes", "30", "--out", str(tmp_path / "all"))
    collect(
        *words, "--episodes", "5", "--min-return", "20", "--max-return", "60", "--out", str(tmp_path / "some")
    )
    lines = [json.loads(line) for line in (tmp_path / "all" / "episodes.jsonl").read_text().splitlines()]
    assert [line["attempt"] for line in lines] == list(range(30))
    passing = [line for line in lines if 20 <= line["return"] <= 60]
    found = [json.loads(line) for line in (tmp_path / "some" / "episodes.jsonl").read_text().splitlines()]
    assert found == passing[:5]
    with open_dataset(tmp_path / "all") as every, open_dataset(tmp_path / "some") as some:
        for line, episode in zip(found, some):
            assert_equal(episode, every.episode(line["attempt"]))
        assert some.metadata["summary"]["rejected"] == found[-1]["attempt"] + 1 - 5


def test_more_episodes_continue_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["random", "--task", "CartPole-v1", "--envs", "2"]
    collect(*words, "--episodes", "9", "--out", str(tmp_path / "once"))
    for episodes in ("4", "9", "9"):
        collect(*words, "--episodes", episodes, "--out", str(tmp_path / "twice"))
    assert_same_data(tmp_path / "once", tmp_path / "twice")
    assert main(["collect", *words, "--seed", "1", "--out", str(tmp_path / "twice"), "--workers", "0"]) == 1
    assert "was collected with seed 0, not 1" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    assert main(["collect", *words, "--out", str(tmp_path / "other"), "--workers", "0"]) == 1
    assert "exists and was not collected" in capsys.readouterr().err


# ---------------------------------------------------------------- agents and recordings


def test_agent_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With normalized observations in training: the data set has them as the environment returns them."""
    run = tmp_path / "run"
    words = ["experiment=random_cartpole", "debug=tiny", "logging.progress=off", f"run_dir={run}"]
    rl_lab.train(None, [*words, "environment.normalize_observations=true"])
    for name in ("a", "b"):
        collect(str(run), "--episodes", "3", "--envs", "2", "--out", str(tmp_path / name))
    assert_same_data(tmp_path / "a", tmp_path / "b")
    with open_dataset(tmp_path / "a") as data:
        assert len(data) == 3 and data.metadata["collect"]["policy"] == "random_cartpole"
        starts = np.stack([episode.observations["vector"][0] for episode in data])
        assert np.abs(starts).max() <= 0.05  # CartPole's own first states
    assert main(["collect", str(run), "--task", "CartPole-v1", "--out", str(tmp_path / "c")]) == 1
    assert "--task is for sources that are no run" in capsys.readouterr().err


def test_recordings_become_a_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = Spec("toy", {"vector": ArraySpec((2,), "float32")}, ActionSpec("discrete", (), (3,)))
    for name, reward in (("a", 1.0), ("b", -1.0)):
        frames = [
            Frame(
                obs={"vector": np.full(2, k, np.float32)},
                reward=reward,
                terminated=k == 3,
                action=np.int64(k % 3) if k else None,
            )
            for k in range(4)
        ]
        write_episode(tmp_path / "recordings" / f"{name}.npz", frames, spec)
    words = ["collect", str(tmp_path / "recordings"), "--recordings", "--out", str(tmp_path / "data")]
    assert main([*words, "--min-return", "0"]) == 0
    assert "1 of 2 recorded episodes, 3 steps, return mean 3" in capsys.readouterr().out
    with open_dataset(tmp_path / "data") as data:
        assert data.format == "lab" and data.episode(0).rewards.tolist() == [1, 1, 1]
    assert main(["collect", str(tmp_path), "--recordings", "--out", str(tmp_path / "none")]) == 1


# ---------------------------------------------------------------- kills


KILLED = [
    "pendulum",
    "--episodes",
    "24",
    "--envs",
    "3",
    "--workers",
    "0",
    "--epsilon",
    "0.1",
    "--save-seconds",
    "0.05",
]


def kill_and_finish(folder: Path, moments: Sequence[float]) -> int:
    """Start the collection again and again, killing it at these shares of its episodes; return the kills that hit."""
    command = [sys.executable, "-m", "rl_lab", "collect", *KILLED, "--out", str(folder)]
    lines, hits = folder / "episodes.jsonl", 0
    for share in moments:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        before = lines.read_bytes().count(b"\n") if lines.exists() else 0
        while process.poll() is None:
            done = lines.read_bytes().count(b"\n") if lines.exists() else 0
            if done >= before + share * (24 - before):
                time.sleep(random.random() * 0.02)
                break
            time.sleep(0.002)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            hits += 1
        process.wait()
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0
    return hits


def test_killed_collection_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    collect(*KILLED, "--out", str(tmp_path / "once"))
    assert kill_and_finish(tmp_path / "killed", [0.3]) == 1
    assert_same_data(tmp_path / "once", tmp_path / "killed")


@pytest.mark.learning
def test_ten_kills_at_random_moments(tmp_path: Path) -> None:
    collect(*KILLED, "--out", str(tmp_path / "once"))
    moments = sorted(random.Random(0).uniform(0.02, 0.3) for _ in range(10))
    assert kill_and_finish(tmp_path / "killed", moments) >= 8
    assert_same_data(tmp_path / "once", tmp_path / "killed")


def test_killed_before_the_first_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored episodes without a state: they are dropped and played again, so none is double."""
    from rl_lab.tools.collect.collection import Collection

    words: list[Any] = ["random", "--task", "CartPole-v1", "--envs", "2", "--episodes", "6"]
    collect(*words, "--out", str(tmp_path / "once"))
    save = Collection.save

    def die(self: Collection) -> None:
        raise SystemExit

    monkeypatch.setattr(Collection, "save", die)
    with pytest.raises(SystemExit):
        collect(*words, "--out", str(tmp_path / "killed"))
    monkeypatch.setattr(Collection, "save", save)
    with open_dataset(tmp_path / "killed") as data:
        assert len(data) == 6 and data.metadata["summary"]["complete"] is False
    collect(*words, "--out", str(tmp_path / "killed"))
    assert_same_data(tmp_path / "once", tmp_path / "killed")
