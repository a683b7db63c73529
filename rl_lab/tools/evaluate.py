"""`rl-lab eval RUN`: run new evaluation episodes of a trained agent; write a table, JSON, CSV and videos."""

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
from rl_lab.errors import ConfigError, LabError, one_line, one_line_errors
from rl_lab.records import Episode, return_statistics
from rl_lab.tools.published import Task, normalisation
from rl_lab.tools.resume import add_trust
from rl_lab.tools.statistics import describe
from rl_lab.tools.terminal import bounds, number
from rl_lab.utils.media import save_video, to_frames
from rl_lab.utils.progress import point_of

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
    parser.add_argument("--episodes", type=int, default=20, help="number of new episodes (default: 20)")
    parser.add_argument("--envs", type=int, help="parallel environments (default: environment.eval.num_envs)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same episodes")
    parser.add_argument(
        "--checkpoint", default="last", help="last, best, a step number, or a file (default: last)"
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--sample", dest="sample", action="store_true", default=None, help="sample actions")
    choice.add_argument(
        "--deterministic",
        "--best-action",
        dest="sample",
        action="store_false",
        help="take the most likely action (default: training.evaluate.sample of the run's config)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="of sampled actions (default: training.evaluate.temperature of the run's config)",
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a setting of the evaluation environments; may be repeated",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: auto)")
    parser.add_argument(
        "--video",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="record videos of the best, the median and the worst episode",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="output file (default: RUN/report/eval_STEP_SEED.json, and eval.json: the newest)",
    )
    parser.add_argument("--csv", metavar="FILE", help="one line per episode (default: next to the JSON file)")
    add_trust(parser)


def main(args: argparse.Namespace) -> int:
    from rl_lab.tools.terminal import print_table

    result = evaluate(
        args.run,
        episodes=args.episodes,
        envs=args.envs,
        seed=args.seed,
        checkpoint=args.checkpoint,
        sample=args.sample,
        temperature=args.temperature,
        device=args.device,
        video=args.video,
        json_file=args.json,
        csv_file=args.csv,
        environment=parse_changes(args.env),
        trust=args.trust,
    )
    how = "sampled actions" if result["sample"] else "deterministic actions"
    if result["sample"] and result["temperature"] != 1.0:
        how += f" at temperature {result['temperature']:g}"
    title = (
        f"{result['experiment']} at {point_of(result['step'], result['updates'])}: {result['task']} over "
        f"{result['episodes']} episodes, {how}"
    )
    print_table(
        table(result),
        header=HEADER,
        title=title,
        right=range(1, len(HEADER)),
    )
    if "crafter_score" in result:
        print(f"Crafter score: {result['crafter_score']:.2f} %")
    print(result["weights_used"])
    for remark in result["remarks"]:
        print(remark)
    for name, file in result["files"].items():
        if name != "video":
            print(f"{name}: {file}")
    return 0


@one_line_errors()
def evaluate(
    run: Path | str | None,
    *,
    episodes: int = 20,
    envs: int | None = None,  # None: environment.eval.num_envs of the run's config
    seed: int = 0,
    checkpoint: str = "last",
    sample: bool | None = None,  # None: training.evaluate.sample of the run's config
    temperature: float | None = None,  # None: training.evaluate.temperature of the run's config
    device: str = "auto",
    video: bool = False,
    json_file: str | None = None,
    csv_file: str | None = None,
    environment: Mapping[str, Any] | None = None,  # changed settings of the evaluation environments
    env: Any = None,  # the class or function that `train` was given, if another program evaluates
    trust: bool = False,  # see `load_agent`
) -> dict[str, Any]:
    """Run new episodes; write JSON, CSV and videos; return the JSON's content with `files` and `remarks`."""
    from omegaconf import OmegaConf

    from rl_lab.agent import load_agent
    from rl_lab.build import check_temperature, eval_temperature
    from rl_lab.environments.make import env_config_options, env_factory
    from rl_lab.run_environments import build_evaluator
    from rl_lab.run_folder import find_run, output_root
    from rl_lab.tools.published import Task
    from rl_lab.tools.report.runs import flatten
    from rl_lab.tools.terminal import WorkProgress
    from rl_lab.training import use_environment
    from rl_lab.utils.files import write_atomic, write_json_atomic

    if episodes < 1:
        raise ConfigError(f"--episodes must be at least 1, not {episodes}")
    folder = find_run(run, output_root(None))
    if env is not None:
        use_environment(folder, env, trust=trust)
    agent = load_agent(run or folder.path, checkpoint=checkpoint, device=device, trust=trust)
    if sample is None:
        sample = bool(agent.config.training.evaluate.sample)
    if temperature is None:
        temperature = eval_temperature(agent.config.training)
    else:
        if not sample:
            raise ConfigError(f"--temperature {temperature:g} needs sampled actions: add --sample")
        if not 0.0 < temperature < float("inf"):
            raise ConfigError(f"--temperature must be above 0, not {temperature:g}")
        check_temperature(agent.workflow, "--temperature", temperature)
    plain: Any = OmegaConf.to_container(agent.config)
    changes = dict(environment or {}) | ({"num_envs": envs} if envs else {})
    options = {**env_config_options(plain["environment"], evaluation=True), **changes}
    if set(changes) - {"num_envs", "workers"}:
        _check_shapes(agent, options)
    evaluator = build_evaluator(agent.config, agent.device, normalizer=agent.normalizer, **changes)
    actions = ActionLog()
    num_envs = 0
    with WorkProgress("evaluating", episodes) as progress:

        def on_rows(rows: Mapping[str, Any]) -> None:
            nonlocal num_envs
            num_envs = len(rows["reward"])
            progress.show()
            if video:
                actions.add(rows)

        evaluation = evaluator.run(
            agent.workflow,
            episodes=episodes,
            label=f"command {seed}",
            sample=sample,
            temperature=temperature,
            on_rows=on_rows,
            on_episode=lambda episode: progress.step(f"return {episode.episode_return:.1f}"),
        )
    task = Task.from_config(flatten(plain))
    result: dict[str, Any] = {
        "experiment": str(agent.config.experiment.name),
        "workflow": type(agent.workflow).__name__,
        "task": task.full_name,
        "step": agent.step,
        "updates": agent.updates,
        "checkpoint": checkpoint,
        "weights": agent.checkpoint.name if agent.checkpoint else None,
        "episodes": episodes,
        "num_envs": num_envs,
        "seed": seed,
        "sample": sample,
        "temperature": temperature,
        "environment": dict(changes),
        **summary(evaluation.episodes, task, seed),
    }
    report = folder.report if json_file and csv_file else folder.output().report
    named = report / f"eval_{agent.step or agent.updates:09d}_seed{seed}.json"
    json_target = Path(json_file) if json_file else named
    csv_target = Path(csv_file) if csv_file else json_target.with_suffix(".csv")
    text = episode_lines(evaluation.episodes, task)
    newest = [] if json_file else [report / "eval.json"]
    for target in (json_target, *newest):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(target, json.loads(json.dumps(result)))
    for target in (csv_target, *(file.with_suffix(".csv") for file in newest if not csv_file)):
        write_atomic(target, lambda file: file.write(text.encode()))
    files = {"json": str(json_target), "csv": str(csv_target)}
    remarks: list[str] = []
    if video:  # last: the results are written even if rendering ends this process
        try:
            factory = env_factory(**options)
            logged = {
                name: actions.episode(index, num_envs, evaluation.episodes[index].episode_return)
                for name, index in choose(evaluation.episodes).items()
            }
            files |= _save_videos(folder.output().path, agent, evaluation, logged, factory, remarks)
        except LabError as error:
            remarks.append(f"no video: {error}")
    return {**result, "weights_used": agent.weights, "files": files, "remarks": remarks}


def parse_changes(words: Sequence[str], option: str = "--env") -> dict[str, Any]:
    """Parse the `key=value` words of an option; values are YAML."""
    import yaml

    changes: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"{option} {word}: write KEY=VALUE, such as time_limit=500")
        try:
            changes[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"{option} {word}: the value is not YAML ({str(error).splitlines()[0]})"
            ) from error
    return changes


def _check_shapes(agent: Agent, options: dict[str, Any]) -> None:
    """ConfigError if the settings change the observation or action shapes that the agent was trained with."""
    from rl_lab.environments.make import probe_spec

    spec = probe_spec(**options)
    if spec.observations != agent.spec.observations or spec.action != agent.spec.action:
        raise ConfigError(
            f"--env must not change observations or actions: the agent was trained with {_shapes(agent.spec)}, but "
            f"these settings give {_shapes(spec)}"
        )


def _shapes(spec: Any) -> str:
    observations = ", ".join(f"{name} {array.shape}" for name, array in spec.observations.items())
    return f"{observations} and {spec.action.kind} actions {spec.action.choices or spec.action.shape}"


def _save_videos(
    run: Path,
    agent: Agent,
    evaluation: Evaluation,
    logged: Mapping[str, LoggedEpisode],  # best, median, worst
    factory: EnvFactory,
    remarks: list[str],
) -> dict[str, str]:
    """Replay and record the chosen episodes; append remarks on differences and on truncated videos."""
    from rl_lab.tools.terminal import WorkProgress

    files: dict[str, str] = {}
    with WorkProgress("recording videos", len(logged)) as progress:
        for name, episode in logged.items():
            video = replay_episode(factory, agent.spec.name, episode, seed=evaluation.seed)
            title = f"{name} of {len(evaluation.episodes)}: episode {episode.index}"
            frames = with_header(video, title, agent.step)
            files[f"{name} episode"] = str(save_episode_video(run, name, agent.step, frames, video.fps))
            if abs(video.episode_return - episode.episode_return) > 1e-3 * max(
                1.0, abs(episode.episode_return)
            ):
                remarks.append(
                    f"{agent.spec.name} is not deterministic: the video of the {name} episode shows a return of "
                    f"{video.episode_return:.1f}, not {episode.episode_return:.1f}"
                )
            if not video.complete:
                remarks.append(
                    f"the video of the {name} episode shows only its first {len(video.frames):,} frames"
                )
            progress.step()
    return {**files, "video": next(iter(files.values()))}


# --- Statistics and tables ---


def summary(episodes: Sequence[Episode], task: Task, seed: int) -> dict[str, Any]:
    """Return the statistics of the episodes, for JSON; deterministic for the same episodes and seed."""
    returns = [episode.episode_return for episode in episodes]
    statistics = describe(returns, seed=seed)
    result: dict[str, Any] = return_statistics(list(episodes))
    result |= {
        "return_median": statistics["median"],
        "return_iqm": statistics["iqm"],
        "return_intervals": statistics["intervals"],
        "interval_level": statistics["level"],
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
    """Format the episodes as CSV: number, environment, return, length, normalised score, logged values."""
    scale = normalisation(task)
    logged = sorted({key for episode in episodes for key in episode.log})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["episode", "env", "return", "length", *(["normalised"] if scale else []), *logged])
    for index, episode in enumerate(episodes):
        scored = [repr(float(scale(episode.episode_return)))] if scale else []
        logs = [episode.log.get(key, "") for key in logged]
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


# --- Videos ---

# The best episode is known only after all episodes are finished, and rendering every one would be slow. So
# the evaluation logs the actions, and the chosen episodes are replayed from their seed and actions and
# rendered.

MOST_FRAMES = 1000  # of one video; the rest of longer episodes is not recorded
LARGEST_SIDE = 320  # pixels; larger frames are reduced by integer factors


@dataclass(frozen=True)
class LoggedEpisode:
    """Environment, number and actions of an episode: enough to replay it."""

    env: int  # index of the environment
    number: int  # index of the episode in that environment
    actions: np.ndarray  # (steps, …)
    episode_return: float = 0.0
    index: int = 0  # its number in the results


class ActionLog:
    """Logs the actions of every episode; pass `add` to the Evaluator as `on_rows`."""

    def __init__(self) -> None:
        self._open: dict[int, list[Any]] = {}
        self._closed: dict[tuple[int, int], np.ndarray] = {}
        self._counts: dict[int, int] = {}

    def add(self, rows: Mapping[str, Any]) -> None:
        """Add the rows of one vector step, (N, …) each."""
        actions = np.asarray(rows["action"])
        ended = np.asarray(rows["terminated"]) | np.asarray(rows["truncated"])
        for env, action in enumerate(actions):
            if rows["is_first"][env]:
                self._open[env] = []
            if not ended[env]:  # the action of an episode's last row is never executed
                self._open[env].append(action.copy())
                continue
            number = self._counts.get(env, 0)
            self._counts[env] = number + 1
            self._closed[env, number] = np.stack(self._open.pop(env))

    def episode(self, index: int, num_envs: int, episode_return: float = 0.0) -> LoggedEpisode:
        """Return episode `index` of an evaluation; environment i runs the episodes i, i+n, …"""
        number, env = divmod(index, num_envs)
        return LoggedEpisode(env, number, self._closed[env, number], episode_return, index)


@dataclass(frozen=True)
class EpisodeVideo:
    """Frames of a replayed episode."""

    frames: np.ndarray  # (T, H, W, 3) uint8
    rewards: np.ndarray  # (T,), of the step that led to each frame; nan for the first frame
    episode_return: float
    complete: bool  # whether it shows the complete episode
    fps: float  # render_fps of the environment


def choose(episodes: Sequence[Episode]) -> dict[str, int]:
    """Return the indices of the best, the median and the worst episode by return; ties go to the first."""
    order = sorted(range(len(episodes)), key=lambda index: (-episodes[index].episode_return, index))
    if len(order) < 3:
        return dict(zip(("best", "worst"), order))
    return {"best": order[0], "median": order[len(order) // 2], "worst": order[-1]}


def replay_episode(
    factory: Callable[[bool], gymnasium.Env], name: str, episode: LoggedEpisode, *, seed: int
) -> EpisodeVideo:
    """Replay an episode in this process and record its frames.

    seed: seed of the evaluation. If the environment cannot be rendered, image observations are recorded
    instead.
    """
    from rl_lab.environments.env_runner import episode_seed

    frames: list[np.ndarray] = []
    rewards = [float("nan")]
    renderer = _Renderer(name)
    env: gymnasium.Env | None = None
    try:
        env = factory(True)
        obs, _ = env.reset(seed=episode_seed(seed, episode.env, episode.number))
        frames.append(renderer.frame(env, obs))
        for action in episode.actions:
            obs, reward, *_ = env.step(action)
            rewards.append(float(reward))
            if len(frames) < MOST_FRAMES:
                frames.append(renderer.frame(env, obs))
        fps = float(env.metadata.get("render_fps") or 30)
    except LabError:
        raise
    except (Exception, SystemExit) as error:  # an environment or its renderer may raise anything
        raise LabError(f"{name} failed while the episode was replayed: {one_line(error)}") from error
    finally:
        if env is not None:
            with contextlib.suppress(Exception, SystemExit):  # the frames, or the error, are known already
                env.close()
    shown = np.array(rewards[: len(frames)])
    return EpisodeVideo(np.stack(frames), shown, sum(rewards[1:]), len(frames) == len(rewards), fps)


class _Renderer:
    """Returns rendered frames; after the first failure, image observations."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._renders = True

    def frame(self, env: gymnasium.Env, obs: Mapping[str, np.ndarray]) -> np.ndarray:
        """(H, W, 3) uint8"""
        if self._renders:
            try:
                frame = np.asarray(env.render())
            except (Exception, SystemExit):  # no package, no display
                frame = np.zeros(())
            if frame.ndim == 3 and frame.dtype == np.uint8:
                return _reduced(frame)
            self._renders = False
        for key, value in obs.items():
            if np.ndim(value) == 3 and value.dtype == np.uint8:
                return to_frames(value[None], key)[0]
        raise LabError(f"{self._name} renders no frames on this machine and has no image observation")


def with_header(video: EpisodeVideo, title: str, step: int) -> np.ndarray:
    """Return the frames under a header, (T, H, W, 3) uint8; small frames are enlarged.

    The header has the step of the episode, reward, return, and the step of the agent's checkpoint.
    """
    from rl_lab.tools.play.frame import Panel, compose
    from rl_lab.tools.play.frame import number as fixed

    returns = np.nan_to_num(video.rewards).cumsum()

    def image(index: int) -> np.ndarray:
        header = {
            "step": str(index),
            "reward": fixed(float(video.rewards[index])),
            "return": fixed(float(returns[index])),
            "checkpoint": f"{step:,}",
        }
        return compose([Panel(title, video.frames[index])], list(header.items()), above=True)

    shown = np.empty((len(video.frames), *image(0).shape), np.uint8)
    for index in range(len(shown)):
        shown[index] = image(index)
    return shown


def save_episode_video(run: Path, name: str, step: int, frames: np.ndarray, fps: float) -> Path:
    """Write media/episodes/test/eval_<name>_<step>.mp4, or .gif if mp4 is not possible."""
    target = run / "media" / "episodes" / "test" / f"eval_{name}_{step:09d}"
    return save_video(target, frames, fps=fps)


def _reduced(frame: np.ndarray) -> np.ndarray:
    from PIL import Image

    factor = -(-max(frame.shape[:2]) // LARGEST_SIDE)
    return np.asarray(Image.fromarray(frame).reduce(factor)) if factor > 1 else frame.copy()
