"""Language models of Hugging Face as backbones: loading one, and choosing which of its weights are trained.

Weights that are not trained become buffers: saved and moved, but in no optimizer, and not unfrozen when a
phase ends. Weights are read from safetensors only, so no code of a folder is executed (extra: hf).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rl_lab.errors import ConfigError, MissingPackageError, closest, install_line, one_line

TRAINED = ("norms", "frozen", "last", "lora", "all")
WEIGHTS = ("pretrained", "random")
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")  # "gpt2", "openai-community/gpt2"


def load_language_model(
    path: Path | str,
    *,
    weights: str = "pretrained",
    revision: str | None = None,
    positions: bool = True,
    layers: int | None = None,
) -> Any:
    """Load a model in float32, without its head and its token embeddings; an encoder gets a causal mask.

    path:      folder with config.json and *.safetensors, as `save_pretrained` writes, or a name on the hub
    weights:   "random": only the config is read, and the weights are drawn from torch's generator
    revision:  commit or tag on the hub
    layers:    only the first so many blocks; None: all
    positions: False sets a table of learned positions to zero; rotary positions cannot be removed
    """
    if weights not in WEIGHTS:
        raise ConfigError(f"backbone.weights is '{weights}'.{closest(weights, WEIGHTS)}")
    try:
        from transformers import AutoConfig, AutoModel
        from transformers.utils import logging
    except ImportError as error:
        raise MissingPackageError(
            f"backbone=pretrained needs the package transformers: {install_line('hf')}"
        ) from error
    folder = Path(path).expanduser()
    local = folder.is_dir() or not HUB_NAME.fullmatch(str(path))
    if local and not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} has no config.json: set components.world_model.backbone.path to a folder that "
            "`save_pretrained` wrote, or to a name on the hub"
        )
    where: dict[str, Any] = {"trust_remote_code": False, "local_files_only": local, "revision": revision}
    source = folder if local else str(path)
    if local:
        del where["revision"]
    build: dict[str, Any] = {"attn_implementation": "sdpa"}
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it lists the weights that are left out
    try:
        config = AutoConfig.from_pretrained(source, **where)
        config.is_decoder = True  # an encoder (BERT) attends to the past only
        config.add_cross_attention = False
        config.num_hidden_layers = min(layers or config.num_hidden_layers, config.num_hidden_layers)
        if weights == "random":
            model = AutoModel.from_config(config, trust_remote_code=False, **build).float()
        else:
            model = AutoModel.from_pretrained(
                source, config=config, use_safetensors=True, dtype=torch.float32, **where, **build
            )
    except Exception as error:  # transformers raises many types
        hint = "" if local else "; without a network, set path to a folder"
        raise ConfigError(
            f"{source} could not be loaded as a causal language model: {one_line(error)}{hint}"
        ) from error
    model.set_input_embeddings(nn.Identity())  # token embeddings are not used
    if getattr(model, "pooler", None) is not None:  # of an encoder; its output is not used
        model.pooler = None
    model.eval()  # without dropout
    if not positions:
        _remove_positions(model, source)
    return model


def _remove_positions(model: nn.Module, source: Any) -> None:
    tables = [
        part
        for name, part in model.named_modules()
        if isinstance(part, nn.Embedding) and name.rpartition(".")[2] in ("wpe", "position_embeddings")
    ]
    if not tables:
        raise ConfigError(f"{source} has no table of positions: set backbone.positions=true")
    for table in tables:
        nn.init.zeros_(table.weight)
        _to_buffers(table)


def choose_trained(model: Any, trained: str, *, last: int = 1, rank: int = 8) -> None:
    """Freeze what is not trained.

    trained: "norms" only the norms · "frozen" nothing · "last" the norms and the last `last` blocks ·
             "lora" low-rank additions of rank `rank` to the linear layers of the blocks (Hu et al. 2021) ·
             "all" everything
    """
    if trained not in TRAINED:
        raise ConfigError(f"backbone.trained is '{trained}'.{closest(trained, TRAINED)}")
    if trained == "all":
        return
    blocks = model_blocks(model)
    kept: set[nn.Module] = set()
    if trained in ("norms", "last"):
        kept |= {part for part in model.modules() if "norm" in type(part).__name__.lower()}
    if trained == "last":
        if not 1 <= last <= len(blocks):
            raise ConfigError(f"backbone.last is {last}: choose 1 to {len(blocks)}, the model's blocks")
        kept |= {part for block in list(blocks)[-last:] for part in block.modules()}
    for part in model.modules():
        if part not in kept:
            _to_buffers(part)
    if trained == "lora":
        for block in blocks:
            _add_low_rank(block, rank)
    if trained != "frozen" and not any(True for _ in model.parameters()):
        raise ConfigError(
            f"{type(model).__name__} has no norms, so none of its weights would be trained: choose another model"
        )


def model_blocks(model: Any) -> nn.ModuleList:
    """The list of transformer blocks."""
    count = int(model.config.num_hidden_layers)
    for part in model.modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            return part
    raise ConfigError(
        f"{type(model).__name__} has no list of {count} blocks: choose another model, or backbone.trained=all"
    )


def _to_buffers(part: nn.Module) -> None:
    """Turn the module's own parameters into buffers."""
    for name, parameter in list(part._parameters.items()):
        if parameter is not None:
            del part._parameters[name]
            part.register_buffer(name, parameter.detach())


class LowRank(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices, which is 0 at the start."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, inputs) -> (…, outputs)."""
        added: torch.Tensor = (x @ self.down.t()) @ self.up.t()
        out: torch.Tensor = self.base(x)
        return out + added


def _add_low_rank(block: nn.Module, rank: int) -> None:
    """Replace the linear layers of a block (GPT-2 has its own class for them, with transposed weights)."""
    for part in list(block.modules()):
        for name, child in list(part.named_children()):
            weight = getattr(child, "weight", None)
            if isinstance(child, nn.Linear):
                setattr(part, name, LowRank(child, child.in_features, child.out_features, rank))
            elif type(child).__name__ == "Conv1D" and isinstance(weight, torch.Tensor):
                setattr(part, name, LowRank(child, weight.shape[0], weight.shape[1], rank))
