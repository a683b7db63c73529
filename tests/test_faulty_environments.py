"""A run continues when environments fail, resumes exactly, and saves and stops after too many failures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import rl_lab
from rl_lab.errors import ConfigError, EnvironmentFaultError
from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.tools.evaluate import evaluate
from rl_lab.training import resume
from rl_lab.utils.checkpoint.manager import CheckpointManager
from tests.same_run import assert_same_run, stopped_at

QUIET = ["logging.progress=off", "logging.tensorboard=false"]
TINY = ["experiment=random_cartpole", "debug=tiny", "training.evaluate.every_env_steps=null", *QUIET]
TINY += ["training.total_timesteps=200", "environment.time_limit=60"]  # long enough to fail several times
DREAMS = ["experiment=dreamer_cartpole", "debug=tiny", *QUIET]


@pytest.fixture(autouse=True)
def sample_envs(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "environments"))
    yield
    sys.modules.pop("sample_envs", None)


@pytest.fixture
def kept(monkeypatch) -> list:
    """Replay buffers of the finished runs."""
    buffers: list = []
    finish = Orchestrator._finish
    monkeypatch.setattr(
        Orchestrator,
        "_finish",
        lambda self, **words: (buffers.append(self.storage.buffers["replay"]), finish(self, **words))[1],
    )
    return buffers


def rows_of(buffer) -> dict[str, np.ndarray]:
    """Return all stored rows, name -> (N, T, …)."""
    batch = buffer.read(buffer.oldest_position, buffer.total_rows - buffer.oldest_position)
    return {name: value.numpy() for name, value in batch.items() if value.dtype != torch.bfloat16}


def faulty(**chances: float) -> list[str]:
    """Return overrides for an environment that fails at random, with a seed, without a limit."""
    words = [f"+environment.{name}={chance}" for name, chance in chances.items()]
    return [
        "environment=gym",
        "environment.task=sample_envs:chance_of_failure",
        "environment.restarts.limit=null",
        *words,
    ]


def metrics(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "collect/episodes" in line]


@pytest.mark.parametrize(
    "words",
    [
        [*faulty(raises=0.05), "environment.workers=0"],
        [*faulty(raises=0.02, dies=0.02), "environment.workers=2"],
    ],
    ids=["raises", "dies"],
)
def test_run_with_failures_resumes_exactly(words, tmp_path, monkeypatch, capsys, kept):
    rl_lab.train(None, [*TINY, *words, f"run_dir={tmp_path / 'whole'}"])
    said = capsys.readouterr().out
    restarts = [line["collect/env_restarts"] for line in metrics(tmp_path / "whole")]
    assert restarts == sorted(restarts) and restarts[-1] > 3
    assert said.count("restarted with a new seed") == restarts[-1]

    rows = rows_of(kept[0])
    ended = rows["terminated"] | rows["truncated"]
    np.testing.assert_array_equal(rows["is_first"][:, 1:], ended[:, :-1])  # no episode stops without an end
    obs = rows["obs/vector"]
    closed = rows["truncated"] & (rows["reward"] == 0)
    assert closed.sum() >= restarts[-1]  # a process that dies takes all its environments with it
    streams, times = np.nonzero(closed)
    np.testing.assert_array_equal(obs[streams, times], obs[streams, times - 1])
    last = metrics(tmp_path / "whole")[-1]
    arrived = len(rows["reward"][0]) * len(rows["reward"])
    assert last["step"] == arrived - rows["is_first"].sum() and last["collect/episodes"] == ended.sum()

    assert_resumes_exactly(words, tmp_path, monkeypatch)


@pytest.mark.parametrize("workers", [0, 2])
def test_nonfinite_rows_are_not_stored(workers, tmp_path, monkeypatch, capsys, kept):
    words = [*faulty(raises=0.0, spoils=0.1, exits=0.02), f"environment.workers={workers}"]
    words += ["environment.normalize_observations=true"]
    whole = rl_lab.train(None, [*TINY, *words, f"run_dir={tmp_path / 'whole'}"])
    said = capsys.readouterr().out
    assert not whole.interrupted and metrics(whole.path)[-1]["collect/env_restarts"] > 5
    assert "returned an unusable row: observation 'vector' has NaN or infinity at step" in said
    assert "returned an unusable row: reward is inf, not a finite float32 value at step" in said
    assert "raised SystemExit: 0: restarted" in said
    rows = rows_of(kept[0])
    assert all(np.isfinite(rows[name]).all() for name in ("obs/vector", "reward"))
    state = CheckpointManager.load_file(whole.path / "checkpoints").state["collector"]["environment"]
    for name in ("mean", "squares"):
        assert state["normalizer"][name]["vector"].isfinite().all()
    assert_resumes_exactly(words, tmp_path, monkeypatch)


def assert_resumes_exactly(words: list[str], folder: Path, monkeypatch) -> None:
    """Check that a stopped and resumed run equals the run in `folder / "whole"`."""
    with stopped_at(monkeypatch):
        assert rl_lab.train(None, [*TINY, *words, f"run_dir={folder / 'half'}"]).interrupted
    resume(folder / "half")
    assert_same_run(folder / "whole", folder / "half")


def test_observation_statistics_resume_exactly(tmp_path, monkeypatch, kept):
    words = [*faulty(raises=0.05), "environment.normalize_observations=true", "environment.workers=2"]
    rl_lab.train(None, [*TINY, *words, f"run_dir={tmp_path / 'whole'}"])
    obs = rows_of(kept[0])["obs/vector"]
    assert np.abs(obs).max() > 1.2  # in deviations, where a cart's numbers are small
    assert_resumes_exactly(words, tmp_path, monkeypatch)


def test_too_many_failures_save_and_stop(tmp_path: Path):
    run = tmp_path / "run"
    words = [*TINY, *faulty(raises=0.2), "environment.restarts.limit=4", "training.total_timesteps=2000"]
    with pytest.raises(EnvironmentFaultError, match="after 4 restarts in 10 min") as caught:
        rl_lab.train(None, [*words, "training.checkpoint.every_env_steps=null", f"run_dir={run}"])
    assert "ValueError: the wheel came off" in str(caught.value) and "sample_envs.py" in str(caught.value)
    state = CheckpointManager.load_file(run / "checkpoints").state
    assert state["collector"]["environment"]["restarts"]["raised"] == 4 and state["global_step"] > 0
    with pytest.raises(EnvironmentFaultError, match="after 7 restarts"):
        resume(run, ["environment.restarts.limit=7"])
    again = CheckpointManager.load_file(run / "checkpoints").state
    assert again["collector"]["environment"]["restarts"]["raised"] == 11
    assert again["global_step"] > state["global_step"]


def test_evaluation_continues_after_failures(tmp_path: Path, capsys):
    words = [*faulty(raises=0.02), "environment.workers=0"]
    rl_lab.train(None, [*TINY, *words, f"run_dir={tmp_path}"])
    capsys.readouterr()
    result = evaluate(tmp_path, episodes=12, device="cpu")
    assert len(result["returns"]) == 12 and "restarted with a new seed" in capsys.readouterr().out


def test_observation_statistics_in_evaluation_and_agent(tmp_path: Path, monkeypatch, kept):
    words = ["environment.normalize_observations=true"]
    whole = rl_lab.train(None, [*DREAMS, *words, f"run_dir={tmp_path / 'whole'}"])
    agent = rl_lab.load_agent(whole.path, device="cpu")
    assert agent.normalizer is not None and agent.normalizer.frozen
    stored = rows_of(kept[0])["obs/vector"]
    assert agent.normalizer.count >= stored.shape[0] * stored.shape[1]
    state = CheckpointManager.load_file(whole.path / "checkpoints").state
    torch.testing.assert_close(
        torch.from_numpy(agent.normalizer.mean["vector"]),
        state["collector"]["environment"]["normalizer"]["mean"]["vector"],
    )

    # What the policy sees for an observation: the same in training, evaluation and alone.
    seen = []
    act = agent.workflow.act
    monkeypatch.setattr(
        agent.workflow, "act", lambda obs, *rest: (seen.append(obs["vector"]), act(obs, *rest))[1]
    )
    raw = np.array([0.01, 0.02, -0.03, 0.04], np.float32)
    agent.act(raw)
    expected = agent.normalizer({"vector": raw})["vector"]
    np.testing.assert_array_equal(seen[0][0].numpy(), expected)
    assert np.abs(expected - raw).max() > 0.01

    best = rl_lab.load_agent(whole.path, checkpoint="best", device="cpu")
    assert best.normalizer is not None and 0 < best.normalizer.count <= agent.normalizer.count
    frozen: list = []
    from rl_lab.environments.vector import VectorEnv

    close = VectorEnv.close
    monkeypatch.setattr(
        VectorEnv, "close", lambda env: (frozen.append(env.normalizer.get_state()), close(env))[1]
    )
    evaluate(whole.path, episodes=2, device="cpu")
    assert frozen and all(each["count"] == agent.normalizer.count for each in frozen)
    from rl_lab.run_environments import build_evaluator

    with pytest.raises(ConfigError, match=r"normalizer=agent\.normalizer"):
        build_evaluator(agent.config, agent.device)
