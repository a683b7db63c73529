"""Draws the diagrams of docs/architecture.md and docs/life_of_a_step.md into docs/images/diagrams.

    python scripts/dev/diagrams.py            # all of them
    python scripts/dev/diagrams.py loop step  # some

Coordinates are inches from the top left. A diagram is WIDTH wide and has no smaller letters than SMALL, so that it can
be read on a phone. Every name of code in a diagram exists: tests/test_diagrams.py looks for it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from PIL import Image

from rl_lab.tools.report.figures import COLORS, INK, SOFT, figure_file

FOLDER = Path(__file__).parents[2] / "docs" / "images" / "diagrams"
WIDTH = 4.8
SMALL, LARGE = 9.0, 9.5  # points
LOOP, ALGORITHM, DATA, ENVIRONMENT = COLORS[0], COLORS[1], COLORS[2], COLORS[3]
PLAIN, LINE = "#9aa0a6", "#5f656b"
KINDS = {LOOP: "the loop", ALGORITHM: "the algorithm", DATA: "data", ENVIRONMENT: "environments"}


class Canvas:
    """Boxes and arrows in inches."""

    def __init__(self, figure: Any, height: float) -> None:
        self.axes = figure.add_axes((0, 0, 1, 1))
        self.axes.set_xlim(0, WIDTH)
        self.axes.set_ylim(height, 0)
        self.axes.set_axis_off()

    def box(
        self,
        place: tuple[float, float, float, float],  # left, top, width, height
        title: str = "",
        text: str = "",
        *,
        color: str = LOOP,
        number: str = "",
        top: bool = False,  # the title at the upper edge: the box has others inside
        pale: float = 0.1,
    ) -> None:
        from matplotlib.colors import to_rgb
        from matplotlib.patches import FancyBboxPatch

        left, upper, width, height = place
        style = "round,pad=0,rounding_size=0.06"
        fill = [1 - pale * (1 - part) for part in to_rgb(color)]  # opaque: boxes lie in boxes
        line = {"edgecolor": color, "linewidth": 1.1}
        self.axes.add_patch(FancyBboxPatch((left, upper), width, height, style, facecolor=fill, **line))
        lines = ([(title, LARGE, INK, "bold")] if title else []) + [
            (line, SMALL, "#3c4146", "normal") for line in text.splitlines()
        ]
        step = 0.165
        first = upper + 0.13 if top else upper + height / 2 - step * (len(lines) - 1) / 2
        for at, (words, size, ink, weight) in enumerate(lines):
            where = (left + width / 2, first + at * step)
            self.axes.text(*where, words, ha="center", va="center", fontsize=size, color=ink, weight=weight)
        if number:
            self.axes.plot(left, upper + height / 2, "o", color=color, markersize=13)
            self.label(left, upper + height / 2, number, color="white", weight="bold")

    def label(self, x: float, y: float, text: str, **options: Any) -> None:
        style = {
            "ha": "center",
            "va": "center",
            "fontsize": SMALL,
            "color": SOFT,
            "linespacing": 1.15,
            **options,
        }
        self.axes.text(x, y, text, **style)

    def arrow(self, *points: tuple[float, float], color: str = LINE, dashed: bool = False) -> None:
        """A line through the points, with a head at its end."""
        style: dict[str, Any] = {"linewidth": 1.3, "linestyle": "--" if dashed else "-"}
        for begin, end in pairwise(points[:-1]):
            self.axes.plot(*zip(begin, end), color=color, solid_capstyle="projecting", **style)
        head = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, "mutation_scale": 10}
        self.axes.annotate(
            "", points[-1], points[-2], arrowprops={**head, **style, "edgecolor": color, "facecolor": color}
        )

    def legend(self, y: float, kinds: Sequence[str]) -> None:
        x = 0.14
        for color in kinds:
            self.box((x, y - 0.06, 0.16, 0.12), color=color, pale=0.25)
            self.label(x + 0.22, y, KINDS[color], ha="left")
            x += 0.36 + 0.075 * len(KINDS[color])


# ---------------------------------------------------------------- docs/architecture.md


def draw_loop(figure: Any) -> None:
    """One action of the Orchestrator. Grey arrows: what happens next; green ones: where rows go."""
    canvas = Canvas(figure, HEIGHTS["loop"])
    left, wide = 0.12, 4.28
    canvas.box((left, 0.1, wide, 0.5), "PhaseScheduler.next_action", "the next action of the running phase")
    columns = {"collect": (0.12, 1.4), "hook": (1.62, 1.5), "evaluate": (3.22, 1.18)}
    top, tall = 1.02, 1.66
    words = {"collect": "“collect”", "hook": "the name of a hook", "evaluate": "“evaluate”"}
    for name, (begin, size) in columns.items():
        middle = begin + size / 2
        canvas.arrow((middle, 0.6), (middle, top))
        canvas.label(middle, 0.79, words[name], backgroundcolor="white", color=INK)
    parts = {
        "collect": (
            "Collector.step",
            ("VectorEnv", "step_wait", ENVIRONMENT),
            ("workflow.act", "", ALGORITHM),
        ),
        "hook": ("HookRunner.run", ("BatchStream", "next", DATA), ("Hook.step", "", ALGORITHM)),
    }
    last = {"collect": ("VectorEnv", "step_async", ENVIRONMENT), "hook": ("BatchStream", "write_back", DATA)}
    for name, (title, *inside) in parts.items():
        begin, size = columns[name]
        canvas.box((begin, top, size, tall), title, top=True)
        for at, (part, text, color) in enumerate((*inside, last[name])):
            high = 0.42 if text else 0.34
            place = (begin + 0.12, top + (0.27, 0.75, 1.15)[at], size - 0.24, high)
            canvas.box(place, part, text, color=color)
    begin, size = columns["evaluate"]
    canvas.box((begin, top, size, tall), "Evaluator.run", top=True)
    for at, line in enumerate(
        ("whole episodes", "in environments", "of its own, with", "a generator of", "its own")
    ):
        canvas.label(begin + size / 2, top + 0.48 + 0.19 * at, line, color="#3c4146")
    bottom = top + tall
    canvas.box((0.4, bottom + 0.46, 2.44, 0.5), "ReplayBuffer", "rows of all environments", color=DATA)
    for x, down, text in ((0.62, True, "Storage.store"), (1.84, False, "batch"), (2.4, True, "latents")):
        ends = ((x, bottom), (x, bottom + 0.46)) if down else ((x, bottom + 0.46), (x, bottom))
        canvas.arrow(*ends, color=DATA)
        canvas.label(x + 0.06, bottom + 0.23, text, ha="left")
    after = bottom + 1.22
    for x in (0.26, 2.98, begin + size / 2):
        canvas.arrow((x, bottom), (x, after))
    canvas.box((left, after, wide, 0.5), "PhaseScheduler.advance", "counters move; the next phase may begin")
    canvas.arrow((2.26, after + 0.5), (2.26, after + 0.74))
    cadences = "what is due: log, evaluate, report, checkpoint\n(checked before each action, too)"
    canvas.box((left, after + 0.74, wide, 0.66), "cadences", cadences)
    edge, back, height = left + wide, 4.64, after + 1.07
    canvas.arrow((edge, height), (back, height), (back, 0.35), (edge, 0.35))
    canvas.label(back, 2.6, "until there is no next action", rotation=90, backgroundcolor="white")
    canvas.legend(after + 1.6, [LOOP, ALGORITHM, DATA, ENVIRONMENT])


# package -> the packages that it may import, besides SHARED. tests/test_imports.py checks the code.
IMPORTS = {
    "orchestration": ("buffers", "launch"),
    "workflows": ("launch", "components"),
    "environments": (),
    "buffers": (),
    "launch": (),
    "components": (),
}
SHARED = ("records", "protocols", "errors", "utils")


def draw_imports(figure: Any) -> None:
    """Which package may import which."""
    canvas = Canvas(figure, HEIGHTS["imports"])
    layers = ("cli", "tools", "training, agent, config.multirun", "build, config, run_folder")
    y = 0.1
    for at, names in enumerate(layers):
        canvas.box((1.0, y, 2.8, 0.32), names, color=PLAIN)
        if at + 1 < len(layers):
            canvas.arrow((2.4, y + 0.32), (2.4, y + 0.54))
        y += 0.54
    edge = y - 0.22
    wide, high = 1.4, 0.36
    middle, lower, last = edge + 0.42, edge + 1.24, edge + 2.06
    places = {
        "orchestration": (0.12, middle, LOOP),
        "workflows": (1.7, middle, ALGORITHM),
        "environments": (3.28, middle, ENVIRONMENT),
        "buffers": (0.12, lower, DATA),
        "launch": (1.12, lower, PLAIN),
        "components": (1.95, lower, ALGORITHM),
    }
    sizes = {"buffers": 0.9, "launch": 0.73, "components": 1.15}
    boxes = {}
    for name, (left, top, color) in places.items():
        boxes[name] = (left, top, sizes.get(name, wide), high)
        canvas.box(boxes[name], name, color=color)

    def centre(name: str) -> float:
        return boxes[name][0] + boxes[name][2] / 2

    for name in ("orchestration", "workflows", "environments"):
        canvas.arrow((centre("workflows"), edge), (centre(name), middle))
    for name, targets in IMPORTS.items():
        for target in targets:
            shift = 0.15 if target == "launch" and name == "workflows" else 0.0
            begin = centre(name) - (0.3 if shift else 0.0)
            canvas.arrow((begin, middle + high), (centre(target) + shift, lower))
    for name in ("buffers", "launch", "components"):
        canvas.arrow((centre(name), lower + high), (centre(name), last))
    canvas.arrow((centre("environments"), middle + high), (centre("environments"), last))
    canvas.box((0.12, last, 4.56, high), ", ".join(SHARED), color=PLAIN)


# ---------------------------------------------------------------- docs/life_of_a_step.md


def draw_step(figure: Any) -> None:
    """One step of the environments and one update, in three lanes; the numbers are those of the page's sections."""
    height = HEIGHTS["step"]
    canvas = Canvas(figure, height)
    lanes = {"worker": (0.03, 1.36), "trainer": (1.45, 1.88), "device": (3.39, 1.38)}
    heads = {"worker": "worker process", "trainer": "trainer process", "device": "training device"}
    for name, (left, wide) in lanes.items():
        canvas.box((left, 0.04, wide, height - 0.36), color=PLAIN, pale=0.08)
        canvas.label(left + wide / 2, 0.18, heads[name], color=INK, weight="bold", fontsize=LARGE)
    edges = {"worker": (0.17, 1.08), "trainer": (1.62, 1.54), "device": (3.51, 1.14)}
    left, wide = lanes["trainer"]
    for top, tall, title in ((0.36, 1.98, "Collector.step"), (3.68, 2.0, "HookRunner.run")):
        canvas.box((left + 0.05, top, wide - 0.1, tall), title, top=True)

    def put(
        lane: str, top: float, title: str, text: str, color: str, number: str = "", tall: float = 0.46
    ) -> None:
        left, wide = edges[lane]
        canvas.box((left, top, wide, tall), title, text, color=color, number=number)

    def across(begin: str, end: str, y: float) -> None:
        (left, wide), (other, size) = edges[begin], edges[end]
        canvas.arrow(*((left + wide, y), (other, y)) if other > left else ((left, y), (other + size, y)))

    put("worker", 0.6, "EnvRunner", "step: writes\nobservations,\nreward, flags", ENVIRONMENT, "1", 0.8)
    put("trainer", 0.6, "VectorEnv", "step_wait", ENVIRONMENT, "2")
    across("worker", "trainer", 0.68)
    put("trainer", 1.2, "ActRunner", "the only host sync", LOOP, "3")
    put("device", 1.2, "workflow.act", "actions", ALGORITHM)
    across("trainer", "device", 1.32)
    across("device", "trainer", 1.54)
    put("trainer", 1.8, "VectorEnv", "step_async", ENVIRONMENT)
    put(
        "worker",
        1.8,
        "EnvRunner",
        "step: the next\none, while the\ntrainer does\n4 to 9",
        ENVIRONMENT,
        tall=4.66,
    )
    across("trainer", "worker", 2.03)
    put("trainer", 2.48, "Storage", "store: the new rows", DATA, "4")
    put("trainer", 3.08, "PhaseScheduler", "advance: credit", LOOP, "5")
    put("trainer", 3.94, "BatchStream", "next; scalars, noise", DATA, "6")
    put("device", 3.94, "a batch", "the same tensors", DATA)
    across("trainer", "device", 4.17)
    put("trainer", 4.54, "Capture", "one graph on CUDA", LOOP, "7")
    put("device", 4.54, "Hook.step", "the update", ALGORITHM)
    across("trainer", "device", 4.77)
    put("trainer", 5.14, "BatchStream", "write_back", DATA, "8")
    put("device", 5.14, "rows", "newer latents", DATA)
    across("trainer", "device", 5.37)
    put("trainer", 5.84, "cadences", "log, evaluate,\nreport, checkpoint", LOOP, "9", 0.62)
    middle = edges["trainer"][0] + edges["trainer"][1] / 2
    for begin, end in (
        (1.06, 1.2),
        (1.66, 1.8),
        (2.34, 2.48),
        (2.94, 3.08),
        (3.54, 3.68),
        (4.4, 4.54),
        (5.0, 5.14),
        (5.68, 5.84),
    ):
        canvas.arrow((middle, begin), (middle, end))
    x = edges["device"][0] + edges["device"][1] / 2
    for begin, end in ((4.4, 4.54), (5.0, 5.14)):
        canvas.arrow((x, begin), (x, end))
    canvas.legend(height - 0.14, [LOOP, ALGORITHM, DATA, ENVIRONMENT])


