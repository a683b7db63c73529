#!/usr/bin/env bash
# Diffusion Policy on Push-T, in steps that each end within 10 minutes; given again, a step goes on where it was.
#
#   scripts/diffusion_policy_pusht.sh train RUN DEMOS [seconds=540] [words for rl-lab train]
#   scripts/diffusion_policy_pusht.sh evaluate RUN [episodes=500]
#
# DEMOS is pusht_cchi_v7_replay.zarr, or a folder of scripts/dev/pack_pusht.py. Set task=state for key points, and
# algorithm=behaviour_cloning for the baseline; with key points also algorithm=diffusion_policy_transformer.
# updates=120000 is what the learning rate falls over.
set -euo pipefail
cd "$(dirname "$0")/.."
step=${1:?train or evaluate} run=${2:?a folder for the run}
shift 2
python=${PYTHON:-python3}
seconds=540 episodes=500 task=pixels algorithm=diffusion_policy updates=120000
demos= words=()
for word in "$@"; do
  case $word in
  seconds=* | episodes=* | task=* | algorithm=* | updates=*) declare "${word%%=*}=${word#*=}" ;;
  *=*) words+=("$word") ;;
  *) demos=$word ;;
  esac
done
case $step in
train)
  [ -n "$demos" ] || { echo "DEMOS is missing: a folder with the demonstrations" >&2; exit 1; }
  [ -e "$demos/.zgroup" ] || words+=(buffers.demonstrations.observations=null)
  code=0
  # Stopped by a signal, a run saves a checkpoint; the next call resumes it.
  timeout --signal=TERM --kill-after=50 "$seconds" "$python" -m rl_lab train \
    "+experiment=${algorithm}_pusht_$task" "buffers.demonstrations.path=$(realpath "$demos")" "run_dir=$run" \
    "algorithm.updates=$updates" training.evaluate.every_updates=null training.checkpoint.every_updates=50000 \
    logging.progress=plain "${words[@]}" || code=$?
  [ "$code" = 0 ] || [ "$code" = 124 ]
  ;;
evaluate)
  # All episodes at once: then every environment plans in the same step.
  "$python" -m rl_lab eval "$run" --episodes "$episodes" --envs "$episodes" --seed 100000 --video
  ;;
*)
  echo "$step: train or evaluate" >&2
  exit 1
  ;;
esac
