"""What V sees and M expects, as pictures: reconstructions, and dreams at several temperatures beside the truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from rl_lab.records import Batch

if TYPE_CHECKING:
    from rl_lab.workflows.og_wm.workflow import OriginalWorldModelsWorkflow


REPORT_SEQUENCES, REPORT_ROWS = 4, 48  # of the batch that a report is given
TEMPERATURES = (0.1, 0.7, 1.0, 1.3)
BAR = 2  # pixels above every picture: green (white) while the model sees, red (black) while it dreams


@torch.no_grad()
def world_models_report(workflow: OriginalWorldModelsWorkflow, batch: Batch) -> dict[str, Any]:
    """Pictures and errors of a batch (B, T), which stays inside episodes; rows behind an end are masked.

    reconstruction/<name>        (C, 2·H, B·W): first images above what V makes of them
    dream/<name>                 (T, C, B·H, (1 + temperatures)·W): truth, then one dream for each temperature, led by
                                 the recorded actions; a quarter of the sequence is seen, the rest is dreamed
    reconstruction_error, dream_error/<temperature>: mean squared error of pixels in [0, 1]

    Noise is drawn from a generator of its own: a report neither changes training nor differs between calls.
    """
    seen = max(1, batch.reward.shape[1] // 4)
    truth = {key: batch.obs[key] for key in workflow.vae.keys}
    latent = workflow.see_sequence(truth)
    shown = workflow.dream_observation({"z": latent["mu"]})
    dreams = dreams_at(workflow, batch, seen, TEMPERATURES)
    real = torch.ones_like(batch.is_first) if batch.mask is None else batch.mask
    report: dict[str, Any] = {"reconstruction_error": pixel_error(truth, shown, real)}
    for temperature, dreamt in dreams.items():
        late = {key: value[:, seen:] for key, value in truth.items()}
        report[f"dream_error/{temperature}"] = pixel_error(
            late, {key: value[:, seen:] for key, value in dreamt.items()}, real[:, seen:]
        )
    for key in truth:
        pair = torch.stack([truth[key][:, 0], shown[key][:, 0]])  # (2, B, C, H, W)
        report[f"reconstruction/{key}"] = pair.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2).cpu()
        columns = [truth[key], *(with_bar(dreamt[key], seen) for dreamt in dreams.values())]
        film = torch.cat(columns, -1)  # (B, T, C, H, columns·W)
        report[f"dream/{key}"] = film.permute(1, 2, 0, 3, 4).flatten(2, 3).cpu()
    return report


@torch.no_grad()
def dreams_at(
    workflow: OriginalWorldModelsWorkflow, batch: Batch, seen: int, temperatures: Sequence[float]
) -> dict[float, dict[str, torch.Tensor]]:
    """Temperature -> name -> (B, T, C, H, W) uint8: `seen` reconstructed images, then dreamed ones."""
    start = Batch({key: value[:, :seen] for key, value in batch.columns.items()})
    usual, films = workflow.temperature, {}
    try:
        for temperature in temperatures:
            workflow.temperature = temperature
            generator = torch.Generator(workflow.device).manual_seed(0)
            state = workflow.dream_start(start, generator=generator)
            latents = [*workflow.see_sequence(start.obs)["mu"].unbind(1)]
            for t in range(seen, batch.reward.shape[1]):
                noise = workflow.dream_noise(len(batch.reward), generator)
                state, _, _ = workflow.dream_latent(state, batch.action[:, t - 1], noise)
                latents.append(state["z"])
            films[temperature] = workflow.dream_observation({"z": torch.stack(latents, 1)})
    finally:
        workflow.temperature = usual
    return films


def pixel_error(truth: dict[str, torch.Tensor], model: dict[str, torch.Tensor], real: torch.Tensor) -> float:
    """Mean squared difference of (B, T, C, H, W) uint8 images in [0, 1], over the rows (B, T) that are real."""
    errors = [
        ((truth[key].float() - model[key].float()) / 255.0).square().mean((-3, -2, -1)) for key in truth
    ]
    error = torch.stack(errors).mean(0)
    return float((error * real).sum() / real.sum().clamp(min=1))


def with_bar(images: torch.Tensor, seen: int) -> torch.Tensor:
    """images: (B, T, C, H, W) uint8, marked above."""
    images = images.clone()
    images[..., :BAR, :] = 0
    colour = images.shape[2] >= 3
    images[:, :seen, slice(1, 2) if colour else slice(None), :BAR] = 255
    if colour:
        images[:, seen:, 0, :BAR] = 255
    return images
