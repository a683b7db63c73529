"""The real environment: one of the run's evaluation environments, stepped by you or the agent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.episode_files import SUFFIXES, EpisodeFiles
from rl_lab.environments.world_model_env import Dreams
from rl_lab.errors import ConfigError, LabError, closest
from rl_lab.records import OBS_PREFIX, ActMode, Batch, Spec
from rl_lab.tools.play.frame import Moment, Panel, difference, observation_picture
from rl_lab.utils.install import install_line
from rl_lab.workflows.base import WorldModelWorkflow

RECONSTRUCTED_ROWS = (
    4  # that the model looks at for its picture of the newest: more cost time, and hardly show
)
TRIES = 20  # episodes that end before a dream could start, until one of a single frame is taken


class RealSource:
    """A vector environment of one, and the agent's memory of it.

    context: rows that are kept, for a dream to start from and for the model's picture of the present
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
        self._seed: int | None = seed  # of the first episode; the others follow from it
        self._generator = torch.Generator(device).manual_seed(seed)
        self._memory: dict[str, torch.Tensor] | None = None  # None: the agent has not followed this episode
        self._choice: np.ndarray | None = None  # what the agent would do now, where it has thought
        self._frame: np.ndarray | None = None
        self._model: np.ndarray | None = None

    def reset(self) -> Moment:
        obs, _ = self.environment.reset(seed=self._seed)
        self._seed = None
        self.rows.clear()
        self._memory = None
        self._arrived(obs, 0.0, False, False, first=True)
        return Moment(self.observation())

    def step(self, action: np.ndarray) -> Moment:
        taken = np.asarray(action, dtype=self.spec.action.dtype)
        self._acted(taken)
        obs, reward, terminated, truncated, _ = self.environment.step(taken[None])
        flags = float(reward[0]), bool(terminated[0]), bool(truncated[0])
        self._arrived(obs, *flags, first=False)
        return Moment(self.observation(), taken, *flags)

    def agent_action(self) -> np.ndarray:
        if self._choice is None:
            self._look()
        assert self._choice is not None
        return self._choice

    def think(self) -> dict[str, float]:
        # It follows you only where it tells something: looking costs an act(), which for a planner is a lot. A policy
        # that has not followed begins with fresh memory when it takes over.
        if type(self.workflow).inspect_policy is WorldModelWorkflow.inspect_policy:
            return {}
        if self._choice is None:
            self._look()
        assert self._memory is not None
        return {name: float(value[0]) for name, value in self.workflow.inspect_policy(self._memory).items()}

    def panels(self, parts: bool) -> list[Panel]:
        shown = [Panel("environment", self.rendered())]
        if parts:
            shown.append(Panel("model input", observation_picture(self.observation())))
            reconstruction = self.reconstruction()
            if reconstruction is not None:
                shown.append(Panel("reconstruction", reconstruction))
        return shown

    def reconstruction(self) -> np.ndarray | None:
        """What the model makes of the newest rows; None without a decoder."""
        if self._model is None and self.workflow.can_dream:
            state = self.workflow.dream_start(self.batch(RECONSTRUCTED_ROWS), generator=self._generator)
            decoded = self.workflow.dream_observation(state)
            if decoded:
                self._model = observation_picture(
                    {name: value[0].cpu().numpy() for name, value in decoded.items()}
                )
        return self._model

    @property
    def ended(self) -> bool:
        """Whether the open episode is over."""
        return bool(self.rows[-1]["terminated"] or self.rows[-1]["truncated"])

    def batch(self, most: int | None = None) -> Batch:
        """The newest rows, (1, T, …) on the model's device."""
        rows = list(self.rows)[-(most or len(self.rows)) :]
        columns = {name: np.stack([row[name] for row in rows])[None] for name in rows[-1]}
        return Batch({name: torch.as_tensor(value).to(self.device) for name, value in columns.items()})

    def warm_up(self, length: int) -> Batch:
        """A fresh episode's first rows, played by the agent."""
        for attempt in range(TRIES + 1):
            moment = self.reset()
            wanted = min(length, self.rows.maxlen or 1) if attempt < TRIES else 1
            while len(self.rows) < wanted and not moment.done:
                moment = self.step(self.agent_action())
            if not moment.done:
                break
        return self.batch()

    def close(self) -> None:
        self.environment.close()

    # ---------------------------------------------------------------- inside

    def observation(self) -> dict[str, np.ndarray]:
        row = self.rows[-1]
        return {n.removeprefix(OBS_PREFIX): value for n, value in row.items() if n.startswith(OBS_PREFIX)}

    def _arrived(
        self, obs: dict[str, np.ndarray], reward: float, end: bool, out_of_time: bool, *, first: bool
    ) -> None:
        action = self.spec.action
        self.rows.append(
            {
                **{OBS_PREFIX + name: np.array(value[0]) for name, value in obs.items()},
                "action": np.zeros(action.shape, action.dtype),
                "reward": np.asarray(reward, np.float32),
                "terminated": np.asarray(end, np.bool_),
                "truncated": np.asarray(out_of_time, np.bool_),
                "is_first": np.asarray(first, np.bool_),
            }
        )
        self._choice = self._frame = self._model = None

    def _acted(self, action: np.ndarray) -> None:
        self.rows[-1]["action"] = action
        if self._choice is None:
            self._memory = None  # it has not seen this step: it begins anew when it is asked again
        elif self._memory is not None and "action" in self._memory:
            self._memory = {**self._memory, "action": torch.as_tensor(action[None]).to(self.device)}

    @torch.no_grad()
    def _look(self) -> None:
        """The agent sees the present: its choice, and its memory after it."""
        first = self._memory is None
        memory = self.workflow.initial_policy_state(1) if self._memory is None else self._memory
        obs = {
            name: torch.as_tensor(value[None]).to(self.device) for name, value in self.observation().items()
        }
        mode = ActMode(sample=self.sample, generator=self._generator)
        is_first = torch.tensor([first], device=self.device)
        action, self._memory, _ = self.workflow.act(obs, memory, is_first, mode)
        self._choice = action[0].cpu().numpy()

    def rendered(self) -> np.ndarray:
        """(H, W, 3) uint8: as the environment draws itself, or the observation where it does not."""
        if self._frame is None:
            try:
                self._frame = self.environment.render() if self.environment.render_mode else None
            except LabError:  # this one draws nothing
                if self.environment.closed:
                    raise
            if self._frame is None:
                self._frame = observation_picture(self.observation())
        return self._frame


