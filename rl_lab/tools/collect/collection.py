"""Collection: plays episodes in several environments and appends them to a data set; it survives `kill -9`.

Episode k of environment i is attempt k · n + i of n environments. Finished episodes are stored in the order of their
attempts, so a short episode does not push out a long one, and the data does not depend on when anything finished.

    dataset.json, index.log, …   the data set; see rl_lab/buffers/formats/lab.py
    episodes.jsonl               seed, return, length and logged values of each stored episode
    collect.pt                   how to continue: the state of the environments, the policy and the open episodes

`collect.pt` is replaced every few seconds. After a kill the episodes that were stored since are dropped and played
again: from the same state, so they are the same.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.formats.episode import PlainEpisode, from_rows
from rl_lab.buffers.formats.lab import RowsWriter, read_description, write_description
from rl_lab.environments.env_runner import episode_seed
from rl_lab.errors import CheckpointError, ConfigError, LabError
from rl_lab.orchestration.collector import Collector
from rl_lab.protocols import Policy
from rl_lab.records import OBS_PREFIX, ActMode, Episode, Spec
from rl_lab.utils.checkpoint.saveable import load_data, to_saveable
from rl_lab.utils.files import JsonlWriter, write_atomic

STATE, EPISODES = "collect.pt", "episodes.jsonl"
SUCCESS = ("log/success", "log/is_success")


@dataclass(frozen=True)
class Filter:
    """Which episodes are stored."""

    min_return: float | None = None
    max_return: float | None = None
    success: bool = False

    def accepts(self, episode: Episode) -> bool:
        if self.min_return is not None and episode.episode_return < self.min_return:
            return False
        if self.max_return is not None and episode.episode_return > self.max_return:
            return False
        return not self.success or self._succeeded(episode)

    @staticmethod
    def _succeeded(episode: Episode) -> bool:
        values = [episode.log[key] for key in SUCCESS if key in episode.log]
        if not values:
            raise ConfigError(
                "--success: the environment logs no `log/success`, so use --min-return "
                f"(it logs {', '.join(sorted(episode.log)) or 'nothing'})"
            )
        return values[0] > 0

    def to_dict(self) -> dict[str, Any]:
        return {"min_return": self.min_return, "max_return": self.max_return, "success": self.success}


@dataclass
class Counts:
    """What has been played."""

    attempts: int = 0  # finished episodes
    rejected: int = 0
    failed: int = 0  # ended by a failure of the environment
    steps: int = 0  # of stored episodes
    returns: list[float] = field(default_factory=list)  # of stored episodes


class Collection:
    """The data set that is being collected.

    settings: JSON values that decide which episodes are played; a folder with other settings is refused
    metadata: further JSON values for dataset.json
    save_seconds: time between two saves of the state
    """

    def __init__(
        self,
        folder: Path,
        spec: Spec,
        collector: Collector,
        policy: Policy,
        mode: ActMode,
        *,
        seed: int,
        settings: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        keep: Filter | None = None,
        save_seconds: float = 10.0,
        say: Callable[[str], None] = print,
    ) -> None:
        self.folder, self.spec = folder, spec
        self.collector, self.policy, self.mode = collector, policy, mode
        self.seed, self.keep = seed, keep or Filter()
        self.settings, self.metadata = dict(settings), dict(metadata or {})
        self.save_seconds, self.say = save_seconds, say
        self.counts = Counts()
        self._n = collector.environment.num_envs
        self._rows: list[
            dict[str, np.ndarray]
        ] = []  # of the vector steps since the oldest open episode began
        self._begin = [0] * self._n  # index into _rows
        self._number = [0] * self._n  # of the open episode of each environment
        self._finished: dict[
            int, tuple[PlainEpisode, Episode] | None
        ] = {}  # attempt -> episode; None: failed
        self._log: JsonlWriter | None = None
        self._check(folder)
        self._is_new = not folder.exists()
        state = self._read_state()
        if state is None:
            folder.mkdir(parents=True, exist_ok=True)
            self._describe(complete=False)
        self._writer = RowsWriter(folder, spec, report=lambda message: None)
        if state is None:  # new, or killed before the first save
            self._writer.keep(0)
            collector.reset()
        else:
            self._restore(state)
        self._log = JsonlWriter(folder / EPISODES, resume_bytes=int(state["log_bytes"]) if state else 0)

    @property
    def stored(self) -> int:
        return len(self.counts.returns)

    def run(self, episodes: int, on_episode: Callable[[Counts], None] = lambda counts: None) -> Counts:
        """Play until `episodes` are stored; Ctrl-C saves first."""
        saved = monotonic()
        try:
            while self.stored < episodes:
                self._step(episodes, on_episode)
                if monotonic() - saved >= self.save_seconds:
                    self.save()
                    saved = monotonic()
        except KeyboardInterrupt:
            self.save()
            raise
        self.save()
        self._describe(complete=True)
        return self.counts

    def close(self) -> None:
        """Close the files; a new folder that got no episode is deleted."""
        self._writer.close()
        if self._log is not None:
            self._log.close()
        if self._is_new and not self.stored:
            shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(Exception):
            self.collector.environment.close()

    # ---------------------------------------------------------------- playing

    def _step(self, episodes: int, on_episode: Callable[[Counts], None]) -> None:
        rows = self.collector.step(self.policy, self.mode).trajectory
        assert rows is not None
        arrays = {
            name: np.array(value.cpu().numpy() if isinstance(value, torch.Tensor) else value)
            for name, value in rows.items()
            if name.startswith(OBS_PREFIX) or name in ("action", "reward", "terminated", "truncated")
        }
        self._rows.append(arrays)
        done = {episode.env: episode for episode in self.collector.tracker.drain()}
        for env in np.flatnonzero(arrays["terminated"] | arrays["truncated"]).tolist():
            attempt = self._number[env] * self._n + env
            self._finished[attempt] = (self._cut(env), done[env]) if env in done else None
            self._begin[env] = len(self._rows)
            self._number[env] += 1
        self._store_finished(episodes, on_episode)
        unused = min(self._begin)
        if unused > 64:
            del self._rows[:unused]
            self._begin = [begin - unused for begin in self._begin]

    def _cut(self, env: int) -> PlainEpisode:
        """Return the episode that ended in the newest row."""
        rows = self._rows[self._begin[env] :]
        return from_rows({name: np.stack([row[name][env] for row in rows]) for name in rows[0]})

    def _store_finished(self, episodes: int, on_episode: Callable[[Counts], None]) -> None:
        """Store the finished episodes whose predecessors are finished."""
        while self.counts.attempts in self._finished and self.stored < episodes:
            attempt = self.counts.attempts
            found = self._finished.pop(attempt)
            self.counts.attempts += 1
            if found is None:
                self.counts.failed += 1
                continue
            episode, result = found
            if not self.keep.accepts(result):
                self.counts.rejected += 1
                on_episode(self.counts)
                continue
            number, env = divmod(attempt, self._n)
            self._writer.append(episode)
            self.counts.returns.append(result.episode_return)
            self.counts.steps += len(episode)
            assert self._log is not None
            self._log.write(
                {
                    "attempt": attempt,
                    "seed": episode_seed(self.seed, env, number),
                    "return": result.episode_return,
                    "length": len(episode),
                    **result.log,
                }
            )
            on_episode(self.counts)

    # ---------------------------------------------------------------- saving

    def save(self) -> None:
        """Save everything that is needed to continue. The stored episodes come first, the state last."""
        collector = self.collector.get_state()
        generator = self.collector.generator
        assert self._log is not None
        opened = {
            str(env): {
                name: np.stack([row[name][env] for row in self._rows[begin:]]) for name in self._rows[0]
            }
            for env, begin in enumerate(self._begin)
            if begin < len(self._rows)
        }
        finished = {
            str(attempt): None if found is None else _packed(*found)
            for attempt, found in self._finished.items()
        }
        state = {
            "settings": self.settings,
            "collector": collector,
            "generator": None if generator is None else generator.get_state(),
            "numbers": list(self._number),
            "open": opened,
            "finished": finished,
            "counts": vars(self.counts),
            "log_bytes": self._log.size(),
        }
        content = to_saveable(state)
        try:
            write_atomic(self.folder / STATE, lambda file: torch.save(content, file))
        except OSError as error:
            raise LabError(
                f"{self.folder} cannot be written ({error.strerror}): free some space; the same command continues"
            ) from None

    def _read_state(self) -> dict[str, Any] | None:
        if not (self.folder / STATE).exists():
            return None
        try:
            return dict(load_data(self.folder / STATE, check_zip=True))
        except CheckpointError as error:
            raise LabError(f"{error}: delete {self.folder} and collect again") from None

    def _restore(self, state: Mapping[str, Any]) -> None:
        counts = state["counts"]
        self.counts = Counts(**{**counts, "returns": [float(x) for x in counts["returns"]]})
        kept = self._writer.keep(self.stored)
        if kept < self.stored:
            raise LabError(
                f"{self.folder} has lost {self.stored - kept} of {self.stored} episodes: delete it and collect again"
            )
        if self.collector.generator is not None and state["generator"] is not None:
            self.collector.generator.set_state(state["generator"])
        self._number = [int(number) for number in state["numbers"]]
        self._finished = {
            int(attempt): None if found is None else _unpacked(found)
            for attempt, found in state["finished"].items()
        }
        fresh = self.collector.set_state(state["collector"])
        if fresh:
            self.say(
                f"environments {', '.join(map(str, fresh))} cannot be continued exactly: their open episodes begin again"
            )
        self._restore_open({int(env): rows for env, rows in state["open"].items() if int(env) not in fresh})

    def _restore_open(self, opened: Mapping[int, Mapping[str, Any]]) -> None:
        """Put the rows of open episodes back, aligned at their ends."""
        longest = max((len(rows["reward"]) for rows in opened.values()), default=0)
        self._begin = [longest] * self._n
        if not longest:
            return
        names = next(iter(opened.values()))
        table = {
            name: np.zeros((longest, self._n, *np.asarray(value).shape[1:]), np.asarray(value).dtype)
            for name, value in names.items()
        }
        for env, rows in opened.items():
            count = len(rows["reward"])
            self._begin[env] = longest - count
            for name, value in rows.items():
                table[name][longest - count :, env] = np.asarray(value)
            remember = getattr(self.policy, "remember", None)
            if remember is not None:
                remember(
                    env,
                    {
                        n.removeprefix(OBS_PREFIX): np.asarray(v)
                        for n, v in rows.items()
                        if n.startswith(OBS_PREFIX)
                    },
                )
        self._rows = [{name: value[k] for name, value in table.items()} for k in range(longest)]

    # ---------------------------------------------------------------- description

    def _check(self, folder: Path) -> None:
        """Refuse a folder that is not this collection."""
        if not folder.exists():
            return
        description = read_description(folder)
        there = description.get("collect")
        if there is None:
            if any(not each.name.startswith(".") for each in folder.iterdir()):
                raise ConfigError(f"{folder} exists and was not collected: choose another name with --out")
            return
        differ = [key for key in self.settings if there.get(key) != self.settings[key]]
        if differ:
            key = differ[0]
            raise ConfigError(
                f"{folder} was collected with {key} {there.get(key)!r}, not {self.settings[key]!r}: use the same "
                "settings to continue it, or choose another name with --out"
            )

    def _describe(self, *, complete: bool) -> None:
        counts = self.counts
        summary = {
            "complete": complete,
            "episodes": self.stored,
            "steps": counts.steps,
            "attempts": counts.attempts,
            "rejected": counts.rejected,
            "failed": counts.failed,
        }
        write_description(
            self.folder, self.spec, {**self.metadata, "collect": dict(self.settings), "summary": summary}
        )


def _packed(episode: PlainEpisode, result: Episode) -> dict[str, Any]:
    arrays = {key: getattr(episode, key) for key in ("actions", "rewards", "terminated", "truncated")}
    return {
        **arrays,
        "observations": dict(episode.observations),
        "result": [result.episode_return, result.length, result.env, dict(result.log)],
    }


def _unpacked(data: Mapping[str, Any]) -> tuple[PlainEpisode, Episode]:
    observations = {name: np.asarray(value) for name, value in data["observations"].items()}
    return (
        PlainEpisode(
            observations,
            np.asarray(data["actions"]),
            np.asarray(data["rewards"]),
            np.asarray(data["terminated"]),
            np.asarray(data["truncated"]),
        ),
        Episode(*data["result"]),
    )
