"""Hooks of the documentation site (mkdocs.yml): navigation, generated pages, links that leave docs/.

    make docs        # builds build/site, strictly: a broken link is an error

Two pages are generated: all config keys, from the YAML files and their comments, and the public Python names, from
their docstrings. Pages of docs/ link to files elsewhere in the repository; on the site these links go to the
repository's address (RL_LAB_REPOSITORY), or become plain text if it is not set.
"""

from __future__ import annotations

import html
import os
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "rl_lab" / "configs"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
FENCE = re.compile(r"(^ *```.*?^ *```[^\n]*$)", re.M | re.S)
ROOT_PAGES = {"CHANGELOG.md": "about/changelog.md", "CONTRIBUTING.md": "about/contributing.md"}
ROOT_PAGES |= {"SECURITY.md": "about/security.md", "CODE_OF_CONDUCT.md": "about/conduct.md"}
# Files elsewhere in the repository that pages show.
ROOT_IMAGES = {"rl_lab/agents/bounce/dream.gif": "images/dream.gif"}

# Pages that stand first, in this order; the other pages of these folders follow by title.
START = ["index.md", "install.md", "tutorial.md", "faq.md", "howto/does_not_learn.md"]
OWN = [f"howto/{name}.md" for name in ("own_environment", "new_algorithm", "own_component", "extending")]
OWN += ["howto/coming_from.md"]
REFERENCE = ["reference/config.md", "reference/python.md", "environments.md", "glossary.md"]
DESIGN = ["architecture.md", "life_of_a_step.md", "contracts.md"]
RESULTS = ["measurements.md", "results.md", "log.md"]


# ---------------------------------------------------------------- navigation


def on_config(config: Any) -> Any:
    docs = Path(config["docs_dir"])
    about = [page for name, page in ROOT_PAGES.items() if (ROOT / name).is_file()]
    used = {*START, *OWN, *REFERENCE, *DESIGN, *RESULTS}
    config["nav"] = [
        {"Start": START},
        {"Your own": OWN},
        {"Guides": _others(docs, "howto", used)},
        {"Algorithms": [*_others(docs, "algorithms", used), *_others(docs, "experiments", used)]},
        {"Results": RESULTS},
        {"Reference": REFERENCE},
        {"Design": [*DESIGN, *about]},
    ]
    return config


def _others(docs: Path, folder: str, used: set[str]) -> list[str]:
    pages = [file for file in (docs / folder).glob("*.md") if f"{folder}/{file.name}" not in used]
    return [f"{folder}/{file.name}" for file in sorted(pages, key=_title)]


def _title(file: Path) -> str:
    return file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ").lower()


# ---------------------------------------------------------------- generated pages


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    pages = {"reference/config.md": config_reference(), "reference/python.md": python_reference()}
    for name, page in ROOT_PAGES.items():
        if (ROOT / name).is_file():
            pages[page] = (ROOT / name).read_text(encoding="utf-8")
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    for name, path in ROOT_IMAGES.items():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / name)))
    return files


def python_reference() -> str:
    """The public names of `rl_lab` and of the folders that export some, for mkdocstrings."""
    lines = [
        "# Python",
        "",
        "The names that file moves do not break. Everything else may move between versions.",
        "",
    ]
    for module in ("rl_lab", "rl_lab.workflows", "rl_lab.buffers", "rl_lab.environments", "rl_lab.protocols"):
        names = exported(module)
        if names:
            lines += [f"## `{module}`", ""]
            for name in names:
                lines += [f"::: {module}.{name}", ""]
    return "\n".join(lines)


def exported(module: str) -> list[str]:
    """`__all__` of a package, read without importing it; for a module the classes that it defines."""
    base = ROOT / Path(*module.split("."))
    file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    text = file.read_text(encoding="utf-8")
    found = re.search(r"^__all__ = \[(.*?)\]", text, re.M | re.S)
    if found:
        return re.findall(r"\"(\w+)\"", found[1])
    return [] if base.is_dir() else re.findall(r"^class (\w+)\(", text, re.M)


@dataclass
class Key:
    path: str
    value: str
    comment: str


