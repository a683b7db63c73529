"""How far an open-loop dream is from what happened: pictures, numbers, rewards and ends, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from rl_lab.records import Batch
from rl_lab.tools import statistics

if TYPE_CHECKING:
    from rl_lab.tools.dream_episodes import Segments

PART = 32  # segments dreamed at a time
SHARPEST = 60.0  # dB: what a frame without any error counts as; one grey value off everywhere is 48
SMALLEST_ERROR = 10 ** (-SHARPEST / 10)


@dataclass
class Dream:
    """What one model expected: errors and pictures by segment and step, (B, H) and (B, H, …)."""

    errors: dict[str, np.ndarray]  # "image mse", "image psnr", …, "reward error", "end accuracy"
    ends: np.ndarray  # (B, H) probability of an end
    reward: np.ndarray  # (B, H) expected
    obs: dict[str, np.ndarray] = field(default_factory=dict)  # decoded, of the first sample


@dataclass
class Curve:
    """One metric over the horizon, (H,) each: the mean over segments and its interval over episodes."""

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    overall: float  # over all steps


@torch.no_grad()
def open_loop(workflow: Any, segments: Segments, *, samples: int, seed: int, device: torch.device) -> Dream:
    """Show the model the context, then tell it only the actions. Errors are means over `samples` dreams."""
    horizon = segments.mask.shape[1]
    errors: dict[str, list[np.ndarray]] = {}
    ends: list[np.ndarray] = []
    rewards: list[np.ndarray] = []
    kept: dict[str, list[np.ndarray]] = {}
    generator = torch.Generator(device).manual_seed(seed)
    for part in segments.parts(PART):
        context = Batch(
            {
                name: value[part].repeat_interleave(samples, 0).to(device)
                for name, value in segments.context.columns.items()
            }
        )
        action = segments.action[part].repeat_interleave(samples, 0).to(device)
        state = workflow.dream_start(context, generator=generator)
        found: dict[str, list[torch.Tensor]] = {}
        chance: list[torch.Tensor] = []
        expected: list[torch.Tensor] = []
        seen: dict[str, list[torch.Tensor]] = {}
        for step in range(horizon):
            state, dreamed = workflow.dream_step(state, action[:, step], generator=generator)
            truth = {name: value[part, step].to(device) for name, value in segments.obs.items()}
            for name, value in dreamed.obs.items():
                for metric, error in observation_errors(
                    value, truth[name].repeat_interleave(samples, 0)
                ).items():
                    found.setdefault(f"{name} {metric}", []).append(_mean_of(error, samples))
                seen.setdefault(name, []).append(value[::samples].cpu())
            reward = segments.reward[part, step].to(device).repeat_interleave(samples, 0)
            found.setdefault("reward error", []).append(
                _mean_of((dreamed.reward.float() - reward).abs(), samples)
            )
            expected.append(_mean_of(dreamed.reward.float(), samples))
            chance.append(_mean_of(dreamed.terminated.float(), samples))
        for name, steps in found.items():
            errors.setdefault(name, []).append(torch.stack(steps, 1).cpu().numpy())
        ends.append(torch.stack(chance, 1).cpu().numpy())
        rewards.append(torch.stack(expected, 1).cpu().numpy())
        for name, steps in seen.items():
            kept.setdefault(name, []).append(torch.stack(steps, 1).numpy())
    joined = {name: np.concatenate(parts) for name, parts in errors.items()}
    chances = np.concatenate(ends)
    joined["end accuracy"] = _end_accuracy(chances, segments)
    observations = {name: np.concatenate(parts) for name, parts in kept.items()}
    return Dream(joined, chances, np.concatenate(rewards), observations)


def repeat_last(segments: Segments) -> Dream:
    """What any model should beat: the last picture stays, rewards are the mean, nothing ends."""
    errors: dict[str, np.ndarray] = {}
    obs: dict[str, np.ndarray] = {}
    total, horizon = segments.mask.shape
    for name, truth in segments.obs.items():
        last = segments.context.obs[name][:, -1]
        per_step = [observation_errors(last, truth[:, step]) for step in range(horizon)]
        for metric in per_step[0]:
            errors[f"{name} {metric}"] = torch.stack([found[metric] for found in per_step], 1).numpy()
        obs[name] = last[:, None].expand(-1, horizon, *last.shape[1:]).numpy()
    mean = segments.reward[segments.mask].mean()
    errors["reward error"] = (segments.reward - mean).abs().numpy()
    nothing = np.zeros((total, horizon))
    errors["end accuracy"] = _end_accuracy(nothing, segments)
    return Dream(errors, nothing, np.full((total, horizon), float(mean)), obs)


def _end_accuracy(chances: np.ndarray, segments: Segments) -> np.ndarray:
    return ((chances > 0.5) == segments.terminated.numpy()).astype(np.float64)


def _mean_of(values: torch.Tensor, samples: int) -> torch.Tensor:
    return values.reshape(-1, samples).mean(1)


# ---------------------------------------------------------------- one observation


def observation_errors(dreamed: torch.Tensor, truth: torch.Tensor) -> dict[str, torch.Tensor]:
    """(B, …) each -> metric -> (B,). Pictures, uint8 (B, C, H, W), in [0, 1]: mse, psnr, ssim. Numbers: mse."""
    if truth.dtype != torch.uint8 or truth.ndim != 4:
        difference = dreamed.float() - truth.float()
        return {"mse": difference.square().flatten(1).mean(1)}
    first, second = dreamed.float() / 255.0, truth.float() / 255.0
    error = (first - second).square().flatten(1).mean(1)
    return {"mse": error, "psnr": psnr(error), "ssim": ssim(first, second)}


def psnr(mse: torch.Tensor) -> torch.Tensor:
    """Peak signal-to-noise ratio in dB of values in [0, 1], at most SHARPEST."""
    return -10.0 * torch.log10(mse.clamp_min(SMALLEST_ERROR))


def ssim(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Structural similarity of pictures (B, C, H, W) in [0, 1], mean over pixels and channels -> (B,).

    Wang et al. 2004: Gaussian window of 11 × 11 with σ 1.5, K₁ 0.01, K₂ 0.03, only where the window fits; pictures
    smaller than the window get the largest odd one that fits.
    """
    side = min(11, *first.shape[-2:])
    side -= 1 - side % 2
    offsets = torch.arange(side, device=first.device, dtype=torch.float32) - side // 2
    window = torch.exp(-offsets.square() / (2 * 1.5**2))
    window = window / window.sum()
    channels = first.shape[1]
    across = window.view(1, 1, 1, side).expand(channels, 1, 1, side)
    down = window.view(1, 1, side, 1).expand(channels, 1, side, 1)

    def local_mean(picture: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(functional.conv2d(picture, across, groups=channels), down, groups=channels)

    small, smaller = 0.01**2, 0.03**2
    mean_1, mean_2 = local_mean(first), local_mean(second)
    variance_1 = local_mean(first * first) - mean_1 * mean_1
    variance_2 = local_mean(second * second) - mean_2 * mean_2
    covariance = local_mean(first * second) - mean_1 * mean_2
    brightness = (2 * mean_1 * mean_2 + small) / (mean_1.square() + mean_2.square() + small)
    structure = (2 * covariance + smaller) / (variance_1 + variance_2 + smaller)
    return (brightness * structure).flatten(1).mean(1)


# ---------------------------------------------------------------- over segments


def curves(dream: Dream, segments: Segments) -> dict[str, Curve]:
    """Every metric over the horizon. Segments of one episode resemble each other, so whole episodes are drawn anew."""
    mask = segments.mask.numpy()
    found = {}
    for name, errors in dream.errors.items():
        sums, counts = [], []
        for episode in np.unique(segments.episode):
            own = segments.episode == episode
            sums.append(np.where(mask[own], errors[own], 0.0).sum(0))
            counts.append(mask[own].sum(0))
        value, low, high = statistics.ratio_band(np.stack(sums), np.stack(counts))
        overall = float(errors[mask].mean())
        found[name] = Curve(value, low, high, overall)
    return found


def ends_found(dream: Dream, segments: Segments) -> dict[str, float | int | None]:
    """Of the ends that lie in the segments, how many were foretold at their step, and how often one was that never came."""
    mask, ended = segments.mask.numpy(), segments.terminated.numpy()
    foretold = dream.ends > 0.5
    real, quiet = mask & ended, mask & ~ended
    return {
        "ends": int(real.sum()),
        "found": float(foretold[real].mean()) if real.any() else None,
        "false": float(foretold[quiet].mean()) if quiet.any() else None,
        "brier": float(np.square(dream.ends - ended)[mask].mean()),
    }


def worst(dream: Dream, segments: Segments, name: str, count: int) -> list[int]:
    """Segments with the greatest mean error of one metric: long ones first, and of different episodes if possible."""
    mask = segments.mask.numpy()
    means = np.where(mask, dream.errors[name], 0.0).sum(1) / mask.sum(1)
    short = mask.sum(1) < mask.shape[1] / 2  # a strip of two frames shows little
    order = [int(index) for index in np.lexsort((-means, short))]
    chosen: list[int] = []
    for distinct in (True, False):
        for index in order:
            taken = {int(segments.episode[other]) for other in chosen}
            if (
                len(chosen) < count
                and index not in chosen
                and not (distinct and int(segments.episode[index]) in taken)
            ):
                chosen.append(index)
    return chosen
