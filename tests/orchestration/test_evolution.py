"""Evolution: rollouts and returns of candidates, early stop, generations, progress."""

from __future__ import annotations

import pytest
import torch

from rl_lab.environments.make import make_env
from rl_lab.errors import ConfigError
from rl_lab.orchestration.evolution import (
    EvolutionProgress,
    FinishedRollout,
    Generations,
    Interrupted,
    Rollout,
    evaluate_population,
    make_rollouts,
)
from rl_lab.records import EarlyStop
from tests.orchestration.seeded_reward_env import STEPS, SeededReward


class Fixed:
    """Candidate k takes action 1 in its first k steps; records the observations."""

    episodes_per_candidate = 2
    common_episodes = True
    early_stop = EarlyStop()

    def __init__(self, population=6):
        self.population = population
        self.shown = []
        self.told = []

    def ask(self):
        return torch.arange(self.population, dtype=torch.float32)[:, None]

    def initial_policy_state(self, num_envs):
        return {"steps": torch.zeros(num_envs)}

    def act(self, candidates, obs, policy_state, is_first, mode):
        steps = torch.where(is_first, 0.0, policy_state["steps"] + 1.0)
        elapsed = obs["vector"][:, 1]
        playing = ~is_first | (
            elapsed == 0
        )  # an environment without a rollout repeats its last row with is_first
        assert torch.equal(steps[playing] % 20, elapsed[playing] % 20)  # the state is reset with the episode
        self.shown += [
            (int(c), float(w))
            for c, w, f in zip(candidates[:, 0], obs["vector"][:, 0], is_first & playing)
            if f
        ]
        return (steps < candidates[:, 0]).long(), {"steps": steps}

    def tell(self, candidates, fitness):
        self.told.append(fitness)
        return {"told": 1.0}


def environments_of(num_envs: int, workers: int = 0):
    return make_env(SeededReward, num_envs, workers=workers, copy=False)


def reward_of(seed: int) -> float:
    env = SeededReward()
    env.reset(seed=seed)
    return env.reward


def expected(evolution: Fixed, seed: int) -> list[float]:
    rollouts = make_rollouts(
        evolution.population, evolution.episodes_per_candidate, seed, evolution.common_episodes
    )
    totals = [0.0] * evolution.population
    for rollout in rollouts:
        k = rollout.candidate
        totals[k] += k * reward_of(rollout.seed) - (20 - k)
    return [total / evolution.episodes_per_candidate for total in totals]


@pytest.mark.parametrize("sizes", [(1,), (5,), (3, 2), (20,)])
def test_fitness_is_mean_return_of_candidate(sizes):
    evolution = Fixed()
    environments = [environments_of(size) for size in sizes]
    for seed in (1, 2):  # the second time in used environments
        STEPS.clear()
        fitness, steps = evaluate_population(
            evolution, evolution.ask(), environments, device="cpu", seed=seed
        )
        assert fitness.tolist() == pytest.approx(expected(evolution, seed))
        assert steps == 6 * 2 * 20
        assert len(STEPS) == steps  # environments without a rollout are not stepped
    for environment in environments:
        environment.close()


def test_workers_give_same_fitness():
    evolution = Fixed()
    environments = [environments_of(4, workers=2), environments_of(3, workers=1)]
    fitness, _ = evaluate_population(evolution, evolution.ask(), environments, device="cpu", seed=1)
    assert fitness.tolist() == pytest.approx(expected(evolution, 1))
    for environment in environments:
        environment.close()


def test_common_and_separate_episodes():
    evolution = Fixed()
    environment = environments_of(4)
    evaluate_population(evolution, evolution.ask(), environment, device="cpu", seed=1)
    by_candidate = {c: sorted(w for k, w in evolution.shown if k == c) for c in range(6)}
    assert len({tuple(seen) for seen in by_candidate.values()}) == 1 and len(by_candidate[0]) == 2
    evolution.common_episodes, evolution.shown = False, []
    fitness, _ = evaluate_population(evolution, evolution.ask(), environment, device="cpu", seed=1)
    assert fitness.tolist() == pytest.approx(expected(evolution, 1))
    assert len({w for _, w in evolution.shown}) > 6
    environment.close()


def test_early_stop_extrapolates_return():
    evolution = Fixed()
    environment = environments_of(4)
    items: list[FinishedRollout] = []
    whole, _ = evaluate_population(evolution, evolution.ask(), environment, device="cpu", seed=3)
    evolution.early_stop = EarlyStop(patience=4, horizon=20)
    STEPS.clear()
    fitness, steps = evaluate_population(
        evolution, evolution.ask(), environment, device="cpu", seed=3, on_rollout=items.append
    )
    # Candidate k is rewarded k times and ended 4 steps later; remaining steps cost 1 each, like those.
    assert all(item.stopped and item.steps == item.rollout.candidate + 4 for item in items)
    assert steps == len(STEPS) == sum(item.steps for item in items)
    assert fitness.tolist() == pytest.approx(whole.tolist())
    evolution.early_stop = EarlyStop(patience=4)  # no horizon: remaining steps count nothing
    less, _ = evaluate_population(evolution, evolution.ask(), environment, device="cpu", seed=3)
    missing = [20 - k - 4 for k in range(6)]
    assert (less - whole).tolist() == pytest.approx(missing)
    environment.close()


