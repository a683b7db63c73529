import numpy as np
import pytest
from gymnasium import spaces

from rl_lab.environments.spec import action_mapping, action_space, observation_leaves, observation_space
from rl_lab.errors import ConfigError
from rl_lab.records import ArraySpec


def image(*shape):
    return spaces.Box(0, 255, shape, np.uint8)


@pytest.mark.parametrize(
    ("space", "name", "shape", "dtype"),
    [
        (spaces.Box(-1, 1, (4,), np.float64), "vector", (4,), "float32"),
        (spaces.Box(-1, 1, (), np.float32), "vector", (1,), "float32"),
        (spaces.Box(-1, 1, (3, 5), np.float32), "array", (3, 5), "float32"),
        (spaces.Box(0, 9, (7,), np.int64), "vector", (7,), "float32"),
        (spaces.Box(0, 255, (128,), np.uint8), "vector", (128,), "float32"),
        (image(20, 30), "image", (1, 20, 30), "uint8"),
        (image(20, 30, 3), "image", (3, 20, 30), "uint8"),
        (image(4, 20, 30), "image", (4, 20, 30), "uint8"),
        (image(4, 20, 30, 3), "image", (12, 20, 30), "uint8"),
        (spaces.Discrete(5, start=2), "vector", (5,), "float32"),
        (spaces.MultiDiscrete([2, 3]), "vector", (5,), "float32"),
        (spaces.MultiBinary(6), "vector", (6,), "float32"),
    ],
)
def test_observation_leaf(space, name, shape, dtype):
    (leaf,) = observation_leaves(space)
    assert (leaf.name, leaf.spec) == (name, ArraySpec(shape, dtype))
    value = leaf.convert(space.sample())
    assert value.shape == shape and value.dtype == dtype and value.flags.c_contiguous
    assert observation_space({name: leaf.spec}).contains({name: value})


def test_channels_are_moved_first():
    (leaf,) = observation_leaves(image(5, 6, 3))
    picture = np.arange(90, dtype=np.uint8).reshape(5, 6, 3)
    np.testing.assert_array_equal(leaf.convert(picture)[2], picture[:, :, 2])
    (leaf,) = observation_leaves(image(2, 5, 6, 3))
    stack = np.stack([picture, picture + 90])
    np.testing.assert_array_equal(leaf.convert(stack)[3 + 1], stack[1, :, :, 1])


def test_one_hot_uses_space_start():
    (leaf,) = observation_leaves(spaces.Discrete(4, start=10))
    np.testing.assert_array_equal(leaf.convert(12), [0, 0, 1, 0])
    (leaf,) = observation_leaves(spaces.MultiDiscrete([2, 3], start=[1, 0]))
    np.testing.assert_array_equal(leaf.convert(np.array([2, 1])), [0, 1, 0, 1, 0])


def test_nested_keys_are_joined_and_selected():
    space = spaces.Dict(
        {"a": spaces.Dict({"b": spaces.Discrete(2)}), "t": spaces.Tuple([image(8, 8), spaces.Text(4)])}
    )
    leaves = observation_leaves(space, keep=["a_b", "t_0"])
    assert [(leaf.name, leaf.path) for leaf in leaves] == [("a_b", ("a", "b")), ("t_0", ("t", 0))]
    with pytest.raises(ConfigError, match=r"'t_1' is a Text space.*environment\.observations"):
        observation_leaves(space)
    with pytest.raises(ConfigError, match=r"no observation is called 'a_c'.*a_b"):
        observation_leaves(space, keep=["a_c"])
    with pytest.raises(ConfigError, match=r"observations \['a_b'\] would have the same name"):
        observation_leaves(
            spaces.Dict({"a": spaces.Dict({"b": spaces.Discrete(2)}), "a_b": spaces.Discrete(2)})
        )
    with pytest.raises(ConfigError, match="2, 3 or 4"):
        observation_leaves(image(2, 2, 8, 8, 3))


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3, start=-1),
        spaces.MultiDiscrete([[3, 2], [4, 5]]),
        spaces.MultiBinary((2, 2)),
        spaces.Box(np.array([[-3.0, 0.1]]), np.array([[1.0, 0.7]]), dtype=np.float64),
        spaces.Box(0, 10, (3,), np.int64),
        spaces.Box(np.array([0.0, -np.inf]), np.array([np.inf, np.inf]), dtype=np.float32),
    ],
)
def test_converted_actions_are_in_space(space):
    spec, to_environment = action_mapping(space)
    ours = action_space(spec)
    ours.seed(0)
    extremes = (
        [np.full(spec.shape, sign, np.float32) for sign in (-1, 1)] if spec.kind == "continuous" else []
    )
    for action in [*extremes, *(ours.sample() for _ in range(50))]:
        assert space.contains(to_environment(action)), (action, to_environment(action))


def test_discrete_and_continuous_mappings():
    spec, to_environment = action_mapping(spaces.Discrete(3, start=-1))
    assert (
        spec.kind == "discrete"
        and spec.choices == (3,)
        and [to_environment(i) for i in range(3)] == [-1, 0, 1]
    )
    spec, to_environment = action_mapping(
        spaces.Box(np.array([-2.0, 0.0]), np.array([2.0, 10.0]), dtype=np.float32)
    )
    assert spec.low == (-2.0, 0.0) and spec.high == (2.0, 10.0)
    np.testing.assert_allclose(to_environment(np.array([0.5, -3.0])), [1.0, 0.0])  # beyond -1 is -1
    spec, to_environment = action_mapping(spaces.Box(-np.inf, np.inf, (1,), np.float32))
    assert (spec.low, spec.high) == ((-1.0,), (1.0,)) and to_environment(np.array([0.25]))[0] == 0.25
    spec, _ = action_mapping(spaces.MultiBinary(3))
    assert spec.kind == "multi_discrete" and spec.choices == (2, 2, 2)
    with pytest.raises(ConfigError, match="Text space are not supported"):
        action_mapping(spaces.Text(3))
