"""`rl-lab check my_env:MyEnv`: what an agent will see of an environment, and what would go wrong in training."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.config.checks import CONFIG_FOLDER
from rl_lab.environments.make import EnvFactory, env_factory
from rl_lab.environments.spec import UnusableRow, action_mapping, observation_leaves
from rl_lab.environments.suites.gym import name_task
from rl_lab.environments.wrappers import DictObservation, is_image
from rl_lab.errors import LabError, one_line, one_line_errors, unexpected
from rl_lab.records import ArraySpec

STEPS = 1000  # random steps that are tried
SECONDS = 10.0  # they stop earlier
COMPARED_STEPS = 100  # of two equal episodes
LARGE = 1000.0  # values above this are better normalized
SLOW = 200.0  # steps a second

EPILOG = """examples:
  rl-lab check my_env:MyEnv                     a class, or a function that creates one, in ./my_env.py
  rl-lab check Acrobot-v1                       a registered Gymnasium id, or the task of a suite
  rl-lab check my_env:MyEnv size=96 difficulty=2    settings as in environment.size=96"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("task", metavar="ENV", help="import path, Gymnasium id, or task of a suite")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of the environment")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"random steps to try (default: {STEPS})")


def main(args: argparse.Namespace) -> int:
    from rl_lab.tools.evaluate import parse_changes

    checked = check_env(args.task, steps=args.steps, **parse_changes(args.settings, "check"))
    print(checked)
    return 0 if checked.ok else 1


@dataclass(frozen=True)
class Finding:
    """One checked property. state: "ok", "warn" (training works, but …) or "bad" (training fails)."""

    state: str
    name: str
    text: str


@dataclass
class EnvCheck:
    """Result of `check_env`; printing it shows a report."""

    task: str
    words: tuple[str, ...] = ()  # settings that were given, as words of `rl-lab train`
    seen: list[tuple[str, str, str, str]] = field(default_factory=list)  # name, own space, lab's form, range
    action: tuple[str, str] = ("", "")  # own space, lab's form
    findings: list[Finding] = field(default_factory=list)
    presets: list[tuple[str, str]] = field(default_factory=list)  # words to choose it, description

    @property
    def ok(self) -> bool:
        """Whether training can work."""
        return all(finding.state != "bad" for finding in self.findings)

    def add(self, state: str, name: str, text: str) -> None:
        self.findings.append(Finding(state, name, text))

    @property
    def command(self) -> str:
        """The command that trains with the first preset, or ""."""
        if not self.ok or not self.presets:
            return ""
        words = [f"+experiment={self.presets[0][0]}", f"environment.task={self.task}", *self.words]
        return " ".join(["rl-lab train", *words])

    def __str__(self) -> str:
        from rl_lab.tools.terminal import plain_table

        parts = []
        if self.seen:
            rows = [*self.seen, ("action", *self.action, "")]
            header = ("", "in your environment", "for the agent", "seen")
            parts.append(plain_table(rows, header=header, title=f"{self.task}: what the agent will see"))
        found = [(finding.state, finding.name, finding.text) for finding in self.findings]
        parts.append(plain_table(found, title="checks"))
        if self.ok and self.presets:
            parts.append(plain_table(self.presets, title="presets that fit"))
            parts.append(f"train: {self.command}")
        elif not self.ok:
            parts.append("not ready: correct what is marked bad, and check again")
        return "\n\n".join(parts)

    __repr__ = __str__


