"""Phases: checks and flattens `training.phases`, and decides when cadences and update ratios are due.

All errors in the phases of a config are raised here, before the first environment step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_lab.errors import ConfigError, closest, reject_unknown

# Counters that a cadence can use, by their YAML key.
EVERY_KEYS = {"every_env_steps": "env_steps", "every_updates": "updates", "every_cycles": "cycles"}
PHASE_TYPES = ("online", "offline", "eval_only")
BUILT_IN_HOOKS = ("collect", "evaluate")
DEFAULT_MAX_BURST = 64  # updates; see Ratio

_PHASE_KEYS = {
    "name",
    "type",
    "buffer",
    "duration_steps",
    "duration_updates",
    "duration_cycles",
    "workflow_hooks",
}
_PHASE_KEYS |= {"set", "freeze"}
_RATIO_KEYS = {"updates_per_env_step", "replayed_steps_per_env_step"}
_HOOK_KEYS = {"repeat", "max_burst"} | _RATIO_KEYS | set(EVERY_KEYS)
_COLLECT_KEYS = {"repeat", "env_steps", "policy", "temperature"}
_EVALUATE_KEYS = set(EVERY_KEYS) | {"repeat", "episodes"}


Resolve = Callable[[str, str], str]  # name of a hook in a phase, name of the phase -> name of the hook to run


@dataclass(frozen=True)
class HookInfo:
    """The properties of a workflow's hook that the scheduler needs."""

    kind: str = "update"  # update | transform | evolve
    replayed_steps: int = 0  # environment steps in one batch; 0 without a batch


@dataclass(frozen=True)
class HookUse:
    """One entry of `workflow_hooks`: runs `repeat` times per cycle, by a ratio, or when a cadence is due."""

    name: str
    kind: str  # collect | evaluate | update | transform | evolve
    repeat: int = 1
    env_steps: int = 0  # collect: steps per cycle
    updates_per_env_step: float | None = None
    max_burst: int = DEFAULT_MAX_BURST
    every: Mapping[str, int] = field(default_factory=dict)  # counter -> limit, e.g. {"env_steps": 10000}
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PhaseDefinition:
    """One stage of training."""

    name: str
    type: str
    hooks: tuple[HookUse, ...]
    buffer: Mapping[str, float]  # name -> share of each batch; collected rows are added to the first
    duration_steps: int | None = None
    duration_updates: int | None = None
    duration_cycles: int | None = None
    set: Mapping[str, Any] = field(default_factory=dict)
    freeze: tuple[str, ...] = ()
    iteration: int = 0  # of its group, from 0

    @property
    def collects(self) -> bool:
        return any(use.kind == "collect" for use in self.hooks)

    @property
    def skipped(self) -> bool:
        return 0 in (self.duration_steps, self.duration_updates, self.duration_cycles)


def parse_phases(
    raw: Sequence[Mapping[str, Any]],
    hooks: Mapping[str, HookInfo],
    buffers: Iterable[str],
    resolve: Resolve = lambda hook, phase: hook,
) -> list[PhaseDefinition]:
    """Return the phases as a flat list; groups (`repeat:` with `phases:`) are expanded.

    A phase with a duration of 0 is checked and skipped, so that a config can disable it.
    resolve: returns the hook for a name that is no hook, or the name itself
    """
    if not raw:
        raise ConfigError("training.phases is empty: add at least one phase with workflow_hooks")
    flat = _flatten(raw, hooks, list(buffers), iteration=0, where="training.phases", resolve=resolve)
    phases = [phase for phase in flat if not phase.skipped]
    if not phases:
        raise ConfigError(
            "training.phases has only phases with a duration of 0: give at least one a longer duration"
        )
    return phases


def _flatten(
    raw: Sequence[Mapping[str, Any]],
    hooks: Mapping[str, HookInfo],
    buffers: list[str],
    iteration: int,
    where: str,
    resolve: Resolve,
) -> list[PhaseDefinition]:
    flat: list[PhaseDefinition] = []
    for number, node in enumerate(raw):
        if not isinstance(node, Mapping):
            raise ConfigError(
                f"{where}[{number}] must be a mapping with name, type and workflow_hooks, not {node!r}"
            )
        if "phases" in node:
            group = f"{where}[{number}]"
            reject_unknown(group, node, {"repeat", "phases"})
            repeat = node.get("repeat", 1)
            if not isinstance(repeat, int) or isinstance(repeat, bool) or repeat < 1:
                raise ConfigError(f"{group}.repeat must be an integer of at least 1, not {repeat!r}")
            for repetition in range(repeat):
                flat += _flatten(node["phases"], hooks, buffers, repetition, f"{group}.phases", resolve)
        else:
            flat.append(_phase(node, hooks, buffers, iteration, f"{where}[{number}]", resolve))
    return flat