class Unscheduled:
    """A vector environment without `schedule`."""

    def __init__(self, environment):
        self._environment = environment

    def __getattr__(self, name):
        if name == "schedule":
            raise AttributeError(name)
        return getattr(self._environment, name)


def test_environment_without_schedule():
    evolution = Fixed()
    evolution.early_stop = EarlyStop(patience=2, horizon=20)
    environment = environments_of(4)
    fitness, steps = evaluate_population(
        evolution, evolution.ask(), Unscheduled(environment), device="cpu", seed=1
    )
    assert steps == 6 * 2 * 20 and fitness[0] == -20.0 and (fitness[1:] > 0).all()
    environment.close()


def test_stop_leaves_nothing_in_flight():
    evolution = Fixed()
    environments = [environments_of(2), environments_of(2)]
    calls = iter(range(100))
    with pytest.raises(Interrupted):
        evaluate_population(
            evolution,
            evolution.ask(),
            environments,
            device="cpu",
            seed=1,
            should_stop=lambda: next(calls) == 5,
        )
    fitness, _ = evaluate_population(evolution, evolution.ask(), environments, device="cpu", seed=1)
    assert fitness.tolist() == pytest.approx(expected(evolution, 1))
    for environment in environments:
        environment.close()


# ---------------------------------------------------------------- generations


def generations(said=None, make=lambda num_envs: environments_of(num_envs or 2)):
    return Generations(make, seed=5, say=(said if said is not None else []).append)


def run(runner, evolution, number=0, **changes):
    options = {"phase": {"name": "x"}, "done": number, "total": 3, "device": torch.device("cpu"), **changes}
    return runner.run("evolve", evolution, number=number, **options)


def test_generation_depends_on_its_number_only():
    first, again = generations(), generations()
    run(first, one := Fixed(), 0)
    run(first, one, 1)
    run(again, two := Fixed(), 1)
    assert torch.equal(one.told[1], two.told[0]) and not torch.equal(one.told[0], one.told[1])
    for runner in (first, again):
        runner.close()


def test_generation_metrics_and_status_line():
    said = []
    runner = generations(said)
    metrics, steps = run(runner, Fixed(), 2)
    assert steps == 240
    assert metrics["generation"] == 3 and metrics["told"] == 1.0 and metrics["seconds_left"] == 0.0
    assert metrics["worst"] <= metrics["mean"] <= metrics["best"] and metrics["spread"] > 0
    assert metrics["evaluations_per_second"] > 0 and metrics["steps_per_evaluation"] == 20
    assert "generation 3/3: best" in said[-1] and "evaluations/s" in said[-1]
    runner.close()


def test_environments_are_split_into_groups():
    made = []

    def make(num_envs):
        made.append(num_envs)
        return environments_of(num_envs or 2)

    runner = generations(make=make)
    evolution = Fixed()
    evolution.num_envs = 7
    run(runner, evolution)
    run(runner, evolution, 1)
    assert made == [4, 3]
    runner.close()


def test_interrupted_generation_is_discarded():
    said = []
    runner, evolution = generations(said), Fixed()
    assert run(runner, evolution, should_stop=lambda: True) is None
    assert evolution.told == [] and "will be repeated" in said[-1]
    run(runner, evolution)
    whole = generations()
    run(whole, other := Fixed())
    assert torch.equal(evolution.told[0], other.told[0])
    runner.close()
    whole.close()


def test_evaluation_in_world_model_needs_no_environment():
    class Dreamy(Fixed):
        dreams = True

        def begin(self, phase):
            self.phase = phase["name"]

        def evaluate(self, candidates, batch, generator):
            noise = torch.rand(1, generator=generator)
            return candidates[:, 0] + batch + noise, 77

    runner, evolution = generations(make=None), Dreamy()
    metrics, steps = run(runner, evolution, batch=100.0)
    assert steps == 0 and evolution.phase == "x" and 105 < metrics["best"] < 106
    assert metrics["steps_per_evaluation"] == pytest.approx(77 / 12)
    evolution.dreams = False
    with pytest.raises(ConfigError, match="evolves in the environment"):
        run(runner, evolution)


def test_progress_reports_rates_and_remaining_time():
    now = [0.0]
    said = []
    progress = EvolutionProgress(said.append, clock=lambda: now[0])
    item = FinishedRollout(Rollout(0, 1), 5.0, 10, stopped=True)
    progress.begin(1, 10, rollouts=8)
    for _ in range(8):
        now[0] += 3.0
        progress.rollout_finished(item)
    assert said == [
        "generation 1/10: 4 of 8 rollouts · 0.33 evaluations/s · 0:12 left",
        "generation 1/10: 8 of 8 rollouts · 0.33 evaluations/s · 0:00 left",
    ]
    metrics = progress.end(torch.tensor([1.0, 3.0]), steps=80)
    assert metrics["seconds_left"] == pytest.approx(9 * 24.0) and metrics["stopped_early"] == 1.0
    assert (
        said[-1] == "generation 1/10: best 3.0 · mean 2.0 ± 1.0 · 0.33 evaluations/s · 3 steps/s · ETA 3:36"
    )
    lines = len(said)
    for number in range(2, 6):  # fast generations are not all reported
        progress.begin(number, 10, rollouts=8)
        now[0] += 4.0
        progress.end(torch.tensor([1.0]), steps=80)
    assert len(said) == lines + 1
