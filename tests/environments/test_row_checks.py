"""Unusable rows and sys.exit() are faults of an environment; unusable values are never returned."""

import sys

import numpy as np
import pytest
from gymnasium import spaces

from rl_lab.environments import make_env
from rl_lab.environments.env_runner import EnvRunner, StepArrays
from rl_lab.environments.make import env_factory
from rl_lab.environments.spec import (
    UnusableRow,
    finite_number,
    flag,
    integer_array,
    observation_leaves,
    shaped_array,
    spec_of,
)
from rl_lab.environments.wrappers import ActionRepeat
from rl_lab.errors import ConfigError, EnvironmentFaultError, LabError
from tests.environments import sample_envs

NUMBER = {name: index for index, name in enumerate(sample_envs.Spoils.TROUBLES)}
NOT_FINITE = "observation 'position' has NaN or infinity"
NOT_REAL = "observation 'position' has dtype {}, not bool, integer or float"
NOT_BYTES = "observation 'camera' has values outside 0 to 255"
NOT_NUMBER = "reward is {}, not a finite float32 value"
TEXTS = {
    "position nan": NOT_FINITE,
    "position infinite": NOT_FINITE,
    "position overflow": NOT_FINITE,
    "position object": NOT_REAL.format("object"),
    "position text": NOT_REAL.format("<U1"),
    "position complex": NOT_REAL.format("complex128"),
    "position turned": "observation 'position' has shape (2, 3), not (3, 2)",
    "position ragged": "observation 'position' cannot be read (ValueError: setting an array element",
    "position missing": "observation 'position' cannot be read (KeyError: 'position')",
    "camera 300": NOT_BYTES,
    "camera nan": NOT_BYTES,
    "camera fractions": "observation 'camera' has fractions, but its space has dtype uint8",
    "reward nan": NOT_NUMBER.format("nan"),
    "reward infinite": NOT_NUMBER.format("-inf"),
    "reward overflow": NOT_NUMBER.format("1e+300"),
    "reward None": NOT_NUMBER.format("None"),
    "reward text": NOT_NUMBER.format("'1'"),
    "reward object": NOT_NUMBER.format("array(None, dtype=object)"),
    "terminated text": "terminated is 'no', not true or false",
    "terminated nan": "terminated is nan, not true or false",
    "terminated array": "terminated is array([False, False]), not true or false",
    "truncated list": "truncated is [], not true or false",
    "info None": "info is a NoneType, not a dict",
    "info text": "info['log/odd'] is 'many', not a number",
    "values four": "step() returned 4 values, not (obs, reward, terminated, truncated, info)",
    "values none": "step() returned a NoneType, not (obs, reward, terminated, truncated, info)",
}
quiet_casts = pytest.mark.filterwarnings("ignore:overflow encountered in cast")


def spoils(num_envs=2, **options):
    env = make_env(sample_envs.Spoils, num_envs, seed=4, **{"restarts": {"limit": None}} | options)
    env.said = []
    env.listen(env.said.append)
    return env


def act(env, *troubles):
    """Step once; return the row and the infos."""
    obs, reward, terminated, truncated, infos = env.step(np.array([NUMBER[name] for name in troubles]))
    return {**obs, "reward": reward, "terminated": terminated, "truncated": truncated}, infos


@quiet_casts
@pytest.mark.parametrize("workers", [0, 1])
def test_unusable_row_restarts_and_is_not_returned(workers):
    with spoils(workers=workers, normalize_observations=True) as env:
        env.reset()
        counted = 2
        for trouble, text in TEXTS.items():
            for _ in range(2):
                before, _ = act(env, "fine", "fine")
            row, infos = act(env, "fine", trouble)
            assert set(infos["closed"]) == {1} and row["truncated"][1] and not row["terminated"][1]
            assert row["reward"][1] == 0.0
            for buffer in env.pool.arrays.buffers:
                assert np.isfinite(buffer["position"]).all() and (buffer["camera"] == 7).all()
                assert (buffer["position"][1] == 2).any()  # its last observation
            wanted = f"environment 1 returned an unusable row: {text}"
            assert env.said[-1].startswith(wanted) and " at step 3 of the episode: restarted" in env.said[-1]
            assert np.isfinite(row["position"]).all() and np.isfinite(before["reward"]).all()
            first, infos = act(env, "fine", "fine")
            assert env.is_first[1] and not first["truncated"][1] and "closed" not in infos
            counted += 2 + 2 + 1 + 2  # the lost row is not counted
        assert env.restarts == len(TEXTS) and env.normalizer.count == counted
        for name in env.normalizer.mean:
            assert np.isfinite(env.normalizer.mean[name]).all() and env.normalizer.variance(name).max() < 100


@pytest.mark.parametrize("workers", [0, 1])
def test_unusable_reset_tries_next_seed(workers):
    with spoils(workers=workers, bad_reset="nan") as env:
        env.reset()
        rows = [act(env, "fine", "fine")[0] for _ in range(60)]
        assert all(np.isfinite(row["position"]).all() for row in rows)
        assert env.restarts > 2 and env.restarts == len(env.said)
        for line in env.said:
            assert (
                f"returned an unusable row: {NOT_FINITE} at the reset of the episode: it tries a new seed"
                in line
            )


