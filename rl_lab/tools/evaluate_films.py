"""Videos of chosen evaluation episodes, played again from their seeds and actions.

Which episode was the best is known when all have been played, and only then is one worth rendering. So evaluation
notes the actions; an episode is begun again with its own seed, given the same actions, and filmed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from rl_lab.episode_tracker import Episode
from rl_lab.errors import LabError, one_line
from rl_lab.utils.media import film, save_video

MOST_FRAMES = 1000  # of one video; longer episodes are shown up to there
LARGEST_SIDE = 320  # pixels; larger frames are reduced, by whole factors


@dataclass(frozen=True)
class Take:
    """All that is needed to see an episode again."""

    env: int  # which environment played it
    number: int  # its how-manieth
    actions: np.ndarray  # (steps, …)
    episode_return: float = 0.0


class ActionNotes:
    """Notes the actions of every episode; give `add` to the Evaluator as `on_rows`."""

    def __init__(self) -> None:
        self._open: dict[int, list[Any]] = {}
        self._closed: dict[tuple[int, int], np.ndarray] = {}
        self._counts: dict[int, int] = {}

    def add(self, rows: Mapping[str, Any]) -> None:
        """One vector step's rows, (N, …) each."""
        actions = np.asarray(rows["action"])
        ended = np.asarray(rows["terminated"]) | np.asarray(rows["truncated"])
        for env, action in enumerate(actions):
            if rows["is_first"][env]:
                self._open[env] = []
            if not ended[env]:  # the action of an episode's last row is never carried out
                self._open[env].append(action.copy())
                continue
            number = self._counts.get(env, 0)
            self._counts[env] = number + 1
            self._closed[env, number] = np.stack(self._open.pop(env))

    def take(self, index: int, num_envs: int, episode_return: float = 0.0) -> Take:
        """Episode `index` of an evaluation: environment i plays episodes i, i+n, …"""
        number, env = divmod(index, num_envs)
        return Take(env, number, self._closed[env, number], episode_return)


@dataclass(frozen=True)
class Film:
    frames: np.ndarray  # (T, H, W, 3) uint8
    episode_return: float
    whole: bool  # whether it shows all of the episode
    fps: float  # as the environment wishes to be shown


def choose(episodes: Sequence[Episode]) -> dict[str, int]:
    """Which episodes are the best, the median and the worst by return; of equals the first."""
    order = sorted(range(len(episodes)), key=lambda index: (-episodes[index].episode_return, index))
    if len(order) < 3:
        return dict(zip(("best", "worst"), order))
    return {"best": order[0], "median": order[len(order) // 2], "worst": order[-1]}


def play_again(factory: Callable[[bool], gymnasium.Env], name: str, take: Take, *, seed: int) -> Film:
    """Begin the episode again, in this process, and film it.

    seed: of the evaluation. Where the environment cannot be rendered but shows pictures to the agent, those are filmed.
    """
    from rl_lab.environments.worker import episode_seed

    frames: list[np.ndarray] = []
    camera = _Camera(name)
    env: gymnasium.Env | None = None
    try:
        env = factory(True)
        obs, _ = env.reset(seed=episode_seed(seed, take.env, take.number))
        frames.append(camera.look(env, obs))
        total = 0.0
        for action in take.actions:
            obs, reward, *_ = env.step(action)
            total += float(reward)
            if len(frames) < MOST_FRAMES:
                frames.append(camera.look(env, obs))
        fps = float(env.metadata.get("render_fps") or 30)
    except LabError:
        raise
    except (Exception, SystemExit) as error:  # whatever an environment or its renderer does
        raise LabError(f"{name} failed when it was played again: {one_line(error)}") from error
    finally:
        if env is not None:
            with contextlib.suppress(Exception, SystemExit):  # the film is there, or why it is not
                env.close()
    return Film(np.stack(frames), total, len(frames) == len(take.actions) + 1, fps)


class _Camera:
    """What an environment renders; once that is no picture, what the agent is shown."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._renders = True

    def look(self, env: gymnasium.Env, obs: Mapping[str, np.ndarray]) -> np.ndarray:
        """(H, W, 3) uint8"""
        if self._renders:
            try:
                frame = np.asarray(env.render())
            except (Exception, SystemExit):  # no package, no screen
                frame = np.zeros(())
            if frame.ndim == 3 and frame.dtype == np.uint8:
                return _reduced(frame)
            self._renders = False
        for key, value in obs.items():
            if np.ndim(value) == 3 and value.dtype == np.uint8:
                return film(value[None], key)[0]
        raise LabError(f"{self._name} renders no frames here, and shows no picture to the agent")


def save_film(run: Path, name: str, step: int, shown: Film) -> Path:
    """media/episodes/test/eval_<name>_<step>.mp4, or .gif where mp4 cannot be."""
    target = run / "media" / "episodes" / "test" / f"eval_{name}_{step:09d}"
    return save_video(target, shown.frames, fps=shown.fps)


def _reduced(frame: np.ndarray) -> np.ndarray:
    from PIL import Image

    factor = -(-max(frame.shape[:2]) // LARGEST_SIDE)
    return np.asarray(Image.fromarray(frame).reduce(factor)) if factor > 1 else frame.copy()
