"""Loading never runs code from a file, and writing never leaves the run folder."""

from __future__ import annotations

import ast
import io
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

import rl_lab
from rl_lab.buffers.offline import OfflineBuffer
from rl_lab.cli import main
from rl_lab.config.compose import check_targets
from rl_lab.errors import LabError
from rl_lab.records import ActionSpec, ArraySpec, Spec
from rl_lab.utils.checkpoint.saveable import load_data
from rl_lab.utils.logger import ExperimentLogger

ROOT = Path(__file__).resolve().parents[1]
# Pipes between the trainer and its own worker processes carry pickles, and so do Ray's messages to its own actors;
# nothing there comes from a file.
PIPES = {"environments/env_runner.py", "environments/workers.py", "environments/remote_worker.py"}
FORBIDDEN = {
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "cloudpickle.load",
    "cloudpickle.loads",
    "dill.load",
    "dill.loads",
    "joblib.load",
    "marshal.loads",
    "shelve.open",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "torch.jit.load",
    "torch.hub.load",
    "torch.package.PackageImporter",
    "torch.serialization.add_safe_globals",
    "eval",
    "exec",
    "compile",
}


def sources() -> list[Path]:
    folders = [ROOT / "rl_lab", ROOT / "scripts", ROOT / "benchmarks", ROOT / "examples"]
    return sorted(file for folder in folders for file in folder.rglob("*.py"))


