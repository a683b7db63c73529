#!/usr/bin/env bash
# World Models in the dream, at several temperatures: V and M are trained once; for each temperature a controller is
# evolved in M's dream and then scored in the environment, which evolution never saw. Given again, what is finished is
# not repeated, and what was interrupted goes on.
#
#   scripts/og_wm_dream.sh RUN                                  take cover, at the temperatures of the paper's table
#   scripts/og_wm_dream.sh RUN experiment=og_wm_carracing_dream temperatures="1.0 1.15"
#
# Words of this script, with what they are without one:
#   experiment=og_wm_take_cover
#   temperatures="0.1 0.5 1.0 1.15 1.3"
#   episodes=100       of each score
#   networks=          words for the training of V and M only
# All others go to every `rl-lab train`, such as algorithm.size.hidden=256 or algorithm.stages.generations=40.
#
# RUN/scores.json has the scores, RUN/scores.png the table's picture with the curves of evolution.
set -euo pipefail
cd "$(dirname "$0")/.."
run=${1:?a folder for the runs}
shift
experiment=og_wm_take_cover temperatures="0.1 0.5 1.0 1.15 1.3" episodes=100 networks=
words=()
for word in "$@"; do
  case $word in
  experiment=* | temperatures=* | episodes=* | networks=*) declare "${word%%=*}=${word#*=}" ;;
  *) words+=("$word") ;;
  esac
done
python=${PYTHON:-python3}
mkdir -p "$run"
run=$(cd "$run" && pwd)

export RL_LAB_STOPPED_STATUS=75 # what `rl-lab train` returns if it was asked to stop: then this script ends, too

# train FOLDER WORD…: trains, or goes on where it was; a finished run is left alone.
train() {
  local folder=$1
  shift
  if [ -f "$folder/finished" ]; then return; fi
  "$python" -m rl_lab train "+experiment=$experiment" logging.tensorboard=false "run_dir=$folder" "${words[@]}" "$@"
  touch "$folder/finished"
}

# shellcheck disable=SC2086
train "$run/networks" phases=og_wm_networks $networks
for temperature in $temperatures; do
  folder=$run/temperature_$temperature
  train "$folder" phases=og_wm_evolve_dream "load.path=$run/networks/checkpoints/last.pt" "algorithm.temperature=$temperature"
  if [ ! -f "$folder/score.json" ]; then
    "$python" -m rl_lab eval "$folder" --checkpoint last --episodes "$episodes" --seed 2018 --no-video --json "$folder/score.json"
  fi
done
"$python" scripts/dev/dream_temperatures.py "$run" --json "$run/scores.json" --picture "$run/scores.png"
