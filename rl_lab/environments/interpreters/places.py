"""Other interpreters by name or path: `environment.python`, `environment.host`, and what `rl-lab envs` manages.

A named interpreter is a virtual environment in the user's cache folder ($RL_LAB_CACHE, or rl_lab in $XDG_CACHE_HOME or
~/.cache), made from the pinned list `pins/NAME.txt`. It is complete when its marker file is written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rl_lab.environments.interpreters import worker as far
from rl_lab.errors import ConfigError, LabError, closest
from rl_lab.utils.files import write_json_atomic

PINS = Path(__file__).parent / "pins"
MARKER = "rl_lab.json"


@dataclass(frozen=True)
class Place:
    """Where environments run, if not in this interpreter.

    python:  path of an interpreter on this machine, or None
    host:    "tcp://HOST:PORT" of a worker that listens, or None
    timeout: maximum seconds of one call; None: no limit
    group:   environments of different groups do not share a process
    lane:    nor do those of different lanes of a group
    """

    python: str | None = None
    host: str | None = None
    timeout: float | None = 120.0
    group: int = 0
    lane: int = 0

    @property
    def key(self) -> str:
        return f"environment.python={self.python}" if self.python else f"environment.host={self.host}"


def place_of(python: str | None, host: str | None) -> Place | None:
    """Return the place that `environment.python` and `environment.host` name; None: this interpreter."""
    if python is None and host is None:
        return None
    if python is not None and host is not None:
        raise ConfigError(f"environment.python={python} and environment.host={host}: set one of them to null")
    if host is not None:
        token_for(str(host))  # says what is wrong before anything starts
        return Place(host=str(host))
    text = str(python)
    path = str(Path(text).expanduser().absolute()) if os.sep in text else str(named(text))
    return Place(python=path)


def address(host: str) -> tuple[str, int]:
    """Return host and port of "tcp://HOST:PORT"."""
    text = host.removeprefix("tcp://")
    name, _, port = text.rpartition(":")
    if text == host or not name or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"environment.host={host}: write tcp://HOST:PORT, for example tcp://127.0.0.1:7000")
    return name.strip("[]"), int(port)


def token_for(host: str) -> str:
    """Return the token of RL_LAB_ENVIRONMENT_TOKEN; beyond loopback one is needed."""
    token = os.environ.get(far.TOKEN_VARIABLE, "").strip()
    if not token and not far.is_loopback(address(host)[0]):
        raise ConfigError(
            f"environment.host={host} is beyond loopback and needs a token: set {far.TOKEN_VARIABLE} here and there"
        )
    return token


# --- Named interpreters ----------------------------------------------------------------------------------


def cache_folder() -> Path:
    given = os.environ.get("RL_LAB_CACHE")
    if given:
        return Path(given).expanduser() / "envs"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rl_lab" / "envs"


def known_names() -> list[str]:
    return sorted(file.stem for file in PINS.glob("*.txt"))


def pins(name: str) -> Path:
    """Return the file with the pinned packages of a named interpreter."""
    if name not in known_names():
        raise ConfigError(f"no interpreter is named '{name}'.{closest(name, known_names())}")
    return PINS / f"{name}.txt"


def describe(name: str) -> str:
    """Return what its list says in the first line."""
    return pins(name).read_text(encoding="utf-8").splitlines()[0].lstrip("# ")


def state(name: str) -> str:
    """Return "ready", "outdated" (its list has changed), "incomplete" or "missing"."""
    folder = cache_folder() / name
    if not folder.is_dir():
        return "missing"
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        same = marker["pins"] == _digest(name)
    except (OSError, ValueError, KeyError, TypeError):
        return "incomplete"
    return "ready" if same and _python(folder).exists() else "outdated" if not same else "incomplete"


def named(name: str) -> Path:
    """Return the interpreter of that name; it must have been created."""
    if name not in known_names():
        raise ConfigError(
            f"environment.python={name}: no interpreter has this name.{closest(name, known_names())} "
            "For an interpreter of your own write its path, such as ./venv/bin/python"
        )
    found = state(name)
    if found in ("missing", "incomplete"):
        what = "is not on this machine yet" if found == "missing" else "is incomplete"
        raise ConfigError(f"environment.python={name} {what}: rl-lab envs create {name}")
    return _python(cache_folder() / name)


def create(name: str, *, python: str | None = None, report: Callable[[str], None] = print) -> Path:
    """Create a named interpreter from its list, or return it if it is ready; return its path.

    python: the interpreter that it is made with; None: this one
    """
    requirements = pins(name)
    folder = cache_folder() / name
    with _locked(folder):
        if state(name) == "ready" and python is None:
            report(f"{name} is ready: {_python(folder)}")
            return _python(folder)
        _remove(folder)
        report(f"{name}: creating {folder}")
        try:
            _run(name, [python or sys.executable, "-m", "venv", str(folder)])
            _run(name, [str(_python(folder)), "-m", "pip", "install", "--no-input", "-r", str(requirements)])
        except BaseException:  # half of it would look like a whole one to pip
            _remove(folder)
            raise
        write_json_atomic(folder / MARKER, {"name": name, "pins": _digest(name)})
        report(f"{name} is ready: environment.python={name}")
    return _python(folder)


def remove(name: str) -> int:
    """Delete a named interpreter; return the bytes that were freed."""
    if name not in [*known_names(), *(made for made, _ in created())]:
        pins(name)
    folder = cache_folder() / name
    if not folder.is_dir():
        raise ConfigError(
            f"interpreter '{name}' is not on this machine; rl-lab envs list shows those that are"
        )
    with _locked(folder):
        size = disk_bytes(folder)
        _remove(folder)
    return size


def created() -> list[tuple[str, Path]]:
    """Return name and folder of those on this machine, also of lists that are gone."""
    folder = cache_folder()
    found = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    return [(path.name, path) for path in found]


def disk_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _python(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _digest(name: str) -> str:
    return hashlib.sha256(pins(name).read_bytes()).hexdigest()


def _remove(folder: Path) -> None:
    if folder.is_symlink():  # not made here
        raise LabError(f"{folder} is a link, which rl-lab envs does not follow: remove it")
    if folder.is_dir():
        with contextlib.suppress(FileNotFoundError):
            (folder / MARKER).unlink()
        shutil.rmtree(folder)


def _run(name: str, command: list[str]) -> None:
    # The trainer's own packages are not for the new interpreter.
    environ = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
    except OSError as error:
        raise LabError(
            f"{command[0]} cannot be started ({error.strerror}): name an interpreter with --python"
        ) from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        why = next(
            (line for line in reversed(lines) if "ERROR" in line or "error" in line),
            lines[-1] if lines else "",
        )
        raise LabError(
            f"interpreter '{name}' could not be created: {why.strip() or 'no message'} ({' '.join(command[1:4])})"
        )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let only one process at a time make or remove an interpreter."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{folder.name}.lock", "w") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except ImportError:  # Windows
            pass
        yield
