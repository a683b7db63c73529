"""Dreams with the policy's own actions, as films: the part of a report that every world model shows alike."""

from __future__ import annotations

from typing import Any

import torch

from rl_lab.records import Imagined

DIM = 4  # frames of a dream that has probably ended are this many times darker


def imagined_report(dream: Imagined, *, discount: float = 1.0) -> dict[str, Any]:
    """Of a decoded dream of B starts and H steps:

    imagination/<name>   (H+1, C, h, B·w) uint8, for every image: the dreams side by side, dark once they have ended
    imagination_return   mean over dreams of what they promise until their end, undiscounted

    discount: what `dream.cont` holds besides the chance of going on
    """
    assert dream.reward is not None and dream.cont is not None and dream.obs is not None
    alive = torch.cumprod((dream.cont / discount).clamp(max=1.0), 1)  # (B, H+1)
    report: dict[str, Any] = {
        "imagination_return": float((dream.reward[:, 1:] * alive[:, :-1]).sum(1).mean())
    }
    for key, frames in dream.obs.items():
        if frames.dtype == torch.uint8 and frames.ndim == 5:
            shown = torch.where(alive[..., None, None, None] < 0.5, frames // DIM, frames)
            report[f"imagination/{key}"] = shown.permute(1, 2, 3, 0, 4).flatten(3, 4).cpu()
    return report
