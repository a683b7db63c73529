"""`rl-lab collect SOURCE`: store episodes as a data set under datasets/; the same command continues after a kill."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_lab.errors import ConfigError, LabError
from rl_lab.records import Spec
from rl_lab.tools.resume import add_trust

if TYPE_CHECKING:
    import torch

    from rl_lab.tools.collect.collection import Counts, Filter

EPILOG = """SOURCE is one of
  RUN                a run folder or checkpoint file: its trained agent
  random             the random policy; needs --task
  NAME               an expert of the lab: lunar_lander, cartpole, pendulum, mountain_car, catch, lock
  module:name        your function expert(obs) -> action, or a class with act(obs); needs --task
with --recordings, RUN is a run (or a folder of .npz files) whose recordings of `rl-lab play` become the data set

examples:
  rl-lab collect runs/walker --episodes 200 --envs 16 --min-return 800
  rl-lab collect lunar_lander --episodes 100 --out landings
  rl-lab collect random --task CartPole-v1 --episodes 50
  rl-lab collect my_module:expert --task my_module:MyEnv
  rl-lab collect runs/pong --recordings --out by_hand"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("source", nargs="?", help="a run, random, an expert, or module:name; see below")
    parser.add_argument(
        "--out", metavar="NAME", help="a name under datasets/, or a path (default: from SOURCE)"
    )
    parser.add_argument("--episodes", type=int, default=100, help="that are stored (default: 100)")
    parser.add_argument("--envs", type=int, default=8, help="environments at once (default: 8)")
    parser.add_argument("--workers", type=int, help="processes that step them (default: automatic)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--task", help="suite/task or Gymnasium id, for sources that are no run")
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of the environments, such as time_limit=500; may be repeated",
    )
    parser.add_argument("--checkpoint", default="last", help="of a run: last, best, a step number, or a file")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--sample", dest="sample", action="store_true", default=None, help="sample actions")
    choice.add_argument(
        "--deterministic",
        dest="sample",
        action="store_false",
        help="take the most likely action (default: training.evaluate.sample of the run)",
    )
    parser.add_argument("--epsilon", type=float, default=0.0, help="probability of a random action instead")
    parser.add_argument("--min-return", type=float, metavar="R", help="store only episodes with at least R")
    parser.add_argument("--max-return", type=float, metavar="R", help="store only episodes with at most R")
    parser.add_argument("--success", action="store_true", help="store only episodes that log success")
    parser.add_argument("--recordings", action="store_true", help="take the recordings of rl-lab play")
    parser.add_argument("--device", default="auto")
    add_trust(parser)
    parser.add_argument(
        "--save-seconds",
        type=float,
        default=10.0,
        help="time between saves (default: 10); at most that is played again",
    )


def main(args: argparse.Namespace) -> int:
    from rl_lab.tools.collect.collection import Filter

    if not args.source:
        raise ConfigError(
            "SOURCE is missing: a run, random, an expert, or module:name (rl-lab collect --help)"
        )
    if args.episodes < 1 or args.envs < 1:
        raise ConfigError("--episodes and --envs must be at least 1")
    if not 0.0 <= args.epsilon <= 1.0:
        raise ConfigError(f"--epsilon must be from 0 to 1, not {args.epsilon:g}")
    keep = Filter(args.min_return, args.max_return, args.success)
    folder = dataset_path(args.out or default_name(args.source))
    if args.recordings:
        return from_recordings(args.source, folder, keep)
    return collect(args, folder, keep)


def dataset_path(name: str) -> Path:
    """Return the path of a data set: datasets/NAME unless the name has a folder."""
    path = Path(name).expanduser()
    return (path if path.is_absolute() or len(path.parts) > 1 else Path("datasets") / path).absolute()


def default_name(source: str) -> str:
    name = Path(source).stem if Path(source).exists() else source
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in name)


@dataclass
class Source:
    """Who plays, and where."""

    policy: Any
    options: dict[str, Any]  # of make_env
    device: torch.device
    sample: bool
    facts: dict[str, Any]  # that identify the policy
    spec: Spec | None = None  # that the environments must have


