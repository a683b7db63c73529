"""Sources of play: the real environment, the world model, both side by side, and recorded episodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.formats.dataset import stored_rows
from rl_lab.buffers.formats.files import SUFFIXES, EpisodeFiles
from rl_lab.environments.world_model_env import ImaginedEpisodes
from rl_lab.errors import ConfigError, LabError, closest, install_line
from rl_lab.protocols import InspectablePolicy, ObservationDecoder
from rl_lab.records import OBS_PREFIX, ActMode, Batch, Spec
from rl_lab.tools.play.frame import Frame, Panel, difference, observation_image

RECONSTRUCTED_ROWS = 4  # encoded for the reconstruction of the newest row; more are slower and look the same
TRIES = 20  # episodes that end within the context; after them a context of one row is used


class RealSource:
    """A vector environment with one evaluation environment of the run, stepped by the user or the agent.

    context: number of kept rows; a dream starts from them, and the reconstruction uses them
    """

    def __init__(
        self,
        workflow: Any,
        environment: Any,
        *,
        device: torch.device,
        sample: bool = False,
        context: int = 8,
        seed: int = 0,
    ) -> None:
        self.workflow = workflow
        self.environment = environment
        self.spec: Spec = environment.spec
        self.device = device
        self.sample = sample
        self.rows: deque[dict[str, np.ndarray]] = deque(maxlen=context)
        self._seed: int | None = seed  # of the first episode; later seeds are derived from it
        self._generator = torch.Generator(device).manual_seed(seed)
        self._policy_state: dict[str, torch.Tensor] | None = None  # None: not updated in this episode
        self._action: np.ndarray | None = None  # the agent's action here, if it was computed
        self._image: np.ndarray | None = None
        self._reconstruction: np.ndarray | None = None

    def reset(self) -> Frame:
        obs, _ = self.environment.reset(seed=self._seed)
        self._seed = None
        self.rows.clear()
        self._policy_state = None
        self._add_row(obs, 0.0, False, False, first=True)
        return Frame(self.observation())

    def step(self, action: np.ndarray) -> Frame:
        taken = np.asarray(action, dtype=self.spec.action.dtype)
        self._set_action(taken)
        obs, reward, terminated, truncated, _ = self.environment.step(taken[None])
        flags = float(reward[0]), bool(terminated[0]), bool(truncated[0])
        self._add_row(obs, *flags, first=False)
        return Frame(self.observation(), taken, *flags)

    def agent_action(self) -> np.ndarray:
        if self._action is None:
            self._act()
        assert self._action is not None
        return self._action

    def inspect(self) -> dict[str, float]:
        # While the user plays, the policy runs only if it returns values here: act() is slow for a planner. A
        # policy that did not run starts with an initial policy state when it takes over.
        if not isinstance(self.workflow, InspectablePolicy):
            return {}
        if self._action is None:
            self._act()
        assert self._policy_state is not None
        return {
            name: float(value[0]) for name, value in self.workflow.inspect_policy(self._policy_state).items()
        }

    def panels(self, parts: bool) -> list[Panel]:
        shown = [Panel("environment", self.rendered())]
        if parts:
            shown.append(Panel("model input", observation_image(self.observation())))
            reconstruction = self.reconstruction()
            if reconstruction is not None:
                shown.append(Panel("reconstruction", reconstruction))
        return shown

    def reconstruction(self) -> np.ndarray | None:
        """Return the model's reconstruction of the newest row; None without a decoder."""
        workflow = self.workflow
        if self._reconstruction is None and workflow.can_dream and isinstance(workflow, ObservationDecoder):
            state = self.workflow.dream_start(self.batch(RECONSTRUCTED_ROWS), generator=self._generator)
            decoded = workflow.dream_observation(state)
            if decoded:
                self._reconstruction = observation_image(
                    {name: value[0].cpu().numpy() for name, value in decoded.items()}
                )
        return self._reconstruction

    @property
    def ended(self) -> bool:
        """Whether the current episode has ended."""
        return bool(self.rows[-1]["terminated"] or self.rows[-1]["truncated"])

    def batch(self, most: int | None = None) -> Batch:
        """Return the newest rows, (1, T, …), on the model's device."""
        rows = list(self.rows)[-(most or len(self.rows)) :]
        columns = {name: np.stack([row[name] for row in rows])[None] for name in rows[-1]}
        return Batch({name: torch.as_tensor(value).to(self.device) for name, value in columns.items()})

    def warm_up(self, length: int) -> Batch:
        """Start a new episode and return its first rows, with the agent's actions."""
        for attempt in range(TRIES + 1):
            frame = self.reset()
            wanted = min(length, self.rows.maxlen or 1) if attempt < TRIES else 1
            while len(self.rows) < wanted and not frame.done:
                frame = self.step(self.agent_action())
            if not frame.done:
                break
        return self.batch()

    def close(self) -> None:
        self.environment.close()

    # --- Private methods ---

    def observation(self) -> dict[str, np.ndarray]:
        row = self.rows[-1]
        return {n.removeprefix(OBS_PREFIX): value for n, value in row.items() if n.startswith(OBS_PREFIX)}

    def _add_row(
        self, obs: dict[str, np.ndarray], reward: float, terminated: bool, truncated: bool, *, first: bool
    ) -> None:
        action = self.spec.action
        self.rows.append(
            {
                **{OBS_PREFIX + name: np.array(value[0]) for name, value in obs.items()},
                "action": np.zeros(action.shape, action.dtype),
                "reward": np.asarray(reward, np.float32),
                "terminated": np.asarray(terminated, np.bool_),
                "truncated": np.asarray(truncated, np.bool_),
                "is_first": np.asarray(first, np.bool_),
            }
        )
        self._action = self._image = self._reconstruction = None

    def _set_action(self, action: np.ndarray) -> None:
        self.rows[-1]["action"] = action
        if self._action is None:
            self._policy_state = None  # the policy skipped this step: it restarts when it acts again
        elif self._policy_state is not None and "action" in self._policy_state:
            self._policy_state = {
                **self._policy_state,
                "action": torch.as_tensor(action[None]).to(self.device),
            }

    @torch.no_grad()
    def _act(self) -> None:
        """Compute the agent's action and its next policy state."""
        first = self._policy_state is None
        state = self.workflow.initial_policy_state(1) if self._policy_state is None else self._policy_state
        obs = {
            name: torch.as_tensor(value[None]).to(self.device) for name, value in self.observation().items()
        }
        mode = ActMode(sample=self.sample, generator=self._generator)
        is_first = torch.tensor([first], device=self.device)
        action, self._policy_state, _ = self.workflow.act(obs, state, is_first, mode)
        self._action = action[0].cpu().numpy()

    def rendered(self) -> np.ndarray:
        """Return (H, W, 3) uint8: the rendered environment, or the observation if it cannot be rendered."""
        if self._image is None:
            try:
                self._image = self.environment.frame() if self.environment.render_mode else None
            except LabError:  # the environment cannot be rendered
                if self.environment.closed:
                    raise
            if self._image is None:
                self._image = observation_image(self.observation())
        return self._image