def draw_context(figure: Any) -> None:
    """How the states of a replayed sequence are inferred."""
    canvas = Canvas(figure, HEIGHTS["context"])
    xs = (1.2, 1.94, 2.68, 3.42, 4.48)
    names = ("c", "1", "2", "3", "16")
    wide, high = 0.52, 0.34
    rows = {"observation": 0.5, "state": 1.36, "action": 2.22}
    for words, y in rows.items():
        canvas.label(0.06, y, words, ha="left", color=INK)
    canvas.label(0.06, 0.14, "row", ha="left", color=INK)
    for at, (x, name) in enumerate(zip(xs, names)):
        canvas.label(x, 0.14, name, color=INK, weight="bold")
        used = at > 0
        for letter, y, color in (
            ("o", rows["observation"], DATA if used else PLAIN),
            ("s", rows["state"], ALGORITHM if used else DATA),
            ("a", rows["action"], DATA if name != "16" else PLAIN),
        ):
            canvas.box((x - wide / 2, y - high / 2, wide, high), _sub(letter, name), color=color, pale=0.15)
        if used:
            canvas.arrow((x, rows["observation"] + high / 2), (x, rows["state"] - high / 2))
    for x, after in pairwise(xs):
        gap = after - x > 1
        canvas.arrow((x + wide / 2, rows["state"]), (after - wide / 2, rows["state"]), dashed=gap)
        if not gap:
            canvas.arrow((x + 0.12, rows["action"] - high / 2), (after - 0.14, rows["state"] + high / 2))
    canvas.arrow(
        (xs[-1] - 0.58, rows["action"] - high / 2), (xs[-1] - 0.14, rows["state"] + high / 2), dashed=True
    )
    for y in (rows["observation"], rows["action"]):
        canvas.label((xs[3] + xs[4]) / 2, y, "…", fontsize=13)
    canvas.label(xs[0] + 0.1, 1.65, "stored latent", ha="right")
    canvas.label(xs[0], 0.79, "not used")
    canvas.label(xs[-1], 2.51, "not used")
    x = 0.14
    for color, words in ((DATA, "read from the replay"), (ALGORITHM, "inferred again by this update")):
        canvas.box((x, 2.8, 0.16, 0.12), color=color, pale=0.25)
        canvas.label(x + 0.22, 2.86, words, ha="left")
        x += 1.85