def test_unusable_first_reset_raises(monkeypatch):
    monkeypatch.setattr(sample_envs.Spoils, "observe", lambda env: {"position": env.POSITIONS["nan"]})
    with pytest.raises(LabError, match=f"^environment 0 returned an unusable row: {NOT_FINITE} at the reset"):
        make_env(sample_envs.Spoils, 1, workers=0, observations=["position"]).reset()


def test_too_many_unusable_rows_stop_run():
    with spoils(workers=0, restarts={"limit": 1}) as env:
        env.reset()
        for _ in range(3):  # a fault, the reset after it, a fault
            act(env, "reward nan", "fine")
        with pytest.raises(
            EnvironmentFaultError, match=r"reward is nan.* at step 1 of the .* after 1 restarts"
        ):
            act(env, "fine", "fine")


def test_unusable_row_is_not_written():
    factory = env_factory(sample_envs.Spoils)
    arrays = StepArrays(spec_of(factory(), "spoils"), 1)
    for trouble in TEXTS:
        runner = EnvRunner(factory, [0], arrays)
        assert runner.reset([0]) == {}
        arrays.obs["position"][0], arrays.obs["camera"][0], arrays.reward[0] = 5.0, 6, 7.0
        arrays.action[0] = NUMBER[trouble]
        with np.errstate(over="ignore"):
            assert list(runner.step()) == ["unusable"]
        assert (arrays.obs["position"] == 5).all() and (arrays.obs["camera"] == 6).all()
        assert arrays.reward[0] == 7 and not arrays.terminated[0] and runner.slots[0].env is None


@quiet_casts
@pytest.mark.parametrize("workers", [0, 1])
def test_resume_after_unusable_rows_is_exact(workers):
    plan = {1: ("position nan", "fine"), 3: ("fine", "reward None"), 4: ("camera 300", "fine")}
    with spoils(workers=workers) as env, spoils(workers=0) as other:
        env.reset(), other.reset()
        for stop in range(6):
            act(env, *plan.get(stop, ("fine", "fine")))
            assert other.set_state(env.get_state()) == []
            np.testing.assert_array_equal(other.last_obs["position"], env.last_obs["position"])
        assert other.restarts == env.restarts == 3


def test_non_finite_log_value_is_ignored():
    with spoils(num_envs=1, workers=0) as env:
        env.reset()
        for step in range(9):
            _, infos = act(env, "log nan" if step in (2, 5) else "fine")
        assert infos["log"][0] == {"log/good": 18.0, "log/odd": 7.0} and env.restarts == 0
    with spoils(num_envs=1, workers=0, action_repeat=3) as env:
        env.reset()
        for trouble in ("log nan", "fine", "fine"):
            _, infos = act(env, trouble)
        assert infos["log"][0] == {"log/good": 18.0, "log/odd": 6.0}


def test_wrapper_does_not_hide_infinite_reward():
    for options in (
        {"wrappers": {"reward_clip": 1.0}},
        {"wrappers": {"reward_sign": True}},
        {"action_repeat": 2},
    ):
        for trouble in ("reward infinite", "reward None", "reward text", "terminated array", "values four"):
            with spoils(num_envs=1, workers=0, **options) as env:
                env.reset()
                _, infos = act(env, trouble)
                assert TEXTS[trouble] in infos["closed"][0]


def test_accepted_rewards_flags_and_arrays():
    for value in (1, 1.0, True, np.float16(1), np.float64(1), np.array(1), np.array([1.0], np.float32)):
        assert finite_number("reward", value) == 1.0 and type(finite_number("reward", value)) is float
    for value in (
        None,
        "1",
        1j,
        np.complex64(1),
        10**400,
        np.float16("inf"),
        np.zeros(2),
        np.array("1"),
        [],
        {},
    ):
        with pytest.raises(UnusableRow, match=r"^reward is "):
            finite_number("reward", value)
    assert flag("truncated", np.bool_(True)) and flag("truncated", 1) and not flag("truncated", None)
    for shape in ((3, 1, 2), (1, 3, 2)):  # axes of length 1 do not change the order
        assert shaped_array("x", np.zeros(shape), (3, 2)).size == 6
    with pytest.raises(UnusableRow, match=r"'x' has shape \(6,\), not \(3, 2\)"):
        shaped_array("x", np.zeros(6), (3, 2))
    assert integer_array("x", np.array([0, 255]), np.uint8).tolist() == [0, 255]
    assert integer_array("x", np.array([0.0, 255.0]), np.uint8).tolist() == [0, 255]
    for value in (256, -1, np.inf):
        with pytest.raises(UnusableRow, match="outside 0 to 255"):
            integer_array("x", np.array([value]), np.uint8)