class DreamSource:
    """The world model, stepped by the user or the agent.

    imagined: one imagined episode at a time
    starts: returns the rows (1, T, …) that a new dream starts from
    """

    def __init__(
        self, imagined: ImaginedEpisodes, starts: Callable[[], Batch], *, sample: bool = False, seed: int = 0
    ) -> None:
        self.imagined = imagined
        self.starts = starts
        self.sample = sample
        self.workflow: Any = imagined.workflow
        self._generator = torch.Generator(imagined.device).manual_seed(seed)
        self._action: np.ndarray | None = None
        self._obs: dict[str, np.ndarray] = {}
        self._start_image: np.ndarray | None = None  # the last real observation

    def reset(self) -> Frame:
        return self.start_from(self.starts())

    def start_from(self, batch: Batch) -> Frame:
        """Continue from the last of these rows."""
        self._start_image = observation_image(
            {name: value[0, -1].cpu().numpy() for name, value in batch.obs.items()}
        )
        self._set_obs(self.imagined.start(batch))
        return Frame(self._obs)

    def step(self, action: np.ndarray) -> Frame:
        taken = np.asarray(action, dtype=self.imagined.spec.action.dtype)
        step = self.imagined.step(torch.as_tensor(taken)[None])
        self._set_obs(step.obs)
        extra = {"end chance": float(step.end_chance[0])}
        return Frame(
            self._obs, taken, float(step.reward[0]), bool(step.terminated[0]), bool(step.truncated[0]), extra
        )

    def agent_action(self) -> np.ndarray:
        if self._action is None:
            mode = ActMode(sample=self.sample, generator=self._generator)
            self._action = self.imagined.act(mode)[0].cpu().numpy()
        return self._action

    def inspect(self) -> dict[str, float]:
        if not isinstance(self.workflow, InspectablePolicy):
            return {}
        self.agent_action()
        return {
            name: float(value[0]) for name, value in self.workflow.inspect_policy(self.imagined.state).items()
        }

    def panels(self, parts: bool) -> list[Panel]:
        shown = [Panel("dream", observation_image(self._obs))]
        if parts and self._start_image is not None:
            shown.insert(0, Panel("start", self._start_image))
        return shown

    def _set_obs(self, obs: dict[str, torch.Tensor]) -> None:
        self._obs = {name: value[0].cpu().numpy() for name, value in obs.items()}
        self._action = None


