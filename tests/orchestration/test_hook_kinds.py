"""Transform and evolve hooks in a real run: transform adds a column to a buffer, evolve runs a population.

One small workflow collects, encodes its data once, trains on the codes, and evolves a controller, by phases alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import rl_lab
from rl_lab.orchestration.evolution import evaluate_population
from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.orchestration.updates import TRANSFORM_ROWS
from rl_lab.records import ArraySpec, BatchSpec, EvolveHook, Hook, TransformHook, UpdateResult
from rl_lab.training import resume
from rl_lab.utils.checkpoint.manager import CheckpointManager
from rl_lab.workflows.base import WorldModelWorkflow


class Climb:
    """(1 + λ) evolution of a linear controller, with ask, act and tell."""

    episodes_per_candidate = 2

    def __init__(self, inputs: int, actions: int, generator: torch.Generator) -> None:
        self.shape = (inputs, actions)
        self.best = torch.zeros(inputs * actions)
        self.best_fitness = float("-inf")
        self.generator = generator

    def ask(self) -> torch.Tensor:
        noise = torch.randn(7, self.best.numel(), generator=self.generator)
        return torch.cat([self.best[None], self.best + 0.7 * noise])

    def initial_policy_state(self, num_envs):
        return {}

    def act(self, candidates, obs, policy_state, is_first, mode):
        weights = candidates.view(-1, *self.shape)
        return torch.einsum("no,noa->na", obs["vector"], weights).argmax(-1), policy_state

    def tell(self, candidates, fitness):
        value, index = fitness.max(0)
        if float(value) >= self.best_fitness:
            self.best, self.best_fitness = candidates[index].clone(), float(value)
        return {"best": float(value), "mean": float(fitness.mean())}


class Stages(WorldModelWorkflow):
    def initialize(self, context):
        self.code = context.component("code")
        self.climb = Climb(4, 3, torch.Generator().manual_seed(0))
        self.seen = []

    def act(self, obs, policy_state, is_first, mode):
        action = torch.randint(3, is_first.shape, generator=mode.generator)
        return action, policy_state, {"codes": torch.zeros(len(action), 2)}

    def policy_columns(self):
        return {"codes": ArraySpec((2,), "float32")}

    def hooks(self):
        batch = BatchSpec(size=4, length=3)
        return {
            "encode": TransformHook(lambda rows: {"codes": self.code(rows.obs["vector"])}, batch=batch),
            "train": Hook(self._train, batch=batch, scalars=lambda phase, counters: {"p": phase["progress"]}),
            "evolve": EvolveHook(self.climb),
        }

    def _train(self, batch, scalars, noise):
        return UpdateResult(
            {"code_error": (batch["codes"] - self.code(batch.obs["vector"])).abs().max(), **scalars}
        )

    def get_state(self):
        return {
            "best": self.climb.best,
            "fitness": self.climb.best_fitness,
            "noise": self.climb.generator.get_state(),
        }

    def set_state(self, state):
        self.climb.best, self.climb.best_fitness = state["best"], state["fitness"]
        self.climb.generator.set_state(state["noise"])


CONFIG = """
# @package _global_
defaults: [{/workflow: stages}, {/buffer: world_model_sequence}, {/environment: dummy_discrete}, _self_]
experiment: {name: stages}
components: {code: {_target_: torch.nn.Linear, in_features: 4, out_features: 2}}
environment: {num_envs: 3, workers: 0}
buffers: {replay: {capacity: 3000}}
logging: {progress: 'off', tensorboard: false}
training:
  log: {every_updates: 1}
  phases:
    - {name: data, duration_steps: 1500, workflow_hooks: [collect]}
    - {name: encode, type: offline, workflow_hooks: [encode]}
    - {name: train, type: offline, duration_updates: 20, workflow_hooks: [train]}
    - {name: evolve, duration_updates: 6, workflow_hooks: [evolve]}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch) -> Path:
    # Hydra imports the class by name, under whichever name pytest gave this file.
    monkeypatch.setitem(sys.modules, "stages_project", sys.modules[__name__])
    for name, text in (
        ("workflow/stages", "_target_: stages_project.Stages"),
        ("experiment/stages", CONFIG.strip()),
    ):
        file = tmp_path / "configs" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def final_state(path: Path) -> dict:
    return CheckpointManager(path / "checkpoints").load().state


def test_transform_update_and_evolve_phases(project: Path):
    run = rl_lab.train("stages")
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    errors = [line["train/code_error"] for line in lines if "train/code_error" in line]
    assert errors and max(errors) < 1e-5  # every row of the buffer was encoded
    best = [line["train/best"] for line in lines if "train/best" in line]
    assert len(best) == 6 and best[-1] > best[0]
    calls = final_state(run.path)["phase_state"]["hook_calls"]
    assert (calls["train"], calls["evolve"]) == (20, 6)
    assert calls["encode"] == -(-calls["collect"] // TRANSFORM_ROWS)  # in as many parts as the buffer needs


@pytest.mark.parametrize("stop_at", ["encode", "evolve"])
def test_resume_within_a_phase(project: Path, stop_at: str, monkeypatch):
    whole = rl_lab.train("stages")
    with monkeypatch.context() as patch:
        do = Orchestrator.run_action

        def stop(self, action, phase):
            do(self, action, phase)
            self.interrupted = action == stop_at

        patch.setattr(Orchestrator, "run_action", stop)
        half = rl_lab.train("stages")
    assert half.interrupted
    resume(half.path)
    first, second = final_state(whole.path), final_state(half.path)
    assert torch.equal(first["workflow_custom"]["best"], second["workflow_custom"]["best"])
    assert first["phase_state"] == second["phase_state"]


def test_fitness_for_any_number_of_environments():
    from rl_lab.environments.make import make_env

    climb = Climb(4, 3, torch.Generator().manual_seed(3))
    candidates = climb.ask()
    for num_envs in (1, 3, 20):
        environment = make_env("dummy/discrete", num_envs=num_envs, workers=0)
        fitness, steps = evaluate_population(climb, candidates, environment, device="cpu", seed=1)
        environment.close()
        assert fitness.shape == (8,) and steps > 0
        assert float(fitness.max()) <= 10.0  # the best return there is
        order = fitness.argsort()
        assert fitness[order[-1]] > fitness[order[0]]
