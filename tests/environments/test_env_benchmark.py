from rl_lab.records import ActionSpec, ArraySpec, Spec
from rl_lab.tools.bench import load_benchmark


def test_rows_of_a_quick_run(capsys):
    bench = load_benchmark("env")
    words = ["--num-envs", "2", "--workers", "2", "--rounds", "1", "--seconds", "0.02"]
    rows = bench.run(["--tasks", "dummy/discrete", "no_such_suite/x", *words])
    values = {row["name"].removeprefix("env/dummy/discrete/"): row["value"] for row in rows}
    assert set(values) == {
        "1_worker_steps_per_s",
        "2_workers_steps_per_s",
        "chosen_steps_per_s",
        "gymnasium_steps_per_s",
        "chosen_workers",
        "chosen_over_gymnasium",
        "bytes_copied_per_step",
    }
    assert all(value > 0 for name, value in values.items() if name != "chosen_workers")
    assert values["bytes_copied_per_step"] == 4 * 4 + 8 + 4 + 2
    assert "no_such_suite/x: not measured: no suite 'no_such_suite'" in capsys.readouterr().out


def test_bytes_are_those_of_the_arrays():
    bench = load_benchmark("env")
    spec = Spec("x", {"image": ArraySpec((3, 64, 64), "uint8")}, ActionSpec("continuous", (2,)))
    assert bench.bytes_per_step(spec) == 3 * 64 * 64 + 2 * 4 + 6
