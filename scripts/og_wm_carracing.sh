#!/usr/bin/env bash
# World Models on CarRacing in three steps, for two machines: one with a GPU and many cores, one with time.
#
#   scripts/og_wm_carracing.sh networks RUN WEIGHTS    collect, train V and M, leave their weights in files under 16 MiB
#   scripts/og_wm_carracing.sh evolve WEIGHTS RUN      evolve the controller on them; given again, it goes on
#   scripts/og_wm_carracing.sh score RUN               20 tracks that evolution never saw
#
# Words behind these go to `rl-lab train` (`rl-lab eval`), such as algorithm.stages.collect_steps=200000. The sizes here:
#   networks  400,000 frames (400 random rollouts), 20,000 updates of V, 3,000 of M: reckoned at ten minutes with 16 cores
#   evolve    16 candidates, 2 tracks each, the same for all: for two cores
set -euo pipefail
cd "$(dirname "$0")/.."
command=${1:?networks, evolve or score}
python=${PYTHON:-python}
train=("$python" -m rl_lab train +experiment=og_wm_carracing logging.tensorboard=false)

case $command in
networks)
  run=${2:?a folder for the run} weights=${3:?a folder for the weights}
  "${train[@]}" phases=og_wm_networks run_dir="$run" environment.num_envs=64 \
    algorithm.stages.collect_steps=400000 algorithm.stages.vae_updates=20000 algorithm.stages.mdn_updates=3000 \
    buffers.replay.capacity=450000 training.checkpoint.every_cycles=1000 training.report.every_cycles=1000 "${@:4}"
  "$python" scripts/split_weights.py split "$run" "$weights"
  ;;
evolve)
  weights=${2:?the folder with the weights} run=${3:?a folder for the run}
  "$python" scripts/split_weights.py join "$weights" "$weights/weights.pt"
  "${train[@]}" phases=og_wm_evolve run_dir="$run" load.path="$weights/weights.pt" \
    environment.num_envs=1 environment.eval.num_envs=8 buffers.replay.capacity=1000 \
    algorithm.evolution.population=16 algorithm.evolution.episodes=2 algorithm.evolution.num_envs=16 "${@:4}"
  ;;
score)
  run=${2:?the run}
  "$python" -m rl_lab eval "$run" --checkpoint best --episodes 20 --seed 2018 "${@:3}"
  ;;
*) echo "no step '$command': networks, evolve or score" >&2; exit 1 ;;
esac
