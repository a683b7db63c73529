"""The locks have a hash for every file that `make` installs, and pip refuses a file with another one."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.loading import load_script

ROOT = Path(__file__).resolve().parents[1]


lock = load_script("dev/lock.py")
FILES = {name: ROOT / "requirements" / f"{name}.lock" for name in lock.LOCKS}


# ---------------------------------------------------------------- the files of the repository


@pytest.mark.parametrize("name", lock.LOCKS)
def test_every_package_has_hashes_and_the_version_of_constraints(name: str):
    pins = lock.read_pins(ROOT)
    locked = lock.read_lock(FILES[name])
    assert locked and "torch" not in locked
    for package, (requirement, hashes) in locked.items():
        assert requirement.specifier == pins[package].specifier, package
        assert hashes and all(re.fullmatch("sha256:[0-9a-f]{64}", digest) for digest in hashes), package


@pytest.mark.parametrize("name", lock.LOCKS)
def test_a_lock_is_what_the_script_writes_and_has_no_address(name: str):
    locked = lock.read_lock(FILES[name])
    hashes = {package: digests for package, (_, digests) in locked.items()}
    content = {
        package: [
            python
            for python in lock.PYTHONS
            if requirement.marker is None or requirement.marker.evaluate({"python_version": python})
        ]
        for package, (requirement, _) in locked.items()
    }
    text = FILES[name].read_text()
    assert lock.lock_text(name, content, lock.read_pins(ROOT), hashes) == text
    assert "://" not in text and "index" not in text


def environments() -> Iterator[dict[str, str]]:
    """Those the locks are for, and the running interpreter's if it is one of them."""
    for python in lock.PYTHONS:
        yield {**default_environment(), **lock.environment(python)}
    running = default_environment()
    if running["python_version"] in lock.PYTHONS and running["platform_system"] == "Linux":
        yield dict(running)


@pytest.mark.parametrize("name", ["demo", "dev"])
def test_all_that_the_extra_needs_is_in_the_lock_or_comes_with_torch(name: str):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = lock.LOCKS[: lock.LOCKS.index(name) + 1]
    locked = {package for included in names for package in lock.read_lock(FILES[included])}
    pins = lock.read_pins(ROOT)

    def visit(requirement: Requirement, environment: dict[str, str], seen: set[tuple[str, str]]) -> None:
        package = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (package, extra) in seen:
                continue
            seen.add((package, extra))
            if package == canonicalize_name(project["name"]):
                lines = extras[extra] if extra else project["dependencies"]
            else:
                lines = metadata.requires(package) or []
            for inner in map(Requirement, lines):
                if inner.marker is None or inner.marker.evaluate({**environment, "extra": extra}):
                    name = canonicalize_name(inner.name)
                    if package == "torch" and (name not in pins or name == "triton"):
                        continue  # of its CUDA build
                    visit(inner, environment, seen)

    for environment in environments():
        seen: set[tuple[str, str]] = set()
        visit(Requirement(f"{project['name']}[{name}]"), environment, seen)
        needed = {package for package, _ in seen} - {canonicalize_name(project["name"]), "torch"}
        assert len(needed) > 30 and needed <= locked, sorted(needed - locked)


def test_the_check_passes_here(capsys):
    assert lock.main(["--check"]) == 0
    assert "the locks fit" in capsys.readouterr().out


def test_make_installs_from_the_locks_on_the_pythons_they_are_for():
    text = (ROOT / "Makefile").read_text()
    used = re.findall(r"Linux-x86_64-(\d+\.\d+)\.%", text)
    assert tuple(used) == lock.PYTHONS
    assert "--require-hashes --no-deps --no-build-isolation" in text


# ---------------------------------------------------------------- what --check finds


def copy_of_the_files(folder: Path) -> Path:
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    return folder


def replace(file: str, pattern: str, text: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        before = (root / file).read_text()
        after = re.sub(pattern, text, before, count=1, flags=re.M)
        assert after != before
        (root / file).write_text(after)

    return change


RICH = r"^rich==\S+ \\\n(?:    --hash=.*\n)+"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace("constraints.txt", r"^rich==.*", "rich==12.0"), "rich==12.0 does not fit pyproject.toml"),
        (
            replace("constraints.txt", r"^rich==.*\n", ""),
            "constraints.txt: no version of rich, which pyproject",
        ),
        (replace("requirements/demo.lock", RICH, ""), "requirements/demo.lock: rich is missing; run scripts"),
        (replace("requirements/demo.lock", RICH, "rich==15.0.0\n"), "demo.lock: rich has no hash"),
        (replace("requirements/dev.lock", r"\Z", "torch==2.13.0\n"), "dev.lock: torch has its version in"),
        (replace("requirements/dev.lock", r"\Z", "left==1.0\n"), "dev.lock: left is not in constraints.txt"),
        (replace("requirements/dev.lock", r"\Z", "torchrl==0.14.1\n"), "dev.lock: nothing needs torchrl"),
        (
            replace("requirements/demo.lock", r"^(rich==\S+)", r'\1 ; python_version == "3.11"'),
            "on Python 3.11, 3.12",
        ),
        (
            replace("pyproject.toml", r'^    "rich>=13"', '    "rich>=13", "new"'),
            "no version of new, which pyproject",
        ),
        (replace("pyproject.toml", r'^    "rich>=13"', '    "zstandard"'), "demo.lock: zstandard is missing"),
        (lambda root: (root / "requirements" / "dev.lock").unlink(), "requirements/dev.lock: missing; run"),
    ],
)
def test_the_check_names_what_differs(change: Callable[[Path], None], message: str, tmp_path, capsys):
    root = copy_of_the_files(tmp_path)
    change(root)
    assert lock.main(["--check", "--root", str(root)]) == 1
    assert message in capsys.readouterr().out


