"""Write requirements/*.lock: version and hashes of every package that `make demo` and `make test` install, but torch.

    python scripts/dev/lock.py            # after a change of constraints.txt or pyproject.toml; asks the package index
    python scripts/dev/lock.py --check    # 1, and what differs, when a lock does not fit them; needs no network

constraints.txt is the only place of versions. What a package needs is read from its metadata: from the installed one
where it is installed in that version, else through pip. The hashes are those of all files of a version on the index
that pip is configured with, so that a lock is the same on whatever machine it was written. A lock includes the one
before it (build, demo, dev) and has only what that one lacks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from html.parser import HTMLParser
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.requirements import Requirement
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)

CHECKOUT = Path(__file__).resolve().parents[2]
LOCKS = ("build", "demo", "dev")
PYTHONS = ("3.11", "3.12")
# Its file differs between machines with and without CUDA. What only its CUDA build needs, it pins itself; a lock that
# was written where that build is installed must be the same.
WITHOUT_HASH = "torch"
OF_CUDA = re.compile(r"triton|(cuda|nvidia)-.+")  # as far as constraints.txt has them
RUN = "run scripts/dev/lock.py"

Pins = dict[str, Requirement]
Locked = dict[str, tuple[Requirement, list[str]]]  # by name; the hashes as sha256:…
Needs = Callable[[set[str]], dict[str, list[Requirement]]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; name what differs")
    parser.add_argument("--root", type=Path, default=CHECKOUT, help="the checkout; this one if not given")
    options = parser.parse_args(argv)
    if options.check:
        found = differences(options.root)
        print("\n".join(found) or "the locks fit constraints.txt and pyproject.toml")
        return 1 if found else 0
    write(options.root)
    return 0


def write(root: Path) -> None:
    pins = read_pins(root)
    known: dict[str, list[Requirement]] = {}

    def needs(names: set[str]) -> dict[str, list[Requirement]]:
        known.update(installed(pins, names))
        missing = sorted(names - known.keys())
        known.update(from_pip(root, pins, missing) if missing else {})
        return known

    contents, wrong = wanted(root, pins, needs)
    if wrong:
        raise SystemExit("\n".join(wrong))
    names = sorted({name for content in contents.values() for name in content})
    index = index_url()
    with ThreadPoolExecutor(8) as pool:
        hashes = dict(zip(names, pool.map(lambda name: hashes_of(index, pins[name]), names)))
    (root / "requirements").mkdir(exist_ok=True)
    for lock, content in contents.items():
        text = lock_text(lock, content, pins, hashes)
        lock_file(root, lock).write_text(text)
        print(f"requirements/{lock}.lock: {len(content)} packages, {text.count('--hash=')} hashes")


def differences(root: Path) -> list[str]:
    """What in the locks does not fit constraints.txt and pyproject.toml, as far as installed metadata tell."""
    pins = read_pins(root)
    unknown: set[str] = set()

    def needs(names: set[str]) -> dict[str, list[Requirement]]:
        known = installed(pins, names)
        unknown.update(names - known.keys())
        return known

    contents, found = wanted(root, pins, needs)
    before: set[str] = set()  # what an unknown package needs may seem to belong in a later lock
    for lock, content in contents.items():
        name = f"requirements/{lock}.lock"
        if not lock_file(root, lock).is_file():
            found.append(f"{name}: missing; {RUN}")
            continue
        locked = read_lock(lock_file(root, lock))
        for package, (requirement, hashes) in locked.items():
            if package == WITHOUT_HASH:
                found.append(f"{name}: {package} has its version in constraints.txt only; {RUN}")
            elif package not in pins:
                found.append(f"{name}: {package} is not in constraints.txt; {RUN}")
            elif requirement.specifier != pins[package].specifier:
                versions = f"{requirement.specifier} here, {pins[package].specifier} in constraints.txt"
                found.append(f"{name}: {package} is {versions}; {RUN}")
            elif not unknown and package not in content:
                found.append(f"{name}: nothing needs {package}; {RUN}")
            elif not unknown and str(requirement.marker or "") != marker(content[package]):
                found.append(f"{name}: {package} is needed on Python {', '.join(content[package])}; {RUN}")
            if not hashes:
                found.append(f"{name}: {package} has no hash; {RUN}")
        before |= locked.keys()
        found += [f"{name}: {package} is missing; {RUN}" for package in content if package not in before]
    return found


# ---------------------------------------------------------------- what is needed


def read_pins(root: Path) -> Pins:
    """The lines of constraints.txt by canonical name."""
    lines = [line.split(" #")[0].strip() for line in (root / "constraints.txt").read_text().splitlines()]
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    for pin in pins:
        if not re.fullmatch(r"==[^,*]+", str(pin.specifier)):
            raise SystemExit(f"constraints.txt: {pin} is not one exact version; write {pin.name}==VERSION")
    return {canonicalize_name(pin.name): pin for pin in pins}


def version(pin: Requirement) -> str:
    return str(pin.specifier).removeprefix("==")


def roots_of(root: Path, lock: str) -> list[Requirement]:
    """What pyproject.toml asks for: of the build, or of the core and an extra."""
    declared = tomllib.loads((root / "pyproject.toml").read_text())
    if lock == "build":
        return [Requirement(line) for line in declared["build-system"]["requires"]]
    project = declared["project"]
    found: list[Requirement] = []
    todo = [Requirement(line) for line in project["dependencies"]]
    todo += [Requirement(line) for line in project["optional-dependencies"][lock]]
    while todo:
        requirement = todo.pop()
        if canonicalize_name(requirement.name) != canonicalize_name(project["name"]):
            found.append(requirement)
            continue
        for extra in requirement.extras:
            todo += [Requirement(line) for line in project["optional-dependencies"][extra]]
    return found


def wanted(root: Path, pins: Pins, needs: Needs) -> tuple[dict[str, dict[str, list[str]]], list[str]]:
    """The packages of each lock with the Pythons that need them, and what is wrong with constraints.txt."""
    contents: dict[str, dict[str, list[str]]] = {}
    wrong: list[str] = []
    before: set[tuple[str, str]] = set()
    for lock in LOCKS:
        contents[lock] = {}
        for python in PYTHONS:
            names, errors = closure(roots_of(root, lock), pins, needs, environment(python))
            wrong += [error for error in errors if error not in wrong]
            for name in sorted(names - {WITHOUT_HASH}):
                if (name, python) not in before:
                    contents[lock].setdefault(name, []).append(python)
                    before.add((name, python))
    return contents, wrong


def closure(
    roots: list[Requirement], pins: Pins, needs: Needs, env: dict[str, str]
) -> tuple[set[str], list[str]]:
    """Names of all packages that the roots need in an environment, and what is wrong with the pins."""
    seen: set[tuple[str, str]] = set()  # package and extra
    wrong: list[str] = []
    level = [("pyproject.toml", requirement) for requirement in roots if applies(requirement, env, "")]
    while level:
        items: set[tuple[str, str]] = set()
        for user, requirement in level:
            name = canonicalize_name(requirement.name)
            if user == WITHOUT_HASH and (name not in pins or OF_CUDA.fullmatch(name)):
                continue
            pin = pins.get(name)
            if pin is None or not applies(pin, env, ""):
                wrong.append(f"constraints.txt: no version of {name}, which {user} needs; add one")
                continue
            if not requirement.specifier.contains(version(pin), prereleases=True):
                wrong.append(f"constraints.txt: {pin} does not fit {user}, which needs {requirement}")
            items |= {(name, extra) for extra in ("", *requirement.extras)}
        items -= seen
        seen |= items
        requirements = needs({name for name, _ in items})
        level = [
            (name, requirement)
            for name, extra in sorted(items)
            for requirement in requirements.get(name, [])
            if applies(requirement, env, extra)
        ]
    return {name for name, _ in seen}, wrong


def environment(python: str) -> dict[str, str]:
    """The values of markers on Linux. The first release of a Python needs the most packages."""
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_name": "cpython",
        "implementation_version": f"{python}.0",
        "platform_python_implementation": "CPython",
        "os_name": "posix",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
    }


def applies(requirement: Requirement, env: dict[str, str], extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({**env, "extra": extra})


def installed(pins: Pins, names: Iterable[str]) -> dict[str, list[Requirement]]:
    """What packages need, for those that are installed in the version of constraints.txt."""
    found = {}
    for name in names:
        package = read_metadata(name)
        if package is not None and pins[name].specifier.contains(package[0], prereleases=True):
            found[name] = package[1]
    return found


@cache
def read_metadata(name: str) -> tuple[str, list[Requirement]] | None:
    """Version and requirements of an installed package."""
    try:
        package = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    return package.version, [Requirement(line) for line in package.requires or []]


def from_pip(root: Path, pins: Pins, names: list[str]) -> dict[str, list[Requirement]]:
    """What packages need, from the files that pip would install."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--dry-run",
            "--no-deps",
            "--ignore-installed",
        ]
        command += ["--report", str(report), *(f"{name}=={version(pins[name])}" for name in names)]
        # For builds. Relative: pip splits the variable at spaces.
        result = subprocess.run(command, cwd=root, env={**os.environ, "PIP_CONSTRAINT": "constraints.txt"})
        if result.returncode:
            raise SystemExit(f"constraints.txt: pip cannot get {', '.join(names)}; its message is above")
        files = [file["metadata"] for file in json.loads(report.read_text())["install"]]
    return {
        canonicalize_name(file["name"]): [Requirement(line) for line in file.get("requires_dist", [])]
        for file in files
    }


