"""Weights that the authors' code saved, for our parts.

Both repositories save the `state_dict` of their agent as `checkpoints/last.pt`; its keys begin with tokenizer,
world_model and actor_critic. Read at eloialonso/iris @ 24326aa (src/agent.py, src/models) and
vmicheli/delta-iris @ f8d4173 (the same files). Masks, indices and LPIPS are not weights of ours and are left out.

Δ-IRIS flattens images with the channel last, we with the channel first. The affected weights are reordered: of the
layers around the quantizer, of the policy's LSTM, and all that read or write the transformer's residual stream, which
begins with a flattened image.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from rl_lab.components.nn.residual_conv import (
    Downsample,
    ImageAttention,
    ImageNorm,
    ResidualConv,
    Upsample,
)
from rl_lab.errors import CheckpointError, ConfigError

Tensors = Mapping[str, torch.Tensor]
Weights = dict[str, dict[str, torch.Tensor]]  # by part
PARTS = ("tokenizer", "world_model", "actor_critic")
MARKS = {"iris": "tokenizer.pre_quant_conv.weight", "delta_iris": "tokenizer.quantizer.codebook"}


def published_kind(state: Mapping[str, Any]) -> str:
    """iris, delta_iris, or "" if the file is neither."""
    return next((kind for kind, key in MARKS.items() if key in state), "")


def published_weights(
    state: Mapping[str, Any], tokenizer: Any, world_model: Any, actor_critic: Any
) -> dict[str, Weights]:
    """The state_dicts of our parts: {"components": {…}, "controllers": {…}}."""
    kind = published_kind(state)
    ours = "delta_iris" if tokenizer.contextual else "iris"
    if kind != ours:
        names = {"iris": "IRIS", "delta_iris": "Δ-IRIS", "": "neither IRIS nor Δ-IRIS"}
        raise ConfigError(
            f"load.path has weights of {names[kind]}, but the run is {names[ours]}: choose its experiment"
        )
    names = dict(
        _iris_names(tokenizer) if kind == "iris" else _delta_names(tokenizer, world_model, actor_critic)
    )
    parts = {"tokenizer": tokenizer, "world_model": world_model, "actor_critic": actor_critic}
    weights: Weights = {}
    missing: list[str] = []
    for part, module in parts.items():
        weights[part] = {}
        for key in module.state_dict():
            theirs = _their_key(f"{part}.{key}", names, kind)
            if theirs in state:
                weights[part][key] = state[theirs]
            else:
                missing.append(theirs)
    if missing:
        more = f" and {len(missing) - 6} more" if len(missing) > 6 else ""
        raise CheckpointError(
            f"load.path lacks {', '.join(missing[:6])}{more}: its networks have another size than the run's"
        )
    if kind == "iris":
        for name in ("before", "after"):
            key = f"{name}.weight"
            weights["tokenizer"][key] = weights["tokenizer"][key].flatten(1)  # a 1×1 convolution
    else:
        _reorder(weights, tokenizer, world_model)
    components = {part: weights[part] for part in ("tokenizer", "world_model")}
    return {"components": components, "controllers": {"actor_critic": weights["actor_critic"]}}


def _their_key(key: str, names: Mapping[str, str], kind: str) -> str:
    """Replace the longest known beginning."""
    for end in range(len(key), 0, -1):
        if (end == len(key) or key[end] == ".") and key[:end] in names:
            return names[key[:end]] + key[end:]
    return key


# ---------------------------------------------------------------- IRIS

HEADS = {"token_head": "head_observations", "reward_head": "head_rewards", "end_head": "head_ends"}


def _iris_names(tokenizer: Any) -> Iterator[tuple[str, str]]:
    """Beginnings of our keys, and theirs."""
    for half in ("encoder", "decoder"):
        yield from _iris_image_names(half, getattr(tokenizer, half))
    yield "tokenizer.before", "tokenizer.pre_quant_conv"
    yield "tokenizer.after", "tokenizer.post_quant_conv"
    yield "tokenizer.quantizer.codes", "tokenizer.embedding"
    w = "world_model"
    yield f"{w}.place_table", f"{w}.pos_emb"
    yield f"{w}.action_table", f"{w}.embedder.embedding_tables.0"
    yield f"{w}.token_table", f"{w}.embedder.embedding_tables.1"
    for head, theirs in HEADS.items():
        yield f"{w}.{head}", f"{w}.{theirs}.head_module"
    yield f"{w}.backbone.norm", f"{w}.transformer.ln_f"
    for n in range(100):
        ours, block = f"{w}.backbone.blocks.{n}", f"{w}.transformer.blocks.{n}"
        yield f"{ours}.norm1", f"{block}.ln1"
        yield f"{ours}.norm2", f"{block}.ln2"
        yield f"{ours}.mlp", f"{block}.mlp"
        yield f"{ours}.attention", f"{block}.attn"
        yield f"{ours}.attention.project", f"{block}.attn.proj"
    for n in range(4):
        yield f"actor_critic.trunk.layers.{3 * n}", f"actor_critic.conv{n + 1}"
    yield "actor_critic.cell", "actor_critic.lstm"
    yield "actor_critic.actor", "actor_critic.actor_linear"
    yield "actor_critic.critic", "actor_critic.critic_linear"


ATTENTION = {"query": "q", "key": "k", "value": "v", "project": "proj_out"}


def _iris_image_names(half: str, network: Any) -> Iterator[tuple[str, str]]:
    """Of the encoder or decoder: levels are numbered from the largest image in both."""
    side = "down" if half == "encoder" else "up"
    level, block = 0, -1
    if half == "decoder":
        level = sum(isinstance(layer, Upsample) for layer in network.layers)
    for n, layer in enumerate(network.layers):
        ours, theirs = f"tokenizer.{half}.layers.{n}", f"tokenizer.{half}.{side}.{level}"
        if isinstance(layer, ResidualConv):
            block += 1
            yield ours, f"{theirs}.block.{block}"
            yield f"{ours}.skip", f"{theirs}.block.{block}.nin_shortcut"
        elif isinstance(layer, ImageAttention):
            yield ours, f"{theirs}.attn.{block}"
            yield from ((f"{ours}.{a}", f"{theirs}.attn.{block}.{b}") for a, b in ATTENTION.items())
        elif isinstance(layer, Downsample | Upsample):
            yield ours, f"{theirs}.{'downsample' if half == 'encoder' else 'upsample'}"
            level, block = level + (1 if half == "encoder" else -1), -1
        elif isinstance(layer, nn.Sequential):
            middle = f"tokenizer.{half}.mid"
            yield f"{ours}.0", f"{middle}.block_1"
            yield f"{ours}.1", f"{middle}.attn_1"
            yield from ((f"{ours}.1.{a}", f"{middle}.attn_1.{b}") for a, b in ATTENTION.items())
            yield f"{ours}.2", f"{middle}.block_2"
        else:
            yield ours, f"tokenizer.{half}.conv_in"
    yield f"tokenizer.{half}.norm", f"tokenizer.{half}.norm_out"
    yield f"tokenizer.{half}.out", f"tokenizer.{half}.conv_out"


# ---------------------------------------------------------------- Δ-IRIS

RESIDUAL = {"norm1": "f.0", "conv1": "f.2", "norm2": "f.3", "conv2": "f.5", "skip": "skip_projection"}


def _delta_names(tokenizer: Any, world_model: Any, actor_critic: Any) -> Iterator[tuple[str, str]]:
    """Beginnings of our keys, and theirs."""
    t, w, a = "tokenizer", "world_model", "actor_critic"
    yield from _delta_image_names(f"{t}.encoder", tokenizer.encoder, f"{t}.encoder.encoder")
    yield from _delta_image_names(f"{t}.decoder", tokenizer.decoder, f"{t}.decoder.decoder")
    yield from _delta_image_names(f"{t}.frame_net", tokenizer.frame_net, f"{t}.frame_cnn.encoder")
    yield f"{t}.action_plane", f"{t}.encoder_act_emb"
    yield f"{t}.action_grid", f"{t}.decoder_act_emb"
    yield f"{t}.before", f"{t}.quantizer.pre_quant_proj"
    yield f"{t}.after", f"{t}.quantizer.post_quant_proj"
    yield f"{t}.quantizer.table", f"{t}.quantizer.codebook"
    yield f"{t}.quantizer.usage", f"{t}.quantizer.codewords_freqs"
    yield f"{t}.quantizer.updates", f"{t}.quantizer.num_codebook_updates"
    yield from _delta_image_names(f"{w}.frame_net", world_model.frame_net, f"{w}.frame_cnn.0.encoder")
    yield f"{w}.frame_norm", f"{w}.frame_cnn.2"
    yield f"{w}.place_table", f"{w}.transformer.pos_emb"
    yield f"{w}.action_table", f"{w}.act_emb"
    yield f"{w}.token_table", f"{w}.latents_emb"
    for head, theirs in {**HEADS, "token_head": "head_latents"}.items():
        yield f"{w}.{head}", f"{w}.{theirs}.head_module"
    yield f"{w}.backbone.norm", f"{w}.transformer.ln"
    for n in range(100):
        ours, block = f"{w}.backbone.blocks.{n}", f"{w}.transformer.blocks.{n}"
        yield f"{ours}.norm1", f"{block}.sa.ln"
        yield f"{ours}.norm2", f"{block}.mlp.ln"
        yield f"{ours}.mlp", f"{block}.mlp.mlp"
        yield f"{ours}.attention", f"{block}.sa"
        yield f"{ours}.attention.project", f"{block}.sa.attention.proj"
    yield from _delta_image_names(f"{a}.trunk.net", actor_critic.trunk.net, f"{a}.model.cnn.0.encoder")
    yield f"{a}.cell", f"{a}.model.lstm"
    yield f"{a}.actor", f"{a}.model.actor_linear"
    yield f"{a}.critic", f"{a}.model.critic_linear"


def _delta_image_names(ours: str, network: Any, theirs: str) -> Iterator[tuple[str, str]]:
    """Of an encoder or decoder; theirs has SiLU as a layer of its own after the last norm."""
    after_norm = 0
    for n, layer in enumerate(network.layers):
        here, there = f"{ours}.layers.{n}", f"{theirs}.{n + after_norm}"
        yield here, there
        if isinstance(layer, ResidualConv):
            yield from ((f"{here}.{name}", f"{there}.{other}") for name, other in RESIDUAL.items())
        after_norm += isinstance(layer, ImageNorm)


def _reorder(weights: Weights, tokenizer: Any, world_model: Any) -> None:
    """Channel-last orders become channel-first; see the module's docstring."""
    w = weights["tokenizer"]
    place = channel_first(w["before.weight"].shape[1], tokenizer.patch)
    w["before.weight"] = w["before.weight"][:, place]
    w["after.weight"], w["after.bias"] = w["after.weight"][place], w["after.bias"][place]

    a = weights["actor_critic"]
    side = tokenizer.grid
    a["cell.weight_ih"] = a["cell.weight_ih"][:, channel_first(a["cell.weight_ih"].shape[1], side)]

    w = weights["world_model"]
    stream = channel_first(world_model.dim, side)
    inside = ("attention.query", "attention.key", "attention.value", "mlp.0")
    for key, value in w.items():
        layer, _, kind = key.rpartition(".")
        if layer.endswith(("_table", "_head.0", *inside)) and kind == "weight":
            w[key] = value[:, stream]  # reads the stream, or is added to it
        elif ("norm" in layer and "frame_net" not in layer) or layer.endswith(("attention.project", "mlp.2")):
            w[key] = value[stream]


def channel_first(size: int, side: int) -> torch.Tensor:
    """Where the values of a (C, side, side) image are in one that was flattened as (side, side, C)."""
    return torch.arange(size).view(side, side, -1).permute(2, 0, 1).flatten()