def _phase(
    node: Mapping[str, Any],
    hooks: Mapping[str, HookInfo],
    buffers: list[str],
    iteration: int,
    where: str,
    resolve: Resolve,
) -> PhaseDefinition:
    reject_unknown(where, node, _PHASE_KEYS)
    name = str(node.get("name", where))
    where = f"phase '{name}'"
    phase_type = node.get("type", "online")
    if phase_type not in PHASE_TYPES:
        raise ConfigError(
            f"{where} has an unknown type '{phase_type}'.{closest(str(phase_type), PHASE_TYPES)}"
        )
    uses = tuple(
        _hook_use(item, hooks, where, lambda hook: resolve(hook, name))
        for item in node.get("workflow_hooks", ())
    )
    if not uses:
        raise ConfigError(f"{where} has no workflow_hooks: add at least one")
    durations = {
        key: _count(where, key, node.get(key), least=0) for key in _PHASE_KEYS if key.startswith("duration_")
    }
    unbounded = all(value is None for value in durations.values())
    if phase_type == "eval_only" and unbounded:
        durations["duration_cycles"] = 1
    if phase_type == "offline" and unbounded:
        if not all(use.kind == "transform" for use in uses):
            raise ConfigError(
                f"{where} is offline and would never end: set duration_updates or duration_cycles"
            )
        durations["duration_cycles"] = 1
    for use in uses:
        if use.kind == "collect" and phase_type != "online":
            raise ConfigError(
                f"{where} is {phase_type} and cannot collect: make it online or remove the hook"
            )
        if use.kind != "evaluate" and phase_type == "eval_only":
            raise ConfigError(f"{where} is eval_only and can only have the hook evaluate: remove {use.name}")
    return PhaseDefinition(
        name=name,
        type=phase_type,
        hooks=uses,
        buffer=_buffer_shares(node.get("buffer"), buffers, where),
        set=dict(node.get("set") or {}),
        freeze=tuple(node.get("freeze") or ()),
        iteration=iteration,
        **durations,
    )


def _hook_use(item: Any, hooks: Mapping[str, HookInfo], where: str, resolve: Callable[[str], str]) -> HookUse:
    if isinstance(item, str):
        name, node = item, dict[str, Any]()
    elif isinstance(item, Mapping) and len(item) == 1:
        name, node = next(iter(item.items()))
        if node is not None and not isinstance(node, Mapping):
            raise ConfigError(f"{where}: the hook {name!r} must have a mapping of settings, not {node!r}")
        node = dict(node or {})
    else:
        raise ConfigError(f"{where}: a hook must be a name or one 'name: {{…}}', not {item!r}")
    known = {*BUILT_IN_HOOKS, *hooks}
    if name not in known:
        name = resolve(name)
    if name not in known:
        raise ConfigError(f"{where} has an unknown hook '{name}'.{closest(name, known)}")
    kind = name if name in BUILT_IN_HOOKS else hooks[name].kind
    where = f"{where}, hook '{name}'"
    keys = {"collect": _COLLECT_KEYS, "evaluate": _EVALUATE_KEYS}.get(kind, _HOOK_KEYS)
    reject_unknown(where, node, keys)
    every = {
        EVERY_KEYS[key]: _count(where, key, node[key]) for key in EVERY_KEYS if node.get(key) is not None
    }
    rates = [key for key in ("repeat", "env_steps", *_RATIO_KEYS) if node.get(key) is not None]
    if len(rates) + bool(every) > 1:
        raise ConfigError(f"{where} has {' and '.join(sorted(key for key in node))}: set only one of them")
    temperature = node.get("temperature", 1.0)
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not temperature > 0:
        raise ConfigError(f"{where}: temperature must be a number above 0, not {temperature!r}")
    return HookUse(
        name=name,
        kind=kind,
        repeat=_count(where, "repeat", node.get("repeat", 1)) or 1,
        env_steps=_count(where, "env_steps", node.get("env_steps")) or 0,
        updates_per_env_step=_ratio(where, node, hooks.get(name)),
        max_burst=_count(where, "max_burst", node.get("max_burst")) or DEFAULT_MAX_BURST,
        every=every,  # type: ignore[arg-type]
        options={key: node[key] for key in ("policy", "temperature", "episodes") if key in node},
    )


