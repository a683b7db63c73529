"""From the words of the command to a running session: load the agent, make the sources, choose the front end."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_lab.agent import Agent, load_agent
from rl_lab.build import build_evaluator
from rl_lab.environments.world_model_env import BufferStarts, Dreams, EpisodeStarts, Starts
from rl_lab.errors import ConfigError, LabError
from rl_lab.records import Batch, Spec
from rl_lab.run_folder import RunFolder, find_run, output_root
from rl_lab.tools.play.keyboard import keymap_for
from rl_lab.tools.play.session import Options, PlaySession
from rl_lab.tools.play.sources import SPLITS, BothSource, DreamSource, EpisodesSource, RealSource


def launch(args: argparse.Namespace, say: Callable[[str], None] = print) -> int:
    """Run the verb; returns its exit status."""
    import torch

    folder = find_run(args.run, output_root(None))
    web, video = args.web, args.video or (not args.web and headless())
    options = options_from(args)
    if video and not args.video:
        say("no display: writing a video instead (--web serves a page to play in a browser)")
    if video and options.control == "human":
        say("a video has no keys, so the agent plays in your place")
        options.control = "agent"
    options.save &= not video
    agent = load_agent(args.run or folder.path, checkpoint=args.checkpoint, device=args.device)
    torch.set_num_threads(int(agent.config.training.threads))
    session = build_session(agent, folder, args, options, say)
    try:
        if web:
            from rl_lab.tools.play.web import serve

            return serve(
                session, describe(agent, folder), folder, host=args.host, port=args.port, token=args.token
            )
        if video:
            for file in write_video(session, steps=args.steps):
                say(str(file))
            return 0
        from rl_lab.tools.play.desktop import run_window

        return run_window(session, title=f"{folder.path.name} – rl-lab play")
    finally:
        session.close()


def options_from(args: argparse.Namespace) -> Options:
    """The flags as a session's beginning; ConfigError where two of them contradict."""
    asked = [name for name in ("world_model", "agent_world_model", "episodes", "both") if getattr(args, name)]
    if len(asked) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in asked[:2])
        raise ConfigError(f"{flags} cannot be had at once: choose one (v switches while it runs)")
    if args.split and not args.episodes:
        raise ConfigError("--split says which episodes to replay: add -e")
    for name, least in (("fps", 1), ("horizon", 1), ("context", 1), ("steps", 1), ("flush", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name} must be at least {least}, not {value}")
    mode = {"world_model": "dream", "agent_world_model": "dream", "episodes": "episodes", "both": "both"}
    return Options(
        mode=mode[asked[0]] if asked else "real",
        control="human" if args.world_model or args.human else "agent",
        fps=min(args.fps, 60.0),
        horizon=args.horizon,
        parts=args.reconstruction,
        header=args.header or args.web,  # a page has room for it
        save=args.save_mode,
        wait=args.wait,
    )


def build_session(
    agent: Agent,
    folder: RunFolder,
    args: argparse.Namespace,
    options: Options,
    say: Callable[[str], None] = print,
) -> PlaySession:
    """All that this run can show; what it cannot is left out, and said."""
    seed = secrets.randbelow(2**31) if args.seed is None else args.seed
    sample = bool(agent.config.training.evaluate.sample) if args.sample is None else bool(args.sample)
    real: RealSource | None = None
    try:
        evaluator = build_evaluator(
            agent.config, agent.device, normalizer=agent.normalizer, num_envs=1, workers=0
        )
        make = evaluator.make_environment
        real = RealSource(
            agent.workflow,
            make(seed, True),
            device=agent.device,
            sample=sample,
            context=args.context,
            seed=seed,
        )
    except LabError as error:
        if options.mode in ("real", "both") or args.start == "real":
            raise
        say(f"without the real environment: {error}")

    dream: DreamSource | None = None
    both: BothSource | None = None
    if shows_dreams(agent.workflow, agent.spec):
        flush = args.flush if args.flush is not None else agent.workflow.dream_flush
        common: dict[str, Any] = {"device": agent.device, "seed": seed, "flush_every": flush}
        dreams = Dreams(agent.workflow, agent.spec, ends=_ends(args.ends), **common)
        dream = DreamSource(dreams, _starts(agent, folder, args, real, seed), sample=sample, seed=seed)
        if real is not None:
            both = BothSource(
                real, Dreams(agent.workflow, agent.spec, ends=None, **common), horizon=args.horizon
            )

    def episodes() -> EpisodesSource:
        return EpisodesSource(folder.media, agent.spec, args.split)

    return PlaySession(
        agent.spec,
        keymap_for(agent.spec),
        folder.media / "recordings",
        real=real,
        dream=dream,
        both=both,
        episodes=episodes,
        options=options,
    )


def shows_dreams(workflow: Any, spec: Spec) -> bool:
    """Whether its model can be stepped and decoded."""
    return bool(workflow.can_dream and workflow.dreamed_observations(spec))


def headless() -> bool:
    """Whether no window can be opened here."""
    if os.environ.get("SDL_VIDEODRIVER") in ("dummy", "offscreen"):
        return True
    linux = sys.platform.startswith("linux")
    return linux and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def describe(agent: Agent, folder: RunFolder) -> dict[str, str]:
    """What a page says about the run."""
    return {
        "experiment": str(agent.config.experiment.name),
        "task": agent.spec.name,
        "run": folder.path.name,
        "trained": f"{agent.step:,} steps",
        "device": str(agent.device),
    }


def _ends(word: str) -> str | float | None:
    if word in ("sample", "never"):
        return None if word == "never" else word
    try:
        return float(word)
    except ValueError:
        raise ConfigError(f"--ends {word}: use sample, never, or a probability between 0 and 1") from None


def _starts(
    agent: Agent, folder: RunFolder, args: argparse.Namespace, real: RealSource | None, seed: int
) -> Callable[[], Batch]:
    """Rows that a dream begins with, by `--start`: the real environment where there is one, else replay."""
    import torch

    start = args.start or ("real" if real is not None else "replay")
    if start == "real":
        assert real is not None
        return lambda: real.warm_up(args.context)
    generator = torch.Generator().manual_seed(seed)
    found: list[Starts] = []  # opened when a dream is asked for: replay may be large

    def batch() -> Batch:
        if not found:
            found.append(
                _replay_starts(agent, folder, args.context)
                if start == "replay"
                else _recorded(agent, folder, args)
            )
        return found[0](1, generator)

    return batch


def _replay_starts(agent: Agent, folder: RunFolder, length: int) -> Starts:
    from rl_lab.buffers.offline import OfflineBuffer

    columns = agent.spec.row_columns()
    buffer = OfflineBuffer(columns, path=folder.path, spec=agent.spec, device=agent.device, storage="host")
    return BufferStarts(buffer, length)


def _recorded(agent: Agent, folder: RunFolder, args: argparse.Namespace) -> Starts:
    import numpy as np

    from rl_lab.buffers.episode_files import SUFFIXES, EpisodeFiles

    splits = [args.split] if args.split else list(SPLITS)
    files: list[Path] = [
        file
        for split in splits
        for file in (folder.media / SPLITS[split]).glob("*")
        if file.suffix in SUFFIXES
    ]
    if not files:
        raise LabError(
            f"no recorded episode (.npz) under {folder.media}: play one with -s, or use --start real"
        )
    pieces = EpisodeFiles(files, agent.spec).pieces(agent.spec.row_columns())
    episodes = [{name: np.asarray(value)[0] for name, value in rows.items()} for _, rows in pieces]
    return EpisodeStarts(episodes, args.context)


# --------------------
# Play without anybody looking: an episode as a video.


def write_video(session: PlaySession, *, steps: int) -> list[Path]:
    """Record from now to the episode's end, at most `steps` steps; the files, the film first."""
    session.keeping.start(session.moment, session.frame(), fps=session.fps, label=session.mode)
    for _ in range(steps):
        if session.moment.done or not session.advance():
            break
    return session.keeping.stop()
