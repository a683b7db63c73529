#!/usr/bin/env bash
# World Models on CarRacing. On one machine, against the clock:
#
#   scripts/og_wm_carracing.sh all RUN [budget=1000]   collect, V, M, evolve, score: all within that many seconds
#
# or in steps, where one machine has the GPU and another has time:
#
#   scripts/og_wm_carracing.sh check RUN               every stage at its smallest, in seconds: does it run here?
#   scripts/og_wm_carracing.sh networks RUN            collect, train V and M; RUN/weights has them, under 16 MiB a file
#   scripts/og_wm_carracing.sh evolve RUN              evolve the controller on RUN/weights; RUN/state has V, M,
#                                                      CMA-ES and the curve after it, under 16 MiB a file
#   scripts/og_wm_carracing.sh score RUN               20 tracks that evolution never saw; RUN/result has what to keep
#
# Given again, a step goes on where it was. On another machine, copy RUN/weights there before the first `evolve`, and
# RUN/state before each further one: evolution continues bit for bit, with the population that it began with. V and M
# train on fresh rollouts with `networks OTHER load.path=RUN/weights.pt experiment.seed=2`.
#
# Words of this script, with what they are without one:
#   backend=auto       envpool where it is installed, else gymnasium
#   workers=           processes that step environments; all cores but two
#   budget=            seconds of the step; at their end evolution stops, saved. `all` spends 1,000
#   tracks=8           that each candidate drives, as in the preset; the kept result of 13 minutes had 2
# All others go to `rl-lab train`, such as algorithm.stages.collect_steps=100000, or with -- to `rl-lab eval`. A call
# that continues `evolve` has the config of the first one.
#
# The sizes here: 250,000 frames (250 random rollouts of 1,000 steps), 20,000 updates of V and 2,500 of M on whole
# rollouts; four candidates a worker, the same tracks for all. With rollouts of 500 steps and M on 199 of them, V and M
# took three minutes with a GPU and ten cores; M on whole rollouts is not measured yet.
set -euo pipefail
cd "$(dirname "$0")/.."
step=${1:?all, check, networks, evolve or score} run=${2:?a folder for the run}
shift 2
python=${PYTHON:-python3}
cores=$(nproc)
backend=auto workers=$((cores > 3 ? cores - 2 : cores)) budget= tracks=8
words=() options=()
for word in "$@"; do
  case $word in
  backend=* | workers=* | budget=* | tracks=*) declare "${word%%=*}=${word#*=}" ;;
  --*) options+=("$word") ;;
  *) words+=("$word") ;;
  esac
done
if [ "$backend" = auto ]; then
  backend=gymnasium
  "$python" -c "import envpool" 2>/dev/null && backend=envpool
fi
train=("$python" -m rl_lab train +experiment=og_wm_carracing logging.tensorboard=false "environment.backend=$backend"
  "environment.workers=$workers" "++environment.eval.workers=$workers")

say() { echo "[$(date -u +%H:%M:%S)] $*"; }

# limited SECONDS COMMAND…: asks it to stop, saved, when the time is over. 0: no limit.
limited() {
  local seconds=$1 code=0
  shift
  if [ "$seconds" = 0 ]; then "$@"; return; fi
  timeout --signal=TERM --kill-after=60 "$seconds" "$@" || code=$?
  [ "$code" = 0 ] || [ "$code" = 124 ]
}

check() {
  say "check with $backend"
  rm -rf "$run/check"
  "${train[@]}" phases=og_wm run_dir="$run/check" debug=tiny training.total_timesteps=null \
    environment.workers=2 "++environment.eval.workers=2" algorithm.stages.vae_updates=8 algorithm.stages.mdn_updates=8 \
    algorithm.stages.generations=2 algorithm.stages.evaluate_every=2 algorithm.evolution.num_envs=4 training.report.every_env_steps=null \
    training.evaluate.every_env_steps=null >"$run/check.log" 2>&1
}