# --------------------
# A dream: the world model, stepped by you or the agent.


class DreamSource:
    """One dream.

    dreams: of a workflow that can dream
    starts: rows (1, T, …) that a new dream begins with
    """

    def __init__(
        self, dreams: Dreams, starts: Callable[[], Batch], *, sample: bool = False, seed: int = 0
    ) -> None:
        self.dreams = dreams
        self.starts = starts
        self.sample = sample
        self.workflow: Any = dreams.workflow
        self._generator = torch.Generator(dreams.device).manual_seed(seed)
        self._choice: np.ndarray | None = None
        self._obs: dict[str, np.ndarray] = {}
        self._began: np.ndarray | None = None  # the last real frame

    def reset(self) -> Moment:
        return self.begin(self.starts())

    def begin(self, batch: Batch) -> Moment:
        """Dream on from the last of these rows."""
        self._began = observation_picture(
            {name: value[0, -1].cpu().numpy() for name, value in batch.obs.items()}
        )
        self._arrived(self.dreams.start(batch))
        return Moment(self._obs)

    def step(self, action: np.ndarray) -> Moment:
        taken = np.asarray(action, dtype=self.dreams.spec.action.dtype)
        step = self.dreams.step(torch.as_tensor(taken)[None])
        self._arrived(step.obs)
        extra = {"end chance": float(step.end_chance[0])}
        return Moment(
            self._obs, taken, float(step.reward[0]), bool(step.terminated[0]), bool(step.truncated[0]), extra
        )

    def agent_action(self) -> np.ndarray:
        if self._choice is None:
            mode = ActMode(sample=self.sample, generator=self._generator)
            self._choice = self.dreams.act(mode)[0].cpu().numpy()
        return self._choice

    def think(self) -> dict[str, float]:
        if type(self.workflow).inspect_policy is WorldModelWorkflow.inspect_policy:
            return {}
        self.agent_action()
        return {
            name: float(value[0]) for name, value in self.workflow.inspect_policy(self.dreams.state).items()
        }

    def panels(self, parts: bool) -> list[Panel]:
        shown = [Panel("dream", observation_picture(self._obs))]
        if parts and self._began is not None:
            shown.insert(0, Panel("began from", self._began))
        return shown

    def _arrived(self, obs: dict[str, torch.Tensor]) -> None:
        self._obs = {name: value[0].cpu().numpy() for name, value in obs.items()}
        self._choice = None


