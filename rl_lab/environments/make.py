"""`make_env("suite/task", num_envs=N, …)` creates the environments of all suites.

A suite is a module (an *adapter*) with

    make(task, *, render: bool, **options) -> gymnasium.Env    any spaces; `EnvFactory` adds wrappers
    tasks() -> list[str]                                       the valid names after "suite/"
    EXTRA: str                                                 extra of this package that installs the suite
    MODULE: str, SETUP: str                optional, without an extra: what it imports, what installs that
    resolve(task) -> object            optional: validates the task once; `make` receives the result
    HANDLES: set of "size", "action_repeat", "time_limit"      optional: passed to `make`, no wrapper is added
    step_seconds(task) -> float | None      optional: estimated duration of a step, to choose `workers`
    simulator(task, num_envs, device, **options) -> TensorSimulator   optional: for `batched` (see `tensor_env`)

It imports third-party packages inside these functions. To add a suite, add a line to `SUITES` in task_names.py, or an entry
point of the group `rl_lab.environments` in another package (name = suite, value = module).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import gymnasium

from rl_lab.environments.faults import RestartLimit
from rl_lab.environments.native import form_data
from rl_lab.environments.spec import spec_of
from rl_lab.environments.task_names import SUITES, Task, split, split_far, with_suite
from rl_lab.environments.vector import VectorEnv, default_workers
from rl_lab.environments.wrappers import (
    ActionRepeat,
    CheckedReturns,
    DictObservation,
    RenderedPixels,
    Size,
    StandardAction,
    TimeLimit,
    add_wrappers,
    resized,
    without_time_limit,
)
from rl_lab.errors import ConfigError, LabError, MissingPackageError, install_line, one_line_errors
from rl_lab.records import REFUSED, Spec

if TYPE_CHECKING:
    from rl_lab.environments.interpreters.places import Place

# Keyword arguments of `make_env` that concern all N environments together and not a single one.
_VECTOR_OPTION_NAMES = (
    "num_envs workers seed render copy infos video_every video_folder timeout restarts normalize_observations "
    "normalize_clip observation_statistics history_limit batched device remote"
)
VIDEO_OPTIONS = ("video_every", "video_folder")
VECTOR_OPTIONS = frozenset(_VECTOR_OPTION_NAMES.split())

# A worker process waits for the other interpreter, and reports it; the trainer waits a little longer for the worker.
FAR_GRACE_S = 5.0

_groups = itertools.count(1)  # of environments that share a process with another interpreter
_probed: dict[str, tuple[Spec, dict[str, Any]]] = {}


@dataclass(frozen=True)
class EnvFactory:
    """Creates one environment with the lab's wrappers; it is pickled and called in a worker process."""

    name: str
    module: str
    task: Any
    size: Size = None
    action_repeat: int | None = None
    time_limit: int | None = None
    pixels: bool | str = False
    observations: tuple[str, ...] | None = None
    wrappers: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    place: Place | None = None  # of an environment in another interpreter; `task` is not resolved then
    seed_argument: str | None = None

    def __call__(self, render: bool = False) -> gymnasium.Env:
        """Create one environment; wrappers are applied in the order of these lines, from the inside out."""
        adapter = _import_adapter(self.module, self.name)
        handled: frozenset[str] = getattr(adapter, "HANDLES", frozenset())
        repeat = 1 if "action_repeat" in handled else self.action_repeat or 1
        limit = None if "time_limit" in handled else self.time_limit
        size = self.form()["size"]

        settings = {key: getattr(self, key) for key in handled}
        if settings.get("size") == "auto":
            settings["size"] = None  # the default of the suite
        if self.place is None:
            env = self._make(adapter, settings, render or bool(self.pixels))
        else:
            env = self._make_far(self.place, settings, render or bool(self.pixels), limit is None)
        if limit is not None:
            env = without_time_limit(env)
        env = CheckedReturns(env)
        if repeat > 1:
            env = ActionRepeat(env, repeat)
        if limit is not None:
            env = TimeLimit(env, limit)
        if self.pixels:
            env = RenderedPixels(env, keep=self.pixels == "both", size=size)
        env = DictObservation(env, self.observations)
        env = resized(env, size)
        env = add_wrappers(env, self.wrappers)
        return StandardAction(env)

    def in_lane(self, lane: int) -> EnvFactory:
        """Return this factory for environments that share a process with another interpreter with their lane only."""
        return self if self.place is None else replace(self, place=replace(self.place, lane=lane))

    def form(self) -> dict[str, Any]:
        """Return what the wrappers do to observations: `size`, `observations` and `wrappers`."""
        handled: frozenset[str] = getattr(_import_adapter(self.module, self.name), "HANDLES", frozenset())
        size = None if "size" in handled else self.size
        return {"size": size, "observations": self.observations, "wrappers": self.wrappers}

    def step_seconds(self) -> float | None:
        """Return the estimated duration of one decision; None if unknown or if observations are rendered."""
        estimate = getattr(_import_adapter(self.module, self.name), "step_seconds", None)
        seconds = None if estimate is None or self.pixels or self.place else estimate(self.task)
        return None if seconds is None else seconds * (self.action_repeat or 1)

    def _make_far(
        self, place: Place, handled: dict[str, Any], render: bool, own_time_limit: bool
    ) -> gymnasium.Env:
        from rl_lab.environments.interpreters.peer import far_env

        return far_env(
            self.name,
            place,
            self.task,
            module=None if self.module == SUITES["gym"] else self.module,
            options={**handled, **self.options},
            render=render,
            own_time_limit=own_time_limit,
            seed_argument=self.seed_argument,
        )

    def _make(self, adapter: ModuleType, handled: dict[str, Any], render: bool) -> gymnasium.Env:
        try:
            return adapter.make(self.task, render=render, **handled, **self.options)
        except ModuleNotFoundError as error:
            raise _missing(self.name, error, _extra(adapter)) from error
        except TypeError as error:
            if "unexpected keyword" in str(error):
                raise ConfigError(
                    f"{self.name} does not accept one of {sorted(self.options)}: {error}"
                ) from error
            raise


