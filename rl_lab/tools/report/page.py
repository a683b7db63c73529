"""A report as one self-contained HTML page: figures and small videos are embedded."""

from __future__ import annotations

import base64
import html
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from rl_lab.errors import one_line
from rl_lab.tools.report.figures import narrow_file
from rl_lab.tools.report.interactive import Chart, Charts, scripts

LARGEST_EMBEDDED = 2_000_000  # bytes of one file; larger ones are linked
ALL_EMBEDDED = 24_000_000  # bytes of all media of a page; further files are linked
PHONE = 640  # pixels, as in _CSS: up to this width the page shows the narrow pictures
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
.card + .card, .charts + .card { margin-top: 14px; }
img.plot { display: block; width: 100%; height: auto; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(132px, 1fr)); gap: 10px; margin: 18px 0; }
.fact { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 10px 12px; }
.fact b { display: block; font-size: 20px; line-height: 1.35; font-weight: 600; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
.fact span { display: block; color: var(--soft); font-size: 12px; line-height: 1.4; }
/* A shadow at the edge behind which there is more. */
.scroll { overflow-x: auto; background: linear-gradient(to right, var(--card) 12px, transparent) 0 0 / 32px 100%,
  linear-gradient(to left, var(--card) 12px, transparent) 100% 0 / 32px 100%, linear-gradient(to right, #0003, transparent)
  0 0 / 12px 100%, linear-gradient(to left, #0003, transparent) 100% 0 / 12px 100%, var(--card);
  background-repeat: no-repeat; background-attachment: local, local, scroll, scroll, scroll; }
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
.gallery .wide { grid-column: 1 / -1; }
.gallery .small { image-rendering: pixelated; }
a { color: var(--accent); }
.bar { position: sticky; top: 0; z-index: 5; margin: 16px -8px 0; padding: 8px; background: var(--page);
  border-bottom: 1px solid var(--line); font-size: 13px; }
.bar .row { display: flex; flex-wrap: wrap; gap: 6px 16px; align-items: center; }
.bar label { display: inline-flex; gap: 6px; align-items: center; color: var(--soft); white-space: nowrap; }
.bar select, .bar input[type=search], .bar button { font: inherit; color: var(--ink); background: var(--card);
  border: 1px solid var(--line); border-radius: 6px; padding: 3px 8px; }
.bar input[type=search] { width: 170px; } .bar input[type=range] { width: 110px; accent-color: var(--accent); }
.bar output { min-width: 30px; display: inline-block; font-variant-numeric: tabular-nums; color: var(--ink); }
.bar details { margin-top: 6px; } .bar summary { font-size: 13px; }
#run-chips { display: flex; flex-wrap: wrap; gap: 6px; margin-top: 6px; max-height: 30vh; overflow-y: auto; }
#run-chips button { cursor: pointer; text-align: left; } #run-chips button[aria-pressed=false] { opacity: .5; text-decoration: line-through; }
#run-chips button[aria-pressed]::before { content: ""; display: inline-block; width: 10px; height: 10px; margin-right: 6px;
  border-radius: 3px; background: var(--run); } #run-chips button[aria-pressed=false]::before { background: none;
  box-shadow: inset 0 0 0 2px var(--run); }
[hidden] { display: none !important; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(300px, 100%), 1fr)); gap: 12px; }
.chart { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 8px 10px; min-width: 0; }
.chart.large, .chart.wide { grid-column: 1 / -1; }
.chart .title { font: inherit; font-size: 13px; color: var(--ink); background: none; border: 0; padding: 2px 0; cursor: pointer;
  max-width: 100%; overflow-wrap: anywhere; text-align: left; }
