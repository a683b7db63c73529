"""A failed start and clean-up never delete files of the user, in run_dir or in a sweep folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rl_lab.cli import main
from rl_lab.errors import ConfigError, LabError
from rl_lab.run_folder import RunFolder, code_state
from rl_lab.training import resume, train

FAILURES = {
    "sampler": "algorithm.sampler=zzz",
    "precision": "training.precision=float16",
    "load": "load.path=/nonexistent",
    "capacity": "buffers.replay.capacity=1",
    "wandb": "wandb.mode=online",
}
TINY = ["debug=tiny", "logging.progress=off", "logging.tensorboard=false"]


def users_files(folder: Path) -> dict[str, str]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "main.py").write_text("x")
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("ref")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "thesis.txt").write_text("years of work")
    return contents(folder)


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text(errors="replace")
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def no_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES.keys())
@pytest.mark.parametrize("place", ["dot", "existing", "home"])
def test_files_in_run_dir_survive_a_failed_start(
    place: str, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_wandb: None
) -> None:
    folder = tmp_path / "proj"
    before = users_files(folder)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(folder if place == "dot" else tmp_path)
    run_dir = {"dot": ".", "existing": str(folder), "home": "'~'"}[place]
    with pytest.raises(ConfigError, match=r"^run_dir=.* is not empty and is not a run folder"):
        train(None, [*TINY, f"run_dir={run_dir}", failure])
    assert contents(folder) == before


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES.keys())
def test_failed_start_removes_only_its_files(failure: str, tmp_path: Path, no_wandb: None) -> None:
    (tmp_path / "empty").mkdir()
    for run_dir in (tmp_path / "new" / "run", tmp_path / "empty"):
        with pytest.raises(LabError):
            train(None, [*TINY, f"run_dir={run_dir}", failure])
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "empty").is_dir() and contents(tmp_path) == {}


def test_new_user_file_survives_failed_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create = RunFolder.create

    def create_and_add(self: RunFolder, *arguments: object) -> None:
        create(self, *arguments)  # type: ignore[arg-type]
        (self.path / "notes.txt").write_text("mine")
        (self.path / "media" / "photo.txt").write_text("mine")

    monkeypatch.setattr(RunFolder, "create", create_and_add)
    with pytest.raises(LabError):
        train(None, [*TINY, f"run_dir={tmp_path / 'run'}", FAILURES["sampler"]])
    assert contents(tmp_path) == {"run/notes.txt": "mine", "run/media/photo.txt": "mine"}


@pytest.mark.parametrize("failure", [FAILURES["sampler"], FAILURES["load"]])
def test_sweep_keeps_user_folders(failure: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = users_files(tmp_path / "0")
    words = ["train", "-m", *TINY, f"hydra.sweep.dir={tmp_path}", "experiment.seed=0,1", failure]
    assert main(words) == 1
    assert "is not empty and is not a run folder" in capsys.readouterr().err
    assert contents(tmp_path / "0") == before
    assert not (tmp_path / "1").exists()


def test_killed_start_can_be_repeated(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.make()
    (run.path / ".lock").write_text("{}")
    (run.path / "config").mkdir()
    run.check_free()
    (run.path / "thesis.txt").write_text("x")
    with pytest.raises(ConfigError, match="is not empty"):
        run.check_free()


def test_run_dir_must_not_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"^run_dir="):
        train(None, [*TINY, f"run_dir={tmp_path / 'file'}"])
    assert (tmp_path / "file").read_text() == "x"


def _git(folder: Path, *words: str) -> None:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    subprocess.run(command, check=True, capture_output=True)


def _package_in_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, tracked: bool) -> Path:
    """Create a repository with a copy of rl_lab's folder, and let `code_state` use it."""
    package = tmp_path / "rl_lab"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (tmp_path / "secret.txt").write_text("old")
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", "secret.txt", *(["rl_lab"] if tracked else []))
    _git(tmp_path, "commit", "-q", "-m", "first")
    monkeypatch.setattr("rl_lab.run_folder.__file__", str(package / "run_folder.py"))
    return tmp_path / "secret.txt"


def test_code_state_ignores_foreign_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _package_in_repository(tmp_path, monkeypatch, tracked=False).write_text("password")
    assert "password" not in code_state() and "commit" not in code_state()


def test_code_state_accepts_non_utf8_diff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _package_in_repository(tmp_path, monkeypatch, tracked=True).write_bytes(b"caf\xe9 \xff\n")
    assert code_state().startswith("commit ") and "caf" in code_state()


def test_current_folder_is_last_on_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('shadowed')")
    (tmp_path / "yaml.py").write_text("raise SystemExit('shadowed')")
    code = (
        "import sys; sys.path.insert(0, ''); from rl_lab.cli import main; code = main(['list', 'sizes']); "
        "import os, queue, yaml; assert sys.path[-1] == os.getcwd() and sys.path[0] not in ('', os.getcwd()); sys.exit(code)"
    )
    root = str(Path(__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": root, "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_cleanup_keeps_user_files(tmp_path: Path) -> None:
    """A replay folder that the user moved to another disk, and other files, survive training and resume."""
    words = [*TINY, f"run_dir={tmp_path / 'run'}"]
    train("dreamer_cartpole", [*words, "training.total_timesteps=40"])
    checkpoints = tmp_path / "run" / "checkpoints"
    moved = tmp_path / "disk" / "replay"
    moved.parent.mkdir()
    (checkpoints / "replay").rename(moved)
    (checkpoints / "replay").symlink_to(moved)
    (moved / "thesis.txt").write_text("years of work")
    (checkpoints / "notes.txt").write_text("mine")
    (checkpoints / ".hidden.tmp").write_text("mine")
    (tmp_path / "run" / "tensorboard").rmdir()
    (tmp_path / "run" / "tensorboard").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "events.out.tfevents.1").write_text("mine")
    kept = {path for path in moved.rglob("*") if path.is_file()}
    before = contents(tmp_path)
    with pytest.raises(LabError, match=r"is a link to .*, out of the run folder.*--trust"):
        resume(tmp_path / "run", ["training.total_timesteps=80"])
    assert contents(tmp_path) == before
    resume(tmp_path / "run", ["training.total_timesteps=80"], trust=True)
    assert kept <= set(moved.rglob("*"))
    assert (checkpoints / "notes.txt").exists() and (checkpoints / ".hidden.tmp").exists()
    assert (tmp_path / "disk" / "events.out.tfevents.1").read_text() == "mine"


def test_cleanup_deletes_unreferenced_replay_files(tmp_path: Path) -> None:
    words = [*TINY, f"run_dir={tmp_path / 'run'}", "training.checkpoint.every_env_steps=20"]
    train("dreamer_cartpole", [*words, "training.total_timesteps=40"])
    replay = tmp_path / "run" / "checkpoints" / "replay" / "replay"
    (replay / "thesis.txt").write_text("years of work")
    (replay / "tail-000000009999.pt").write_text("of a save that was killed")
    resume(tmp_path / "run", ["training.total_timesteps=160"])
    assert (replay / "thesis.txt").exists()
    assert not (replay / "tail-000000009999.pt").exists()
    assert len(list(replay.glob("tail-*.pt"))) <= 2  # training.checkpoint.keep
