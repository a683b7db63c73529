"""How the lab's pictures look, and the few things that all of them do. Matplotlib's object interface: no window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette (2008), which colour-blind readers can tell apart, darkest first.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5A5A5A")
DPI = 144
INK, SOFT = "#24292e", "#6a7077"
DASHED = (0, (3, 1.5))
LOG_RANGE = 1e3  # a positive metric that spans more is drawn on a logarithmic axis

_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#9aa0a6",
    "axes.grid": True,
    "axes.labelcolor": "#4a4f55",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "font.size": 9,
    "grid.color": "#e6e8eb",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "lines.solid_capstyle": "round",
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


@contextmanager
def figure_file(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure of so many inches, written to `path` as PNG when it is done."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DPI, format="png")


def colors() -> Iterator[str]:
    """The palette, again and again."""
    while True:
        yield from COLORS


def color_of(names: Sequence[str]) -> dict[str, str]:
    return dict(zip(names, colors()))


def cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def step_axis(axes: Axes, ticks: int = 6) -> None:
    """20k and 1M instead of zeros."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(ticks))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.margins(x=0.02)


def value_axis(axes: Axes, values: Sequence[np.ndarray]) -> None:
    """Logarithmic when all values are positive and far apart."""
    together: Any = np.concatenate(values) if values else np.ones(1)
    if together.min() > 0 and together.max() / together.min() > LOG_RANGE:
        axes.set_yscale("log")
    elif not values:
        say_nothing(axes, "no finite value")


def say_nothing(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color=SOFT)
    axes.tick_params(labelbottom=False, labelleft=False)
    axes.grid(False)


def name_legend(
    figure: Figure, named: dict[str, str], place: Any = "outside upper left", dashed: Sequence[str] = ()
) -> None:
    """A legend of names by colour; those of `dashed` with a broken line."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=color, linewidth=2, linestyle=DASHED if name in dashed else "-")
        for name, color in named.items()
    ]
    legend(figure, handles, list(named), place)


def legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str], place: Any) -> None:
    """As many columns as fit: a legend wider than the picture would squeeze the axes."""
    labels = [cut(label, 100) for label in labels]
    letters = 14 * figure.bbox.width / figure.figure.dpi  # as many fit, at this font size
    columns = max(1, int(letters // (max(map(len, labels), default=1) + 8)))
    figure.legend(handles, labels, loc=place, ncols=min(columns, len(labels)), fontsize=8)
