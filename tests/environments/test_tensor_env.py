"""Environments of tensors: equal to Gymnasium's and to `dummy/catch`, ends and limits, state, errors, other simulators."""

import numpy as np
import pytest
import torch

from rl_lab.environments import env_config_options, make_env, probe_spec
from rl_lab.environments.simulators import CartPole, Catch
from rl_lab.environments.suites import dummy
from rl_lab.environments.tensor_env import FromVectorEnv, TensorVectorEnv, as_tensors
from rl_lab.errors import CheckpointError, ConfigError, LabError
from rl_lab.records import ActionSpec, ArraySpec

N = 1024


def batched(task, count=8, **options):
    return make_env(task, count, batched=True, seed=3, **options)


def test_cartpole_equals_gymnasiums_step_for_step():
    pytest.importorskip("pygame", reason="Gymnasium's classic control")
    import gymnasium

    ours = batched("tensor/cartpole", 16)
    theirs = [gymnasium.make("CartPole-v1") for _ in range(16)]
    rng = np.random.default_rng(0)
    obs, _ = ours.reset()
    ends = 0
    for env in theirs:
        env.reset(seed=0)
    first = np.ones(16, bool)
    for _ in range(600):
        for index in np.flatnonzero(first):  # the same start
            theirs[index].reset()
            theirs[index].unwrapped.state = ours.simulator.variables[index].numpy().copy()
        actions = rng.integers(0, 2, 16) if rng.random() < 0.5 else (obs["state"][:, 2] > 0).long().numpy()
        ended = ours.last_dones
        obs, reward, terminated, truncated, _ = ours.step(torch.as_tensor(actions))
        for index in np.flatnonzero(~ended):
            expected = theirs[index].step(int(actions[index]))
            np.testing.assert_allclose(obs["state"][index].numpy(), expected[0], rtol=1e-6, atol=1e-7)
            found = float(reward[index]), bool(terminated[index]), bool(truncated[index])
            assert found == tuple(expected[1:4])
        first = ended
        assert (ours.is_first.numpy() == ended).all() and (reward[ended] == 0).all()
        ends += int(ended.sum())
    assert ends > 50


def test_cartpole_is_truncated_after_500_steps():
    env = batched("tensor/cartpole", 2)
    env.reset()
    env.simulator.variables.zero_()
    for step in range(1, 501):
        state = env.last_obs["state"]
        action = (state[:, 2] + 0.5 * state[:, 3] + 0.1 * state[:, 1] > 0).long()  # balances
        _, _, terminated, truncated, _ = env.step(action)
        assert not terminated.any() and truncated.all() == (step == 500)
    short = batched("tensor/cartpole", 2, time_limit=3)
    short.reset()
    assert [bool(short.step(torch.zeros(2, dtype=torch.int64))[3].all()) for _ in range(3)] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(("cells", "side"), [(4, 16), (5, 64)])
def test_catch_equals_dummy_catch(cells, side):
    ours = batched("tensor/catch", 6, cells=cells, side=side, length=2)
    theirs = [dummy.Catch(cells=cells, side=side, length=2) for _ in range(6)]
    for env in theirs:
        env.reset(seed=0)
    obs, _ = ours.reset()
    rng = np.random.default_rng(1)
    for _ in range(4 * cells):
        ended = ours.last_dones
        for index, env in enumerate(theirs):
            env.row, env.column, env.paddle, env.fallen, following = ours.simulator.game[index].tolist()
            env._drop_ball = lambda env=env, column=following: env.__dict__.update(row=0, column=column)
            if not ended[index]:
                assert (obs["image"][index].numpy() == env.render().transpose(2, 0, 1)).all()
        actions = rng.integers(0, 3, 6)
        obs, reward, terminated, truncated, _ = ours.step(torch.as_tensor(actions))
        for index in np.flatnonzero(~ended):
            expected = theirs[index].step(int(actions[index]))
            assert (float(reward[index]), bool(terminated[index])) == expected[1:3]
        assert not truncated.any()


@pytest.mark.parametrize(("task", "options"), [("tensor/cartpole", {}), ("tensor/catch", {"side": 8})])
def test_state_continues_bit_for_bit(task, options):
    env, other = (batched(task, N, time_limit=30, **options) for _ in range(2))
    env.reset()
    actions = torch.randint(0, 2, (40, N), generator=torch.Generator().manual_seed(1))
    for action in actions[:25]:
        env.step(action)
    state = {key: value for key, value in env.get_state().items()}
    rows = [env.step(action) for action in actions[25:]]
    other.reset(seed=9)
    assert other.set_state(state) == []
    for action, (obs, *flags, _) in zip(actions[25:], rows, strict=True):
        again, *same, _ = other.step(action)
        assert all(torch.equal(obs[name], again[name]) for name in obs)
        assert all(torch.equal(one, two) for one, two in zip(flags, same, strict=True))
    with pytest.raises(CheckpointError, match=r"environment\.num_envs=8: the checkpoint has other"):
        small = batched(task, **options)
        small.set_state(state)


