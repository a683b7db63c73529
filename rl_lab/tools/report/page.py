"""A report as one self-contained HTML page: figures and small videos are embedded."""

from __future__ import annotations

import base64
import html
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from rl_lab.errors import one_line

LARGEST_EMBEDDED = 2_000_000  # bytes of one file; larger ones are linked
ALL_EMBEDDED = 24_000_000  # bytes of all media of a page; further files are linked
_TYPES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".mp4": "video/mp4",
    ".webm": "video/webm",
}

_CSS = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #636c76; --line: #d9dee4; --page: #f6f8fa; --card: #fff;
  --accent: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e2e6ea; --soft: #98a1ab; --line: #30363d; --page: #0d1117;
  --card: #161b22; --accent: #58a6e0; }
  /* Plots are dark on white: invert the lightness, keep the hues, blend with the card. */
  img.plot { filter: invert(1) hue-rotate(180deg); mix-blend-mode: screen; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -.01em; }
h2 { font-size: 17px; margin: 36px 0 10px; }
h3 { font-size: 13px; margin: 2px 0 6px; color: var(--soft); font-weight: 500; }
.contents { font-size: 13px; margin-top: 10px; } .contents a { text-decoration: none; }
p { margin: 6px 0; }
.soft { color: var(--soft); font-size: 13px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px; }
.card + .card { margin-top: 14px; }
img.plot { display: block; width: 100%; height: auto; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(132px, 1fr)); gap: 10px; margin: 18px 0; }
.fact { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 10px 12px; }
.fact b { display: block; font-size: 20px; line-height: 1.35; font-weight: 600; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
.fact span { display: block; color: var(--soft); font-size: 12px; line-height: 1.4; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 500; white-space: nowrap; }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
tr.strong td { font-weight: 600; }
td.n { text-align: right; white-space: nowrap; } th.n { text-align: right; }
code, pre { font: 12.5px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre { overflow-x: auto; margin: 10px 0 0; white-space: pre-wrap; }
details summary { cursor: pointer; color: var(--accent); }
details + details { margin-top: 8px; }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(200px, 1fr)); gap: 14px; }
figure { margin: 0; } figcaption { color: var(--soft); font-size: 12.5px; margin-top: 6px; overflow-wrap: anywhere; }
.gallery img, .gallery video { display: block; width: 100%; max-height: 320px; object-fit: contain; border-radius: 6px;
  background: #0001; }
.gallery .small { image-rendering: pixelated; }
a { color: var(--accent); }
@media (max-width: 640px) { img.plot { min-width: 680px; } }
"""


@dataclass
class Table:
    """A table. Cells are plain text and are escaped on output."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[int] = ()  # right-aligned columns
    title: str = ""
    strong: Sequence[int] = ()  # rows in bold


@dataclass
class Section:
    """One section of the page: a heading, then plots, tables, collapsed texts and media, in this order."""

    title: str
    note: str = ""
    plots: Sequence[Path] = ()
    tables: Sequence[Table] = ()
    texts: Sequence[tuple[str, str]] = ()  # (summary, collapsed text)
    media: Sequence[tuple[Path, str]] = ()  # (file, caption)


@dataclass
class Page:
    title: str
    subtitle: str = ""
    facts: Sequence[tuple[str, str, str]] = ()  # (name, value, remark)
    sections: list[Section] = field(default_factory=list)
    script: str = ""  # only for a served page


def write_page(page: Page, path: Path) -> Path:
    """Write the page; links to media that are too large to embed are relative to its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(render_page(page, path.parent), encoding="utf-8", errors="replace")
    temporary.replace(path)
    return path


Link = Callable[[Path], str]


def render_page(page: Page, folder: Path, link: Link | None = None) -> str:
    """Render the page as HTML. `folder`: where it will be stored.

    `link`: returns the URL of a file to link.
    """
    media = _Media(link or (lambda file: quote(os.path.relpath(file, folder))))
    facts = "".join(
        f'<div class="fact"><span>{_text(name)}</span><b>{_text(value)}</b><span>{_text(remark)}</span></div>'
        for name, value, remark in page.facts
    )
    contents = " · ".join(
        f'<a href="#{_anchor(section.title)}">{_text(section.title)}</a>' for section in page.sections
    )
    sections = "\n".join(_section(section, media) for section in page.sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_text(page.title)}</title>
<style>{_CSS}</style>
</head>
<body>
<main>
<h1>{_text(page.title)}</h1>
<p class="soft">{_text(page.subtitle)}</p>
{f'<p class="contents">{contents}</p>' if len(page.sections) > 3 else ""}
{f'<div class="facts">{facts}</div>' if facts else ""}
{sections}
</main>
{page.script}
</body>
</html>
"""


def _section(section: Section, media: _Media) -> str:
    parts = [f'<h2 id="{_anchor(section.title)}">{_text(section.title)}</h2>']
    if section.note:
        parts.append(f'<p class="soft">{_text(section.note)}</p>')
    for plot in section.plots:
        name = _text(plot.stem.replace("_", " "))
        parts.append(f'<div class="card scroll"><img class="plot" alt="{name}" src="{_embed(plot)}"></div>')
    parts += [f'<div class="card scroll">{_table(table)}</div>' for table in section.tables]
    if section.texts:
        collapsed = "".join(
            f"<details><summary>{_text(title)}</summary><pre>{_text(text)}</pre></details>"
            for title, text in section.texts
        )
        parts.append(f'<div class="card">{collapsed}</div>')
    if section.media:
        figures = "".join(media.figure(file, caption) for file, caption in section.media)
        parts.append(f'<div class="card gallery">{figures}</div>')
    return "\n".join(["<section>", *parts, "</section>"])


def _table(table: Table) -> str:
    def row(cells: Iterable[str], tag: str, strong: bool = False) -> str:
        texts = (
            f'<{tag} class="n">{_text(cell)}</{tag}>'
            if column in table.right
            else f"<{tag}>{_text(cell)}</{tag}>"
            for column, cell in enumerate(cells)
        )
        return f"<tr{' class=strong' if strong else ''}>{''.join(texts)}</tr>"

    body = "".join(row(cells, "td", index in table.strong) for index, cells in enumerate(table.rows))
    title = f"<h3>{_text(table.title)}</h3>" if table.title else ""
    return f"{title}<table><thead>{row(table.header, 'th')}</thead><tbody>{body}</tbody></table>"


class _Media:
    """Figures of a gallery: embedded up to ALL_EMBEDDED bytes, linked after that."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._room = ALL_EMBEDDED

    def figure(self, file: Path, caption: str) -> str:
        words = f"<figcaption>{_text(caption)}</figcaption>"
        try:
            size = file.stat().st_size
        except OSError:
            return f"<figure><p class='soft'>deleted</p>{words}</figure>"
        if size >= LARGEST_EMBEDDED or size > self._room:
            address = html.escape(self._link(file))
            return f'<figure><a href="{address}">{_text(file.name)}</a> ({size / 1e6:.1f} MB){words}</figure>'
        is_video = _TYPES[file.suffix.lower()].startswith("video/")
        try:
            source = _embed(file)
            crisp = ' class="small"' if not is_video and _is_small(file) else ""
        except Exception as error:  # an unreadable file must not fail the page
            why = _text(f"{file} cannot be shown: {one_line(error)}")
            return f"<figure><p class='soft'>{why}</p>{words}</figure>"
        self._room -= size
        if is_video:
            return f'<figure><video src="{source}" controls autoplay loop muted playsinline></video>{words}</figure>'
        return f'<figure><img{crisp} alt="" src="{source}">{words}</figure>'


def _is_small(file: Path) -> bool:
    """Return whether an image is so small that the page enlarges it: then its pixels should stay sharp."""
    from PIL import Image

    try:
        with Image.open(file) as image:
            return image.width < 200
    except OSError:
        return False


def _embed(file: Path) -> str:
    return f"data:{_TYPES[file.suffix.lower()]};base64,{base64.b64encode(file.read_bytes()).decode()}"


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _text(value: str) -> str:
    return html.escape(str(value))
