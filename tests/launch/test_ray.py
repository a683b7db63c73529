"""Ray: two nodes on one machine; collectors and a node are killed while a run goes on; generations equal local ones."""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rl_lab
from rl_lab.cli import main
from rl_lab.components.controllers.cma_es import CMAES
from rl_lab.config.compose import compose_config
from rl_lab.environments.make import make_env
from rl_lab.errors import LabError, MissingPackageError
from rl_lab.launch.ray_cluster import RayCluster, require_ray
from rl_lab.orchestration.evolution import Generations
from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.records import EarlyStop
from rl_lab.tools.evaluate import evaluate
from rl_lab.utils.checkpoint.manager import CheckpointManager
from rl_lab.utils.files import read_jsonl
from tests.same_run import replay_rows

WORDS = [
    "debug=tiny",
    "experiment.device=cpu",
    "environment.num_envs=4",
    "environment.time_limit=100",
    "logging.progress=off",
    "logging.tensorboard=false",
    "training.total_timesteps=1600",
    "training.log.every_env_steps=100",
    "training.evaluate.every_env_steps=800",
    "training.report.every_env_steps=null",
    "training.checkpoint.every_env_steps=400",
]


# --- Without Ray ---


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["launch.collectors=9"], "launch.collectors=9, but there are environment.num_envs=2 to share"),
        (["environment.normalize_observations=true"], "environment.normalize_observations is true: its"),
        (["launch.evaluation=here"], "launch.evaluation must be cluster or local, not 'here'"),
        (["launch.max_staleness=-1"], "launch.max_staleness must be an integer of at least 0 or null"),
    ],
)
def test_bad_settings_are_named(words: list[str], says: str, capsys, tmp_path: Path):
    words = ["train", "+experiment=dreamer_cartpole", "debug=tiny", "launch=ray", *words]
    assert main([*words, f"run_dir={tmp_path / 'run'}"]) == 1
    assert says in capsys.readouterr().err


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackageError, match=r"launch=ray needs Ray: pip install .*\[ray\]"):
        require_ray()


# --- With two nodes ---


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # no token is written to the home folder
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        import ray
        from ray.cluster_utils import Cluster

        # The head can hold all collectors and environments; the second node is killed.
        head = {"num_cpus": 8, "include_dashboard": False, "object_store_memory": 200 * 2**20}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.second = cluster.add_node(num_cpus=8, object_store_memory=200 * 2**20)
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


class Linear:
    """CMA-ES over a linear policy of CartPole."""

    episodes_per_candidate = 2
    common_episodes = True
    early_stop = EarlyStop()
    num_envs = 4

    def __init__(self) -> None:
        self.search = CMAES(population=6, sigma=0.5)
        self.search.start(torch.zeros(4), seed=1)
        self.told: list[list[float]] = []

    def ask(self) -> torch.Tensor:
        return self.search.ask()

    def initial_policy_state(self, num_envs: int) -> dict:
        return {}

    def act(self, candidates, obs, policy_state, is_first, mode):
        noise = torch.randn(len(candidates), generator=mode.generator)
        return ((candidates * obs["vector"]).sum(-1) + 0.01 * noise > 0).long(), policy_state

    def tell(self, candidates, fitness):
        self.search.tell(fitness)
        self.told.append(fitness.tolist())
        return {}


def generations(**options: Any) -> tuple[list[list[float]], list[float]]:
    evolution = Linear()

    def make(num_envs: int | None):
        return make_env("CartPole-v1", num_envs or 1, seed=5, time_limit=60, copy=False, **options)

    runner = Generations(make, seed=7, say=lambda text: None)
    for number in range(3):
        runner.run(
            "evolve", evolution, number=number, phase={}, done=number, total=3, device=torch.device("cpu")
        )
    runner.close()
    return evolution.told, evolution.search.mean.tolist()


@pytest.mark.extras
@pytest.mark.timeout(900)
def test_generations_on_the_cluster_are_the_local_ones(nodes):
    pytest.importorskip("cma")
    cluster = RayCluster(say=lambda text: None)
    there = generations(workers=2, remote=cluster.start)
    here = generations(workers=0)
    assert there == here and len(here[0]) == 3 and len(set(here[0][0])) > 1


@pytest.mark.extras
@pytest.mark.timeout(900)
def test_an_error_elsewhere_is_one_sentence(nodes):
    cluster = RayCluster(say=lambda text: None)
    far = cluster.start("rl_lab.utils.progress:clock_time", {"seconds": 3.0})  # an object, if a useless one
    far.call("no_such_method")
    with pytest.raises(LabError, match="an object on the cluster raised AttributeError"):
        far.result(300)
    far.kill()
    with pytest.raises(ConnectionError):
        for _ in range(600):  # the process ends a moment later
            far.call("upper")
            far.result(60)
            time.sleep(0.1)