def test_seeds():
    env = batched("tensor/cartpole", 4)
    first = env.reset()[0]["state"].clone()
    assert torch.equal(env.reset(seed=3)[0]["state"], first)
    assert not torch.equal(env.reset()[0]["state"], first)
    assert not torch.equal(env.reset(seed=4)[0]["state"], first)


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (
            "dummy/catch",
            {},
            r"environment\.batched=true needs a suite with a simulator of tensors, and dummy/catch",
        ),
        ("tensor/catch", {"size": 32}, r"environment\.size does not work with environment\.batched=true"),
        ("tensor/cartpole", {"action_repeat": 2}, r"environment\.action_repeat does not work"),
        ("tensor/cartpole", {"wrappers": {"reward_scale": 2}}, r"environment\.wrappers does not work"),
        (
            "tensor/cartpole",
            {"normalize_observations": True},
            r"environment\.normalize_observations does not",
        ),
        ("tensor/cartpole", {"cells": 3}, r"tensor/cartpole does not accept one of \['cells'\]"),
    ],
)
def test_settings_that_do_not_fit(task, options, message):
    with pytest.raises(ConfigError, match=message):
        batched(task, **options)


def test_only_training_is_batched():
    node = {"task": "tensor/cartpole", "num_envs": 4, "batched": True, "eval": {"batched": True}}
    assert env_config_options(node) == env_config_options(node, evaluation=True)
    assert "batched" not in env_config_options(node)


def test_wrong_calls():
    env = batched("tensor/cartpole", 2)
    with pytest.raises(LabError, match=r"call reset\(\) before"):
        env.step(torch.zeros(2, dtype=torch.int64))
    env.reset()
    with pytest.raises(LabError, match=r"actions have shape \(3,\), not \(2,\)"):
        env.step(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(LabError, match=r"call step_async\(\) first"):
        env.step_wait()
    env.step_async(np.zeros(2, np.int64))  # an array is accepted
    with pytest.raises(LabError, match="a step is under way"):
        env.get_state()


def test_specs_agree():
    for task in ("tensor/cartpole", "tensor/catch"):
        assert batched(task).spec.row_columns() == probe_spec(task).row_columns()
    assert CartPole(2).action.size == 2 and Catch(2, side=16).observations["image"].shape == (3, 16, 16)


# --- Simulators with resets of their own ------------------------------------------------------------------


class SameStep:
    """Counts steps; an episode ends at 4, and `step` then returns the first observation of the next one."""

    def __init__(self, final="final_obs"):
        self.final, self.closed = final, False

    def reset(self, seed=None):
        self.count = torch.zeros(3, 1)
        self.actions = []
        return {"policy": self.count.clone()}, {}

    def step(self, action):
        self.actions.append(action.clone())
        self.count = self.count + 1
        ended = self.count[:, 0] == 4
        final = {"policy": self.count.clone()}
        self.count[ended] = 0
        late = torch.tensor([False, True, False])
        reward = torch.arange(3.0)
        return {"policy": self.count.clone()}, reward, ended & ~late, ended & late, {self.final: final}

    def close(self):
        self.closed = True


def from_vector_env(inner, **options):
    simulator = FromVectorEnv(
        inner,
        num_envs=3,
        device="cpu",
        observations={"policy": ArraySpec((1,), "float32")},
        action=ActionSpec("continuous", (2,), (), (-1.0, -1.0), (1.0, 1.0)),
        **options,
    )
    return TensorVectorEnv(simulator, name="counts")


def test_simulator_that_resets_by_itself():
    inner = SameStep()
    env = from_vector_env(inner)
    seen = [env.reset()[0]["policy"][:, 0].tolist()]
    ends = []
    for _ in range(9):
        obs, reward, terminated, truncated, _ = env.step(torch.ones(3, 2))
        seen.append(obs["policy"][:, 0].tolist())
        ends.append((terminated.tolist(), truncated.tolist(), env.is_first.tolist(), reward.tolist()))
    assert [row[0] for row in seen] == [0, 1, 2, 3, 4, 1, 2, 3, 4, 1]  # the state 0 is not seen after a reset
    yes, no = [True] * 3, [False] * 3
    assert ends[3] == ([True, False, True], [False, True, False], no, [0, 1, 2])
    assert ends[4] == (no, no, yes, [0, 0, 0])
    env.close()
    assert inner.closed
    with pytest.raises(LabError, match=r"the simulator's info has no 'final_obs': .*it has last"):
        env = from_vector_env(SameStep(final="last"))
        env.reset()
        env.step(torch.zeros(3, 2))


def test_arrays_of_other_libraries_are_not_copied():
    class Dlpack:  # as a JAX or Warp array
        def __init__(self, tensor):
            self.tensor = tensor

        def __dlpack__(self, **options):
            return self.tensor.__dlpack__()

        def __dlpack_device__(self):
            return self.tensor.__dlpack_device__()

    held = torch.zeros(5, 3)
    spec = {"state": ArraySpec((3,), "float32")}
    for value in (held, {"state": held}, Dlpack(held), held.numpy()):
        assert as_tensors(value, spec, torch.device("cpu"))["state"].data_ptr() == held.data_ptr()
    with pytest.raises(LabError, match="observation 'state' is missing: the simulator returned image"):
        as_tensors({"image": held}, spec, torch.device("cpu"))
    with pytest.raises(LabError, match=r"has shape \(3,\), not \(4,\)"):
        as_tensors(held, {"state": ArraySpec((4,), "float32")}, torch.device("cpu"))
