"""Reading files of unknown origin: only regular files, limits of size and depth, links that stay inside a folder."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from rl_lab.errors import LabError, one_line

LARGEST_YAML = 4 << 20  # bytes; a config has about 20 kB
LARGEST_JSON = 256 << 20  # bytes; the manifest of a run with a million replay files has about 100 MB
DEEPEST = 60  # levels of a YAML or JSON file
MOST_LINKS = 200_000  # entries of a run folder that are looked at


class OddFileError(OSError):
    """The path is no regular file, or the file is too large to be what its name says."""


def open_regular(path: Path | str) -> BinaryIO:
    """Open a file for reading; OddFileError for a pipe, a device or a folder, which could block or never end."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OddFileError(f"{path} is not a regular file")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_bytes(path: Path | str, largest: int) -> bytes:
    """Return the content of a regular file of at most `largest` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > largest:
            raise OddFileError(f"{path} has {size:,} bytes, more than {largest:,}")
        return file.read(largest + 1)[:largest]


def check_yaml(text: str) -> None:
    """Raise ValueError for YAML that could be expanded without end: aliases, or too many levels."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it has an alias (*name), which no saved config has")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > DEEPEST:
                raise ValueError(f"it has more than {DEEPEST} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def read_yaml_text(path: Path) -> str:
    """Return the text of a YAML file after `check_yaml`."""
    text = read_bytes(path, LARGEST_YAML).decode("utf-8")
    check_yaml(text)
    return text


def control_characters(text: str) -> bool:
    """Return whether a string has control characters, such as the escape sequences of terminals."""
    return any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 or c in "\u2028\u2029" for c in text)


def printable(text: str) -> str:
    """Replace the control characters of a string; a terminal would obey them."""
    if not control_characters(text):
        return text
    return "".join(repr(c)[1:-1] if c != "\n" and control_characters(c) else c for c in text)


def strings(node: Any, path: str = "") -> Iterable[tuple[str, str]]:
    """Yield dotted path and text of every string in plain data; keys count as strings, too."""
    if isinstance(node, dict):
        for key, value in node.items():
            below = f"{path}.{key}" if path else str(key)
            if isinstance(key, str):
                yield below, key
            yield from strings(value, below)
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from strings(value, f"{path}[{index}]")
    elif isinstance(node, str):
        yield path, node


def in_run_folder(path: str) -> bool:
    """Return whether a folder is a run folder, or in one: modules there may be a stranger's."""
    while True:
        if all(os.path.lexists(os.path.join(path, name)) for name in ("config.yaml", "config/spec.json")):
            return True
        if os.path.dirname(path) == path:
            return False
        path = os.path.dirname(path)


# --- Links ---


class LinkError(LabError):
    """A link leads out of a run folder."""


def check_links(folder: Path, *, skip: Iterable[str] = ()) -> None:
    """Raise LinkError if a link in the folder, at any depth, leads out of it; links inside it are allowed.

    skip: paths relative to the folder that the caller does not use
    """
    root = Path(os.path.realpath(folder))
    left = {os.path.join(root, name) for name in skip}
    # The folders that wandb makes have links of their own; only the first is ours.
    unentered = left | {os.path.join(root, "wandb")}
    waiting, seen = [str(root)], 0
    while waiting:
        try:
            entries = list(os.scandir(waiting.pop()))
        except OSError:
            continue  # unreadable or deleted: whoever needs it says so
        seen += len(entries)
        if seen > MOST_LINKS:
            raise LinkError(
                f"{folder} has more than {MOST_LINKS:,} files: it is not checked for links out of it"
            )
        for entry in entries:
            if entry.path in left:
                continue
            if entry.is_symlink():
                _check_link(root, entry.path)
            elif entry.path not in unentered and entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)


def _check_link(root: Path, path: str) -> None:
    try:
        target = Path(os.path.realpath(path))
    except (OSError, ValueError) as error:
        raise LinkError(f"{printable(path)} is a link that cannot be followed ({one_line(error)})") from None
    if target != root and root not in target.parents:
        raise LinkError(
            f"{printable(path)} is a link to {printable(str(target))}, out of the run folder, and is not followed: "
            "remove it, or add --trust (trust=True in Python) if you made it"
        )