class BothSource:
    """The real environment and the model's open-loop prediction from the same actions, side by side.

    The prediction restarts from the real rows after `horizon` steps and at every new episode.
    """

    def __init__(self, real: RealSource, imagined: ImaginedEpisodes, *, horizon: int) -> None:
        self.real = real
        self.imagined = imagined
        self.horizon = horizon
        self.open_loop_steps = 0  # since the prediction last restarted
        self._predicted: dict[str, np.ndarray] = {}

    def reset(self) -> Frame:
        self.real.warm_up(self.real.rows.maxlen or 1)
        return self.restart_prediction()

    def restart_prediction(self) -> Frame:
        """Start the prediction from the current state of the real environment."""
        self._predict_from_real()
        return Frame(self.real.observation())

    def step(self, action: np.ndarray) -> Frame:
        if self.open_loop_steps >= self.horizon:
            self._predict_from_real()
        frame = self.real.step(action)
        predicted = self.imagined.step(torch.as_tensor(np.asarray(frame.action))[None])
        self.open_loop_steps += 1
        self._predicted = {name: value[0].cpu().numpy() for name, value in predicted.obs.items()}
        frame.extra |= {
            "dream reward": float(predicted.reward[0]),
            "end chance": float(predicted.end_chance[0]),
            "error": self._error(),
            "open loop": self.open_loop_steps,
        }
        return frame

    def agent_action(self) -> np.ndarray:
        return self.real.agent_action()

    def inspect(self) -> dict[str, float]:
        return self.real.inspect()

    def panels(self, parts: bool) -> list[Panel]:
        real, predicted = observation_image(self.real.observation()), observation_image(self._predicted)
        shown = [Panel("real", real), Panel("dream", predicted)]
        if not any(value.dtype == np.uint8 and value.ndim == 3 for value in self.real.observation().values()):
            shown.insert(0, Panel("environment", self.real.rendered()))  # vectors as bars are hard to read
        if parts:
            shown.append(Panel("difference", difference(real, predicted)))
        return shown

    def _predict_from_real(self) -> None:
        obs = self.imagined.start(self.real.batch())
        self._predicted = {name: value[0].cpu().numpy() for name, value in obs.items()}
        self.open_loop_steps = 0

    def _error(self) -> float:
        """Return the root mean squared error over all observations, images in [0, 1]."""
        errors = []
        for name, real in self.real.observation().items():
            if name in self._predicted:
                scale = 255.0 if real.dtype == np.uint8 else 1.0
                error = (real.astype(np.float32) - self._predicted[name].astype(np.float32)) / scale
                errors.append(float(np.mean(error**2)))
        return float(np.sqrt(np.mean(errors))) if errors else float("nan")


# --- Recorded episodes ---

SPLITS = {
    "train": "episodes/train",
    "test": "episodes/test",
    "imagination": "episodes/imagination",
    "recordings": "recordings",
}
VIDEOS = (".mp4", ".gif")
LONGEST = 3000  # frames read from a video


