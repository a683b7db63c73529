"""Progress display of a run: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Mapping
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TextIO, get_args

from rl_lab.errors import ConfigError, closest

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

Mode = Literal["auto", "live", "plain", "off"]
REFRESH_SECONDS = 0.25
RATE_WINDOW_SECONDS = 60.0  # the ETA uses the rate over this window


class Progress:
    """Shows phase, steps, rates, returns, time left and memory.

        with Progress(mode="auto", title="my run") as progress:
            progress.update({"phase": "joint", "step": 1200, "total": 40000, "return": 21.0})

    `update` takes any of: phase, phase_progress (0 to 1), step, total, updates, episodes,
    env_steps_per_second, updates_per_second, return, eval_return; values that are None or absent are not
    shown. The live display redraws at most four times a second; plain mode prints one line per update. Errors
    here never stop the run.
    """

    def __init__(self, mode: Mode | str = "auto", title: str = "", stream: TextIO | None = None) -> None:
        if mode not in get_args(Mode):
            raise ConfigError(f"logging.progress cannot be '{mode}'.{closest(mode, get_args(Mode))}")
        self._stream = stream
        if mode == "auto":
            output = stream or sys.stdout  # None if it was closed before this process started
            mode = "live" if output is not None and output.isatty() else "plain"
        self.mode = mode
        self.title = title
        self._values: dict[str, Any] = {}
        self._history: deque[tuple[float, int]] = deque()
        self._live: Live | None = None
        self._console: Console | None = None
        self._drawn = 0.0
        self._broken = False

    def __enter__(self) -> Progress:
        if self.mode == "live" and self._live is None:
            self._guarded(self._start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(self, values: Mapping[str, Any]) -> None:
        """Store new values and show them."""
        self._guarded(self._update, values)

    def say(self, message: str) -> None:
        """Print a message, above the live display."""
        self._guarded(self._print, message)

    def close(self) -> None:
        """Stop the live display; its last state stays on the screen."""
        if self._live is not None:
            self._guarded(self._draw)
            live, self._live = self._live, None
            self._guarded(live.stop)

    # --- Private methods ---

    def _guarded(self, function: Any, *args: Any) -> None:
        """Warn once instead of raising: a closed pipe or an unusual terminal must not end training."""
        try:
            function(*args)
        except Exception as error:
            if not self._broken:
                self._broken = True
                warnings.warn(f"the progress display failed ({type(error).__name__}: {error})", stacklevel=3)

    def _start(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=self._stream)
        # auto_refresh would start a thread of rich.
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._live.start()

    def _print(self, message: str) -> None:
        if self._live is not None and self._console is not None:
            self._console.print(message, markup=False, highlight=False)
        else:
            print(message, file=self._stream or sys.stdout, flush=True)

    def _update(self, values: Mapping[str, Any]) -> None:
        self._values.update(values)
        now = perf_counter()
        if "step" in values:
            self._history.append((now, int(values["step"])))
            while now - self._history[0][0] > RATE_WINDOW_SECONDS and len(self._history) > 2:
                self._history.popleft()
        if self.mode == "plain":
            phase = [str(self._values["phase"])] if self._values.get("phase") else []
            self._print(" · ".join([*self._position(), *phase, *self._metrics()]))
        elif self._live is not None and now - self._drawn >= REFRESH_SECONDS:
            self._draw()

    def _draw(self) -> None:
        self._drawn = perf_counter()
        if self._live is not None:
            self._live.update(self._layout(), refresh=True)

    def _layout(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        title = Text(self.title, style="bold")
        if self._values.get("phase"):
            title.append(f" · {self._values['phase']}", style="not bold")
        bar = Table.grid(padding=(0, 1))
        done = self._fraction() or 0.0
        bar.add_row(ProgressBar(total=1.0, completed=done, width=30), Text(" · ".join(self._position())))
        return Group(title, bar, Text(" · ".join(self._metrics()), style="dim"))

    def _fraction(self) -> float | None:
        step, total = self._values.get("step"), self._values.get("total")
        if step is not None and total:
            return min(1.0, step / total)
        return self._values.get("phase_progress")

    def _position(self) -> list[str]:
        values = self._values
        parts = []
        if values.get("step") is not None:
            total = values.get("total")
            share = f"/{total:,} ({100 * (self._fraction() or 0.0):.0f}%)" if total else ""
            parts.append(f"step {values['step']:,}{share}")
        left = self.seconds_left()
        if left is not None:
            parts.append(f"ETA {clock_time(left)}")
        return parts

    def _metrics(self) -> list[str]:
        parts = []
        for key, form in (
            ("env_steps_per_second", "{:,.0f} env steps/s"),
            ("updates_per_second", "{:,.1f} updates/s"),
            ("return", "return {:,.1f}"),
            ("eval_return", "eval {:,.1f}"),
            ("episodes", "{:,} episodes"),
        ):
            if self._values.get(key) is not None:
                parts.append(form.format(self._values[key]))
        return [*parts, *memory_texts()]

    def seconds_left(self) -> float | None:
        """Return the seconds until `total` at the recent rate; None while the rate is unknown."""
        step, total = self._values.get("step"), self._values.get("total")
        if step is None or not total or len(self._history) < 2:
            return None
        (then, first), (now, last) = self._history[0], self._history[-1]
        if last <= first or now <= then:
            return None
        return max(0, total - step) * (now - then) / (last - first)


def memory_texts() -> list[str]:
    """Return the memory of this process and the GPU memory reserved by torch, as text."""
    parts = []
    try:
        import psutil

        parts.append(f"{psutil.Process().memory_info().rss / 2**20:,.0f} MiB")
    except ImportError:
        pass
    torch = sys.modules.get("torch")  # do not import torch for this
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        parts.append(f"GPU {torch.cuda.memory_reserved() / 2**30:.1f} GiB")
    return parts


def clock_time(seconds: float) -> str:
    """Format seconds as 4:05 or 1:02:11."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