# --------------------
# Side by side: the real environment and the model's open-loop prediction of it, from the same actions.


class BothSource:
    """The agent (or you) acts in the real environment; the dream gets the same actions and never looks.

    After `horizon` steps the dream begins anew from what is real, and at every new episode.
    """

    def __init__(self, real: RealSource, dreams: Dreams, *, horizon: int) -> None:
        self.real = real
        self.dreams = dreams
        self.horizon = horizon
        self.age = 0  # steps since the dream last looked
        self._dreamt: dict[str, np.ndarray] = {}

    def reset(self) -> Moment:
        self.real.warm_up(self.real.rows.maxlen or 1)
        return self.join()

    def join(self) -> Moment:
        """Begin the dream where the real environment stands."""
        self._look()
        return Moment(self.real.observation())

    def step(self, action: np.ndarray) -> Moment:
        if self.age >= self.horizon:
            self._look()
        moment = self.real.step(action)
        dreamt = self.dreams.step(torch.as_tensor(np.asarray(moment.action))[None])
        self.age += 1
        self._dreamt = {name: value[0].cpu().numpy() for name, value in dreamt.obs.items()}
        moment.extra |= {
            "dream reward": float(dreamt.reward[0]),
            "end chance": float(dreamt.end_chance[0]),
            "error": self._error(),
            "open loop": self.age,
        }
        return moment

    def agent_action(self) -> np.ndarray:
        return self.real.agent_action()

    def think(self) -> dict[str, float]:
        return self.real.think()

    def panels(self, parts: bool) -> list[Panel]:
        real, dreamt = observation_picture(self.real.observation()), observation_picture(self._dreamt)
        shown = [Panel("real", real), Panel("dream", dreamt)]
        if not any(value.dtype == np.uint8 and value.ndim == 3 for value in self.real.observation().values()):
            shown.insert(0, Panel("environment", self.real.rendered()))  # bars alone say little
        if parts:
            shown.append(Panel("difference", difference(real, dreamt)))
        return shown

    def _look(self) -> None:
        obs = self.dreams.start(self.real.batch())
        self._dreamt = {name: value[0].cpu().numpy() for name, value in obs.items()}
        self.age = 0

    def _error(self) -> float:
        """Root mean squared error over all observations, images in [0, 1]."""
        errors = []
        for name, real in self.real.observation().items():
            if name in self._dreamt:
                scale = 255.0 if real.dtype == np.uint8 else 1.0
                gap = (real.astype(np.float32) - self._dreamt[name].astype(np.float32)) / scale
                errors.append(float(np.mean(gap**2)))
        return float(np.sqrt(np.mean(errors))) if errors else float("nan")


# --------------------
# Recorded episodes, replayed: media/episodes/{train,test,imagination} and media/recordings of a run.


SPLITS = {
    "train": "episodes/train",
    "test": "episodes/test",
    "imagination": "episodes/imagination",
    "recordings": "recordings",
}
FILMS = (".mp4", ".gif")
LONGEST = 3000  # frames that are read of a film


