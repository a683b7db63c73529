#!/usr/bin/env bash
# The agents that come with the package (example://NAME): train each on the CPU, and write it to rl_lab/agents/NAME.
# Bounce and Catch take minutes, the others about half an hour of one core each. Any other run becomes one by the last command: rl-lab export RUN --example NAME.
set -euo pipefail
cd "$(dirname "$0")/../.."
runs=${1:-outputs/examples}
example() {  # name, checkpoint, words of rl-lab train
  local name=$1 checkpoint=$2
  shift 2
  rl-lab train "$@" run_dir="$runs/$name"
  rl-lab export "$runs/$name" --example "$name" --checkpoint "$checkpoint" --license mit
}
example bounce best experiment=dreamer_bounce training.total_timesteps=8000
example catch last experiment=delta_iris_catch
example obstacles last experiment=dreamer_obstacles
example boxing last experiment=dreamer_atari100k size=1m environment.task=boxing environment.num_envs=4 \
  environment.eval.num_envs=5 algorithm.batch_size=16 algorithm.batch_length=16 algorithm.imagination_last=4 \
  algorithm.imagination_horizon=10 algorithm.train_ratio=64 algorithm.learning_rate=4e-4 algorithm.entropy=1e-3 \
  optimizers.model.warmup=100 training.total_timesteps=16000
