"""Phases give the expected list of actions."""

from __future__ import annotations

import itertools

import pytest
import yaml

from rl_lab.errors import CheckpointError, ConfigError
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.orchestration.phases import HookInfo, parse_phases

HOOKS = {
    "update": HookInfo("update", replayed_steps=8),
    "update_world_model": HookInfo("update", replayed_steps=8),
    "update_controller": HookInfo("update", replayed_steps=8),
    "encode": HookInfo("transform"),
    "evolve": HookInfo("evolve"),
}


def scheduler_of(text: str, *, total: int | None = 1000, is_ready=lambda hook, phase: True) -> PhaseScheduler:
    phases = parse_phases(yaml.safe_load(text), HOOKS, ["replay"])
    return PhaseScheduler(phases, total_timesteps=total, is_ready=is_ready)


def walk(scheduler: PhaseScheduler, *, envs: int = 1, limit: int = 200, transform_parts: int = 2) -> str:
    """Return the actions as letters until the end; a collect makes `envs` steps."""
    letters = {"collect": "c", "update": "u", "update_world_model": "w", "update_controller": "k"}
    letters |= {"evaluate": "e", "encode": "t", "evolve": "v"}
    done = []
    parts = itertools.count(1)
    for _ in range(limit):
        action = scheduler.next_action()
        if action is None:
            return "".join(done)
        done.append(letters[action])
        finished = action != "encode" or next(parts) % transform_parts == 0
        scheduler.advance(action, steps=envs if action == "collect" else 0, done=finished)
    return "".join(done) + "…"


def test_phases_run_in_order():
    text = """
        - {name: data, duration_steps: 3, workflow_hooks: [collect]}
        - {name: model, type: offline, duration_updates: 4, workflow_hooks: [update_world_model]}
        - {name: joint, duration_cycles: 2, workflow_hooks: [collect, update_world_model, update_controller]}
        - {name: test, type: eval_only, workflow_hooks: [evaluate]}
    """
    assert walk(scheduler_of(text)) == "ccc" + "wwww" + "cwk" * 2 + "e"


def test_phase_with_duration_zero_is_skipped():
    text = """
        - {name: data, duration_cycles: 0, workflow_hooks: [collect]}
        - {name: joint, duration_cycles: 2, workflow_hooks: [collect, update_world_model]}
    """
    assert walk(scheduler_of(text)) == "cw" * 2


def test_steps_overshoot_by_less_than_one_vector_step():
    scheduler = scheduler_of("[{name: x, duration_steps: 10, workflow_hooks: [collect, update]}]")
    assert walk(scheduler, envs=4) == "cucucu"
    assert scheduler.totals["env_steps"] == 12


def test_repeat_and_env_steps_within_a_cycle():
    assert walk(scheduler_of("[{name: x, duration_cycles: 2, workflow_hooks: [{collect: {env_steps: 5}}, {update: {repeat: 3}}]}]"), envs=2) == "cccuuu" * 2  # fmt: skip


@pytest.mark.parametrize(
    ("pace", "expected"),
    [
        ("updates_per_env_step: 1", "cu" * 4),
        ("updates_per_env_step: 2", "cuu" * 4),
        ("updates_per_env_step: 0.5", "ccu" * 2),
        ("replayed_steps_per_env_step: 4", "ccu" * 2),
        ("replayed_steps_per_env_step: 2", "ccccu"),
    ],
)
def test_ratios_keep_fractional_credit(pace: str, expected: str):
    text = f"[{{name: x, duration_steps: 4, workflow_hooks: [collect, {{update: {{{pace}}}}}]}}]"
    assert walk(scheduler_of(text)) == expected


def test_ratio_of_one_tenth_is_exact():
    text = (
        "[{name: x, duration_steps: 100, workflow_hooks: [collect, {update: {updates_per_env_step: 0.1}}]}]"
    )
    assert walk(scheduler_of(text), limit=500).count("u") == 10


def test_credit_starts_when_ready_and_is_capped():
    steps = {"n": 0}
    text = "[{name: x, duration_steps: 6, workflow_hooks: [collect, {update: {updates_per_env_step: 1}}]}]"
    scheduler = scheduler_of(text, is_ready=lambda hook, phase: steps["n"] >= 3)
    done = ""
    while (action := scheduler.next_action()) is not None:
        done += action[0]
        steps["n"] += action == "collect"
        scheduler.advance(action, steps=1 if action == "collect" else 0)
    assert done == "cc" + "cu" * 4  # no credit for the two steps before
    assert scheduler.skipped == {"update"}

    text = "[{name: x, duration_steps: 10, workflow_hooks: [collect, {update: {updates_per_env_step: 3, max_burst: 2}}]}]"
    assert walk(scheduler_of(text), envs=10).count("u") == 30  # updates of one collect are never dropped


def test_updates_are_skipped_until_ready():
    seen = []
    text = "[{name: x, duration_steps: 3, workflow_hooks: [collect, update]}]"
    scheduler = scheduler_of(text, is_ready=lambda hook, phase: len(seen) >= 2)
    while (action := scheduler.next_action()) is not None:
        seen.append(action)
        scheduler.advance(action, steps=1 if action == "collect" else 0)
    assert seen == ["collect", "collect", "update", "collect", "update"]