def _ratio(where: str, node: Mapping[str, Any], info: HookInfo | None) -> float | None:
    for key in _RATIO_KEYS:
        given = node.get(key)
        number = isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given)
        if given is not None and not number:
            raise ConfigError(f"{where}: {key} must be a number above 0, not {given!r}")
    value = node.get("updates_per_env_step")
    if value is None:
        replayed = node.get("replayed_steps_per_env_step")
        if replayed is None:
            return None
        if info is None or not info.replayed_steps:
            raise ConfigError(f"{where} has no batch, so replayed_steps_per_env_step must be removed")
        value = float(replayed) / info.replayed_steps
    if not float(value) > 0:
        raise ConfigError(f"{where}: its updates per environment step must be positive, not {value}")
    return float(value)


def _count(where: str, key: str, value: Any, *, least: int = 1) -> int | None:
    if value is None:
        return None
    # YAML reads 1e6 as a float, so floats with an integer value are accepted.
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < least:
        raise ConfigError(f"{where}: {key} must be an integer of at least {least}, not {value!r}")
    return int(value)


def _buffer_shares(node: Any, buffers: list[str], where: str) -> dict[str, float]:
    if node is None:
        shares = {buffers[0]: 1.0} if buffers else {}
    elif isinstance(node, str):
        shares = {node: 1.0}
    else:
        shares = {str(name): float(share) for name, share in node.items()}
    for name, share in shares.items():
        if name not in buffers:
            raise ConfigError(f"{where} has an unknown buffer '{name}'.{closest(name, buffers)}")
        if not share > 0:
            raise ConfigError(f"{where}: the share of buffer '{name}' must be positive, not {share}")
    return shares


# ---------------------------------------------------------------- cadences and ratios


class Every:
    """Fires once whenever a counter passes a multiple of its limit, however large one increment is.

    With several counters (`{every_env_steps: 1000, every_updates: 500}`) the first one is the main counter.
    The others also fire at their multiples, but at least one full limit after the last firing. An offline
    phase, which takes no environment steps, is therefore logged too, and a joint phase is not logged twice in
    a row.
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        for counter, limit in limits.items():
            if limit < 1:
                raise ConfigError(f"every_{counter} must be at least 1, not {limit}")
        self.limits = dict(limits)
        self.passed = dict.fromkeys(limits, 0)

    @classmethod
    def from_config(cls, node: Mapping[str, Any] | None) -> Every | None:
        """`{every_env_steps: 1000}` -> Every; None if the node has no limits."""
        node = node or {}
        limits = {EVERY_KEYS[key]: int(node[key]) for key in EVERY_KEYS if node.get(key) is not None}
        return cls(limits) if limits else None

    def due(self, counters: Mapping[str, int]) -> bool:
        """Return whether a counter has passed a multiple since the last call of `fired`."""
        return any(counters[name] // limit > self.passed[name] for name, limit in self.limits.items())

    def fired(self, counters: Mapping[str, int]) -> None:
        main = next(iter(self.limits))
        # Rounded up: the next multiple of another counter is at least one full limit away.
        self.passed = {
            name: counters[name] // limit if name == main else -(-counters[name] // limit)
            for name, limit in self.limits.items()
        }


@dataclass
class Cadences:
    """When to log, evaluate, report and save; None: never."""

    log: Every | None = None
    evaluate: Every | None = None
    report: Every | None = None
    checkpoint: Every | None = None
    epoch_weights: Every | None = None

    def items(self) -> list[tuple[str, Every]]:
        return [(name, every) for name, every in vars(self).items() if every is not None]

    def get_state(self) -> dict[str, dict[str, int]]:
        return {name: dict(every.passed) for name, every in self.items()}

    def set_state(self, state: Mapping[str, Mapping[str, int]]) -> None:
        """Restore the state; a counter that is new on resume starts from 0."""
        for name, every in self.items():
            every.passed |= {key: int(n) for key, n in state.get(name, {}).items() if key in every.passed}


class Ratio:
    """Counts the updates that are due for environment steps, as fractional credit.

    The credit is capped, so that steps that were collected without updates are not followed by one long
    burst.
    """

    def __init__(self, updates_per_env_step: float, max_burst: int) -> None:
        if not updates_per_env_step > 0:
            raise ConfigError(f"updates_per_env_step must be positive, not {updates_per_env_step}")
        # One collect of many steps may earn more than the cap; those updates are never dropped.
        self.updates_per_env_step = updates_per_env_step
        self.max_burst = max_burst
        self.credit = 0.0

    def earn(self, steps: int) -> None:
        earned = steps * self.updates_per_env_step
        self.credit = min(self.credit + earned, max(self.max_burst, earned))

    @property
    def updates_due(self) -> int:
        # The margin makes 0.1 * 10 one update despite rounding.
        return int(self.credit + 1e-9)

    def spend(self) -> None:
        self.credit -= 1.0
