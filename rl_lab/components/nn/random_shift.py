"""Random shift of images: the augmentation of DrQ and TD-MPC (Kostrikov et al. 2021)."""

from __future__ import annotations

import torch


def random_shift(image: torch.Tensor, noise: torch.Tensor, pad: int) -> torch.Tensor:
    """Each image moved by up to `pad` pixels, its border repeated: (N, C, H, W), noise (N, 2) uniform -> (N, C, H, W).

    Moves by whole pixels, so that it is a choice of rows and columns: exact, in the image's own dtype.
    """
    count, channels, height, width = image.shape
    shift = (noise * (2 * pad + 1)).long().clamp(max=2 * pad) - pad  # (N, 2); noise × n may round up to n
    # Repeating the border is reading the nearest row that exists.
    rows = (torch.arange(height, device=image.device) + shift[:, :1]).clamp(0, height - 1)  # (N, H)
    columns = (torch.arange(width, device=image.device) + shift[:, 1:]).clamp(0, width - 1)  # (N, W)
    flat = (rows.unsqueeze(-1) * width + columns.unsqueeze(1)).view(count, 1, height * width)
    moved = image.reshape(count, channels, -1).gather(2, flat.expand(-1, channels, -1))
    return moved.view(count, channels, height, width)
