"""pip gets this project and never the one that is called rl-lab on the package index."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import rl_lab
from rl_lab import errors as install
from rl_lab import make_env
from rl_lab.errors import DISTRIBUTION, FORMER_NAME, LabError, install_line
from rl_lab.tools.doctor import AUTHORS

ROOT = Path(rl_lab.__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PLACES = ("rl_lab", "docs", "examples", "scripts", "notebooks", "benchmarks", "tests")
FILES = ("README.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml", "requirements.txt", "constraints.txt")
TEXTS = {".py", ".md", ".sh", ".toml", ".txt", ".yaml", ".yml", ".ipynb", ".html", ".cfg", ".json"}
HISTORY = {ROOT / "docs" / "log.md", Path(__file__).resolve()}
# The name alone: not a part of another name, of a path or of an address.
FETCHES = re.compile(r"\b(?:pipx? install|uv add)\b[^\n`;&|]*?(?<![\w./-])rl[-_.]lab(?![\w./-])", re.I)


def texts() -> list[Path]:
    found = [file for place in PLACES for file in (ROOT / place).rglob("*") if file.suffix in TEXTS]
    found = [file for file in found if file.is_file() and not {"outputs", "build"} & set(file.parts)]
    return [file for file in [*found, *(ROOT / name for name in FILES)] if file not in HISTORY]


def test_metadata_name():
    assert PROJECT["name"] == DISTRIBUTION and PROJECT["authors"] == [{"name": AUTHORS}]
    assert PROJECT["scripts"] == {"rl-lab": "rl_lab.cli:main"}
    assert canonicalize_name(DISTRIBUTION) == DISTRIBUTION != FORMER_NAME
    assert install.checkout() == ROOT


def test_no_requirement_on_other_project():
    example = tomllib.loads((ROOT / "examples" / "extension" / "pyproject.toml").read_text())["project"]
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values(), example["dependencies"]]
    names = [canonicalize_name(Requirement(line).name) for lines in groups for line in lines]
    assert (
        FORMER_NAME not in names and names.count(DISTRIBUTION) == 6
    )  # lerobot, play, extras, demo, dev; the example


def test_no_text_installs_other_project():
    files = texts()
    assert len(files) > 300 and ROOT / "README.md" in files and ROOT / "rl_lab" / "cli.py" in files
    for file in files:
        for line in file.read_text(errors="replace").splitlines():
            assert not FETCHES.search(line), f"{file.relative_to(ROOT)}: {line.strip()[:200]}"


@pytest.mark.parametrize(
    ("line", "fetches"),
    [
        ('pip install "rl-lab[atari]"', True),
        ("pip install rl-lab", True),
        ("python -m pip install -U 'rl_lab[play,video]'", True),
        ("pip install numpy rl.lab==0.1.0", True),
        ("pip install 'rl-lab-wm[atari]'", False),
        ("pip install -e '.[atari]' && rl-lab doctor", False),
        ("pip install -e '/home/me/rl-lab[atari]'", False),
        ("pip uninstall -y rl-lab && pip install -e .", False),
    ],
)
def test_install_line_detection(line: str, fetches: bool):
    assert bool(FETCHES.search(line)) == fetches


def test_install_line_path_depends_on_current_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert install_line("atari") == "pip install -e '.[atari]'"
    assert install_line() == install_line(again=True) == "pip install -e ."
    monkeypatch.chdir(tmp_path)
    assert shlex.split(install_line("atari")) == ["pip", "install", "-e", f"{ROOT}[atari]"]
    assert install_line("atari").endswith("[atari]'")


def test_path_with_spaces_is_quoted(monkeypatch, tmp_path):
    root = tmp_path / "the lab's copy"
    (root / "rl_lab").mkdir(parents=True)
    (root / "pyproject.toml").write_text(f'[project]\nname = "{DISTRIBUTION}"\n')
    monkeypatch.setattr(install, "PACKAGE", root / "rl_lab")
    assert shlex.split(install_line("zstd"))[-1] == f"{root}[zstd]"


def test_install_line_in_deleted_folder(monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert str(ROOT) in install_line("atari")


def test_install_line_without_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(install, "PACKAGE", tmp_path / "rl_lab")
    assert install_line("atari") == f"pip install '{DISTRIBUTION}[atari]'"
    assert install_line() == f"pip install {DISTRIBUTION}"
    # After `pip uninstall` of a package that shared files with ours, pip still takes ours for installed.
    assert install_line(again=True) == f"pip install --force-reinstall --no-deps {DISTRIBUTION}"
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "{FORMER_NAME}"\n')
    assert install.checkout() is None, "a source tree of another project"


def ask_cma() -> None:
    from rl_lab.components.controllers.cma_es import CMAES

    strategy = CMAES(population=4)
    strategy.start(torch.zeros(3), seed=0)
    strategy.ask()


def open_window() -> None:
    from rl_lab.tools.play.desktop import Window

    Window(None, "title")  # type: ignore[arg-type]


def read_mp4() -> None:
    from rl_lab.tools.play.episodes import read_video

    read_video(Path("film.mp4"))


@pytest.mark.parametrize(
    ("act", "module", "extra"),
    [
        (ask_cma, "cma", "evolution"),
        (open_window, "pygame", "play"),
        (lambda: importlib.import_module("rl_lab.tools.play.web"), "uvicorn", "play"),
        (read_mp4, "imageio_ffmpeg", "video"),
        (lambda: make_env("carracing/continuous", backend="envpool"), "envpool", "envpool"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_missing_package_shows_install_command(act: Callable[[], None], module, extra, monkeypatch):
    for name in ("rl_lab.tools.play.web", *(name for name in sys.modules if name.startswith(f"{module}."))):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, module, None)  # what importing then raises is ModuleNotFoundError
    with pytest.raises(LabError, match=re.escape(f": {install_line(extra)}")):
        act()


def test_extras_in_messages_exist():
    named = {}
    for file in (ROOT / "rl_lab").rglob("*.py"):
        for extra in re.findall(r"install_line\(['\"]([\w-]+)['\"]\)", file.read_text()):
            named.setdefault(extra, file.name)
    assert {"zstd", "evolution", "hf", "envpool", "track", "play", "video"} <= set(named)
    assert set(named) <= set(PROJECT["optional-dependencies"]), named


def test_an_editable_install_is_a_path_that_editors_read(tmp_path):
    """An import hook (setuptools' default for this layout) is invisible to pyright, mypy and VS Code."""
    root = Path(__file__).parents[2]
    project = tmp_path / "project"
    (project / "rl_lab").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, project)
    for name in ("__init__.py", "py.typed"):
        shutil.copy(root / "rl_lab" / name, project / "rl_lab")
    code = "from setuptools import build_meta; print(build_meta.build_editable('.'))"
    built = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(project / built.stdout.split()[-1]) as wheel:
        paths = [name for name in wheel.namelist() if name.endswith(".pth")]
        assert not [name for name in wheel.namelist() if name.endswith(".py")]
        assert [wheel.read(name).decode().strip() for name in paths] == [str(project)]
