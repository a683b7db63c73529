"""On a CPU: steps that CUDA records as a graph neither read tensors on the host nor make them from its numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_lab.buffers.batches import BatchStream
from rl_lab.components.nn.optim import FusedUpdate
from rl_lab.orchestration.updates import EAGER_CALLS, HookRunner
from rl_lab.records import ActMode
from tests.gpu import test_dreamer_versions as versions
from tests.gpu import test_workflows as workflows
from tests.gpu.gpu_case import built, losses
from tests.host_reads import HostReads, host_reads
from tests.workflows.imitation_case import PIXELS, VECTOR, demonstrations, measured, observations
from tests.workflows.imitation_case import built as built_imitation

UPDATES = [
    pytest.param(words, hook, id=f"{name}-{hook}")
    for name, (words, hooks) in workflows.CASES.items()
    for hook in hooks
] + [pytest.param(versions.CASES[name], hook, id=f"{name}-{hook}") for name, hook in versions.HOOKS]


@pytest.mark.parametrize(("words", "hook"), UPDATES)
def test_updates(words: list[str], hook: str, monkeypatch: pytest.MonkeyPatch):
    with host_reads(monkeypatch) as reads:
        losses(built(*words, "experiment.device=cpu", "training.precision=float32", hook=hook), hook)
    assert reads.calls >= 5 and not reads.found


ACTING = {
    "dreamer": ["experiment=dreamer_catch"],
    "dreamer_v1": versions.CASES["v1_images"],
    "tdmpc2": workflows.CASES["tdmpc2"][0],
    "tdmpc2_discrete": workflows.CASES["tdmpc2_discrete"][0],
    "iris": workflows.CASES["iris"][0],
    "delta_iris": workflows.CASES["delta_iris"][0],
}


@pytest.mark.parametrize("case", ACTING)
def test_acting(case: str):
    hook = "update_tokenizer" if "iris" in case else "update"
    run = built(*ACTING[case], "experiment.device=cpu", "training.precision=float32", hook=hook)
    reads = HostReads()
    run.workflow.act = reads.checked(run.workflow.act)
    for _ in range(EAGER_CALLS + 2):
        run.workflow.collect_step(0, phase={})
    run.close()
    assert reads.calls == 2 and not reads.found


@pytest.mark.parametrize("spec", [VECTOR, PIXELS], ids=["vector", "pixels"])
@pytest.mark.parametrize("algorithm", ["diffusion_policy", "behaviour_cloning"])
def test_imitation(algorithm: str, spec: Any, monkeypatch: pytest.MonkeyPatch):
    buffer = demonstrations(spec, episodes=4)
    workflow = measured(built_imitation(algorithm, spec, batch_size=4, updates=8), buffer)
    hook, device = workflow.hooks()["update"], torch.device("cpu")
    runner = HookRunner("update", hook, device=device, generator=torch.Generator())
    stream = BatchStream(buffer, hook.batch, torch.Generator(), device=device)
    with host_reads(monkeypatch) as reads:
        for _ in range(EAGER_CALLS + 1):
            runner.run(stream, {"progress": 0.0}, {"updates": 0}, key=None)
    act, state = reads.checked(workflow.act), workflow.initial_policy_state(3)
    for _ in range(EAGER_CALLS + 2):
        first = torch.ones(3, dtype=torch.bool)
        # As in ActRunner: the variant is read before.
        mode = ActMode(generator=torch.Generator(), variant=workflow.act_variant(state, first))
        _, state, _ = act(observations(spec, 3), state, first, mode)
    assert reads.calls == 3 and not reads.found


def test_what_cannot_be_recorded_is_found():
    values = torch.arange(3.0)
    reads = HostReads()
    with reads:
        assert values[values > 1].sum() == 2  # a line of this file is not one of rl_lab's
        parameter = torch.nn.Parameter(torch.ones(2))
        FusedUpdate([parameter], [torch.zeros(2)], [torch.zeros(2)])  # uploads addresses
    assert len(reads.found) == 3 and all("torch.tensor" in line for line in reads.found)
