"""Errors that a person can act on. The command line prints them as one message, without a traceback."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable
from pathlib import Path


class LabError(Exception):
    """Something the user can put right; the message says what and how."""


class ConfigError(LabError):
    """A config names or states something that cannot be."""


class CheckpointError(LabError):
    """A checkpoint is missing, damaged, or does not fit."""


class MissingPackageError(LabError):
    """An optional package is needed; the message has the line that installs it."""


class RunLockedError(LabError):
    """Another process is working in this run folder."""


class EnvironmentFaultError(LabError):
    """Environments failed more often than may be borne; the message has the last failure, in its own words."""


class OutOfMemoryError(LabError):
    """The device has no memory left; the message says what holds it and what to turn down."""


def closest(name: str, known: Iterable[str], limit: int = 3) -> str:
    """A sentence for an unknown name: the nearest known ones, then the list (shortened when long)."""
    names = sorted({str(item) for item in known})
    near = difflib.get_close_matches(name, names, n=limit, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(item) for item in near)}?" if near else ""
    shown = ", ".join(names[:30]) + (f", … ({len(names)} in all)" if len(names) > 30 else "")
    return f"{hint} Known: {shown or 'none'}."


def reject_unknown(where: str, node: Iterable[object], known: Iterable[str]) -> None:
    """Every key of a config's node must be known: a mistyped one would be left out without a word."""
    names = set(known)
    for key in node:
        if key not in names:
            raise ConfigError(f"{where} has an unknown key '{key}'.{closest(str(key), names)}")


def require_choice(where: str, value: object, allowed: Iterable[str]) -> None:
    names = list(allowed)
    if value not in names:
        raise ConfigError(f"{where} is '{value}'.{closest(str(value), names)}")


def one_line(error: BaseException, limit: int = 300) -> str:
    """An exception of anyone's as "KeyError: 'name'": its type and the first line of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def unexpected(error: BaseException) -> str:
    """One message for an exception that nobody foresaw: what it is, and where it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"unexpected {one_line(error)}{place}; --debug shows the traceback"