@one_line_errors()
def make_env(
    task: Task,
    num_envs: int = 1,
    *,
    workers: int | None = None,
    seed: int = 0,
    size: int | str | Sequence[int] | None = None,
    action_repeat: int | None = None,
    time_limit: int | None = None,
    render: bool = False,
    copy: bool = True,
    infos: str = "log",
    video_every: int = 0,
    video_folder: str | Path | None = None,
    timeout: float | None = 120.0,
    restarts: Mapping[str, Any] | RestartLimit | None = None,
    normalize_observations: bool = False,
    normalize_clip: float | None = 10.0,
    observation_statistics: Mapping[str, Any] | None = None,
    history_limit: int = 100_000,
    batched: bool = False,
    device: Any = "cpu",
    remote: Any = None,
    **options: Any,
) -> VectorEnv:
    """Create a vector environment with N environments of one task.

    task:          "suite/task", a registered Gymnasium id ("CartPole-v1", "gym/CartPole-v1"), an import path
                   ("gym:my_env:MyEnv", "my_env:make"), or a function that returns a gymnasium.Env
    workers:       number of worker processes; 0: step in this process; None: automatic. With `python` or `host`:
                   number of processes there, and none here; 0: one
    seed:          seed of the run, from which the seed of every episode is derived
    size:          height and width of images (one integer: square); "auto": 64×64 unless image encoders can take
                   them as they are (see `wrappers.automatic_size`); None: not resized
    action_repeat: environment steps per decision; None: the suite's default (Atari 4, others 1)
    time_limit:    decisions after which an episode is truncated; replaces the limit of a registered id
    render:        enable `render()` of environment 0
    copy, infos:   see `VectorEnv`
    timeout:       maximum seconds of one environment call in a worker process; None: no limit
    restarts:      {"limit": 10, "minutes": 10}: allowed restarts after failures (docs/howto/faults.md)
    normalize_observations: normalize float observations by running mean and variance, clipped to
                            ±`normalize_clip`
    observation_statistics: fixed statistics of another environment (`env.normalizer.get_state()`)
    history_limit: maximum number of actions of an open episode kept for exact resume
    video_every:   record each Nth episode of environment 0 to `video_folder` (see `rendering`); 0: none
    python, host:  another interpreter, or another machine (docs/howto/simulators.md)
    batched, device: True: N environments as tensors on the device, for suites with a `simulator`: returns a
                   `tensor_env.TensorVectorEnv`; without `workers`, `restarts`, `normalize_observations` and videos
    remote:        starts the workers on other machines (see remote_worker.py)
    options:       `pixels` (True: the rendered frame is the observation; "both": it is added), `observations`
                   (names to keep), `wrappers` (see `wrappers`); all others are passed to the suite
    """
    _check(
        num_envs=num_envs,
        action_repeat=action_repeat,
        time_limit=time_limit,
        workers=workers,
        infos=infos,
        timeout=timeout,
        history_limit=history_limit,
    )
    factory = _factory(task, size=size, action_repeat=action_repeat, time_limit=time_limit, **options)
    if batched:
        _check_batched(factory, normalize_observations, video_every)
        return _make_batched(factory, num_envs, device, seed)
    if workers is None:
        workers = default_workers(num_envs, factory.step_seconds())
    if factory.place is not None:
        factory = replace(factory, place=replace(factory.place, timeout=timeout))
    spec, _ = _probe(factory)
    if factory.place is not None:
        factory = replace(factory, place=replace(factory.place, group=next(_groups)))
        timeout = None if timeout is None else timeout + FAR_GRACE_S
    normalizer = None
    if normalize_observations is not False:
        from rl_lab.environments.normalizer import make_normalizer

        normalizer = make_normalizer(spec, normalize_observations, normalize_clip, observation_statistics)
    made: Any = factory
    if video_every:
        from rl_lab.environments.rendering import RecordedFactory, VideoSettings

        made = RecordedFactory(factory, VideoSettings.checked(video_folder, video_every, seed))
    return VectorEnv(
        made,
        num_envs,
        spec=spec,
        workers=workers,
        seed=seed,
        render=render or bool(video_every),
        copy=copy,
        infos=infos,
        timeout=timeout,
        restarts=RestartLimit.from_config(restarts),
        normalizer=normalizer,
        history_limit=history_limit,
        remote=remote,
        lanes=factory.place is not None and remote is None,
    )