@one_line_errors()
def check_env(env: Any, *, steps: int = STEPS, **settings: Any) -> EnvCheck:
    """Try an environment as training would use it: spaces, values, determinism, speed, rendering, pickling.

    env:      import path, Gymnasium id, task of a suite, class, or function that creates an environment
    settings: as under `environment` in a config: size=96, pixels=True, arguments of its constructor
    """
    task = name_task(env)
    words = tuple(_word(key, value) for key, value in settings.items())
    checked = EnvCheck(task, words)
    factory = env_factory(task, **({"size": "auto"} | settings))
    try:
        made = factory()
    except LabError:
        raise
    except (Exception, SystemExit) as error:
        checked.add("bad", "create", f"its constructor raised {unexpected(error)}")
        return checked
    checked.add("ok", "create", "spaces can be converted")
    try:
        raw = _own(made)
        _check_steps(checked, made, raw, steps)
    except (Exception, SystemExit) as error:
        checked.add("bad", "step", _reason(error))
    finally:
        _close(made)
    if checked.ok:
        _check_determinism(checked, factory)
        _check_workers(checked, factory)
        _check_rendering(checked, factory)
        checked.presets = fitting_presets(_specs(made), made)
    return checked


def fitting_presets(observations: Mapping[str, ArraySpec], env: gymnasium.Env) -> list[tuple[str, str]]:
    """Return (words after +experiment=, description) of the presets for these observations and actions."""
    images = any(is_image(spec) for spec in observations.values())
    if images:
        return [("dreamer_gym_vision", "Dreamer from images, with or without vectors")]
    discrete = env.get_wrapper_attr("action_spec").kind != "continuous"
    planner = " controller@controllers.policy=tdmpc_categorical_policy" if discrete else ""
    return [
        ("dreamer_gym", "Dreamer from vectors"),
        (f"tdmpc2_gym{planner}", "TD-MPC2 from vectors: fewer steps, and slower ones"),
    ]


# --- Checks ---


def _check_steps(checked: EnvCheck, env: gymnasium.Env, raw: gymnasium.Env, steps: int) -> None:
    """Take random steps: values against the spaces, ranges, ends, speed."""
    leaves = observation_leaves(raw.observation_space)
    low = {name: math.inf for name in _specs(env)}
    high = {name: -math.inf for name in low}
    env.action_space.seed(0)
    obs, _ = env.reset(seed=0)
    misfits = dict(_misfits(raw.observation_space, _last_raw(env), ""))
    lengths: list[int] = []
    rewards: list[float] = []
    length, done = 0, 0
    began = spent = time.perf_counter()
    stepping = 0.0
    for _ in range(steps):
        before = time.perf_counter()
        obs, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        stepping += time.perf_counter() - before
        done += 1
        length += 1
        rewards.append(float(reward))
        if not math.isfinite(rewards[-1]):
            raise UnusableRow(f"reward is {reward!r} at step {length} of an episode")
        for name, value in obs.items():
            if not np.isfinite(value).all():
                raise UnusableRow(f"observation '{name}' has NaN or infinity at step {length} of an episode")
            low[name], high[name] = min(low[name], float(value.min())), max(high[name], float(value.max()))
        misfits |= dict(_misfits(raw.observation_space, _last_raw(env), ""))
        if terminated or truncated:
            lengths.append(length)
            length = 0
            env.reset()
        spent = time.perf_counter()
        if spent - began > SECONDS:
            break
    own = {leaf.name: _space_text(_at(raw.observation_space, leaf.path)) for leaf in leaves}
    for name, spec in _specs(env).items():
        seen = f"{low[name]:.4g} to {high[name]:.4g}" if done else ""
        checked.seen.append((name, own.get(name, "rendered frame"), _form_text(spec), seen))
    kind, _ = action_mapping(raw.action_space)
    checked.action = (_space_text(raw.action_space), kind.kind.replace("_", " "))
    if misfits:
        name, why = next(iter(misfits.items()))
        checked.add(
            "warn", "spaces", f"observation {name or 'value'}: {why}; the space should say what is returned"
        )
    else:
        checked.add("ok", "spaces", f"observations of {done} random steps fit their space")
    _check_values(checked, rewards, low, high)
    _check_actions(checked, raw.action_space)
    if not lengths:
        checked.add(
            "warn", "episodes", f"none ended in {done} steps: set environment.time_limit if they never end"
        )
    else:
        shortest, longest = min(lengths), max(lengths)
        after = f"{shortest} to {longest}" if shortest < longest else str(longest)
        text = f"{len(lengths)} ended, after {after} step{'s' if longest > 1 else ''}"
        checked.add("ok", "episodes", text)
    speed = done / max(stepping, 1e-9)
    checked.add("ok" if speed > SLOW else "warn", "speed", _speed_text(speed))


