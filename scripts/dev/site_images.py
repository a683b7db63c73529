"""Pictures of pages of the built site (`make docs`) at 1280 and 390 pixels, light and dark, and what does not fit.

    make docs && python scripts/dev/site_images.py --out /tmp/site            # the pages of PAGES
    python scripts/dev/site_images.py --out /tmp/site index howto/play --full # whole pages
    python scripts/dev/site_images.py --all                                   # no pictures: only checks, of every page
    python scripts/dev/site_images.py --keep                                  # docs/images/site.png

The checks, of every page at both widths: the page is not wider than the window, nothing visible is cut off at its right
border unless it scrolls, every image is there. They need the package playwright and Chromium.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import io
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from report_images import chromium  # the file beside this one

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"
KEPT = ROOT / "docs" / "images" / "site.png"
PAGES = [
    "",
    "install",
    "tutorial",
    "howto/own_environment",
    "howto/play",
    "howto/demonstrations",
    "howto/report",
]
PAGES += [
    "algorithms/dreamer",
    "algorithms/iris",
    "measurements",
    "results",
    "environments",
    "reference/config",
]
PAGES += ["reference/python", "life_of_a_step", "faq"]
WIDTHS = {1280: 800, 390: 844}
# What is wider than the window, unless it or something around it scrolls by itself; images that did not load.
CHECK = """() => {
  const wide = document.documentElement.clientWidth, found = [];
  if (document.documentElement.scrollWidth > wide)
    found.push(`the page is ${document.documentElement.scrollWidth} pixels wide`);
  for (const part of document.querySelectorAll('.md-content *')) {
    const box = part.getBoundingClientRect();
    if (box.right <= wide + 1 || box.width === 0) continue;
    let around = part, scrolls = false;
    for (; around && around.classList && !around.classList.contains('md-content'); around = around.parentElement)
      scrolls ||= ['auto', 'scroll'].includes(getComputedStyle(around).overflowX);
    if (!scrolls) found.push(`<${part.tagName.toLowerCase()}> ends at ${Math.round(box.right)}: ` +
      part.textContent.trim().slice(0, 60));
  }
  for (const image of document.images)
    if (!image.complete || !image.naturalWidth) found.push(`no image at ${image.src}`);
  return found;
}"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="*", help="without .md; default: some of each kind")
    parser.add_argument("--out", type=Path, help="folder of the pictures; default: none are written")
    parser.add_argument("--full", action="store_true", help="whole pages instead of the first screen")
    parser.add_argument("--all", action="store_true", help="every page of the site")
    parser.add_argument("--keep", action="store_true", help="write docs/images/site.png")
    args = parser.parse_args(argv)
    pages = args.pages or PAGES
    if args.all:
        pages = sorted(file.parent.relative_to(SITE).as_posix() for file in SITE.rglob("index.html"))
    wrong = 0
    with served() as address, chromium() as browser:
        for dark in (False, True):
            for width in WIDTHS:
                with window(browser, width, dark) as tab:
                    for page in pages:
                        open_page(tab, f"{address}/{page.removesuffix('.')}")
                        for text in [] if dark else tab.evaluate(CHECK):
                            wrong += 1
                            print(f"{page or 'index'}, {width} pixels: {text}")
                        if args.out:
                            args.out.mkdir(parents=True, exist_ok=True)
                            name = f"{page.replace('/', '_') or 'index'}_{width}_{'dark' if dark else 'light'}.png"
                            tab.screenshot(path=args.out / name, full_page=args.full)
            if args.all and not args.out:
                break
        if args.keep:
            keep(browser, address)
    print(f"{len(pages)} pages at {' and '.join(map(str, WIDTHS))} pixels: {wrong} things do not fit")
    return 1 if wrong else 0


def keep(browser: Any, address: str) -> None:
    """One picture: the first page and a guide, wide and narrow, light and dark."""
    shown = [(1280, False, ""), (390, False, ""), (1280, True, "howto/play"), (390, True, "howto/play")]
    height, images = 400, []
    for width, dark, page in shown:
        with window(browser, width, dark) as tab:
            open_page(tab, f"{address}/{page}")
            image = Image.open(io.BytesIO(tab.screenshot())).convert("RGB")
        images.append(
            image.resize((round(image.width * height / image.height), height), Image.Resampling.LANCZOS)
        )
    half = [images[:2], images[2:]]
    joined = Image.new(
        "RGB", (max(sum(i.width + 8 for i in row) for row in half) - 8, 2 * height + 8), "white"
    )
    for row, pictures in enumerate(half):
        left = 0
        for image in pictures:
            joined.paste(image, (left, row * (height + 8)))
            left += image.width + 8
    joined.quantize(128).save(KEPT, optimize=True)
    print(f"{KEPT.relative_to(ROOT)}: {KEPT.stat().st_size / 1000:.0f} kB")


@contextmanager
def served() -> Iterator[str]:
    """The address of the built site on this machine."""
    if not (SITE / "index.html").is_file():
        sys.exit("build/site is missing: run make docs first")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@contextmanager
def window(browser: Any, width: int, dark: bool) -> Iterator[Any]:
    size = {"width": width, "height": WIDTHS[width]}
    context = browser.new_context(viewport=size, color_scheme="dark" if dark else "light")
    yield context.new_page()
    context.close()


def open_page(tab: Any, address: str) -> None:
    tab.goto(address, wait_until="load")
    # Images load when they come into view; the check asks for all.
    tab.evaluate("""() => Promise.all([...document.images].map(image => {
        image.loading = 'eager';
        return image.complete || new Promise(done => { image.onload = image.onerror = done });
    }))""")
    tab.evaluate("() => document.fonts.ready")


if __name__ == "__main__":
    sys.exit(main())
