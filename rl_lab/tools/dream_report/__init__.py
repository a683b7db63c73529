"""`rl-lab report --dream RUN…`: compare the predictions of world models on the same held-out episodes.

Each model observes the same context rows, then predicts open loop from the recorded actions; the prediction
is compared with the episode step by step. Every workflow with `can_dream` is supported.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_lab.errors import LabError
from rl_lab.tools.resume import add_trust

if TYPE_CHECKING:
    from rl_lab.agent import Agent
    from rl_lab.run_folder import RunFolder
    from rl_lab.tools.dream_report.errors import Curve, Prediction, Rows, Segments


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--dream", action="store_true", help="compare the predictions of the runs' world models"
    )
    parser.add_argument(
        "--episodes",
        default="16",
        metavar="N|PATH",
        help="number of episodes to run, or a path: episode files or a run folder (default: 16)",
    )
    parser.add_argument(
        "--policy",
        default="each",
        metavar="each|random|RUN",
        help="policy of the episodes: every run's agent in turn, random, or one run's agent (default: each)",
    )
    parser.add_argument(
        "--context",
        type=int,
        help="rows that a model observes first (default: 8; fewer if episodes are short)",
    )
    parser.add_argument("--horizon", type=int, default=30, help="steps that it then predicts (default: 30)")
    parser.add_argument("--segments", type=int, default=4, help="segments per episode (default: 4)")
    parser.add_argument(
        "--samples", type=int, default=1, help="predictions per segment, averaged (default: 1)"
    )
    parser.add_argument(
        "--longest", type=int, default=500, help="steps after which an episode is truncated (default: 500)"
    )
    parser.add_argument("--checkpoint", default="last", help="last, best, or a step number (default: last)")
    parser.add_argument("--seed", type=int, default=0, help="seed of episodes and predictions")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: auto)")
    add_trust(parser)


MOST_CONTEXT = 8  # observed rows before a dream


def fitting_context(folder: RunFolder) -> int:
    """Return how many rows a model observes before it dreams: 8, or fewer if that is much of a typical episode."""
    from rl_lab.tools.report.curves import Metrics
    from rl_lab.utils.files import read_json

    lengths: list[Any]
    try:
        if folder.exported:
            file = folder.path / "scores.json"
            scores = read_json(file) if file.is_file() else {}
            lengths = [scores.get("length_mean")] if isinstance(scores, dict) else []
        else:
            metrics = Metrics.read(folder.path / "metrics.jsonl")
            lengths = [metrics.last(key) for key in ("eval/length_mean", "collect/length_mean")]
    except LabError:
        return MOST_CONTEXT  # `load_models` names the run
    typical = next((length for length in lengths if isinstance(length, int | float) and length), None)
    return MOST_CONTEXT if typical is None else max(1, min(MOST_CONTEXT, int(typical / 6)))


@dataclass
class Model:
    """One run whose model is compared."""

    label: str
    agent: Agent


@dataclass
class DreamReport:
    """Measured prediction errors by model."""

    environment: str
    models: list[Model]
    source: str  # description of the episodes' origin
    episodes: int
    segments: Segments
    predictions: dict[str, Prediction]  # by model label
    curves: dict[str, dict[str, Curve]]  # label -> metric -> curve over the horizon
    baseline: dict[str, Curve]  # metric -> curve of `repeat_last`
    ends: dict[str, dict[str, Any]]  # label -> statistics of predicted episode ends
    settings: dict[str, int]
    notes: list[str] = field(default_factory=list)


def run(args: argparse.Namespace) -> int:
    from rl_lab.tools.dream_report.page import table, write_dream_report
    from rl_lab.tools.report.runs import find_runs
    from rl_lab.tools.terminal import print_table

    folders = find_runs(args.runs, args.output_root)
    found = measure(
        folders,
        episodes=args.episodes,
        policy=args.policy,
        context=fitting_context(folders[0]) if args.context is None else args.context,
        horizon=args.horizon,
        segments=args.segments,
        samples=args.samples,
        longest=args.longest,
        checkpoint=args.checkpoint,
        seed=args.seed,
        device=args.device,
        trust=args.trust,
    )
    header, rows = table(found)
    print_table(rows, header=header, right=range(1, len(header)))
    for model in found.models:
        print(f"{model.label}: {model.agent.weights}")
    for note in found.notes:
        print(note)
    one = folders[0].output().report if len(folders) == 1 and not args.out else Path("report")
    target = one / (
        "dream" if args.checkpoint in ("last", "latest") else f"dream_{Path(args.checkpoint).stem}"
    )
    for name, file in write_dream_report(found, args.out or target).items():
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
    trust: bool = False,
) -> DreamReport:
    """Measure the runs' models on the same episodes; see `add_arguments` for the options."""
    from rl_lab.tools.dream_report.errors import curves, cut_segments, end_statistics, open_loop, repeat_last
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
    models = load_models(folders, checkpoint, device, notes, trust=trust)
    held_out, source = held_out_episodes(
        models, episodes, policy=policy, seed=seed, longest=longest, device=device, trust=trust
    )
    cut = cut_segments(held_out, context=context, horizon=horizon, each=segments)
    predictions: dict[str, Prediction] = {}
    with WorkProgress("predicting", len(models)) as progress:
        for model in models:
            predictions[model.label] = open_loop(
                model.agent.workflow, cut, samples=samples, seed=seed, device=model.agent.device
            )
            progress.step(model.label)
    return DreamReport(
        environment=models[0].agent.spec.name,
        models=models,
        source=source,
        episodes=len(held_out),
        segments=cut,
        predictions=predictions,
        curves={label: curves(prediction, cut) for label, prediction in predictions.items()},
        baseline=curves(repeat_last(cut), cut),
        ends={label: end_statistics(prediction, cut) for label, prediction in predictions.items()},
        settings={**settings, "seed": seed},
        notes=notes,
    )


