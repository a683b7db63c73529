"""Damaged files: whatever happens to a byte on disk, a run goes on exactly as it would have, or says what it lost.

The tests marked `learning` try many more damages than the others; RL_LAB_EXAMPLES sets how many.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rl_lab
from rl_lab.buffers.offline import OfflineBuffer
from rl_lab.errors import LabError
from rl_lab.records import ActionSpec, ArraySpec, Spec
from rl_lab.training import resume
from rl_lab.utils.checkpoint.loading import load_checkpoint
from rl_lab.utils.checkpoint.manager import CheckpointManager
from tests.same_run import assert_same, replay_rows

MANY = int(os.environ.get("RL_LAB_EXAMPLES", "400"))
SHORT, LONG = 24, 36  # steps that a run is saved at, and goes on to
WORDS = [
    *("debug=tiny", "environment=dummy_discrete", "environment.workers=0", "logging.progress=off"),
    *(
        "logging.tensorboard=false",
        "training.checkpoint.every_env_steps=12",
        "training.evaluate.every_env_steps=12",
    ),
    *(
        "training.report.every_env_steps=null",
        f"training.total_timesteps={SHORT}",
        "+buffers.replay.chunk_rows=4",
        "algorithm.train_ratio=2",
    ),
]


def tried(check: Callable[..., None], examples: int) -> Callable[..., None]:
    """Return the check as a test over `examples` random damages."""
    options = settings(
        max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    return options(given(data=st.data())(check))


def two_runs(folder: Path, words: list[str]) -> tuple[Path, Path]:
    """Return a run with two checkpoints, and the same run continued without damage."""
    rl_lab.train("dreamer_cartpole", [*words, f"run_dir={folder / 'saved'}"])
    shutil.copytree(folder / "saved", folder / "whole", symlinks=True)
    go_on(folder / "whole")
    return folder / "saved", folder / "whole"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    return two_runs(tmp_path_factory.mktemp("files"), WORDS)


@pytest.fixture(scope="module")
def disk_runs(tmp_path_factory) -> tuple[Path, Path]:
    """The same with episodes on disk, which are read from their files."""
    words = [word for word in WORDS if "chunk_rows" not in word]
    return two_runs(tmp_path_factory.mktemp("disk"), [*words, "buffer=episodes"])


def go_on(run: Path) -> list[str]:
    said: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resume(run, [f"training.total_timesteps={LONG}"], say=said.append)
    return said


@st.composite
def damages(draw: st.DrawFn) -> tuple[str, list[tuple[float, int]]]:
    """Draw a kind of damage, and positions (fractions of the file length) with bytes."""
    way = draw(st.sampled_from(["flip", "flip", "truncate", "insert", "zero", "delete", "empty"]))
    places = st.tuples(st.floats(0, 0.999), st.integers(0, 255))
    return way, draw(st.lists(places, min_size=1, max_size=3))


def damage(file: Path, way: str, places: list[tuple[float, int]]) -> None:
    content = bytearray(file.read_bytes())
    for share, byte in places:
        at = int(share * len(content))
        if way == "flip" and content:
            content[at] ^= byte or 1
        elif way == "zero":
            content[at : at + 64] = bytes(len(content[at : at + 64]))
        elif way == "insert":
            content[at:at] = bytes([byte] * 5)
        elif way == "truncate":
            del content[at:]
    if way == "delete":
        file.unlink()
    else:
        file.write_bytes(b"" if way == "empty" else content)


def copy_of(run: Path, tmp_path: Path) -> Path:
    shutil.rmtree(tmp_path / "copy", ignore_errors=True)
    return Path(shutil.copytree(run, tmp_path / "copy", symlinks=True))


def files_of(run: Path) -> list[Path]:
    """Return all files of a run that a later command reads."""
    folders = (run / "checkpoints", run / "buffers")
    stored = [
        file for folder in folders for file in folder.rglob("*") if file.is_file() and not file.is_symlink()
    ]
    config = [run / "config.yaml", run / "config" / "spec.json", run / "config" / "native.json"]
    return sorted([*stored, *config, run / "metrics.jsonl"])


# ---------------------------------------------------------------- checkpoints


def resumes(runs, tmp_path, data):
    """After damage to any file a run resumes exactly, or reports what it lost, or raises an error."""
    saved, whole = runs
    copy = copy_of(saved, tmp_path)
    file = data.draw(st.sampled_from(files_of(copy)))
    damage(file, *data.draw(damages()))
    try:
        said = go_on(copy)
    except LabError as error:
        assert str(error).strip()
        return
    if any("REPLAY DAMAGED" in text for text in said):
        return
    states = [
        CheckpointManager(run / "checkpoints", on_warning=pytest.fail).load().state for run in (copy, whole)
    ]
    assert_same(*states)
    if not (copy / "buffers").exists():
        assert_same(replay_rows(copy), replay_rows(whole), "replay")


def loads(runs, tmp_path, data):
    """After damage to any file every way of loading returns a saved state exactly, or raises an error."""
    saved, _ = runs
    copy = copy_of(saved, tmp_path)
    good = [load_checkpoint(file).state for file in sorted((saved / "checkpoints").glob("step_*.json"))]
    best = load_checkpoint(saved / "checkpoints" / "best.pt", weights=True).state
    file = data.draw(st.sampled_from(files_of(copy)))
    damage(file, *data.draw(damages()))
    checkpoints = copy / "checkpoints"
    for path, weights in (
        (copy, False),
        (copy, True),
        (checkpoints / "last.pt", False),
        (checkpoints / "best.pt", True),
    ):
        try:
            loaded = load_checkpoint(
                path, weights=weights, on_damaged_replay="older", on_warning=lambda text: None
            )
        except LabError as error:
            assert str(error).strip()
            continue
        expected = [best] if path.name == "best.pt" else good
        match = next(
            (state for state in expected if state["global_step"] == loaded.state["global_step"]), None
        )
        assert match is not None, "a state that was never saved"
        assert_same(loaded.state, match)


def agents(runs, tmp_path, data):
    """An agent is loaded exactly, or not at all, or with a warning that its config has changed."""
    saved, _ = runs
    copy = copy_of(saved, tmp_path)
    observation = np.ones((3, 4), np.float32)
    expected = rl_lab.load_agent(saved).act(observation)
    name = data.draw(st.sampled_from(["step", "config.yaml", "spec.json", "native.json"]))
    file = data.draw(st.sampled_from([file for file in files_of(copy) if file.name.startswith(name)]))
    damage(file, *data.draw(damages()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            agent = rl_lab.load_agent(copy)
            action = agent.act(observation)
        except LabError as error:
            assert str(error).strip()
            return
    if not any("has changed" in str(w.message) or "DAMAGED" in str(w.message) for w in caught):
        assert (action == expected).all()


# ---------------------------------------------------------------- episodes


SPEC = Spec("test", {"vector": ArraySpec((2,), "float32")}, ActionSpec("discrete", (), (3,)))


@pytest.fixture(scope="module")
def episodes(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("episodes")
    for number, steps in enumerate((5, 3)):
        rng = np.random.default_rng(number)
        arrays = {
            "observations": rng.normal(size=(steps + 1, 2)).astype(np.float32),
            "actions": rng.integers(0, 3, steps),
            "rewards": rng.normal(size=steps).astype(np.float32),
            "dones": np.arange(steps) == steps - 1,
        }
        np.savez_compressed(folder / f"episode-{number}.npz", **arrays)
        torch.save(
            {key: torch.from_numpy(value) for key, value in arrays.items()}, folder / f"other-{number}.pt"
        )
    return folder


def rows_of(folder: Path) -> dict[str, torch.Tensor]:
    buffer = OfflineBuffer(SPEC.row_columns(), path=folder, spec=SPEC)
    return dict(buffer.read(0, buffer.total_rows).columns)


def reads(episodes, tmp_path, data):
    """Episode files are read exactly, or not at all."""
    copy = copy_of(episodes, tmp_path)
    expected = rows_of(episodes)
    file = data.draw(st.sampled_from(sorted(copy.iterdir())))
    way, places = data.draw(damages())
    damage(file, way, places)
    try:
        rows = rows_of(copy)
    except LabError as error:
        assert file.name in str(error)
        return
    if way != "delete":  # a file that is gone is a smaller data set, whose length is printed
        assert_same(rows, expected, "rows")


test_a_run_goes_on_exactly_or_says_what_it_lost = tried(resumes, 2)
test_what_loads_is_what_was_saved = tried(loads, 8)
test_an_agent_is_loaded_as_it_was_or_not_at_all = tried(agents, 4)
test_episode_files_are_read_as_they_were_or_not_at_all = tried(reads, 40)


@pytest.mark.learning
@pytest.mark.parametrize(("check", "examples"), [(resumes, MANY // 4), (loads, MANY), (agents, MANY // 2)])
def test_random_damage_to_runs(runs, tmp_path, check, examples):
    tried(lambda data: check(runs, tmp_path, data), examples)()


@pytest.mark.learning
def test_random_damage_to_runs_with_episodes_on_disk(disk_runs, tmp_path):
    tried(lambda data: resumes(disk_runs, tmp_path, data), MANY // 4)()


@pytest.mark.learning
def test_random_damage_to_episodes(episodes, tmp_path):
    tried(lambda data: reads(episodes, tmp_path, data), 5 * MANY)()
