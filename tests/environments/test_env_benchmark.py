import gymnasium
import numpy as np
import pytest

from rl_lab.environments import make_env
from rl_lab.environments.env_runner import episode_seed
from rl_lab.records import ActionSpec, ArraySpec, Spec
from rl_lab.tools.bench import load_benchmark


def test_quick_run_rows(capsys):
    bench = load_benchmark("env")
    words = ["--num-envs", "2", "--workers", "2", "--rounds", "1", "--seconds", "0.02"]
    rows = bench.run(["--tasks", "dummy/discrete", "no_such_suite/x", *words])
    values = {row["name"].removeprefix("env/dummy/discrete/"): row["value"] for row in rows}
    contenders = {"1_worker", "2_workers", "chosen", "single", "gymnasium", "gymnasium_single"}
    expected = {f"{name}_steps_per_s" for name in contenders}
    expected |= {f"{name}_over_gymnasium" for name in contenders if not name.startswith("gymnasium")}
    expected |= {"chosen_workers", "bytes_copied_per_step", "gymnasium_bytes_copied_per_step"}
    measured = {name for name in values if not name.endswith("_cpu_us_per_step")}  # where the system tells
    assert measured == expected
    assert all(values[name] > 0 for name in expected - {"chosen_workers"})
    assert all(row["low"] <= row["value"] <= row["high"] for row in rows if "low" in row)
    assert values["bytes_copied_per_step"] == 4 * 4 + 8 + 4 + 2
    said = capsys.readouterr().out
    assert "no_such_suite/x: not measured: no suite 'no_such_suite'" in said
    assert "dummy/discrete: load average" in said


@pytest.mark.parametrize("task", ["dummy/discrete", "dummy/continuous", "dummy/dict"])
def test_both_sides_use_same_episodes(task):
    bench = load_benchmark("env")
    theirs = bench.Contender(gymnasium.vector.SyncVectorEnv([bench.plain_environment(task)] * 2), [])
    with make_env(task, 2, workers=0) as env:
        ours = bench.Contender(env, [])
        bench._deal_actions([theirs, ours], env)
        ours.begin(seed=3)
        theirs.env.reset(seed=[episode_seed(3, index, 0) for index in range(2)])
        first = np.ones(2, bool)  # later episodes have no seed there
        for number in range(8):
            left, right = theirs.env.step(theirs.actions[number]), env.step(ours.actions[number])
            for place in (1, 2, 3):
                np.testing.assert_allclose(left[place][first], right[place][first], rtol=1e-6)
            first &= ~(right[2] | right[3])
    theirs.env.close()


def test_bytes_match_arrays():
    bench = load_benchmark("env")
    spec = Spec("x", {"image": ArraySpec((3, 64, 64), "uint8")}, ActionSpec("continuous", (2,)))
    assert bench.bytes_per_step(spec) == 3 * 64 * 64 + 2 * 4 + 6
