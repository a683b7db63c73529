"""On a CPU: steps that CUDA records as a graph neither read tensors on the host nor make them from its numbers.

A recorded graph cannot do either, so that a step which does fails on a GPU, in its fourth call.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from rl_lab.buffers.batches import BatchStream
from rl_lab.components.nn.optim import FusedUpdate
from rl_lab.orchestration.updates import EAGER_CALLS, Capture, HookRunner
from rl_lab.records import ActMode
from tests.gpu import test_dreamer_versions as versions
from tests.gpu import test_workflows as workflows
from tests.gpu.gpu_case import built, losses
from tests.workflows.imitation_case import PIXELS, VECTOR, demonstrations, measured, observations
from tests.workflows.imitation_case import built as built_imitation

FROM_HOST = {torch.tensor: "torch.tensor", torch.from_numpy: "torch.from_numpy"}
TO_HOST = {
    getattr(torch.Tensor, name): f"Tensor.{name}"
    for name in ("item", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
} | {torch.nonzero: "torch.nonzero", torch.masked_select: "torch.masked_select"}
# PyTorch's Adam counts on the host on a CPU, on the device (`capturable`) where it is captured.
ALLOWED = "optimizer.step()"

UPDATES = [
    pytest.param(words, hook, id=f"{name}-{hook}")
    for name, (words, hooks) in workflows.CASES.items()
    for hook in hooks
] + [pytest.param(versions.CASES[name], hook, id=f"{name}-{hook}") for name, hook in versions.HOOKS]


class HostReads(TorchFunctionMode):
    """Collects lines of rl_lab that read from the device or copy to it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = FROM_HOST.get(func) or TO_HOST.get(func)
        if func is torch.as_tensor and not isinstance(args[0], torch.Tensor):
            name = "torch.as_tensor"
        if func is torch.Tensor.__getitem__ and getattr(args[1], "dtype", None) == torch.bool:
            name = "an index of bools"
        if name:
            lines = [line for line in traceback.extract_stack() if "/rl_lab/" in line.filename]
            if lines and lines[-1].line != ALLOWED:
                place = lines[-1]
                self.found.add(f"{place.filename}:{place.lineno} {name}: {place.line}")
        return func(*args, **(kwargs or {}))


@contextmanager
def host_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostReads]:
    """Check what `Capture` would record: each call after the eager ones."""
    mode, calls = HostReads(), Counter[int]()

    def call(self: Capture, *arguments: Any, key: Any = None) -> Any:
        calls[id(self)] += 1
        if calls[id(self)] <= EAGER_CALLS:
            return self.function(*arguments)
        with mode:
            return self.function(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Capture, "__call__", call)
        yield mode
    assert not calls or max(calls.values()) > EAGER_CALLS


@pytest.mark.parametrize(("words", "hook"), UPDATES)
def test_updates(words: list[str], hook: str, monkeypatch: pytest.MonkeyPatch):
    with host_reads(monkeypatch) as reads:
        losses(built(*words, "experiment.device=cpu", "training.precision=float32", hook=hook), hook)
    assert not reads.found


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
    run.workflow.act = checked(run.workflow.act, reads)
    for _ in range(EAGER_CALLS + 2):
        run.workflow.collect_step(0, phase={})
    run.close()
    assert not reads.found


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
    act, state = checked(workflow.act, reads), workflow.initial_policy_state(3)
    for _ in range(EAGER_CALLS + 2):
        first = torch.ones(3, dtype=torch.bool)
        # As in ActRunner: the variant is read before.
        mode = ActMode(generator=torch.Generator(), variant=workflow.act_variant(state, first))
        _, state, _ = act(observations(spec, 3), state, first, mode)
    assert not reads.found


def checked(function: Callable[..., Any], reads: HostReads) -> Callable[..., Any]:
    """The function, with `reads` around the calls after the eager ones."""
    calls = Counter[str]()

    def call(*arguments: Any, **named: Any) -> Any:
        calls["all"] += 1
        if calls["all"] <= EAGER_CALLS:
            return function(*arguments, **named)
        with reads:
            return function(*arguments, **named)

    return call


def test_what_cannot_be_recorded_is_found():
    values = torch.arange(3.0)
    reads = HostReads()
    with reads:
        assert values[values > 1].sum() == 2  # a line of this file is not one of rl_lab's
        parameter = torch.nn.Parameter(torch.ones(2))
        FusedUpdate([parameter], [torch.zeros(2)], [torch.zeros(2)])  # uploads addresses
    assert len(reads.found) == 3 and all("torch.tensor" in line for line in reads.found)
