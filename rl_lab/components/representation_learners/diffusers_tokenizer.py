"""A pretrained VQ-VAE of the library diffusers (`VQModel`) as the tokenizer of IRIS (extra: vq)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rl_lab.components.nn.losses import check_image_side
from rl_lab.components.nn.optim import exempt_from_decay
from rl_lab.components.nn.quantizers import VectorQuantizer
from rl_lab.components.representation_learners.tokenizer import FrameTokenizer, frame_key, frame_shape
from rl_lab.errors import ConfigError, MissingPackageError, install_line, one_line
from rl_lab.records import Spec

if TYPE_CHECKING:
    from rl_lab.components.nn.return_critic import ReturnCritic


class DiffusersTokenizer(FrameTokenizer):
    """Encoder, codebook and decoder of a folder that `VQModel.save_pretrained` wrote.

    path:       folder with config.json and *.safetensors; nothing is downloaded, no code of it is executed
    trained:    False: its weights are fixed, and there is no hook update_tokenizer; True: they are trained on
    losses, commitment, critic: as for the other tokenizers, if trained
    """

    def __init__(
        self,
        spec: Spec,
        losses: Mapping[str, nn.Module],
        *,
        path: Path | str,
        trained: bool = False,
        commitment: float = 0.25,
        critic: Callable[[int], ReturnCritic] | None = None,
    ) -> None:
        nn.Module.__init__(self)
        channels, side = frame_shape(spec)
        model = load_vq_model(path)
        config = model.config
        if int(config.in_channels) != channels or int(config.out_channels) != channels:
            raise ConfigError(
                f"{path} takes images of {config.in_channels} channels, but {spec.name} has {channels}: "
                "choose another model, or an environment with colours"
            )
        halvings = len(config.block_out_channels) - 1
        if side % 2**halvings:
            raise ConfigError(
                f"images of {side}×{side} cannot be downsampled {halvings} times as {path} does: "
                "set environment.size"
            )
        self.key, self.grid = frame_key(spec), side >> halvings
        self.spatial = config.norm_type == "spatial"
        self.encoder, self.decoder = model.encoder, model.decoder
        self.before, self.after = model.quant_conv, model.post_quant_conv
        table = model.quantize.embedding.weight
        self.quantizer = VectorQuantizer(vocab=len(table), dim=table.shape[1], commitment=commitment)
        self.quantizer.codes.weight.data.copy_(table.data)
        self.num_tokens, self.vocab = self.grid**2, self.quantizer.vocab
        check_image_side(losses, side)
        self.losses = nn.ModuleDict(losses if trained else {})
        self.critic = critic(self.num_tokens * self.quantizer.dim) if trained and critic else None
        if not trained:
            for part in list(self.modules()):
                for name, parameter in list(part._parameters.items()):
                    if parameter is not None:
                        del part._parameters[name]
                        part.register_buffer(name, parameter.detach())
        exempt_from_decay(self)

    def _vectors(self, frame: torch.Tensor) -> torch.Tensor:
        grid: torch.Tensor = self.before(self.encoder(frame * 2.0 - 1.0))
        return grid.flatten(2).transpose(1, 2).flatten(0, 1)

    def _reconstruct(self, vectors: torch.Tensor) -> torch.Tensor:
        grid = vectors.transpose(1, 2).unflatten(2, (self.grid, self.grid))
        frame: torch.Tensor = self.decoder(self.after(grid), grid if self.spatial else None)
        return (frame.float() + 1.0) / 2.0


def load_vq_model(path: Path | str) -> Any:
    try:
        from diffusers import VQModel
    except ImportError as error:
        raise MissingPackageError(
            f"tokenizer=diffusers needs the package diffusers: {install_line('vq')}"
        ) from error
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} has no config.json: set components.tokenizer.path to a folder that "
            "`VQModel.save_pretrained` wrote"
        )
    try:
        return VQModel.from_pretrained(
            str(folder), use_safetensors=True, local_files_only=True, torch_dtype=torch.float32
        )
    except Exception as error:  # diffusers raises many types
        raise ConfigError(f"{folder} could not be loaded as a VQModel: {one_line(error)}") from error