def called(node: ast.AST) -> str:
    """Return the function of a call as `a.b.c`, or its last names if it is not a plain name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join(reversed([*names, node.id] if isinstance(node, ast.Name) else names))


def problem(call: ast.Call, file: Path) -> str:
    name = called(call.func)
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if name == "torch.load" and not is_constant(keywords.get("weights_only"), True):
        return "torch.load without weights_only=True"
    if name in ("np.load", "numpy.load") and not is_constant(keywords.get("allow_pickle"), False):
        return "np.load without allow_pickle=False"
    if is_constant(keywords.get("allow_pickle"), True):
        return "allow_pickle=True"
    if name in FORBIDDEN and file.relative_to(ROOT / "rl_lab").as_posix() not in PIPES:
        return name
    return ""


def is_constant(node: ast.AST | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def test_no_unsafe_loading_calls():
    found = []
    for file in sources():
        known = file if file.is_relative_to(ROOT / "rl_lab") else ROOT / "rl_lab" / "other.py"
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):  # from pickle import loads
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                found += [f"{file}:{node.lineno}: {name}" for name in names if name in FORBIDDEN]
            if isinstance(node, ast.Call) and (what := problem(node, known)):
                found.append(f"{file}:{node.lineno}: {what}")
    assert found == []


# ---------------------------------------------------------------- files that carry code


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("security") / "run"
    words = ["debug=tiny", "environment=dummy_discrete", "logging.progress=off", "logging.tensorboard=false"]
    words += ["training.total_timesteps=30", "training.evaluate.every_env_steps=10", f"run_dir={folder}"]
    rl_lab.train("random_cartpole", words)
    return folder


def loaded_bombs(mark: Path) -> dict[str, bytes]:
    """Return the same object in every format that a checkpoint may have."""
    bombs = {
        "pickle": pickle.dumps(Bomb(mark)),
        "dict": pickle.dumps({"version": 1, "components": Bomb(mark)}),
    }
    file = io.BytesIO()
    torch.save({"version": 1, "global_step": 0, "components": {"policy": Bomb(mark)}}, file)
    bombs["torch"] = file.getvalue()
    file = io.BytesIO()
    torch.save(torch.nn.Linear(1, 1), file)
    bombs["module"] = file.getvalue()
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), file)
    bombs["script"] = file.getvalue()
    file = io.BytesIO()
    torch.save({"version": Bomb(mark)}, file, _use_new_zipfile_serialization=False)
    bombs["legacy"] = file.getvalue()
    return bombs


KINDS = ("pickle", "dict", "torch", "module", "script", "legacy")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_with_code_is_refused(tmp_path: Path, kind: str):
    mark, file = tmp_path / "mark", tmp_path / "weights.pt"
    file.write_bytes(loaded_bombs(mark)[kind])
    with pytest.raises(LabError, match=r"refused|not a checkpoint") as caught:
        load_data(file)
    assert not mark.exists() and "weights_only=False" not in str(caught.value)


@pytest.mark.parametrize("where", ["best.pt", "newest", "replay"])
def test_verbs_run_no_code_of_a_run_folder(run: Path, tmp_path: Path, where: str, capsys):
    copy = Path(shutil.copytree(run, tmp_path / "copy", symlinks=True))
    checkpoints, mark = copy / "checkpoints", tmp_path / "mark"
    target = {
        "best.pt": checkpoints / "best.pt",
        "newest": sorted(checkpoints.glob("step_*.pt"))[-1],
        "replay": next((checkpoints / "replay" / "replay").iterdir()),
    }[where]
    target = target.resolve()
    target.write_bytes(loaded_bombs(mark)["torch"])
    manifests = list(checkpoints.glob("*.json"))
    for manifest in manifests:  # an attacker would write fitting ones
        _vouch_for(manifest, target)
    for words in (["eval", str(copy), "--checkpoint", "best"], ["eval", str(copy)], ["resume", str(copy)]):
        main([*words] + (["training.total_timesteps=40"] if words[0] == "resume" else ["--episodes", "1"]))
    assert not mark.exists()
    assert "Traceback" not in capsys.readouterr().err


def _vouch_for(manifest: Path, file: Path) -> None:
    from rl_lab.utils.checkpoint.manifest import read_manifest, write_manifest
    from rl_lab.utils.files import crc32_of

    content = read_manifest(manifest)
    facts = {"bytes": file.stat().st_size, "crc32": crc32_of(file)}
    if content["state"]["file"] == file.name:
        content["state"] |= facts
    for entry in content["buffers"].values():
        if file.name in entry["files"]:
            entry["files"][file.name] |= facts
    write_manifest(manifest, content)


def test_episode_files_with_code_are_refused(tmp_path: Path):
    spec = Spec("test", {"vector": ArraySpec((2,), "float32")}, ActionSpec("discrete", (), (2,)))
    mark = tmp_path / "mark"
    good = {
        "observations": np.zeros((4, 2), np.float32),
        "actions": np.zeros(3, np.int64),
        "rewards": np.zeros(3, np.float32),
        "dones": np.array([0, 0, 1], bool),
    }
    bombs = tmp_path / "bombs"
    bombs.mkdir()
    np.savez(bombs / "a.npz", **{**good, "rewards": np.array([Bomb(mark)] * 3, dtype=object)})
    with pytest.raises(LabError, match="damaged or holds other objects than arrays"):
        OfflineBuffer(spec.row_columns(), path=bombs, spec=spec)
    (bombs / "a.npz").unlink()
    torch.save({**{k: torch.from_numpy(v) for k, v in good.items()}, "note": Bomb(mark)}, bombs / "a.pt")
    with pytest.raises(LabError, match="refused"):
        OfflineBuffer(spec.row_columns(), path=bombs, spec=spec)
    assert not mark.exists()


def test_zip_with_outside_path_writes_nothing(tmp_path: Path):
    file = tmp_path / "weights.pt"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("../../escaped/data.pkl", pickle.dumps({}))
        archive.writestr("archive/data.pkl", b"not a pickle")
    with pytest.raises(LabError):
        load_data(file)
    assert not (tmp_path.parent / "escaped").exists()


# ---------------------------------------------------------------- configs


@pytest.mark.parametrize(
    "target", ["os.system", "builtins.eval", "subprocess.Popen", "shutil.rmtree", "importlib.import_module"]
)
def test_stdlib_targets_are_refused(target: str):
    config = OmegaConf.create({"components": {"extra": [{"deep": {"_target_": target, "command": "x"}}]}})
    with pytest.raises(LabError, match=f"_target_ is '{target}', of Python's standard library"):
        check_targets(config)


def test_stdlib_targets_are_refused_in_all_configs(run: Path, tmp_path: Path, capsys):
    words = ["train", "debug=tiny", "logging.progress=off", f"run_dir={tmp_path / 'run'}"]
    assert main([*words, "+components.extra={_target_: os.system}"]) == 1
    assert "standard library" in capsys.readouterr().err
    copy = Path(shutil.copytree(run, tmp_path / "copy", symlinks=True))
    text = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(text + "extra:\n  deep:\n  - _target_: os.system\n    path: x\n")
    for verb in ("resume", "eval"):
        assert main([verb, str(copy)]) == 1, verb
        assert "standard library" in capsys.readouterr().err


def test_config_files_are_plain_yaml(run: Path, tmp_path: Path, capsys):
    copy = Path(shutil.copytree(run, tmp_path / "copy", symlinks=True))
    mark = tmp_path / "mark"
    text = f"\nextra: !!python/object/apply:os.mkdir ['{mark}']\n"
    (copy / "config.yaml").write_text((copy / "config.yaml").read_text() + text)
    assert main(["resume", str(copy)]) == 1 and "is damaged" in capsys.readouterr().err
    (tmp_path / "configs" / "experiment").mkdir(parents=True)
    (tmp_path / "configs" / "experiment" / "bad.yaml").write_text("# @package _global_\n" + text)
    assert main(["train", "experiment=bad"]) == 1
    assert not mark.exists()


# ---------------------------------------------------------------- media stay in the run folder


@pytest.mark.parametrize(
    "folder", ["..", "../..", "../checkpoints", "/tmp", "episodes/../../x", "link", "link/deep"]
)
def test_media_folder_stays_inside_media(tmp_path: Path, folder: str):
    outside = tmp_path / "outside"
    outside.mkdir()
    with ExperimentLogger(tmp_path / "run", tensorboard=False) as logger:
        (tmp_path / "run" / "media").mkdir(parents=True)
        (tmp_path / "run" / "media" / "link").symlink_to(outside)
        with pytest.raises(LabError, match="leads out of"):
            logger.image("x", np.zeros((3, 4, 4), np.uint8), step=1, folder=folder)
    assert list(outside.iterdir()) == []


def test_media_symlink_is_not_followed(tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "media").symlink_to(outside)
    with (
        ExperimentLogger(tmp_path / "run", tensorboard=False) as logger,
        pytest.raises(LabError, match="leads out of"),
    ):
        logger.video("x", np.zeros((2, 3, 4, 4), np.uint8), step=1)
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["../../up", "/etc/x", "a/../../b", "..", "", "x" * 500, "nul\0", "~/home", "a\nb"]
)
def test_media_names_are_sanitized(tmp_path: Path, name: str):
    with ExperimentLogger(tmp_path / "run", tensorboard=False) as logger:
        file = logger.image(name, np.zeros((3, 4, 4), np.uint8), step=1, folder="recordings")
    assert file is not None and file.parent == tmp_path / "run" / "media" / "recordings"
