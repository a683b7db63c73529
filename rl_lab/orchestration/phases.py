"""Curricula as data: the `training.phases` list of a config, checked and flattened.

Everything wrong with it is said here, before the first environment step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_lab.errors import ConfigError, closest, reject_unknown

# --------------------
# When something is due: every so many steps, or so many updates per environment step.


# Counters that a cadence may follow, by the name of its key in YAML.
EVERY_KEYS = {"every_env_steps": "env_steps", "every_updates": "updates", "every_cycles": "cycles"}


class Every:
    """Fires once each time a counter passes a multiple of its limit, however far one step jumps.

    With several counters (`{every_env_steps: 1000, every_updates: 500}`) the first named leads. Another fires at its
    multiples, too, but only a whole limit of its own after the last firing: an offline phase, in which no environment
    steps, is logged, and a joint one not twice in a row.
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        for counter, limit in limits.items():
            if limit < 1:
                raise ConfigError(f"a cadence must be at least 1, not {limit} {counter}")
        self.limits = dict(limits)
        self.passed = dict.fromkeys(limits, 0)

    @classmethod
    def from_config(cls, node: Mapping[str, Any] | None) -> Every | None:
        """`{every_env_steps: 1000}` -> Every; None or a node without limits never fires."""
        node = node or {}
        limits = {EVERY_KEYS[key]: int(node[key]) for key in EVERY_KEYS if node.get(key) is not None}
        return cls(limits) if limits else None

    def due(self, counters: Mapping[str, int]) -> bool:
        """True when a multiple has been passed and `fired` was not called since."""
        return any(counters[name] // limit > self.passed[name] for name, limit in self.limits.items())

    def fired(self, counters: Mapping[str, int]) -> None:
        leads = next(iter(self.limits))
        # Rounded up, the next multiple that counts is at least a whole limit away.
        self.passed = {
            name: counters[name] // limit if name == leads else -(-counters[name] // limit)
            for name, limit in self.limits.items()
        }


@dataclass
class Cadences:
    """The things that happen by the clock of the counters. None: never."""

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
        """A cadence that was changed on resume (a counter that the state does not know) starts from 0."""
        for name, every in self.items():
            every.passed |= {key: int(n) for key, n in state.get(name, {}).items() if key in every.passed}


class Ratio:
    """Updates owed for environment steps: fractional credit, with a capped burst.

    The cap keeps a long evaluation, a pause or a resume from being paid back in one huge burst.
    """

    def __init__(self, updates_per_env_step: float, max_burst: int) -> None:
        if not updates_per_env_step > 0:
            raise ConfigError(f"a ratio must be positive, not {updates_per_env_step}")
        # One collect may earn more than the cap when it makes many steps; that much is always paid.
        self.updates_per_env_step = updates_per_env_step
        self.max_burst = max_burst
        self.credit = 0.0

    def earn(self, steps: int) -> None:
        earned = steps * self.updates_per_env_step
        self.credit = min(self.credit + earned, max(self.max_burst, earned))

    @property
    def owed(self) -> int:
        # The tiny margin keeps 0.1 * 10 from being 0.9999 updates.
        return int(self.credit + 1e-9)

    def pay(self) -> None:
        self.credit -= 1.0


PHASE_TYPES = ("online", "offline", "eval_only")
BUILT_IN_HOOKS = ("collect", "evaluate")
DEFAULT_MAX_BURST = 64  # updates; see cadence.Ratio

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
_COLLECT_KEYS = {"repeat", "env_steps", "policy"}
_EVALUATE_KEYS = set(EVERY_KEYS) | {"repeat", "episodes"}


@dataclass(frozen=True)
class HookInfo:
    """What the scheduler must know of a workflow's hook."""

    kind: str = "update"  # update | transform | evolve
    replayed_steps: int = 0  # environment steps that one call replays; 0 without a batch


@dataclass(frozen=True)
class HookUse:
    """One entry of `workflow_hooks`, per cycle: `repeat` times, or by ratio, or when a cadence is due."""

    name: str
    kind: str  # collect | evaluate | update | transform | evolve
    repeat: int = 1
    env_steps: int = 0  # collect: go on until so many steps this cycle
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
    buffer: Mapping[str, float]  # name -> share of each batch; collected rows go to the first
    duration_steps: int | None = None
    duration_updates: int | None = None
    duration_cycles: int | None = None
    set: Mapping[str, Any] = field(default_factory=dict)
    freeze: tuple[str, ...] = ()
    iteration: int = 0  # how often its group has been run before

    @property
    def collects(self) -> bool:
        return any(use.kind == "collect" for use in self.hooks)

    @property
    def skipped(self) -> bool:
        return 0 in (self.duration_steps, self.duration_updates, self.duration_cycles)


def parse_phases(
    raw: Sequence[Mapping[str, Any]], hooks: Mapping[str, HookInfo], buffers: Iterable[str]
) -> list[PhaseDefinition]:
    """The flat list of phases to walk; groups (`repeat:` with `phases:`) are written out.

    A phase with a duration of 0 is checked and left out: a config can switch a stage off by its number.
    """
    if not raw:
        raise ConfigError("training.phases is empty: give at least one phase with workflow_hooks")
    flat = _flatten(raw, hooks, list(buffers), iteration=0, where="training.phases")
    phases = [phase for phase in flat if not phase.skipped]
    if not phases:
        raise ConfigError("every phase of training.phases has a duration of 0: nothing would be done")
    return phases


def _flatten(
    raw: Sequence[Mapping[str, Any]],
    hooks: Mapping[str, HookInfo],
    buffers: list[str],
    iteration: int,
    where: str,
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
                raise ConfigError(f"{group}.repeat must be a whole number of at least 1, not {repeat!r}")
            for again in range(repeat):
                flat += _flatten(node["phases"], hooks, buffers, again, f"{group}.phases")
        else:
            flat.append(_phase(node, hooks, buffers, iteration, f"{where}[{number}]"))
    return flat


def _phase(
    node: Mapping[str, Any], hooks: Mapping[str, HookInfo], buffers: list[str], iteration: int, where: str
) -> PhaseDefinition:
    reject_unknown(where, node, _PHASE_KEYS)
    name = str(node.get("name", where))
    where = f"phase '{name}'"
    phase_type = node.get("type", "online")
    if phase_type not in PHASE_TYPES:
        raise ConfigError(f"{where} has type '{phase_type}'.{closest(str(phase_type), PHASE_TYPES)}")
    uses = tuple(_hook_use(item, hooks, where) for item in node.get("workflow_hooks", ()))
    if not uses:
        raise ConfigError(f"{where} has no workflow_hooks")
    durations = {
        key: _count(where, key, node.get(key), least=0) for key in _PHASE_KEYS if key.startswith("duration_")
    }
    endless = all(value is None for value in durations.values())
    if phase_type == "eval_only" and endless:
        durations["duration_cycles"] = 1
    if phase_type == "offline" and endless:
        if not all(use.kind == "transform" for use in uses):
            raise ConfigError(
                f"{where} is offline and would never end: give duration_updates or duration_cycles"
            )
        durations["duration_cycles"] = 1
    for use in uses:
        if use.kind == "collect" and phase_type != "online":
            raise ConfigError(f"{where} is {phase_type} and cannot collect; make it online or drop the hook")
        if use.kind != "evaluate" and phase_type == "eval_only":
            raise ConfigError(f"{where} is eval_only; its only hook can be evaluate, not {use.name}")
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


def _hook_use(item: Any, hooks: Mapping[str, HookInfo], where: str) -> HookUse:
    if isinstance(item, str):
        name, node = item, dict[str, Any]()
    elif isinstance(item, Mapping) and len(item) == 1:
        name, node = next(iter(item.items()))
        node = dict(node or {})
    else:
        raise ConfigError(f"{where}: a hook is a name or one 'name: {{…}}', not {item!r}")
    known = {*BUILT_IN_HOOKS, *hooks}
    if name not in known:
        raise ConfigError(
            f"{where} names a hook '{name}' that the workflow does not have.{closest(name, known)}"
        )
    kind = name if name in BUILT_IN_HOOKS else hooks[name].kind
    where = f"{where}, hook '{name}'"
    keys = {"collect": _COLLECT_KEYS, "evaluate": _EVALUATE_KEYS}.get(kind, _HOOK_KEYS)
    reject_unknown(where, node, keys)
    every = {
        EVERY_KEYS[key]: _count(where, key, node[key]) for key in EVERY_KEYS if node.get(key) is not None
    }
    pace = [key for key in ("repeat", "env_steps", *_RATIO_KEYS) if node.get(key) is not None]
    if len(pace) + bool(every) > 1:
        raise ConfigError(f"{where} has {' and '.join(sorted(key for key in node))}; give one pace")
    return HookUse(
        name=name,
        kind=kind,
        repeat=_count(where, "repeat", node.get("repeat", 1)) or 1,
        env_steps=_count(where, "env_steps", node.get("env_steps")) or 0,
        updates_per_env_step=_ratio(where, node, hooks.get(name)),
        max_burst=_count(where, "max_burst", node.get("max_burst")) or DEFAULT_MAX_BURST,
        every=every,  # type: ignore[arg-type]
        options={key: node[key] for key in ("policy", "episodes") if key in node},
    )


def _ratio(where: str, node: Mapping[str, Any], info: HookInfo | None) -> float | None:
    value = node.get("updates_per_env_step")
    if value is None:
        replayed = node.get("replayed_steps_per_env_step")
        if replayed is None:
            return None
        if info is None or not info.replayed_steps:
            raise ConfigError(f"{where} replays no batch, so it has no replayed_steps_per_env_step")
        value = float(replayed) / info.replayed_steps
    if not float(value) > 0:
        raise ConfigError(f"{where}: a ratio must be positive, not {value}")
    return float(value)


def _count(where: str, key: str, value: Any, *, least: int = 1) -> int | None:
    if value is None:
        return None
    # YAML reads 1e6 as a float: a whole float is a count.
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < least:
        raise ConfigError(f"{where}: {key} must be a whole number of at least {least}, not {value!r}")
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
            raise ConfigError(f"{where} names a buffer '{name}' that does not exist.{closest(name, buffers)}")
        if not share > 0:
            raise ConfigError(f"{where}: the share of buffer '{name}' must be positive, not {share}")
    return shares
