"""Initial weights of every algorithm, and the length of its imagination, against the originals' code.

Parameter counts cannot see a wrong initialization. Here every parameter of the published presets is compared
with the original's rule: its constant, or its deviation, mean and bound within six standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from rl_lab.build import assemble_workflow
from rl_lab.components.controllers.linear_controller import LinearController
from rl_lab.components.dynamics.mdn_rnn import LSTM
from rl_lab.components.nn.image_stacks import ConvLayer
from rl_lab.components.nn.mlp import BlockLinear, LayerNorm, RMSNorm
from rl_lab.components.nn.normed_mlp import EnsembleMLP, Layer
from rl_lab.components.representation_learners.latent_encoders import LatentImageEncoder
from rl_lab.config.compose import compose_config, resolve_config
from rl_lab.records import ActionSpec, ArraySpec, Spec

CONTINUOUS, DISCRETE = ActionSpec("continuous", (6,), ()), ActionSpec("discrete", (), (17,))
VECTOR = Spec("vector", {"vector": ArraySpec((24,), "float32")}, CONTINUOUS)
IMAGE = Spec("image", {"image": ArraySpec((3, 64, 64), "uint8")}, DISCRETE)
PIXELS = Spec("pixels", IMAGE.observations, CONTINUOUS)
STACKED = Spec("stacked", {"image": ArraySpec((9, 64, 64), "uint8")}, CONTINUOUS)
CAR = Spec("car", {"image": ArraySpec((3, 64, 64), "uint8")}, ActionSpec("continuous", (3,), ()))
TASKS = Spec(
    "tasks", {**VECTOR.observations, "task": ArraySpec((40,), "float32")}, CONTINUOUS
)  # more tasks than the preset, for a table that is large enough


# experiment -> its observations and actions, more words
PRESETS: dict[str, tuple[Spec, list[str]]] = {
    "dreamer_crafter": (IMAGE, ["size=1m"]),
    "dreamer_dmc_proprio": (VECTOR, ["size=1m"]),
    "dreamer_dmc_vision_2024": (PIXELS, ["size=1m"]),
    "dreamer_dmc_proprio_2024": (VECTOR, ["size=1m"]),
    "dreamer_atari100k_2023": (IMAGE, []),
    "dreamer_dmc_proprio_2023": (VECTOR, []),
    "dreamer_v1_dmc_vision": (PIXELS, []),
    "dreamer_v2_crafter": (IMAGE, []),
    "dreamer_v2_dmc_vision": (PIXELS, []),
    "tdmpc2_dmc_state": (VECTOR, []),
    "tdmpc2_dmc_pixels": (STACKED, []),
    "tdmpc2_gym_mujoco": (VECTOR, []),  # with a termination head
    "tdmpc2_multitask": (TASKS, []),
    "tdmpc_dmc": (VECTOR, []),
    "og_wm_carracing": (CAR, []),
    "iris_atari100k": (IMAGE, []),
    "delta_iris_atari100k": (IMAGE, []),
    "delta_iris_crafter": (IMAGE, []),
}


@lru_cache(maxsize=2)
def workflow_of(experiment: str) -> Any:
    spec, words = PRESETS[experiment]
    config = resolve_config(
        compose_config([f"experiment={experiment}", "experiment.device=cpu", *words]), spec
    )
    torch.manual_seed(0)
    return assemble_workflow(config, spec, torch.device("cpu"), optimizers=False)


def parts_of(workflow: Any) -> dict[str, nn.Module]:
    context = workflow.context
    parts = {**dict(context.components.items()), **dict(context.controller_manager.items())}
    return {name: part for name, part in parts.items() if isinstance(part, nn.Module)}


def parameters_of(workflow: Any) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Path, module, name in it, value."""
    for part, network in parts_of(workflow).items():
        for path, module in network.named_modules():
            for name, value in module.named_parameters(recurse=False):
                yield ".".join(filter(None, (part, path, name))), module, name, value.detach()


# ---------------------------------------------------------------- rules


