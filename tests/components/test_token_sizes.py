"""The published parameter counts of each component."""

from __future__ import annotations

from functools import partial

import pytest
from torch import nn

from rl_lab.components.controllers.recurrent_actor_critic import (
    PoolTrunk,
    RecurrentActorCritic,
    ResidualTrunk,
)
from rl_lab.components.dynamics.token_world_model import DeltaTokenModel, FrameTokenModel
from rl_lab.components.nn.quantizers import EMAQuantizer, VectorQuantizer
from rl_lab.components.nn.transformer import Transformer
from rl_lab.components.representation_learners.delta_tokenizer import DeltaTokenizer
from rl_lab.components.representation_learners.tokenizer import FrameTokenizer
from rl_lab.records import ActionSpec, ArraySpec, Spec


def images(actions: int) -> Spec:
    return Spec("images", {"image": ArraySpec((3, 64, 64), "uint8")}, ActionSpec("discrete", (), (actions,)))


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_iris_parameter_counts():
    spec = images(4)
    assert count(FrameTokenizer(spec, VectorQuantizer(vocab=512, dim=512), {})) == 4_027_523
    backbone = partial(Transformer, layers=10, heads=4, dropout=0.1)
    assert count(FrameTokenModel(spec, backbone, dim=256, tokens=16, vocab=512, blocks=20)) == 8_447_493
    assert count(RecurrentActorCritic(spec, PoolTrunk)) == 3_217_957


@pytest.mark.parametrize("game", ["crafter", "atari"])
def test_delta_iris_parameter_counts(game: str):
    crafter = game == "crafter"
    spec = images(17 if crafter else 4)
    frame = {"frame_width": 64, "frame_latent": 8} if crafter else {"frame_width": 32, "frame_latent": 16}
    tokenizer = DeltaTokenizer(spec, EMAQuantizer(vocab=1024, dim=64), {}, **frame)
    model = DeltaTokenModel(
        spec,
        partial(Transformer, layers=3, heads=8 if crafter else 4),
        frame_latent=8 if crafter else 4,
        tokens=4,
        vocab=1024,
        blocks=21 if crafter else 26,
        reward="two_hot" if crafter else "sign",
    )
    actor_critic = RecurrentActorCritic(spec, ResidualTrunk, bins=255 if crafter else 0)
    counted = (count(tokenizer), count(model), 2 * count(actor_critic))  # with the target network
    assert counted == ((5_409_611, 11_948_457, 7_490_432) if crafter else (4_065_715, 3_577_257, 7_216_490))
