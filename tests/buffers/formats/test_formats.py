"""Every format gives back what was written, bit by bit; faults are one sentence, and nothing half-written remains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_lab.buffers.formats import dataset as formats
from rl_lab.buffers.formats.dataset import FORMATS, create_dataset, open_dataset
from rl_lab.buffers.formats.episode import make_episode, scaled_actions, to_rows, unscaled_actions
from rl_lab.buffers.offline import OfflineBuffer
from rl_lab.errors import ConfigError, LabError, MissingPackageError
from tests.buffers.formats.format_helpers import SPECS, assert_equal, assert_same, episode, episodes, write

pytest.importorskip("h5py")

EXACT = [name for name, each in FORMATS.items() if each.writable and name not in ("pt", "lerobot")]
ROOT = Path(__file__).resolve().parents[3]
WRITABLE = [*EXACT, "pt"]


def rows_of(path: Path, spec: Any) -> dict[str, torch.Tensor]:
    buffer = OfflineBuffer(spec.row_columns(), path=path, spec=spec)
    return buffer.read(0, buffer.total_rows).columns


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("format", EXACT)
def test_round_trip_is_exact(tmp_path: Path, format: str, kind: str) -> None:
    """written -> read, and -> our own format -> this format -> read: the same bits, and the same rows for training."""
    spec = SPECS[kind]
    path = write(tmp_path / "first", spec, format)
    with open_dataset(path) as read:
        assert read.format == format
        assert read.spec.to_dict() == spec.to_dict()
        assert_same(read, episodes(spec))
        own = write(tmp_path / "own", read.spec, "lab", list(read))
    with open_dataset(own) as stored:
        again = write(tmp_path / "again", stored.spec, format, list(stored))
    with open_dataset(again) as read:
        assert_same(read, episodes(spec))
    expected = torch.cat([torch.from_numpy(to_rows(e, spec)["reward"]) for e in episodes(spec)], dim=1)
    assert torch.equal(rows_of(again, spec)["reward"], expected)
    assert rows_of(again, spec)["is_first"].sum() == 3


def test_pt_files_are_those_of_iris(tmp_path: Path) -> None:
    """The five keys of its Episode and no other; what it has no key for, the last observation, is repeated."""
    spec = SPECS["image"]
    path = write(tmp_path / "iris", spec, "pt")
    content = torch.load(path / "000000.pt", weights_only=True)
    assert sorted(content) == ["actions", "ends", "mask_padding", "observations", "rewards"]
    assert content["ends"].tolist() == [0, 0, 0, 0, 1] and content["ends"].dtype == torch.int64
    with open_dataset(path) as read:
        first, given = read.episode(0), episodes(spec)[0]
        assert first.last_repeated
        assert np.array_equal(first.observations["image"][:-1], given.observations["image"][:-1])
        assert first.actions.tobytes() == given.actions.tobytes()
    with pytest.raises(ConfigError, match="format 'pt' has one observation, but the data has image, vector"):
        create_dataset(tmp_path / "no", SPECS["both"], "pt")


def test_formats_are_recognized_by_their_files(tmp_path: Path) -> None:
    for format in WRITABLE:
        path = write(tmp_path / format, SPECS["vector"], format)
        found = formats.recognize(path)
        assert found is not None and found.name == format
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no known format"):
        open_dataset(tmp_path / "empty")
    with pytest.raises(ConfigError, match="does not exist"):
        open_dataset(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"format 'mineri' is unknown. Did you mean 'minari'"):
        open_dataset(tmp_path / "lab", "mineri")


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "minari", SPECS["vector"], "minari")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingPackageError, match="format 'minari' needs the package h5py"):
        open_dataset(path)


# ---------------------------------------------------------------- nothing half-written


@pytest.mark.parametrize("format", WRITABLE)
def test_failed_writing_leaves_nothing(tmp_path: Path, format: str) -> None:
    spec = SPECS["vector"]
    with pytest.raises(RuntimeError), create_dataset(tmp_path / "data", spec, format) as writer:
        writer.add(episode(spec, 3, 0))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with (
        create_dataset(tmp_path / "data", spec, format) as writer,
        pytest.raises(ConfigError, match="no episode"),
    ):
        writer.finish()
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "data", spec, format)
    with pytest.raises(ConfigError, match="exists: choose another name"):
        create_dataset(tmp_path / "data", spec, format)
    assert [path.stem for path in tmp_path.iterdir()] == ["data"]


def test_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS["vector"]
    writer = create_dataset(tmp_path / "data", spec, "npz")

    def full(each: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "write", full)
    with pytest.raises(LabError, match=r"cannot be written \(No space left on device, .* nothing was kept"):
        writer.add(episode(spec, 3, 0))
    assert list(tmp_path.iterdir()) == []


def test_files_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from rl_lab.buffers.formats.dataset import create_dataset\n"
        "from tests.buffers.formats.format_helpers import SPECS, episode\n"
        "writer = create_dataset(Path(sys.argv[1]), SPECS['vector'], 'lab')\n"
        "writer.add(episode(SPECS['vector'], 3, 0)); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "data")], cwd=ROOT).returncode == -9
    left = [path.name for path in tmp_path.iterdir()]
    assert len(left) == 1 and left[0].startswith(".data.")
    write(tmp_path / "data", SPECS["vector"], "lab")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("format", EXACT)
def test_truncated_files_are_refused(tmp_path: Path, format: str) -> None:
    """Half of the largest file: opening or reading names the file, and no other error escapes."""
    spec = SPECS["image"]
    path = write(tmp_path / "data", spec, format)
    largest = max((p for p in formats.files_of(path)), key=lambda p: p.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    if format == "lab":  # the damaged episodes are skipped and reported
        with pytest.warns(UserWarning, match="lost"), open_dataset(path) as read:
            assert len(read) < 3 and read.notes()
        return
    with pytest.raises(LabError, match=str(path)), open_dataset(path) as read:
        list(read)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rewards": np.full(4, np.nan)}, r"'rewards' \(float64\) must be finite"),
        ({"rewards": np.zeros(3)}, r"'terminated' has shape \(4,\), but there are 3 rewards"),
        ({"observations": {"vector": np.zeros((7, 3))}}, r"has shape \(7, 3\), but 4 rewards need 5 or 4"),
        ({"observations": {"vector": np.full((5, 3), np.inf)}}, "not finite, first at step 0"),
        ({"observations": {}}, "the observations are missing"),
        ({"terminated": np.array([0, 1, 0, 0])}, "the episode ends at step 1 of 4"),
        ({"actions": np.zeros((5, 2))}, r"'actions' has shape \(5, 2\), but there are 4 rewards"),
        ({"rewards": np.zeros(0)}, "at least one step"),
    ],
)
def test_faults_of_an_episode(change: dict[str, Any], text: str) -> None:
    arrays: dict[str, Any] = {
        "observations": {"vector": np.zeros((5, 3))},
        "actions": np.zeros((4, 2)),
        "rewards": np.zeros(4),
        "terminated": np.zeros(4),
        "truncated": np.zeros(4),
    }
    assert len(make_episode(**arrays)) == 4
    with pytest.raises(ConfigError, match=text):
        make_episode(**{**arrays, **change})


@pytest.mark.parametrize("format", EXACT)
def test_data_of_another_environment_is_refused(tmp_path: Path, format: str) -> None:
    path = write(tmp_path / "data", SPECS["vector"], format)
    with pytest.raises(ConfigError, match=r"vector|image"):
        rows_of(path, SPECS["image"])


# ---------------------------------------------------------------- Minari


def test_minari_package_reads_what_we_write(tmp_path: Path) -> None:
    minari = pytest.importorskip("minari")
    for kind, spec in SPECS.items():
        path = write(tmp_path / kind, spec, "minari")
        data = minari.MinariDataset(path / "data")
        assert (data.total_episodes, data.total_steps) == (3, 15)
        for theirs, ours in zip(data.iterate_episodes(), episodes(spec)):
            observed = theirs.observations if kind == "both" else {kind: theirs.observations}
            for name, value in observed.items():
                expected = ours.observations[name]
                assert np.array_equal(value, np.moveaxis(expected, 1, -1) if name == "image" else expected)
            assert np.array_equal(theirs.actions, ours.actions)
            assert np.array_equal(theirs.rewards, ours.rewards)
            assert np.array_equal(theirs.terminations, ours.terminated)
            assert np.array_equal(theirs.truncations, ours.truncated)
            assert data.action_space.contains(theirs.actions[0])


def test_we_read_what_the_minari_package_writes(tmp_path: Path) -> None:
    """Nested Dict observations with a Discrete entry, JPEG images, and actions in the environment's units."""
    pytest.importorskip("minari")
    from gymnasium import spaces
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage

    space = spaces.Dict(
        {
            "arm": spaces.Dict({"angle": spaces.Box(-1, 1, (2,), np.float64)}),
            "goal": spaces.Discrete(3, start=1),
            "camera": spaces.Box(0, 255, (16, 24, 3), np.uint8),
        }
    )
    folder = tmp_path / "theirs" / "data"
    folder.parent.mkdir()
    storage = MinariStorage.new(folder, space, spaces.Box(-2, 4, (1,), np.float32))
    frames = np.zeros((5, 16, 24, 3), np.uint8)
    frames[:, :, :12] = 200
    angles = np.arange(10.0).reshape(5, 2) / 10
    storage.update_episodes(
        [
            EpisodeBuffer(
                id=None,
                seed=7,
                observations={
                    "arm": {"angle": list(angles)},
                    "goal": [1, 2, 3, 1, 1],
                    "camera": list(frames),
                },
                actions=[np.array([x], np.float32) for x in (-2.0, 1.0, 4.0, 1.0)],
                rewards=[1.0, 2.0, 3.0, 4.0],
                terminations=[False] * 4,
                truncations=[False, False, False, True],
                infos={},
            )
        ]
    )
    assert storage.total_episodes == 1
    with open_dataset(tmp_path / "theirs") as read:
        found = read.episode(0)
        assert read.spec.action.low == (-2.0,) and found.facts["seed"] == 7
    assert found.actions[:, 0].tolist() == [-1.0, 0.0, 1.0, 0.0]
    assert np.allclose(found.observations["arm_angle"], angles)
    assert found.observations["goal"].tolist()[:3] == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert found.observations["camera"].shape == (5, 3, 16, 24)
    assert np.abs(found.observations["camera"].astype(int) - np.moveaxis(frames, -1, 1)).max() < 12  # JPEG
    assert found.truncated.tolist() == [False, False, False, True]


