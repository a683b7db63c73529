"""Side jobs: evaluation, videos, reports and logging. Their failures are reported and counted, training goes on."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rl_lab.errors import LabError, RunFolderLostError, one_line

MOST_REPORTS = 20  # different failures; later ones are only counted


class SideJobs:
    """Runs code whose failure must not end training.

        with side_jobs.guard("report", step):
            ...

    on_failure: "continue" reports a failure once, with its traceback in error.txt, and counts it; "stop"
    raises it. Ctrl-C is no failure.
    """

    def __init__(
        self,
        on_failure: str = "continue",
        *,
        say: Callable[[str], None] = print,
        write: Callable[[str, BaseException | str], object] | None = None,  # title and error -> error.txt
    ) -> None:
        self.on_failure = on_failure
        self.say = say
        self.write = write
        self.counts: dict[str, int] = {}  # job -> failures since the start of the run
        self._reported: set[tuple[str, ...]] = set()

    @contextmanager
    def guard(self, job: str, step: int, *, required: bool = False) -> Iterator[None]:
        """Run the block. required: here it is the purpose of the phase, so that its failure is an error."""
        try:
            yield
        except RunFolderLostError:
            raise
        except (Exception, SystemExit) as error:
            if required or self.on_failure == "stop":
                raise
            self.failed(job, step, error)

    def failed(self, job: str, step: int, error: BaseException | str) -> None:
        """Count a failure, and report it if it is a new one. A string is the traceback of another process."""
        if self.on_failure == "stop" and isinstance(error, str):
            raise LabError(f"{job} failed at step {step}: {_last_line(error)}\n\n{error.strip()}")
        self.counts[job] = self.counts.get(job, 0) + 1
        key = (job, *_kind(error))
        if key in self._reported or len(self._reported) >= MOST_REPORTS:
            return
        self._reported.add(key)
        written = False
        if self.write is not None:
            try:
                self.write(f"{job} failed at step {step}", error)
                written = True
            except OSError:  # a full disk; the sentence below remains
                pass
        where = "; the traceback is in error.txt" if written else ""
        shown = one_line(error) if isinstance(error, BaseException) else _last_line(error)
        self.say(f"{job} failed at step {step}, training continues: {shown}{where}")

    def metrics(self) -> dict[str, float]:
        """Return the number of failures of each job that has failed."""
        return {f"failures/{job}": float(count) for job, count in self.counts.items()}

    def summary(self) -> str:
        """Return one sentence, or "" if nothing has failed."""
        parts = [f"{job} {count} {'time' if count == 1 else 'times'}" for job, count in self.counts.items()]
        return (
            f"side jobs failed: {', '.join(parts)}; training.on_side_failure=stop would end the run"
            * bool(parts)
        )

    def get_state(self) -> dict[str, int]:
        return dict(self.counts)

    def set_state(self, state: Mapping[str, int]) -> None:
        self.counts = {str(job): int(count) for job, count in state.items()}


def _kind(error: BaseException | str) -> tuple[str, ...]:
    """Return what two reports of the same failure have in common: the type and the place, not the text."""
    if isinstance(error, str):
        lines = [line for line in error.splitlines() if line.lstrip().startswith("File ")]
        return (_last_line(error).partition(":")[0], lines[-1] if lines else "")
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return (type(error).__name__, place)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "an exception without a message"
