"""`rl-lab eval RUN`: fresh episodes of a trained agent, as a table, JSON, CSV and videos."""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from rl_lab.environments.suites.crafter import ACHIEVEMENT, crafter_score
from rl_lab.errors import ConfigError, LabError, one_line
from rl_lab.records import Episode, return_statistics
from rl_lab.tools.published import Task, normalisation
from rl_lab.tools.statistics import describe
from rl_lab.tools.terminal import bounds, number
from rl_lab.utils.media import film, save_video

if TYPE_CHECKING:
    from rl_lab.agent import Agent
    from rl_lab.environments.make import EnvFactory
    from rl_lab.orchestration.evaluator import Evaluation


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
    from rl_lab.tools.terminal import print_table

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
    from rl_lab.tools.published import Task
    from rl_lab.tools.report.runs import flatten
    from rl_lab.tools.terminal import WorkProgress
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
    from rl_lab.tools.terminal import WorkProgress

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


# --------------------
# What the episodes of an evaluation come to: statistics, normalised scores, one line an episode.


def summary(episodes: Sequence[Episode], task: Task, seed: int) -> dict[str, Any]:
    """Everything that is said of the episodes, for JSON. The same episodes and seed give the same."""
    returns = [episode.episode_return for episode in episodes]
    found = describe(returns, seed=seed)
    result: dict[str, Any] = return_statistics(list(episodes))
    result |= {
        "return_median": found["median"],
        "return_iqm": found["iqm"],
        "return_intervals": found["intervals"],
        "interval_level": found["level"],
    }
    scale = normalisation(task)
    if scale is not None:
        scores = describe([float(scale(value)) for value in returns], seed=seed)
        result["normalised"] = {
            "name": scale.name,
            **{key: scores[key] for key in ("mean", "std", "median", "iqm", "min", "max", "intervals")},
            "zero_at": scale.low,
            "one_at": scale.high,
            "source": scale.source,
        }
    success = {
        key.removeprefix(ACHIEVEMENT): value for key, value in result.items() if key.startswith(ACHIEVEMENT)
    }
    if success:
        result["crafter_score"] = crafter_score(success)
    result["returns"] = returns
    result["lengths"] = [episode.length for episode in episodes]
    return result


def episode_lines(episodes: Sequence[Episode], task: Task) -> str:
    """The episodes as CSV: number, environment, return, length, normalised score, and what the environment told."""
    scale = normalisation(task)
    told = sorted({key for episode in episodes for key in episode.log})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["episode", "env", "return", "length", *(["normalised"] if scale else []), *told])
    for index, episode in enumerate(episodes):
        scored = [repr(float(scale(episode.episode_return)))] if scale else []
        logs = [episode.log.get(key, "") for key in told]
        writer.writerow([index, episode.env, repr(episode.episode_return), episode.length, *scored, *logs])
    return text.getvalue()


HEADER = ("", "mean", "std", "median", "IQM", "min", "max", "95 % of the mean", "95 % of the IQM")


def table(result: dict[str, Any]) -> list[list[str]]:
    """Rows under HEADER: return, normalised score, length."""
    spans = result["return_intervals"]
    rows = [
        ["return"]
        + [number(result[f"return_{key}"]) for key in ("mean", "std", "median", "iqm", "min", "max")]
        + [_span(spans["mean"]), _span(spans["iqm"])]
    ]
    scores = result.get("normalised")
    if scores:
        rows.append(
            [scores["name"]]
            + [number(scores[key]) for key in ("mean", "std", "median", "iqm", "min", "max")]
            + [_span(scores["intervals"]["mean"]), _span(scores["intervals"]["iqm"])]
        )
    lengths = np.array(result["lengths"], dtype=np.float64)
    rows.append(
        ["length"]
        + [number(float(value)) for value in (lengths.mean(), lengths.std(), np.median(lengths))]
        + ["", number(float(lengths.min())), number(float(lengths.max())), "", ""]
    )
    return rows


def _span(pair: list[float] | None) -> str:
    return bounds(*pair) if pair else bounds(None, None)


# --------------------
# Videos of chosen evaluation episodes, played again from their seeds and actions.
#
# Which episode was the best is known when all have been played, and only then is one worth rendering. So evaluation
# notes the actions; an episode is begun again with its own seed, given the same actions, and filmed.


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
    from rl_lab.environments.env_runner import episode_seed

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
