"""Parts of TD-MPC: random shift, running scale, embeddings, encoders, precision, compiled functions."""

import pytest
import torch
import torch.nn.functional as F

from rl_lab.components.kernels.norm_activate import fused_norm_activate
from rl_lab.components.kernels.two_hot import two_hot_return
from rl_lab.components.nn.fast_path import compiling, use_fast_path
from rl_lab.components.nn.heads import TerminationHead
from rl_lab.components.nn.normed_mlp import EnsembleMLP, Layer, NormedMLP, activate, pad_to
from rl_lab.components.nn.two_hot import SymlogTwoHot
from rl_lab.components.representation_learners.latent_encoders import (
    LatentEncoder,
    LatentImageEncoder,
    TaskEmbedding,
    random_shift,
)
from rl_lab.errors import ConfigError
from rl_lab.records import ActionSpec, ArraySpec, Spec
from rl_lab.utils.device import tensor_float
from rl_lab.workflows.tdmpc.losses import RunningScale
from rl_lab.workflows.tdmpc.planning_model import CastCopy

ACTION = ActionSpec("continuous", (2,))


def image_spec(size, channels=9):
    return Spec("images", {"image": ArraySpec((channels, size, size), "uint8")}, ACTION)


def test_random_shift():
    image = torch.arange(16, dtype=torch.uint8).view(1, 1, 4, 4)
    assert torch.equal(
        random_shift(image, torch.tensor([[0.5, 0.5]]), 1), image
    )  # the middle of three shifts
    down_left = random_shift(image, torch.tensor([[0.0, 0.99]]), 1)[0, 0]
    padded = F.pad(image.float(), (1, 1, 1, 1), mode="replicate")[0, 0]
    assert torch.equal(down_left.float(), padded[0:4, 2:6])
    several = random_shift(image.expand(3, 2, 4, 4), torch.tensor([[0.0, 0.0], [0.5, 0.5], [1.0, 1.0]]), 1)
    assert torch.equal(several[1, 1], image[0, 0]) and not torch.equal(several[0], several[2])


def test_running_scale():
    scale = RunningScale(rate=0.5)
    values = torch.linspace(0.0, 10.0, 101)  # percentiles 0.5 and 9.5
    assert scale.update(values).item() == pytest.approx(0.5 * 1.0 + 0.5 * 9.0)
    assert RunningScale(rate=1.0).update(torch.zeros(8)).item() == 1.0  # never below 1
    before = scale.value.clone()
    scale.update(torch.tensor([float("nan"), 1.0]))
    assert torch.equal(scale.value, before)


def test_task_embedding():
    spec = Spec("two", {"vector": ArraySpec((3,), "float32"), "task": ArraySpec((2,), "float32")}, ACTION)
    embedding = TaskEmbedding(spec=spec, width=4)
    embedding.weight.data[0] = 3.0
    assert torch.equal(embedding(torch.tensor([[0.0, 1.0]]))[0], embedding.weight[1])
    small = embedding.weight[1].clone()
    embedding.project()
    assert embedding.weight[0].norm().item() == pytest.approx(1.0)
    assert torch.equal(embedding.weight[1], small)
    with pytest.raises(ConfigError, match="one task only"):
        TaskEmbedding(spec=image_spec(16), width=4)


def test_state_encoder_ignores_task_keys():
    observations = {
        "velocity": ArraySpec((2,), "float32"),
        "height": ArraySpec((), "float32"),
        "task": ArraySpec((3,), "float32"),
        "action_mask": ArraySpec((2,), "float32"),
    }
    encoder = LatentEncoder(spec=Spec("walker", observations, ACTION), latent=16, units=8, context=5)
    assert encoder.keys == ["height", "velocity"]
    obs = {key: torch.randn(4, 6, *item.shape) for key, item in observations.items()}
    latent = encoder(obs, torch.randn(4, 6, 5))
    assert latent.shape == (4, 6, 16)
    assert torch.allclose(latent.unflatten(-1, (2, 8)).sum(-1), torch.ones(4, 6, 2), atol=1e-5)
    with pytest.raises(ConfigError, match="tdmpc_pixels"):
        LatentEncoder(spec=image_spec(16), latent=16, units=8)


def test_published_image_encoder():
    """Three 64×64 frames: sides 29, 13, 6, 4 with 32 channels, so 512 features directly into SimNorm."""
    encoder = LatentImageEncoder(spec=image_spec(64), latent=512)
    assert encoder.flat == 512 and encoder.out is None
    convs = [(9, 7), (32, 5), (32, 3), (32, 3)]
    assert sum(p.numel() for p in encoder.parameters()) == sum(32 * i * k * k + 32 for i, k in convs)
    images = torch.randint(256, (2, 3, 9, 64, 64), dtype=torch.uint8)
    assert encoder({"image": images}).shape == (2, 3, 512)