# ---------------------------------------------------------------- hashes of the index


def index_url() -> str:
    """The index that pip uses: its help has the value from environment and configuration, or its own default."""
    command = [sys.executable, "-m", "pip", "install", "--help"]
    text = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "1000"}
    ).stdout
    match = re.search(r"--index-url\b.*?\(default:? ([^\s)]+)\)", text)
    if match is None or "****" in match[1]:
        raise SystemExit(
            "PIP_INDEX_URL: pip hides the index or its password; set an index without a password"
        )
    return match[1].rstrip("/")


class Links(HTMLParser):
    """File names and sha256 of an index page in HTML."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.files: list[dict[str, Any]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        link = urlsplit(dict(attrs).get("href") or "") if tag == "a" else None
        if link is not None:
            kind, _, digest = link.fragment.partition("=")
            self.files.append({"filename": unquote(link.path.rsplit("/", 1)[-1]), "hashes": {kind: digest}})


def hashes_of(index: str, pin: Requirement) -> list[str]:
    """The sorted hashes of all wheels and source archives that the index has of a version."""
    name, exact = canonicalize_name(pin.name), version(pin)
    accepted = (
        "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
    )
    request = urllib.request.Request(f"{index}/{name}/", headers={"Accept": accepted})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            page, kind = answer.read().decode(), answer.headers.get_content_type()
    except urllib.error.URLError as error:
        raise SystemExit(f"{name}: the package index does not answer ({error}); try again") from None
    listed = json.loads(page)["files"] if kind.endswith("json") else Links(page).files
    files = [file for file in listed if pin.specifier.contains(file_version(file["filename"]) or "0", True)]
    hashes = [file["hashes"].get("sha256", "") for file in files]
    if not files or not all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in hashes):
        raise SystemExit(f"{name}: the package index has no files, or no hashes, of version {exact}")
    return sorted({f"sha256:{digest}" for digest in hashes})


def file_version(filename: str) -> str | None:
    """None for files that pip does not install."""
    try:
        parse = parse_wheel_filename if filename.endswith(".whl") else parse_sdist_filename
        return str(parse(filename)[1])
    except (InvalidWheelFilename, InvalidSdistFilename):
        return None


# ---------------------------------------------------------------- the files


def lock_file(root: Path, lock: str) -> Path:
    return root / "requirements" / f"{lock}.lock"


def marker(pythons: list[str]) -> str:
    """Empty where every Python needs it."""
    every = len(pythons) == len(PYTHONS)
    return "" if every else " or ".join(f'python_version == "{python}"' for python in pythons)


def lock_text(lock: str, content: dict[str, list[str]], pins: Pins, hashes: dict[str, list[str]]) -> str:
    asked = "building a package" if lock == "build" else f"`.[{lock}]`"
    included = LOCKS[: LOCKS.index(lock)][-1:]
    lines = [
        f"# What {asked} needs on Linux with Python {' and '.join(PYTHONS)}, by the hashes of all files of a version.",
        "# scripts/dev/lock.py writes this file from pyproject.toml and constraints.txt: change versions there.",
        f"# {WITHOUT_HASH} is not here, as its file differs between machines: constraints.txt has its version.",
        f"# To install: pip install --require-hashes --no-deps -r requirements/{lock}.lock (`make` does).",
        *(f"-r {other}.lock" for other in included),
    ]
    for name in sorted(content):
        condition = marker(content[name])
        first = f"{name}=={version(pins[name])}" + (f" ; {condition}" if condition else "")
        lines.append(" \\\n    ".join([first, *(f"--hash={digest}" for digest in hashes[name])]))
    return "\n".join(lines) + "\n"


def read_lock(file: Path) -> Locked:
    """The packages of one lock, without those of the lock it includes."""
    found: Locked = {}
    for line in file.read_text().replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith(("#", "-r ")):
            requirement, *hashes = line.split("--hash=")
            parsed = Requirement(requirement)
            found[canonicalize_name(parsed.name)] = (parsed, [digest.strip() for digest in hashes])
    return found


if __name__ == "__main__":
    sys.exit(main())
