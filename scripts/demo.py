"""`make demo`: a small pixel world with its dream, then CartPole with its scores and curve; prints where they are."""

from __future__ import annotations

import os
import shlex
import sys
import time

import rl_lab
from rl_lab.run_folder import RunFolder
from rl_lab.tools.dream_report import DreamReport, fitting_context, measure
from rl_lab.tools.dream_report.animation import dream_gif
from rl_lab.tools.evaluate import evaluate
from rl_lab.tools.report.command import write_report
from rl_lab.training import RunResult


def main() -> int:
    overrides = sys.argv[1:]  # e.g. debug=tiny
    programs = os.path.relpath(os.path.dirname(sys.executable))
    dreamed = dream(overrides, programs)
    scored = (
        cartpole(overrides, programs) if dreamed else []
    )  # last: commands without a name take the newest run
    print("\n" + "\n".join([*scored, *dreamed]))
    return 0


def cartpole(overrides: list[str], programs: str) -> list[str]:
    """Train on CartPole, evaluate the agent and draw its curve; returns what to print, [] if it was stopped."""
    print("\n2 of 2: Dreamer on CartPole-v1, from its state\n")
    run, minutes = train("dreamer_cartpole_steady", overrides)
    if run.interrupted:
        return []
    print("evaluating 20 new episodes with the best checkpoint …")
    result = evaluate(run.path, checkpoint="best", episodes=20, seed=1, video=True)
    page, curve, *_ = write_report([run.path])
    steps = run.counters["env_steps"]
    return [
        f"Dreamer on CartPole-v1: return {result['return_mean']:.0f} ± {result['return_std']:.0f} over 20 new episodes (the",
        f"maximum is 500). {steps} decisions took {minutes:.1f} minutes; the weights are those of decision {result['step']},",
        "which had the best evaluation during training.",
        "",
        f"  curve        {curve}",
        f"  video        {result['files'].get('video', 'none: rendering needs pygame')}",
        f"  report       {page}",
        f"  TensorBoard  {programs}/tensorboard --logdir {run.path / 'tensorboard'}",
        f"  continue     {programs}/rl-lab resume {run.path} training.total_timesteps={2 * steps}",
        "",
    ]


def dream(overrides: list[str], programs: str) -> list[str]:
    """Train a world model on pixels and draw its dream; returns what to print."""
    print("1 of 2: a world model of Bounce, a game of 16×16 pixels\n")
    run, minutes = train("dreamer_bounce", overrides)
    if run.interrupted:
        return []
    folder = RunFolder(run.path)
    found = measure([folder], episodes=8, context=fitting_context(folder), horizon=30)
    file = dream_gif(found, folder.report / "dream.gif")
    model, still = errors(found)
    where = shlex.quote(str(run.path))
    return [
        f"Its world model of Bounce dreams 30 steps from {found.settings['context']} frames and the actions: error {model:.4f},",
        f"where a picture that does not change has {still:.4f}. Training took {minutes:.1f} minutes.",
        "",
        f"  environment | dream | difference   {file}",
        f"  play in the dream                  {programs}/pip install -e '.[play]' && {programs}/rl-lab play {where} -w --web",
        "",
    ]


def errors(found: DreamReport) -> tuple[float, float]:
    """Mean squared error of the model's dreamed images and of the baseline that repeats the last one."""
    label = found.models[0].label
    return found.curves[label]["image mse"].overall, found.baseline["image mse"].overall


def train(experiment: str, overrides: list[str]) -> tuple[RunResult, float]:
    """Return the run and the minutes that it took."""
    start = time.perf_counter()
    run = rl_lab.train(experiment, [word for word in overrides if not word.startswith("run_dir=")])
    return run, (time.perf_counter() - start) / 60


if __name__ == "__main__":
    sys.exit(main())