def open_source(args: argparse.Namespace) -> Source:
    from rl_lab.tools.collect.experts import EXPERTS

    path = Path(args.source).expanduser()
    if path.exists() and not (args.source in EXPERTS or args.source == "random"):
        return _agent_source(args)
    return _policy_source(args)


def _agent_source(args: argparse.Namespace) -> Source:
    import torch

    from rl_lab.agent import load_agent
    from rl_lab.config.compose import to_plain
    from rl_lab.environments.make import env_config_options

    if args.task:
        raise ConfigError(
            "--task is for sources that are no run: an agent plays in the environment of its run"
        )
    agent = load_agent(args.source, checkpoint=args.checkpoint, device=args.device, trust=args.trust)
    torch.set_num_threads(int(agent.config.training.threads))
    options = env_config_options(to_plain(agent.config.environment), evaluation=True)
    options.pop("normalize_observations", None)
    sample = bool(agent.config.training.evaluate.sample) if args.sample is None else bool(args.sample)
    policy = (
        agent.workflow if agent.normalizer is None else NormalizedPolicy(agent.workflow, agent.normalizer)
    )
    facts = {
        "policy": str(agent.config.experiment.name),
        "step": agent.step,
        "weights": agent.checkpoint.name if agent.checkpoint else None,
    }
    return Source(policy, options, agent.device, sample, facts, agent.spec)


def _policy_source(args: argparse.Namespace) -> Source:
    import torch

    from rl_lab.environments.make import probe_spec
    from rl_lab.tools.collect.experts import EXPERTS, RandomPolicy, make_expert

    known = EXPERTS.get(args.source)
    if known is None and args.source != "random" and ":" not in args.source:
        from rl_lab.errors import closest

        raise ConfigError(
            f"{args.source} is no run and no expert.{closest(args.source, ['random', *EXPERTS])}"
        )
    task = args.task or (known.task if known else None)
    if not task:
        raise ConfigError(f"--task is missing: {args.source} needs one, such as --task CartPole-v1")
    options: dict[str, Any] = {"task": task}
    spec = probe_spec(**{**options, **_changes(args)})
    policy = RandomPolicy(spec) if args.source == "random" else make_expert(args.source, spec)
    return Source(policy, options, torch.device("cpu"), True, {"policy": args.source})


def _changes(args: argparse.Namespace) -> dict[str, Any]:
    from rl_lab.tools.evaluate import parse_changes

    return parse_changes(args.env)


class NormalizedPolicy:
    """A policy that was trained on normalized observations, on observations as they are."""

    act_captures = False

    def __init__(self, policy: Any, normalizer: Any) -> None:
        self.policy, self.normalizer = policy, normalizer

    def act(self, obs: Any, policy_state: Any, is_first: Any, mode: Any) -> Any:
        import torch

        arrays = self.normalizer({name: value.cpu().numpy() for name, value in obs.items()})
        tensors = {name: torch.as_tensor(value).to(is_first.device) for name, value in arrays.items()}
        return self.policy.act(tensors, policy_state, is_first, mode)

    def initial_policy_state(self, num_envs: int) -> Any:
        return self.policy.initial_policy_state(num_envs)


