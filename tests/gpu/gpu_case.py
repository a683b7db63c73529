"""Runs on a GPU that can be stepped by hand: random rows first, then eight updates of one hook."""

from __future__ import annotations

import tempfile
from types import SimpleNamespace

from rl_lab.build import Run, build_run
from rl_lab.config.compose import compose_config, resolve_config
from rl_lab.run_environments import environment_spec

PHASES = (
    "training.phases=[{name: data, duration_steps: 300, workflow_hooks: [collect]},"
    " {name: learn, type: offline, duration_updates: 8, workflow_hooks: [HOOK]}]"
)
# For comparisons of precisions: actions of the policy, once one differs, lead to other rows.
RANDOM_ROWS = PHASES.replace("[collect]", "[{collect: {policy: random}}]").replace("HOOK", "update")
LOGGER = SimpleNamespace(scalars=lambda *a, **k: None, flush=lambda: None, metrics_bytes=lambda: 0)


def built(*words: str, hook: str = "update") -> Run:
    config = compose_config(
        [
            "experiment.device=cuda",
            "training.evaluate.every_env_steps=null",
            "training.total_timesteps=1000",
            PHASES.replace("HOOK", hook),
            *(word.replace("FOLDER", tempfile.mkdtemp()) for word in words),
            "debug=tiny",
        ]
    )
    spec = environment_spec(config)
    return build_run(resolve_config(config, spec), spec, logger=LOGGER, checkpoints=None)


def losses(run: Run, hook: str = "update") -> list[dict[str, float]]:
    """Metrics of each update, read one by one."""
    orchestrator, read = run.orchestrator, []
    try:
        while (action := orchestrator.scheduler.next_action()) is not None:
            orchestrator.run_action(action, orchestrator.scheduler.current_phase())
            if action == hook:
                read.append(orchestrator.runners[hook].meter.drain())
    finally:
        run.close()
    return read


def assert_same_losses(eager: list[dict[str, float]], captured: list[dict[str, float]]) -> float:
    """Eight updates each; returns the largest relative difference."""
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
    return worst
