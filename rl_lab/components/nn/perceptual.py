"""Pictures compared by the features of a VGG16 (in the manner of LPIPS, Zhang et al. 2018). The network never learns.

Weights come from a file; without one they are random, which is enough for timing and still compares edges, but is not
LPIPS. They are not saved with a run: the file, or the seed, brings them back.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import functional as F

from rl_lab.components.nn.reconstruction_losses import ReconstructionLoss
from rl_lab.errors import ConfigError

# Convolutions of each stage and their width as a multiple of the first; a pooling lies between stages. (VGG16)
STAGES = ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8))
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)  # LPIPS' normalisation of [-1, 1] pixels


class Perceptual(ReconstructionLoss):
    """Squared differences of unit-length features after each stage, averaged over places, summed over stages.

    path:  a file of tensors named weight0, bias0, …, weight12, bias12 and, for the stages' own channel weights, stage0 …
           stage4 (made with torch.save, read with weights_only); null: random weights from `seed`
    width: channels of the first stage; 64 is VGG16
    """

    def __init__(
        self, *, weight: float = 1.0, path: str | None = None, width: int = 64, seed: int = 0
    ) -> None:
        super().__init__(weight=weight)
        tensors = _random_weights(width, seed) if path is None else _load(path)
        for name, value in tensors.items():
            self.register_buffer(name, value, persistent=False)
        self.register_buffer("shift", torch.tensor(SHIFT).view(3, 1, 1), persistent=False)
        self.register_buffer("scale", torch.tensor(SCALE).view(3, 1, 1), persistent=False)

    def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(prediction), device=prediction.device)
        pairs = zip(self._features(prediction), self._features(target))
        for stage, (seen, wanted) in enumerate(pairs):
            difference = (
                F.normalize(seen, dim=1, eps=1e-10) - F.normalize(wanted, dim=1, eps=1e-10)
            ).square()
            weights = getattr(self, f"stage{stage}")
            total = total + (difference * weights.view(-1, 1, 1)).sum(1).mean((-2, -1))
        return total

    def _features(self, pixels: torch.Tensor) -> list[torch.Tensor]:
        x = (pixels.expand(-1, 3, -1, -1) * 2.0 - 1.0 - self.get_buffer("shift")) / self.get_buffer("scale")
        found, layer = [], 0
        for stage, (layers, _) in enumerate(STAGES):
            x = F.max_pool2d(x, 2) if stage else x
            for _ in range(layers):
                x = F.relu(
                    F.conv2d(x, self.get_buffer(f"weight{layer}"), self.get_buffer(f"bias{layer}"), padding=1)
                )
                layer += 1
            found.append(x)
        return found


def _random_weights(width: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors, inputs, layer = dict[str, torch.Tensor](), 3, 0
    for stage, (layers, multiple) in enumerate(STAGES):
        for _ in range(layers):
            deviation = (2.0 / (9 * inputs)) ** 0.5
            shape = (multiple * width, inputs, 3, 3)
            tensors[f"weight{layer}"] = torch.randn(shape, generator=generator) * deviation
            tensors[f"bias{layer}"] = torch.zeros(multiple * width)
            inputs, layer = multiple * width, layer + 1
        tensors[f"stage{stage}"] = torch.full((inputs,), 1.0 / inputs)
    return tensors


def _load(path: str) -> dict[str, torch.Tensor]:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(
            f"there are no perceptual weights at {file}: give a file, or path: null for random ones"
        )
    loaded = torch.load(file, weights_only=True, map_location="cpu")
    wanted = _random_weights(1, 0)
    missing = [name for name in wanted if name not in loaded]
    if missing:
        raise ConfigError(
            f"{file} lacks the tensors {', '.join(missing[:4])}: see rl_lab/components/nn/perceptual.py"
        )
    return {name: loaded[name].float() for name in wanted}
