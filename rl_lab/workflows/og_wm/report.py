"""Report of World Models: reconstructions of V, and dreams of M at several temperatures next to the truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from rl_lab.records import Batch

if TYPE_CHECKING:
    from rl_lab.workflows.og_wm.workflow import OriginalWorldModelsWorkflow


REPORT_SEQUENCES, REPORT_ROWS = 4, 48  # size of the batch for a report
TEMPERATURES = (0.1, 0.7, 1.0, 1.3)
BAR = (
    2  # pixels at the top of each image: green (white) while the model observes, red (black) while it dreams
)


@torch.no_grad()
def world_models_report(workflow: OriginalWorldModelsWorkflow, batch: Batch) -> dict[str, Any]:
    """Images, videos and errors of a batch (B, T) whose sequences stay within episodes; padding is masked.

    reconstruction/<name>        (C, 2·H, B·W): first images above their reconstructions
    dream/<name>                 (T, C, B·H, (1 + temperatures)·W): truth, then one dream for each temperature
                                 with the recorded actions; the first quarter of each sequence is observed
    reconstruction_error, dream_error/<temperature>: mean squared error of pixels in [0, 1]

    The noise has its own generator with a fixed seed: a report is reproducible and does not change training.
    """
    seen = max(1, batch.reward.shape[1] // 4)
    truth = {key: batch.obs[key] for key in workflow.vae.keys}
    latent = workflow.encode_sequence(truth)
    reconstruction = workflow.dream_observation({"z": latent["mu"]})
    dreams = dreams_at(workflow, batch, seen, TEMPERATURES)
    real = torch.ones_like(batch.is_first) if batch.mask is None else batch.mask
    report: dict[str, Any] = {"reconstruction_error": pixel_error(truth, reconstruction, real)}
    for temperature, dream in dreams.items():
        late = {key: value[:, seen:] for key, value in truth.items()}
        report[f"dream_error/{temperature}"] = pixel_error(
            late, {key: value[:, seen:] for key, value in dream.items()}, real[:, seen:]
        )
    for key in truth:
        pair = torch.stack([truth[key][:, 0], reconstruction[key][:, 0]])  # (2, B, C, H, W)
        report[f"reconstruction/{key}"] = pair.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2).cpu()
        columns = [truth[key], *(with_bar(dream[key], seen) for dream in dreams.values())]
        video = torch.cat(columns, -1)  # (B, T, C, H, columns·W)
        report[f"dream/{key}"] = video.permute(1, 2, 0, 3, 4).flatten(2, 3).cpu()
    return report


@torch.no_grad()
def dreams_at(
    workflow: OriginalWorldModelsWorkflow, batch: Batch, seen: int, temperatures: Sequence[float]
) -> dict[float, dict[str, torch.Tensor]]:
    """Temperature -> name -> video (B, T, C, H, W) uint8: `seen` reconstructed images, then dreamed ones."""
    start = Batch({key: value[:, :seen] for key, value in batch.columns.items()})
    original, videos = workflow.temperature, {}
    try:
        for temperature in temperatures:
            workflow.temperature = temperature
            generator = torch.Generator(workflow.device).manual_seed(0)
            state = workflow.dream_start(start, generator=generator)
            latents = [*workflow.encode_sequence(start.obs)["mu"].unbind(1)]
            for t in range(seen, batch.reward.shape[1]):
                noise = workflow.dream_noise(len(batch.reward), generator)
                state, _, _ = workflow.dream_latent(state, batch.action[:, t - 1], noise)
                latents.append(state["z"])
            videos[temperature] = workflow.dream_observation({"z": torch.stack(latents, 1)})
    finally:
        workflow.temperature = original
    return videos


def pixel_error(truth: dict[str, torch.Tensor], model: dict[str, torch.Tensor], real: torch.Tensor) -> float:
    """Mean squared error of images (B, T, C, H, W) uint8, scaled to [0, 1], over the real rows (B, T)."""
    errors = [
        ((truth[key].float() - model[key].float()) / 255.0).square().mean((-3, -2, -1)) for key in truth
    ]
    error = torch.stack(errors).mean(0)
    return float((error * real).sum() / real.sum().clamp(min=1))


def with_bar(images: torch.Tensor, seen: int) -> torch.Tensor:
    """Add a bar at the top of images (B, T, C, H, W) uint8."""
    images = images.clone()
    images[..., :BAR, :] = 0
    colour = images.shape[2] >= 3
    images[:, :seen, slice(1, 2) if colour else slice(None), :BAR] = 255
    if colour:
        images[:, seen:, 0, :BAR] = 255
    return images
