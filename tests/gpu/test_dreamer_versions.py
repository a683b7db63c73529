"""On a GPU: every Dreamer version and Plan2Explore give the eager numbers when captured, and the plain ones when fused."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.gpu_case import RANDOM_ROWS, assert_same_losses, built, losses
from tests.gpu.test_capture_parity import one_update

pytestmark = pytest.mark.gpu

# version -> words: an environment with its kind of action and observation; heads that start at zero would pass nothing on
HEADS = ["components.reward_head.out_scale=1.0", "controllers.critic.out_scale=1.0"]
CASES = {
    "v1": ["experiment=dreamer_v1_dmc_vision", "environment=dummy_continuous"],
    "v1_images": [
        "experiment=dreamer_v1_dmc_vision",
        "environment=dummy_dict",
        "controllers.actor.gradient=both",
    ],
    "v2_discrete": ["experiment=dreamer_v2_crafter", "environment=catch"],
    "v2_continuous": ["experiment=dreamer_v2_dmc_vision", "environment=dummy_continuous"],
    "v2_both": [
        "experiment=dreamer_v2_crafter",
        "environment=dummy_discrete",
        "controllers.actor.gradient=both",
    ],
    "2023_discrete": ["experiment=dreamer_atari100k_2023", "environment=catch", *HEADS],
    "2023_continuous": ["experiment=dreamer_dmc_proprio_2023", "environment=dummy_continuous", *HEADS],
    "2024": ["experiment=dreamer_dmc_vision_2024", "environment=catch", *HEADS],
    "2024_continuous": ["experiment=dreamer_dmc_proprio_2024", "environment=dummy_continuous", *HEADS],
    "normalized": [
        "experiment=dreamer_catch",
        "controllers.critic.value_norm=meanstd",
        "controllers.actor.advantage_norm=meanstd",
        "controllers.actor.return_debias=true",
        "algorithm.actor_critic_gradient=true",
        *HEADS,
    ],
    "authors_layers": [
        "experiment=dreamer_catch",
        "components.rssm.posterior_layers=2",
        "components.rssm.dynamics_layers=2",
        "components.encoder.kernel=3",
        "components.decoder.kernel=3",
        "optimizers.model.nesterov=true",
        "optimizers.model.weight_decay=0.01",
        *HEADS,
    ],
    "plan2explore": ["experiment=plan2explore_dmc_vision", "environment=dummy_continuous", *HEADS],
}
HOOKS = [(name, "update") for name in CASES] + [
    ("plan2explore", "explore"),
    ("v2_both", "update_controller"),
    ("normalized", "update_controller"),
]


@pytest.fixture(autouse=True)
def exact_float32():
    before = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("fast_path", ["off", "on"])
@pytest.mark.parametrize(("case", "hook"), HOOKS)
def test_captured_updates_give_the_eager_numbers(case: str, hook: str, fast_path: str):
    words = [*CASES[case], "training.precision=float32", f"training.fast_path={fast_path}"]
    eager = losses(built(*words, "training.capture=false", hook=hook), hook)
    run = built(*words, "training.capture=true", hook=hook)
    captured = losses(run, hook)
    assert run.orchestrator.runners[hook].capture.captured
    worst = assert_same_losses(eager, captured)
    print(f"{case} {hook} fast_path={fast_path}: largest relative difference over 8 updates {worst:.1e}")


@pytest.mark.parametrize("case", CASES)
def test_fast_path_gives_the_plain_numbers(case: str):
    words = [*CASES[case], "training.precision=float32"]
    plain, gradients = one_update("training.fast_path=off", *words)
    quick, fast_gradients = one_update("training.fast_path=on", *words)
    for key, value in plain.items():
        assert quick[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    for name, gradient in gradients.items():
        error = (fast_gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-4)
        assert error < 1e-3, f"{name}: {float(error)}"


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_stays_near_float32(case: str):
    """On the same rows. In a large batch, as one sample of a state that differs changes the losses of a small one."""
    words = [*CASES[case], RANDOM_ROWS, "algorithm.batch_size=64"]
    exact, gradients = one_update("training.precision=float32", "training.fast_path=off", *words)
    rough, low = one_update("training.precision=bfloat16", "training.fast_path=on", *words)
    size = sum(abs(value) for name, value in exact.items() if "loss/" in name)
    assert abs(exact["loss"] - rough["loss"]) / size < 0.01
    everything = [torch.cat(list(found.values())) for found in (gradients, low)]
    assert torch.nn.functional.cosine_similarity(*everything, dim=0) > 0.99


@pytest.mark.parametrize("case", CASES)
def test_captured_acting_gives_the_eager_actions(case: str):
    actions = []
    for capture in ("false", "true"):
        run = built(*CASES[case], f"training.capture={capture}", "training.precision=float32")
        mode = (
            run.workflow.collect_mode({"collect": {"policy": "explore"}}) if case == "plan2explore" else None
        )
        step = run.workflow.collector.step if mode else None
        sent = []
        for _ in range(20):
            result = step(run.workflow, mode) if step and mode else run.workflow.collect_step(0, phase={})
            sent.append(torch.as_tensor(result.trajectory["action"]).clone())
        actions.append(torch.stack(sent))
        run.close()
    assert torch.equal(*actions)
