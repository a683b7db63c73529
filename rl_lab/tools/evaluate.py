"""`rl-lab eval RUN`: fresh episodes of a trained agent, as a table, JSON, CSV and videos."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_lab.errors import ConfigError, LabError

if TYPE_CHECKING:
    from rl_lab.agent import Agent
    from rl_lab.environments.make import EnvFactory
    from rl_lab.orchestration.evaluator import Evaluation
    from rl_lab.tools.evaluate_films import Take

EPILOG = """examples:
  rl-lab eval                                   20 episodes of the newest run
  rl-lab eval RUN --checkpoint best --episodes 100 --envs 16
  rl-lab eval RUN --checkpoint 20000 --deterministic --no-video
  rl-lab eval RUN --env time_limit=500          another setting of its environment"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("run", nargs="?", help="run folder or checkpoint file (default: the newest run)")
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--envs", type=int, help="played side by side (default: environment.eval.num_envs)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same episodes")
    parser.add_argument(
        "--checkpoint", default="last", help="last, best, a step's number, or a file (default: last)"
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--sample", dest="sample", action="store_true", default=None, help="sample actions")
    choice.add_argument(
        "--deterministic",
        "--best-action",
        dest="sample",
        action="store_false",
        help="take the likeliest action (default: as the run's config evaluates)",
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a setting of the evaluation's environments; may be repeated",
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--video",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="film the best, the median and the worst episode",
    )
    parser.add_argument("--json", metavar="FILE", help="where to write (default: RUN/report/eval.json)")
    parser.add_argument("--csv", metavar="FILE", help="one line an episode (default: beside the JSON)")


def main(args: argparse.Namespace) -> int:
    from rl_lab.tools.evaluate_scores import HEADER, table
    from rl_lab.tools.table import print_table

    result = evaluate_run(
        args.run,
        episodes=args.episodes,
        envs=args.envs,
        seed=args.seed,
        checkpoint=args.checkpoint,
        sample=args.sample,
        device=args.device,
        video=args.video,
        json_file=args.json,
        csv_file=args.csv,
        environment=parse_changes(args.env),
    )
    how = "sampled" if result["sample"] else "deterministic"
    title = (
        f"{result['experiment']} at step {result['step']:,}: {result['task']} over {result['episodes']} episodes, "
        f"{how} actions"
    )
    print_table(
        table(result),
        header=HEADER,
        title=title,
        right=range(1, len(HEADER)),
    )
    if "crafter_score" in result:
        print(f"Crafter score: {result['crafter_score']:.2f} %")
    for remark in result["remarks"]:
        print(remark)
    for name, file in result["files"].items():
        if name != "video":
            print(f"{name}: {file}")
    return 0


def evaluate_run(
    run: Path | str | None,
    *,
    episodes: int = 20,
    envs: int | None = None,  # None: environment.eval.num_envs of the run's config
    seed: int = 0,
    checkpoint: str = "last",
    sample: bool | None = None,  # None: as the run's config evaluates
    device: str = "auto",
    video: bool = False,
    json_file: str | None = None,
    csv_file: str | None = None,
    environment: Mapping[str, Any] | None = None,  # changed settings of the evaluation's environments
) -> dict[str, Any]:
    """Play fresh episodes; writes JSON, CSV and videos, and returns the JSON's content with `files` and `remarks`."""
    from omegaconf import OmegaConf

    from rl_lab.agent import load_agent
    from rl_lab.build import build_evaluator
    from rl_lab.environments.make import env_config_options, env_factory
    from rl_lab.run_folder import find_run, output_root
    from rl_lab.tools.evaluate_films import ActionNotes, choose
    from rl_lab.tools.evaluate_scores import episode_lines, summary
    from rl_lab.tools.published import Task
    from rl_lab.tools.report_runs import flatten
    from rl_lab.tools.work_progress import WorkProgress
    from rl_lab.utils.files import write_atomic, write_json_atomic

    if episodes < 1:
        raise ConfigError(f"--episodes must be at least 1, not {episodes}")
    folder = find_run(run, output_root(None))
    agent = load_agent(run or folder.path, checkpoint=checkpoint, device=device)
    if sample is None:
        sample = bool(agent.config.training.evaluate.sample)
    plain: Any = OmegaConf.to_container(agent.config)
    changes = dict(environment or {}) | ({"num_envs": envs} if envs else {})
    options = {**env_config_options(plain["environment"], evaluation=True), **changes}
    if set(changes) - {"num_envs", "workers"}:
        _refuse_other_shapes(agent, options)
    evaluator = build_evaluator(agent.config, agent.device, normalizer=agent.normalizer, **changes)
    notes = ActionNotes()
    num_envs = 0
    with WorkProgress("evaluating", episodes) as progress:

        def on_rows(rows: Mapping[str, Any]) -> None:
            nonlocal num_envs
            num_envs = len(rows["reward"])
            progress.say()
            if video:
                notes.add(rows)

        evaluation = evaluator.run(
            agent.workflow,
            episodes=episodes,
            label=f"command {seed}",
            sample=sample,
            on_rows=on_rows,
            on_episode=lambda episode: progress.step(f"return {episode.episode_return:.1f}"),
        )
    task = Task.from_config(flatten(plain))
    result: dict[str, Any] = {
        "experiment": str(agent.config.experiment.name),
        "workflow": type(agent.workflow).__name__,
        "task": task.full_name,
        "step": agent.step,
        "checkpoint": checkpoint,
        "weights": agent.checkpoint.name if agent.checkpoint else None,
        "episodes": episodes,
        "num_envs": num_envs,
        "seed": seed,
        "sample": sample,
        "environment": dict(changes),
        **summary(evaluation.episodes, task, seed),
    }
    json_target = Path(json_file) if json_file else folder.report / "eval.json"
    csv_target = Path(csv_file) if csv_file else json_target.with_suffix(".csv")
    json_target.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(json_target, json.loads(json.dumps(result)))
    text = episode_lines(evaluation.episodes, task)
    write_atomic(csv_target, lambda file: file.write(text.encode()))
    files = {"json": str(json_target), "csv": str(csv_target)}
    remarks: list[str] = []
    if video:  # last: whatever rendering does to this process, the numbers are safe
        try:
            factory = env_factory(**options)
            takes = {
                name: notes.take(index, num_envs, evaluation.episodes[index].episode_return)
                for name, index in choose(evaluation.episodes).items()
            }
            files |= _films(folder.path, agent, evaluation, takes, factory, remarks)
        except LabError as error:
            remarks.append(f"no video: {error}")
    return {**result, "files": files, "remarks": remarks}


def parse_changes(words: Sequence[str]) -> dict[str, Any]:
    """`key=value` words, values as YAML."""
    import yaml

    changes: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"--env {word}: write KEY=VALUE, such as time_limit=500")
        try:
            changes[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--env {word}: the value is no YAML ({str(error).splitlines()[0]})") from error
    return changes


def _refuse_other_shapes(agent: Agent, options: dict[str, Any]) -> None:
    """An agent sees and does what it was trained with: settings that change the shapes cannot be evaluated."""
    from rl_lab.environments.make import probe_spec

    spec = probe_spec(**options)
    if spec.observations != agent.spec.observations or spec.action != agent.spec.action:
        raise ConfigError(
            f"--env changes what the agent sees or does: it was trained with {_shapes(agent.spec)}, and this gives "
            f"{_shapes(spec)}"
        )


def _shapes(spec: Any) -> str:
    seen = ", ".join(f"{name} {array.shape}" for name, array in spec.observations.items())
    return f"{seen} and {spec.action.kind} actions {spec.action.choices or spec.action.shape}"


def _films(
    run: Path,
    agent: Agent,
    evaluation: Evaluation,
    takes: Mapping[str, Take],  # best, median, worst
    factory: EnvFactory,
    remarks: list[str],
) -> dict[str, str]:
    """The chosen episodes on film, and remarks on what they do not show."""
    from rl_lab.tools.evaluate_films import play_again, save_film
    from rl_lab.tools.work_progress import WorkProgress

    files: dict[str, str] = {}
    with WorkProgress("filming", len(takes)) as progress:
        for name, take in takes.items():
            shown = play_again(factory, agent.spec.name, take, seed=evaluation.seed)
            files[f"{name} episode"] = str(save_film(run, name, agent.step, shown))
            if abs(shown.episode_return - take.episode_return) > 1e-3 * max(1.0, abs(take.episode_return)):
                remarks.append(
                    f"{agent.spec.name} does not repeat itself: the video of the {name} episode shows a return of "
                    f"{shown.episode_return:.1f}, not {take.episode_return:.1f}"
                )
            if not shown.whole:
                remarks.append(
                    f"the video of the {name} episode shows its first {len(shown.frames):,} frames"
                )
            progress.step()
    return {**files, "video": next(iter(files.values()))}