@dataclass(frozen=True)
class Rule:
    """A distribution with mean 0, or a constant."""

    deviation: float = 0.0
    bound: float = math.inf
    constant: float | None = None

    def check(self, path: str, value: torch.Tensor) -> None:
        if self.constant is not None:
            assert bool((value == self.constant).all()), f"{path} is not {self.constant}"
            return
        count, largest = value.numel(), float(value.abs().max())
        assert largest <= self.bound * (1 + 1e-5), f"{path} has {largest}, above {self.bound}"
        if count < 16:
            return
        error = 6.0 * self.deviation
        found, mean = float(value.std()), float(value.mean())
        assert abs(found - self.deviation) < error / math.sqrt(2 * count), (
            f"{path}: {found}, not {self.deviation}"
        )
        assert abs(mean) < error / math.sqrt(count), f"{path}: mean {mean}"
        if count >= 1000 and self.bound < math.inf:  # a narrower distribution would not reach the bound
            assert largest > 0.9 * self.bound, f"{path}: {largest}, bound {self.bound}"


def normal(deviation: float) -> Rule:
    return Rule(deviation)


def uniform(bound: float) -> Rule:
    return Rule(bound / math.sqrt(3.0), bound)


def constant(value: float) -> Rule:
    return Rule(constant=value)


def truncated(deviation: float) -> Rule:
    """Truncated at two standard deviations of the normal before it was truncated."""
    return Rule(deviation, 2.0 * 1.1368 * deviation)


