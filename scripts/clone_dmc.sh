#!/usr/bin/env bash
# One tool from reinforcement learning to imitation: TD-MPC2 learns a task of DeepMind Control, its agent is collected,
# and behaviour cloning and Diffusion Policy learn from its episodes. Given again, a finished step is not repeated.
#
#   scripts/clone_dmc.sh FOLDER [task=cartpole_swingup] [repeat=4] [decisions=12000] [episodes=150] [size=compact]
#
# repeat: control steps for one decision. On two CPU cores use size=compact (64 units), on a GPU size=5m.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?a folder for the runs and the data set}
shift
task=cartpole_swingup repeat=4 decisions=12000 episodes=150 size=compact seed=0
for word in "$@"; do
  case $word in
  task=* | repeat=* | decisions=* | episodes=* | size=* | seed=*) declare "${word%%=*}=${word#*=}" ;;
  *) echo "$word: task=, repeat=, decisions=, episodes=, size= or seed=" >&2; exit 1 ;;
  esac
done
python=${PYTHON:-python3}
mkdir -p "$folder"
folder=$(realpath "$folder")
export RL_LAB_STOPPED_STATUS=75 # what `rl-lab train` returns if it was asked to stop: then this script ends, too
lab() { "$python" -m rl_lab "$@"; }
same=("environment.task=$task" "environment.action_repeat=$repeat" "environment.time_limit=$((1000 / repeat))"
  "experiment.seed=$seed" logging.progress=plain)

lab train +experiment=tdmpc2_dmc_state "size=$size" "${same[@]}" "run_dir=$folder/expert" \
  algorithm.episode_length=$((1000 / repeat)) algorithm.batch_size=128 algorithm.learning_rate=1e-3 \
  algorithm.seed_steps=1000 algorithm.pretrain_updates=500 algorithm.plan.iterations=4 algorithm.plan.samples=128 \
  algorithm.plan.policy_samples=8 algorithm.plan.elites=16 environment.num_envs=4 \
  "training.total_timesteps=$decisions" training.evaluate.every_env_steps=2000 training.checkpoint.every_env_steps=2000
lab eval "$folder/expert" --checkpoint best --episodes 50 --seed 1000 --no-video --json "$folder/expert.json"
lab collect "$folder/expert" --checkpoint best --episodes "$episodes" --seed 2000 --out "$folder/data"
for clone in behaviour_cloning diffusion_policy; do
  lab train "+experiment=${clone}_dmc" "${same[@]}" "run_dir=$folder/$clone" "buffers.demonstrations.path=$folder/data"
  lab eval "$folder/$clone" --episodes 50 --seed 1000 --no-video --json "$folder/$clone.json"
done
"$python" - "$folder" <<'END'
import json, sys
from pathlib import Path

returns = {}
for name in ("expert", "behaviour_cloning", "diffusion_policy"):
    returns[name] = json.loads((Path(sys.argv[1]) / f"{name}.json").read_text())["return_mean"]
    share = returns[name] / returns["expert"]
    print(f"{name:20} {returns[name]:8.1f}  {share:6.1%} of the expert, mean of 50 episodes")
END
