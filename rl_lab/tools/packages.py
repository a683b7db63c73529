"""What the project says it needs, and what of it is installed. Metadata only: nothing is imported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from rl_lab.utils.install import DISTRIBUTION, FORMER_NAME, PACKAGE, checkout

if TYPE_CHECKING:
    from packaging.requirements import Requirement

AUTHORS = "The RL Lab authors"  # of pyproject.toml: every build of this project has it in its metadata


@dataclass
class Declared:
    """Requirements of the core, and of each extra."""

    core: list[Requirement] = field(default_factory=list)
    extras: dict[str, list[Requirement]] = field(default_factory=dict)

    def of_extra(self, name: str) -> list[Requirement]:
        """An extra's requirements, with extras of our own that it names written out."""
        found: list[Requirement] = []
        for requirement in self.extras[name]:
            if _canonical(requirement.name) == DISTRIBUTION:
                for inner in sorted(requirement.extras):
                    found += self.of_extra(inner)
            else:
                found.append(requirement)
        return found


@dataclass(frozen=True)
class Package:
    """One requirement and what was found for it."""

    name: str
    version: str | None  # None: not installed
    wanted: str  # the version specifier, "" for any
    fits: bool  # installed, and of a version that was asked for


def declared() -> Declared:
    """From pyproject.toml in a checkout (an editable install's metadata grows old), else from the metadata."""
    root = checkout()
    if root is not None:
        import tomllib

        project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
        extras = project.get("optional-dependencies", {})
        return Declared(
            core=_parse(project["dependencies"]),
            extras={name: _parse(lines) for name, lines in extras.items()},
        )
    try:
        found = metadata.metadata(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return Declared()
    requirements = _parse(metadata.requires(DISTRIBUTION) or [])
    core = [item for item in requirements if item.marker is None or item.marker.evaluate({"extra": ""})]
    result = Declared(core=core)
    for extra in found.get_all("Provides-Extra") or []:
        result.extras[extra] = [
            item
            for item in requirements
            if item not in core and item.marker is not None and item.marker.evaluate({"extra": extra})
        ]
    return result


def find(requirement: Requirement) -> Iterator[Package]:
    """The package itself, then what its own extras ask for (`gymnasium[box2d]` needs box2d)."""
    version = version_of(requirement.name)
    fits = version is not None and requirement.specifier.contains(version, prereleases=True)
    yield Package(requirement.name, version, str(requirement.specifier), fits)
    if version is None:
        return
    for inner in _parse(metadata.requires(requirement.name) or []):
        if inner.marker is None or inner.marker.evaluate({"extra": ""}):
            continue  # its plain dependencies came with it
        if any(inner.marker.evaluate({"extra": extra}) for extra in requirement.extras):
            yield from find(inner)


def version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Namesake:
    """Something installed under the name `rl-lab` that has a package rl_lab."""

    version: str
    folder: Path  # it is installed in
    ours: bool  # this project, from the time when it had that name
    over_ours: bool  # its rl_lab/__init__.py is the one of the running rl_lab


def namesakes() -> list[Namesake]:
    """What is installed as `rl-lab`, as far as Python can find it from here."""
    root = checkout()
    found: dict[Path, Namesake] = {}
    for item in metadata.distributions(name=FORMER_NAME):
        folder = Path(str(item.locate_file(""))).resolve()
        ours = item.metadata["Author"] == AUTHORS
        if folder in found or (
            ours and folder == root
        ):  # a build's *.egg-info in the source tree: no install
            continue
        modules = [file for file in item.files or [] if file.as_posix() == "rl_lab/__init__.py"]
        if ours or modules:
            over_ours = any(Path(str(file.locate())).resolve().parent == PACKAGE for file in modules)
            found[folder] = Namesake(item.version, folder, ours, over_ours)
    return list(found.values())


def _parse(lines: list[str]) -> list[Requirement]:
    from packaging.requirements import Requirement

    requirements = [Requirement(line) for line in lines]
    return [
        item
        for item in requirements
        if item.marker is None or "extra" in str(item.marker) or item.marker.evaluate()
    ]


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