def _check_values(
    checked: EnvCheck, rewards: list[float], low: Mapping[str, float], high: Mapping[str, float]
) -> None:
    if rewards and min(rewards) == max(rewards):
        advice = "; training starts once another reward is found" if rewards[0] == 0 else ""
        checked.add("warn", "rewards", f"all {rewards[0]:g} under random actions{advice}")
    elif rewards:
        checked.add("ok", "rewards", f"{min(rewards):.4g} to {max(rewards):.4g}")
    still = [name for name in low if low[name] == high[name]]
    if still:
        checked.add("warn", "values", f"constant: {', '.join(still)}")
    large = [name for name in low if max(-low[name], high[name]) > LARGE]
    if large:
        advice = "environment.normalize_observations=true scales them"
        checked.add("warn", "values", f"above {LARGE:,.0f}: {', '.join(large)}; {advice}")


def _check_actions(checked: EnvCheck, space: spaces.Space) -> None:
    if isinstance(space, spaces.Box) and not (np.isfinite(space.low) & np.isfinite(space.high)).all():
        checked.add("warn", "actions", "the Box has no finite bounds: the environment gets values in [-1, 1]")


def _check_determinism(checked: EnvCheck, factory: EnvFactory) -> None:
    """Run one episode twice with the same seed and actions."""
    try:
        first, second = _episode(factory), _episode(factory)
    except (Exception, SystemExit) as error:
        checked.add("bad", "second instance", _reason(error))
        return
    for step, (one, other) in enumerate(zip(first, second)):
        different = [key for key in one if not np.array_equal(one[key], other[key])]
        if different:
            checked.add(
                "warn",
                "determinism",
                f"{different[0]} differs at step {step} of two episodes with the same seed: use self.np_random only, and "
                "call super().reset(seed=seed); a resumed run replaces its open episodes",
            )
            return
    checked.add(
        "ok", "determinism", f"equal over {len(first) - 1} steps with the same seed: runs resume exactly"
    )


def _check_workers(checked: EnvCheck, factory: EnvFactory) -> None:
    import cloudpickle

    try:
        cloudpickle.dumps(factory)
    except Exception as error:
        checked.add(
            "warn",
            "workers",
            f"it cannot be sent to other processes ({one_line(error)}): set environment.workers=0",
        )


def _check_rendering(checked: EnvCheck, factory: EnvFactory) -> None:
    try:
        env = factory(True)
        try:
            env.reset(seed=0)
            frame: Any = np.asarray(env.render())
        finally:
            _close(env)
    except NotImplementedError:
        checked.add("warn", "rendering", "no videos: render() is not implemented")
        return
    except (Exception, SystemExit) as error:
        checked.add("warn", "rendering", f"no videos: {_reason(error)}")
        return
    if frame.ndim == 3 and frame.dtype == np.uint8:
        checked.add(
            "ok",
            "rendering",
            f"frames of {frame.shape[0]}×{frame.shape[1]}: videos, play, environment.pixels=true",
        )
    else:
        checked.add(
            "warn",
            "rendering",
            'no videos: render() gives no (H, W, 3) uint8 frame (render_mode="rgb_array")',
        )


# --- Parts ---


def _word(key: str, value: Any) -> str:
    """Return a setting as a word of `rl-lab train`; an argument of the constructor is a new key."""
    import yaml

    known = yaml.safe_load((CONFIG_FOLDER / "environment" / "gym.yaml").read_text(encoding="utf-8"))
    return f"{'' if key in known else '+'}environment.{key}={'null' if value is None else value}"


