"""On a GPU: captured updates and captured plans of imitation learning give the eager numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rl_lab.buffers.batches import BatchStream
from rl_lab.orchestration.collector import ActRunner
from rl_lab.orchestration.updates import HookRunner
from rl_lab.records import ActMode
from tests.gpu.gpu_case import LOGGER, assert_same_losses, losses
from tests.workflows.imitation_case import PIXELS, demonstrations, measured
from tests.workflows.imitation_case import built as small

pytestmark = pytest.mark.gpu

PHASES = (
    "training.phases=[{name: data, duration_steps: 300, workflow_hooks: [{collect: {policy: expert}}]},"
    " {name: measure, type: offline, workflow_hooks: [measure]},"
    " {name: learn, type: offline, duration_updates: 8, workflow_hooks: [update]}]"
)
EXACT = ["experiment.device=cuda", "training.precision=float32", "training.evaluate.every_updates=null"]


@pytest.fixture(autouse=True)
def exact_float32():
    before = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def built(algorithm: str, *words: str):
    from rl_lab.build import build_run
    from rl_lab.config.compose import compose_config, resolve_config
    from rl_lab.run_environments import environment_spec

    pytest.importorskip("Box2D", reason="extra: box2d")
    config = compose_config(
        [
            f"experiment={algorithm}_lunarlander",
            "debug=tiny",
            "training.total_timesteps=1000",
            PHASES,
            *EXACT,
            *words,
        ]
    )
    spec = environment_spec(config)
    return build_run(resolve_config(config, spec), spec, logger=LOGGER, checkpoints=None)


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ("diffusion_policy", ()),
        ("diffusion_policy", ("algorithm=diffusion_policy_transformer",)),
        ("behaviour_cloning", ()),
        ("behaviour_cloning", ("controller@controllers.policy=mixture_policy",)),
    ],
    ids=["unet", "transformer", "mlp", "mixture"],
)
def test_captured_updates_give_the_eager_numbers(algorithm: str, words: tuple[str, ...]):
    eager = losses(built(algorithm, *words, "training.capture=false"))
    run = built(algorithm, *words, "training.capture=true")
    captured = losses(run)
    assert run.orchestrator.runners["update"].capture.captured
    assert_same_losses(eager, captured)


@pytest.mark.parametrize("algorithm", ["diffusion_policy", "behaviour_cloning"])
def test_captured_updates_from_pixels_give_the_eager_numbers(algorithm: str):
    """Each image is cropped at a random place."""
    buffer, found = demonstrations(PIXELS, episodes=4, device="cuda"), []
    device = torch.device("cuda")
    for capture in (False, True):
        workflow = measured(small(algorithm, PIXELS, "training.precision=float32", device="cuda"), buffer)
        hook = workflow.hooks()["update"]
        generator = torch.Generator(device).manual_seed(0)
        runner = HookRunner("update", hook, device=device, generator=generator, capture=capture)
        stream = BatchStream(buffer, hook.batch, torch.Generator().manual_seed(0), device=device)
        found.append([])
        for _ in range(8):
            runner.run(stream, {"progress": 0.0}, {"updates": 0}, key=None)
            found[-1].append(runner.meter.drain())
    assert runner.capture.captured
    assert_same_losses(*found)


@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
def test_captured_plans_give_the_eager_actions(sampler: str):
    """Two dozen steps of three environments, one of which starts again: every variant of act is captured."""
    run = built("diffusion_policy", f"algorithm.sampler={sampler}", "algorithm.sampling_steps=4")
    losses(run)
    workflow, device = run.workflow, torch.device("cuda")
    acted = []
    for capture in (False, True):
        runner = ActRunner(workflow, device=device, capture=capture)
        mode = ActMode(generator=torch.Generator(device).manual_seed(0))
        rng, state, actions = np.random.default_rng(0), None, []
        for step in range(80):
            first = np.array([step == 0, step in (0, 3, 30, 50, 60), step == 0])
            obs = {"vector": rng.standard_normal((3, 8)).astype(np.float32)}
            action, state, _, _ = runner(obs, state, first, mode)
            actions.append(action)
        acted.append(np.stack(actions))
        if capture:
            assert {0, 1} <= {key[-1] for key in runner._graphs}  # nobody plans, one does
    np.testing.assert_allclose(acted[0], acted[1], rtol=1e-4, atol=1e-5)
