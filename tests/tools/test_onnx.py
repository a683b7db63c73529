"""`rl-lab export --onnx`: the model acts as the agent does, with its own memory and the same noise (extras)."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import rl_lab
from rl_lab.agent import Agent
from rl_lab.cli import main
from rl_lab.errors import LabError
from rl_lab.tools.export import onnx_policy
from rl_lab.tools.export.onnx_policy import NoiseAsInput, OnnxPolicy, export_onnx
from tests.workflows.imitation_case import PIXELS, built, demonstrations, measured, observations

TINY = ["debug=tiny", "logging.progress=off", "logging.tensorboard=false"]
CASES = {
    "dreamer_bounce": ["dreamer_bounce"],
    "dreamer_vector": [
        "dreamer_cartpole",
        "environment=pendulum",
        "environment.normalize_observations=true",
    ],
    "tdmpc2": ["tdmpc2_pendulum"],
    "delta_iris": ["delta_iris_catch"],
    "og_wm": ["og_wm_catch"],
    "cloned": ["behaviour_cloning_lunarlander"],
    "cloned_mixture": [
        "behaviour_cloning_lunarlander",
        "controller@controllers.policy=mixture_policy",
        "training.evaluate.sample=true",
    ],
    "diffusion_ddim": ["diffusion_policy_lunarlander", "algorithm.sampler=ddim"],
    "diffusion_ddpm": ["diffusion_policy_lunarlander", "algorithm.sampler=ddpm"],
}
PACKAGES = ("onnx", "onnxscript", "onnxruntime")


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
@pytest.mark.parametrize("case", CASES)
def test_model_equals_the_agent_over_an_episode(case: str, tmp_path: Path):
    for name in PACKAGES:
        pytest.importorskip(name)
    experiment, *words = CASES[case]
    run = rl_lab.train(experiment, [*TINY, *words, f"run_dir={tmp_path / 'run'}"])
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
@pytest.mark.parametrize("algorithm", ["behaviour_cloning", "diffusion_policy"])
def test_images_and_plans_of_several_actions(algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in PACKAGES:
        pytest.importorskip(name)
    monkeypatch.setattr(onnx_policy, "_episode", onnx_policy._random_observations)
    workflow = measured(built(algorithm, PIXELS), demonstrations(PIXELS))
    agent = Agent(workflow, PIXELS, torch.device("cpu"), workflow.context.config, 0)
    found = export_onnx(agent, tmp_path / "agent.onnx")
    assert found.steps == 200 and found.action_error <= 1e-4 and found.memory_error <= 1e-4

    # The remaining actions of a plan, whatever is seen; and the noise between two plans changes nothing.
    policy = OnnxPolicy(tmp_path / "agent.onnx")
    assert policy.countdown == "left"
    obs = {name: value[0].numpy() for name, value in observations(PIXELS, 1).items()}
    policy.act(obs, is_first=True)
    plan, memory = policy.memory["plan"][0], dict(policy.memory)
    for countdown in ("left", None):  # zeros as noise, and drawn numbers
        policy.memory, policy.countdown = dict(memory), countdown
        for step in range(1, len(plan)):
            np.testing.assert_array_equal(policy.act(obs), plan[step])
        assert policy.memory["left"] == 0

    import onnx

    kinds = [node.op_type for node in onnx.load(tmp_path / "agent.onnx").graph.node]
    assert kinds.count("If") == (algorithm == "diffusion_policy"), "it denoises only when a plan is needed"


@pytest.mark.extras
def test_a_model_that_differs_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(onnx_policy, "TOLERANCE", -1.0)
    with pytest.raises(LabError, match=r"differ from the agent's by .* it was deleted"):
        export_onnx(rl_lab.load_agent("example://bounce", device="cpu"), tmp_path / "agent.onnx")
    assert not (tmp_path / "agent.onnx").exists()