def _episode(factory: EnvFactory) -> list[dict[str, Any]]:
    """Return the rows of the start of an episode with seed 0 and fixed actions."""
    env = factory()
    try:
        env.action_space.seed(1)
        obs, _ = env.reset(seed=0)
        rows: list[dict[str, Any]] = [dict(obs)]
        for _ in range(COMPARED_STEPS):
            obs, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            rows.append({**obs, "reward": reward, "terminated": terminated, "truncated": truncated})
            if terminated or truncated:
                break
        return rows
    finally:
        _close(env)


class _Remembered(gymnasium.Wrapper):
    """Keeps the last observation of the environment, before any conversion."""

    last: Any = None

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**kwargs)
        self.last = obs
        return obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result = self.env.step(action)
        self.last = result[0]
        return result


def _own(env: gymnasium.Env) -> gymnasium.Env:
    """Return the environment inside the lab's conversion, wrapped so that its last observation is kept."""
    outer: Any = env
    while not isinstance(outer, DictObservation):
        outer = outer.env
    outer.env = _Remembered(outer.env)
    return outer.env


def _last_raw(env: gymnasium.Env) -> Any:
    outer: Any = env
    while not isinstance(outer, _Remembered):
        outer = outer.env
    return outer.last


def _misfits(space: spaces.Space, value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) of each entry of an observation that does not fit its space."""
    if isinstance(space, spaces.Dict) and isinstance(value, Mapping):
        for key, child in space.spaces.items():
            if key in value:
                yield from _misfits(child, value[key], f"{name}_{key}".strip("_"))
        return
    if isinstance(space, spaces.Tuple) and isinstance(value, tuple):
        for index, child in enumerate(space.spaces):
            yield from _misfits(child, value[index], f"{name}_{index}".strip("_"))
        return
    array = np.asarray(value)
    if space.shape is not None and array.shape != space.shape:
        yield name, f"shape {array.shape}, but the space has {space.shape}"
    elif isinstance(space, spaces.Box) and not np.can_cast(array.dtype, space.dtype, "same_kind"):
        yield name, f"dtype {array.dtype}, but the space has {space.dtype}"
    elif isinstance(space, spaces.Box) and not ((array >= space.low) & (array <= space.high)).all():
        yield name, f"{array.min():.4g} to {array.max():.4g}, outside of its bounds"
    elif not isinstance(space, spaces.Box) and not space.contains(value):
        yield name, f"{value!r} is not in {space}"


def _specs(env: gymnasium.Env) -> dict[str, ArraySpec]:
    assert isinstance(env.observation_space, spaces.Dict)
    return {
        name: ArraySpec(tuple(box.shape or ()), str(box.dtype))
        for name, box in env.observation_space.spaces.items()
    }


def _at(space: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        space = space[key]
    return space


def _space_text(space: spaces.Space) -> str:
    if isinstance(space, spaces.Box):
        low, high = float(np.min(space.low)), float(np.max(space.high))
        return f"Box {space.shape} {space.dtype}, {low:.4g} to {high:.4g}"
    return str(space)


def _form_text(spec: ArraySpec) -> str:
    if is_image(spec):
        channels, height, width = spec.shape
        return f"image, {channels} channels of {height}×{width}"
    return f"{'vector' if len(spec.shape) == 1 else 'array'} {spec.shape} {spec.dtype}"


def _speed_text(speed: float) -> str:
    text = f"{speed:,.0f} steps a second in one process"
    return (
        text
        if speed > SLOW
        else f"{text}: environment.num_envs=16 environment.workers=8 runs several at once"
    )


def _reason(error: BaseException) -> str:
    known = isinstance(error, LabError | UnusableRow)
    return str(error) if known else unexpected(error).partition("; --debug")[0]


def _close(env: gymnasium.Env) -> None:
    try:
        env.close()
    except (Exception, SystemExit):
        return