def test_actions_in_the_units_of_the_environment(tmp_path: Path) -> None:
    spec = SPECS["image"]
    path = write(tmp_path / "data", spec, "minari", units="environment")
    space = json.loads(json.loads((path / "data" / "metadata.json").read_text())["action_space"])
    assert (space["low"], space["high"]) == ([-2.0, 0.0], [2.0, 4.0])
    with open_dataset(path) as read:
        for found, given in zip(read, episodes(spec)):
            assert np.abs(found.actions - given.actions).max() < 1e-6
    action, given = spec.action, np.array([[-1.0, 1.0], [0.0, 0.5]], np.float32)
    there = unscaled_actions(given, action)
    assert there.tolist() == [[-2.0, 4.0], [0.0, 3.0]]
    assert scaled_actions(there, np.array(action.low), np.array(action.high)).tolist() == given.tolist()


def test_robomimic_files_of_others(tmp_path: Path) -> None:
    """Without our attributes: float64 values, `dones` at every solved step, no next_obs, demonstrations 2 and 10."""
    import h5py

    with h5py.File(tmp_path / "low_dim.hdf5", "w") as file:
        for name, steps in (("demo_2", 4), ("demo_10", 3)):
            group = file.create_group(f"data/{name}")
            group["actions"] = np.linspace(-1, 1, steps)[:, None]
            group["dones"] = np.array([0] * (steps - 2) + [1, 1])
            group["rewards"] = np.arange(steps, dtype=np.float64)
            group["obs/object"] = np.arange(steps * 2.0).reshape(steps, 2)
        file["mask/train"] = np.array([b"demo_2"])
    with open_dataset(tmp_path / "low_dim.hdf5") as read:
        assert read.lengths.tolist() == [4, 3] and read.metadata["masks"] == {"train": 1}
        first = read.episode(0)
    assert first.last_repeated and first.observations["object"].shape == (5, 2)
    assert first.terminated.tolist() == [False, False, False, True]
    assert first.actions.dtype == np.float32 and first.rewards.tolist() == [0, 1, 2, 3]


