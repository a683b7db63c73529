"""On a GPU: the captured step gives the eager numbers, and fewer digits stay near float32."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.gpu.gpu_case import assert_same_losses, built, losses

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def exact_float32():
    before = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("hook", ["update", "update_world_model", "update_controller"])
@pytest.mark.parametrize("fast_path", ["off", "on"])
def test_captured_updates_give_the_eager_numbers(hook: str, fast_path: str):
    words = ["training.precision=float32", f"training.fast_path={fast_path}"]
    eager = losses(built(*words, "training.capture=false", hook=hook), hook)
    run = built(*words, "training.capture=true", hook=hook)
    captured = losses(run, hook)
    assert run.orchestrator.runners[hook].capture.captured
    worst = assert_same_losses(eager, captured)
    print(f"{hook}: largest relative difference over 8 updates {worst:.1e}")


DYNAMICS = (
    "environment=dummy_continuous",
    "controllers.actor.gradient=dynamics",
    "controllers.critic.out_scale=1.0",  # heads that start at zero would pass nothing on
    "components.reward_head.out_scale=1.0",
)
# How the parts of dreamer_dmc_proprio_settings_2023 differ
EARLY = (
    *DYNAMICS,
    "components.rssm.action_layers=0",
    "components.reward_head.space=symlog",
    "controllers.critic.space=symlog",
    "size=1m",
)


@pytest.mark.parametrize("hook", ["update", "update_controller"])
def test_captured_gradients_through_the_dynamics_are_the_eager_ones(hook: str):
    words = [*DYNAMICS, "training.precision=float32"]
    eager = losses(built(*words, "training.capture=false", hook=hook), hook)
    run = built(*words, "training.capture=true", hook=hook)
    assert_same_losses(eager, losses(run, hook))
    assert run.orchestrator.runners[hook].capture.captured


IMAGES = ("environment=dummy_dict", "components/encoder=dict", "size=1m")
every_kind = pytest.mark.parametrize(
    "words",
    [("size=1m",), IMAGES, (*DYNAMICS, "size=1m"), EARLY],
    ids=["vector", "images", "dynamics", "dynamics_2023"],
)


def one_update(*words: str, hook: str = "update") -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics of one update whose optimizer does nothing, and the gradients by part."""
    run = built("training.capture=false", *words, hook=hook)
    run.workflow.optimizers = [
        SimpleNamespace(step=lambda: None, param_groups=[], zero_grad=lambda **k: None)
    ]
    orchestrator = run.orchestrator
    while (action := orchestrator.scheduler.next_action()) == "collect":
        orchestrator.run_action(action, orchestrator.scheduler.current_phase())
    orchestrator.run_action(action, orchestrator.scheduler.current_phase())
    metrics = orchestrator.runners[hook].meter.drain()
    gradients = {
        name: torch.cat([p.grad.float().flatten() for p in parameters if p.grad is not None])
        for name, parameters in run.workflow.parts.items()
        if any(p.grad is not None for p in parameters)
    }
    run.close()
    return metrics, gradients


@every_kind
def test_the_fast_path_gives_the_plain_numbers(words: tuple[str, ...]):
    plain, gradients = one_update("training.precision=float32", "training.fast_path=off", *words)
    quick, fast_gradients = one_update("training.precision=float32", "training.fast_path=on", *words)
    for key, value in plain.items():
        assert quick[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key
    for name, gradient in gradients.items():
        error = (fast_gradients[name] - gradient).norm() / gradient.norm()
        assert error < 1e-3, f"{name}: {float(error)}"


@pytest.mark.parametrize(
    ("precision", "fast_path"), [("bfloat16", "off"), ("bfloat16", "on"), ("tensorfloat32", "on")]
)
@every_kind
def test_fewer_digits_stay_near_float32(words: tuple[str, ...], precision: str, fast_path: str):
    exact, gradients = one_update("training.precision=float32", "training.fast_path=off", *words)
    rough, low = one_update(f"training.precision={precision}", f"training.fast_path={fast_path}", *words)
    size = abs(exact["loss"])
    if set(DYNAMICS) <= set(
        words
    ):  # the actor's part is large there and has the other sign: what is summed counts
        size = sum(abs(value) for name, value in exact.items() if "loss/" in name)
    assert abs(exact["loss"] - rough["loss"]) / size < 0.01
    everything = [torch.cat(list(found.values())) for found in (gradients, low)]
    assert torch.nn.functional.cosine_similarity(*everything, dim=0) > 0.99
    cosines = {
        name: float(torch.nn.functional.cosine_similarity(gradients[name], low[name], dim=0))
        for name in gradients
    }
    print(cosines)


def test_captured_acting_gives_the_eager_actions():
    actions = []
    for capture in (False, True):
        run = built(f"training.capture={str(capture).lower()}", "training.precision=float32")
        sent = []
        for _ in range(20):
            result = run.workflow.collect_step(0, phase={})
            sent.append(torch.as_tensor(result.trajectory["action"]).clone())
        actions.append(torch.stack(sent))
        run.close()
    assert torch.equal(*actions)