# --- Models and episodes ---


def load_models(
    folders: Sequence[RunFolder], checkpoint: str, device: str, notes: list[str], *, trust: bool = False
) -> list[Model]:
    """Load the models that can be stepped and compared with the first one; `notes` gets the others' reasons.

    A run that cannot be read or loaded is left out, too, unless it is the only one.
    """
    from rl_lab.agent import agent_from, checkpoint_path
    from rl_lab.tools.report.runs import load_readable, load_runs

    agents: dict[Path, Agent] = {}
    runs, unreadable = load_readable(folders)
    if len(folders) == 1:
        for error in unreadable.values():
            raise error
    notes += [f"left out: {sentence}" for sentence in unreadable]
    for run in runs:
        try:
            agent = agent_from(run.folder, checkpoint_path(run.folder, checkpoint), device, trust=trust)
        except LabError as error:
            if len(folders) == 1:
                raise
            notes.append(f"left out: {run.label}: {error}")
            continue
        first = next(iter(agents.values()), None)
        if not agent.workflow.can_dream:
            notes.append(
                f"left out: {run.label}: {type(agent.workflow).__name__} has no model that can be stepped"
            )
        elif first is not None and (difference := incompatibility(first, agent)):
            notes.append(f"left out: {run.label}: {difference}, so the models cannot be compared")
        else:
            if first is not None and (changed := _environment_differences(first, agent)):
                notes.append(f"{run.label} was trained with other environment settings: {changed}")
            agents[run.folder.path] = agent
    if not agents:
        raise LabError(
            "--dream: none of these runs has a world model that can be stepped: " + "; ".join(notes)
        )
    # New labels, which distinguish the compared runs only from each other.
    kept = load_runs([folder for folder in folders if folder.path in agents])
    return [Model(run.label, agents[run.folder.path]) for run in kept]


def incompatibility(first: Agent, second: Agent) -> str:
    """Describe why two models cannot predict the same episodes; "" if they can."""
    if first.spec.name != second.spec.name:
        return f"its environment is {second.spec.name}, that of the first is {first.spec.name}"
    for name, wanted in first.spec.observations.items():
        have = second.spec.observations.get(name)
        if have != wanted:
            own = f"{have.dtype} {have.shape}" if have else "missing"
            return f"its observation '{name}' is {own}, that of the first is {wanted.dtype} {wanted.shape}"
    if first.spec.action != second.spec.action:
        return f"its actions are {second.spec.action.kind} {second.spec.action.choices or second.spec.action.shape}"
    if extra := set(second.spec.observations) - set(first.spec.observations):
        return f"it also observes {', '.join(sorted(extra))}"
    if first.normalizer is not None or second.normalizer is not None:
        return "each run normalizes observations with its own statistics"
    return ""


def _environment_differences(first: Agent, second: Agent) -> str:
    from omegaconf import OmegaConf

    from rl_lab.environments.make import VECTOR_OPTIONS
    from rl_lab.run_folder import describe_differences

    ignored = {*VECTOR_OPTIONS, "eval"}
    ours, theirs = (
        {key: value for key, value in plain.items() if key not in ignored}
        for plain in (OmegaConf.to_container(agent.config.environment) for agent in (first, second))
        if isinstance(plain, dict)
    )
    changed = describe_differences(ours, theirs)  # type: ignore[arg-type]
    return ", ".join(f"{path} {new!r} instead of {old!r}" for path, (old, new) in sorted(changed.items()))


def held_out_episodes(
    models: Sequence[Model],
    episodes: int | str,
    *,
    policy: str,
    seed: int,
    longest: int,
    device: str,
    trust: bool = False,
) -> tuple[list[Rows], str]:
    """Return episodes and a description of their origin."""
    from rl_lab.agent import load_agent
    from rl_lab.tools.dream_report.errors import RandomActions, read_episodes, run_episodes
    from rl_lab.tools.terminal import WorkProgress

    first = models[0].agent
    if not str(episodes).isdigit():
        path = Path(str(episodes)).expanduser()
        return read_episodes(path, first.spec, count=64, longest=longest), f"read from {path}"
    count = int(episodes)
    if count < 1:
        raise LabError(f"--episodes must be at least 1, or a path, not {episodes}")
    with WorkProgress("running held-out episodes", count) as progress:
        if policy == "random":
            random_policy = RandomActions(first.spec)
            rows = run_episodes(
                first, count, seed=seed, longest=longest, policy=random_policy, progress=progress
            )
            return rows, "with random actions"
        if policy != "each":
            other = load_agent(policy, device=device, trust=trust)
            if difference := incompatibility(first, other):
                raise LabError(f"--policy {policy} cannot act here: {difference}")
            rows = run_episodes(other, count, seed=seed, longest=longest, progress=progress)
            return rows, f"with the agent of {policy}"
        rows = []
        for number, model in enumerate(models):
            share = len(range(number, count, len(models)))
            if share:
                rows += run_episodes(model.agent, share, seed=seed, longest=longest, progress=progress)
    return rows, "with " + ("each run's agent in turn" if len(models) > 1 else "the run's agent")
