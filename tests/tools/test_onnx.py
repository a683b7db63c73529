"""`rl-lab export --onnx`: the model acts as the agent does, with its own memory and the same noise (extras)."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import rl_lab
from rl_lab.cli import main
from rl_lab.errors import LabError
from rl_lab.tools.export import onnx_policy
from rl_lab.tools.export.onnx_policy import NoiseAsInput, OnnxPolicy, export_onnx

TINY = ["debug=tiny", "logging.progress=off", "logging.tensorboard=false"]
CASES = {
    "dreamer_bounce": [],
    "dreamer_cartpole": ["environment=pendulum", "environment.normalize_observations=true"],
    "tdmpc2_pendulum": [],
    "delta_iris_catch": [],
    "og_wm_catch": [],
}


def test_drawn_numbers_become_inputs():
    with NoiseAsInput() as recorder:
        torch.rand(2, 3), torch.zeros(4), torch.randn(5)
    assert recorder.drawn == [{"kind": "uniform", "shape": [2, 3]}, {"kind": "normal", "shape": [5]}]
    with NoiseAsInput([torch.ones(2), torch.full((1,), 7.0)]):
        assert torch.rand(2).tolist() == [1.0, 1.0] and torch.randn(1).item() == 7.0


def test_missing_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture):
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert (
        main(["export", "example://bounce", "--out", str(tmp_path / "x"), "--episodes", "0", "--onnx"]) == 1
    )
    assert "--onnx needs the package 'onnx': pip install" in capsys.readouterr().err


@pytest.mark.extras
@pytest.mark.parametrize("experiment", CASES)
def test_model_equals_the_agent_over_an_episode(experiment: str, tmp_path: Path):
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    run = rl_lab.train(experiment, [*TINY, *CASES[experiment], f"run_dir={tmp_path / 'run'}"])
    agent = rl_lab.load_agent(run.path, device="cpu")
    found = export_onnx(agent, tmp_path / "agent.onnx", seed=1)
    assert found.steps >= 5 and found.action_error <= 1e-4 and found.memory_error <= 1e-4

    # And by hand, with observations that the agent has not seen: two episodes, in which the memory starts anew.
    policy = OnnxPolicy(tmp_path / "agent.onnx", seed=3)
    agent.reset(3)
    sample = bool(policy.facts["sample"])
    rng = np.random.default_rng(0)
    for step in range(10):
        obs = {
            name: rng.integers(0, 256, spec.shape, dtype=np.uint8)
            if spec.dtype == "uint8"
            else rng.normal(size=spec.shape).astype(np.float32)
            for name, spec in agent.spec.observations.items()
        }
        first = step in (0, 6)
        action = agent.act(obs, first, sample=sample, scaled=True)
        np.testing.assert_allclose(policy.act(obs, first), action, atol=1e-4)


@pytest.mark.extras
def test_a_model_that_differs_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(onnx_policy, "TOLERANCE", -1.0)
    with pytest.raises(LabError, match=r"differ from the agent's by .* it was deleted"):
        export_onnx(rl_lab.load_agent("example://bounce", device="cpu"), tmp_path / "agent.onnx")
    assert not (tmp_path / "agent.onnx").exists()
