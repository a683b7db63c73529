"""Properties of the PhaseScheduler for arbitrary phases: counts in, names out."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.orchestration.phases import HookInfo, parse_phases

HOOKS = {"update": HookInfo("update", replayed_steps=8), "evolve": HookInfo("evolve")}
LIMIT = 600  # actions of one run


@st.composite
def phase(draw: st.DrawFn, index: int) -> dict[str, Any]:
    """A phase that ends: bounded by steps, updates or cycles."""
    hooks: list[Any] = [
        "collect" if draw(st.booleans()) else {"collect": {"env_steps": draw(st.integers(1, 7))}}
    ]
    kind = draw(st.sampled_from(["ratio", "repeat", "none"]))
    if kind == "ratio":
        hooks.append({"update": {"updates_per_env_step": draw(st.sampled_from([0.1, 0.25, 0.5, 1, 2]))}})
    elif kind == "repeat":
        hooks.append({"update": {"repeat": draw(st.integers(1, 3))}})
    if draw(st.booleans()):
        hooks.append("evolve")
    bounds = ["duration_steps", "duration_cycles"] + (["duration_updates"] if kind == "repeat" else [])
    return {
        "name": f"phase{index}",
        draw(st.sampled_from(bounds)): draw(st.integers(1, 20)),
        "workflow_hooks": hooks,
    }


phases = st.integers(1, 3).flatmap(lambda count: st.tuples(*(phase(index) for index in range(count))))


def scheduler_of(plan: Any, total: int) -> PhaseScheduler:
    return PhaseScheduler(parse_phases(list(plan), HOOKS, ["replay"]), total_timesteps=total)


def run(scheduler: PhaseScheduler, envs: int, limit: int = LIMIT) -> list[str]:
    """Return the names of the actions until the end or the limit; a collect makes `envs` steps."""
    actions: list[str] = []
    while len(actions) < limit and (action := scheduler.next_action()) is not None:
        actions.append(action)
        scheduler.advance(action, steps=envs if action == "collect" else 0)
    return actions


@settings(deadline=None, max_examples=150)
@given(plan=phases, envs=st.integers(1, 5), total=st.integers(1, 60))
def test_totals_equal_the_actions_and_steps_stop_at_the_total(plan: Any, envs: int, total: int) -> None:
    scheduler = scheduler_of(plan, total)
    actions = run(scheduler, envs)
    assert len(actions) < LIMIT and scheduler.next_action() is None and scheduler.current_phase() is None
    collects = actions.count("collect")
    assert scheduler.totals["env_steps"] == collects * envs < total + envs
    assert scheduler.totals["updates"] == len(actions) - collects
    assert scheduler.hook_calls == {name: actions.count(name) for name in set(actions)}


@settings(deadline=None, max_examples=150)
@given(plan=phases, envs=st.integers(1, 5), total=st.integers(1, 60), cut=st.integers(0, 80))
def test_a_scheduler_restored_at_any_action_continues_with_the_same_actions(
    plan: Any, envs: int, total: int, cut: int
) -> None:
    whole = run(scheduler_of(plan, total), envs)
    first = scheduler_of(plan, total)
    begun = run(first, envs, cut)
    second = scheduler_of(plan, total)
    second.set_state(json.loads(json.dumps(first.get_state())))
    assert begun + run(second, envs) == whole


@settings(deadline=None, max_examples=100)
@given(
    envs=st.integers(1, 8), ratio=st.sampled_from([0.1, 0.3, 0.5, 1.0, 1.7, 3.0]), steps=st.integers(1, 120)
)
def test_updates_follow_the_ratio_within_one(envs: int, ratio: float, steps: int) -> None:
    hooks = ["collect", {"update": {"updates_per_env_step": ratio}}]
    scheduler = scheduler_of([{"name": "x", "duration_steps": steps, "workflow_hooks": hooks}], 10_000)
    actions = run(scheduler, envs, limit=5_000)
    done = actions.count("collect") * envs
    assert abs(actions.count("update") - ratio * done) < 1 + 1e-6


@settings(deadline=None, max_examples=100)
@given(plan=phases, envs=st.integers(1, 5))
def test_progress_grows_within_a_phase_and_stays_in_range(plan: Any, envs: int) -> None:
    scheduler = scheduler_of(plan, 60)
    name, last = "", 0.0
    for _ in range(LIMIT):
        action = scheduler.next_action()
        if action is None:
            break
        current = scheduler.current_phase()
        assert current is not None
        now = scheduler.progress()
        assert 0.0 <= now <= 1.0
        assert current.name != name or now >= last
        name, last = current.name, now
        scheduler.advance(action, steps=envs if action == "collect" else 0)
    assert scheduler.progress() == 1.0
