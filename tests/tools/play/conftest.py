"""Sessions on a model that counts, and one small run that was really trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rl_lab
from rl_lab.environments.world_model_env import ImaginedEpisodes
from rl_lab.tools.play.episodes import EpisodesSource
from rl_lab.tools.play.keyboard import DiscreteKeys
from rl_lab.tools.play.session import Options, PlaySession, Sources
from rl_lab.tools.play.sources import BothSource, DreamSource, RealSource
from rl_lab.tools.play.starts import Starts
from tests.counting_model import SPEC, CountingEnv, CountingModel, rows

KEYS = {"ArrowDown": 0, "ArrowRight": 1, "ArrowUp": 2}


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_session(tmp_path: Path, clock: Clock) -> Callable[..., PlaySession]:
    """make_session(mode=…, control=…, …) -> a session on the counting model.

    `idle=True` has a key for doing nothing.
    """

    def make(
        *,
        model: CountingModel | None = None,
        last: int = 12,
        idle: bool = False,
        real_time: bool = False,
        ends: Any = "sample",
        library: Any = None,
        **options: Any,
    ) -> PlaySession:
        model = model or CountingModel()
        device = torch.device("cpu")
        real = RealSource(model, CountingEnv(last), device=device, context=4, seed=7)
        dreams = ImaginedEpisodes(model, SPEC, ends=ends)
        import numpy as np

        starts = Starts({"real": lambda: real.warm_up(4), "replay": lambda: rows(1, 3, 5)}, "real")
        sources = Sources(
            SPEC,
            DiscreteKeys(KEYS, ("stay", "one", "two"), idle=np.asarray(0) if idle else None),
            tmp_path / "media" / "recordings",
            real=real,
            dream=DreamSource(dreams, starts),
            both=BothSource(real, ImaginedEpisodes(model, SPEC, ends=None), horizon=5),
            episodes=lambda: EpisodesSource(tmp_path / "media", SPEC),
            starts=starts,
            context=4,
            about={
                "experiment": "counting",
                "task": "counting",
                "run": "run",
                "trained": "0 steps",
                "device": "cpu",
            },
        )
        clocks = {} if real_time else {"clock": clock}
        return PlaySession(sources, library=library, options=Options(**options), **clocks)

    return make


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an image model of 64×64, trained for a few steps."""
    folder = tmp_path_factory.mktemp("play") / "outputs" / "2026-11-15" / "12-00-00"
    words = [
        "components/encoder@components.encoder=dict",
        "environment=minigrid",
        "environment.task=Empty-5x5",
    ]
    words += ["environment.observe=rgb_full", "environment.time_limit=12", "debug=tiny"]
    words += ["training.total_timesteps=40", "training.evaluate.every_env_steps=null"]
    words += ["training.report.every_env_steps=null", "training.checkpoint.every_env_steps=40"]
    words += ["buffers.replay.capacity=400", "logging.tensorboard=false", "logging.progress=off"]
    return rl_lab.train(None, [*words, f"run_dir={folder}"], say=lambda text: None).path
