"""What the tokenizer keeps of frames and what the world model dreams, as pictures and films."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_lab.components.representation_learners.tokenizer import to_frames, to_pixels
from rl_lab.records import Batch
from rl_lab.workflows.base import imagined_report

if TYPE_CHECKING:
    from rl_lab.workflows.iris.workflow import IrisActing


SEQUENCES, EPISODES, STEPS = 4, 8, 20  # shown; IRIS' own reports have 20 frames and 64 dreams


@torch.no_grad()
def iris_report(workflow: IrisActing, batch: Batch) -> dict[str, Any]:
    """Of a batch (B, T), which may be padded:

    reconstruction/<name>       (C, 2·H, B·W) uint8: frames above what the tokenizer makes of them
    imagination/<name>, imagination_return   of dreams from each sequence's first row: see imagined_report.py
    reconstruction_error        mean squared error of pixels in [0, 1]
    codes_used                  share of all codes

    Noise has a generator of its own: a report neither changes training nor differs between calls.
    """
    key = workflow.tokenizer.key
    truth, shown, tokens, real = _reconstructions(workflow, batch)
    weight = real.float()
    error = ((truth - shown).square().mean((-3, -2, -1)) * weight).sum() / weight.sum().clamp(min=1.0)
    pair = torch.stack([_strip(truth, real), _strip(shown, real)])  # (2, n, C, H, W)
    first = Batch({name: value[:EPISODES, :1] for name, value in batch.columns.items()})
    start = _first_real_row(batch, first)
    generator = torch.Generator(workflow.device).manual_seed(0)
    dream = workflow.imagine(horizon=STEPS, batch=start, generator=generator)
    return {
        "reconstruction_error": float(error),
        "codes_used": float(len(torch.unique(tokens[real]))) / workflow.tokenizer.vocab,
        f"reconstruction/{key}": to_pixels(pair).permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2).cpu(),
        **imagined_report(dream),
    }


def _reconstructions(
    workflow: IrisActing, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Frames (B, T', C, H, W), what the tokenizer makes of them, their tokens (B, T', K), and which are real (B, T')."""
    tokenizer = workflow.tokenizer
    frames = to_frames(batch.obs[tokenizer.key][:SEQUENCES])
    real = torch.ones(frames.shape[:2], dtype=torch.bool, device=frames.device)
    if batch.mask is not None:
        real = batch.mask[:SEQUENCES]
    with workflow.autocast():
        if not tokenizer.contextual:
            flat = frames.flatten(0, 1)
            tokens = tokenizer.encode(flat)
            shown = tokenizer.decode(tokens)
        else:
            action = batch.action[:SEQUENCES, :-1].flatten()
            before, flat = frames[:, :-1].flatten(0, 1), frames[:, 1:].flatten(0, 1)
            tokens = tokenizer.encode(flat, before, action)
            shown = tokenizer.decode(tokens, before, action)
            frames, real = frames[:, 1:], real[:, 1:] & real[:, :-1]
    size = frames.shape[:2]
    return frames, shown.float().unflatten(0, size), tokens.unflatten(0, size), real


def _strip(frames: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """One real frame of each sequence, (B, C, H, W): the last."""
    rows = torch.arange(real.shape[1], device=real.device)
    last = torch.where(real, rows, 0).amax(1)
    return frames[torch.arange(len(frames), device=frames.device), last]


def _first_real_row(batch: Batch, first: Batch) -> Batch:
    """As `first`, from each sequence's first row that is not padding."""
    if batch.mask is None:
        return first
    rows = batch.mask[: len(first.reward)].int().argmax(1)
    pick = torch.arange(len(rows), device=rows.device)
    return Batch({name: value[pick, rows].unsqueeze(1) for name, value in batch.columns.items()})