class EpisodesSource:
    """One episode at a time: .npz and .pt with everything, .mp4 and .gif with pictures only."""

    def __init__(self, media: Path, spec: Spec, split: str | None = None) -> None:
        self.media = media
        self.spec = spec
        self.split = ""
        self.index = 0
        self.position = 0
        self._files: list[Path] = []
        self._rows: dict[str, np.ndarray] = {}
        self._film: np.ndarray | None = None
        have = [name for name in SPLITS if self.files(name)]
        if split is not None and split not in SPLITS:
            raise ConfigError(f"no kind of episodes is called '{split}'.{closest(split, SPLITS)}")
        if not have or (split is not None and split not in have):
            where = media / SPLITS[split or "test"]
            raise LabError(
                f"no recorded episode in {where}"
                + (
                    f"; there are some in {', '.join(have)}"
                    if have
                    else ": play one with -s, or evaluate with --video"
                )
            )
        self.choose(split or ("test" if "test" in have else have[0]))

    def files(self, split: str) -> list[Path]:
        """Episodes of a kind, by name; a film beside the same episode's data is left out."""
        folder = self.media / SPLITS[split]
        found = [
            file for file in folder.glob("*") if file.suffix in (*SUFFIXES, *FILMS) and file.name[0] != "."
        ]
        whole = {file.stem for file in found if file.suffix in SUFFIXES}
        return sorted(file for file in found if file.suffix in SUFFIXES or file.stem not in whole)

    def choose(self, split: str, index: int = 0) -> Moment:
        """Go to an episode; LabError where there is none of that kind."""
        files = self.files(split)
        if not files:
            raise LabError(f"no recorded episode in {self.media / SPLITS[split]}")
        index %= len(files)
        rows, film = self._read(files[index])
        self.split, self._files, self.index, self.position = split, files, index, 0
        self._rows, self._film = rows, film
        return self.look()

    def reset(self) -> Moment:
        """The next episode."""
        return self.choose(self.split, self.index + 1)

    def move(self, by: int) -> Moment:
        """An episode forward or back."""
        return self.choose(self.split, self.index + by)

    def rewind(self) -> Moment:
        return self.seek(-self.length)

    def seek(self, by: int) -> Moment:
        self.position = min(max(0, self.position + by), self.length - 1)
        return self.look()

    def step(self, action: np.ndarray) -> Moment:
        """One step on, whatever the action."""
        return self.seek(1)

    def agent_action(self) -> np.ndarray:
        """What was done here; it is recorded already, so nothing follows from it."""
        return np.zeros(self.spec.action.shape, self.spec.action.dtype)

    def think(self) -> dict[str, float]:
        return {}

    @property
    def length(self) -> int:
        return len(self._film) if self._film is not None else len(self._rows["reward"])

    def look(self) -> Moment:
        at = self.position
        if self._film is not None:
            action = np.zeros(self.spec.action.shape, self.spec.action.dtype) if at else None
            return Moment({}, action, truncated=at == self.length - 1)
        rows = self._rows
        obs = {n.removeprefix(OBS_PREFIX): value[at] for n, value in rows.items() if n.startswith(OBS_PREFIX)}
        return Moment(
            obs,
            rows["action"][at - 1] if at else None,
            float(rows["reward"][at]),
            bool(rows["terminated"][at]),
            bool(rows["truncated"][at]),
        )

    def return_so_far(self) -> float | None:
        """None for a film, which tells no rewards."""
        return None if self._film is not None else float(self._rows["reward"][: self.position + 1].sum())

    def panels(self, parts: bool) -> list[Panel]:
        if self._film is not None:
            return [Panel("film", self._film[self.position])]
        return [Panel("recorded", observation_picture(self.look().obs))]

    def status(self) -> dict[str, Any]:
        """Where it stands."""
        return {
            "split": self.split,
            "name": self._files[self.index].name,
            "index": self.index,
            "count": len(self._files),
            "position": self.position,
            "length": self.length,
        }

    def _read(self, file: Path) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        if file.suffix in FILMS:
            return {}, read_film(file)
        files = EpisodeFiles([file], self.spec)
        _, rows = next(iter(files.pieces(self.spec.row_columns())))
        return {name: np.asarray(value)[0] for name, value in rows.items()}, None


def read_film(file: Path) -> np.ndarray:
    """(T, H, W, 3) uint8 of an mp4 or GIF."""
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
        raise LabError(f"{file} holds no frame")
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