def fans(module: nn.Module) -> tuple[int, int]:
    """Inputs and outputs that one output and one input is connected with."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    field = weight[0, 0].numel()
    return weight.shape[1] * field, weight.shape[0] * field


def torch_default(module: nn.Module, name: str) -> Rule:
    """What the originals in torch leave as it is: U(±1/√inputs), U(±1/√units) for an LSTM, norms 1 and 0."""
    if isinstance(module, nn.LSTMCell):
        return uniform(module.hidden_size**-0.5)
    if isinstance(module, nn.LayerNorm | nn.GroupNorm):
        return constant(1.0 if name == "weight" else 0.0)
    assert isinstance(module, nn.Linear | nn.Conv2d), type(module)
    return uniform(fans(module)[0] ** -0.5)


# ---------------------------------------------------------------- the algorithms


def dreamer(path: str, module: nn.Module, name: str) -> Rule:
    """danijar/dreamerv3 embodied/jax/nets.py: `Initializer` (trunc_normal, fan in), zero biases, RMS scale 1;
    `outscale` in configs.yaml: reward and value 0, policy 0.01, others 1. The fan of a BlockLinear's kernel
    (blocks, inputs, outputs) is blocks × inputs.
    """
    if isinstance(module, RMSNorm):
        return constant(1.0)
    if name == "bias":
        return constant(0.0)
    if path in ("reward_head.mlp.out.weight", "critic.head.mlp.out.weight"):
        return constant(0.0)
    if isinstance(module, BlockLinear):
        inputs = module.weight.shape[0] * module.weight.shape[1]
    else:
        assert isinstance(module, nn.Linear | nn.Conv2d | ConvLayer)
        inputs = fans_of(module)[0]
    return truncated((0.01 if path == "actor.mlp.out.weight" else 1.0) * inputs**-0.5)


def dreamer_2024(path: str, module: nn.Module, name: str) -> Rule:
    """danijar/dreamerv3 @ 251910d dreamerv3/nets.py, as today; `Dist`: outscale 0.1 for vectors of the decoder."""
    rule = dreamer(path, module, name)
    scaled = path.startswith("decoder.parts.0.outputs") and name == "weight"
    return truncated(0.1 * rule.deviation) if scaled else rule


def fans_of(module: Any) -> tuple[int, int]:
    """As `fans`; a transposed convolution has its inputs first."""
    inputs, outputs = fans(module)
    return (outputs, inputs) if getattr(module, "transposed", False) is True else (inputs, outputs)


def dreamer_2023(path: str, module: nn.Module, name: str) -> Rule:
    """danijar/dreamerv3 @ 8fa35f8 dreamerv3/nets.py, `Initializer`: before a norm a truncated normal (winit: normal)
    by the mean of both fans (fan: avg); elsewhere uniform by the same (the default of `Linear` and `Conv2D`).
    `outscale` 0 for reward and critic. A continuous policy has two output layers. The initial state is 0.
    """
    if isinstance(module, LayerNorm):
        return constant(1.0 if name == "weight" else 0.0)
    if name in ("bias", "initial") or path in ("reward_head.mlp.out.weight", "critic.head.mlp.out.weight"):
        return constant(0.0)
    inputs, outputs = fans_of(module)
    if path == "actor.mlp.out.weight" and outputs == 2 * CONTINUOUS.size:
        outputs //= 2
    deviation = (2.0 / (inputs + outputs)) ** 0.5
    last = getattr(module, "output", False) or any(
        part in path for part in ("mlp.out.", "prior_net.out", "posterior_out", "from_feature", "outputs.")
    )
    return uniform(deviation * math.sqrt(3.0)) if last else truncated(deviation)


def keras(path: str, module: nn.Module, name: str, output_layers: int = 1) -> Rule:
    """danijar/dreamer models.py and danijar/dreamerv2 common/nets.py name no initializer, which is Glorot's uniform
    in Keras; biases 0, norms 1 and 0. A continuous policy of V2 has two output layers, that of V1 one.
    """
    if isinstance(module, LayerNorm):
        return constant(1.0 if name == "weight" else 0.0)
    if name.startswith("bias"):
        return constant(0.0)
    if isinstance(module, nn.GRUCell):
        if name == "weight_hh":  # orthogonal: three stacked gates of unit columns in all
            return Rule((3.0 * module.hidden_size) ** -0.5)
        return uniform(math.sqrt(6.0 / (module.input_size + 3 * module.hidden_size)))
    inputs, outputs = fans_of(module)
    if path == "actor.mlp.out.weight" and outputs == 2 * CONTINUOUS.size:
        outputs //= output_layers
    return uniform(math.sqrt(6.0 / (inputs + outputs)))


def tdmpc2(path: str, module: nn.Module, name: str) -> Rule:
    """nicklashansen/tdmpc2 tdmpc2/common/init.py: linear layers trunc_normal 0.02 (cut at ±2: nothing is cut),
    biases 0, embeddings U(±0.02); world_model.py: last layers of reward and Q 0. Convolutions are left as torch
    has them.
    """
    if path == "task_embedding.weight":
        return uniform(0.02)
    if isinstance(module, nn.LayerNorm | nn.Conv2d):
        return torch_default(module, name)
    assert isinstance(module, Layer | EnsembleMLP), path
    if name.startswith("scale"):
        return constant(1.0)
    if name.startswith(("bias", "shift")):
        return constant(0.0)
    last = path.startswith("reward_head.mlp.layers.2") or path == "critic.online.input0_2"
    return constant(0.0) if last else normal(0.02)


def world_models(path: str, module: nn.Module, name: str) -> Rule:
    """hardmaru/WorldModelsExperiments carracing: vae/vae.py and rnn/rnn.py name no initializer, which is Glorot's
    in TensorFlow. The LSTM's kernel is one matrix (inputs + units, 4 units), its forget gate is biased by 1; our
    biases are 0 (docs/algorithms/world_models.md). es.py: the controller's parameters start at 0.
    """
    if isinstance(module, LinearController):
        return constant(0.0)
    if isinstance(module, LSTM):
        kernel = module.input_size + module.hidden_size + 4 * module.hidden_size
        return uniform(math.sqrt(6.0 / kernel))
    return constant(0.0) if name == "bias" else uniform(math.sqrt(6.0 / sum(fans(module))))


def iris(path: str, module: nn.Module, name: str) -> Rule:
    """eloialonso/iris src/models/tokenizer/tokenizer.py: codes U(±1/512), nothing else; world_model.py applies
    `init_weights` (src/utils.py): N(0, 0.02), biases 0; actor_critic.py: nothing.
    """
    if path == "tokenizer.quantizer.codes.weight":
        return uniform(1.0 / 512)
    if path.startswith("world_model.") and isinstance(module, nn.Linear | nn.Embedding):
        return normal(0.02) if name == "weight" else constant(0.0)
    return torch_default(module, name)


def delta_iris(path: str, module: nn.Module, name: str) -> Rule:
    """vmicheli/delta-iris src/models/tokenizer/tokenizer.py and world_model.py apply `init_weights` (src/utils.py):
    N(0, 0.02) for linear layers and embeddings, biases 0, convolutions untouched; actor_critic/
    cnn_lstm_actor_critic.py: the critic 0, nothing else.
    """
    if path.startswith("actor_critic.critic."):
        return constant(0.0)
    if not path.startswith("actor_critic.") and isinstance(module, nn.Linear | nn.Embedding):
        return normal(0.02) if name == "weight" else constant(0.0)
    return torch_default(module, name)


RULES: dict[str, Callable[[str, nn.Module, str], Rule]] = {
    "dreamer_v1_": keras,
    "dreamer_v2_": partial(keras, output_layers=2),
    "dreamer_atari100k_2023": dreamer_2023,
    "dreamer_dmc_proprio_2023": dreamer_2023,
    "dreamer_dmc_vision_2024": dreamer_2024,
    "dreamer_dmc_proprio_2024": dreamer_2024,
    "dreamer_": dreamer,
    "tdmpc2_": tdmpc2,
    "og_wm_": world_models,
    "iris_": iris,
    "delta_iris_": delta_iris,
}


@pytest.mark.parametrize("experiment", [name for name in PRESETS if name != "tdmpc_dmc"])
def test_initial_weights(experiment: str):
    rule = next(rule for start, rule in RULES.items() if experiment.startswith(start))
    checked = 0
    for path, module, name, value in parameters_of(workflow_of(experiment)):
        if path != "mdn_rnn.lstm.bias_ih_l0":  # 0, and 1 for the forget gate: below
            rule(path, module, name).check(path, value)
        checked += 1
    assert checked > 20


def test_tdmpc_is_orthogonal():
    """nicklashansen/tdmpc src/algorithm/helper.py `orthogonal_init`, tdmpc.py: last layers of reward and Q 0."""
    parts = parts_of(workflow_of("tdmpc_dmc"))
    layers = [
        layer
        for name in ("encoder", "dynamics", "reward_head", "policy")
        for layer in parts[name].modules()
        if isinstance(layer, Layer)
    ]
    matrices = [torch.cat([w for n, w in layer.named_parameters() if "weight" in n], 1) for layer in layers]
    assert all(not layer.bias.any() for layer in layers) and len(matrices) == 2 + 3 + 3 + 3
    online = parts["critic"].online
    for member in range(online.members):
        joint = torch.cat([online.input0_0[member], online.input1_0[member]]).t()
        matrices += [joint, online.input0_1[member].t(), online.input0_2[member].t()]
    zero = [matrix for matrix in matrices if not matrix.any()]
    assert len(zero) == 3  # reward and two Q
    for matrix in matrices:
        if matrix.any():
            small = matrix if len(matrix) <= matrix.shape[1] else matrix.t()
            torch.testing.assert_close(small @ small.t(), torch.eye(len(small)), atol=1e-4, rtol=0)


def test_tdmpc_convolutions():
    """helper.py `orthogonal_init`: gain √2 for convolutions."""
    encoder = LatentImageEncoder(spec=STACKED, latent=50, out="plain", init="orthogonal")
    for convolution in encoder.convs:
        matrix = convolution.weight.flatten(1)  # (32, more)
        torch.testing.assert_close(matrix @ matrix.t(), 2.0 * torch.eye(32), atol=1e-4, rtol=0)
        assert not convolution.bias.any()


def test_forget_gate_is_biased():
    """tf.contrib.rnn.LayerNormBasicLSTMCell: forget_bias 1."""
    lstm = parts_of(workflow_of("og_wm_carracing"))["mdn_rnn"].lstm
    assert lstm.bias_ih_l0.view(4, -1).mean(1).tolist() == [0.0, 1.0, 0.0, 0.0]
    assert not lstm.bias_hh_l0.any()


def test_averaged_codebook():
    """vmicheli/delta-iris quantizer.py: U(±1/1024), normalized by the first update; here from the start."""
    quantizer = parts_of(workflow_of("delta_iris_crafter"))["tokenizer"].quantizer
    assert quantizer.table.shape == (1024, 64) and not list(quantizer.parameters())
    torch.testing.assert_close(quantizer.table.norm(dim=-1), torch.ones(1024))
    assert abs(float(quantizer.table.mean())) < 6 / 8 / math.sqrt(quantizer.table.numel())  # entries of 1/√64
    assert bool((quantizer.usage == 1.0 / 1024).all()) and int(quantizer.updates) == 0


def test_slow_copies_start_equal():
    """Targets start as copies: dreamerv3 slowvalue, tdmpc2 target_Qs, delta-iris target_model."""
    dreamer_critic = parts_of(workflow_of("dreamer_dmc_proprio"))["critic"]
    critic = parts_of(workflow_of("tdmpc2_dmc_state"))["critic"]
    for online, slow in (
        (dreamer_critic.head, dreamer_critic.slow.network),
        (critic.online, critic.slow.network),
    ):
        copies = {**dict(slow.named_buffers()), **dict(slow.named_parameters())}
        names = dict(online.named_parameters())
        assert names and all(torch.equal(copies[name], value) for name, value in names.items())


# ---------------------------------------------------------------- imagined steps


def noise_shape(experiment: str, hook: str, noise: str) -> tuple[int, ...]:
    shape: tuple[int, ...] = workflow_of(experiment).hooks()[hook].noise[noise].shape
    return shape


@pytest.mark.parametrize(
    ("experiment", "steps"),
    [
        ("iris_atari100k", 19),  # eloialonso/iris actor_critic.py: 20 steps, returns and losses of [:, :-1]
        (
            "delta_iris_atari100k",
            20,
        ),  # vmicheli/delta-iris actor_critic.py: 20 steps and the next frame's value
        ("delta_iris_crafter", 15),
    ],
)
def test_imagined_steps_of_iris(experiment: str, steps: int):
    """Every predicted reward belongs to a trained action; the last frame only bootstraps."""
    assert noise_shape(experiment, "update_actor_critic", "model")[1] == steps
    assert noise_shape(experiment, "update_actor_critic", "action")[1] == steps + 1


@pytest.mark.parametrize("experiment", ["dreamer_crafter", "dreamer_dmc_proprio"])
def test_imagined_steps_of_dreamer(experiment: str):
    """danijar/dreamerv3 configs.yaml imag_length 15: 16 states, the last only bootstraps."""
    for noise in ("prior", "action"):
        assert noise_shape(experiment, "update", noise)[0] == 15


@pytest.mark.parametrize(("experiment", "horizon"), [("tdmpc2_dmc_state", 3), ("tdmpc_dmc", 5)])
def test_latent_steps_of_tdmpc(experiment: str, horizon: int):
    """tdmpc2 config.yaml and tdmpc cfgs: horizon 3 and 5; the policy is trained on one latent more."""
    assert noise_shape(experiment, "update", "target_action")[0] == horizon
    assert noise_shape(experiment, "update", "action")[0] == horizon + 1


def test_world_models_evolves_in_the_environment():
    """hardmaru/WorldModelsExperiments carracing: nothing is trained on imagined steps."""
    config = compose_config(["experiment=og_wm_carracing"])
    assert "evolve_in_dream" not in str(config.training.phases) and "evolve" in str(config.training.phases)
