"""A pretrained causal language model of Hugging Face, from a folder, as the sequence backbone of a token world model.

Its own layers stay as they were loaded; the norms learn, and a projection on each side where the widths differ. It is
given embeddings, never words. Extra `hf`; weights are read as safetensors only, so nothing of the folder is run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from rl_lab.components.dynamics.sequence_backbone import State
from rl_lab.components.nn.precision import product_dtype
from rl_lab.components.nn.transformer import init_token_network
from rl_lab.errors import ConfigError, MissingPackageError, one_line
from rl_lab.utils.install import install_line


class PretrainedBackbone(nn.Module):
    """path: a folder with config.json and *.safetensors, as `save_pretrained` writes it; nothing is downloaded.

    dim, length: as every backbone, width of the embeddings and the longest sequence

    Frozen weights are buffers: saved and moved, never trained, and not thawed by a phase that ends. The model's own
    positions are added to the world model's: it was trained with them.
    """

    seeds = 0  # its dropout is off, as it is for whoever uses a pretrained model without tuning it

    def __init__(self, *, dim: int, length: int, path: Path | str) -> None:
        super().__init__()
        self.dim, self.length = dim, length
        self.model = load_language_model(path)
        config = self.model.config
        limit = getattr(config, "max_position_embeddings", None)
        if limit is not None and length > limit:
            raise ConfigError(
                f"{path} reads {limit} tokens and the world model's sequence has {length}: lower algorithm.blocks"
            )
        width = int(config.hidden_size)
        self.layers, heads = int(config.num_hidden_layers), int(config.num_attention_heads)
        self.heads = int(getattr(config, "num_key_value_heads", None) or heads)
        self.head_width = int(getattr(config, "head_dim", None) or width // heads)
        self.enter, self.leave = (
            nn.Identity() if dim == width else nn.Linear(*shape) for shape in ((dim, width), (width, dim))
        )
        for part in (self.enter, self.leave):  # what is loaded is never initialised
            init_token_network(part)
        freeze_all_but_norms(self.model)

    def train(self, mode: bool = True) -> PretrainedBackbone:
        super().train(mode)
        self.model.eval()  # dropout would draw from torch's own generator
        return self

    def forward(self, x: torch.Tensor, seeds: torch.Tensor | None = None) -> torch.Tensor:
        """x: (B, T, dim) -> (B, T, dim)."""
        places = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        found = self.model(inputs_embeds=self.enter(x), position_ids=places, use_cache=False)
        return self.leave(found.last_hidden_state)

    def init_state(self, size: int) -> State:
        """An empty cache for `size` sequences; every tensor has them first."""
        device = next(self.model.parameters()).device
        shape = (size, self.layers, self.heads, self.length, self.head_width)
        dtype = product_dtype(device)
        return {
            "keys": torch.zeros(shape, dtype=dtype, device=device),
            "values": torch.zeros(shape, dtype=dtype, device=device),
            "filled": torch.zeros(size, dtype=torch.int64, device=device),
        }

    def step(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """T more tokens, (B, T, dim): their results, and the state with them. The cache itself is written in place."""
        filled = state["filled"]
        places = filled[:, None] + torch.arange(x.shape[1], device=x.device)
        places = places.clamp(max=self.length - 1)
        seen = torch.arange(self.length, device=x.device) <= places[..., None]  # (B, T, L)
        found = self.model(
            inputs_embeds=self.enter(x),
            position_ids=places,
            attention_mask=seen.unsqueeze(1),
            past_key_values=PlacedCache(state["keys"], state["values"], places),
            use_cache=True,
        )
        return self.leave(found.last_hidden_state), {**state, "filled": filled + x.shape[1]}


class PlacedCache:
    """What the package's models ask of a cache, over tensors of fixed size that are written at places of our choice."""

    is_compileable = False

    def __init__(
        self,
        keys: torch.Tensor,  # (B, layers, heads, L, head's width)
        values: torch.Tensor,
        places: torch.Tensor,  # (B, T) where the new ones go
    ) -> None:
        self.keys, self.values, self.places = keys, values, places

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *unused: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """keys, values: (B, heads, T, head's width), the new ones; returns all of that layer, (B, heads, L, …)."""
        index = self.places[:, None, :, None].expand(keys.shape)
        found = []
        for new, all_layers in ((keys, self.keys), (values, self.values)):
            layer = all_layers[:, layer_idx]
            layer.scatter_(2, index, new.to(layer.dtype))
            found.append(layer.to(new.dtype))
        return found[0], found[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: what comes before is said by places and mask, which differ between sequences."""
        return 0


def load_language_model(path: Path | str) -> Any:
    """The model of a folder in float32, without its head and its table of words."""
    try:
        from transformers import AutoModel
    except ImportError as error:
        raise MissingPackageError(
            f"a pretrained backbone needs the package transformers: {install_line('hf')}"
        ) from error
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} is no folder of a pretrained model: it has no config.json; "
            "set components.world_model.backbone.path to one that `save_pretrained` wrote"
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
    except Exception as error:  # the package's own errors are many
        raise ConfigError(
            f"{folder} could not be loaded as a causal language model: {one_line(error)}"
        ) from error
    model.set_input_embeddings(nn.Identity())  # words are never looked up here
    return model


def freeze_all_but_norms(model: nn.Module) -> None:
    """Turn all weights but those of norms into buffers."""
    for part in model.modules():
        if "norm" in type(part).__name__.lower():
            continue
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                del part._parameters[name]
                part.register_buffer(name, parameter.detach())
    if not any(True for _ in model.parameters()):
        raise ConfigError(
            f"{type(model).__name__} has no norms, so nothing of it would learn: choose another model"
        )
