"""Data sets, results of suites and folders of sweeps are data: nothing that they name is imported or written to."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rl_lab
from rl_lab.buffers.formats.dataset import FORMATS, open_dataset
from rl_lab.buffers.offline import OfflineBuffer
from rl_lab.cli import main
from rl_lab.errors import ConfigError, LabError
from rl_lab.tools.suite.definition import load_suite
from rl_lab.tools.suite.results import SuiteFolder, read_result
from rl_lab.tools.suite.take_in import take_in
from tests.buffers.formats.format_helpers import SPECS, write

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs" / "results"
QUIET = ["logging.progress=off", "logging.tensorboard=false", "training.total_timesteps=16"]
NAMES = ("canary_part:Env", "canary_part.call", "gym:canary_part:Env", "../../../../outside/thesis.txt")
PARTS = ({"_target_": "canary_part.call"}, "${oc.env:HOME}", 1e999, None, [], "\x1b[2J")


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that the module `canary_part` writes as soon as it is imported."""
    (tmp_path / "modules").mkdir()
    text = f"open({str(tmp_path / 'mark')!r}, 'w').close()\ndef call(*a, **k): pass\nclass Env: pass\n"
    (tmp_path / "modules" / "canary_part.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    sys.modules.pop("canary_part", None)
    return tmp_path / "mark"


# --- Data sets ---


def leaves(node: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value below a JSON object, and of every object and list."""
    yield place
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from leaves(value, (*place, key))


def replaced(node: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    copy = dict(node) if isinstance(node, dict) else list(node)
    copy[place[0]] = replaced(node[place[0]], place[1:], value)
    return copy


def spoiled(path: Path) -> Iterator[Callable[[], None]]:
    """Yield functions that write a name or a wrong value into the metadata of a data set, one place each."""
    number = 0
    for file in sorted([*path.rglob("*.json"), *path.rglob(".z*")]) if path.is_dir() else []:
        content = json.loads(file.read_text())
        for place in leaves(content):
            number += 1
            value = [*NAMES, *PARTS][number % 10]
            text = json.dumps(replaced(content, place, value))
            yield lambda file=file, text=text: file.write_text(text)
    for file in sorted([path, *path.rglob("*")] if path.is_dir() else [path]):
        if file.suffix == ".hdf5":
            yield from _spoiled_attributes(file)


def _spoiled_attributes(file: Path) -> Iterator[Callable[[], None]]:
    import h5py

    with h5py.File(file) as opened:
        groups = ["/"]
        opened.visit(groups.append)
        places = [(group, key) for group in groups for key in opened[group].attrs][:12]

    def change(group: str, key: str, value: Any) -> None:
        with h5py.File(file, "r+") as opened:
            opened[group].attrs[key] = value

    for number, (group, key) in enumerate(places):
        value = NAMES[number % 4] if number % 2 else json.dumps({"type": NAMES[0], "env": PARTS[0]})
        yield lambda group=group, key=key, value=value: change(group, key, value)


READABLE = [name for name, each in FORMATS.items() if each.writable and name != "lerobot"]


@pytest.mark.parametrize("format", READABLE)
def test_readers_import_nothing_and_end_with_one_sentence(
    format: str, mark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("h5py")
    spec = SPECS["vector"]
    good = write(tmp_path / "good", spec, format)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "thesis.txt").write_text("years of work")
    tried = len(list(spoiled(good)))
    for number in range(tried):
        copy = tmp_path / f"copy{number}{good.suffix}"
        _ = shutil.copytree(good, copy) if good.is_dir() else shutil.copy(good, copy)
        list(spoiled(copy))[number]()
        for words in (["data", "check", str(copy)], ["data", "info", str(copy)]):
            code = main(words)
            output = capsys.readouterr()
            assert code in (0, 1), (number, output)
            assert "unexpected" not in output.err and "\x1b" not in output.out + output.err, (number, output)
            assert output.err.count("error: ") == (code and output.err.startswith("error: ")), (
                number,
                output,
            )
        with contextlib.suppress(LabError):
            OfflineBuffer(spec.row_columns(), path=copy, spec=spec)
    assert not mark.exists() and "canary_part" not in sys.modules
    assert [path.name for path in outside.iterdir()] == ["thesis.txt"]
    assert tried > 3 or format == "pt"


@pytest.mark.parametrize("file", ["chunk-00000000.episodes", "index.log", "layout.json"])
def test_device_in_the_place_of_a_file_is_one_sentence(file: str, tmp_path: Path) -> None:
    spec = SPECS["vector"]
    folder = write(tmp_path / "data", spec, "lab")
    found = folder / file
    found.unlink()
    found.symlink_to("/dev/zero")
    with pytest.raises(LabError, match=f"{tmp_path.name}"):
        buffer = OfflineBuffer(spec.row_columns(), path=folder, spec=spec)
        buffer.read(0, buffer.total_rows)


@pytest.mark.parametrize(
    "pattern",
    [
        "../../{chunk_index}.parquet",
        "/etc/passwd",
        "a/../../../x",
        "{chunk_index.__class__}",
        "{0}",
        "{nothing}/x",
        "data/{chunk_index:99999}.parquet",
        "x\0y",
    ],
)
def test_a_pattern_of_lerobot_leads_to_files_of_the_data_set(pattern: str, tmp_path: Path) -> None:
    from rl_lab.buffers.formats.lerobot import DATA_PATH, Reader

    reader = Reader.__new__(Reader)
    reader.path, reader.metadata = tmp_path, {"data_path": pattern}
    with pytest.raises(ConfigError, match=r"info\.json has data_path .* no path in the data set"):
        reader._file("data_path", DATA_PATH, chunk_index=1, file_index=2)
    reader.metadata = {"data_path": None}
    expected = tmp_path / DATA_PATH.format(chunk_index=1, file_index=2)
    assert reader._file("data_path", DATA_PATH, chunk_index=1, file_index=2) == expected
    name = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    video = reader._file("video_path", name, video_key="top", chunk_index=1, file_index=12)
    assert video == tmp_path / "videos/top/chunk-001/file-012.mp4"
    with pytest.raises(ConfigError, match="no path in the data set"):
        reader._file("video_path", name, video_key="../..", chunk_index=1, file_index=2)


# --- Results of suites ---


@pytest.fixture
def result(tmp_path: Path) -> dict[str, Any]:
    folder = SuiteFolder(tmp_path / "first")
    list(take_in(load_suite("atari100k"), folder, [DOCS / "dreamer_pong_12m.json"]))
    return json.loads(folder.result_file("dreamer_12m.pong.seed1").read_text())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "../../outside"),
        ("name", "/tmp/outside"),
        ("name", "..\\x"),
        ("name", ".hidden"),
        ("name", "x" * 300),
        ("name", 3),
        ("method", {"_target_": "canary_part.call"}),
        ("task", "\x1b[2J"),
        ("task", ["canary_part:Env"]),
        ("seed", "1"),
        ("status", "excellent"),
        ("frames", "many"),
        ("frames", -1),
        ("score", "canary_part:Env"),
        ("evaluations", [{"frames": "x", "return_mean": 1}]),
        ("evaluations", "canary_part"),
        ("training_episodes", [3]),
    ],
)
def test_a_strangers_result_writes_nothing_elsewhere(
    key: str, value: Any, result: dict[str, Any], tmp_path: Path, mark: Path, capsys
) -> None:
    (tmp_path / "theirs.json").write_text(json.dumps({**result, key: value}))
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    folder = str(tmp_path / "second" / "folder")
    assert main(["suite", "atari100k", "--folder", folder, "--import", str(tmp_path / "theirs.json")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "unexpected" not in error
    assert str(tmp_path / "theirs.json") in error and "\x1b" not in error
    created = {str(path) for path in tmp_path.rglob("*")} - set(before)
    assert created <= {str(tmp_path / "second"), folder, f"{folder}/results"}
    # In a folder of results it is left out, and named.
    (tmp_path / "first" / "results" / "z.json").write_text(json.dumps({**result, key: value}))
    found, bad = SuiteFolder(tmp_path / "first").read_all()
    assert len(found) == 1 and len(bad) == 1 and "z.json" in bad[0]
    assert not mark.exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("curve", "../secret.csv"),
        ("curve", "/etc/passwd"),
        ("curve", "bad.csv"),
        ("command", 3),
        ("command", "rl-lab train 'open quote"),
        ("training_episodes_by_frames", {"x": 1}),
        ("training_episodes_by_frames", 3),
        ("frames", [3]),
    ],
)
def test_a_kept_file_of_a_stranger_is_one_sentence(key: str, value: Any, tmp_path: Path) -> None:
    kept = json.loads((DOCS / "dreamer_pong_12m.json").read_text())
    (tmp_path / "bad.csv").write_text("frames,train_return\nx,y\n")
    (tmp_path / "kept.json").write_text(json.dumps({**kept, key: value}))
    with pytest.raises(LabError, match=r"kept\.json"):
        list(take_in(load_suite("atari100k"), SuiteFolder(tmp_path / "folder"), [tmp_path / "kept.json"]))
    assert not list((tmp_path / "folder" / "results").iterdir())


def test_a_task_of_a_kept_command_is_no_path(tmp_path: Path) -> None:
    kept = json.loads((DOCS / "dreamer_pong_12m.json").read_text())
    kept["command"] = kept["command"].replace("environment.task=pong", "environment.task=../../../up")
    (tmp_path / "kept.json").write_text(json.dumps(kept))
    folder = SuiteFolder(tmp_path / "folder")
    list(take_in(load_suite("atari100k"), folder, [tmp_path / "kept.json"]))
    (file,) = folder.results.iterdir()
    assert read_result(file)["name"] == "dreamer_12m._up.seed1" and not (tmp_path / "up.json").exists()


@pytest.mark.parametrize("name", ["results", "logs", "claims", "suite.jsonl"])
def test_links_out_of_a_folder_of_results_are_refused(name: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside if name != "suite.jsonl" else tmp_path).mkdir(exist_ok=True)
    if name == "suite.jsonl":
        outside.write_text("years of work")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / name).symlink_to(outside)
    with pytest.raises(ConfigError, match=f"^--folder: .*{name} is a link to"):
        SuiteFolder(tmp_path / "folder").make()
    (tmp_path / "folder" / name).unlink()
    (tmp_path / "folder" / "runs").symlink_to(tmp_path)  # a larger disk
    SuiteFolder(tmp_path / "folder").make()


# --- Folders of sweeps, and collecting with an agent ---


def test_folder_of_a_sweep_is_data(mark: Path, tmp_path: Path, capsys) -> None:
    """Plotting the runs of a stranger's sweep imports nothing; one that is spoiled does not stop the others."""
    words = ["debug=tiny", "environment=dummy_discrete", *QUIET]
    rl_lab.train("random_cartpole", [*words, f"run_dir={tmp_path / 'sweep' / '0'}"])
    for number, line in enumerate(
        (
            "anything: {_target_: canary_part.call}\n",
            "environment: {task: 'canary_part:Env'}\n",
            "x: ${oc.env:HOME}\n",
            "x: !!python/object/apply:canary_part.call []\n",
            "? [a, b]\n: c\n",
        ),
        start=1,
    ):
        copy = shutil.copytree(tmp_path / "sweep" / "0", tmp_path / "sweep" / str(number))
        text = (copy / "config.yaml").read_text()
        if line.startswith("environment"):
            text = text.replace("\nenvironment:", "\nformer_environment:")
        (copy / "config.yaml").write_text(text + line)
    (tmp_path / "sweep" / "2.failed.txt").write_text("<script>alert(1)</script>\x1b[2J")
    (tmp_path / "sweep" / "multirun.yaml").write_text("x: !!python/object/apply:canary_part.call []\n")
    assert main(["report", str(tmp_path / "sweep"), "--out", str(tmp_path / "out")]) == 0
    output = capsys.readouterr()
    assert (
        "unexpected" not in output.err and "left out: " in output.err and os.environ["HOME"] not in output.out
    )
    assert "<script>alert(1)" not in (tmp_path / "out" / "index.html").read_text()
    assert not mark.exists() and "canary_part" not in sys.modules


def test_lab_data_set_is_read_without_its_config(mark: Path, tmp_path: Path) -> None:
    """A run as a data set: its config is not needed."""
    words = ["debug=tiny", "environment=dummy_discrete", *QUIET]
    rl_lab.train("dreamer_cartpole", [*words, f"run_dir={tmp_path / 'run'}"])
    text = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(text + "anything: {_target_: canary_part.call}\n")
    with open_dataset(tmp_path / "run") as dataset:
        assert len(dataset) > 0
    assert not mark.exists()
