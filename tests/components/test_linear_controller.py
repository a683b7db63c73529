import pytest
import torch

from rl_lab.components.controllers.cma_es import CMAES
from rl_lab.components.controllers.linear_controller import LinearController
from rl_lab.components.controllers.random_policy import Explorer
from rl_lab.errors import ConfigError
from rl_lab.records import ActionSpec, ArraySpec, Spec

CAR = ActionSpec("continuous", (3,), low=(-1.0, 0.0, 0.0), high=(1.0, 1.0, 1.0))
DISCRETE = ActionSpec("discrete", (), (3,))
MULTI = ActionSpec("multi_discrete", (2,), (2, 3))


def spec(action: ActionSpec) -> Spec:
    return Spec("x", {"image": ArraySpec((3, 64, 64), "uint8")}, action)


def make(action: ActionSpec, features: int = 4, **options) -> LinearController:
    return LinearController(spec=spec(action), features=features, **options)


@pytest.mark.parametrize(
    ("features", "hidden", "parameters"), [(32 + 256, 0, 867), (32, 0, 99), (32, 40, 1443)]
)
def test_controller_parameter_count(features, hidden, parameters):
    """hardmaru/WorldModelsExperiments carracing/model.py: z and h, z alone, z with 40 hidden units."""
    controller = make(CAR, features, hidden=hidden)
    assert sum(p.numel() for p in controller.parameters()) == controller.num_parameters == parameters


def test_rectified_brake():
    controller = make(CAR, rectified=[2])
    raw = torch.tensor([[0.0, 0.0, 0.0], [20.0, -20.0, -20.0], [-20.0, 20.0, 20.0], [0.0, 0.0, 0.5]])
    action = controller.to_action(raw)
    expected = torch.tensor([[0.0, 0.0, -1.0], [1.0, -1.0, -1.0], [-1.0, 1.0, 1.0], [0.0, 0.0, -0.0758]])
    torch.testing.assert_close(action, expected, atol=1e-3, rtol=0)
    assert torch.equal(
        controller.act(torch.randn(2, 4))[0], expected[0]
    )  # evolution starts with the neutral action


@pytest.mark.parametrize("action", [CAR, DISCRETE, MULTI], ids=lambda a: a.kind)
@pytest.mark.parametrize("hidden", [0, 6])
def test_population_matches_members(action, hidden):
    controller = make(action, hidden=hidden)
    candidates = torch.randn(5, controller.num_parameters)
    features = torch.randn(5, 7, 4)
    together = controller.act_population(candidates, features)
    single = controller.act_population(candidates, features[:, 0])
    assert together.shape == (5, 7, *action.shape) and together.dtype == getattr(torch, action.dtype)
    for index, candidate in enumerate(candidates):
        controller.set_vector(candidate)
        assert torch.equal(controller.get_vector(), candidate)
        alone = controller.act(features[index])
        torch.testing.assert_close(together[index], alone)
        torch.testing.assert_close(single[index], alone[0])


def test_hidden_layer_by_hand():
    controller = make(CAR, 2, hidden=2)
    first, bias = torch.tensor([[1.0, -2.0], [0.5, 0.0]]), torch.tensor([0.1, -0.3])
    second, shift = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, -1.0]]), torch.tensor([0.0, 0.2, 0.0])
    controller.set_vector(torch.cat([first.flatten(), bias, second.flatten(), shift]))
    x = torch.tensor([[0.3, -0.7], [2.0, 1.0]])
    units = torch.tanh(x @ first.t() + bias)
    torch.testing.assert_close(controller.act(x), torch.tanh(units @ second.t() + shift))


def test_cma_es_improves_hidden_layer():
    """Evolution of the parameter vector: match the actions of another controller."""
    generator = torch.Generator().manual_seed(0)
    controller, teacher = make(CAR, 3, hidden=4), make(CAR, 3, hidden=4)
    teacher.set_vector(torch.randn(teacher.num_parameters, generator=generator))
    x = torch.randn(64, 3, generator=generator)
    target = teacher.act(x)
    strategy = CMAES(population=16, sigma=0.5)
    strategy.start(controller.get_vector(), 0)

    def error(candidates):
        actions = controller.act_population(candidates, x.expand(len(candidates), -1, -1))
        return (actions - target).square().mean((1, 2))

    first = error(controller.get_vector()[None]).item()
    for _ in range(60):
        strategy.tell(-error(strategy.ask().float()))
    controller.set_vector(strategy.mean)
    assert error(controller.get_vector()[None]).item() < 0.3 * first


def test_invalid_hidden():
    with pytest.raises(ConfigError, match="hidden is -1"):
        make(CAR, hidden=-1)


def test_invalid_rectified():
    with pytest.raises(ConfigError, match="continuous"):
        make(DISCRETE, rectified=[0])
    with pytest.raises(ConfigError, match="3 of kind"):
        make(CAR, rectified=[3])


# ---------------------------------------------------------------- exploration


@pytest.mark.parametrize("action", [CAR, DISCRETE, MULTI], ids=lambda a: a.kind)
@pytest.mark.parametrize("kind", ["uniform", "held", "brownian"])
def test_explorers(action, kind):
    if kind == "brownian" and action is not CAR:
        with pytest.raises(ConfigError, match="held"):
            Explorer(spec=spec(action), kind=kind)
        return
    explorer = Explorer(spec=spec(action), kind=kind, hold=4)
    state, generator = explorer.initial_state(64), torch.Generator().manual_seed(0)
    actions = []
    for step in range(60):
        chosen, state = explorer.act(state, torch.full((64,), step == 0), generator)
        actions.append(chosen.double().view(64, -1))
    history = torch.stack(actions)  # (T, N, …)
    limits = [1.0] * 3 if action is CAR else [n - 1 for n in action.choices]
    assert (history.abs() <= torch.tensor(limits)).all() and (action is CAR or history.min() >= 0)
    same = (history[1:] == history[:-1]).all(-1).double().mean().item()
    step_size = (history[1:] - history[:-1]).abs().mean().item()
    if kind == "held":
        chance = {3: 1 / 3, 2: 1 / 6}.get(len(action.choices) and (3 if action is DISCRETE else 2), 0.0)
        assert same == pytest.approx(
            0.6 + 0.4 * chance, abs=0.05
        )  # repeated for 1 to 4 steps, 2.5 on average
    elif kind == "brownian":
        assert 0.08 < step_size < 0.13 and history.abs().mean() > 0.3
    else:
        assert same < 0.4


def test_episode_start_resamples_action():
    explorer = Explorer(spec=spec(CAR), kind="brownian")
    generator = torch.Generator().manual_seed(0)
    _, state = explorer.act(explorer.initial_state(500), torch.ones(500, dtype=torch.bool), generator)
    first = torch.arange(500) % 2 == 0
    after, _ = explorer.act(state, first, generator)
    moved = (after - state["explored"]).abs().mean(-1)
    assert moved[first].mean() > 0.5 and moved[~first].mean() < 0.2