def test_a_new_version_that_is_not_installed_gives_one_message(tmp_path):
    root = copy_of_the_files(tmp_path)
    replace("constraints.txt", r"^rich==.*", "rich==15.0.1")(root)
    here = lock.read_lock(FILES["demo"])["rich"][0].specifier
    assert lock.differences(root) == [
        f"requirements/demo.lock: rich is {here} here, ==15.0.1 in constraints.txt; run scripts/dev/lock.py"
    ]


def test_constraints_must_be_exact_versions(tmp_path):
    (tmp_path / "constraints.txt").write_text("# a comment\nnumpy==2.4.6\nrich>=13  # not exact\n")
    with pytest.raises(SystemExit, match=r"constraints\.txt: rich>=13 is not one exact version"):
        lock.read_pins(tmp_path)


# ---------------------------------------------------------------- how a lock is made


def parse(*lines: str) -> list[Requirement]:
    return [Requirement(line) for line in lines]


def test_the_closure_follows_extras_markers_and_pins():
    pins = {pin.name: pin for pin in parse("a==1", "b==2", "c==3", "d==4", "torch==5", "e==6", "triton==7")}
    needs = {
        "a": parse("b; extra == 'more'", "c; python_version < '3.12'", "d; sys_platform == 'win32'"),
        "torch": parse("e", "triton==7", "nvidia-nccl-cu13==8", "another-build==9"),
        "b": parse("a"),
    }
    answers = {
        python: lock.closure(
            parse("a[more]", "torch"),
            pins,
            lambda names: {name: needs.get(name, []) for name in names},
            lock.environment(python),
        )
        for python in lock.PYTHONS
    }
    assert answers == {"3.11": ({"a", "b", "c", "torch", "e"}, []), "3.12": ({"a", "b", "torch", "e"}, [])}
    assert lock.marker(["3.11"]) == 'python_version == "3.11"' and lock.marker(["3.11", "3.12"]) == ""


def test_a_pin_that_a_package_does_not_accept_is_named():
    pins = {pin.name: pin for pin in parse("a==1", "b==2")}
    _, wrong = lock.closure(
        parse("a"),
        pins,
        lambda names: {"a": parse("b<2", "c")} if "a" in names else {},
        lock.environment("3.11"),
    )
    assert wrong == [
        "constraints.txt: b==2 does not fit a, which needs b<2",
        "constraints.txt: no version of c, which a needs; add one",
    ]


DIGESTS = {
    "some_name-1.0-py3-none-any.whl": "b" * 64,
    "some-name-1.0.tar.gz": "a" * 64,
    "some_name-1.0.1-py3-none-any.whl": "c" * 64,
    "some_name-1.0-py2.7.egg": "d" * 64,
}


class Index(http.server.BaseHTTPRequestHandler):
    """Answers in JSON to /json/some-name/, without hashes at /bare/, else in HTML."""

    def do_GET(self) -> None:
        folder, name = self.path.strip("/").split("/")
        digests = dict.fromkeys(DIGESTS, "") if folder == "bare" else DIGESTS
        if name != "some-name":
            return self.send_error(404)
        if folder == "json":
            kind = "application/vnd.pypi.simple.v1+json"
            page = json.dumps(
                {"files": [{"filename": f, "hashes": {"sha256": d}} for f, d in digests.items()]}
            )
        else:
            kind = "text/html"
            page = "".join(f'<a href="../../files/{f}#sha256={d}">{f}</a>' for f, d in digests.items())
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(page.encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def index() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_all_files_of_one_version_are_hashed_from_either_kind_of_index(index: str, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    for kind in ("json", "html"):
        found = lock.hashes_of(f"{index}/{kind}", Requirement("Some_Name==1.0"))
        assert found == ["sha256:" + "a" * 64, "sha256:" + "b" * 64]
    with pytest.raises(
        SystemExit, match=r"some-name: the package index has no files, or no hashes, of version 1\.0"
    ):
        lock.hashes_of(f"{index}/bare", Requirement("some-name==1.0"))
    with pytest.raises(SystemExit, match=r"version 2\.0"):
        lock.hashes_of(f"{index}/json", Requirement("some-name==2.0"))
    with pytest.raises(SystemExit, match="other: the package index does not answer"):
        lock.hashes_of(f"{index}/json", Requirement("other==1.0"))


def test_the_index_is_the_one_of_pip(monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "https://packages.example/a-long-name/simple/")
    assert lock.index_url() == "https://packages.example/a-long-name/simple"


def test_pip_refuses_a_file_with_another_hash(tmp_path):
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.py", "")
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr(
            "tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    right = hashlib.sha256(wheel.read_bytes()).hexdigest()
    wrong = right[:-1] + ("0" if right[-1] != "0" else "1")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment["PIP_CONFIG_FILE"] = os.devnull  # no other place to find files
    processes = {}
    for digest in (right, wrong):
        pins = {"tiny": Requirement("tiny==1.0")}
        file = tmp_path / f"{digest}.lock"
        file.write_text(
            lock.lock_text("build", {"tiny": list(lock.PYTHONS)}, pins, {"tiny": [f"sha256:{digest}"]})
        )
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-index",
            "--find-links",
            str(tmp_path),
        ]
        command += ["--require-hashes", "--no-deps", "--target", str(tmp_path / digest), "-r", str(file)]
        processes[digest] = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
    output = {digest: process.communicate()[0] for digest, process in processes.items()}
    assert processes[right].returncode == 0 and (tmp_path / right / "tiny.py").is_file(), output[right]
    assert processes[wrong].returncode != 0 and not (tmp_path / wrong / "tiny.py").exists(), output[wrong]
    assert "DO NOT MATCH THE HASHES" in output[wrong] and right in output[wrong]
