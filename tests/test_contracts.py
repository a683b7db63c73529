"""Every part of the lab keeps its contract, and each check finds a part that does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rl_lab import contracts, protocols
from rl_lab.buffers.episodes import EpisodeBuffer
from rl_lab.buffers.prioritized import PrioritizedReplay
from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.components.dynamics.backbones import GRUBackbone
from rl_lab.components.nn.quantizers import FSQ, EMAQuantizer, VectorQuantizer
from rl_lab.components.nn.transformer import Transformer
from rl_lab.components.representation_learners.tokenizer import FrameTokenizer
from rl_lab.components.return_computers.discounted import DiscountedReturns
from rl_lab.components.return_computers.n_step import NStepReturns
from rl_lab.components.return_computers.td_lambda import TDLambdaReturns
from rl_lab.errors import ContractError
from rl_lab.protocols import Policy, Quantizer
from rl_lab.records import ArraySpec, BatchSpec, Spec
from rl_lab.workflows.dreamer.mpc import RSSMModel
from rl_lab.workflows.tdmpc.planning_model import LatentModel
from tests.components.test_mpc_planner import Integrator
from tests.components.test_tokenizers import SPEC as FRAMES
from tests.components.test_tokenizers import make as make_tokenizer
from tests.orchestration.test_hook_kinds import Climb
from tests.workflows import dreamer_case, iris_case, og_wm_case, tdmpc_case

PROTOCOLS = (
    "Policy", "WorldModel", "Buffer", "Sampler", "Tokenizer", "Quantizer", "SequenceBackbone", "ReturnComputer",
    "PlanningModel", "Evolvable",
)  # fmt: skip


def test_every_protocol_has_a_check():
    names = {"SequenceBackbone": "backbone"}
    for name in PROTOCOLS:
        words = "".join("_" + letter.lower() if letter.isupper() else letter for letter in name).lstrip("_")
        assert callable(getattr(contracts, f"check_{names.get(name, words)}"))
        assert contracts.members(getattr(protocols, name))


def test_missing_methods_are_named():
    with pytest.raises(
        ContractError, match=r"^list lacks act, initial_policy_state, which protocols\.Policy has"
    ):
        contracts.check_members([], Policy)
    assert contracts.members(Quantizer) == ["vocab", "dim", "noise_size", "__call__", "embed", "learn"]


# ---------------------------------------------------------------- workflows

WORKFLOWS: dict[str, Callable[[], Any]] = {
    "dreamer, vectors": lambda: dreamer_case.make_dreamer(dreamer_case.vector_spec(dreamer_case.CONTINUOUS)),
    "dreamer, images": lambda: dreamer_case.make_dreamer(dreamer_case.image_spec()),
    "tdmpc2": tdmpc_case.make_tdmpc,
    "tdmpc2, episodic": tdmpc_case.KINDS["episodic"],
    "tdmpc2, multi-discrete": tdmpc_case.KINDS["multi_discrete"],
    "tdmpc": tdmpc_case.first_version,
    "iris": lambda: iris_case.make_workflow("iris"),
    "delta_iris": lambda: iris_case.make_workflow("delta_iris"),
    "og_wm": lambda: og_wm_case.make_workflow(og_wm_case.image_spec(og_wm_case.DISCRETE)),
}


@pytest.fixture(scope="module", params=sorted(WORKFLOWS))
def workflow(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return WORKFLOWS[request.param]()


def spec_of(workflow: Any) -> Spec:
    spec: Spec = workflow.spec
    return spec


def test_workflows_are_policies(workflow: Any):
    contracts.check_policy(workflow, spec_of(workflow))


def test_workflows_are_world_models(workflow: Any):
    contracts.check_world_model(workflow, spec_of(workflow))


SPEC = dreamer_case.vector_spec()


class Forgetful:
    """A correct policy with a memory of its last observation."""

    def initial_policy_state(self, num_envs: int) -> dict[str, torch.Tensor]:
        return {"seen": torch.zeros(num_envs, 4)}

    def act(self, obs: Any, policy_state: Any, is_first: Any, mode: Any) -> Any:
        seen = self.seen(policy_state["seen"], is_first)
        action = torch.randint(3, is_first.shape, generator=self.generator(mode))
        return action, {"seen": 0.5 * seen + obs["vector"]}, {}

    def seen(self, seen: torch.Tensor, is_first: torch.Tensor) -> torch.Tensor:
        return seen * ~is_first[:, None]

    def generator(self, mode: Any) -> Any:
        return mode.generator


class KeepsMemory(Forgetful):
    def seen(self, seen: torch.Tensor, is_first: torch.Tensor) -> torch.Tensor:
        return seen


class GlobalDraws(Forgetful):
    def generator(self, mode: Any) -> Any:
        return None


class WrongActions(Forgetful):
    def act(self, *arguments: Any) -> Any:
        action, state, columns = super().act(*arguments)
        return action + 3, state, columns


def test_faulty_policies_are_found():
    contracts.check_policy(Forgetful(), SPEC)
    for faulty, words in (
        (KeepsMemory, "must ignore the policy state where is_first"),
        (GlobalDraws, "draws from a global generator"),
        (WrongActions, "has a choice outside of"),
    ):
        with pytest.raises(ContractError, match=words):
            contracts.check_policy(faulty(), SPEC)


# ---------------------------------------------------------------- replay

COLUMNS = {
    "obs/vector": ArraySpec((4,), "float32"),
    "action": ArraySpec((), "int64"),
    "reward": ArraySpec((), "float32"),
    "terminated": ArraySpec((), "bool"),
    "truncated": ArraySpec((), "bool"),
    "is_first": ArraySpec((), "bool"),
    "extra": ArraySpec((), "float32"),
}
SPECS = [
    BatchSpec(6, 3, boundary="within"),
    BatchSpec(6, 12, context=1),
    BatchSpec(6, 5, boundary="pad", least=2),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.boundary)
@pytest.mark.parametrize("kind", ["memory", "disk", "prioritized", "episodes"])
def test_buffers(kind: str, spec: BatchSpec, tmp_path: Path):
    made = []

    def make() -> Any:
        made.append(kind)
        folder = tmp_path / str(len(made))
        options: dict[str, Any] = {"num_streams": 2, "capacity": 200, "mutable": ["extra"]}
        if kind == "episodes":
            return EpisodeBuffer(COLUMNS, home=folder, **options)
        if kind == "disk":
            options |= {"storage": "disk", "folder": folder}
        return (PrioritizedReplay if kind == "prioritized" else ReplayBuffer)(COLUMNS, **options)

    if kind == "prioritized":
        spec = BatchSpec(**{**vars(spec), "sampler": "prioritized"})
    contracts.check_buffer(make, spec=spec, mutable="extra")


class SkipsRows(ReplayBuffer):
    def sample(self, *arguments: Any, **options: Any) -> Any:
        batch = super().sample(*arguments, **options)
        batch.columns["reward"][:, 1:] += 1.0
        return batch


class LosesRows(ReplayBuffer):
    def restore(self, *arguments: Any, **options: Any) -> Any:
        return []


def test_faulty_buffers_are_found():
    for faulty, words in ((SkipsRows, "are not consecutive rows"), (LosesRows, "does not restore all rows")):
        with pytest.raises(ContractError, match=words):
            contracts.check_buffer(lambda cls=faulty: cls(COLUMNS, num_streams=2, capacity=200))  # type: ignore[misc]


def test_samplers():
    buffer = ReplayBuffer(COLUMNS, num_streams=2, capacity=200)
    contracts._fill(buffer, COLUMNS, 2, 40, 8)
    for name in ("uniform", "online"):
        spec = BatchSpec(4, 3, boundary="within", sampler=name)
        sampler = buffer._sampler(spec)
        if name == "online":  # segments are queued as rows arrive
            contracts._fill(buffer, COLUMNS, 2, 40, 8)
        contracts.check_sampler(sampler, starts=lambda stream, start: (stream < 2) & (start % 8 <= 5))

    class Wrong(type(sampler)):  # type: ignore[misc]
        def undo(self) -> None:
            """Forgets to put the drawn segments back."""

    contracts._fill(buffer, COLUMNS, 2, 40, 8)
    wrong = Wrong(buffer.ring, spec)
    wrong.set_state(sampler.get_state())
    with pytest.raises(ContractError, match=r"after undo\(\) the same draw gives other starts"):
        contracts.check_sampler(wrong)
    with pytest.raises(ContractError, match="a start that is not allowed"):
        contracts.check_sampler(sampler, starts=lambda stream, start: np.zeros(len(stream), bool))


# ---------------------------------------------------------------- components


@pytest.mark.parametrize(
    "computer",
    [TDLambdaReturns(), NStepReturns(steps=3), DiscountedReturns(), DiscountedReturns(bootstrap=False)],
    ids=lambda computer: type(computer).__name__,
)
def test_return_computers(computer: Any):
    contracts.check_return_computer(computer)


def test_faulty_return_computers_are_found():
    exact = DiscountedReturns()
    faulty = {
        "shape": lambda reward, cont, value, last=None: exact(reward, cont, value, last=last)[:, 1:],
        "depends on earlier rows": lambda reward, cont, value, last=None: (
            exact(reward, cont, value, last=last) + reward[:, :1]
        ),
        "which are of another episode": lambda reward, cont, value, last=None: exact(reward, cont, value),
    }
    for words, computer in faulty.items():
        with pytest.raises(ContractError, match=words):
            contracts.check_return_computer(computer)


def planning_models() -> dict[str, tuple[Any, Any, int]]:
    torch.manual_seed(0)
    workflow = tdmpc_case.make_tdmpc(**tdmpc_case.EPISODIC)
    plain = tdmpc_case.make_tdmpc()
    found = {}
    for name, case in (("episodic", workflow), ("plain", plain)):
        parts = case.planning_parts.parts
        model = LatentModel(**parts, critic=case.critic, pair=parts["online"].select(torch.tensor([0, 1])))
        found[f"tdmpc2, {name}"] = (model, torch.randn(5, tdmpc_case.TINY["latent"]), 2)
    dreamer = dreamer_case.make_dreamer()
    rssm = RSSMModel(
        rssm=dreamer.rssm,
        reward_head=dreamer.reward_head,
        continue_head=dreamer.continue_head,
        actor=dreamer.actor,
        critic=dreamer.critic,
        action=dreamer.spec.action,
        discount=0.99,
        device="cpu",
    )
    state = dreamer.rssm.initial_state(5)
    found["rssm"] = (rssm, state, 3)
    found["integrator"] = (Integrator(), torch.randn(5, 2), 1)
    return found


@pytest.mark.parametrize("name", ["tdmpc2, episodic", "tdmpc2, plain", "rssm", "integrator"])
def test_planning_models(name: str):
    contracts.check_planning_model(*planning_models()[name])


def test_faulty_planning_model_is_found():
    class OneValue(Integrator):
        def value(self, latent: torch.Tensor, noise: Any = None) -> torch.Tensor:
            return super().value(latent).mean()

    with pytest.raises(ContractError, match=r"OneValue\.value has shape \(\) and must have \(5,\)"):
        contracts.check_planning_model(OneValue(), torch.randn(5, 2), 1)


@pytest.mark.parametrize("kind", ["frame", "delta"])
def test_tokenizers(kind: str):
    contracts.check_tokenizer(make_tokenizer(kind), FRAMES)


def test_faulty_tokenizers_are_found():
    class Looks(FrameTokenizer):
        """Depends on the previous frame without saying so."""

        def encode(self, frame: Any, previous: Any = None, action: Any = None) -> torch.Tensor:
            tokens = super().encode(frame)
            return tokens if previous is None else (tokens + 1) % self.vocab

    tokenizer = make_tokenizer("frame")
    tokenizer.__class__ = Looks
    with pytest.raises(ContractError, match="Looks is not contextual, but depends on the previous frame"):
        contracts.check_tokenizer(tokenizer, FRAMES)
    tokenizer = make_tokenizer("frame")
    tokenizer.vocab = 2
    with pytest.raises(ContractError, match="a token is not one of 0 … 1"):
        contracts.check_tokenizer(tokenizer, FRAMES)


@pytest.mark.parametrize(
    "quantizer",
    [VectorQuantizer(vocab=12, dim=3), EMAQuantizer(vocab=12, dim=3), FSQ(levels=(4, 3, 5))],
    ids=lambda quantizer: type(quantizer).__name__,
)
def test_quantizers(quantizer: Any):
    contracts.check_quantizer(quantizer)


def test_faulty_quantizers_are_found():
    class NoGradient(VectorQuantizer):
        def forward(self, vectors: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
            found = super().forward(vectors, mask)
            found.vectors = self.codes(found.tokens) + 0.0 * vectors
            return found

    class Eager(EMAQuantizer):
        def forward(self, vectors: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
            found = super().forward(vectors, mask)
            self.usage.mul_(0.5)
            return found

    for faulty, words in ((NoGradient, "no gradient reaches"), (Eager, r"outside of learn\(\)")):
        with pytest.raises(ContractError, match=words):
            contracts.check_quantizer(faulty(vocab=12, dim=3))


@pytest.mark.parametrize("kind", ["transformer", "gru"])
def test_backbones(kind: str):
    torch.manual_seed(0)
    if kind == "gru":
        contracts.check_backbone(GRUBackbone(dim=8))
    else:
        contracts.check_backbone(Transformer(dim=8, layers=2, heads=2, length=6, dropout=0.1))


def test_faulty_backbones_are_found():
    class Both(nn.Module):
        """Reads the sequence in both directions."""

        dim, seeds = 8, 0

        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(8, 4, batch_first=True, bidirectional=True)

        def forward(self, x: torch.Tensor, seeds: Any = None) -> torch.Tensor:
            return self.gru(x)[0]

        def init_state(self, size: int) -> Any:
            return {}

        def step(self, x: torch.Tensor, state: Any) -> Any:
            return self(x), state

    class NoMemory(GRUBackbone):
        def step(self, x: torch.Tensor, state: Any) -> Any:
            return super().step(x, self.init_state(len(x)))

    for faulty, words in (
        (Both(), "is not causal"),
        (NoMemory(dim=8), "other outputs than the complete sequence"),
    ):
        with pytest.raises(ContractError, match=words):
            contracts.check_backbone(faulty)


# ---------------------------------------------------------------- evolution


class Steps(Climb):
    """Keeps its candidates until they are told."""

    asked: torch.Tensor | None = None

    def ask(self) -> torch.Tensor:
        self.asked = super().ask() if self.asked is None else self.asked
        return self.asked

    def tell(self, candidates: torch.Tensor, fitness: torch.Tensor) -> Any:
        self.asked = None
        return super().tell(candidates, fitness)


def test_evolvables():
    contracts.check_evolvable(Steps(4, 3, torch.Generator().manual_seed(0)), SPEC)
    workflow = og_wm_case.make_workflow()
    hooks = workflow.hooks()
    contracts.check_evolvable(hooks["evolve"].step, workflow.spec, phase=og_wm_case.PHASE)
    batch = og_wm_case.make_batch(workflow, 2, 3, padded=False)
    contracts.check_evolvable(
        hooks["evolve_in_dream"].step, workflow.spec, phase=og_wm_case.PHASE, batch=batch
    )


def test_faulty_evolvables_are_found():
    class TensorMetrics(Steps):
        def tell(self, candidates: Any, fitness: Any) -> Any:
            return {"best": fitness}

    generator = torch.Generator().manual_seed(0)
    with pytest.raises(ContractError, match="the same candidates until tell is called"):
        contracts.check_evolvable(Climb(4, 3, generator), SPEC)
    with pytest.raises(ContractError, match="the metric 'best' must be a number"):
        contracts.check_evolvable(TensorMetrics(4, 3, generator), SPEC)
