"""The scale model against numbers worked by hand, the benchmark of collecting, and the example files for clusters."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from rl_lab.config.compose import compose_config
from rl_lab.tools.bench import load_benchmark, run_benchmark

ROOT = Path(__file__).resolve().parents[2]


def test_the_model_of_workers():
    module = load_benchmark("scale_model")
    # 16 environments of 1 ms and one message of 0.2 ms: 16.2 ms for 16 steps.
    model = module.Model(step_s=1e-3, message_s=2e-4)
    assert model.rate(16, 1, 1.0) == pytest.approx(16 / 16.2e-3)
    assert model.rate(16, 4, 4.0) == pytest.approx(16 / (4e-3 + 0.8e-3))
    assert model.rate(16, 16, 2.0) == pytest.approx(16 / (8e-3 + 3.2e-3))  # two cores
    fitted = module.Model.fit(16 / 16.2e-3, 16, 2e-4)
    assert fitted.step_s == pytest.approx(1e-3) and fitted.message_s == 2e-4
    # One worker computes for 16 ms of 16.2, four for 9.2 of 10 ms.
    assert module.capacity_of(4, {1: 16.2e-3, 4: 10e-3}, 2e-4) == pytest.approx(16 / 9.2)


def test_the_model_of_ranks():
    module = load_benchmark("scale_model")
    # 1 kB takes 2 ms, 9 kB take 4 ms: 0.25 ms for each kB, and 1.75 ms without any.
    line = module.Exchange.fit((1e3, 9e3), (2e-3, 4e-3))
    assert line.bandwidth == pytest.approx(4e6) and line.latency_s == pytest.approx(1.75e-3)
    assert line.seconds(3, 2e4) == pytest.approx(3 * 1.75e-3 + 5e-3)
    alone = module.Exchange.fit((0.0, 0.0), (1e-4, 3e-4))  # one rank sends nothing
    assert alone.seconds(2, 0.0) == pytest.approx(2e-4)
    # 30 ms of computing and 2 ms of copying on 1.6 of two cores, then 5 ms of exchange.
    assert module.update_seconds(30e-3, 2e-3, 2, 1.6, 5e-3) == pytest.approx(45e-3)


def test_the_rows_of_ranks():
    module = load_benchmark("scale_model")
    large = 4 * module.LARGE
    found = {
        ("own", 1): [40e-3, 39e-3, 41e-3],
        ("own", 2): [25e-3],
        "copy": [1e-9],
        ("spin", 1): [100.0],
        ("spin", 2): [200.0],
        ("exchange", 1, module.SMALL): [0.0],
        ("exchange", 1, module.LARGE): [0.0],
        ("exchange", 2, module.SMALL): [1e-3 + 4 * module.SMALL / 1e9],
        ("exchange", 2, module.LARGE): [1e-3 + large / 1e9],
        (1, "fixed"): [50e-3],
        (2, "fixed"): [40e-3],
        (2, "scaled"): [62.5e-3],
    }
    made = {"calls": 3.0, "reduced": 4e6, "gathered": 1e6, "largest": 3e6}
    rows = module.rank_rows([1, 2], found, {(1, "fixed"): made, (2, "fixed"): made, (2, "scaled"): made})
    values = {row["name"].removeprefix("scale/"): row["value"] for row in rows}
    assert values["2_ranks/latency_us"] == pytest.approx(1000) and values[
        "2_ranks/bandwidth"
    ] == pytest.approx(1.0)
    assert values["1_ranks/fixed/sent"] == 0 and values["2_ranks/fixed/sent"] == pytest.approx(5.0)
    assert values["1_ranks/fixed/predicted"] == pytest.approx(40 + 3)  # and 3 MB copied at 1 GB/s
    # 3 calls of 1 ms and 5 MB at 1 GB/s are 8 ms; two cores give each rank a whole one.
    assert values["2_ranks/fixed/predicted"] == pytest.approx(25 + 3 + 8)
    assert values["2_ranks/scaled/predicted"] == pytest.approx(40 + 3 + 8)
    assert values["2_ranks/fixed/error"] == pytest.approx(-0.1)
    # Fixed: 50 ms became 40, of two ranks. Scaled: twice the batch in 62.5 ms.
    assert values["2_ranks/fixed/efficiency"] == pytest.approx(0.625)
    assert values["2_ranks/scaled/efficiency"] == pytest.approx(0.8)


@pytest.mark.timeout(300)
def test_ranks_are_measured():
    tiny = ["--words", "+experiment=dreamer_cartpole", "debug=tiny"]
    options = ["--part", "ranks", "--updates", "1", "--rounds", "1", "--seconds", "0.03", *tiny]
    rows = {row["name"]: row["value"] for row in run_benchmark("scale_model", options)["rows"]}
    for case in ("1_ranks/fixed", "2_ranks/fixed", "2_ranks/scaled"):
        assert rows[f"scale/{case}/measured"] > 0 and rows[f"scale/{case}/predicted"] > 0
        assert rows[f"scale/{case}/exchanges"] >= 2  # gradients, and statistics of the returns
    assert rows["scale/1_ranks/fixed/sent"] == 0 < rows["scale/2_ranks/fixed/sent"]


def test_the_plan_of_a_cluster():
    module = load_benchmark("scale_model")
    assert module.all_reduce_bytes(1, 10**6) == 0
    assert module.all_reduce_bytes(2, 10**6) == 4e6  # each of two ranks sends all gradients once
    assert module.all_reduce_bytes(16, 10**6) == pytest.approx(7.5e6)
    cluster = module.Cluster(nodes=2, gpus=4, envs=80, network=1.0, cores=10)
    job = module.Job(
        "x",
        update_s=6e-3,
        step_s=1e-3,
        row_bytes=1000,
        parameters=10**6,
        batch=100,
        train_ratio=10.0,
        chunk=10,
    )
    rows = {row["name"].removeprefix("plan/x/"): row["value"] for row in module.plan(cluster, job)}
    # 4 MB at 1 GB/s are 4 ms beside 6 ms of an update: 100 updates/s of 8 × 100 replayed steps, 10 for each step.
    assert rows["efficiency"] == pytest.approx(0.6) and rows["updates_per_s"] == pytest.approx(100)
    assert rows["env_steps_per_s"] == pytest.approx(8000) and rows["steps_per_env_per_s"] == pytest.approx(
        100
    )
    assert rows["observations"] == pytest.approx(8.0) and rows["gradients_per_node"] == pytest.approx(400)
    # 10 steps of 80 environments take 0.1 s; then 4 MB go to one other node.
    assert rows["weights"] == pytest.approx(40)
    assert rows["load/environment_cores"] == pytest.approx(8000 / 80_000)
    assert rows["load/gradients"] == pytest.approx(0.4) and rows["load/learners"] == pytest.approx(0.6)
    slow = module.Job("y", 6e-3, 0.1, 1000, 10**6, 100, 10.0)  # 80 cores make 800 steps/s
    found = module.plan(cluster, slow)
    assert module.saturates_first(found) == "environment_cores"
    assert next(row["value"] for row in found if row["name"].endswith("env_steps_per_s")) == pytest.approx(
        800
    )


def test_the_plan_of_the_page():
    """The table in docs/howto/scale.md."""
    rows = {row["name"]: row["value"] for row in run_benchmark("scale_model", ["--plan"])["rows"]}
    assert rows == {
        row["name"]: row["value"] for row in run_benchmark("scale_model", ["--part", "plan"])["rows"]
    }
    text = (ROOT / "docs/howto/scale.md").read_text()
    steps = [
        round(rows[f"plan/{job}/env_steps_per_s"], -2)
        for job in ("atari_12m_ratio_256", "atari_200m_ratio_32")
    ]
    assert all(f"{step:,.0f}" in text for step in steps)
    assert f"{rows['plan/atari_200m_ratio_32/weights']:,.0f} MB/s" in text
    assert f"{rows['plan/atari_12m_ratio_256/observations']:,.0f} MB/s" in text


def test_collecting_is_measured():
    words = ["debug=tiny", "training.total_timesteps=100000", "experiment.device=cpu"]
    options = [
        "--tasks",
        "cartpole",
        "--workers",
        "1",
        "--num-envs",
        "2",
        "--seconds",
        "0.05",
        "--rounds",
        "1",
    ]
    rows = run_benchmark("collect", [*options, "--words", *words])["rows"]
    assert [row["name"].rsplit("/", 1)[1] for row in rows] == [
        "env_steps_per_s",
        "collect_steps_per_s",
        "train_steps_per_s",
        "train_updates_per_s",
        "updates_alone_per_s",
        "update_share",
    ]
    assert all(row["value"] > 0 for row in rows)


def test_examples_for_clusters_train_what_exists():
    sky = yaml.safe_load((ROOT / "examples/cluster/skypilot.yaml").read_text())
    pod = yaml.safe_load((ROOT / "examples/cluster/kueue.yaml").read_text())["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    commands = [shlex.split(sky["run"].replace("\\\n", " ")), [*container["command"], *container["args"]]]
    for command in commands:
        assert command[:2] == ["rl-lab", "train"]
        config = compose_config(command[2:])
        assert config.run_dir == "/outputs/pong" and config.experiment.name == "dreamer_atari100k"
    assert "/outputs" in sky["file_mounts"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    from rl_lab.utils.stopping import STOPPED, STOPPED_VARIABLE

    assert {"name": STOPPED_VARIABLE, "value": str(STOPPED)} in container["env"]