def test_evaluate_fires_when_limit_is_passed():
    text = "[{name: x, duration_steps: 21, workflow_hooks: [collect, {evaluate: {every_env_steps: 10}}]}]"
    assert walk(scheduler_of(text), envs=7) == "c" + "ce" + "ce"


@pytest.mark.parametrize(
    ("hooks", "updates", "expected"),
    [
        ("[update, {evaluate: {every_updates: 3}}]", 6, "uuueuuue"),
        ("[update, {evaluate: {every_updates: 3}}]", 5, "uuueuu"),
        ("[{update: {repeat: 4}}, {evaluate: {every_updates: 3}}]", 6, "uuuueuue"),
        ("[{evaluate: {every_updates: 3}}, update]", 6, "uuueuuue"),
        ("[update]", 2, "uu"),
    ],
)
def test_evaluation_at_the_last_update_is_made(hooks: str, updates: int, expected: str):
    """Before the phase ends; the next phase counts from there, and every point of it can be saved."""
    after = "{name: y, type: offline, duration_updates: 4, workflow_hooks: [update, {evaluate: {every_updates: 5}}]}"
    text = f"[{{name: x, type: offline, duration_updates: {updates}, workflow_hooks: {hooks}}}, {after}]"
    whole = walk(scheduler_of(text))
    # The counter of updates is that of the run, so the second phase evaluates at multiples of 5 of it.
    rest = "".join("u" + "e" * (k % 5 == 0) for k in range(updates + 1, updates + 5))
    assert whole == expected + rest
    for stop in range(1, len(whole)):
        first, second = scheduler_of(text), scheduler_of(text)
        begun = walk(first, limit=stop).rstrip("…")
        second.set_state(first.get_state())
        assert begun + walk(second) == whole


def test_a_phase_that_is_shortened_on_resume_ends():
    text = "[{{name: x, type: offline, duration_updates: {}, workflow_hooks: [update, {{evaluate: {{every_updates: 3}}}}]}}]"
    first, second = scheduler_of(text.format(9)), scheduler_of(text.format(4))
    assert walk(first, limit=6).startswith("uuueuu")
    second.set_state(first.get_state())
    assert walk(second) == ""


def test_groups_repeat():
    text = """
        - repeat: 3
          phases:
            - {name: c, duration_steps: 2, workflow_hooks: [collect]}
            - {name: u, type: offline, duration_updates: 1, workflow_hooks: [update]}
    """
    assert walk(scheduler_of(text)) == "ccu" * 3


def test_transform_and_evolve():
    text = """
        - {name: encode, type: offline, workflow_hooks: [encode]}
        - {name: evolve, duration_updates: 3, workflow_hooks: [evolve]}
    """
    assert walk(scheduler_of(text), transform_parts=4) == "tttt" + "vvv"


def test_total_timesteps_ends_training_after_cycle():
    text = """
        - {name: endless, workflow_hooks: [collect, update]}
        - {name: never, type: offline, duration_updates: 5, workflow_hooks: [update]}
    """
    assert walk(scheduler_of(text, total=3)) == "cucucu"


def test_phase_without_end_is_an_error():
    with pytest.raises(ConfigError, match="no duration"):
        scheduler_of("[{name: endless, workflow_hooks: [collect]}]", total=None)


def test_idle_phase_is_an_error():
    text = "[{name: stuck, duration_steps: 5, workflow_hooks: [update]}]"
    with pytest.raises(ConfigError, match="nothing to do"):
        scheduler_of(text, is_ready=lambda hook, phase: False).next_action()


def test_progress_and_view():
    text = "[{name: x, duration_steps: 4, workflow_hooks: [{collect: {policy: random}}], set: {a.b: 1}}]"
    scheduler = scheduler_of(text)
    view = scheduler.view()
    assert (view["name"], view["type"], view["progress"]) == ("x", "online", 0.0)
    assert view["collect"] == {"policy": "random"}
    scheduler.next_action()
    scheduler.advance("collect", steps=1)
    assert view["progress"] == 0.25
    assert dict(view)["set"] == {"a.b": 1}
    with pytest.raises(TypeError):
        view["name"] = "y"


def test_advance_refuses_other_action():
    scheduler = scheduler_of("[{name: x, duration_steps: 4, workflow_hooks: [collect, update]}]")
    with pytest.raises(ValueError, match="not the action"):
        scheduler.advance("update")


TEXT = """
    - {name: data, duration_steps: 3, workflow_hooks: [collect]}
    - repeat: 2
      phases:
        - name: joint
          duration_steps: 7
          workflow_hooks: [collect, {update: {updates_per_env_step: 0.4}}, {evaluate: {every_env_steps: 4}}]
        - {name: off, type: offline, duration_updates: 2, workflow_hooks: [update]}
"""


@pytest.mark.parametrize("stop_after", range(1, 40, 3))
def test_state_restores_exactly(stop_after: int):
    whole = walk(scheduler_of(TEXT), envs=2)
    first = scheduler_of(TEXT)
    begun = walk(first, envs=2, limit=stop_after).rstrip("…")
    second = scheduler_of(TEXT)
    second.set_state(first.get_state())
    assert begun + walk(second, envs=2) == whole


def test_changed_phases_are_refused_on_resume():
    state = scheduler_of(TEXT).get_state()
    with pytest.raises(CheckpointError, match="phases"):
        scheduler_of("[{name: x, duration_steps: 4, workflow_hooks: [collect]}]").set_state(state)