class EpisodesSource:
    """Replays recorded episodes: .npz and .pt contain all columns, .mp4 and .gif only images."""

    def __init__(self, media: Path, spec: Spec, split: str | None = None) -> None:
        self.media = media
        self.spec = spec
        self.split = ""
        self.index = 0
        self.position = 0
        self._files: list[Path] = []
        self._rows: dict[str, np.ndarray] = {}
        self._video: np.ndarray | None = None
        have = [name for name in SPLITS if self.files(name)]
        if split is not None and split not in SPLITS:
            raise ConfigError(f"--split {split}: there is no such split.{closest(split, SPLITS)}")
        if not have or (split is not None and split not in have):
            folder = media / SPLITS[split or "test"]
            raise LabError(
                f"{folder} has no recorded episode"
                + (
                    f"; these splits have some: {', '.join(have)}"
                    if have
                    else ": record one with -s, or run rl-lab eval with --video"
                )
            )
        self.choose(split or ("test" if "test" in have else have[0]))

    def files(self, split: str) -> list[Path]:
        """Return the episodes of a split by name; a video is skipped if the same episode's data exist."""
        folder = self.media / SPLITS[split]
        found = [
            file for file in folder.glob("*") if file.suffix in (*SUFFIXES, *VIDEOS) and file.name[0] != "."
        ]
        with_data = {file.stem for file in found if file.suffix in SUFFIXES}
        return sorted(file for file in found if file.suffix in SUFFIXES or file.stem not in with_data)

    def choose(self, split: str, index: int = 0) -> Frame:
        """Open an episode; LabError if the split has none."""
        files = self.files(split)
        if not files:
            raise LabError(f"{self.media / SPLITS[split]} has no recorded episode")
        index %= len(files)
        rows, video = self._read(files[index])
        self.split, self._files, self.index, self.position = split, files, index, 0
        self._rows, self._video = rows, video
        return self.frame()

    def reset(self) -> Frame:
        """Open the next episode."""
        return self.choose(self.split, self.index + 1)

    def move(self, by: int) -> Frame:
        """Move forward or back by `by` episodes."""
        return self.choose(self.split, self.index + by)

    def rewind(self) -> Frame:
        return self.seek(-self.length)

    def seek(self, by: int) -> Frame:
        self.position = min(max(0, self.position + by), self.length - 1)
        return self.frame()

    def step(self, action: np.ndarray) -> Frame:
        """Move one step forward; the action is ignored."""
        return self.seek(1)

    def agent_action(self) -> np.ndarray:
        """Return a placeholder: a recorded episode ignores the action."""
        return np.zeros(self.spec.action.shape, self.spec.action.dtype)

    def inspect(self) -> dict[str, float]:
        return {}

    @property
    def length(self) -> int:
        return len(self._video) if self._video is not None else len(self._rows["reward"])

    def frame(self) -> Frame:
        at = self.position
        if self._video is not None:
            action = np.zeros(self.spec.action.shape, self.spec.action.dtype) if at else None
            return Frame({}, action, truncated=at == self.length - 1)
        rows = self._rows
        obs = {n.removeprefix(OBS_PREFIX): value[at] for n, value in rows.items() if n.startswith(OBS_PREFIX)}
        return Frame(
            obs,
            rows["action"][at - 1] if at else None,
            float(rows["reward"][at]),
            bool(rows["terminated"][at]),
            bool(rows["truncated"][at]),
        )

    def return_so_far(self) -> float | None:
        """Return the sum of rewards up to here; None for a video, which has no rewards."""
        return None if self._video is not None else float(self._rows["reward"][: self.position + 1].sum())

    def panels(self, parts: bool) -> list[Panel]:
        if self._video is not None:
            return [Panel("video", self._video[self.position])]
        return [Panel("recorded", observation_image(self.frame().obs))]

    def status(self) -> dict[str, Any]:
        """Return split, file and position."""
        return {
            "split": self.split,
            "name": self._files[self.index].name,
            "index": self.index,
            "count": len(self._files),
            "position": self.position,
            "length": self.length,
        }

    def _read(self, file: Path) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        if file.suffix in VIDEOS:
            return {}, read_video(file)
        rows = stored_rows(EpisodeFiles([file]), 0, self.spec)
        return {name: np.asarray(value)[0] for name, value in rows.items()}, None


def read_video(file: Path) -> np.ndarray:
    """Read an mp4 or GIF as (T, H, W, 3) uint8."""
    frames: list[np.ndarray] = []
    try:
        if file.suffix == ".gif":
            from PIL import Image, ImageSequence

            with Image.open(file) as image:
                for frame in ImageSequence.Iterator(image):
                    frames.append(np.asarray(frame.convert("RGB")))
                    if len(frames) >= LONGEST:
                        break
        else:
            frames = _mp4_frames(file)
    except ImportError as error:
        raise LabError(f"{file.name} needs imageio-ffmpeg: {install_line('video')}") from error
    except (OSError, RuntimeError, ValueError, SyntaxError) as error:
        raise LabError(f"{file} cannot be read: {str(error).strip()[:200]}") from error
    if not frames:
        raise LabError(f"{file} contains no frame")
    return np.stack(frames)


def _mp4_frames(file: Path) -> list[np.ndarray]:
    import imageio_ffmpeg

    reader = imageio_ffmpeg.read_frames(str(file))
    frames: list[np.ndarray] = []
    try:
        width, height = next(reader)["size"]
        for data in reader:
            frames.append(np.frombuffer(data, np.uint8).reshape(height, width, 3))
            if len(frames) >= LONGEST:
                break
    finally:
        reader.close()
    return frames
