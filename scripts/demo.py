"""`make demo`: train the default experiment, evaluate it, plot its curve, and print where the results are."""

from __future__ import annotations

import os
import sys
import time

import rl_lab
from rl_lab.tools.evaluate import evaluate
from rl_lab.tools.report.command import write_report


def main() -> int:
    overrides = sys.argv[1:]  # e.g. debug=tiny
    start = time.perf_counter()
    run = rl_lab.train(None, overrides)
    if run.interrupted:
        return 0
    trained = time.perf_counter() - start
    print("evaluating 20 new episodes with the best checkpoint …")
    result = evaluate(run.path, checkpoint="best", episodes=20, seed=1, video=True)
    page, curve, *_ = write_report([run.path])
    programs = os.path.relpath(os.path.dirname(sys.executable))
    print(f"""
Dreamer on CartPole-v1: return {result["return_mean"]:.0f} ± {result["return_std"]:.0f} over 20 new episodes
(the maximum is 500). {run.counters["env_steps"]} steps took {trained / 60:.1f} minutes; the weights are those of step
{result["step"]}, which had the best evaluation during training.

  curve        {curve}
  video        {result["files"].get("video", "none: rendering needs pygame")}
  report       {page}
  TensorBoard  {programs}/tensorboard --logdir {run.path / "tensorboard"}
  continue     {programs}/rl-lab resume {run.path} training.total_timesteps={2 * run.counters["env_steps"]}
""")
    return 0


if __name__ == "__main__":
    sys.exit(main())