.chart .title::after { content: " ⤢"; color: var(--soft); } .chart.large .title::after { content: ""; }
.plotarea { min-height: 190px; } .chart.large .plotarea { min-height: 340px; }
.chart.phases .plotarea { min-height: 90px; }
section { scroll-margin-top: 70px; }
h2 { scroll-margin-top: 70px; }
.live { display: grid; gap: 8px; margin: 14px 0; max-height: 50vh; overflow-y: auto; } .live .run { display: grid; gap: 4px 12px; align-items: center;
  grid-template-columns: minmax(0, 2fr) 84px minmax(80px, 1fr) minmax(150px, auto); padding: 8px 12px; }
.live .run + .run { margin-top: 0; } .live progress { width: 100%; height: 8px; accent-color: var(--accent); }
.live .state::before { content: "● "; color: var(--dot, var(--soft)); } .live .state { white-space: nowrap; }
.live .running { --dot: #2da44e; } .live .finished { --dot: #0072b2; } .live .crashed { --dot: #cf222e; }
.live .stopped { --dot: #bf8700; }
@media (max-width: 640px) { main { padding: 18px 12px 40px; } .bar { margin: 12px -12px 0; padding: 8px 12px; position: static; }
  .live .run { grid-template-columns: minmax(0, 1fr) auto; } .bar label:has([type=search]) { flex-basis: 100%; } .facts { grid-template-columns: 1fr 1fr; }
  .facts .fact b { font-size: 17px; white-space: normal; } .bar .row { gap: 6px 12px; } .bar input[type=range] { width: 90px; }
  .bar input[type=search] { width: 100%; } .gallery { grid-template-columns: 1fr; } }
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
    plots: Sequence[Path] = ()  # each with its `narrow_file`
    tables: Sequence[Table] = ()
    texts: Sequence[tuple[str, str]] = ()  # (summary, collapsed text)
    media: Sequence[tuple[Path, str]] = ()  # (file, caption)
    charts: Sequence[Chart] = ()  # interactive plots, on a page with `Page.charts`; they replace `plots`


@dataclass
class Page:
    title: str
    subtitle: str = ""
    facts: Sequence[tuple[str, str, str]] = ()  # (name, value, remark)
    sections: list[Section] = field(default_factory=list)
    script: str = ""  # only for a served page
    charts: Charts | None = None  # the curves of interactive plots; None: the plots are pictures
    hint: str = ""  # one line at the end


def write_page(page: Page, path: Path) -> Path:
    """Write the page; links to media that are too large to embed are relative to its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(render_page(page, path.parent), encoding="utf-8", errors="replace")
    temporary.replace(path)
    return path


Link = Callable[[Path], str]


def render_page(
    page: Page,
    folder: Path,
    link: Link | None = None,
    *,
    embed: bool = True,
    nonce: str = "",
    with_library: bool = True,
) -> str:
    """Render the page as HTML. `folder`: where it will be stored.

    link:         returns the URL of a file to link
    embed:        write small media into the page; False: link all of them
    nonce:        of the page's scripts
    with_library: False: leave out plotly.js, because the browser has it
    """
    media = _Media(link or (lambda file: quote(os.path.relpath(file, folder))), embed)
    facts = "".join(
        f'<div class="fact"><span>{_text(name)}</span><b>{_text(value)}</b><span>{_text(remark)}</span></div>'
        for name, value, remark in page.facts
    )
    contents = " · ".join(
        f'<a href="#{_anchor(section.title)}">{_text(section.title)}</a>' for section in page.sections
    )
    sections = "\n".join(_section(section, media, page.charts is not None) for section in page.sections)
    data = scripts(page.charts, nonce, with_library) if page.charts is not None else ""
    hint = f'<p class="soft">{_text(page.hint)}</p>' if page.hint else ""
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
{_CONTROLS if page.charts is not None else ""}
{sections}
{hint}
</main>
{data}
{page.script}
</body>
</html>
"""


# What the reader may choose; charts.js shows it.
_CONTROLS = """<div class="bar" id="controls" hidden>
<div class="row">
<label>x axis <select id="x-axis"><option value="step">steps</option><option value="frames">frames</option>
<option value="updates">updates</option><option value="seconds">wall time</option></select></label>
<label title="running mean over this share of the points; evaluations stay as they are">smoothing
<input id="smooth" type="range" min="0" max="30" step="1"><output id="smooth-value"></output></label>
<label><input id="log-y" type="checkbox"> log y</label>
<label>seeds <select id="seeds"><option value="mean">mean and interval</option><option value="single">single runs</option>
</select></label>
<label><input id="search" type="search" placeholder="find a metric  ( / )" aria-label="find a metric">
<span id="found"></span></label>
</div>
<details id="runs-box"><summary id="run-count">Runs</summary><div id="run-chips"></div></details>
</div>"""


def _chart(chart: Chart) -> str:
    spec = {
        "title": chart.title,
        "keys": list(chart.keys),
        "task": chart.task,
        "unit": chart.unit,
        "large": chart.large,
        "kind": chart.kind,
    }
    size = (" large" if chart.large else "") + (" phases" if chart.kind == "phases" else "")
    label = _text(chart.keys[0] if len(chart.keys) == 1 else chart.title)
    return (
        f'<div class="chart{size}" data-chart="{_text(json.dumps(spec))}"><button class="title" type="button" '
        f'title="{label}" aria-expanded="false">{_text(chart.title)}</button><div class="plotarea"></div></div>'
    )


def _section(section: Section, media: _Media, interactive: bool) -> str:
    parts = [f'<h2 id="{_anchor(section.title)}">{_text(section.title)}</h2>']
    if section.note:
        parts.append(f'<p class="soft">{_text(section.note)}</p>')
    drawn = interactive and bool(section.charts)
    if drawn:
        parts.append(f'<div class="charts">{"".join(map(_chart, section.charts))}</div>')
    for plot in () if drawn else section.plots:
        name = _text(plot.stem.replace("_", " "))
        narrow = f'<source media="(max-width: {PHONE}px)" srcset="{_embed(narrow_file(plot))}">'
        wide = f'<img class="plot" alt="{name}" src="{_embed(plot)}">'
        parts.append(f'<div class="card"><picture>{narrow}{wide}</picture></div>')
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
    only_charts = drawn and not (section.tables or section.texts or section.media)
    return "\n".join([f"<section{' data-metrics' if only_charts else ''}>", *parts, "</section>"])


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

    def __init__(self, link: Link, embed: bool = True) -> None:
        self._link = link
        self._embed = embed
        self._room = ALL_EMBEDDED

    def figure(self, file: Path, caption: str) -> str:
        words = f"<figcaption>{_text(caption)}</figcaption>"
        try:
            size = file.stat().st_size
        except OSError:
            return f"<figure><p class='soft'>deleted</p>{words}</figure>"
        if size >= LARGEST_EMBEDDED or (self._embed and size > self._room):
            address = html.escape(self._link(file))
            return f'<figure><a href="{address}">{_text(file.name)}</a> ({size / 1e6:.1f} MB){words}</figure>'
        is_video = _TYPES[file.suffix.lower()].startswith("video/")
        try:
            source = _embed(file) if self._embed else html.escape(self._link(file))
            # Videos of small frames are stored enlarged; the browser may enlarge them further.
            small = "report_" in file.name if is_video else _is_small(file)
            crisp = ' class="small"' if small else ""
        except Exception as error:  # an unreadable file must not fail the page
            why = _text(f"{file} cannot be shown: {one_line(error)}")
            return f"<figure><p class='soft'>{why}</p>{words}</figure>"
        self._room -= size
        if is_video:
            shown = f'<video{crisp} src="{source}" controls autoplay loop muted playsinline></video>'
        else:
            shown = f'<img{crisp} alt="" src="{source}">'
        mark = "" if self._embed else f' data-file="{source}"'
        wide = ' class="wide"' if "imagination" in file.name else ""  # rollouts side by side
        return f"<figure{wide}{mark}>{shown}{words}</figure>"


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