@pytest.mark.extras
@pytest.mark.timeout(1500)
def test_a_run_survives_the_loss_of_a_collector_and_of_a_node(nodes, tmp_path: Path, monkeypatch, capsys):
    """The train ratio is that of a run without a cluster, and no stored row is lost."""
    local = rl_lab.train("dreamer_cartpole", [*WORDS, f"run_dir={tmp_path / 'local'}"], say=lambda text: None)
    stored: list[int] = []
    places: list[tuple[str, int]] = []
    run_action = Orchestrator.run_action

    def disturb(self: Orchestrator, action: str, phase: Any) -> None:
        run_action(self, action, phase)
        steps = self.scheduler.totals["env_steps"]
        if action == "collect":
            stored.append(self.storage.buffers["replay"].total_rows)
        remotes = [part.remote for part in self.collector.parts]
        if not places:
            places.extend(remote.place() for remote in remotes)
        if steps >= 500 and len(stored) and not killed:
            killed.append("collector")
            os.kill(remotes[0].place()[1], signal.SIGKILL)
        if steps >= 1000 and killed == ["collector"]:
            killed.append("node")
            nodes.remove_node(nodes.second)

    killed: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(Orchestrator, "run_action", disturb)
        words = [
            *WORDS,
            "launch=ray",
            f"launch.address={nodes.address}",
            "launch.chunk=16",
            f"run_dir={tmp_path / 'run'}",
        ]
        run = rl_lab.train("dreamer_cartpole", words, say=lambda text: None)
    assert killed == ["collector", "node"] and len({node for node, _ in places}) == 2
    assert not run.interrupted and run.counters["env_steps"] >= 1600
    ratio, expected = (r.counters["updates"] / r.counters["env_steps"] for r in (run, local))
    assert ratio == pytest.approx(expected, rel=0.05)
    # Nothing that was stored was lost, and the lost collectors' environments went on.
    assert stored == sorted(stored) and len(set(stored)) == len(stored)
    rows = replay_rows(run.path)
    assert len(next(v for k, v in rows.items() if k.endswith("reward"))) > 0
    assert run.counters["episodes"] > 0
    lines = read_jsonl(run.path / "metrics.jsonl")
    staleness = [line["collect/staleness"] for line in lines if "collect/staleness" in line]
    assert len(staleness) >= 10 and max(staleness) > 0
    assert [line for line in lines if "collect/collectors_lost" in line][-1]["collect/collectors_lost"] >= 2
    assert capsys.readouterr().out.count("was lost and is replaced") >= 2
    assert any("eval/return_mean" in line for line in lines)  # in environments of the cluster
    state = CheckpointManager(run.path / "checkpoints").load().state
    assert state["collector"]["lost"] >= 2
    # The learner's checkpoint is enough: the run goes on with other collectors.
    more = rl_lab.resume(
        run.path, {"training.total_timesteps": 1800, "launch.collectors": 1}, say=lambda text: None
    )
    assert more.counters["env_steps"] >= 1800 and more.counters["episodes"] > run.counters["episodes"]


@pytest.mark.extras
@pytest.mark.timeout(1800)
def test_cartpole_is_learned_with_two_collectors(nodes, tmp_path: Path):
    """At least 450 of 500 over 20 new episodes with the best checkpoint, 400 in the mean of the last evaluations."""
    words = ["launch=ray", f"launch.address={nodes.address}", "launch.collectors=2", "experiment.device=cpu"]
    words += ["training.total_timesteps=7000", "logging.progress=off", "logging.tensorboard=false"]
    run = rl_lab.train(
        "dreamer_cartpole_steady", [*words, f"run_dir={tmp_path / 'run'}"], say=lambda text: None
    )
    lines = read_jsonl(run.path / "metrics.jsonl")
    returns = [line["eval/return_mean"] for line in lines if "eval/return_mean" in line]
    assert returns[0] < 200 and statistics.mean(returns[-4:]) >= 400
    assert max(line.get("collect/staleness", 0) for line in lines) > 0  # other processes collected
    assert evaluate(run.path, checkpoint="best", episodes=20, seed=1)["return_mean"] >= 450


@pytest.mark.extras
def test_workflows_that_step_the_environments_themselves_are_refused(nodes, tmp_path: Path):
    class Own:
        def collect_step(self, step, *, phase): ...

    from rl_lab.remote_parts import remote_collector

    config = compose_config(["+experiment=dreamer_cartpole", "launch=ray"])
    with pytest.raises(LabError, match="launch=ray: Own steps the environments itself"):
        remote_collector(
            config,
            make_env("CartPole-v1").spec,
            None,
            parts={},
            workflow=Own(),
            updates=lambda: 0,
            device=torch.device("cpu"),
            say=print,
        )
