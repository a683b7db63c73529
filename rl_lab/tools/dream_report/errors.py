"""Errors of open-loop predictions (images, vectors, rewards, episode ends) on held-out episodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from rl_lab.components.controllers.random_policy import RandomPolicyController
from rl_lab.errors import LabError
from rl_lab.records import OBS_PREFIX, ROW_COLUMNS, ActMode, Batch, Spec
from rl_lab.tools import statistics

if TYPE_CHECKING:
    from rl_lab.agent import Agent


BATCH_SIZE = 32  # segments predicted at a time
MAX_PSNR = 60.0  # dB, for a frame without any error; one grey value off in every pixel gives 48
MIN_MSE = 10 ** (-MAX_PSNR / 10)


@dataclass
class Prediction:
    """Predictions of one model and their errors by segment and step, (B, H) and (B, H, …)."""

    errors: dict[str, np.ndarray]  # "image mse", "image psnr", …, "reward error", "end accuracy"
    ends: np.ndarray  # (B, H) probability of termination
    reward: np.ndarray  # (B, H) expected
    obs: dict[str, np.ndarray] = field(default_factory=dict)  # decoded, of the first sample


@dataclass
class Curve:
    """One metric over the horizon, (H,) each: mean over segments, with a bootstrap interval over episodes."""

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    overall: float  # over all steps


@torch.no_grad()
def open_loop(
    workflow: Any, segments: Segments, *, samples: int, seed: int, device: torch.device
) -> Prediction:
    """Encode the context, then predict from the actions alone.

    Errors are means over `samples` predictions.
    """
    horizon = segments.mask.shape[1]
    errors: dict[str, list[np.ndarray]] = {}
    ends: list[np.ndarray] = []
    rewards: list[np.ndarray] = []
    kept: dict[str, list[np.ndarray]] = {}
    generator = torch.Generator(device).manual_seed(seed)
    for part in segments.batches(BATCH_SIZE):
        context = Batch(
            {
                name: value[part].repeat_interleave(samples, 0).to(device)
                for name, value in segments.context.columns.items()
            }
        )
        action = segments.action[part].repeat_interleave(samples, 0).to(device)
        state = workflow.dream_start(context, generator=generator)
        found: dict[str, list[torch.Tensor]] = {}
        termination: list[torch.Tensor] = []
        expected: list[torch.Tensor] = []
        decoded: dict[str, list[torch.Tensor]] = {}
        for step in range(horizon):
            state, predicted = workflow.dream_step(state, action[:, step], generator=generator)
            truth = {name: value[part, step].to(device) for name, value in segments.obs.items()}
            for name, value in predicted.obs.items():
                for metric, error in observation_errors(
                    value, truth[name].repeat_interleave(samples, 0)
                ).items():
                    found.setdefault(f"{name} {metric}", []).append(_mean_of(error, samples))
                decoded.setdefault(name, []).append(value[::samples].cpu())
            reward = segments.reward[part, step].to(device).repeat_interleave(samples, 0)
            found.setdefault("reward error", []).append(
                _mean_of((predicted.reward.float() - reward).abs(), samples)
            )
            expected.append(_mean_of(predicted.reward.float(), samples))
            termination.append(_mean_of(predicted.terminated.float(), samples))
        for name, steps in found.items():
            errors.setdefault(name, []).append(torch.stack(steps, 1).cpu().numpy())
        ends.append(torch.stack(termination, 1).cpu().numpy())
        rewards.append(torch.stack(expected, 1).cpu().numpy())
        for name, steps in decoded.items():
            kept.setdefault(name, []).append(torch.stack(steps, 1).numpy())
    joined = {name: np.concatenate(parts) for name, parts in errors.items()}
    probabilities = np.concatenate(ends)
    joined["end accuracy"] = _end_accuracy(probabilities, segments)
    observations = {name: np.concatenate(parts) for name, parts in kept.items()}
    return Prediction(joined, probabilities, np.concatenate(rewards), observations)


def repeat_last(segments: Segments) -> Prediction:
    """Baseline for every model: repeats the last observation, predicts the mean reward and no termination."""
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
    zeros = np.zeros((total, horizon))
    errors["end accuracy"] = _end_accuracy(zeros, segments)
    return Prediction(errors, zeros, np.full((total, horizon), float(mean)), obs)


def _end_accuracy(probabilities: np.ndarray, segments: Segments) -> np.ndarray:
    return ((probabilities > 0.5) == segments.terminated.numpy()).astype(np.float64)


def _mean_of(values: torch.Tensor, samples: int) -> torch.Tensor:
    return values.reshape(-1, samples).mean(1)


# --- Metrics of one observation ---


def observation_errors(predicted: torch.Tensor, truth: torch.Tensor) -> dict[str, torch.Tensor]:
    """(B, …) each -> metric -> (B,). Images, uint8 (B, C, H, W), in [0, 1]: mse, psnr, ssim. Vectors: mse."""
    if truth.dtype != torch.uint8 or truth.ndim != 4:
        difference = predicted.float() - truth.float()
        return {"mse": difference.square().flatten(1).mean(1)}
    first, second = predicted.float() / 255.0, truth.float() / 255.0
    error = (first - second).square().flatten(1).mean(1)
    return {"mse": error, "psnr": psnr(error), "ssim": ssim(first, second)}


def psnr(mse: torch.Tensor) -> torch.Tensor:
    """Peak signal-to-noise ratio in dB of values in [0, 1], at most MAX_PSNR."""
    return -10.0 * torch.log10(mse.clamp_min(MIN_MSE))


def ssim(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Structural similarity of images (B, C, H, W) in [0, 1], mean over pixels and channels -> (B,).

    Wang et al. 2004: Gaussian window of 11 × 11 with σ 1.5, K₁ 0.01, K₂ 0.03, without padding; smaller images
    use the largest odd window that fits.
    """
    side = min(11, *first.shape[-2:])
    side -= 1 - side % 2
    offsets = torch.arange(side, device=first.device, dtype=torch.float32) - side // 2
    window = torch.exp(-offsets.square() / (2 * 1.5**2))
    window = window / window.sum()
    channels = first.shape[1]
    across = window.view(1, 1, 1, side).expand(channels, 1, 1, side)
    down = window.view(1, 1, side, 1).expand(channels, 1, side, 1)

    def local_mean(image: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(functional.conv2d(image, across, groups=channels), down, groups=channels)

    c1, c2 = 0.01**2, 0.03**2
    mean_1, mean_2 = local_mean(first), local_mean(second)
    variance_1 = local_mean(first * first) - mean_1 * mean_1
    variance_2 = local_mean(second * second) - mean_2 * mean_2
    covariance = local_mean(first * second) - mean_1 * mean_2
    luminance = (2 * mean_1 * mean_2 + c1) / (mean_1.square() + mean_2.square() + c1)
    structure = (2 * covariance + c2) / (variance_1 + variance_2 + c2)
    return (luminance * structure).flatten(1).mean(1)


# --- Statistics over segments ---


def curves(prediction: Prediction, segments: Segments) -> dict[str, Curve]:
    """Return every metric over the horizon. The bootstrap draws episodes: their segments are correlated."""
    mask = segments.mask.numpy()
    found = {}
    for name, errors in prediction.errors.items():
        sums, counts = [], []
        for episode in np.unique(segments.episode):
            own = segments.episode == episode
            sums.append(np.where(mask[own], errors[own], 0.0).sum(0))
            counts.append(mask[own].sum(0))
        value, low, high = statistics.ratio_band(np.stack(sums), np.stack(counts))
        overall = float(errors[mask].mean())
        found[name] = Curve(value, low, high, overall)
    return found


def end_statistics(prediction: Prediction, segments: Segments) -> dict[str, float | int | None]:
    """Return the number of terminations, the shares of true and false positives, and the Brier score."""
    mask, ended = segments.mask.numpy(), segments.terminated.numpy()
    predicted = prediction.ends > 0.5
    positive, negative = mask & ended, mask & ~ended
    return {
        "ends": int(positive.sum()),
        "found": float(predicted[positive].mean()) if positive.any() else None,
        "false": float(predicted[negative].mean()) if negative.any() else None,
        "brier": float(np.square(prediction.ends - ended)[mask].mean()),
    }


def worst_segments(prediction: Prediction, segments: Segments, name: str, count: int) -> list[int]:
    """Return the segments with the largest mean error of a metric.

    Long segments come first, and the segments are of different episodes if possible.
    """
    mask = segments.mask.numpy()
    means = np.where(mask, prediction.errors[name], 0.0).sum(1) / mask.sum(1)
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


# --- Held-out episodes ---

GOLDEN = 0.6180339887  # the fractional parts of its multiples are spread evenly for any count

Rows = dict[str, np.ndarray]  # column -> (K+1, …): one episode, as stored


class RandomActions:
    """Policy for the Evaluator with uniform random actions."""

    def __init__(self, spec: Spec) -> None:
        self._controller = RandomPolicyController(spec=spec)

    def act(self, obs: Any, policy_state: Any, is_first: Any, mode: ActMode) -> tuple[Any, Any, Any]:
        return self._controller.act(obs, mode), policy_state, {}

    def initial_policy_state(self, num_envs: int) -> dict[str, torch.Tensor]:
        return {}


def run_episodes(
    agent: Agent, count: int, *, seed: int, longest: int, policy: Any = None, progress: Any = None
) -> list[Rows]:
    """Run `count` episodes in the evaluation environments with sampled actions, at most `longest` steps each.

    policy: None means the agent itself.
    """
    from omegaconf import OmegaConf

    from rl_lab.environments.make import env_config_options
    from rl_lab.run_environments import build_evaluator

    plain: Any = OmegaConf.to_container(agent.config.environment)
    limit = env_config_options(plain, evaluation=True).get("time_limit")
    evaluator = build_evaluator(
        agent.config, agent.device, normalizer=agent.normalizer, time_limit=min(longest, limit or longest)
    )
    collector = _EpisodeRows(agent.spec)
    evaluator.run(
        policy or agent.workflow,
        episodes=count,
        label=f"dream {seed}",
        sample=True,
        on_rows=collector.add,
        on_episode=lambda episode: progress.step() if progress else None,
    )
    # Environments that finish early run extra episodes, which are dropped.
    return collector.in_order(count)


class _EpisodeRows:
    """Assembles complete episodes from vector steps."""

    def __init__(self, spec: Spec) -> None:
        self._columns = list(spec.row_columns())
        self._open: dict[int, list[Rows]] = {}
        self._done: list[list[Rows]] = []

    def add(self, rows: Mapping[str, Any]) -> None:
        values = {name: np.asarray(rows[name]) for name in self._columns}
        n = len(values["reward"])
        self._done = self._done or [[] for _ in range(n)]
        for env in range(n):
            if values["is_first"][env]:
                self._open[env] = []
            self._open[env].append({name: np.array(value[env]) for name, value in values.items()})
            if values["terminated"][env] or values["truncated"][env]:
                episode = self._open.pop(env)
                self._done[env].append(
                    {name: np.stack([row[name] for row in episode]) for name in self._columns}
                )

    def in_order(self, count: int) -> list[Rows]:
        """Return the first `count` episodes; environment i mod N runs episode i, as in the Evaluator."""
        n = len(self._done)
        return [self._done[index % n][index // n] for index in range(count)]


def read_episodes(path: Path, spec: Spec, *, count: int, longest: int) -> list[Rows]:
    """Read up to `count` evenly spaced episodes of a run's replay, an episode file or a folder of files."""
    from rl_lab.buffers.offline import OfflineBuffer

    buffer = OfflineBuffer(spec.row_columns(), path=path, spec=spec, device="cpu", storage="host")
    flags = {name: _column(buffer, name) for name in ("is_first", "terminated", "truncated")}
    spans: list[tuple[int, int, int]] = []  # stream, first row, row after the last
    for stream in range(buffer.num_streams):
        firsts = np.flatnonzero(flags["is_first"][stream])
        ends = np.append(firsts[1:], buffer.total_rows)
        spans += [(stream, int(a), int(b)) for a, b in zip(firsts, ends) if b - a > 1]
    if not spans:
        raise LabError(f"{path} contains no episode with more than one row")
    chosen = [
        spans[index]
        for index in np.unique(np.linspace(0, len(spans) - 1, min(count, len(spans))).astype(int))
    ]
    episodes = []
    for stream, first, after in chosen:
        batch = buffer.read(first, min(after - first, longest + 1))
        episodes.append({name: batch.columns[name][stream].numpy() for name in spec.row_columns()})
    return episodes


def _column(buffer: Any, name: str) -> np.ndarray:
    """Read a small column, (streams, rows), in blocks: each read loads all columns, and images are large."""
    parts = []
    for start in range(0, buffer.total_rows, 4096):
        batch = buffer.read(start, min(4096, buffer.total_rows - start))
        parts.append(batch.columns[name].numpy().copy())
    return np.concatenate(parts, axis=1)


# --- Segments ---


@dataclass
class Segments:
    """B segments of episodes: `context` rows that a model observes, then H steps with only their actions.

    Column t of the H steps is the result of action t. `mask` is False after an episode's end.
    """

    context: Batch  # (B, C, …)
    action: torch.Tensor  # (B, H, …)
    obs: dict[str, torch.Tensor]  # name -> (B, H, …)
    reward: torch.Tensor  # (B, H)
    terminated: torch.Tensor  # (B, H) bool
    mask: torch.Tensor  # (B, H) bool
    episode: np.ndarray  # (B,) index of the episode
    start: np.ndarray  # (B,) first context row within the episode

    def __len__(self) -> int:
        return len(self.episode)

    def batches(self, size: int) -> Iterator[slice]:
        for start in range(0, len(self), size):
            yield slice(start, min(start + size, len(self)))


def cut_segments(episodes: Sequence[Rows], *, context: int, horizon: int, each: int) -> Segments:
    """Cut `each` evenly spaced segments from every episode.

    The last one includes the episode's end, at a different step of the horizon in each episode, so that ends
    are spread over the horizon.
    """
    places: list[tuple[int, int]] = []
    for index, rows in enumerate(episodes):
        last = len(rows["reward"]) - context - 1  # the last start with one row to predict
        if last < 0:
            continue
        before_end = int(horizon * ((index + 1) * GOLDEN % 1.0))
        starts = np.unique(np.linspace(0, max(0, last - before_end), each).round().astype(int))
        places += [(index, int(start)) for start in starts]
    if not places:
        longest = max((len(rows["reward"]) for rows in episodes), default=0)
        raise LabError(
            f"--context {context} is not shorter than any episode (the longest has {longest} rows): "
            "give a smaller --context"
        )
    columns = {name: [] for name in episodes[0]}  # type: dict[str, list[np.ndarray]]
    mask = np.zeros((len(places), horizon), dtype=bool)
    for number, (index, start) in enumerate(places):
        rows = episodes[index]
        after = min(start + context + horizon, len(rows["reward"]))
        mask[number, : after - start - context] = True
        for name, values in rows.items():
            piece = values[start:after]
            missing = context + horizon - len(piece)
            # Rows after the end are never compared; repeating the last row gives valid actions.
            columns[name].append(
                np.concatenate([piece, np.repeat(piece[-1:], missing, axis=0)]) if missing else piece
            )
    stacked = {name: torch.from_numpy(np.stack(values)) for name, values in columns.items()}
    return Segments(
        context=Batch({name: value[:, :context] for name, value in stacked.items()}),
        action=stacked["action"][:, context - 1 : context - 1 + horizon],
        obs={
            name.removeprefix(OBS_PREFIX): value[:, context:]
            for name, value in stacked.items()
            if name not in ROW_COLUMNS
        },
        reward=stacked["reward"][:, context:].float(),
        terminated=stacked["terminated"][:, context:].bool(),
        mask=torch.from_numpy(mask),
        episode=np.array([index for index, _ in places]),
        start=np.array([start for _, start in places]),
    )