def test_image_encoder_shifts_with_noise_only():
    encoder = LatentImageEncoder(spec=image_spec(32), latent=16, channels=4, kernels=[3, 3], strides=[2, 2])
    images = {"image": torch.randint(256, (5, 9, 32, 32), dtype=torch.uint8)}
    assert torch.equal(encoder(images), encoder(images, noise=torch.full((5, 2), 0.5)))
    assert not torch.equal(encoder(images), encoder(images, noise=torch.rand(5, 2)))
    assert encoder.out is not None  # the widths differ, so a layer maps to the latent
    with pytest.raises(ConfigError, match="too small"):
        LatentImageEncoder(spec=image_spec(8), latent=16)


def test_cast_copy():
    torch.manual_seed(0)
    mlp = NormedMLP([8], 16, 4)
    copies = CastCopy({"mlp": mlp}, torch.bfloat16)
    x = torch.randn(32, 8)
    half = copies.parts["mlp"](x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert torch.allclose(half.float(), mlp(x), atol=0.03)
    for parameter in mlp.parameters():
        parameter.data += 0.5
    copies.refresh()
    assert torch.allclose(copies.parts["mlp"](x.bfloat16()).float(), mlp(x), rtol=0.03, atol=0.1)
    assert CastCopy({"mlp": mlp}, torch.float32).parts["mlp"] is mlp
    code = CastCopy({"code": SymlogTwoHot(11)}, torch.bfloat16).parts["code"]
    assert code.centers.dtype == torch.float32


def test_termination_head():
    head = TerminationHead(latent=4, units=8)
    logit = head(torch.randn(3, 5, 4))
    assert logit.shape == (3, 5)
    expected = F.binary_cross_entropy_with_logits(logit, torch.ones(3, 5))
    assert torch.allclose(head.loss(logit, torch.ones(3, 5)).mean(), expected)


def test_tensor_float_context():
    before = torch.backends.cuda.matmul.allow_tf32
    with tensor_float(True):
        assert torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32 == before
    with tensor_float(False):
        assert torch.backends.cuda.matmul.allow_tf32 == before


@pytest.mark.parametrize("activation, group", [("mish", 1), ("simnorm", 4)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_fused_norm_activate(activation: str, group: int, with_bias: bool):
    members, rows, width = 3, 5, 12
    x, bias = torch.randn(members, rows, width), torch.randn(members, 1, width) if with_bias else None
    scale, shift = torch.rand(members, 1, width) + 0.5, torch.randn(members, 1, width)
    leaves = [value.requires_grad_() for value in (x, bias, scale, shift) if value is not None]
    normed = F.layer_norm(x if bias is None else x + bias, (width,), None, None, 1e-5)
    plain = activate(torch.addcmul(shift, normed, scale), activation, group)
    flat = [None if value is None else value.squeeze(1) for value in (bias, scale, shift)]
    fused = fused_norm_activate(x, *flat, 1e-5, activation, group)
    assert torch.allclose(fused, plain, atol=1e-6)
    weight = torch.randn_like(plain)
    expected = torch.autograd.grad((plain * weight).sum(), leaves)
    found = torch.autograd.grad((fused * weight).sum(), leaves)
    for ours, theirs in zip(found, expected):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["norm+mish", "norm+simnorm", "elu"])
@pytest.mark.parametrize("on", [False, True])
def test_finish_groups(kind: str, on: bool):
    """Groups of actions share a latent, so the product with the latent can be added as a bias."""
    layer = Layer([8, 3], 16, kind)
    latent, action = torch.randn(4, 8), torch.randn(4, 5, 3)
    expected = layer(latent.repeat_interleave(5, 0), action.flatten(0, 1)).view(4, 5, 16)
    use_fast_path(on, layer)
    with torch.no_grad():
        share = F.linear(latent, layer.weight0, layer.bias)
        table = torch.zeros(4, 5, 20)
        found = layer.finish_groups(action @ layer.weight1.t(), share)
        layer.finish_groups(action @ layer.weight1.t(), share, table[..., :16])
    assert torch.allclose(found, expected, atol=1e-6)
    assert torch.allclose(table[..., :16], expected, atol=1e-6) and not table[..., 16:].any()


def test_two_hot_return():
    code = SymlogTwoHot(11, limit=3.0)
    rewards, values = torch.randn(2, 4, 11), torch.randn(3, 4, 11)
    bias, weight = torch.randn(3, 11), torch.rand(4, 3)
    means = code.mean(rewards), code.mean(values + bias.unsqueeze(1)).mean(0)
    expected = weight[:, 0] * means[0][0] + weight[:, 1] * means[0][1] + weight[:, 2] * means[1]
    rewards = torch.cat([rewards, torch.full((2, 1, 11), float("nan"))], 1)
    values = torch.cat([values, torch.zeros(3, 1, 11)], 1)
    weight = torch.cat([weight, torch.ones(1, 3)])
    found = two_hot_return(rewards, values, bias, code.centers, weight, -7.0)
    assert torch.allclose(found[:4], expected, atol=1e-5) and found[4] == -7.0


def test_fast_path_networks():
    mlp = NormedMLP([8, 3], 16, 16, out="norm+simnorm")
    critics = EnsembleMLP(3, [8, 3], 16, 11, zero=False)
    x, a, dropout = torch.randn(7, 8, requires_grad=True), torch.randn(7, 3), torch.rand(3, 7, 16)
    results = []
    for on in (False, True):
        use_fast_path(on, mlp, critics)
        y = mlp(x, a)
        q = critics(x, a, dropout=dropout, rate=0.3)
        loss = (y * torch.arange(16.0)).sum() + (q * torch.arange(11.0)).sum()
        leaves = [x, *mlp.parameters(), *critics.parameters()]
        results.append((y.detach(), q.detach(), *torch.autograd.grad(loss, leaves)))
    for plain, fused in zip(*results):
        assert torch.allclose(plain, fused, rtol=1e-4, atol=1e-4)


def test_widened_networks():
    """Widths of 3, 7 and 11 are padded to multiples of 8; predictions do not change."""
    mlp, critics = NormedMLP([8, 3], 16, 7), EnsembleMLP(3, [8, 3], 16, 11, zero=False)
    x, a = torch.randn(5, 2, 8), torch.randn(5, 2, 3)
    expected = mlp(x, a), critics(x, a), critics(x, a, weights=critics.select(torch.tensor([2, 0])))
    for part in (*mlp.layers, critics):
        part.widen(8)
    assert mlp.layers[0].weight1.shape == (16, 8) and mlp.layers[-1].weight0.shape == (8, 16)
    assert critics.weights()[-1]["input0"].shape == (3, 16, 16)
    found = mlp(x, a), critics(x, pad_to(a, 8)), critics(x, a, weights=critics.select(torch.tensor([2, 0])))
    for ours, theirs in zip(found, expected):
        assert ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.learning  # compilation is slow
def test_compiled_pointwise_functions():
    mlp = NormedMLP([8, 3], 16, 16, out="norm+simnorm")
    code = SymlogTwoHot(11)
    for rows in (5, 7, 5):
        x, a = torch.randn(rows, 8, requires_grad=True), torch.randn(rows, 3)
        results = []
        for on in (False, True):
            use_fast_path(on, mlp, code)
            with compiling(on):
                y = mlp(x, a)
                loss = (
                    y[:, 0].sum() + code.loss(y[:, :11], torch.ones(rows)).sum() + code.mean(y[:, :11]).sum()
                )
            results.append((y.detach(), *torch.autograd.grad(loss, [x, *mlp.parameters()])))
        for plain, compiled in zip(*results):
            assert torch.allclose(plain, compiled, rtol=1e-4, atol=1e-5)


def test_encoder_that_would_ignore_an_observation_is_refused():
    both = {"camera": ArraySpec((3, 64, 64), "uint8"), "joints": ArraySpec((4,), "float32")}
    spec = Spec("arm", both, ACTION)
    with pytest.raises(
        ConfigError, match=r"^components.encoder reads vectors only and would ignore camera: TD-MPC"
    ):
        LatentEncoder(spec=spec, latent=16, units=8)
    with pytest.raises(ConfigError, match="reads images only and would ignore joints"):
        LatentImageEncoder(spec=spec, latent=16)
    assert LatentEncoder(spec=spec, latent=16, units=8, keys=["joints"]).keys == ["joints"]
    assert LatentImageEncoder(spec=spec, latent=16, keys=["camera"]).keys == ["camera"]
    tasks = {"camera": both["camera"], "task": ArraySpec((2,), "float32")}
    assert LatentImageEncoder(spec=Spec("arms", tasks, ACTION), latent=16).keys == ["camera"]
