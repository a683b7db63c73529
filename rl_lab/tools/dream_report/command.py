"""`rl-lab report --dream RUN…`: what world models predict on the same held-out episodes, side by side.

Each model sees the same rows, is then told only the actions that were taken, and its dream is compared with what
happened, step by step. Any workflow that `can_dream` takes part.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_lab.errors import LabError

if TYPE_CHECKING:
    from rl_lab.agent import Agent
    from rl_lab.run_folder import RunFolder
    from rl_lab.tools.dream_report.errors import Curve, Dream, Rows, Segments


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--dream", action="store_true", help="compare what the runs' world models predict")
    parser.add_argument(
        "--episodes",
        default="16",
        metavar="N|PATH",
        help="how many to play, or where they lie: episode files, or a run's folder (default: 16)",
    )
    parser.add_argument(
        "--policy",
        default="each",
        metavar="each|random|RUN",
        help="who plays them: every run's agent in turn, chance, or one run's agent (default: each)",
    )
    parser.add_argument("--context", type=int, default=8, help="rows that a model sees first (default: 8)")
    parser.add_argument("--horizon", type=int, default=30, help="steps that it then dreams (default: 30)")
    parser.add_argument("--segments", type=int, default=4, help="cut from each episode (default: 4)")
    parser.add_argument(
        "--samples", type=int, default=1, help="dreams of each segment, averaged (default: 1)"
    )
    parser.add_argument(
        "--longest", type=int, default=500, help="steps after which an episode is cut (default: 500)"
    )
    parser.add_argument("--checkpoint", default="last", help="last, best, a step's number (default: last)")
    parser.add_argument("--seed", type=int, default=0, help="of episodes and dreams")
    parser.add_argument("--device", default="auto")


@dataclass
class Model:
    """One run whose model takes part."""

    label: str
    agent: Agent


@dataclass
class Dreams:
    """What was measured, model by model."""

    environment: str
    models: list[Model]
    source: str  # of the episodes, in words
    episodes: int
    cuts: Segments
    dreams: dict[str, Dream]  # label -> what it expected
    curves: dict[str, dict[str, Curve]]  # label -> metric -> over the horizon
    floor: dict[str, Curve]  # of a model for which nothing changes
    ends: dict[str, dict[str, Any]]  # label -> ends found and imagined
    settings: dict[str, int]
    notes: list[str] = field(default_factory=list)


def run(args: argparse.Namespace) -> int:
    from rl_lab.tools.dream_report.page import table, write_dreams
    from rl_lab.tools.report.runs import find_runs
    from rl_lab.tools.terminal import print_table

    folders = find_runs(args.runs, args.output_root)
    found = measure(
        folders,
        episodes=args.episodes,
        policy=args.policy,
        context=args.context,
        horizon=args.horizon,
        segments=args.segments,
        samples=args.samples,
        longest=args.longest,
        checkpoint=args.checkpoint,
        seed=args.seed,
        device=args.device,
    )
    header, rows = table(found)
    print_table(rows, header=header, right=range(1, len(header)))
    for note in found.notes:
        print(note)
    one = folders[0].report if len(folders) == 1 else Path("report")
    for name, file in write_dreams(found, args.out or one / "dream").items():
        print(f"{name}: {file}")
    return 0


def measure(
    folders: Sequence[RunFolder],
    *,
    episodes: int | str = 16,
    policy: str = "each",
    context: int = 8,
    horizon: int = 30,
    segments: int = 4,
    samples: int = 1,
    longest: int = 500,
    checkpoint: str = "last",
    seed: int = 0,
    device: str = "auto",
) -> Dreams:
    """Let the runs' models dream of the same episodes; `add_arguments` says what the options mean."""
    from rl_lab.tools.dream_report.errors import curves, cut_segments, ends_found, open_loop, repeat_last
    from rl_lab.tools.terminal import WorkProgress

    settings = {
        "context": context,
        "horizon": horizon,
        "segments": segments,
        "samples": samples,
        "longest": longest,
    }
    for name, value in settings.items():
        if value < 1:
            raise LabError(f"--{name} must be at least 1, not {value}")
    notes: list[str] = []
    models = load_models(folders, checkpoint, device, notes)
    held_out, source = held_out_episodes(
        models, episodes, policy=policy, seed=seed, longest=longest, device=device
    )
    cuts = cut_segments(held_out, context=context, horizon=horizon, each=segments)
    dreams: dict[str, Dream] = {}
    with WorkProgress("dreaming", len(models)) as progress:
        for model in models:
            dreams[model.label] = open_loop(
                model.agent.workflow, cuts, samples=samples, seed=seed, device=model.agent.device
            )
            progress.step(model.label)
    return Dreams(
        environment=models[0].agent.spec.name,
        models=models,
        source=source,
        episodes=len(held_out),
        cuts=cuts,
        dreams=dreams,
        curves={label: curves(dream, cuts) for label, dream in dreams.items()},
        floor=curves(repeat_last(cuts), cuts),
        ends={label: ends_found(dream, cuts) for label, dream in dreams.items()},
        settings={**settings, "seed": seed},
        notes=notes,
    )