def probe_spec(task: Task, **options: Any) -> Spec:
    """Return the `Spec` of a task, from a temporary environment; accepts the arguments of `make_env`."""
    return probe(task, **options)[0]


def probe(
    task: Task,
    num_envs: int = 1,
    *,
    workers: int | None = None,
    size: int | str | Sequence[int] | None = None,
    action_repeat: int | None = None,
    time_limit: int | None = None,
    **options: Any,
) -> tuple[Spec, dict[str, Any]]:
    """Like `probe_spec`, and return the data of its `native.NativeForm` as well."""
    options = {key: value for key, value in options.items() if key not in VECTOR_OPTIONS}
    _check(num_envs=num_envs, action_repeat=action_repeat, time_limit=time_limit, workers=workers)
    return _probe(_factory(task, size=size, action_repeat=action_repeat, time_limit=time_limit, **options))


def env_factory(
    task: Task,
    *,
    size: int | str | Sequence[int] | None = None,
    action_repeat: int | None = None,
    time_limit: int | None = None,
    **options: Any,
) -> EnvFactory:
    """Return the factory of one environment; takes and filters the arguments of `make_env`."""
    options = {key: value for key, value in options.items() if key not in VECTOR_OPTIONS}
    return _factory(task, size=size, action_repeat=action_repeat, time_limit=time_limit, **options)


def env_config_options(environment: Mapping[str, Any], *, evaluation: bool = False) -> dict[str, Any]:
    """Convert the `environment` node to arguments of `make_env`; `evaluation` applies `environment.eval`.

    Without `batched`, which only training uses: all else takes arrays.
    """
    if environment.get(REFUSED):
        raise ConfigError(str(environment[REFUSED]))
    # Videos show training and are written to the run folder, so `build` adds these options.
    options = {
        str(key): _plain(value)
        for key, value in environment.items()
        if key not in ("eval", "batched", *VIDEO_OPTIONS)
    }
    if evaluation:
        changes = {str(key): _plain(value) for key, value in (environment.get("eval") or {}).items()}
        unused = ("batched", *VIDEO_OPTIONS)
        options.update({key: value for key, value in changes.items() if key not in unused})
    if not options.get("task"):
        raise ConfigError(
            "environment.task is not set: set it to a task, for example environment.task=CartPole-v1"
        )
    suite = options.pop(
        "suite", None
    )  # set by the config files of suites: environment=atari100k environment.task=pong
    if suite and isinstance(options["task"], str):
        options["task"] = with_suite(options["task"], suite)
    return options


def make_configured_env(environment: Mapping[str, Any], **changes: Any) -> VectorEnv:
    """Create the environments of an `environment` node; `changes` are further arguments of `make_env`."""
    return make_env(**{**env_config_options(environment), **changes})


def _factory(
    task: Task,
    *,
    size: int | str | Sequence[int] | None,
    pixels: bool | str = False,
    observations: Sequence[str] | None = None,
    wrappers: Mapping[str, Any] | None = None,
    action_repeat: int | None,
    time_limit: int | None,
    python: str | None = None,
    host: str | None = None,
    seed_argument: str | None = None,
    **options: Any,
) -> EnvFactory:
    if pixels not in (False, True, "both"):
        raise ConfigError(f"environment.pixels={pixels!r}: use true (only the frame), both, or false")
    place = None
    if python is not None or host is not None:
        from rl_lab.environments.interpreters.places import place_of

        place = place_of(python, host)
    if place is not None:
        name, module, resolved = split_far(task, place)
    else:
        name, module, remainder = split(task)
        adapter = _import_adapter(module, name)
        try:
            resolved = adapter.resolve(remainder) if hasattr(adapter, "resolve") else remainder
        except ModuleNotFoundError as error:
            raise _missing(name, error, _extra(adapter)) from error
    return EnvFactory(
        name=name,
        module=module,
        task=resolved,
        size=_pair(size),
        action_repeat=action_repeat,
        time_limit=time_limit,
        pixels=pixels,
        observations=None if observations is None else tuple(observations),
        wrappers=dict(wrappers or {}),
        options=options,
        place=place,
        seed_argument=seed_argument,
    )


