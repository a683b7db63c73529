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
def test_captured_updates_give_the_eager_numbers(hook: str):
    eager = losses(built("training.precision=float32", "training.capture=false", hook=hook), hook)
    run = built("training.precision=float32", "training.capture=true", hook=hook)
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


def test_bfloat16_stays_near_float32():
    found = []
    for precision in ("float32", "bfloat16"):
        run = built(f"training.precision={precision}", "training.capture=false", "size=1m")
        run.workflow.optimizers = [
            SimpleNamespace(step=lambda: None, param_groups=[], zero_grad=lambda **k: None)
        ]
        orchestrator = run.orchestrator
        while (action := orchestrator.scheduler.next_action()) == "collect":
            orchestrator.do(action, orchestrator.scheduler.current_phase())
        orchestrator.do(action, orchestrator.scheduler.current_phase())
        metrics = orchestrator.runners["update"].meter.drain()
        parts = [*run.context.components.parameters()]
        for _, module in run.context.controller_manager.modules():
            parts += list(module.parameters())
        gradient = torch.cat([p.grad.float().flatten() for p in parts if p.grad is not None])
        found.append((metrics["loss"], gradient))
        run.close()
    (loss, gradient), (loss_low, gradient_low) = found
    assert abs(loss - loss_low) / abs(loss) < 0.01
    assert torch.nn.functional.cosine_similarity(gradient, gradient_low, dim=0) > 0.99
