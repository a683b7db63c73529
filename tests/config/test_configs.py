"""Every experiment composes, builds and trains for a few seconds; every YAML file has a description."""

from __future__ import annotations

from pathlib import Path

import pytest

import rl_lab
from rl_lab.config.checks import CONFIG_FOLDER
from rl_lab.config.compose import compose_config, known_choices
from rl_lab.environments.task_names import suites
from rl_lab.errors import MissingPackageError
from tests.config.stored_data import dmc_demonstrations, pusht_demonstrations, stored_data
from tests.environments.suites.suite_cases import use_stand_in
from tests.host_reads import host_reads

SLOW = {
    "dreamer_memory_maze",
    "dreamer_loconav",
    "dreamer_manipulation",
}  # the simulator takes minutes to draw even a dry run
# They need a file, and run in tests/workflows/test_iris_presets.py.
NEED_FILES = {"iris_gpt2_frozen", "iris_pretrained_tokenizer"}
EXPERIMENTS = [
    pytest.param(name, marks=pytest.mark.learning) if name in SLOW else name
    for name in known_choices("experiment")
    if name not in NEED_FILES
]
OWN = {  # presets for any task: words, and the name that the task gives them
    "dreamer_gym": (["environment.task=Acrobot-v1"], "dreamer_Acrobot-v1"),
    "dreamer_gym_vision": (["environment.task=dummy/dict"], "dreamer_dict"),
    "tdmpc2_gym": (["environment.task=Pendulum-v1"], "tdmpc2_Pendulum-v1"),
}
QUIET = ["logging.progress=off", "logging.tensorboard=false"]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own, run_name = OWN.get(name, ([], name))
    words = [f"experiment={name}", "debug=tiny", *QUIET, *own, f"run_dir={tmp_path / 'run'}"]
    words += stored_data(name, tmp_path)
    if "_pusht_" in name:
        words.append(f"buffers.demonstrations.path={pusht_demonstrations(tmp_path / 'demos.zarr')}")
    if name in ("behaviour_cloning_dmc", "diffusion_policy_dmc"):
        words.append(f"buffers.demonstrations.path={dmc_demonstrations(tmp_path / 'demos')}")
    config = compose_config(words)
    use_stand_in(config.environment.get("suite"))
    assert config.experiment.name == run_name
    try:
        with host_reads(monkeypatch, eager_calls=1) as reads:
            run = rl_lab.train(None, words)
    except MissingPackageError as error:
        pytest.skip(f"not run: {error}")
    if config.training.capture:
        assert not reads.found  # a GPU could not capture its updates
    if "demonstrations" in config.buffers:  # a fixed number of updates
        assert run.counters["updates"] == config.algorithm.updates
    else:
        collects = any(phase.get("type") != "offline" for phase in config.training.phases)
        assert run.counters["env_steps" if collects else "updates"] >= config.training.total_timesteps
    assert (tmp_path / "run" / "checkpoints" / "last.pt").exists()


NOW = ["atari", "atari100k", "crafter", "dmc_proprio", "dmc_vision", "memory_maze"]
NOW += ["pinpad", "loconav", "bsuite", "procgen", "dmlab", "minecraft", "manipulation"]
IN_2024 = ["atari_2024", "atari100k_2024", "dmc_proprio_2024", "dmc_vision_2024"]


@pytest.mark.parametrize("task", [*NOW, *IN_2024])
def test_dreamer_presets_start_updates_like_the_original(task: str):
    """len(replay) in danijar/dreamerv3, embodied/run/train.py: batch_size @ 251910d, × batch_length @ e3f0224."""
    config = compose_config([f"experiment=dreamer_{task}"])
    algorithm, streams = config.algorithm, config.environment.num_envs
    rows = algorithm.batch_length + algorithm.replay_context  # of one sequence
    sequences = streams * (algorithm.seed_steps // streams - rows + 1)
    assert sequences == algorithm.batch_size * (algorithm.batch_length if task in NOW else 1)
    assert config.training.phases[0].duration_steps == algorithm.seed_steps


def test_atari100k_of_2024_ends_games_after_100_000_frames():
    """danijar/dreamerv3 @ 251910d, configs.yaml: length 100000, counted in frames; `time_limit` is in decisions."""
    environment = compose_config(["experiment=dreamer_atari100k_2024"]).environment
    assert environment.time_limit * environment.action_repeat == 100_000


def test_prefilled_collects_before_updates(tmp_path: Path):
    pytest.importorskip("dm_control", reason="extra: dmc")
    words = ["experiment=dreamer_dmc_proprio", "debug=tiny", *QUIET, f"run_dir={tmp_path / 'run'}"]
    run = rl_lab.train(None, [*words, "algorithm.seed_steps=60"])  # of 100; then an update every 4
    assert run.counters["updates"] == 10


def test_staged_phases_fit_a_short_run(tmp_path: Path):
    run = rl_lab.train(None, ["phases=staged", "debug=tiny", *QUIET, f"run_dir={tmp_path / 'run'}"])
    assert (run.counters["env_steps"], run.counters["updates"]) == (
        100,
        49,
    )  # 25 + 12, then 12 in the joint phase
    for total, durations in (
        ("12000", (2000, 1000, 500)),
        ("null", (2000, 1000, 500)),
        ("400", (200, 100, 50)),
    ):
        first, second, third, _ = compose_config(
            ["phases=staged", f"training.total_timesteps={total}"]
        ).training.phases
        assert (first.duration_steps, second.duration_updates, third.duration_updates) == durations


@pytest.mark.parametrize(
    "name", sorted(file.stem for file in (CONFIG_FOLDER / "size/dreamer").glob("*.yaml"))
)
def test_dreamer_blocks_divide_deter(name: str):
    size = compose_config([f"size={name}"]).algorithm.size
    assert size.deter % size.blocks == 0


def test_every_yaml_has_a_description():
    for file in CONFIG_FOLDER.rglob("*.yaml"):
        first = next(line for line in file.read_text().splitlines() if not line.startswith("# @package"))
        assert first.startswith("# "), f"{file} should begin with a line that `rl-lab list` can show"


def test_suites_are_listed():
    assert {"gym", "dummy"} <= set(suites())
