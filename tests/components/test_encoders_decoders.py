import pytest
import torch

from rl_lab.components.nn.two_hot import symlog
from rl_lab.components.representation_learners.decoders import DictDecoder
from rl_lab.components.representation_learners.encoders import (
    DictEncoder,
    ImageEncoder,
    MLPEncoder,
    dict_embed_dim,
)
from rl_lab.components.representation_learners.identity import IdentityRepresentation
from rl_lab.errors import ConfigError
from rl_lab.records import ActionSpec, ArraySpec, Spec

ACTION = ActionSpec("discrete", (), (2,))
VECTOR = {"position": ArraySpec((2,), "float32"), "count": ArraySpec((), "int64")}
IMAGE = {"image": ArraySpec((3, 32, 48), "uint8")}
STATE_SIZES = {"deter": 16, "stoch": 3, "classes": 4, "blocks": 2}


def spec_of(observations):
    return Spec("test", observations, ACTION)


def observations_of(spec, *batch):
    generator = torch.Generator().manual_seed(0)
    made = {}
    for key, item in spec.observations.items():
        shape = (*batch, *item.shape)
        if item.dtype == "float32":
            made[key] = torch.randn(shape, generator=generator) * 5
        else:
            made[key] = torch.randint(0, 255, shape, generator=generator).to(getattr(torch, item.dtype))
    return made


@pytest.mark.parametrize(
    "observations", [VECTOR, IMAGE, {**VECTOR, **IMAGE}], ids=["vector", "image", "both"]
)
def test_encoder_and_decoder_shapes(observations):
    torch.manual_seed(0)
    spec = spec_of(observations)
    encoder = DictEncoder(spec=spec, units=8, depth=2)
    decoder = DictDecoder(spec=spec, units=8, depth=2, **STATE_SIZES)
    obs = observations_of(spec, 2, 3)
    embed = encoder(obs)
    assert embed.shape == (2, 3, encoder.embed_dim)
    assert encoder.embed_dim == dict_embed_dim(spec, units=8, depth=2)
    state = {"deter": torch.randn(2, 3, 16), "stoch": torch.randn(2, 3, 3, 4)}
    feature = torch.cat([state["deter"], state["stoch"].flatten(-2)], -1)
    prediction = decoder(state, feature)
    losses = decoder.losses(prediction, obs)
    assert set(losses) == set(observations)
    assert all(loss.shape == (2, 3) for loss in losses.values())
    for key, value in decoder.observations(prediction).items():
        assert value.shape == obs[key].shape
    (sum(loss.mean() for loss in losses.values()) + embed.mean()).backward()
    for module in (encoder, decoder):
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in module.parameters())


def test_step_matches_sequence():
    spec = spec_of({**VECTOR, **IMAGE})
    encoder = DictEncoder(spec=spec, units=8, depth=2)
    obs = observations_of(spec, 2, 3)
    step = {key: value[:, 1] for key, value in obs.items()}
    assert torch.allclose(encoder(step), encoder(obs)[:, 1], atol=1e-5)


def test_vector_encoder_sorts_and_applies_symlog():
    spec = spec_of(VECTOR)
    encoder = MLPEncoder(spec=spec, units=8, layers=1)
    obs = observations_of(spec, 5)
    joined = torch.cat([obs["count"].float().unsqueeze(-1), obs["position"]], -1)
    assert torch.allclose(encoder(obs), encoder.mlp(symlog(joined)))


def test_vector_loss():
    spec = spec_of({"position": ArraySpec((2,), "float32")})
    decoder = DictDecoder(spec=spec, units=8, depth=2, **STATE_SIZES)
    target = torch.tensor([[torch.e - 1, 0.0]])  # symlog (1, 0)
    losses = decoder.losses({"position": torch.tensor([[3.0, 0.5]])}, {"position": target})
    assert losses["position"].item() == pytest.approx(4.25, rel=1e-5)


def test_image_loss():
    spec = spec_of({"image": ArraySpec((1, 16, 16), "uint8")})
    decoder = DictDecoder(spec=spec, units=8, depth=2, **STATE_SIZES)
    truth = torch.full((1, 1, 16, 16), 255, dtype=torch.uint8)
    losses = decoder.losses({"image": torch.full((1, 1, 16, 16), 0.5)}, {"image": truth})
    assert losses["image"].item() == pytest.approx(256 * 0.25)


def test_several_images():
    spec = spec_of({"front": ArraySpec((3, 16, 32), "uint8"), "back": ArraySpec((1, 16, 32), "uint8")})
    decoder = DictDecoder(spec=spec, units=8, depth=2, **STATE_SIZES)
    encoder = DictEncoder(spec=spec, units=8, depth=2)
    assert encoder(observations_of(spec, 2)).shape == (2, 8 * 1 * 2)
    prediction = decoder({"deter": torch.randn(2, 16), "stoch": torch.randn(2, 3, 4)}, torch.randn(2, 28))
    assert prediction["front"].shape == (2, 3, 16, 32)
    assert prediction["back"].shape == (2, 1, 16, 32)


