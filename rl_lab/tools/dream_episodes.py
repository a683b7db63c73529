"""Held-out episodes for a dream report: played afresh or read from files, and cut into a seen part and a future."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl_lab.components.controllers.random_policy import RandomPolicyController
from rl_lab.errors import LabError
from rl_lab.records import OBS_PREFIX, ROW_COLUMNS, ActMode, Batch, Spec

if TYPE_CHECKING:
    from rl_lab.agent import Agent

GOLDEN = 0.6180339887  # its multiples, without the whole part, spread evenly however many there are

Rows = dict[str, np.ndarray]  # column -> (K+1, …): one episode, as stored


class RandomActions:
    """A policy for the Evaluator that chooses uniformly."""

    def __init__(self, spec: Spec) -> None:
        self._controller = RandomPolicyController(spec=spec)

    def act(self, obs: Any, policy_state: Any, is_first: Any, mode: ActMode) -> tuple[Any, Any, Any]:
        return self._controller.act(obs, mode), policy_state, {}

    def initial_policy_state(self, num_envs: int) -> dict[str, torch.Tensor]:
        return {}


def play_episodes(
    agent: Agent, count: int, *, seed: int, longest: int, policy: Any = None, progress: Any = None
) -> list[Rows]:
    """`count` fresh episodes in the evaluation's environments, cut after `longest` steps; sampled actions.

    policy: who acts; the agent itself unless told.
    """
    from omegaconf import OmegaConf

    from rl_lab.build import build_evaluator
    from rl_lab.environments.make import env_config_options

    plain: Any = OmegaConf.to_container(agent.config.environment)
    limit = env_config_options(plain, evaluation=True).get("time_limit")
    evaluator = build_evaluator(
        agent.config, agent.device, normalizer=agent.normalizer, time_limit=min(longest, limit or longest)
    )
    keep = _EpisodeRows(agent.spec)
    evaluator.run(
        policy or agent.workflow,
        episodes=count,
        label=f"dream {seed}",
        sample=True,
        on_rows=keep.add,
        on_episode=lambda episode: progress.step() if progress else None,
    )
    # Environments that were done early go on playing: of each, as many as it was asked for.
    return keep.in_order(count)


class _EpisodeRows:
    """Puts vector steps together as whole episodes."""

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
        """Episode i was played by environment i mod N, as the Evaluator counts them."""
        n = len(self._done)
        return [self._done[index % n][index // n] for index in range(count)]


def read_episodes(path: Path, spec: Spec, *, count: int, longest: int) -> list[Rows]:
    """Up to `count` episodes of a run's replay, of episode files or of a folder of them, evenly chosen."""
    from rl_lab.buffers.offline import OfflineBuffer

    buffer = OfflineBuffer(spec.row_columns(), path=path, spec=spec, device="cpu", storage="host")
    flags = {name: _column(buffer, name) for name in ("is_first", "terminated", "truncated")}
    spans: list[tuple[int, int, int]] = []  # stream, first row, row after the last
    for stream in range(buffer.num_streams):
        firsts = np.flatnonzero(flags["is_first"][stream])
        ends = np.append(firsts[1:], buffer.total_rows)
        spans += [(stream, int(a), int(b)) for a, b in zip(firsts, ends) if b - a > 1]
    if not spans:
        raise LabError(f"{path} holds no episode of more than one row")
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
    """(streams, rows) of a small column, read in stretches: the wide ones are not wanted all at once."""
    parts = []
    for start in range(0, buffer.total_rows, 4096):
        batch = buffer.read(start, min(4096, buffer.total_rows - start))
        parts.append(batch.columns[name].numpy().copy())
    return np.concatenate(parts, axis=1)


# ---------------------------------------------------------------- segments


@dataclass
class Segments:
    """B cuts of episodes: `context` rows that a model sees, then H steps whose actions it is told.

    Column t of the future is what arrived after action t. Beyond an episode's end `mask` is False.
    """

    context: Batch  # (B, C, …)
    action: torch.Tensor  # (B, H, …)
    obs: dict[str, torch.Tensor]  # name -> (B, H, …)
    reward: torch.Tensor  # (B, H)
    terminated: torch.Tensor  # (B, H) bool
    mask: torch.Tensor  # (B, H) bool
    episode: np.ndarray  # (B,) which episode
    start: np.ndarray  # (B,) row of the episode where the context begins

    def __len__(self) -> int:
        return len(self.episode)

    def parts(self, size: int) -> Iterator[slice]:
        for start in range(0, len(self), size):
            yield slice(start, min(start + size, len(self)))


def cut_segments(episodes: Sequence[Rows], *, context: int, horizon: int, each: int) -> Segments:
    """`each` segments of every episode, evenly spaced.

    The last one reaches beyond the episode's end, after another number of steps in each episode, so that ends lie all
    over the horizon.
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
            f"no episode is longer than the context of {context} rows (the longest has {longest}): give a smaller --context"
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
            # What lies beyond the end is never compared; repeated, it is at least a valid action.
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
