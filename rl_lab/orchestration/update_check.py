"""Finds runs that can never update: before the first step where the config shows it, else while they collect.

Such a run would collect to its end and save the initial weights, with nothing but a line about missing data.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rl_lab.errors import ConfigError, LabError
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.orchestration.phases import PhaseDefinition
from rl_lab.orchestration.updates import Storage
from rl_lab.records import AnyHook, ArraySpec, BatchSpec, Episode

UPDATE_KINDS = ("update", "evolve")
MAX_SIMULATED_ACTIONS = 200_000  # 0.3 s of CPU time; a run whose first update comes later is not judged
# Finished episodes after which a sequence that none of them could hold is given up. A policy that is never
# updated does not get better, so later episodes are like these.
MAX_SHORT_EPISODES = 100


def check_updates(
    phases: Sequence[PhaseDefinition],
    hooks: Mapping[str, AnyHook],
    buffers: Mapping[str, Any],
    *,
    num_envs: int,
    total_timesteps: int | None,
    ranks: int = 1,
    time_limit: int | None = None,  # decisions per episode, if the config sets a limit
    steps_known: bool = True,  # False: the workflow's own collect_step may take any number of steps
    collects_only: bool = False,  # allow phases that only collect
) -> None:
    """Raise ConfigError if a new run would end without an update.

    The phases are run through by a scheduler of its own, with every environment step but no environment. A buffer
    counts as ready as soon as it could be, so a run is refused only if it has no chance.
    """
    updating = [phase for phase in phases if update_hooks(phase)]
    if not updating:
        names = [name for name, hook in hooks.items() if hook.kind in UPDATE_KINDS]
        if names and not collects_only and any(phase.collects for phase in phases):
            raise ConfigError(
                f"training.phases has no hook that updates, so nothing would be trained: add {' or '.join(names)} to "
                "the workflow_hooks of a phase, or set load.path to collect with a trained agent"
            )
        return
    _check_capacities(updating, hooks, buffers)
    longest_episode = time_limit + 1 if time_limit else None  # rows: an episode of n steps has n + 1
    collected: dict[str, int] = {}  # buffer -> environment steps

    def is_ready(name: str, phase: PhaseDefinition) -> bool:
        batch = hooks[name].batch if name in hooks else None
        if batch is None or hooks[name].kind == "transform":
            return True
        for buffer_name in phase.buffer:
            buffer, steps = buffers[buffer_name], collected.get(buffer_name, 0)
            # An empty buffer is not asked: it would start to count the rows that its sampler draws from.
            if getattr(buffer, "size", 1) and buffer.ready(batch):
                continue
            if not steps or (steps_known and steps // num_envs + 1 < batch.stored_rows):
                return False
            if longest_episode and batch.boundary != "cross" and longest_episode < batch.stored_rows:
                return False
        return True

    scheduler = PhaseScheduler(list(phases), total_timesteps=total_timesteps, is_ready=is_ready)
    entered: list[str] = []
    for _ in range(MAX_SIMULATED_ACTIONS):
        action, phase = scheduler.next_action(), scheduler.current_phase()
        if action is None or phase is None:
            raise ConfigError(_reason(scheduler, updating, entered, hooks, num_envs * ranks, longest_episode))
        if not entered or entered[-1] != phase.name:
            entered.append(phase.name)
        if action in update_hooks(phase):
            return
        if action == "collect":
            target = next(iter(phase.buffer), "")
            collected[target] = collected.get(target, 0) + num_envs
            scheduler.advance(action, steps=num_envs * ranks)
        else:
            scheduler.advance(action)


def update_hooks(phase: PhaseDefinition) -> list[str]:
    return [use.name for use in phase.hooks if use.kind in UPDATE_KINDS]


def check_batches(
    hooks: Mapping[str, AnyHook], columns: Mapping[str, ArraySpec], memory: int | None = None
) -> None:
    """Raise ConfigError for a batch of stored rows that cannot fit into this machine's memory.

    The system would grant it, and kill the process when it is filled. columns: of a stored row; memory: bytes
    """
    from rl_lab.buffers.ring import row_bytes

    memory = _memory() if memory is None else memory
    for name, hook in hooks.items():
        batch = getattr(hook, "batch", None)
        if batch is None or memory is None:
            continue
        chosen = [spec for key, spec in columns.items() if batch.keys is None or key in batch.keys]
        needed = batch.size * batch.rows * sum(map(row_bytes, chosen))
        if needed > memory:
            raise ConfigError(
                f"algorithm.batch_size is too large: a batch of hook '{name}', {batch.size:,} × {batch.rows:,} rows, needs "
                f"{needed / 1e9:,.1f} GB, and this machine has {memory / 1e9:,.1f}: lower it, or algorithm.batch_length"
            )


def _memory() -> int | None:
    """Return the bytes of this machine's memory, or None where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _check_capacities(
    updating: Sequence[PhaseDefinition], hooks: Mapping[str, AnyHook], buffers: Mapping[str, Any]
) -> None:
    for phase in updating:
        for name in update_hooks(phase):
            batch = hooks[name].batch
            for buffer_name in phase.buffer if batch is not None else ():
                assert batch is not None
                buffer = buffers[buffer_name]
                # A ring holds the rows of each environment apart; other buffers share their capacity.
                ring = getattr(buffer, "ring", None)
                rows, streams = (batch.rows, buffer.num_streams) if ring else (batch.stored_rows, 1)
                stored = getattr(buffer, "read_only", False)  # its data is checked when a batch is drawn
                capacity = None if stored else getattr(buffer, "capacity", None)
                if capacity is not None and capacity // streams < rows:
                    raise ConfigError(
                        f"buffers.{buffer_name}.capacity={capacity} is too small: {_needs(name, batch)}, so set it to "
                        f"at least {rows * streams}"
                    )


