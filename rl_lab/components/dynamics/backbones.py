"""Sequence backbones of token world models (`protocols.SequenceBackbone`): a GRU and pretrained language models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from rl_lab.components.nn.precision import product_dtype
from rl_lab.components.nn.transformer import init_token_network
from rl_lab.errors import ConfigError, MissingPackageError, install_line, one_line

State = dict[str, torch.Tensor]


def copy_state(state: State) -> State:
    return {name: value.clone() for name, value in state.items()}


class GRUBackbone(nn.Module):
    """GRU layers of width `dim`, then a norm: constant memory, no dropout, no limit on the length."""

    seeds = 0

    def __init__(self, *, dim: int, layers: int = 2, length: int | None = None) -> None:
        super().__init__()
        self.dim = dim
        self.gru = nn.GRU(dim, dim, layers, batch_first=True)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor, seeds: torch.Tensor | None = None) -> torch.Tensor:
        """x: (B, T, dim) -> (B, T, dim)."""
        return self.norm(self.gru(x)[0])

    def init_state(self, size: int) -> State:
        weight = self.norm.weight
        return {"hidden": weight.new_zeros(size, self.gru.num_layers, self.dim)}

    def step(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """x: (B, T, dim) -> outputs (B, T, dim) and the new state."""
        out, hidden = self.gru(x, state["hidden"].transpose(0, 1).contiguous().to(x.dtype))
        return self.norm(out), {**state, "hidden": hidden.transpose(0, 1)}


# --- Pretrained language models ---
# A pretrained Hugging Face language model as the backbone of a token world model (extra: hf).
#
# Its layers are frozen; only the norms are trained, and the input and output projections if the widths differ.
# Its inputs are embeddings. Weights are read from safetensors only, so no code of the folder is executed.


class PretrainedBackbone(nn.Module):
    """A `SequenceBackbone` on top of a pretrained model.

    path:        folder with config.json and *.safetensors, as `save_pretrained` writes; nothing is downloaded
    dim, length: width of the embeddings and longest sequence, as for every backbone

    Frozen weights are buffers: saved and moved, but never trained, and not unfrozen when a phase ends. The
    model adds its own position embeddings, which it was trained with, to those of the world model.
    """

    seeds = 0  # dropout is disabled

    def __init__(self, *, dim: int, length: int, path: Path | str) -> None:
        super().__init__()
        self.dim, self.length = dim, length
        self.model = load_language_model(path)
        config = self.model.config
        limit = getattr(config, "max_position_embeddings", None)
        if limit is not None and length > limit:
            raise ConfigError(
                f"{path} reads {limit} tokens, but the world model's sequence has {length}: lower algorithm.blocks"
            )
        width = int(config.hidden_size)
        self.layers, heads = int(config.num_hidden_layers), int(config.num_attention_heads)
        self.heads = int(getattr(config, "num_key_value_heads", None) or heads)
        self.head_width = int(getattr(config, "head_dim", None) or width // heads)
        self.enter, self.leave = (
            nn.Identity() if dim == width else nn.Linear(*shape) for shape in ((dim, width), (width, dim))
        )
        for part in (self.enter, self.leave):  # only the new layers are initialised
            init_token_network(part)
        freeze_all_but_norms(self.model)

    def train(self, mode: bool = True) -> PretrainedBackbone:
        super().train(mode)
        self.model.eval()  # dropout would use torch's global generator
        return self

    def forward(self, x: torch.Tensor, seeds: torch.Tensor | None = None) -> torch.Tensor:
        """x: (B, T, dim) -> (B, T, dim)."""
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        output = self.model(inputs_embeds=self.enter(x), position_ids=positions, use_cache=False)
        return self.leave(output.last_hidden_state)

    def init_state(self, size: int) -> State:
        """An empty cache for `size` sequences; the first axis of every tensor is the batch."""
        device = next(self.model.parameters()).device
        shape = (size, self.layers, self.heads, self.length, self.head_width)
        dtype = product_dtype(device)
        return {
            "keys": torch.zeros(shape, dtype=dtype, device=device),
            "values": torch.zeros(shape, dtype=dtype, device=device),
            "filled": torch.zeros(size, dtype=torch.int64, device=device),
        }

    def step(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """T more tokens (B, T, dim) -> outputs (B, T, dim) and the new state; writes the cache in place."""
        filled = state["filled"]
        positions = filled[:, None] + torch.arange(x.shape[1], device=x.device)
        positions = positions.clamp(max=self.length - 1)
        visible = torch.arange(self.length, device=x.device) <= positions[..., None]  # (B, T, L)
        output = self.model(
            inputs_embeds=self.enter(x),
            position_ids=positions,
            attention_mask=visible.unsqueeze(1),
            past_key_values=FixedSizeCache(state["keys"], state["values"], positions),
            use_cache=True,
        )
        return self.leave(output.last_hidden_state), {**state, "filled": filled + x.shape[1]}


class FixedSizeCache:
    """Key-value cache of fixed size with the interface of transformers' `Cache`."""

    is_compileable = False

    def __init__(
        self,
        keys: torch.Tensor,  # (B, layers, heads, L, head width)
        values: torch.Tensor,
        positions: torch.Tensor,  # (B, T) of the new tokens
    ) -> None:
        self.keys, self.values, self.positions = keys, values, positions

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *unused: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New keys and values (B, heads, T, head width) -> all of that layer (B, heads, L, …)."""
        index = self.positions[:, None, :, None].expand(keys.shape)
        result = []
        for new, all_layers in ((keys, self.keys), (values, self.values)):
            layer = all_layers[:, layer_idx]
            layer.scatter_(2, index, new.to(layer.dtype))
            result.append(layer.to(new.dtype))
        return result[0], result[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: `position_ids` and `attention_mask` describe the past, which differs between sequences."""
        return 0


def load_language_model(path: Path | str) -> Any:
    """Load the model of a folder in float32, without its head and its token embeddings."""
    try:
        from transformers import AutoModel
    except ImportError as error:
        raise MissingPackageError(
            f"backbone=pretrained needs the package transformers: {install_line('hf')}"
        ) from error
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} has no config.json: set components.world_model.backbone.path to a folder that "
            "`save_pretrained` wrote"
        )
    try:
        model = AutoModel.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=torch.float32,
            attn_implementation="sdpa",
        )
    except Exception as error:  # transformers raises many types
        raise ConfigError(
            f"{folder} could not be loaded as a causal language model: {one_line(error)}"
        ) from error
    model.set_input_embeddings(nn.Identity())  # token embeddings are not used
    return model


def freeze_all_but_norms(model: nn.Module) -> None:
    """Turn all parameters except those of norms into buffers."""
    for part in model.modules():
        if "norm" in type(part).__name__.lower():
            continue
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                del part._parameters[name]
                part.register_buffer(name, parameter.detach())
    if not any(True for _ in model.parameters()):
        raise ConfigError(
            f"{type(model).__name__} has no norms, so none of its weights would be trained: choose another model"
        )
