import torch
from omegaconf import OmegaConf

from rl_lab.build import instantiate
from rl_lab.config.checks import CONFIG_FOLDER
from rl_lab.records import ActMode
from rl_lab.workflows.context import ControllerManager, WorkflowContext, WorldModelComponents
from tests.workflows.dreamer_case import CONTINUOUS, vector_spec


def test_random_actions_and_no_hooks():
    spec = vector_spec(CONTINUOUS)
    policy = instantiate("policy", OmegaConf.load(CONFIG_FOLDER / "controller/random_policy.yaml"), spec=spec)
    workflow = instantiate("workflow", OmegaConf.load(CONFIG_FOLDER / "workflow/random.yaml"))
    context = WorkflowContext(
        config=OmegaConf.create({}),
        device=torch.device("cpu"),
        spec=spec,
        components=WorldModelComponents(),
        controller_manager=ControllerManager({"policy": policy}),
    )
    workflow.initialize(context)
    assert workflow.hooks() == {}
    obs = {"vector": torch.zeros(3, 4)}
    draws = []
    for _ in range(2):
        mode = ActMode(generator=torch.Generator().manual_seed(1))
        action, state, extras = workflow.act(obs, workflow.initial_policy_state(3), torch.ones(3), mode)
        assert (state, extras) == ({}, {})
        draws.append(action)
    assert draws[0].shape == (3, 2)
    assert torch.equal(*draws)