def test_reading_keeps_little_in_memory(tmp_path: Path) -> None:
    """Only the asked episode is read: another episode's file may be missing."""
    path = write(tmp_path / "data", SPECS["vector"], "npz")
    with open_dataset(path) as read:
        (path / "000002.npz").unlink()
        assert_equal(read.episode(1), episodes(SPECS["vector"])[1])
        with pytest.raises(ConfigError, match=r"000002.npz cannot be read"):
            read.episode(2)


# ---------------------------------------------------------------- zarr


def test_zarr_package_reads_what_we_write(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    path = write(tmp_path / "data.zarr", SPECS["both"], "zarr")
    group = zarr.open_group(str(path), mode="r")
    given = episodes(SPECS["both"])
    assert group["meta/episode_ends"][:].tolist() == [5, 6, 15]
    expected = np.concatenate([np.moveaxis(e.observations["image"][:-1], 1, -1) for e in given])
    assert np.array_equal(group["data/image"][:], expected)
    assert np.array_equal(group["data/action"][:], np.concatenate([e.actions for e in given]))


def test_zarr_files_of_others(tmp_path: Path) -> None:
    """As Push-T's: float32 images from 0 to 255, actions in pixels, neither rewards nor ends."""
    spec = SPECS["image"]
    path = write(tmp_path / "pusht", spec, "zarr", units="environment")
    (path / ".zattrs").unlink()
    for name in ("reward", "terminated", "truncated"):
        for file in (path / "data" / name).iterdir():
            file.unlink()
    with open_dataset(path) as data:
        assert data.lengths.tolist() == [5, 1, 9] and data.notes() == ["no rewards: they are 0"]
        low, high = np.array(data.spec.action.low), np.array(data.spec.action.high)
        for found, given in zip(data, episodes(spec)):
            assert found.last_repeated and found.truncated[-1] and not found.rewards.any()
            assert np.array_equal(found.observations["image"][:-1], given.observations["image"][:-1])
            there = unscaled_actions(given.actions, spec.action)
            assert np.abs(low + (found.actions + 1) / 2 * (high - low) - there).max() < 1e-5