def config_reference() -> str:
    """All keys of the root config, the algorithms, and the groups that a config chooses from."""
    lines = ["# Config keys", "", "Made from the YAML files of the package and their comments.", ""]
    lines += [*_section("The root config", CONFIGS / "config.yaml"), ""]
    for group in sorted(path for path in CONFIGS.rglob("*") if path.is_dir() and any(path.glob("*.yaml"))):
        name = group.relative_to(CONFIGS).as_posix()
        if name.startswith(("experiment", "debug", "suite", "size")):
            continue
        lines += [f"## {name}", ""]
        for file in sorted(group.glob("*.yaml")):
            lines += _section(f"{name}={file.stem}", file, level=3)
    return "\n".join(lines)


def _section(title: str, file: Path, level: int = 2) -> list[str]:
    text = file.read_text(encoding="utf-8")
    about = _heading_comment(text)
    rows = [
        f"| `{key.path}`{_code(key.value)} | {_cell(key.comment)} |"
        for key in yaml_keys(text)
        if not key.path.startswith(("defaults", "hydra"))
    ]
    table = ["| Key and value | Meaning |", "| --- | --- |", *rows, ""] if rows else []
    return [f"{'#' * level} {title}", "", *([f"{about}.", ""] if about else []), *table]


def _heading_comment(text: str) -> str:
    """The comment lines at the top of a file as one text."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("# @package"):
            continue
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# ").rstrip(". "))
    return html.escape(". ".join(lines), quote=False)


def yaml_keys(text: str) -> Iterator[Key]:
    """Every `key: value  # comment` of a YAML file as written here; a value in braces stays in one piece."""
    parents: list[tuple[int, str]] = []
    before: list[str] = []  # comment lines above a key
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            before.append(stripped.lstrip("# "))
            continue
        found = re.match(r"^( *)([\w@./]+):(?: +(.*))?$", line)
        if not found:
            before = []
            continue
        indent, key, rest = len(found[1]), found[2], found[3] or ""
        while parents and parents[-1][0] >= indent:
            parents.pop()
        value, comment = split_comment(rest)
        path = ".".join([*(name for _, name in parents), key])
        if value or comment:
            yield Key(path, value, comment or " ".join(before))
        if not value:
            parents.append((indent, key))
        before = []


def split_comment(rest: str) -> tuple[str, str]:
    """Split `value  # comment`; a # inside quotes or without a space before it belongs to the value."""
    quote = ""
    for position, sign in enumerate(rest):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign == "#" and (position == 0 or rest[position - 1] == " "):
            return rest[:position].strip(), rest[position + 1 :].strip()
    return rest.strip(), ""


def _code(value: str) -> str:
    return f"<br><code>{_cell(value)}</code>" if value else ""


def _cell(text: str) -> str:
    return html.escape(text, quote=False).replace("|", "&#124;")


# ---------------------------------------------------------------- links


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point the links that leave docs/ at generated pages or at the repository."""
    source = page.file.src_uri
    # Where the page stands in the repository: files of the root are pages in about/.
    moved = {target: name for name, target in ROOT_PAGES.items()}
    place = moved.get(source, f"docs/{source}")
    folder = posixpath.dirname(place)

    def replaced(found: re.Match[str]) -> str:
        image, label, target = found.groups()
        path, _, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return found[0]
        where = posixpath.normpath(posixpath.join(folder, path))
        anchor = f"#{anchor}" if anchor else ""
        if where == "README.md":
            where = "docs/index.md"
        inside = {**ROOT_PAGES, **ROOT_IMAGES}.get(where) or (
            where.removeprefix("docs/") if where.startswith("docs/") else None
        )
        if inside is not None and files.get_file_from_path(inside) is not None:
            relative = posixpath.relpath(inside, posixpath.dirname(source) or ".")
            return f"{image}[{label}]({relative}{anchor})"
        repository = config.get("repo_url") or os.environ.get("RL_LAB_REPOSITORY")
        if not repository or image:
            return label
        kind = "tree" if (ROOT / where).is_dir() else "blob"
        return f"[{label}]({repository.rstrip('/')}/{kind}/main/{where}{anchor})"

    # Fenced code stays as it is.
    parts = FENCE.split(markdown)
    return "".join(part if number % 2 else LINK.sub(replaced, part) for number, part in enumerate(parts))
