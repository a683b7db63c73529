"""The documentation site: generated pages, links that leave docs/, and (extras) a strict build."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.loading import load_script

ROOT = Path(__file__).resolve().parents[1]
site = load_script("dev/site.py")


def test_yaml_keys_have_path_value_and_comment():
    text = """# About this file
a: 1                  # one
b:
  # what c is
  c: "x # y"
  d: {e: 1, f: [2]}   # two
g: null
"""
    keys = [(key.path, key.value, key.comment) for key in site.yaml_keys(text)]
    assert keys == [
        ("a", "1", "one"),
        ("b.c", '"x # y"', "what c is"),
        ("b.d", "{e: 1, f: [2]}", "two"),
        ("g", "null", ""),
    ]


def test_config_reference_has_every_file():
    text = site.config_reference()
    assert "`training.total_timesteps`" in text and "`algorithm.entropy`" in text
    for file in (ROOT / "rl_lab" / "configs" / "algorithm").glob("*.yaml"):
        assert f"### algorithm={file.stem}\n" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.count("|") == 3 for line in tables)  # two columns; a | inside is escaped


def test_python_reference_has_the_public_names():
    import rl_lab

    text = site.python_reference()
    assert [name for name in rl_lab.__all__ if f"::: rl_lab.{name}\n" not in text] == []
    assert "::: rl_lab.protocols.Policy\n" in text


@pytest.mark.parametrize(
    ("source", "link", "expected"),
    [
        ("index.md", "[R](../README.md)", "[R](index.md)"),
        ("howto/play.md", "[c](../../CONTRIBUTING.md#tests)", "[c](../about/contributing.md#tests)"),
        ("index.md", "[b](../benchmarks/README.md)", "[b](https://x.org/r/blob/main/benchmarks/README.md)"),
        ("index.md", "[b](../examples/extension)", "[b](https://x.org/r/tree/main/examples/extension)"),
        ("howto/play.md", "[g](../glossary.md)", "[g](../glossary.md)"),
        ("index.md", "![d](../rl_lab/agents/bounce/dream.gif)", "![d](images/dream.gif)"),
        ("about/contributing.md", "[a](docs/architecture.md)", "[a](../architecture.md)"),
        ("index.md", "[w](https://example.org/x)", "[w](https://example.org/x)"),
        ("index.md", "```\n[b](../benchmarks/README.md)\n```", "```\n[b](../benchmarks/README.md)\n```"),
    ],
)
def test_links(source: str, link: str, expected: str):
    known = {"index.md", "glossary.md", "architecture.md", "about/contributing.md", "images/dream.gif"}
    files: Any = SimpleNamespace(get_file_from_path=lambda path: path if path in known else None)
    page: Any = SimpleNamespace(file=SimpleNamespace(src_uri=source))
    assert site.on_page_markdown(link, page, {"repo_url": "https://x.org/r"}, files) == expected
    if "benchmarks" in expected and "```" not in expected:  # no address: plain text
        assert site.on_page_markdown(link, page, {"repo_url": ""}, files) == "b"


def test_navigation_names_pages_that_exist():
    nav = site.on_config({"docs_dir": str(ROOT / "docs")})["nav"]
    pages = [page for section in nav for entries in section.values() for page in entries]
    generated = {"reference/config.md", "reference/python.md", *site.ROOT_PAGES.values()}
    assert [page for page in pages if page not in generated and not (ROOT / "docs" / page).is_file()] == []
    files = {file.relative_to(ROOT / "docs").as_posix() for file in (ROOT / "docs").rglob("*.md")}
    assert files - set(pages) - {"results/README.md"} == set()
    assert len(pages) == len(set(pages))


@pytest.mark.extras
def test_strict_build(tmp_path: Path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    pages = {file.parent.name for file in (tmp_path / "site").rglob("index.html")}
    assert {"install", "tutorial", "config", "python", "dreamer", "changelog"} <= pages
    python = (tmp_path / "site" / "reference" / "python" / "index.html").read_text()
    assert "load_agent" in re.sub(r"<[^>]+>", "", python)
    # No page asks another server for fonts or scripts.
    for file in (tmp_path / "site").rglob("index.html"):
        assert not re.findall(
            r'<(?:script|link)[^>]+(?:src|href)="https?://(?!\S*canonical)', file.read_text()
        ), file