def collect(args: argparse.Namespace, folder: Path, keep: Filter) -> int:
    """Play and store episodes; continue a folder that was begun with the same settings."""
    import torch

    from rl_lab.environments.make import make_env
    from rl_lab.orchestration.collector import Collector
    from rl_lab.records import ActMode
    from rl_lab.tools.collect.collection import Collection
    from rl_lab.tools.terminal import WorkProgress
    from rl_lab.utils.seeding import derive_seed

    source = open_source(args)
    changes = _changes(args)
    options = {**source.options, **changes, "num_envs": args.envs}
    if args.workers is not None:
        options["workers"] = args.workers
    seed = derive_seed(args.seed, "collect")
    environment = make_env(**{**options, "seed": seed, "copy": False})
    environment.listen(print, trusted=True)
    if source.spec is not None and (
        environment.spec.observations != source.spec.observations
        or environment.spec.action != source.spec.action
    ):
        environment.close()
        raise ConfigError(
            "--env must not change observations or actions of the environment that the agent was trained in"
        )
    generator = torch.Generator(source.device).manual_seed(
        derive_seed(args.seed, "collect", "actions") & (2**63 - 1)
    )
    settings = {
        **source.facts,
        "task": str(options["task"]),
        "env": changes,
        "envs": args.envs,
        "seed": args.seed,
        "sample": source.sample,
        "epsilon": args.epsilon,
        **keep.to_dict(),
    }
    collection: Collection | None = None
    try:
        collection = Collection(
            folder,
            environment.spec,
            Collector(environment, device=source.device, generator=generator, rows_on_host=True),
            source.policy,
            ActMode(sample=source.sample, epsilon=args.epsilon),
            seed=seed,
            settings=settings,
            keep=keep,
            save_seconds=args.save_seconds,
        )
        if collection.stored:
            print(f"{folder} has {collection.stored} episodes: continuing to {args.episodes}")
        with WorkProgress("collecting", args.episodes) as progress:
            progress.done = collection.stored

            def on_episode(counts: Counts) -> None:
                rejected = f", {counts.rejected} rejected" if counts.rejected else ""
                last = f"return {counts.returns[-1]:.1f}" if counts.returns else "none stored yet"
                progress.done = len(counts.returns)
                progress.show(f"{last}{rejected}")

            try:
                counts = collection.run(args.episodes, on_episode)
            except KeyboardInterrupt:
                print(f"\n{folder} has {collection.stored} episodes: the same command continues")
                return 130
        print(report(folder, counts))
        return 0
    finally:
        if collection is not None:
            collection.close()
        environment.close()


def report(folder: Path, counts: Counts) -> str:
    returns = np.array(counts.returns)
    text = (
        f"{folder}: {len(returns):,} episodes, {counts.steps:,} steps, return mean {returns.mean():.4g}, min "
        f"{returns.min():.4g}, max {returns.max():.4g}"
    )
    if counts.rejected:
        text += f"; {counts.rejected:,} of {counts.attempts:,} episodes were rejected"
    if counts.failed:
        text += f"; {counts.failed:,} ended by a failure of the environment and were left out"
    return text


def from_recordings(source: str, folder: Path, keep: Filter) -> int:
    """Make a data set of the recordings of `rl-lab play`."""
    from rl_lab.buffers.formats.dataset import create_dataset
    from rl_lab.buffers.formats.files import EpisodeFiles
    from rl_lab.records import Episode
    from rl_lab.run_folder import find_run, output_root

    path = Path(source).expanduser()
    recordings = path
    spec: Spec | None = None
    if not any(path.glob("*.npz")):
        run = find_run(path, output_root(None))
        recordings, spec = run.media / "recordings", run.load_spec()
    files = sorted(recordings.glob("*.npz"))
    if not files:
        raise LabError(
            f"{recordings} has no recorded episode: press r while playing, or use rl-lab play --save-mode"
        )
    data = EpisodeFiles(files)
    kept = returns = 0.0
    with create_dataset(folder, spec or data.spec, "lab", metadata(files)) as writer:
        for index, episode in enumerate(data):
            result = Episode(episode.total_reward, len(episode))
            if not keep.accepts(result):
                continue
            try:
                writer.add(episode)
            except ConfigError as error:
                raise data.fault(index, error) from None
            kept, returns = kept + 1, returns + result.episode_return
        writer.finish()
    print(
        f"{folder}: {kept:.0f} of {len(data)} recorded episodes, {writer.steps:,} steps, return mean {returns / kept:.4g}"
    )
    return 0


def metadata(files: list[Path]) -> Mapping[str, Any]:
    return {"source": "recordings of rl-lab play", "files": [file.name for file in files]}