def _check_batched(factory: EnvFactory, normalize: bool, video_every: int) -> None:
    if not hasattr(_import_adapter(factory.module, factory.name), "simulator"):
        raise ConfigError(
            f"environment.batched=true needs a suite with a simulator of tensors, and {factory.name} is none: use "
            "environment.batched=false, or a task such as tensor/cartpole"
        )
    unused = {
        "action_repeat": (factory.action_repeat or 1) > 1,
        "size": factory.size is not None,
        "pixels": bool(factory.pixels),
        "observations": factory.observations is not None,
        "wrappers": bool(factory.wrappers),
        "normalize_observations": normalize,
        "video_every": bool(video_every),
    }
    wrong = [name for name, used in unused.items() if used]
    if wrong:
        raise ConfigError(
            f"environment.{wrong[0]} does not work with environment.batched=true, whose observations are not "
            f"wrapped: remove it, or set environment.batched=false"
        )


def _make_batched(factory: EnvFactory, num_envs: int, device: Any, seed: int) -> Any:
    from rl_lab.environments.tensor_env import TensorVectorEnv

    adapter = _import_adapter(factory.module, factory.name)
    try:
        simulator = adapter.simulator(factory.task, num_envs, device, **factory.options)
    except ModuleNotFoundError as error:
        raise _missing(factory.name, error, _extra(adapter)) from error
    except TypeError as error:
        if "unexpected keyword" in str(error):
            raise ConfigError(
                f"{factory.name} does not accept one of {sorted(factory.options)}: {error}"
            ) from error
        raise
    return TensorVectorEnv(simulator, name=factory.name, seed=seed, time_limit=factory.time_limit)


def _import_adapter(module: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise _missing(name, error, "") from error


def _extra(adapter: ModuleType) -> str:
    # The gym adapter creates environments of any package, which no extra of ours installs.
    return "" if adapter.__name__ == SUITES["gym"] else getattr(adapter, "EXTRA", "")


def _missing(name: str, error: ModuleNotFoundError, extra: str) -> MissingPackageError:
    if extra:
        return MissingPackageError(
            f"{name} needs the package '{error.name}', which is not installed: {install_line(extra)}"
        )
    # Module and package names can differ: cv2 is in opencv-python, yaml in PyYAML.
    return MissingPackageError(
        f"{name} cannot be loaded: there is no module '{error.name}', install the package that provides it"
    )


def _probe(factory: EnvFactory) -> tuple[Spec, dict[str, Any]]:
    """Return the spec of an environment, and its own form."""
    # The key contains all settings. Functions may change between two calls, so only named tasks are cached.
    key = repr(factory) if not callable(factory.task) else ""
    if key and key in _probed:
        return _probed[key]
    try:
        env = factory()
        try:
            probed = spec_of(env, factory.name), form_data(env, **factory.form())
        finally:
            env.close()
    except SystemExit as error:  # it would stop the trainer without a message
        raise LabError(
            f"{factory.name} called sys.exit({error.code!r}) in its constructor or in close(): raise an exception "
            "with a message instead"
        ) from error
    if key:
        _probed[key] = probed
    return probed


def _check(
    *,
    num_envs: int,
    action_repeat: int | None,
    time_limit: int | None,
    workers: int | None,
    infos: str = "log",
    timeout: float | None = None,
    history_limit: int = 0,
) -> None:
    for name, value, minimum in (
        ("num_envs", num_envs, 1),
        ("action_repeat", action_repeat, 1),
        ("time_limit", time_limit, 1),
        ("workers", workers, 0),
        ("history_limit", history_limit, 0),
    ):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < minimum):
            raise ConfigError(f"environment.{name}={value!r} must be an integer of at least {minimum}")
    if infos not in ("log", "all"):
        raise ConfigError(f"environment.infos={infos!r}: use 'log' or 'all'")
    if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
        raise ConfigError(f"environment.timeout={timeout!r} must be above 0 seconds, or null for no limit")


def _pair(size: int | str | Sequence[int] | None) -> Size:
    if size is None or size == "auto":
        return size  # type: ignore[return-value]
    sides = size if isinstance(size, Sequence) else (size, size)
    pair: tuple[Any, ...] = tuple(sides)
    if len(pair) != 2 or not all(isinstance(side, int) and side >= 1 for side in pair):
        raise ConfigError(f"environment.size={size!r}: use one integer, height and width, or auto")
    return int(pair[0]), int(pair[1])


def _plain(value: Any) -> Any:
    """Convert config nodes to dicts and lists."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value
