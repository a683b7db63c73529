"""Start of `rl-lab play`: load the agent, create the sources, and run the front end."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_lab.agent import Agent, load_agent
from rl_lab.environments.make import env_config_options, env_factory
from rl_lab.environments.state_rendering import StateDrawer, state_drawer
from rl_lab.environments.world_model_env import BufferStarts, EpisodeStarts, ImaginedEpisodes
from rl_lab.errors import ConfigError, LabError
from rl_lab.records import Batch, Spec
from rl_lab.run_environments import build_evaluator
from rl_lab.run_folder import RunFolder, find_run, output_root
from rl_lab.tools.dream_report import fitting_context
from rl_lab.tools.play.commands import HOTTEST
from rl_lab.tools.play.episodes import SPLITS, EpisodesSource
from rl_lab.tools.play.keymaps import keymap_for
from rl_lab.tools.play.library import Entry, Library, run_name
from rl_lab.tools.play.pictures import Pictures
from rl_lab.tools.play.session import Options, PlaySession, Sources
from rl_lab.tools.play.sources import BothSource, DreamSource, RealSource
from rl_lab.tools.play.starts import Starts

SHORTEST_VIDEO, LONGEST_VIDEO = 100, 1000  # steps, unless --steps says how many


def launch(args: argparse.Namespace, say: Callable[[str], None] = print) -> int:
    """Run the command; returns its exit status."""
    import torch

    folder = find_run(args.run, output_root(None))
    web, video = args.web, args.video or (not args.web and headless())
    options = options_from(args)
    if video and not args.video:
        say("no display: writing a video instead (--web serves a page to play in a browser)")
    if video and options.control == "human":
        say("a video has no keyboard input, so the agent plays")
        options.control = "agent"
    if video and options.save:
        say("the video is saved without being asked, so -s does nothing here")
        options.save = False
    agent = load_agent(
        args.run or folder.path, checkpoint=args.checkpoint, device=args.device, trust=args.trust
    )
    torch.set_num_threads(int(agent.config.training.threads))
    say(agent.weights)
    session = build_session(agent, folder, args, options, say)
    try:
        if web:
            from rl_lab.tools.play.web import serve

            return serve(session, host=args.host, port=args.port, token=args.token, show=args.open)
        if video:
            for file in write_video(session, steps=args.steps):
                say(str(file))
            return 0
        from rl_lab.tools.play.desktop import run_window

        return run_window(session, title=f"{folder.path.name} – rl-lab play")
    finally:
        session.close()


def options_from(args: argparse.Namespace) -> Options:
    """Convert the flags to session options; ConfigError if two of them conflict."""
    asked = [name for name in ("world_model", "agent_world_model", "episodes", "both") if getattr(args, name)]
    if len(asked) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in asked[:2])
        raise ConfigError(f"{flags} cannot be combined: choose one (the key v switches while it runs)")
    if args.split and not args.episodes:
        raise ConfigError("--split needs -e: it chooses the episodes to replay")
    for name, least in (("fps", 1), ("horizon", 1), ("context", 1), ("steps", 1), ("flush", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name} must be at least {least}, not {value}")
    if args.temperature is not None and not 0.0 <= args.temperature <= HOTTEST:
        raise ConfigError(f"--temperature must be between 0 and {HOTTEST:g}, not {args.temperature}")
    mode = {"world_model": "dream", "agent_world_model": "dream", "episodes": "episodes", "both": "both"}
    return Options(
        mode=mode[asked[0]] if asked else "real",
        control="human" if args.world_model or args.human else "agent",
        fps=min(args.fps, 60.0),
        horizon=args.horizon,
        parts=args.reconstruction,
        header=args.header or args.web,  # a page has space for it
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
    """Create a session of an agent that can switch to other checkpoints and runs."""

    def open_entry(entry: Entry) -> Sources:
        where = RunFolder(entry.run)
        other = load_agent(entry.run, checkpoint=entry.checkpoint, device=args.device, trust=args.trust)
        changed = argparse.Namespace(**{**vars(args), "split": None, "start": None})
        if not context_is_given:
            changed.context = fitting_context(where)
        return build_sources(other, where, changed, say=lambda text: None)

    context_is_given = args.context is not None
    if not context_is_given:
        args.context = fitting_context(folder)
    sources = build_sources(agent, folder, args, mode=options.mode, say=say)
    named = Path(args.run).stem if str(args.run or "").endswith(".pt") else args.checkpoint
    checkpoint = "last" if named == "latest" else f"step_{int(named):09d}" if named.isdigit() else named
    library = Library(folder.path.resolve(), checkpoint.removesuffix(".pt"), output_root(None), open_entry)
    return PlaySession(sources, library=library, options=options)


def build_sources(
    agent: Agent,
    folder: RunFolder,
    args: argparse.Namespace,
    *,
    mode: str = "real",
    say: Callable[[str], None] = print,
) -> Sources:
    """Create every source that this run supports; report a missing environment."""
    seed = secrets.randbelow(2**31) if args.seed is None else args.seed
    sample = bool(agent.config.training.evaluate.sample) if args.sample is None else bool(args.sample)
    pictures = Pictures(agent.spec, drawer_of(agent))
    real: RealSource | None = None
    names: list[str] = []
    try:
        evaluator = build_evaluator(
            agent.config, agent.device, normalizer=agent.normalizer, num_envs=1, workers=0
        )
        real = RealSource(
            agent.workflow,
            evaluator.make_environment(seed, True),
            device=agent.device,
            sample=sample,
            context=args.context,
            seed=seed,
            pictures=pictures,
        )
        names = real.environment.action_names()
    except LabError as error:
        if mode in ("real", "both") or args.start == "real":
            raise
        say(f"the real environment is not available: {error}")

    dream: DreamSource | None = None
    both: BothSource | None = None
    starts: Starts | None = None
    if can_show_dreams(agent.workflow, agent.spec):
        flush = args.flush if args.flush is not None else agent.workflow.dream_flush
        common: dict[str, Any] = {"device": agent.device, "seed": seed, "flush_every": flush}
        imagined = ImaginedEpisodes(agent.workflow, agent.spec, ends=_ends(args.ends), **common)
        starts = _starts(agent, folder, args, real, seed)
        dream = DreamSource(imagined, starts, sample=sample, seed=seed, pictures=pictures)
        if real is not None:
            both = BothSource(
                real, ImaginedEpisodes(agent.workflow, agent.spec, ends=None, **common), horizon=args.horizon
            )
    if args.temperature is not None:
        for source in (real, dream):
            if source is not None:
                source.acting.temperature = args.temperature

    def episodes() -> EpisodesSource:
        return EpisodesSource(folder.media, agent.spec, args.split, pictures=pictures)

    return Sources(
        agent.spec,
        keymap_for(agent.spec, names),
        folder.output(say).media / "recordings",
        real=real,
        dream=dream,
        both=both,
        episodes=episodes,
        starts=starts,
        context=args.context,
        pictures=pictures,
        about=describe(agent, folder),
    )


def drawer_of(agent: Agent) -> StateDrawer | None:
    """Return what draws the states of the agent's environment, if its picture follows from them."""
    from rl_lab.config.compose import to_plain

    if any(item.dtype == "uint8" and len(item.shape) == 3 for item in agent.spec.observations.values()):
        return None
    try:
        factory = env_factory(**env_config_options(to_plain(agent.config.environment), evaluation=True))
    except LabError:  # the environment is not available
        return None
    return state_drawer(factory, agent.normalizer)