@pytest.mark.parametrize(
    "value, text",
    [
        (-1, r"is \[-1\], not in 0 to 2"),  # NumPy's last column
        (3, r"is \[3\], not in 0 to 2"),
        (0.5, "has fractions"),
        (float("nan"), "has values outside"),
        ("1", "has dtype <U1"),
        ([0, 1], "has 2 integers, not 1"),
    ],
)
def test_unusable_discrete_observation(value, text):
    (leaf,) = observation_leaves(spaces.Discrete(3))
    assert leaf.convert(np.int64(2)).tolist() == [0, 0, 1]
    with pytest.raises(UnusableRow, match=rf"^observation 'vector' {text}"):
        leaf.convert(value)


def test_unusable_multi_discrete_observation_is_not_written_to_the_next_variable():
    (leaf,) = observation_leaves(spaces.MultiDiscrete([2, 3], start=[1, 0]))
    assert leaf.convert([2, 0]).tolist() == [0, 1, 1, 0, 0]
    for value in ([3, 0], [0, 0], [1, 3]):
        with pytest.raises(UnusableRow, match=r"not in 1 to 2, 0 to 2$"):
            leaf.convert(value)


def test_reset_of_the_old_gym_interface_is_named():
    class Old(sample_envs.Base):
        def reset(self, *, seed=None, options=None):
            return super().reset(seed=seed)[0]  # without info

    with pytest.raises(LabError, match=r"^environment 0 returned an unusable row: reset\(\) returned a nd"):
        make_env(Old, 1, workers=0).reset()


@quiet_casts
def test_large_values_are_finite():
    class Large(sample_envs.Base):
        def observe(self):
            return np.full(1, 3e38)  # its square is not finite in float32

    with make_env(Large, 1, workers=0, normalize_observations=True, normalize_clip=None) as env:
        env.reset()
        obs = env.step(np.zeros(1, np.int64))[0]
        assert env.restarts == 0 and np.isfinite(obs["vector"]).all()
        env.normalizer.set_state({"count": 9, "mean": {"vector": [0.0]}, "squares": {"vector": [0.0]}})
        assert env.normalizer({"vector": np.full((1, 1), 3e38, np.float32)})["vector"] > 3e38


@pytest.mark.parametrize("workers", [0, 1])
def test_sys_exit_in_step_restarts_environment(workers):
    with spoils(workers=workers) as env:
        env.reset()
        pids = env.worker_pids()
        _, infos = act(env, "fine", "exit")
        assert infos["closed"] == {1: "raised SystemExit: 0"} and env.worker_pids() == pids
        act(env, "fine", "fine")
        assert env.is_first.tolist() == [False, True] and env.restarts == 1
        assert env.said[0].startswith("environment 1 raised SystemExit: 0: restarted with a new seed")


@pytest.mark.parametrize("workers", [0, 1])
def test_sys_exit_in_constructor_or_render_raises(workers, monkeypatch):
    monkeypatch.setattr(sample_envs.Exits, "made", 0 if workers else -1)
    with pytest.raises(LabError, match=r"^environment 1 raised: SystemExit: 3"):
        make_env(
            sample_envs.Exits, 2, workers=workers, where="make"
        )  # 0 is made, after the probe, in its process
    with make_env(sample_envs.Exits, 1, workers=workers, where="render", render=True) as env:
        env.reset()
        with pytest.raises(LabError, match=r"^environment 0 raised: SystemExit"):
            env.render()


def test_sys_exit_in_probe_or_module_raises(monkeypatch, tmp_path):
    monkeypatch.setattr(sample_envs.Exits, "made", 5)
    with pytest.raises(LabError, match=r"^Exits called sys\.exit\(3\) in its constructor"):
        make_env(sample_envs.Exits, 1, where="make")
    (tmp_path / "leaves_at_once.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"'leaves_at_once' calls sys\.exit\(0\) when it is imported"):
        make_env("leaves_at_once:Env", 1)
    assert "leaves_at_once" not in sys.modules


def test_failure_in_close_is_a_warning():
    env = make_env(sample_envs.Exits, 2, workers=0, where="close")
    env.reset()
    env.step(np.zeros(2, np.int64))
    with pytest.warns(UserWarning, match=r"raised SystemExit: 1 in close\(\)") as caught:
        env.close()
    assert [str(each.message)[:13] for each in caught] == ["environment 0", "environment 1"]


def test_all_exceptions_except_interrupt_are_faults():
    class Panic(BaseException):
        """As extension modules written in Rust raise."""

    class Breaks(sample_envs.Base):
        def step(self, action):
            self.close = sys.exit  # it cannot be closed either
            raise (Panic("index out of bounds"), KeyboardInterrupt)[action]

    closing = pytest.warns(UserWarning, match=r"environment 0 raised SystemExit in close\(\)")
    with closing, make_env(Breaks, 1, workers=0) as env:
        env.listen([].append)
        env.reset()
        infos = env.step(np.zeros(1, np.int64))[-1]
        assert infos["closed"][0].endswith("Panic: index out of bounds")
        env.step(np.zeros(1, np.int64))
        with pytest.raises(KeyboardInterrupt):
            env.step(np.ones(1, np.int64))


def test_action_repeat_names_the_reward():
    env = ActionRepeat(sample_envs.Spoils(), 2)
    env.reset(seed=0)
    with pytest.raises(UnusableRow, match=r"^reward is nan"):
        env.step(NUMBER["reward nan"])