networks() {
  if [ -f "$run/weights/parts.json" ]; then return; fi
  say "networks with $backend, $workers workers"
  # Asked to stop, the training returns 75, and this script ends: V and M are not ready.
  RL_LAB_STOPPED_STATUS=75 "${train[@]}" phases=og_wm_networks run_dir="$run/networks" environment.num_envs=$((4 * workers)) \
    algorithm.stages.collect_steps=250000 algorithm.stages.vae_updates=20000 algorithm.stages.mdn_updates=2500 \
    buffers.replay.capacity=300000 training.checkpoint.every_cycles=25 training.report.every_cycles=1000 "${words[@]}"
  "$python" scripts/split_run.py split "$run/networks" "$run/weights" --weights
}

# evolve SECONDS
evolve() {
  say "evolve with $backend, $workers workers, $1 seconds (0: no limit)"
  if [ -f "$run/state/parts.json" ]; then "$python" scripts/split_run.py join "$run/state" "$run/evolve" --newer; fi
  if compgen -G "$run/evolve/checkpoints/step_*.json" >/dev/null; then
    limited "$1" "$python" -m rl_lab resume "$run/evolve" "environment.workers=$workers" \
      "++environment.eval.workers=$workers"
  else
    rm -f "$run/weights.pt"
    "$python" scripts/split_run.py join "$run/weights" "$run/weights.pt"
    limited "$1" "${train[@]}" phases=og_wm_evolve run_dir="$run/evolve" load.path="$run/weights.pt" \
      environment.num_envs=1 environment.eval.num_envs=$((2 * workers)) buffers.replay.capacity=1000 \
      algorithm.evolution.population=$((4 * workers)) algorithm.evolution.episodes="$tracks" \
      algorithm.evolution.num_envs=$((4 * workers)) algorithm.stages.evaluate_every=5 \
      training.evaluate.episodes=$((2 * workers)) "${words[@]}"
  fi
  "$python" scripts/split_run.py split "$run/evolve" "$run/state"
}

# score of WHICH (best, last) with BACKEND
score_one() {
  say "score of $1 with $2"
  "$python" -m rl_lab eval "$run/evolve" --checkpoint "$1" --episodes 20 --seed 2018 --envs 20 --no-video \
    --env "backend=$2" --env "workers=$workers" --json "$run/scores/$1_$2.json" "${options[@]}"
}

# what a reader needs, in three files
pack() {
  tar -C "$run" -czf "$run/result/numbers.tar.gz" scores $(cd "$run" && ls -d {networks,evolve}/{metrics.jsonl,config.yaml} \
    check.log pictures 2>/dev/null)
}

score() {
  mkdir -p "$run/scores" "$run/result"
  score_one best "$backend"
  "$python" scripts/split_run.py split "$run/evolve/checkpoints/best.pt" "$run/result" --weights
  pack
  score_one last "$backend" || say "no score of the last"
  if [ "$backend" != gymnasium ]; then score_one best gymnasium || say "no score with gymnasium"; fi
  "$python" scripts/dev/world_model_images.py "$run/evolve" carracing "$run/pictures" || say "no pictures"
  pack
}

mkdir -p "$run"
run=$(cd "$run" && pwd)
case $step in
check) check ;;
networks) networks ;;
evolve) evolve "${budget:-0}" ;;
score) score ;;
all)
  began=$SECONDS
  if ! check; then
    tail -n 5 "$run/check.log"
    say "without recorded graphs then"
    train+=("training.capture=false")
    check || { tail -n 5 "$run/check.log"; exit 1; }
  fi
  networks
  left=$((${budget:-1000} - (SECONDS - began) - 90)) # for the score
  evolve $((left > 60 ? left : 60))
  score
  say "done in $((SECONDS - began)) seconds"
  ;;
*)
  echo "no step '$step': all, check, networks, evolve or score" >&2
  exit 1
  ;;
esac
