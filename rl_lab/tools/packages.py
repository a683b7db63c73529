"""What the project says it needs, and what of it is installed. Metadata only: nothing is imported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING

from rl_lab.tools.machine import checkout

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "rl-lab"


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


def install_line(extra: str) -> str:
    """The command that installs an extra, from where rl_lab came."""
    return f"pip install -e '.[{extra}]'" if checkout() else f"pip install '{DISTRIBUTION}[{extra}]'"


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