def can_show_dreams(workflow: Any, spec: Spec) -> bool:
    """Return whether the workflow's model can be stepped and decoded."""
    return bool(workflow.can_dream and workflow.dreamed_observations(spec))


def headless() -> bool:
    """Return whether this machine has no display."""
    if os.environ.get("SDL_VIDEODRIVER") in ("dummy", "offscreen"):
        return True
    linux = sys.platform.startswith("linux")
    return linux and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def describe(agent: Agent, folder: RunFolder) -> dict[str, str]:
    """Return the run's details for the page."""
    return {
        "experiment": str(agent.config.experiment.name),
        "task": agent.spec.name,
        "run": run_name(folder.path.absolute()),
        "trained": f"{agent.step:,} steps",
        "weights": agent.weights,
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
) -> Starts:
    """Return where dreams start; `--start` says from what at first. Default: the real environment, else replay."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    opened: dict[str, Any] = {}  # on first use: replay may be large

    def drawn_from(kind: str, make: Callable[[], Any]) -> Callable[[], Batch]:
        def draw() -> Batch:
            if kind not in opened:
                opened[kind] = make()
            return opened[kind](1, generator)

        return draw

    draws: dict[str, Callable[[], Batch]] = (
        {} if real is None else {"real": lambda: real.warm_up(args.context)}
    )
    draws["replay"] = drawn_from("replay", lambda: _replay_starts(agent, folder, args.context))
    draws["episodes"] = drawn_from("episodes", lambda: _recorded_starts(agent, folder, args))
    without = "episodes" if folder.exported else "replay"  # an exported agent comes with recorded episodes
    return Starts(draws, args.start or ("real" if real is not None else without))


def _replay_starts(agent: Agent, folder: RunFolder, length: int) -> BufferStarts:
    from rl_lab.buffers.offline import OfflineBuffer

    columns = agent.spec.row_columns()
    buffer = OfflineBuffer(columns, path=folder.path, spec=agent.spec, device=agent.device, storage="host")
    return BufferStarts(buffer, length)


def _recorded_starts(agent: Agent, folder: RunFolder, args: argparse.Namespace) -> EpisodeStarts:
    import numpy as np

    from rl_lab.buffers.formats.dataset import stored_rows
    from rl_lab.buffers.formats.files import SUFFIXES, EpisodeFiles

    splits = [args.split] if args.split else list(SPLITS)
    files: list[Path] = [
        file
        for split in splits
        for file in (folder.media / SPLITS[split]).glob("*")
        if file.suffix in SUFFIXES
    ]
    if not files:
        raise LabError(
            f"{folder.media} has no recorded episode (.npz): record one with -s, or use --start real"
        )
    recorded = EpisodeFiles(files)
    rows_of = [stored_rows(recorded, index, agent.spec) for index in range(len(recorded))]
    episodes = [{name: np.asarray(value)[0] for name, value in rows.items()} for rows in rows_of]
    return EpisodeStarts(episodes, args.context)


def write_video(session: PlaySession, *, steps: int | None = None) -> list[Path]:
    """Record `steps` steps over as many episodes as they take; returns the files, the video first.

    None: to the end of the first episode that ends after SHORTEST_VIDEO steps, at most LONGEST_VIDEO
    """
    from rl_lab.tools.terminal import WorkProgress

    most = steps or LONGEST_VIDEO
    session.recordings.start(session.current, session.image(), fps=session.fps, label=session.mode)
    with WorkProgress("recording", most) as progress:
        for step in range(most):
            ended = session.current.done and steps is None and step >= SHORTEST_VIDEO
            if ended or not session.advance():
                break
            progress.step()
    return session.recordings.stop()
