"""Demonstrations in the zarr layout of Diffusion Policy: rows, and one clear message for each kind of bad data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_lab.buffers.offline import OfflineBuffer
from rl_lab.errors import ConfigError, LabError, MissingPackageError
from rl_lab.records import ActionSpec, ArraySpec, Spec

ACTION = ActionSpec("continuous", (2,), low=(0.0, 0.0), high=(512.0, 512.0))
SPEC = Spec("toy", {"vector": ArraySpec((4,), "float32")}, ACTION)
PIXELS = Spec(
    "toy", {"image": ArraySpec((3, 2, 2), "uint8"), "agent_pos": ArraySpec((2,), "float32")}, ACTION
)
SOURCES = {"vector": ["keypoint", "state[0:2]"]}
PIXEL_SOURCES = {"image": "img", "agent_pos": "state[:2]"}
STEPS, ENDS = 7, [3, 7]


def write_array(folder: Path, value: np.ndarray, chunks: tuple[int, ...], compressor: Any = None) -> None:
    """A zarr array of version 2, as its specification describes it."""
    folder.mkdir(parents=True)
    meta = {"shape": value.shape, "chunks": chunks, "dtype": value.dtype.str, "compressor": compressor}
    meta |= {"fill_value": 0, "filters": None, "order": "C", "zarr_format": 2}
    (folder / ".zarray").write_text(json.dumps(meta))
    codec = None
    if compressor is not None:
        codec = pytest.importorskip("numcodecs", reason="extra: zarr").get_codec(compressor)
    counts = [-(-size // chunk) for size, chunk in zip(value.shape, chunks)]
    padded = np.pad(value, [(0, n * c - s) for n, c, s in zip(counts, chunks, value.shape)])
    for place in np.ndindex(*counts):
        part = padded[tuple(slice(i * c, (i + 1) * c) for i, c in zip(place, chunks))]
        part = np.ascontiguousarray(part)
        content = part.tobytes() if codec is None else bytes(codec.encode(part))
        (folder / ".".join(map(str, place))).write_bytes(content)


def arrays() -> dict[str, np.ndarray]:
    count = np.arange(STEPS, dtype=np.float32)
    return {
        "state": np.stack([count, 10 + count, 20 + count], axis=1),
        "keypoint": np.stack([100 + count, 200 + count], axis=1)[:, None],
        "action": np.stack([count * 64, 512 - count * 64], axis=1),
        "img": np.arange(STEPS * 12, dtype=np.float32).reshape(STEPS, 2, 2, 3),
    }


def demos(path: Path, compressor: Any = None, **changes: Any) -> Path:
    content = {**arrays(), **changes}
    ends = content.pop("episode_ends", np.array(ENDS, np.int64))
    for name, value in content.items():
        if value is not None:
            write_array(path / "data" / name, value, (2, *value.shape[1:]), compressor)
    write_array(path / "meta" / "episode_ends", ends, (5,), compressor)
    (path / ".zgroup").write_text('{"zarr_format": 2}')
    return path


def offline(path: Path, spec: Spec = SPEC, **options: Any) -> OfflineBuffer:
    options = {"observations": SOURCES if spec is SPEC else PIXEL_SOURCES, **options}
    return OfflineBuffer(spec.row_columns(), path=path, spec=spec, **options)


@pytest.mark.parametrize("compressor", [None, {"id": "blosc", "cname": "zstd", "clevel": 5, "shuffle": 2}])
def test_rows(tmp_path: Path, compressor: Any) -> None:
    buffer = offline(demos(tmp_path / "demos.zarr", compressor))
    rows = buffer.read(0, buffer.total_rows)
    assert buffer.total_rows == STEPS + 2
    # The last observation of an episode is not in the data: the one before is repeated.
    assert rows.obs["vector"][0, :, 0].tolist() == [100, 101, 102, 102, 103, 104, 105, 106, 106]
    assert rows.obs["vector"][0, 1].tolist() == [101, 201, 1, 11]
    # [0, 512] becomes [-1, 1]; the action of the last row is none.
    assert rows.action[0, :, 0].tolist() == [-1.0, -0.75, -0.5, 0.0, -0.25, 0.0, 0.25, 0.5, 0.0]
    assert rows.is_first[0].tolist() == [True, *[False] * 3, True, *[False] * 4]
    assert rows.truncated[0].nonzero().flatten().tolist() == [3, 8] and not rows.terminated.any()
    assert "2 episodes, 7 steps" in buffer.describe() and "no rewards" in buffer.describe()


def test_images_are_channels_first_uint8(tmp_path: Path) -> None:
    buffer = offline(demos(tmp_path / "demos.zarr"), PIXELS, episodes=1)
    rows = buffer.read(0, buffer.total_rows)
    assert buffer.total_rows == 4
    assert rows.obs["image"].shape == (1, 4, 3, 2, 2)
    assert rows.obs["image"][0, 1].tolist() == arrays()["img"][1].transpose(2, 0, 1).astype(int).tolist()
    assert rows.obs["agent_pos"][0, 2].tolist() == [2, 12]


def test_chunks_of_several_columns(tmp_path: Path) -> None:
    path = demos(tmp_path / "demos.zarr", keypoint=None)
    write_array(path / "data" / "keypoint", np.arange(35, dtype=np.float64).reshape(7, 5), (3, 2))
    spec = Spec("toy", {"vector": ArraySpec((5,), "float32")}, ACTION)
    rows = offline(path, spec, observations={"vector": "keypoint"}).read(0, 9)
    assert rows.obs["vector"][0, 4].tolist() == [15, 16, 17, 18, 19]


def bad(kind: str, path: Path) -> tuple[Path, Spec, dict[str, Any]]:
    """Demonstrations with one fault, and the spec and options to read them with."""
    changes: dict[str, Any] = {}
    if kind == "nan":
        changes["state"] = np.where(np.arange(21).reshape(7, 3) == 12, np.nan, arrays()["state"])
    if kind == "rows":
        changes["action"] = arrays()["action"][:5]
    if kind == "wide":
        changes["action"] = np.zeros((7, 3), np.float32)
    if kind == "range":
        changes["action"] = arrays()["action"] * 2
    if kind == "ends":
        changes["episode_ends"] = np.array([3, 3, 7])
    if kind == "column":
        changes["keypoint"] = None
    demos(path, **changes)
    if kind == "chunk":
        (path / "data" / "state" / "1.0").unlink()
    if kind == "short":
        (path / "data" / "state" / "1.0").write_bytes(b"12")
    if kind == "json":
        (path / "data" / "state" / ".zarray").write_text("{")
    if kind == "no ends":
        shutil.rmtree(path / "meta" / "episode_ends")
    if kind == "no data":
        shutil.rmtree(path / "data")
    if kind == "version 3":
        (path / "zarr.json").write_text("{}")
    if kind == "image":
        small = Spec("toy", {**PIXELS.observations, "image": ArraySpec((3, 4, 1), "uint8")}, ACTION)
        return path, small, {"observations": PIXEL_SOURCES}
    options: dict[str, Any] = {"observations": SOURCES}
    if kind == "unnamed":
        options = {"observations": None}
    if kind == "misspelt":
        options = {"observations": {"vectr": "state"}}
    if kind == "widths":
        options = {"observations": {"vector": "state"}}
    if kind == "syntax":
        options = {"observations": {"vector": "state[0"}}
    if kind == "too many":
        options["episodes"] = 3
    return path, SPEC, options


MESSAGES = {
    "nan": r"episode 1: observation 'vector' is not finite at step 1: repair the data",
    "rows": r"data/action has 5 rows, but the episodes end at row 7: the data is truncated",
    "wide": r"data/action has actions of 3 values, but toy takes 2",
    "range": r"episode 0: 'action' ranges from 0 to 1024, but toy takes \[0.0, 0.0\] to \[512.0, 512.0\]",
    "ends": r"meta/episode_ends must be increasing",
    "column": r"has no array 'data/keypoint'",
    "chunk": r"the chunk .*state/1.0 is missing: the data is truncated, copy it again",
    "short": r"the chunk .*state/1.0 cannot be read: the data is damaged",
    "json": r"state/.zarray cannot be read: the data is damaged",
    "no ends": r"has no array 'meta/episode_ends': it is not in the layout of Diffusion Policy",
    "no data": r"has no arrays under 'data'",
    "version 3": r"zarr version 3: write it as version 2",
    "image": r"images are \(3, 2, 2\), but the observation 'image' is \(3, 4, 1\)",
    "unnamed": r"no array 'data/vector' for the observation 'vector': set the buffer's `observations.vector`",
    "misspelt": r"observations.vectr: toy has no such observation. Did you mean 'vector'",
    "widths": r"state give 3 values for the observation 'vector', but toy has shape \(4,\)",
    "syntax": r"'state\[0' must be a key of `data`, or a part of it such as state\[0:2\]",
    "too many": r"episodes must be from 1 to 2",
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_bad_data_is_one_clear_message(tmp_path: Path, kind: str) -> None:
    path, spec, options = bad(kind, tmp_path / "demos.zarr")
    with pytest.raises(ConfigError, match=MESSAGES[kind]):
        offline(path, spec, **options)


def test_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = demos(tmp_path / "demos.zarr")
    meta = json.loads((path / "data" / "state" / ".zarray").read_text())
    (path / "data" / "state" / ".zarray").write_text(json.dumps({**meta, "compressor": {"id": "zstd"}}))
    monkeypatch.setitem(__import__("sys").modules, "numcodecs", None)
    with pytest.raises(MissingPackageError, match=r"needs numcodecs: pip install .*zarr"):
        offline(path)


def test_changed_data_has_another_fingerprint(tmp_path: Path) -> None:
    one = offline(demos(tmp_path / "a.zarr")).source.fingerprint
    assert offline(demos(tmp_path / "b.zarr")).source.fingerprint == one
    other = demos(tmp_path / "c.zarr", action=arrays()["action"][::-1].copy())
    assert offline(other).source.fingerprint != one


def test_options_of_other_data_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(LabError, match="are for data in a zarr folder"):
        offline(tmp_path / "empty", episodes=3)
