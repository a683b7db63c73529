"""`rl-lab doctor`: report hardware, packages and rendering, and the commands that install what is missing."""

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
from rl_lab.errors import DISTRIBUTION, FORMER_NAME, PACKAGE, checkout, install_line
from rl_lab.tools.terminal import print_table

if TYPE_CHECKING:
    from packaging.requirements import Requirement


# --- Machine and commit ---

# Benchmarks and results store these values. The host name is left out on purpose.


def commit() -> str:
    """Return the checkout's commit, with `-dirty` appended if files differ from it; "" without a checkout."""
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
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cpus() -> int:
    """Return the number of cores that this process may use, often fewer than the machine has."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        if quota != "max":
            count = min(count, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return count


def memory_bytes() -> tuple[int, int]:
    """Return total and available memory within the container's limit; zeros if unknown."""
    try:
        import psutil
    except ImportError:
        return 0, 0
    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8"))
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return total, available
    return min(total, limit), min(available, max(limit - used, 0))


def describe_machine() -> dict[str, Any]:
    """Return the hardware and software that benchmark results depend on. Imports torch if it is installed."""
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


# --- Requirements ---

# Read from metadata only: nothing is imported.
AUTHORS = "The RL Lab authors"  # from pyproject.toml: every build of this project has it in its metadata


@dataclass
class Declared:
    """Declared requirements of the core and of each extra."""

    core: list[Requirement] = field(default_factory=list)
    extras: dict[str, list[Requirement]] = field(default_factory=dict)

    def of_extra(self, name: str) -> list[Requirement]:
        """Return an extra's requirements; RL Lab's own extras in it are expanded."""
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
    """One requirement and the installed version."""

    name: str
    version: str | None  # None: not installed
    wanted: str  # version specifier, "" for any
    fits: bool  # installed, and the version matches


def declared() -> Declared:
    """Read requirements from pyproject.toml in a checkout (its metadata may be outdated), else from metadata."""
    root = checkout()
    if root is not None:
        import tomllib

        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
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
    """Yield the package itself, then the packages of its extras (`gymnasium[box2d]` needs box2d)."""
    version = version_of(requirement.name)
    fits = version is not None and requirement.specifier.contains(version, prereleases=True)
    yield Package(requirement.name, version, str(requirement.specifier), fits)
    if version is None:
        return
    for inner in _parse(metadata.requires(requirement.name) or []):
        if inner.marker is None or inner.marker.evaluate({"extra": ""}):
            continue  # pip installed its plain dependencies
        if any(inner.marker.evaluate({"extra": extra}) for extra in requirement.extras):
            yield from find(inner)


def version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class FormerInstall:
    """A distribution installed under the former name `rl-lab` that contains a package rl_lab."""

    version: str
    folder: Path  # where it is installed
    ours: bool  # an old version of this project
    overwrites: bool  # its rl_lab/__init__.py is the one of the running rl_lab


def former_installs() -> list[FormerInstall]:
    """Return the distributions installed as `rl-lab` that this Python can find."""
    root = checkout()
    found: dict[Path, FormerInstall] = {}
    for item in metadata.distributions(name=FORMER_NAME):
        folder = Path(str(item.locate_file(""))).resolve()
        ours = item.metadata["Author"] == AUTHORS
        # *.egg-info in the source tree is not an install.
        if folder in found or (ours and folder == root):
            continue
        modules = [file for file in item.files or [] if file.as_posix() == "rl_lab/__init__.py"]
        if ours or modules:
            overwrites = any(Path(str(file.locate())).resolve().parent == PACKAGE for file in modules)
            found[folder] = FormerInstall(item.version, folder, ours, overwrites)
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


# --- Command ---

