"""A pretrained language model as backbone: loading a folder, training only the norms, cached steps.

The folders are written here, with random weights: no real pretrained model was ever run.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from rl_lab.components.dynamics.backbones import PretrainedBackbone, copy_state
from rl_lab.errors import ConfigError, MissingPackageError, install_line
from tests.workflows.iris_case import make_workflow, run_hook

B, T, WIDTH = 3, 9, 16


def write_folder(folder: Path, kind: str = "gpt2") -> dict[str, torch.Tensor]:
    """A tiny causal language model as `save_pretrained` leaves it; returns its weights."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=128, n_embd=WIDTH, n_layer=2, n_head=2))
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


@pytest.fixture(scope="module", params=["gpt2", "llama"])
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


@pytest.mark.parametrize("kind", ["iris", "delta_iris"])
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
