"""Runs that can never update are refused before the first step, or stopped once their episodes show it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rl_lab
from rl_lab.cli import main
from rl_lab.errors import ConfigError, LabError
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.orchestration.phases import HookInfo, PhaseDefinition, parse_phases
from rl_lab.orchestration.update_check import MAX_SHORT_EPISODES, UpdateWatch, check_batches, check_updates
from rl_lab.records import AnyHook, ArraySpec, BatchSpec, Episode, EvolveHook, Hook, UpdateResult

BATCH = BatchSpec(size=2, length=5)
WITHIN = BatchSpec(size=2, length=5, boundary="within")
SEED = {"name": "seed", "duration_steps": 40, "workflow_hooks": ["collect"]}
JOINT = {"name": "joint", "workflow_hooks": ["collect", {"update": {"updates_per_env_step": 0.5}}]}


class Buffer:
    """An empty buffer without a ring, or one with rows that are ready for every batch."""

    num_streams = 2

    def __init__(self, size: int = 0, capacity: int | None = None) -> None:
        self.size = size
        self.capacity = capacity

    def ready(self, batch: BatchSpec) -> bool:
        assert self.size  # an empty buffer must not be asked: it would create its sampler
        return True


def hooks(batch: BatchSpec | None = BATCH) -> dict[str, AnyHook]:
    return {"update": Hook(lambda *_: UpdateResult({}), batch=batch)}


def evolution() -> dict[str, AnyHook]:
    evolvable: Any = object()
    return {"update": EvolveHook(evolvable)}


def parsed(phases: list[dict], known: dict[str, AnyHook]) -> list[PhaseDefinition]:
    return parse_phases(phases, {name: HookInfo(hook.kind) for name, hook in known.items()}, ["replay"])


def check(phases: list[dict], total: int | None, batch: BatchSpec | None = BATCH, **options: Any) -> None:
    known = options.pop("known", None) or hooks(batch)
    buffers = {"replay": options.pop("buffer", None) or Buffer()}
    check_updates(parsed(phases, known), known, buffers, num_envs=2, total_timesteps=total, **options)


REFUSED = {
    "too few rows": (
        lambda: check([JOINT], 6),
        "training.total_timesteps=6 would end without an update: 'update' needs sequences of 5 rows of one "
        "environment, and the run takes only 3 steps in each of 2 environments",
    ),
    "warm-up": (
        lambda: check([SEED, JOINT], 30),
        "training.total_timesteps=30 ends the run before phase 'joint', the first one that updates",
    ),
    "warm-up in another buffer": (
        lambda: check_updates(
            parse_phases(
                [SEED, {**JOINT, "buffer": "other", "duration_steps": 6}],
                {"update": HookInfo()},
                ["replay", "other"],
            ),
            hooks(),
            {"replay": Buffer(), "other": Buffer()},
            num_envs=2,
            total_timesteps=None,
        ),
        "training.phases: 46 steps would end without an update",
    ),
    "small ratio": (
        lambda: check([{**JOINT, "workflow_hooks": ["collect", {"update": {"updates_per_env_step": 1e-3}}]}], 200),
        "'update' is due less than once in 200 steps, so raise its ratio",
    ),
    "rare": (
        lambda: check([{**JOINT, "workflow_hooks": ["collect", {"update": {"every_env_steps": 500}}]}], 200),
        "'update' is due less than once in 200 steps",
    ),
    "time limit": (
        lambda: check([JOINT], 1000, WITHIN, time_limit=3),
        "environment.time_limit=3 is too short: 'update' needs sequences of 5 rows of one episode",
    ),
    "capacity": (
        lambda: check([JOINT], 1000, buffer=Buffer(capacity=4)),
        "buffers.replay.capacity=4 is too small: 'update' needs sequences of 5 rows of one environment, so set it",
    ),
    "no update": (
        lambda: check([SEED], 1000),
        "training.phases has no hook that updates, so nothing would be trained: add update to the workflow_hooks",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_run_without_an_update_is_refused(name: str):
    run, text = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        run()
    assert text in str(caught.value)
    assert str(caught.value).startswith(text[:20]) or "is due less" in text


ACCEPTED = {
    "enough rows": lambda: check([JOINT], 8),
    "after the warm-up": lambda: check([SEED, JOINT], 42),
    "stored rows": lambda: check([JOINT], 4, buffer=Buffer(size=1)),
    "no batch": lambda: check([JOINT], 4, None),
    "offline": lambda: check([{"name": "x", "type": "offline", "duration_updates": 1, "workflow_hooks": ["update"]}], 4),
    "evolve": lambda: check([{"name": "x", "duration_updates": 1, "workflow_hooks": ["update"]}], 4, known=evolution()),
    "rows of any length": lambda: check([JOINT], 4, steps_known=False),
    "evaluation": lambda: check([{"name": "x", "type": "eval_only", "workflow_hooks": ["evaluate"]}], 4),
    "collects with loaded weights": lambda: check([SEED], 1000, collects_only=True),
    "nothing to train": lambda: check_updates(parsed([SEED], {}), {}, {"replay": Buffer()}, num_envs=2, total_timesteps=9),
    "long episodes": lambda: check([JOINT], 1000, WITHIN, time_limit=4),
    "sequences across episodes": lambda: check([JOINT], 1000, time_limit=1),
    "later than the simulation": lambda: check([{**SEED, "duration_steps": 10**7}, JOINT], 10**7 - 1),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_run_with_an_update_is_accepted(name: str, monkeypatch):
    monkeypatch.setattr("rl_lab.orchestration.update_check.MAX_SIMULATED_ACTIONS", 2000)
    assert ACCEPTED[name]() is None


def watch(batch: BatchSpec) -> tuple[UpdateWatch, PhaseScheduler]:
    known = hooks(batch)
    storage: Any = SimpleNamespace(hooks=known, shortage=lambda name, phase: "no episode is long enough")
    scheduler = PhaseScheduler(parsed([JOINT], known), total_timesteps=10**6, is_ready=lambda *_: False)
    for _ in range(2):
        scheduler.advance(str(scheduler.next_action()), steps=2)
    scheduler.next_action()
    return UpdateWatch(storage), scheduler


@pytest.mark.parametrize(
    "batch, length, stops",
    [(WITHIN, 3, True), (WITHIN, 4, False), (BATCH, 3, False), (BatchSpec(2, 5, boundary="pad"), 3, False)],
)
def test_watch_stops_when_all_episodes_are_too_short(batch: BatchSpec, length: int, stops: bool):
    watching, scheduler = watch(batch)
    for _ in range(MAX_SHORT_EPISODES - 1):
        watching.collected([Episode(1.0, length)], scheduler, scheduler.phases[0])
    if not stops:
        watching.collected([Episode(1.0, length)], scheduler, scheduler.phases[0])
        return
    with pytest.raises(
        LabError, match=r"'joint' cannot update: .* 5 rows of one episode, .* 100 episodes has 4"
    ):
        watching.collected([Episode(1.0, length)], scheduler, scheduler.phases[0])


def test_watch_reports_a_finished_run_without_an_update():
    watching, scheduler = watch(WITHIN)
    with pytest.raises(LabError, match="'update' never ran, so nothing was trained in 4 steps: no episode"):
        watching.finished(scheduler)
    scheduler.totals["updates"] = 1
    assert watching.finished(scheduler) is None


QUIET = ["logging.progress=off", "logging.tensorboard=false"]
SHORT_EPISODES = '''
from rl_lab.workflows.base import WorldModelWorkflow
from rl_lab.workflows.random import RandomWorkflow

class Learner(RandomWorkflow):
    """Random actions, and a plain update that samples within episodes."""

    settings_type = None

    def update_world_model(self, batch, *, phase):
        return {"loss": 0.0}

    hooks = WorldModelWorkflow.hooks
'''


def test_plain_workflow_on_short_episodes_stops(tmp_path: Path, monkeypatch):
    """Batches of 200 steps within one episode: those of a random policy on CartPole are shorter."""
    (tmp_path / "short_episodes.py").write_text(SHORT_EPISODES)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["workflow._target_=short_episodes.Learner", f"run_dir={tmp_path / 'run'}", *QUIET]
    words += ["training.phases=[{name: joint, workflow_hooks: [collect, update_world_model]}]"]
    words += ["training.total_timesteps=100000", "environment.task=CartPole-v1"]
    with pytest.raises(LabError, match=r"phase 'joint' cannot update: .* 201 rows of one episode"):
        rl_lab.train("random_cartpole", [*words, "+algorithm.batch_length=200"])


def test_command_says_so_and_stops(tmp_path: Path, capsys):
    words = ["train", "debug=tiny", "training.total_timesteps=4", *QUIET, f"run_dir={tmp_path / 'run'}"]
    assert main(words) == 1
    assert "error: training.total_timesteps=4 would end without an update" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_batch_that_memory_cannot_hold_is_refused() -> None:
    """2 sequences of 5 rows of 3 float32 and 1 bool: 130 bytes."""
    columns = {"obs/vector": ArraySpec((3,), "float32"), "is_first": ArraySpec((), "bool")}
    check_batches(hooks(), columns, memory=130)
    check_batches(hooks(None), columns, memory=0)
    check_batches(hooks(BatchSpec(size=2, length=5, keys=("is_first",))), columns, memory=10)
    with pytest.raises(ConfigError, match=r"^algorithm\.batch_size is too large: .*'update', 2 × 5 rows"):
        check_batches(hooks(), columns, memory=129)


def test_command_refuses_a_batch_that_memory_cannot_hold(tmp_path: Path, capsys) -> None:
    words = [
        "experiment=dreamer_cartpole",
        "debug=tiny",
        "environment=dummy_discrete",
        "environment.workers=0",
    ]
    words += ["algorithm.batch_size=10000000000", "training.total_timesteps=1000000", "logging.progress=off"]
    assert main(["train", *words, f"run_dir={tmp_path / 'run'}"]) == 1
    assert "error: algorithm.batch_size is too large: " in capsys.readouterr().err