LOW_DISK = 2 * 2**30  # bytes: a few checkpoints with replay


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Levels: ok, warn (works with a problem), missing (optional), bad (the core does not work), - (info).
    """

    level: str
    name: str
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output-root", metavar="DIR", help="folder of the runs (default: the same as `train`)"
    )


def main(args: argparse.Namespace) -> int:
    """Print every section; returns 1 if the core is incomplete or overwritten by another package, else 0."""
    sections = examine(output_root=args.output_root)
    for title, findings in sections:
        print_table([(item.level, item.name, item.text) for item in findings], title=title)
        print()
    levels = [item.level for _, findings in sections for item in findings]
    bad, warnings = levels.count("bad"), levels.count("warn")
    if bad:
        print(f"{bad} problem{'s' if bad > 1 else ''} to fix before rl-lab works: see the lines marked bad")
        return 1
    print("ready" + (f", with {warnings} warning{'s' if warnings > 1 else ''}" if warnings else ""))
    return 0


def examine(output_root: str | None = None) -> list[tuple[str, list[Finding]]]:
    """Return sections of findings in display order."""
    # Without packaging no version can be compared; check_core reports it.
    needs = declared() if version_of("packaging") else Declared()
    return [
        ("RL Lab", check_code()),
        ("Machine", check_machine(output_root)),
        ("Core packages", check_core(needs)),
        ("torch", check_torch()),
        ("Rendering and video", check_rendering()),
        ("Extras", check_extras(needs)),
        ("Incompatible versions", check_pairs(version_of)),
        ("Other interpreters (rl-lab envs)", check_interpreters()),
    ]


def check_code() -> list[Finding]:
    root = checkout()
    place = f"checkout {root}" if root else f"installed in {Path(__file__).resolve().parents[2]}"
    python = platform.python_version()
    old = sys.version_info < (3, 11)
    return [
        # Another project's rl_lab/__init__.py may have overwritten this one, so __version__ may be missing.
        Finding("ok", "rl-lab", f"{getattr(rl_lab, '__version__', 'of an unknown version')}, {place}"),
        Finding("-", "commit", commit() or "unknown: no git checkout with a commit"),
        Finding(
            "bad" if old else "ok",
            "Python",
            python + (": 3.11 or newer is needed" if old else f", {sys.executable}"),
        ),
        *check_former_installs(),
    ]


def check_former_installs() -> list[Finding]:
    """Report what is installed as `rl-lab`: another project, or this one before it was renamed."""
    fix = f"pip uninstall -y {FORMER_NAME} && {install_line(again=True)}"
    findings = []
    for item in former_installs():
        if item.ours:
            text = (
                f"{item.version} in {item.folder} is RL Lab under its former name, now {DISTRIBUTION}: {fix}"
            )
            findings.append(Finding("warn", f"former {FORMER_NAME}", text))
            continue
        effect = "overwrote RL Lab" if item.overwrites else "can be imported instead of RL Lab"
        text = f"{item.version} in {item.folder} is another project, whose rl_lab {effect}: {fix}"
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
                f"runs from a folder without metadata, so its requirements are unknown: {install_line()}",
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
    """Report torch and its devices; this is the only slow import."""
    try:
        import torch
    except ImportError as error:
        return [Finding("bad", "torch", f"cannot be imported ({error}): pip install 'torch>=2.11,<2.14'")]
    findings = [Finding("ok", "torch", f"{torch.__version__}, {torch.get_num_threads()} threads")]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            text = f"{facts.name}, {_size(facts.total_memory)}, CUDA {torch.version.cuda}"
            text += (
                ", bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else ", no bfloat16"
            )
            findings.append(Finding("ok", f"cuda:{index}", text))
    else:
        built = (
            f"built for CUDA {torch.version.cuda}, but no GPU was found"
            if torch.version.cuda
            else "a CPU build of torch"
        )
        findings.append(Finding("warn" if _has_nvidia() else "-", "cuda", f"not available: {built}"))
    mps = torch.backends.mps.is_available()
    findings.append(Finding("ok" if mps else "-", "mps", "available" if mps else "not available"))
    return findings


def check_rendering() -> list[Finding]:
    """Report rendering libraries, the renderer that MuJoCo's suites will use, and ffmpeg."""
    libraries = {name: ctypes.util.find_library(name) for name in ("EGL", "OSMesa", "GL")}
    display = bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")) or sys.platform == "darwin"
    findings = [Finding("-", "display", "yes" if display else "none: no windows, but frames can be rendered")]
    findings.append(_mujoco_gl(libraries))
    packages = {"EGL": "libegl1", "OSMesa": "libosmesa6", "GL": "libgl1"}
    for name, library in libraries.items():
        missing = f"not found: apt-get install {packages[name]} (Debian, Ubuntu)"
        findings.append(Finding("ok" if library else "missing", name, library or missing))
    findings.append(_ffmpeg())
    return findings


