"""One version everywhere; (extras) wheel and sdist hold what users need, and work without a checkout."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import rl_lab

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_version_is_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "rl_lab.__version__"}
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == rl_lab.__version__
    assert f"## [{rl_lab.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_call_what_exists(file: Path):
    content = yaml.safe_load(file.read_text())
    steps = [step for job in content["jobs"].values() for step in job["steps"]]
    ours = {"bash .ci/run", "make docs"} & {step.get("run", "") for step in steps}
    assert ours and (ROOT / ".ci" / "run").is_file()
    assert content["permissions"] == {"contents": "read"}  # a job that publishes asks for more itself


def test_issue_forms_are_complete():
    forms = [file for file in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if file.stem != "config"]
    assert len(forms) == 3
    for file in forms:
        form = yaml.safe_load(file.read_text())
        assert {"name", "description", "body"} <= form.keys() and form["body"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    work = tmp_path_factory.mktemp("release")
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, tracked.stdout.split("\0")):
        if (ROOT / name).is_file():
            (work / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, work / "source" / name)
    (work / "dist").mkdir()
    build = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"

    def run(what: str, folder: Path) -> None:
        command = [sys.executable, "-c", build, what, str(work / "dist")]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]

    run("build_sdist", work / "source")
    (sdist,) = (work / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "unpacked")
    run("build_wheel", next((work / "unpacked").iterdir()))
    return work / "dist"


@pytest.mark.extras
def test_wheel_and_sdist_hold_what_users_need(built: Path):
    (wheel,) = built.glob("*.whl")
    (sdist,) = built.glob("*.tar.gz")
    assert wheel.name.startswith(f"rl_lab_wm-{rl_lab.__version__}-py3-none-any")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()} - {""}
    package = {
        file.relative_to(ROOT).as_posix()
        for pattern in ("*.py", "*.yaml", "*.html", "py.typed")
        for file in (ROOT / "rl_lab").rglob(pattern)
    }
    package |= {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "rl_lab" / "agents").rglob("*")
        if file.is_file()
    }
    assert package <= in_wheel and package <= in_sdist
    assert all(name.startswith("rl_lab/") for name in in_wheel)
    for folder in ("tests", "docs", "benchmarks", "scripts", "examples", "requirements", ".github"):
        assert not [name for name in in_sdist if name == folder or name.startswith(f"{folder}/")]
    assert {"LICENSE", "README.md", "pyproject.toml"} <= in_sdist


@pytest.mark.extras
def test_installed_wheel_works_without_a_checkout(built: Path, tmp_path: Path):
    """A clean environment: dependencies come from this one, the package only from the wheel."""
    clean = tmp_path / "clean"
    venv.create(clean, with_pip=False)
    libraries = Path(sysconfig.get_path("purelib", vars={"base": str(clean), "platbase": str(clean)}))
    # A path line adds a folder without running the .pth files in it, so the checkout is not found.
    (libraries / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    (wheel,) = built.glob("*.whl")
    quiet = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--ignore-installed"]
    python = clean / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", *quiet, str(wheel)], check=True)
    work = tmp_path / "work"
    work.mkdir()
    environ = {**os.environ, "PYTHONPATH": "", "SDL_VIDEODRIVER": "dummy"}

    def rl(*words: str) -> str:
        command = [str(clean / "bin" / "rl-lab"), *words]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, env=environ)
        assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    where = subprocess.run(
        [python, "-c", "import rl_lab; print(rl_lab.__file__)"],
        cwd=work,
        capture_output=True,
        text=True,
        env=environ,
    )
    assert Path(where.stdout.strip()).is_relative_to(clean)
    assert rl("--version").strip() == rl_lab.__version__
    assert "pip install rl-lab-wm" in rl("doctor").replace("'", "").replace('"', "") or "ok" in rl("doctor")
    rl("train", "debug=tiny", "run_dir=run", "logging.progress=off")
    assert "return" in rl("eval", "run", "--episodes", "2")
    rl("report", "run")
    rl("report", "run", "--dream")
    assert list(work.glob("run/report/*.html"))
    rl("play", "run", "--steps", "5")
    rl("play", "example://bounce", "-w", "--video", "--steps", "5")
    command = [str(clean / "bin" / "rl-lab"), "play", "example://catch", "-w", "--web", "--port", "0"]
    with subprocess.Popen(command, cwd=work, env=environ, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = next(line.split()[-1] for line in server.stdout if "http://" in line)
        assert b"<title>" in urllib.request.urlopen(address, timeout=20).read()
        server.terminate()
    rl("export", "run", "--episodes", "2", "--starts", "2")
    assert (work / "run" / "export" / "agent.safetensors").is_file()


def settings_of_pip() -> dict[str, str]:
    """Return pip's indexes as variables of uv, which does not read pip's configuration."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True)
    lines = [line.partition("=") for line in listed.stdout.splitlines()]
    # The environment replaces what is in files.
    values = {
        name.rpartition(".")[2]: " ".join(ast.literal_eval(text).split())
        for name, _, text in sorted(lines, key=lambda line: line[0].startswith(":env:"))
    }
    names = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS"}
    settings = {names[name]: value for name, value in values.items() if name in names}
    if "find-links" in values:
        settings["UV_FIND_LINKS"] = values["find-links"].replace(" ", ",")
    # pip takes the best version of all indexes. Without an own index the build of torch without CUDA is enough.
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", **(settings or {"UV_TORCH_BACKEND": "cpu"})}


@pytest.mark.extras
@pytest.mark.timeout(1200)
def test_uv_installs_a_checkout_with_the_pinned_versions(built: Path, tmp_path: Path):
    pytest.importorskip("uv")
    uv = [sys.executable, "-m", "uv", "--no-config", "--quiet"]
    source, clean = built.parent / "source", tmp_path / "clean"
    environ = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
    environ |= settings_of_pip()
    python = clean / "bin" / "python"
    constraints = ["-c", "constraints.txt", "--build-constraints", "constraints.txt"]
    for words in (
        ["venv", "--python", sys.executable, str(clean)],
        ["pip", "install", "--python", str(python), *constraints, "-e", "."],
    ):
        done = subprocess.run([*uv, *words], cwd=source, capture_output=True, text=True, env=environ)
        assert done.returncode == 0, done.stderr[-3000:]
    show = "import torch, rl_lab; print(torch.__version__.partition('+')[0], rl_lab.__file__)"
    done = subprocess.run([python, "-c", show], cwd=tmp_path, capture_output=True, text=True, env=environ)
    version, file = done.stdout.split()
    assert f"torch=={version}" in (source / "constraints.txt").read_text().split()
    assert Path(file).is_relative_to(source)
    command = [str(clean / "bin" / "rl-lab"), "train", "debug=tiny", "run_dir=run", "logging.progress=off"]
    # Only `demo` has the package that draws CartPole, so the dummy environment.
    done = subprocess.run(
        [*command, "environment=dummy_discrete"], cwd=tmp_path, capture_output=True, text=True, env=environ
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "run" / "metrics.jsonl").is_file()
    shutil.rmtree(clean)  # a gigabyte