def _reason(
    scheduler: PhaseScheduler,
    updating: Sequence[PhaseDefinition],
    entered: Collection[str],
    hooks: Mapping[str, AnyHook],
    num_envs: int,
    longest_episode: int | None,
) -> str:
    """Return why the simulated run had no update."""
    steps, total = scheduler.totals["env_steps"], scheduler.total_timesteps
    end = (
        f"training.total_timesteps={total}" if total and steps >= total else f"training.phases: {steps} steps"
    )
    reached = [phase for phase in updating if phase.name in entered]
    if not reached:
        return (
            f"{end} ends the run before phase '{updating[0].name}', the first one that updates: raise it, or shorten "
            "the phases before"
        )
    waiting = [
        (name, batch)
        for phase in reached
        for name in update_hooks(phase)
        if (batch := hooks[name].batch) is not None and not scheduler.is_ready(name, phase)
    ]
    for name, batch in waiting:
        if longest_episode and batch.boundary != "cross" and longest_episode < batch.stored_rows:
            return f"environment.time_limit={longest_episode - 1} is too short: {_needs(name, batch)}"
    for name, batch in waiting:
        return (
            f"{end} would end without an update: {_needs(name, batch)}, and the run takes only "
            f"{steps // num_envs} steps in each of {num_envs} environments"
        )
    name = update_hooks(reached[0])[0]
    return (
        f"{end} would end without an update: '{name}' is due less than once in {steps} steps, so raise its ratio or "
        "the number of steps"
    )


def _needs(name: str, batch: BatchSpec) -> str:
    where = "environment" if batch.boundary == "cross" else "episode"
    return f"'{name}' needs sequences of {batch.stored_rows} rows of one {where}"


class UpdateWatch:
    """Stops a run whose updates wait for an episode that is longer than all that its policy reaches."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.episodes = 0
        self.longest = 0  # steps of the longest finished episode

    def collected(
        self, episodes: Sequence[Episode], scheduler: PhaseScheduler, phase: PhaseDefinition
    ) -> None:
        """Count the finished episodes of one collect; raise LabError if no update will ever be possible."""
        if not episodes or scheduler.totals["updates"]:
            return
        self.episodes += len(episodes)
        self.longest = max(self.longest, *(episode.length for episode in episodes))
        if self.episodes < MAX_SHORT_EPISODES:
            return
        for name in update_hooks(phase):
            batch = self.storage.hooks[name].batch
            if batch is None or batch.boundary == "cross" or name not in scheduler.skipped:
                return
            if self.longest + 1 >= batch.stored_rows:
                return
            raise LabError(
                f"phase '{phase.name}' cannot update: {_needs(name, batch)}, and the longest of {self.episodes} "
                f"episodes has {self.longest + 1}; lower algorithm.batch_length, or let the batch cross or pad episodes"
            )

    def finished(self, scheduler: PhaseScheduler) -> None:
        """Raise LabError if a complete run with updates in its phases has made none."""
        if scheduler.totals["updates"]:
            return
        for phase in scheduler.phases:
            for name in update_hooks(phase):
                shortage = self.storage.shortage(name, phase) or "it was never due"
                raise LabError(
                    f"phase '{phase.name}': '{name}' never ran, so nothing was trained in "
                    f"{scheduler.totals['env_steps']} steps: {shortage}"
                )
