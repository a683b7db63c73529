"""On a GPU: the captured step gives the eager numbers, and bfloat16 stays near float32."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rl_lab.build import Run, build_run, environment_spec
from rl_lab.compose import compose_config, resolve_config

pytestmark = pytest.mark.gpu

PHASES = [
    "training.phases=[{name: data, duration_steps: 300, workflow_hooks: [collect]},"
    " {name: learn, type: offline, duration_updates: 8, workflow_hooks: [HOOK]}]"
]
LOGGER = SimpleNamespace(scalars=lambda *a, **k: None, flush=lambda: None, metrics_bytes=lambda: 0)


@pytest.fixture(autouse=True)
def exact_float32():
    before = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def built(*words: str, hook: str = "update") -> Run:
    phases = [word.replace("HOOK", hook) for word in PHASES]
    config = compose_config(
        [
            "debug=tiny",
            "experiment.device=cuda",
            "training.evaluate.every_env_steps=null",
            "training.total_timesteps=1000",
            *phases,
            *words,
        ]
    )
    spec = environment_spec(config)
    return build_run(resolve_config(config, spec), spec, logger=LOGGER, checkpoints=None)


def losses(run: Run, hook: str = "update") -> list[dict[str, float]]:
    """Metrics of each update, read one by one."""
    orchestrator, read = run.orchestrator, []
    try:
        while (action := orchestrator.scheduler.next_action()) is not None:
            orchestrator.do(action, orchestrator.scheduler.current_phase())
            if action == hook:
                read.append(orchestrator.runners[hook].meter.drain())
    finally:
        run.close()
    return read


@pytest.mark.parametrize("hook", ["update", "update_world_model", "update_controller"])
@pytest.mark.parametrize("fast_path", ["off", "on"])
def test_captured_updates_give_the_eager_numbers(hook: str, fast_path: str):
    words = ["training.precision=float32", f"training.fast_path={fast_path}"]
    eager = losses(built(*words, "training.capture=false", hook=hook), hook)
    run = built(*words, "training.capture=true", hook=hook)
    captured = losses(run, hook)
    assert run.orchestrator.runners[hook].capture.captured
    assert len(eager) == len(captured) == 8
    worst = 0.0
    for number, (a, b) in enumerate(zip(eager, captured)):
        for key, value in a.items():
            difference = abs(value - b[key]) / max(abs(value), 1e-3)
            worst = max(worst, difference)
            # The fourth update is the first replay; later ones add up what rounding did before.
            assert difference < (1e-5 if number <= 3 else 1e-4), (
                f"update {number + 1}, {key}: {value} and {b[key]}"
            )
    print(f"{hook}: largest relative difference over 8 updates {worst:.1e}")


IMAGES = ("environment=dummy_dict", "components/encoder=dict", "size=1m")


def one_update(*words: str, hook: str = "update") -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics of one update whose optimizer does nothing, and the gradients by part."""
    run = built("training.capture=false", *words, hook=hook)
    run.workflow.optimizers = [
        SimpleNamespace(step=lambda: None, param_groups=[], zero_grad=lambda **k: None)
    ]
    orchestrator = run.orchestrator
    while (action := orchestrator.scheduler.next_action()) == "collect":
        orchestrator.do(action, orchestrator.scheduler.current_phase())
    orchestrator.do(action, orchestrator.scheduler.current_phase())
    metrics = orchestrator.runners[hook].meter.drain()
    gradients = {
        name: torch.cat([p.grad.float().flatten() for p in parameters if p.grad is not None])
        for name, parameters in run.workflow.parts.items()
    }
    run.close()
    return metrics, gradients


@pytest.mark.parametrize("words", [("size=1m",), IMAGES], ids=["vector", "images"])
def test_the_fast_path_gives_the_plain_numbers(words: tuple[str, ...]):
    plain, gradients = one_update("training.precision=float32", "training.fast_path=off", *words)
    quick, fast_gradients = one_update("training.precision=float32", "training.fast_path=on", *words)
    for key, value in plain.items():
        assert quick[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key
    for name, gradient in gradients.items():
        error = (fast_gradients[name] - gradient).norm() / gradient.norm()
        assert error < 1e-3, f"{name}: {float(error)}"


@pytest.mark.parametrize("fast_path", ["off", "on"])
@pytest.mark.parametrize("words", [("size=1m",), IMAGES], ids=["vector", "images"])
def test_bfloat16_stays_near_float32(words: tuple[str, ...], fast_path: str):
    exact, gradients = one_update("training.precision=float32", "training.fast_path=off", *words)
    rough, low = one_update("training.precision=bfloat16", f"training.fast_path={fast_path}", *words)
    assert abs(exact["loss"] - rough["loss"]) / abs(exact["loss"]) < 0.01
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
