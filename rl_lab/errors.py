"""Errors that a person can act on. The command line prints them as one message, without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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


def closest(name: str, known: Iterable[str], limit: int = 3) -> str:
    """A sentence for an unknown name: the nearest known ones, then the list (shortened when long)."""
    names = sorted({str(item) for item in known})
    near = difflib.get_close_matches(name, names, n=limit, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(item) for item in near)}?" if near else ""
    shown = ", ".join(names[:30]) + (f", … ({len(names)} in all)" if len(names) > 30 else "")
    return f"{hint} Known: {shown or 'none'}."
