"""`rl-lab eval RUN`: evaluation episodes of a trained agent, as a table, JSON and a video."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", help="run folder or checkpoint file (default: the newest run)")
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the evaluation; the same seed gives the same episodes"
    )
    parser.add_argument("--checkpoint", default="last", help="last, best, or a file name under checkpoints/")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--sample", dest="sample", action="store_true", default=None, help="sample actions")
    choice.add_argument(
        "--best-action", dest="sample", action="store_false", help="take the likeliest action"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--video", action="store_true", help="record the first episode")
    parser.add_argument(
        "--json", metavar="FILE", help="where to write the result (default: RUN/report/eval.json)"
    )


def main(args: argparse.Namespace) -> int:
    result = evaluate_run(
        args.run,
        episodes=args.episodes,
        seed=args.seed,
        checkpoint=args.checkpoint,
        sample=args.sample,
        device=args.device,
        video=args.video,
        json_file=args.json,
    )
    print(
        f"{result['experiment']} at step {result['step']}: return {result['return_mean']:.1f} "
        f"± {result['return_std']:.1f} over {result['episodes']} episodes "
        f"(min {result['return_min']:.1f}, max {result['return_max']:.1f})"
    )
    for key in ("json", "video"):
        if result["files"].get(key):
            print(f"{key}: {result['files'][key]}")
    return 0


def evaluate_run(
    run: Path | str | None,
    *,
    episodes: int = 20,
    seed: int = 0,
    checkpoint: str = "last",
    sample: bool | None = None,  # None: as the run's config evaluates
    device: str = "auto",
    video: bool = False,
    json_file: str | None = None,
) -> dict[str, Any]:
    """Play fresh episodes; writes the JSON (and the video) and returns it with the files' paths."""
    from rl_lab.agent import load_agent
    from rl_lab.build import build_evaluator
    from rl_lab.episode_tracker import return_statistics
    from rl_lab.errors import ConfigError
    from rl_lab.run_folder import find_run, output_root
    from rl_lab.utils.files import write_json_atomic

    if episodes < 1:
        raise ConfigError(f"--episodes must be at least 1, not {episodes}")
    folder = find_run(run, output_root(None))
    agent = load_agent(run or folder.path, checkpoint=checkpoint, device=device)
    if sample is None:
        sample = bool(agent.config.training.evaluate.sample)
    evaluator = build_evaluator(agent.config, agent.device)
    evaluation = evaluator.run(
        agent.workflow, episodes=episodes, label=f"command {seed}", sample=sample, video=video
    )
    result: dict[str, Any] = {
        "experiment": str(agent.config.experiment.name),
        "step": agent.step,
        "episodes": episodes,
        "seed": seed,
        "sample": sample,
        "checkpoint": checkpoint,
        **return_statistics(evaluation.episodes),
        "returns": evaluation.returns,
        "lengths": [episode.length for episode in evaluation.episodes],
    }
    target = Path(json_file) if json_file else folder.report / "eval.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(target, json.loads(json.dumps(result)))
    files = {"json": str(target)}
    if evaluation.frames:
        files["video"] = str(_write_video(folder.path, agent.step, evaluation.frames))
    return {**result, "files": files}


def _write_video(run: Path, step: int, frames: list[Any]) -> Path:
    import numpy as np

    from rl_lab.utils.media import save_video

    return save_video(run / "media" / "episodes" / "test" / f"eval_{step:09d}", np.stack(frames), fps=30)
