"""The pictures of docs/howto/{report,dream_report}.md, from runs that this trains: minutes on a CPU.

python scripts/dev/report_images.py [--runs DIR] [report] [phases] [dream] [play]

play: docs/images/play_instant.png, the page of `make play`, from the agent in the package: seconds.

Runs that lie in DIR already are gone on with, so that giving the command again draws the pictures anew. The page is
photographed with Chromium, where there is one; its plots are interactive if plotly is installed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from rl_lab.config.multirun import multirun
from rl_lab.run_folder import RunFolder
from rl_lab.tools.dream_report import measure
from rl_lab.tools.dream_report.page import write_dream_report
from rl_lab.tools.evaluate import evaluate
from rl_lab.tools.report.command import write_report
from rl_lab.tools.report.interactive import available
from rl_lab.training import train

FOLDER = Path(__file__).parents[2] / "docs" / "images" / "report"
QUIET = ["logging.tensorboard=false", "logging.progress=plain"]
# Three seeds of two train ratios on one task.
SHORT = [
    "training.total_timesteps=2000",
    "training.evaluate.every_env_steps=500",
    "training.log.every_env_steps=100",
]
SWEEPS = {ratio: [f"algorithm.train_ratio={ratio}", *SHORT] for ratio in (32, 8)}
# Three kinds of world model on one small world of pictures: Catch with 4×4 cells on 16×16 pixels.
CATCH = ["environment.cells=4", "environment.side=16", "training.evaluate.every_env_steps=null"]
HALVE = "{widths: [1, 2], halve: [true, true]}"
MODELS = {
    "Dreamer": ["experiment=dreamer_catch", "training.total_timesteps=4000"],
    "Δ-IRIS": [
        "experiment=delta_iris_catch",
        f"components.tokenizer={HALVE}",
        f"components.world_model={HALVE}",
        f"controllers.actor_critic.trunk={HALVE}",
    ],
    "World Models": ["experiment=og_wm_catch", "algorithm.stages.generations=5"],
}


def report_pictures(runs: Path) -> None:
    folders = []
    for ratio, words in SWEEPS.items():
        folders.append(runs / f"ratio_{ratio}")
        sweep = f"hydra.sweep.dir={folders[-1]}"
        multirun(["experiment=dreamer_cartpole", "experiment.seed=0,1,2", *words, *QUIET, sweep])
    evaluate(folders[0] / "0", checkpoint="best", episodes=20, video=True)
    page, *_ = write_report(folders, out=runs / "report")
    photograph(page, FOLDER / "page.png", width=1100, height=1500)
    photograph(page, FOLDER / "phone.png", width=390, height=1500, dark=True)


def phase_picture(runs: Path) -> None:
    """Short runs: the lengths of the phases are not those of real training."""
    words = ["debug=tiny", "training.total_timesteps=null", *QUIET]
    curricula = {
        "world_models": ["experiment=og_wm_catch", "phases=og_wm_iterative"],
        "iris": ["experiment=iris_catch", "algorithm.epochs.actor_critic=6"],
    }
    folders = []
    for name, own in curricula.items():
        folders.append(runs / "phases" / name)
        train(None, [*own, *words, f"experiment.name={name}", f"run_dir={folders[-1]}"])
    write_report(folders, out=runs / "phases" / "report", interactive=False)
    keep(runs / "phases" / "report" / "phases.png", FOLDER / "phases.png")


def dream_pictures(runs: Path) -> None:
    folders = []
    for name, words in MODELS.items():
        folder = runs / "dream" / words[0].partition("=")[2]
        train(None, [*words, *CATCH, *QUIET, f"experiment.name={name!r}", f"run_dir={folder}"])
        folders.append(RunFolder(folder))
    found = measure(folders, episodes=48, horizon=6, context=3, segments=2, policy="random")
    files = write_dream_report(found, runs / "dream_report")
    keep(files["png"], FOLDER / "dream.png")


def play_picture() -> None:
    """The page of `make play`, after some keys in the dream."""
    command = [
        sys.executable,
        "-m",
        "rl_lab",
        "play",
        "example://boxing",
        "-w",
        "--web",
        "--port",
        "0",
        "--seed",
        "3",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+", line)))
            with chromium() as browser:
                page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light")
                page.goto(address)
                page.wait_for_function("() => document.body.dataset.steers === 'true'")
                for step in range(12):
                    page.keyboard.press("d" if step % 4 < 3 else "ArrowRight")
                    page.wait_for_function("done => +document.body.dataset.step > done", arg=step)
                page.wait_for_timeout(500)
                page.screenshot(path=FOLDER.parent / "play_instant.png")
        finally:
            server.terminate()
    print(FOLDER.parent / "play_instant.png")


@contextmanager
def chromium() -> Iterator[Any]:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        sys.exit("no Chromium here: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


def photograph(page: Path, target: Path, width: int, height: int, dark: bool = False) -> None:
    """What a browser shows of a page, with the pointer over the first plot if it is interactive."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        print(f"no Chromium here: {target} is not made")
        return
    from playwright.sync_api import sync_playwright

    size: Any = {"width": width, "height": height}
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        shown = started.new_page(viewport=size, color_scheme="dark" if dark else "light")
        shown.goto(page.resolve().as_uri())
        if available() and shown.locator("#chart-data").count():  # a page with interactive plots
            shown.locator("html[data-charts=ready]").wait_for(state="attached")
            plot = shown.locator(".nsewdrag").first.bounding_box()
            assert plot is not None
            shown.wait_for_timeout(2000)
            shown.mouse.move(plot["x"] + 0.7 * plot["width"], plot["y"] + 0.6 * plot["height"])
            shown.wait_for_timeout(500)
        shown.screenshot(path=target)
        started.close()
    keep(target, target)


def keep(picture: Path, target: Path) -> None:
    """In 256 colours, also rare ones: a third of the bytes."""
    with Image.open(picture) as content:
        smaller = content.convert("RGB").quantize(256, method=Image.Quantize.FASTOCTREE)
    smaller.save(target, optimize=True)
    print(target)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pictures", nargs="*", help="report, phases, dream, play (default: all)")
    parser.add_argument("--runs", type=Path, default=Path("outputs/docs"))
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    runs = args.runs.resolve()
    if not args.pictures or "report" in args.pictures:
        report_pictures(runs)
    if not args.pictures or "phases" in args.pictures:
        phase_picture(runs)
    if not args.pictures or "dream" in args.pictures:
        dream_pictures(runs)
    if not args.pictures or "play" in args.pictures:
        play_picture()


if __name__ == "__main__":
    main()
