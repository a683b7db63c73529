"""LeRobot's layout: numbers and PNG images bit by bit, videos to the codec's tolerance. Needs pyarrow."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rl_lab.buffers.formats.dataset import create_dataset, open_dataset
from rl_lab.errors import ConfigError
from rl_lab.records import ArraySpec, Spec
from tests.buffers.formats.format_helpers import SPECS, TORQUE, assert_same, episode, episodes, write

pytestmark = pytest.mark.extras
pytest.importorskip("pyarrow", reason="not run: needs pyarrow (extra lerobot)")


@pytest.mark.parametrize("kind", SPECS)
def test_round_trip_is_exact(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "data", SPECS[kind], "lerobot", images="png")
    with open_dataset(path) as data:
        assert data.format == "lerobot" and data.spec.to_dict() == SPECS[kind].to_dict()
        assert_same(data, episodes(SPECS[kind]))


def test_video_is_close(tmp_path: Path) -> None:
    """Smooth pictures: H.264 with half the color resolution differs by a few levels; numbers are exact."""
    spec = Spec(
        "camera", {"image": ArraySpec((3, 64, 96), "uint8"), "vector": ArraySpec((3,), "float32")}, TORQUE
    )
    items = [episode(spec, steps, steps) for steps in (7, 3)]
    rows, columns = np.mgrid[0:64, 0:96]
    for each in items:
        for k in range(len(each) + 1):
            gray = 60 + rows + columns + 5 * k
            each.observations["image"][k] = np.stack([gray, gray - 30, gray // 2]).astype(np.uint8)
    path = write(tmp_path / "data", spec, "lerobot", items)
    assert len(list(path.glob("videos/observation.images.image/*/*.mp4"))) == 2
    with open_dataset(path) as data:
        assert_same(data, items, but=("image",))
        for found, given in zip(data, items):
            difference = np.abs(found.observations["image"].astype(int) - given.observations["image"])
            assert difference.mean() < 3 and difference.max() < 24
            assert not difference[-1].any()  # the last observation is stored apart


def test_tables_are_those_of_lerobot(tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    path = write(tmp_path / "data", SPECS["both"], "lerobot", images="png")
    info = json.loads((path / "meta/info.json").read_text())
    assert info["codebase_version"] == "v3.0" and (info["total_episodes"], info["total_frames"]) == (3, 15)
    table = parquet.read_table(path / "data/chunk-000/file-000.parquet")
    assert table["index"].to_pylist() == list(range(15))
    assert table["episode_index"].to_pylist() == [0] * 5 + [1] + [2] * 9
    assert set(info["features"]) == set(table.column_names)
    assert table["observation.state"].type.list_size == 3
    found = parquet.read_table(path / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [(e["dataset_from_index"], e["dataset_to_index"]) for e in found] == [(0, 5), (5, 6), (6, 15)]
    stats = json.loads((path / "meta/stats.json").read_text())
    actions = np.concatenate([each.actions for each in episodes(SPECS["both"])]).astype(np.float64)
    assert np.allclose(stats["action"]["mean"], actions.mean(0)) and np.allclose(
        stats["action"]["std"], actions.std(0)
    )


def test_data_of_others(tmp_path: Path) -> None:
    """Without our key: the last observation is repeated, and actions are scaled by their range."""
    path = write(tmp_path / "data", SPECS["vector"], "lerobot")
    torque = write(tmp_path / "torque", SPECS["both"], "lerobot", images="png")
    for folder in (path, torque):
        info = json.loads((folder / "meta/info.json").read_text())
        del info["rl_lab"], info["features"]["next.terminated"]
        (folder / "meta/info.json").write_text(json.dumps(info))
    with open_dataset(path) as data:
        first, given = data.episode(0), episodes(SPECS["vector"])[0]
        assert first.last_repeated and first.actions.tolist() == given.actions.tolist()
        assert np.array_equal(first.observations["vector"][:-1], given.observations["vector"][:-1])
    with open_dataset(torque) as data:
        actions = np.concatenate([each.actions for each in data])
        assert np.allclose(actions.min(0), -1) and np.allclose(actions.max(0), 1)


def test_faults_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="even sides: use --images png"):
        odd = Spec("odd", {"image": ArraySpec((3, 5, 8), "uint8")}, TORQUE)
        create_dataset(tmp_path / "no", odd, "lerobot")
    path = write(tmp_path / "data", SPECS["vector"], "lerobot")
    file = path / "data/chunk-000/file-000.parquet"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with open_dataset(path) as data, pytest.raises(ConfigError, match=r"file-000.parquet cannot be read"):
        data.episode(0)
    info = json.loads((path / "meta/info.json").read_text())
    (path / "meta/info.json").write_text(json.dumps({**info, "codebase_version": "v2.1"}))
    with pytest.raises(ConfigError, match=r"LeRobot's version v2.1, but this version reads v3"):
        open_dataset(path)
