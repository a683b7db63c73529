"""Evaluation in separate environments with a separate generator: it does not change training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rl_lab.orchestration.collector import Collector
from rl_lab.protocols import Policy
from rl_lab.records import ActMode, Episode, return_statistics
from rl_lab.utils.seeding import derive_seed


@dataclass
class Evaluation:
    """Finished episodes in a fixed order, and the frames of the first one if `video` was set."""

    episodes: list[Episode] = field(default_factory=list)
    frames: list[np.ndarray] = field(default_factory=list)  # (H, W, 3) uint8 each
    seed: int = 0
    video_error: Exception | None = None  # why there are no frames

    @property
    def returns(self) -> list[float]:
        return [episode.episode_return for episode in self.episodes]

    def metrics(self) -> dict[str, float]:
        return {f"eval/{key.removeprefix('log/')}": v for key, v in return_statistics(self.episodes).items()}


class VideoFailure(Exception):
    """A frame could not be rendered, and the environments are closed."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Evaluator:
    """Runs episodes. Environment i of n runs episodes i, i+n, …, so that short ones are not preferred."""

    def __init__(
        self,
        make_environment: Callable[[int, bool], Any],  # (seed, render) -> VectorEnv
        *,
        device: torch.device | str,
        seed: int,
    ) -> None:
        self.make_environment = make_environment
        self.device = torch.device(device)
        self.seed = seed

    def run(
        self,
        policy: Policy,
        *,
        episodes: int,
        label: int | str = 0,  # same seed and label: same episodes
        sample: bool = False,
        temperature: float = 1.0,  # of sampled actions
        video: bool = False,
        max_frames: int = 1000,
        on_rows: Callable[[Mapping[str, Any]], None] | None = None,
        on_episode: Callable[[Episode], None] | None = None,
    ) -> Evaluation:
        """Run `episodes` episodes; call `on_rows` after every step and `on_episode` after every episode."""
        seed = derive_seed(self.seed, "evaluate", label)
        mode = ActMode(sample=sample, temperature=temperature)
        try:
            return self._run(policy, mode, episodes, seed, max_frames * video, on_rows, on_episode)
        except VideoFailure as failure:
            evaluation = self._run(policy, mode, episodes, seed, 0, on_rows, on_episode)
            evaluation.video_error = failure.error
            return evaluation

    def _run(
        self,
        policy: Policy,
        mode: ActMode,
        episodes: int,
        seed: int,
        max_frames: int,  # 0: no video
        on_rows: Callable[[Mapping[str, Any]], None] | None,
        on_episode: Callable[[Episode], None] | None,
    ) -> Evaluation:
        environment = self.make_environment(seed, max_frames > 0)
        collector = Collector(
            environment,
            device=self.device,
            generator=torch.Generator(self.device).manual_seed(seed),
            rows_on_host=True,
        )
        evaluation = Evaluation(seed=seed)
        n = environment.num_envs
        finished: list[list[Episode]] = [[] for _ in range(n)]
        quota = [len(range(env, episodes, n)) for env in range(n)]
        try:
            collector.reset()
            while any(len(done) < count for done, count in zip(finished, quota)):
                if not finished[0] and len(evaluation.frames) < max_frames:
                    collector.receive()
                    try:
                        evaluation.frames.append(environment.frame())
                    except Exception as error:
                        if environment.closed:  # its worker died: without a video the episodes can be run
                            raise VideoFailure(error) from error
                        max_frames, evaluation.frames, evaluation.video_error = 0, [], error
                result = collector.step(policy, mode)
                if on_rows and result.trajectory:
                    on_rows(result.trajectory)
                for episode in collector.tracker.drain():
                    if len(finished[episode.env]) < quota[episode.env]:
                        finished[episode.env].append(episode)
                        if on_episode:
                            on_episode(episode)
        finally:
            environment.close()
        evaluation.episodes = [finished[i % n][i // n] for i in range(episodes)]
        return evaluation