def _mujoco_gl(libraries: Mapping[str, str | None]) -> Finding:
    """Report the renderer of dmc and memory_maze: MUJOCO_GL, or the choice of environments/rendering.py."""
    from rl_lab.environments.rendering import find_renderer

    backend = os.environ.get("MUJOCO_GL", "").lower()
    wanted = {"egl": "EGL", "osmesa": "OSMesa"}.get(backend, "")
    if wanted and libraries[wanted] is None:
        return Finding(
            "warn", "MUJOCO_GL", f"{backend}, but no {wanted} library was found: unset it or install one"
        )
    if backend:
        return Finding("ok", "MUJOCO_GL", f"{backend}, as you set it")
    chosen = find_renderer()
    if chosen == "disable":
        text = (
            "not set, and no renderer was found: dmc works with observe=proprio only; apt-get install libegl1"
        )
        return Finding("missing", "MUJOCO_GL", text)
    where = "on the GPU" if chosen == "egl" and _has_nvidia() else "in software, slowly"
    text = (
        f"not set: {chosen} is chosen ({where})"
        if chosen
        else "not set: MuJoCo chooses, which needs a window system"
    )
    return Finding("ok", "MUJOCO_GL", text)


def _ffmpeg() -> Finding:
    try:
        import imageio_ffmpeg

        return Finding("ok", "ffmpeg", f"{imageio_ffmpeg.get_ffmpeg_exe()} (imageio-ffmpeg)")
    except (ImportError, RuntimeError):
        pass
    found = shutil.which("ffmpeg")
    # Videos are written through imageio-ffmpeg; the ffmpeg program alone is not enough.
    where = f" ({found} exists, but imageio-ffmpeg is not installed)" if found else ""
    return Finding("missing", "ffmpeg", f"videos are written as GIF{where}; for mp4: {install_line('video')}")


def check_interpreters() -> list[Finding]:
    """Report the interpreters that `rl-lab envs create` made on this machine."""
    from rl_lab.environments.interpreters import places

    findings = []
    for name, folder in places.created():
        if name not in places.known_names():
            findings.append(Finding("-", name, f"{folder}: no list of this RL Lab has this name"))
            continue
        state = places.state(name)
        text = f"{places.describe(name)}; environment.python={name}"
        if state == "ready":
            findings.append(Finding("ok", name, text))
        else:
            findings.append(Finding("warn", name, f"{state}: rl-lab envs create {name}"))
    return findings or [Finding("-", "none", "rl-lab envs list says which can be made")]


def check_extras(needs: Declared) -> list[Finding]:
    """Report each extra: its packages with versions, or the command that installs it."""
    findings = []
    for extra in needs.extras:
        packages = list(
            {item.name: item for requirement in needs.of_extra(extra) for item in find(requirement)}.values()
        )
        missing = [package.name for package in packages if package.version is None]
        unfit = [f"{p.name} {p.version} instead of {p.wanted}" for p in packages if p.version and not p.fits]
        if missing:
            findings.append(
                Finding("missing", extra, f"{install_line(extra)}   (missing: {', '.join(missing)})")
            )
        elif unfit:
            findings.append(Finding("warn", extra, f"{', '.join(unfit)}: {install_line(extra)}"))
        else:
            findings.append(Finding("ok", extra, ", ".join(f"{p.name} {p.version}" for p in packages)))
    return findings


def check_pairs(version: Callable[[str], str | None]) -> list[Finding]:
    """Report versions that install together but fail; `version(name)` is None if not installed."""
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
        text = "hydra 1.3 needs omegaconf 2.3: pip install 'omegaconf>=2.3,<2.4'"
        findings.append(Finding("warn", f"omegaconf {version('omegaconf')}", text))
    torch = version("torch")
    if torch and not (at_least("torch", "2.11") and not at_least("torch", "2.14")):
        findings.append(
            Finding("warn", f"torch {torch}", "tested with 2.11 to 2.13: pip install 'torch>=2.11,<2.14'")
        )
    if version("pygame") and version("pygame-ce"):
        text = "both install into the same folder: pip uninstall -y pygame pygame-ce && pip install pygame-ce"
        findings.append(Finding("warn", "pygame + pygame-ce", text))
    return findings or [Finding("ok", "none found", "")]


def _has_nvidia() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia").exists()


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