def draw_rollout(figure: Any) -> None:
    """An imagined rollout: what is predicted in each of its H+1 states."""
    canvas = Canvas(figure, HEIGHTS["rollout"])
    xs = (0.98, 1.9, 2.82, 4.3)
    names = ("0", "1", "2", "H")
    wide, high = 0.52, 0.34
    actions, states = 0.34, 1.16
    heads = {"reward": ("r", 1.86), "continue": ("c", 2.3), "value": ("v", 2.74)}
    for words, y in {"action": actions, "state": states, **{key: y for key, (_, y) in heads.items()}}.items():
        canvas.label(0.06, y, words, ha="left", color=INK)
    for at, (x, name) in enumerate(zip(xs, names)):
        canvas.box(
            (x - wide / 2, states - high / 2, wide, high),
            _sub("s", name),
            color=ALGORITHM if at else DATA,
            pale=0.15,
        )
        canvas.arrow((x, states + high / 2), (x, heads["reward"][1] - high / 2))
        for letter, y in heads.values():
            color = PLAIN if letter == "r" and not at else LOOP
            canvas.box((x - wide / 2, y - high / 2, wide, high), _sub(letter, name), color=color, pale=0.12)
        if name != "H":
            canvas.box(
                (x - wide / 2, actions - high / 2, wide, high), _sub("a", name), color=ALGORITHM, pale=0.15
            )
            canvas.arrow((x, states - high / 2), (x, actions + high / 2))
            after = xs[at + 1]
            gap = after - x > 1
            canvas.arrow((x + wide / 2, states), (after - wide / 2, states), dashed=gap)
            end = (after - 0.16, states - high / 2)
            begin = (end[0] - 0.62, actions + 0.1) if gap else (x + wide / 2, actions + 0.1)
            canvas.arrow(begin, end, dashed=gap)
    for y in (actions, *(y for _, y in heads.values())):
        canvas.label(3.5, y, "…", fontsize=13)
    x = 0.14
    for color, words in (
        (DATA, "inferred"),
        (ALGORITHM, "imagined"),
        (LOOP, "predicted"),
        (PLAIN, "not used"),
    ):
        canvas.box((x, 3.1, 0.16, 0.12), color=color, pale=0.25)
        canvas.label(x + 0.22, 3.16, words, ha="left")
        x += 1.1


def _sub(letter: str, index: str) -> str:
    return rf"${letter}_{{{index}}}$"


HEIGHTS = {"loop": 5.7, "imports": 4.62, "step": 6.94, "context": 3.04, "rollout": 3.34}
DRAWN = {
    "loop": draw_loop,
    "imports": draw_imports,
    "step": draw_step,
    "context": draw_context,
    "rollout": draw_rollout,
}


def draw(name: str, folder: Path = FOLDER) -> Path:
    """Draw one diagram; returns its file."""
    picture = folder / f"{name}.png"
    with figure_file(picture, WIDTH, HEIGHTS[name]) as figure:
        figure.set_layout_engine("none")
        DRAWN[name](figure)
    with Image.open(picture) as content:
        smaller = content.convert("RGB").quantize(256)
    smaller.save(picture, optimize=True)
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"{', '.join(DRAWN)} (default: all)")
    options = parser.parse_args()
    for name in options.names or DRAWN:
        if name not in DRAWN:
            parser.error(f"no diagram {name}: choose from {', '.join(DRAWN)}")
        print(f"drawn: {draw(name)}")


if __name__ == "__main__":
    main()
