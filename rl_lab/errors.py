"""Errors that a user can fix. The command line prints them as one message, without a traceback."""

from __future__ import annotations

import contextlib
import difflib
import os
import shlex
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path


class LabError(Exception):
    """An error that the user can fix; the message explains what is wrong and what to do."""

    def _render_traceback_(self) -> list[str]:
        """Called by IPython: what a notebook shows. With RL_LAB_DEBUG set, the complete traceback."""
        if os.environ.get("RL_LAB_DEBUG"):
            return traceback.format_exception(self)
        return [f"{type(self).__name__}: {self}"]


class ConfigError(LabError):
    """A config has an unknown name or an invalid value."""


class BatchNameError(LabError, KeyError, AttributeError):
    """A batch has no column of that name; the message says where the value is."""

    __str__ = Exception.__str__  # KeyError's would add quotes


class ContractError(LabError, AssertionError):
    """A part does not do what `rl_lab.protocols` says; raised by the checks of `rl_lab.contracts`."""


class CheckpointError(LabError):
    """A checkpoint is missing, damaged, or does not fit."""


class MissingPackageError(LabError):
    """An optional package is missing; the message has the command that installs it."""


class RunLockedError(LabError):
    """Another process is using this run folder."""


class RunFolderLostError(LabError):
    """The run folder was moved, deleted or replaced while the run was going on.

    moved_to: where it is now, if that is known
    """

    def __init__(self, message: str, moved_to: Path | None = None) -> None:
        super().__init__(message)
        self.moved_to = moved_to


class EnvironmentFaultError(LabError):
    """Environments failed more often than `environment.restarts` allows; the message has the last failure."""


class OutOfMemoryError(LabError):
    """The device is out of memory; the message lists what uses it and how to reduce that."""


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Raise a LabError without the errors that caused it: in a notebook their tracebacks would bury the message.

    RL_LAB_DEBUG=1 keeps them.
    """
    try:
        yield
    except LabError as error:
        if os.environ.get("RL_LAB_DEBUG"):
            raise
        raise error.with_traceback(None) from None


def closest(name: str, known: Iterable[str], limit: int = 3) -> str:
    """Return a hint for an unknown name: the closest known names, then all names (shortened if long)."""
    names = sorted({str(item) for item in known})
    near = difflib.get_close_matches(name, names, n=limit, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(item) for item in near)}?" if near else ""
    shown = ", ".join(names[:30]) + (f", … ({len(names)} in all)" if len(names) > 30 else "")
    return f"{hint} Known: {shown or 'none'}."


def reject_unknown(where: str, node: Iterable[object], known: Iterable[str]) -> None:
    """Raise ConfigError for an unknown key of a config node: a typo would otherwise be ignored silently."""
    names = set(known)
    for key in node:
        if key not in names:
            raise ConfigError(f"{where} has an unknown key '{key}'.{closest(str(key), names)}")


def require_choice(where: str, value: object, allowed: Iterable[str]) -> None:
    names = list(allowed)
    if value not in names:
        raise ConfigError(f"{where} is '{value}'.{closest(str(value), names)}")


def known_task(suite: str, task: str, known: Iterable[str], name: str | None = None) -> str:
    """Return a task of a suite as the suite spells it; ConfigError for an unknown one.

    name: the task in the suite's spelling, if the user may write it in another one
    """
    name, names = task if name is None else name, list(known)
    if name not in names:
        raise ConfigError(f"no task '{suite}/{task}'.{closest(name, names)}")
    return name


def one_line(error: BaseException, limit: int = 300) -> str:
    """Format an exception as "KeyError: 'name'": its type and the first line of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def unexpected(error: BaseException) -> str:
    """Return one message for an unexpected exception: its type, text and source line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"unexpected {one_line(error)}{place}; --debug shows the traceback"


# --- Installing ---


DISTRIBUTION = "rl-lab-wm"  # the command stays `rl-lab`, the import `rl_lab`
FORMER_NAME = "rl-lab"  # on the package index this is another project that also imports as rl_lab
PACKAGE = Path(__file__).resolve().parent


def checkout() -> Path | None:
    """Return the root of the source tree that rl_lab is imported from.

    None when it is installed without one.
    """
    root = PACKAGE.parent
    try:
        text = (root / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        return None
    return root if f'name = "{DISTRIBUTION}"' in text else None


def install_line(extra: str = "", again: bool = False) -> str:
    """Return the pip command that installs RL Lab, or one of its extras, from the same source as this rl_lab.

    again: reinstall even if pip considers it installed (files are missing or overwritten by another package).
    """
    root = checkout()
    wanted = f"[{extra}]" if extra else ""
    if root is None:
        flags = "--force-reinstall --no-deps " if again else ""
        return f"pip install {flags}{shlex.quote(DISTRIBUTION + wanted)}"
    # pip reinstalls an editable project every time.
    return f"pip install -e {shlex.quote(('.' if _is_current(root) else str(root)) + wanted)}"


def _is_current(folder: Path) -> bool:
    try:
        return Path.cwd() == folder
    except OSError:  # the current folder was deleted
        return False