# ---------------------------------------------------------------- who takes part


def load_models(folders: Sequence[RunFolder], checkpoint: str, device: str, notes: list[str]) -> list[Model]:
    """The runs whose models can be stepped and compared with the first one's; why others are not is noted."""
    from rl_lab.agent import agent_from, checkpoint_path
    from rl_lab.tools.report.runs import load_runs

    agents: dict[Path, Agent] = {}
    for run in load_runs(folders):
        agent = agent_from(run.folder, checkpoint_path(run.folder, checkpoint), device)
        first = next(iter(agents.values()), None)
        if not agent.workflow.can_dream:
            notes.append(
                f"left out: {run.label}: {type(agent.workflow).__name__} has no model that can be stepped"
            )
        elif first is not None and (difference := unlike(first, agent)):
            notes.append(f"left out: {run.label}: {difference}, and only like can be compared with like")
        else:
            if first is not None and (changed := _other_settings(first, agent)):
                notes.append(f"{run.label} was trained with other settings of its environment: {changed}")
            agents[run.folder.path] = agent
    if not agents:
        raise LabError("none of these runs has a world model that can be stepped: " + "; ".join(notes))
    # Labels anew: what sets the compared runs apart from each other, and not from those left out.
    kept = load_runs([folder for folder in folders if folder.path in agents])
    return [Model(run.label, agents[run.folder.path]) for run in kept]


def unlike(first: Agent, second: Agent) -> str:
    """What keeps two models from dreaming of the same episodes; "" where nothing does."""
    if first.spec.name != second.spec.name:
        return f"it is of {second.spec.name}, the first of {first.spec.name}"
    for name, wanted in first.spec.observations.items():
        have = second.spec.observations.get(name)
        if have != wanted:
            seen = f"{have.dtype} {have.shape}" if have else "not at all"
            return f"it sees '{name}' as {seen}, the first as {wanted.dtype} {wanted.shape}"
    if first.spec.action != second.spec.action:
        return f"its actions are {second.spec.action.kind} {second.spec.action.choices or second.spec.action.shape}"
    if extra := set(second.spec.observations) - set(first.spec.observations):
        return f"it also sees {', '.join(sorted(extra))}"
    if first.normalizer is not None or second.normalizer is not None:
        return "observations are normalized with statistics of each run's own"
    return ""


def _other_settings(first: Agent, second: Agent) -> str:
    from omegaconf import OmegaConf

    from rl_lab.environments.make import NOT_OF_ONE
    from rl_lab.run_folder import describe_differences

    apart = {*NOT_OF_ONE, "eval"}
    ours, theirs = (
        {key: value for key, value in plain.items() if key not in apart}
        for plain in (OmegaConf.to_container(agent.config.environment) for agent in (first, second))
        if isinstance(plain, dict)
    )
    changed = describe_differences(ours, theirs)  # type: ignore[arg-type]
    return ", ".join(f"{path} {new!r} in place of {old!r}" for path, (old, new) in sorted(changed.items()))


def held_out_episodes(
    models: Sequence[Model], episodes: int | str, *, policy: str, seed: int, longest: int, device: str
) -> tuple[list[Rows], str]:
    """Episodes and a sentence about where they come from."""
    from rl_lab.agent import load_agent
    from rl_lab.tools.dream_report.errors import RandomActions, play_episodes, read_episodes
    from rl_lab.tools.terminal import WorkProgress

    first = models[0].agent
    if not str(episodes).isdigit():
        path = Path(str(episodes)).expanduser()
        return read_episodes(path, first.spec, count=64, longest=longest), f"read from {path}"
    count = int(episodes)
    if count < 1:
        raise LabError(f"--episodes must be at least 1, or a path, not {episodes}")
    with WorkProgress("playing held-out episodes", count) as progress:
        if policy == "random":
            acting = RandomActions(first.spec)
            rows = play_episodes(first, count, seed=seed, longest=longest, policy=acting, progress=progress)
            return rows, "played at random"
        if policy != "each":
            player = load_agent(policy, device=device)
            if difference := unlike(first, player):
                raise LabError(f"--policy {policy} cannot play: {difference}")
            rows = play_episodes(player, count, seed=seed, longest=longest, progress=progress)
            return rows, f"played by {policy}"
        rows = []
        for number, model in enumerate(models):
            share = len(range(number, count, len(models)))
            if share:
                rows += play_episodes(model.agent, share, seed=seed, longest=longest, progress=progress)
    return rows, "played by " + ("each run's agent in turn" if len(models) > 1 else "the run's agent")
