"""Report of IRIS: reconstructions of the tokenizer and imagined trajectories of the world model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_lab.components.representation_learners.tokenizer import to_frames, to_pixels
from rl_lab.records import Batch
from rl_lab.workflows.base import imagined_report

if TYPE_CHECKING:
    from rl_lab.workflows.iris.workflow import IrisActing


SEQUENCES, EPISODES, STEPS = 4, 8, 20  # shown; the reports of eloialonso/iris have 64 episodes of 20 frames


@torch.no_grad()
def iris_report(workflow: IrisActing, batch: Batch) -> dict[str, Any]:
    """Reconstructions and imagined trajectories of a batch (B, T), which may be padded.

    reconstruction/<name>       (C, 2·H, B·W) uint8: frames above their reconstructions
    imagination/<name>, imagination_return   from the first row of each sequence: see `imagined_report`
    reconstruction_error        mean squared error of pixels in [0, 1]
    codes_used                  fraction of all codes

    The noise has its own generator with a fixed seed: a report is reproducible and does not change training.
    """
    key = workflow.tokenizer.key
    truth, reconstruction, tokens, real = _reconstructions(workflow, batch)
    weight = real.float()
    error = ((truth - reconstruction).square().mean((-3, -2, -1)) * weight).sum() / weight.sum().clamp(
        min=1.0
    )
    pair = torch.stack([_last_frames(truth, real), _last_frames(reconstruction, real)])  # (2, n, C, H, W)
    shown = {
        "reconstruction_error": float(error),
        **_codes_used(tokens[real], workflow.tokenizer.vocab),
        f"reconstruction/{key}": to_pixels(pair).permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2).cpu(),
    }
    if not getattr(workflow.world_model, "dreams", True):
        return shown
    first = Batch({name: value[:EPISODES, :1] for name, value in batch.columns.items()})
    start = _first_real_row(batch, first)
    generator = torch.Generator(workflow.device).manual_seed(0)
    imagined = workflow.imagine(horizon=STEPS, batch=start, decode=True, generator=generator)
    return {**shown, **imagined_report(imagined)}


def _codes_used(tokens: torch.Tensor, vocab: int) -> dict[str, float]:
    """The fraction of codes among tokens; without a quantizer there are none."""
    return {"codes_used": float(len(torch.unique(tokens))) / vocab} if vocab else {}


def _reconstructions(
    workflow: IrisActing, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Frames (B, T', C, H, W), reconstructions, tokens (B, T', K), and a mask of the real rows (B, T')."""
    tokenizer = workflow.tokenizer
    frames = to_frames(batch.obs[tokenizer.key][:SEQUENCES])
    real = torch.ones(frames.shape[:2], dtype=torch.bool, device=frames.device)
    if batch.mask is not None:
        real = batch.mask[:SEQUENCES]
    with workflow.autocast():
        if not tokenizer.contextual:
            flat = frames.flatten(0, 1)
            tokens = tokenizer.encode(flat)
            reconstruction = tokenizer.decode(tokens)
        else:
            action = batch.action[:SEQUENCES, :-1].flatten(0, 1)
            before, flat = frames[:, :-1].flatten(0, 1), frames[:, 1:].flatten(0, 1)
            tokens = tokenizer.encode(flat, before, action)
            reconstruction = tokenizer.decode(tokens, before, action)
            frames, real = frames[:, 1:], real[:, 1:] & real[:, :-1]
    size = frames.shape[:2]
    return frames, reconstruction.float().unflatten(0, size), tokens.unflatten(0, size), real


def _last_frames(frames: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """The last real frame of each sequence, (B, C, H, W)."""
    rows = torch.arange(real.shape[1], device=real.device)
    last = torch.where(real, rows, 0).amax(1)
    return frames[torch.arange(len(frames), device=frames.device), last]


def _first_real_row(batch: Batch, first: Batch) -> Batch:
    """Like `first`, but with the first row of each sequence that is not padding."""
    if batch.mask is None:
        return first
    rows = batch.mask[: len(first.reward)].int().argmax(1)
    pick = torch.arange(len(rows), device=rows.device)
    return Batch({name: value[pick, rows].unsqueeze(1) for name, value in batch.columns.items()})
