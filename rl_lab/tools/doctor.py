"""`rl-lab doctor`: what this machine has, what is missing, and the line that puts it right."""

from __future__ import annotations

import argparse
import ctypes.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rl_lab
from rl_lab.tools.terminal import print_table
from rl_lab.utils.install import DISTRIBUTION, FORMER_NAME, PACKAGE, checkout, install_line

if TYPE_CHECKING:
    from packaging.requirements import Requirement


# --------------------
# Facts about this machine and this code that results are kept with. The host's name is left out on purpose.


def commit() -> str:
    """Commit of the checkout, with `-dirty` behind it when files differ from it; "" without a checkout."""
    if checkout() is None:
        return ""
    revision = _git("rev-parse", "HEAD")
    if not revision:
        return ""
    return revision + ("-dirty" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*arguments: str) -> str:
    try:
        result = subprocess.run(
            ["git", "-C", str(PACKAGE.parent), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cpus() -> int:
    """Cores that this process may use, which in a container is often fewer than there are."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            count = min(count, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return count


def memory_bytes() -> tuple[int, int]:
    """Memory in all and free to use, within the container's limit; zeros when it cannot be told."""
    try:
        import psutil
    except ImportError:
        return 0, 0
    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return total, available
    return min(total, limit), min(available, max(limit - used, 0))


def describe_machine() -> dict[str, Any]:
    """What a benchmark's numbers depend on. Loads torch when it is there."""
    facts: dict[str, Any] = {
        "cpu": cpu_model(),
        "cpus": usable_cpus(),
        "gpu": None,
        "memory_gib": round(memory_bytes()[0] / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": None,
        "torch_threads": None,
    }
    try:
        import torch
    except ImportError:
        return facts
    facts |= {"torch": str(torch.__version__), "torch_threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name(0)
    return facts


# --------------------
# What the project says it needs, and what of it is installed. Metadata only: nothing is imported.


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


LOW_DISK = 2 * 2**30  # bytes: a few checkpoints with replay


@dataclass(frozen=True)
class Finding:
    """One line: ok, warn (works, but), missing (optional), bad (the core does not work like this), - (a fact)."""

    level: str
    name: str
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output-root", metavar="DIR", help="where runs are written (default: as `train` would)"
    )


def main(args: argparse.Namespace) -> int:
    """Print every section; 1 when the core lacks something or another package is in its place, else 0."""
    sections = examine(output_root=args.output_root)
    for title, findings in sections:
        print_table([(item.level, item.name, item.text) for item in findings], title=title)
        print()
    levels = [item.level for _, findings in sections for item in findings]
    bad, warnings = levels.count("bad"), levels.count("warn")
    if bad:
        print(
            f"{bad} thing{'s' if bad > 1 else ''} to put right before rl-lab works: see the lines marked bad"
        )
        return 1
    print("ready" + (f", with {warnings} warning{'s' if warnings > 1 else ''}" if warnings else ""))
    return 0


def examine(output_root: str | None = None) -> list[tuple[str, list[Finding]]]:
    """Sections of findings, in the order they are shown."""
    # Without packaging nothing can be compared; check_core says so.
    needs = declared() if version_of("packaging") else Declared()
    return [
        ("RL Lab", check_code()),
        ("Machine", check_machine(output_root)),
        ("Core packages", check_core(needs)),
        ("torch", check_torch()),
        ("Rendering and video", check_rendering()),
        ("Extras", check_extras(needs)),
        ("Versions that do not go together", check_pairs(version_of)),
    ]


def check_code() -> list[Finding]:
    root = checkout()
    place = f"checkout {root}" if root else f"installed in {Path(__file__).resolve().parents[2]}"
    python = platform.python_version()
    old = sys.version_info < (3, 11)
    return [
        # Another project's rl_lab/__init__.py may have been written over ours.
        Finding("ok", "rl-lab", f"{getattr(rl_lab, '__version__', 'of an unknown version')}, {place}"),
        Finding("-", "commit", commit() or "unknown: no git checkout with a commit"),
        Finding(
            "bad" if old else "ok",
            "Python",
            python + (": 3.11 or newer is needed" if old else f", {sys.executable}"),
        ),
        *check_namesakes(),
    ]


def check_namesakes() -> list[Finding]:
    """What is installed as `rl-lab`: another project on the package index, or this one from before it was renamed."""
    cure = f"pip uninstall -y {FORMER_NAME} && {install_line(again=True)}"
    findings = []
    for item in namesakes():
        if item.ours:
            text = (
                f"{item.version} in {item.folder} is RL Lab under its former name, now {DISTRIBUTION}: {cure}"
            )
            findings.append(Finding("warn", f"former {FORMER_NAME}", text))
            continue
        harm = "is written over RL Lab" if item.over_ours else "can be imported instead of RL Lab"
        text = f"{item.version} in {item.folder} is another project, whose rl_lab {harm}: {cure}"
        findings.append(Finding("bad", f"other {FORMER_NAME}", text))
    return findings


def check_machine(output_root: str | None = None) -> list[Finding]:
    from rl_lab.run_folder import output_root as default_root
    from rl_lab.utils.files import free_bytes

    total, available = memory_bytes()
    root = default_root(output_root)
    free = free_bytes(root)
    threads = os.environ.get("OMP_NUM_THREADS")
    return [
        Finding("-", "system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        Finding(
            "-",
            "CPU",
            f"{cpu_model()}, {usable_cpus()} usable" + (f", OMP_NUM_THREADS={threads}" if threads else ""),
        ),
        Finding(
            "-",
            "memory",
            f"{_size(total)}, {_size(available)} free" if total else "unknown (psutil is missing)",
        ),
        Finding("warn" if free < LOW_DISK else "ok", "disk", f"{_size(free)} free for runs in {root}"),
    ]


def check_core(needs: Declared) -> list[Finding]:
    if version_of("packaging") is None:
        return [Finding("bad", "packaging", "not installed: pip install packaging, then run this again")]
    if not needs.core:
        return [
            Finding(
                "warn",
                "rl-lab",
                f"runs from a bare folder, so its requirements are unknown: {install_line()}",
            )
        ]
    findings = []
    for requirement in needs.core:
        for package in find(requirement):
            if package.version is None:
                text = f"not installed: pip install '{package.name}{package.wanted}'"
                findings.append(Finding("bad", package.name, text))
            elif not package.fits:
                text = f"{package.version}, but {package.wanted} is tested: pip install '{package.name}{package.wanted}'"
                findings.append(Finding("warn", package.name, text))
            else:
                findings.append(Finding("ok", package.name, package.version))
    return findings


def check_torch() -> list[Finding]:
    """What torch can compute on; this is the one slow import."""
    try:
        import torch
    except ImportError as error:
        return [Finding("bad", "torch", f"cannot be imported ({error}): pip install 'torch>=2.11,<2.14'")]
    findings = [Finding("ok", "torch", f"{torch.__version__}, {torch.get_num_threads()} threads")]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            text = f"{facts.name}, {_size(facts.total_memory)}, CUDA {torch.version.cuda}"
            text += ", bfloat16" if torch.cuda.is_bf16_supported() else ", no bfloat16"
            findings.append(Finding("ok", f"cuda:{index}", text))
    else:
        built = (
            f"built for CUDA {torch.version.cuda}, but no GPU answers"
            if torch.version.cuda
            else "a CPU build of torch"
        )
        findings.append(Finding("warn" if _has_nvidia() else "-", "cuda", f"not available: {built}"))
    mps = torch.backends.mps.is_available()
    findings.append(Finding("ok" if mps else "-", "mps", "available" if mps else "not available"))
    return findings


def check_rendering() -> list[Finding]:
    """What can draw, and which of it MuJoCo's suites will take."""
    libraries = {name: ctypes.util.find_library(name) for name in ("EGL", "OSMesa", "GL")}
    screen = bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")) or sys.platform == "darwin"
    findings = [Finding("-", "screen", "yes" if screen else "none: windows cannot open, frames can be drawn")]
    findings.append(_mujoco_gl(libraries))
    packages = {"EGL": "libegl1", "OSMesa": "libosmesa6", "GL": "libgl1"}
    for name, library in libraries.items():
        missing = f"not found: apt-get install {packages[name]} (Debian, Ubuntu)"
        findings.append(Finding("ok" if library else "missing", name, library or missing))
    findings.append(_ffmpeg())
    return findings


def _mujoco_gl(libraries: Mapping[str, str | None]) -> Finding:
    """The renderer of dmc and memory_maze: the user's, or the one that `rl_lab.environments.rendering` chooses."""
    from rl_lab.environments.rendering import find_renderer

    backend = os.environ.get("MUJOCO_GL", "").lower()
    wanted = {"egl": "EGL", "osmesa": "OSMesa"}.get(backend, "")
    if wanted and libraries[wanted] is None:
        return Finding(
            "warn", "MUJOCO_GL", f"{backend}, but no {wanted} library was found: unset it, or install one"
        )
    if backend:
        return Finding("ok", "MUJOCO_GL", f"{backend}, as you set it")
    chosen = find_renderer()
    if chosen == "disable":
        text = (
            "not set, and nothing to draw with: dmc works with observe=proprio only; apt-get install libegl1"
        )
        return Finding("missing", "MUJOCO_GL", text)
    where = "on the GPU" if chosen == "egl" and _has_nvidia() else "in software, slowly"
    text = (
        f"not set: {chosen} is chosen ({where})"
        if chosen
        else "not set: MuJoCo's own choice, a window system"
    )
    return Finding("ok", "MUJOCO_GL", text)


def _ffmpeg() -> Finding:
    try:
        import imageio_ffmpeg

        return Finding("ok", "ffmpeg", f"{imageio_ffmpeg.get_ffmpeg_exe()} (imageio-ffmpeg)")
    except (ImportError, RuntimeError):
        pass
    found = shutil.which("ffmpeg")
    # The writer goes through imageio-ffmpeg; a program alone does not help it.
    where = f" ({found} is there, but not imageio-ffmpeg)" if found else ""
    return Finding("missing", "ffmpeg", f"videos are written as GIF{where}; for mp4: {install_line('video')}")


def check_extras(needs: Declared) -> list[Finding]:
    """One line per extra: its packages with versions, or the line that installs it."""
    findings = []
    for extra in needs.extras:
        packages = list(
            {item.name: item for requirement in needs.of_extra(extra) for item in find(requirement)}.values()
        )
        missing = [package.name for package in packages if package.version is None]
        unfit = [f"{p.name} {p.version} instead of {p.wanted}" for p in packages if p.version and not p.fits]
        if missing:
            findings.append(
                Finding("missing", extra, f"{install_line(extra)}   (lacks {', '.join(missing)})")
            )
        elif unfit:
            findings.append(Finding("warn", extra, f"{', '.join(unfit)}: {install_line(extra)}"))
        else:
            findings.append(Finding("ok", extra, ", ".join(f"{p.name} {p.version}" for p in packages)))
    return findings


def check_pairs(version: Callable[[str], str | None]) -> list[Finding]:
    """Versions that install together and then fail; `version(name)` is None for what is absent."""
    if version("packaging") is None:
        return []
    from packaging.version import Version

    def at_least(name: str, bound: str) -> bool:
        found = version(name)
        return found is not None and Version(found) >= Version(bound)

    findings = []
    if version("dm-control") and at_least("mujoco", "4"):
        text = "every suite.load fails with mujoco 4: pip install 'dm-control==1.0.50' 'mujoco==3.17.0'"
        findings.append(Finding("warn", f"dm-control + mujoco {version('mujoco')}", text))
    if at_least("omegaconf", "2.4"):
        text = "hydra 1.3 was written against 2.3: pip install 'omegaconf>=2.3,<2.4'"
        findings.append(Finding("warn", f"omegaconf {version('omegaconf')}", text))
    torch = version("torch")
    if torch and not (at_least("torch", "2.11") and not at_least("torch", "2.14")):
        findings.append(
            Finding("warn", f"torch {torch}", "tested with 2.11 to 2.13: pip install 'torch>=2.11,<2.14'")
        )
    if version("pygame") and version("pygame-ce"):
        text = "both install into one folder: pip uninstall -y pygame pygame-ce && pip install pygame-ce"
        findings.append(Finding("warn", "pygame + pygame-ce", text))
    return findings or [Finding("ok", "none found", "")]


def _has_nvidia() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia").exists()


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
