"""Progress display of a run: live on a terminal, one updated line in a notebook, plain lines elsewhere."""

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

Mode = Literal["auto", "live", "notebook", "plain", "off"]
REFRESH_SECONDS = 0.25
LEAST_RATE_SECONDS = 1.0  # rates over a shorter time are not shown
PLAIN_SECONDS = 30.0  # plain mode prints a line at least this often
RATE_WINDOW_SECONDS = 60.0  # the ETA uses the rate over this window


def point_of(step: int, updates: int | None) -> str:
    """Return "step 12,002", or "update 6,000" of a run on stored data alone, which takes no environment steps."""
    return f"update {updates:,}" if updates and not step else f"step {step:,}"


class Progress:
    """Shows phase, steps, rates, returns, time left and memory.

        with Progress(mode="auto", title="my run") as progress:
            progress.tick({"phase": "joint", "step": 40, "total": 40000})
            progress.update({"step": 1200, "return": 21.0})

    `update` (a new log line) and `tick` (counters, as often as the caller likes) take any of: phase,
    phase_progress (0 to 1), phase_number, phases, epoch, epochs, share (0 to 1, of the run), step, total, updates,
    episodes, env_steps_per_second, updates_per_second, return, eval_return, activity, seconds_left; values that are None
    or absent are not shown. The display is drawn at most four times a second; plain mode prints one line per update.
    Errors here never stop the run.
    """

    def __init__(self, mode: Mode | str = "auto", title: str = "", stream: TextIO | None = None) -> None:
        if mode not in get_args(Mode):
            raise ConfigError(f"logging.progress cannot be '{mode}'.{closest(mode, get_args(Mode))}")
        self._stream = stream
        if mode == "auto":
            output = stream or sys.stdout  # None if it was closed before this process started
            mode = "live" if output is not None and output.isatty() else "plain"
            if stream is None and in_notebook():
                mode = "notebook"
        self.mode = mode
        self.title = title
        self._values: dict[str, Any] = {}
        self._history: deque[tuple[float, int, int]] = deque()  # time, step, updates
        self._live: Live | None = None
        self._console: Console | None = None
        self._handle: Any = None  # of the notebook's output
        self._begun = perf_counter()
        self._drawn = 0.0
        self._printed = perf_counter()
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

    def tick(self, values: Mapping[str, Any]) -> None:
        """Store new counters; draw them if the last drawing is old enough."""
        if self.mode != "off":
            self._guarded(self._tick, values)

    def say(self, message: str) -> None:
        """Print a message, above the live display."""
        self._guarded(self._print, message)

    def close(self) -> None:
        """Stop the live display; its last state stays on the screen."""
        self._values["activity"] = None
        if self._live is not None:
            self._guarded(self._draw)
            live, self._live = self._live, None
            self._guarded(live.stop)
        elif self._handle is not None:
            self._guarded(self._draw)

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
        self._draw()

    def _print(self, message: str) -> None:
        if self._live is not None and self._console is not None:
            self._console.print(message, markup=False, highlight=False)
        else:
            print(message, file=self._stream or sys.stdout, flush=True)

    def _update(self, values: Mapping[str, Any]) -> None:
        self._store(values)
        if self.mode == "plain":
            self._print_line()
        elif perf_counter() - self._drawn >= REFRESH_SECONDS:
            self._draw()

    def _tick(self, values: Mapping[str, Any]) -> None:
        now = perf_counter()
        if self.mode == "plain":
            if now - self._printed >= PLAIN_SECONDS:
                self._store(values)
                self._print_line()
        elif now - self._drawn >= REFRESH_SECONDS:
            self._store(values)
            self._draw()

    def _store(self, values: Mapping[str, Any]) -> None:
        self._values.update(values)
        now = perf_counter()
        if "step" in values:
            self._history.append((now, int(values["step"]), int(self._values.get("updates") or 0)))
            while now - self._history[0][0] > RATE_WINDOW_SECONDS and len(self._history) > 2:
                self._history.popleft()

    def _print_line(self) -> None:
        self._printed = perf_counter()
        self._print(self.line())

    def line(self) -> str:
        """All values in one line."""
        return " · ".join([*self._position(), *self._phase(), *self._metrics()])

    def _draw(self) -> None:
        self._drawn = perf_counter()
        if self._live is not None:
            self._live.update(self._layout(), refresh=True)
        elif self.mode == "notebook":
            self._draw_in_notebook()

    def _draw_in_notebook(self) -> None:
        from IPython.display import display

        shown = {"text/plain": f"{self.title} · {self.line()}"}
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)

    def _layout(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        title = Text(self.title, style="bold")
        for part in self._phase():
            title.append(f" · {part}", style="not bold")
        bar = Table.grid(padding=(0, 1))
        done = self._fraction() or 0.0
        bar.add_row(ProgressBar(total=1.0, completed=done, width=30), Text(" · ".join(self._position())))
        return Group(title, bar, Text(" · ".join(self._metrics()), style="dim"))

    def _fraction(self) -> float | None:
        if self._values.get("share") is not None:
            return float(self._values["share"])
        step, total = self._values.get("step"), self._values.get("total")
        if step is not None and total:
            return min(1.0, step / total)
        return self._values.get("phase_progress")

    def _phase(self) -> list[str]:
        """Return "joint", or with several phases "world_model 40%", "phase 5 of 12", "epoch 2 of 4", and the activity."""
        values, parts = self._values, []
        several = (values.get("phases") or 1) > 1
        if values.get("phase"):
            progress = values.get("phase_progress")
            parts.append(
                f"{values['phase']} {100 * progress:.0f}%"
                if several and progress is not None
                else values["phase"]
            )
        if several and values.get("phase_number"):
            parts.append(f"phase {values['phase_number']:,} of {values['phases']:,}")
        if (values.get("epochs") or 1) > 1 and values.get("epoch"):
            parts.append(f"epoch {values['epoch']:,} of {values['epochs']:,}")
        if values.get("activity"):
            parts.append(str(values["activity"]))
        return parts

    def _position(self) -> list[str]:
        values = self._values
        parts = []
        if values.get("step") is not None:
            total, share = values.get("total"), self._fraction() or 0.0
            known = f"/{total:,} ({100 * share:.0f}%)" if total else ""
            parts.append(f"step {values['step']:,}{known}")
            if not total and values.get("share") is not None:
                parts.append(f"{100 * share:.0f}% of the run")
        else:
            parts.append(f"starting · {clock_time(perf_counter() - self._begun)}")
        left = self.seconds_left()
        if left is not None:
            parts.append(f"ETA {clock_time(left)}")
        return parts

    def _metrics(self) -> list[str]:
        parts = []
        rates = self._rates()
        for key, form in (
            ("env_steps_per_second", "{:,.0f} env steps/s"),
            ("updates_per_second", "{:,.1f} updates/s"),
            ("return", "return {:,.1f}"),
            ("eval_return", "eval {:,.1f}"),
        ):
            value = rates.get(key, self._values.get(key))
            if value is not None:
                parts.append(form.format(value))
        episodes = self._values.get("episodes")
        if episodes is not None:
            parts.append(f"{episodes:,} episode{'' if episodes == 1 else 's'}")
        return [*parts, *memory_texts()]

    def _rates(self) -> dict[str, float]:
        """Return the rates of the last seconds, from the counters; {} until there are two."""
        if self.mode == "plain" or len(self._history) < 2:
            return {}
        (then, steps, updates), (now, last, done) = self._history[0], self._history[-1]
        seconds = now - then
        if seconds < LEAST_RATE_SECONDS:
            return {}
        return {
            "env_steps_per_second": (last - steps) / seconds,
            "updates_per_second": (done - updates) / seconds,
        }

    def seconds_left(self) -> float | None:
        """Return the seconds until the end at the recent rate; None while the rate is unknown."""
        if self._values.get("seconds_left") is not None:
            return float(self._values["seconds_left"])
        step, total = self._values.get("step"), self._values.get("total")
        if step is None or not total or len(self._history) < 2:
            return None
        (then, first, _), (now, last, _) = self._history[0], self._history[-1]
        if last <= first or now <= then:
            return None
        return max(0, total - step) * (now - then) / (last - first)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a Jupyter notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None


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