def test_encoder_error_messages():
    with pytest.raises(ConfigError, match="divisible by 16"):
        DictEncoder(spec=spec_of({"image": ArraySpec((3, 60, 64), "uint8")}), units=8, depth=2)
    with pytest.raises(ConfigError, match=r"9.*width 3"):
        MLPEncoder(spec=spec_of(VECTOR), units=8, input_dim=9)
    with pytest.raises(ConfigError, match="no vector"):
        MLPEncoder(spec=spec_of(IMAGE), units=8)


def test_encoder_that_would_ignore_an_observation_is_refused():
    spec = spec_of({**VECTOR, **IMAGE})
    with pytest.raises(
        ConfigError, match=r"^components.encoder reads vectors only and would ignore image: use"
    ):
        MLPEncoder(spec=spec, units=8)
    with pytest.raises(ConfigError, match="reads images only and would ignore count, position"):
        ImageEncoder(spec=spec, depth=2)
    with pytest.raises(ConfigError, match="would ignore image"):  # keys that name it
        MLPEncoder(spec=spec, units=8, keys=["position", "image"])
    with pytest.raises(ConfigError, match=r"components.encoder.keys.*positon"):
        MLPEncoder(spec=spec, units=8, keys=["positon"])
    assert MLPEncoder(spec=spec, units=8, keys=["position"]).keys == ["position"]
    assert ImageEncoder(spec=spec, depth=2, keys=["image"]).keys == ["image"]


def test_dict_encoder_of_vectors_has_the_weights_and_numbers_of_the_mlp_encoder():
    spec = spec_of(VECTOR)
    encoders = []
    for kind, sizes in ((MLPEncoder, {"units": 8}), (DictEncoder, {"units": 8, "depth": 2})):
        torch.manual_seed(3)
        encoders.append(kind(spec=spec, **sizes))
    assert all(torch.equal(a, b) for a, b in zip(*(list(e.parameters()) for e in encoders), strict=True))
    obs = observations_of(spec, 5)
    assert torch.equal(encoders[0](obs), encoders[1](obs))


def test_keys_select_observations():
    spec = spec_of({**VECTOR, **IMAGE})
    encoder = DictEncoder(spec=spec, units=8, depth=2, keys=["image", "position"])
    assert encoder.embed_dim == dict_embed_dim(spec, units=8, depth=2, keys=["image", "position"])
    obs = observations_of(spec, 2)
    assert torch.equal(encoder(obs), encoder({**obs, "count": obs["count"] + 1}))
    assert not torch.equal(encoder(obs), encoder({**obs, "position": obs["position"] + 1}))
    decoder = DictDecoder(spec=spec, units=8, depth=2, keys=["count"], **STATE_SIZES)
    prediction = decoder({"deter": torch.randn(2, 16), "stoch": torch.randn(2, 3, 4)}, torch.randn(2, 28))
    assert set(prediction) == set(decoder.losses(prediction, obs)) == {"count"}


@pytest.mark.parametrize(
    "keys, message",
    [(["positions"], "Did you mean 'position'"), ([], "null for all"), ("image", "must be a list")],
)
def test_unknown_keys(keys, message):
    with pytest.raises(ConfigError, match=message):
        DictEncoder(spec=spec_of({**VECTOR, **IMAGE}), units=8, depth=2, keys=keys)
    with pytest.raises(ConfigError, match=r"components\.decoder\.keys"):
        DictDecoder(spec=spec_of(VECTOR), units=8, depth=2, keys=keys, **STATE_SIZES)


def test_identity_representation():
    identity = IdentityRepresentation()
    obs = {"vector": torch.randn(2, 4)}
    assert identity.observe(obs) is obs
    assert identity.observe_sequence(obs["vector"]) is obs["vector"]
    assert identity.decode(obs) is obs
    assert list(identity.parameters()) == []


def test_identity_as_encoder():
    """All vectors as they are, in sorted order; images are refused."""
    identity = IdentityRepresentation(spec_of(VECTOR))
    obs = {"position": torch.randn(5, 2, 2), "count": torch.tensor([[1, 2]] * 5)}
    state = identity(obs, noise=None)
    assert state.shape == (5, 2, identity.embed_dim) and state.dtype == torch.float32
    assert torch.equal(state, torch.cat([obs["count"].float().unsqueeze(-1), obs["position"]], -1))
    for spec in (None, spec_of(IMAGE), spec_of({**VECTOR, **IMAGE})):
        with pytest.raises(ConfigError, match=r"^components\.encoder: .* vector observations only"):
            IdentityRepresentation(spec)(obs)
