"""On a GPU: every workflow's recorded updates and actions are the eager ones, and a run goes on where it stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rl_lab
from rl_lab.orchestration.evolution import evaluate_population
from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.training import resume
from tests.gpu.gpu_case import assert_same_losses, built, losses
from tests.same_run import assert_same_run

pytestmark = pytest.mark.gpu

EXACT = ["training.precision=float32"]
TDMPC2 = ["experiment=tdmpc2_pendulum", "training.fast_path=off"]
EPISODES = "buffers.replay.folder=FOLDER"  # outside a run folder they need one
IRIS_HOOKS = ["update_tokenizer", "update_world_model", "update_actor_critic"]
BACKBONE, QUANTIZER = "components.world_model.backbone", "components.tokenizer.quantizer"
MODEL_HOOKS = ["update_world_model", "update_actor_critic"]
IRIS_VARIANTS = {
    **{
        name: ([f"components/backbone@{BACKBONE}={name}"], MODEL_HOOKS)
        for name in ("lstm", "cfc", "state_space")
    },
    "at_once": (["components/world_model@components.world_model=iris_frame_at_once"], MODEL_HOOKS),
    "lfq": ([f"components/quantizer@{QUANTIZER}=lfq", f"{QUANTIZER}.dim=4"], ["update_tokenizer"]),
    "residual": (
        [f"components/quantizer@{QUANTIZER}=residual", f"{QUANTIZER}.codes=4"],
        ["update_tokenizer"],
    ),
    "gan": (
        ["+components/reconstruction_loss@components.tokenizer.losses.more=hinge_gan"],
        ["update_tokenizer"],
    ),
}
CASES = {
    "tdmpc2": (TDMPC2, ["update"]),
    "tdmpc2_fast": (["experiment=tdmpc2_pendulum", "training.fast_path=on"], ["update"]),
    "tdmpc2_discrete": (["experiment=tdmpc2_cartpole"], ["update"]),
    "iris": (["experiment=iris_catch", EPISODES], IRIS_HOOKS),
    "delta_iris": (["experiment=delta_iris_catch", EPISODES], IRIS_HOOKS),
    **{
        f"iris_{name}": (["experiment=iris_catch", EPISODES, *words], hooks)
        for name, (words, hooks) in IRIS_VARIANTS.items()
    },
    "og_wm": (["experiment=og_wm_cartpole_pixels"], ["update_vae", "update_mdn"]),
}


@pytest.fixture(autouse=True)
def exact_float32():
    before = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("case, hook", [(name, hook) for name, (_, hooks) in CASES.items() for hook in hooks])
def test_captured_updates_give_the_eager_numbers(case: str, hook: str):
    words = [*CASES[case][0], *EXACT]
    eager = losses(built(*words, "training.capture=false", hook=hook), hook)
    run = built(*words, "training.capture=true", hook=hook)
    captured = losses(run, hook)
    assert run.orchestrator.runners[hook].capture.captured
    worst = assert_same_losses(eager, captured)
    print(f"{case} {hook}: largest relative difference over 8 updates {worst:.1e}")


@pytest.mark.parametrize("case", ["tdmpc2", "tdmpc2_discrete", "iris", "delta_iris"])
def test_captured_acting_gives_the_eager_actions(case: str):
    words, (hook, *_) = CASES[case]
    actions = []
    for capture in ("false", "true"):
        run = built(*words, *EXACT, f"training.capture={capture}", hook=hook)
        sent = [
            torch.as_tensor(run.workflow.collect_step(0, phase={}).trajectory["action"]).clone()
            for _ in range(20)
        ]
        actions.append(torch.stack(sent))
        run.close()
    assert torch.equal(*actions)


def test_a_recorded_plan_follows_the_schedule():
    """TD-MPC narrows its search and looks further ahead as training goes on: numbers that change between replays."""
    words = [*TDMPC2, *EXACT, "algorithm.plan_schedule={steps: 20, min_std: [0.5, 0.05], horizon: [1, 3]}"]
    actions = []
    for capture in ("false", "true"):
        run = built(*words, f"training.capture={capture}")
        sent = []
        for step in range(20):
            run.workflow._env_steps = step
            sent.append(torch.as_tensor(run.workflow.collect_step(0, phase={}).trajectory["action"]).clone())
        actions.append(torch.stack(sent))
        run.close()
    assert torch.equal(*actions)


def test_a_captured_population_earns_what_the_eager_one_does():
    """Two groups of environments, each with its own recorded graph, over two generations."""
    fitness = []
    for capture in (False, True):
        run = built(*CASES["og_wm"][0], *EXACT, "algorithm.evolution.num_envs=4", hook="update_vae")
        evolution, generations = run.workflow.evolution, run.orchestrator.runners["evolve"].generations
        evolution.begin({"name": "evolve", "iteration": 0, "set": {}, "progress": 0.0})
        for seed in (1, 2):
            candidates = evolution.ask()
            earned, _ = evaluate_population(
                evolution,
                candidates,
                generations._open("evolve", evolution.num_envs),
                device=evolution.workflow.device,
                seed=seed,
                capture=capture,
            )
            evolution.tell(candidates, earned)
            fitness.append(earned)
        generations.close()
        run.close()
    assert torch.equal(fitness[0], fitness[2]) and torch.equal(fitness[1], fitness[3])


@pytest.mark.parametrize(
    "experiment",
    ["dreamer_cartpole", "tdmpc2_pendulum", "delta_iris_catch", "iris_catch", "og_wm_cartpole_pixels"],
)
def test_a_run_goes_on_where_it_stopped(experiment: str, tmp_path: Path, monkeypatch):
    """Weights, optimizers' moments and their step counts come back to the device they were on, bit for bit."""
    # Its fastest gradients of convolutions add up in any order.
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    quiet = ["logging.progress=off", "logging.tensorboard=false", "experiment.device=cuda"]
    words = [f"experiment={experiment}", "debug=tiny", *quiet]
    do, done, stop_at = Orchestrator.run_action, [0], [0]

    def counted(self, action, phase):
        do(self, action, phase)
        done[0] += 1
        self.interrupted = done[0] == stop_at[0]

    monkeypatch.setattr(Orchestrator, "run_action", counted)
    rl_lab.train(None, [*words, f"run_dir={tmp_path / 'whole'}"])
    done[0], stop_at[0] = 0, done[0] // 2
    half = rl_lab.train(None, [*words, f"run_dir={tmp_path / 'half'}"])
    assert half.interrupted
    resume(tmp_path / "half")
    # Episodes on disk are not part of the checkpoint; their index and counts are.
    buffers = () if "iris" in experiment else ("replay",)
    assert_same_run(tmp_path / "whole", tmp_path / "half", buffers=buffers)
