"""Runs what is missing of a suite, as many runs at a time as fit, within a time limit."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_lab.errors import ConfigError, LabError
from rl_lab.launch.pack import Ended, Gpu, Job, Mps, Pack, find_gpus, interruptible
from rl_lab.tools.suite.claims import Claims
from rl_lab.tools.suite.definition import Needs, Planned, Suite
from rl_lab.tools.suite.results import DONE, FAILED, PARTIAL, SuiteFolder, build_result, status_of
from rl_lab.tools.terminal import duration, number, short
from rl_lab.utils.files import read_json, read_jsonl, write_json_atomic
from rl_lab.utils.stopping import STOPPED

ONE_RUN = (sys.executable, "-m", "rl_lab.tools.suite.one_run")
HEARTBEAT_SECONDS = 10.0
POLL_SECONDS = 0.3
STOP_SECONDS = 60.0  # before the end of --minutes: runs need time to save
LEAST_SECONDS = 60.0  # a run that would have less time is not started
GPU_SHARE = 0.9  # of the free memory


@dataclass
class Summary:
    """What one call of `rl-lab suite` did."""

    finished: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)  # unfinished, saved
    failed: dict[str, str] = field(default_factory=dict)  # name -> error
    elsewhere: dict[str, str] = field(default_factory=dict)  # name -> who works on it
    waiting: list[str] = field(default_factory=list)  # never started in this call
    interrupted: bool = False


@dataclass(frozen=True)
class Machine:
    """What runs can use."""

    gpus: Sequence[Gpu] = ()
    cores: int = 1
    host_gib: float = math.inf

    @classmethod
    def find(cls) -> Machine:
        from rl_lab.tools.doctor import memory_bytes, usable_cpus

        return cls(find_gpus(), usable_cpus(), memory_bytes()[0] / 2**30 or math.inf)  # 0: unknown

    def share(self, needs: Needs, at_once: int | None = None) -> float:
        """Return the share of one GPU (without a GPU: of this machine) that one run takes."""
        if at_once is not None:
            return 1.0 / at_once
        devices = max(1, len(self.gpus))
        limits = [needs.per_gpu, self.cores / needs.cores / devices, self.host_gib / needs.host_gib / devices]
        limits += [GPU_SHARE * gpu.free_gib / needs.gpu_gib for gpu in self.gpus]
        return 1.0 / max(1, math.floor(min(limits)))


class SuiteRunner:
    """One call of `rl-lab suite`."""

    def __init__(
        self,
        suite: Suite,
        planned: Sequence[Planned],
        folder: SuiteFolder,
        *,
        minutes: float | None = None,
        at_once: int | None = None,  # runs at a time on each GPU; None: as many as fit
        mps: str = "auto",
        weights: bool = False,
        commit: str | None = None,
        every: float = 30.0,  # seconds between two progress lines
        command: Sequence[str] = ONE_RUN,  # the file of the run's order is appended
        machine: Machine | None = None,  # None: this one
        stale: float | None = None,  # seconds after which a claim without a heartbeat is free; for tests
        say: Callable[[str], None] = print,
    ) -> None:
        if minutes is not None and not minutes > 0:
            raise ConfigError(f"--minutes must be above 0, not {minutes:g}")
        if at_once is not None and at_once < 1:
            raise ConfigError(f"--at-once must be at least 1, not {at_once}")
        self.suite = suite
        self.planned = {run.name: run for run in planned}
        self.folder = folder
        self.seconds = minutes * 60 if minutes is not None else math.inf
        self.command = command
        self.machine = machine or Machine.find()
        self.shares = {run.method.name: self.machine.share(run.method.each, at_once) for run in planned}
        self.mps = mps
        self.weights = weights
        self.commit = commit
        self.every = every
        self.say = say
        self.summary = Summary()
        folder.make()
        self.claims = Claims(folder.claims, **({} if stale is None else {"stale": stale}))
        self._begin = time.monotonic()
        self._attempts: dict[str, int] = {}
        self._segments: dict[str, list[dict[str, Any]]] = {}
        self._last_beat = self._last_progress = self._begin
        self._beside = 0.0  # runs on the same GPU, at the last heartbeat; 0: no GPU

    # ---------------------------------------------------------------- the loop

    def run(self) -> Summary:
        """Run until everything is done, the time is over, or a signal asks for a stop."""
        gpus = self.machine.gpus
        self._say_start()
        mps = Mps(
            self.mps if gpus and any(share < 1.0 for share in self.shares.values()) else "off", self.say
        )
        with contextlib.closing(self.claims), interruptible() as signals, mps:
            pack = Pack([gpu.index for gpu in gpus], variables=mps.environment, say=self.say)
            with pack:
                while self._step(pack, stop=bool(signals)):
                    time.sleep(POLL_SECONDS)
                self.summary.interrupted = bool(signals)
                self._stop(pack)
        self._close()
        return self.summary

    def _step(self, pack: Pack, stop: bool) -> bool:
        """Handle what has ended, start what fits; return False when this call is over."""
        for ended in pack.poll():
            self._ended(ended, stopping=False)
        if stop or self._left() <= self._stop_seconds():
            return False
        waiting = self._waiting(pack)
        startable = self._left() > self._stop_seconds() + min(LEAST_SECONDS, 0.2 * self.seconds)
        if startable:
            for name in waiting:
                if pack.fits(self._job(name)) and self.claims.take(name):
                    self._start(name, pack)
        self._beat(pack)
        self._progress(pack, waiting)
        return bool(pack.running or (waiting and startable))

    def _left(self) -> float:
        return self.seconds - (time.monotonic() - self._begin)

    def _stop_seconds(self) -> float:
        return min(STOP_SECONDS, 0.1 * self.seconds) if math.isfinite(self.seconds) else 0.0

    def _waiting(self, pack: Pack) -> list[str]:
        """Return the runs that are neither done nor given up, in the suite's order."""
        found = []
        for name, planned in self.planned.items():
            if name in pack.running or name in self.summary.failed:
                continue
            if self._status(planned) != DONE:
                found.append(name)
        return found

    def _status(self, planned: Planned) -> str:
        try:
            return status_of(planned, self.folder.read(planned.name))
        except LabError as error:  # a damaged file: the run is done again
            self.say(str(error))
            self.folder.result_file(planned.name).rename(
                self.folder.result_file(planned.name).with_suffix(".damaged")
            )
            return FAILED

    # ---------------------------------------------------------------- one run

    def _start(self, name: str, pack: Pack) -> None:
        planned = self.planned[name]
        if self._status(planned) == DONE:  # another machine finished it since we looked
            self.claims.release(name)
            return
        self._attempts[name] = self._attempts.get(name, 0) + 1
        if not (self.folder.run_dir(name) / "config.yaml").is_file():
            for kind in ("facts", "segments"):
                self._file(name, kind).unlink(missing_ok=True)
        earlier = read_json(self._file(name, "segments")) if self._file(name, "segments").is_file() else []
        self._segments[name] = [
            *earlier,
            {"start": round(time.time(), 1), "seconds": 0.0, "gpu_seconds": 0.0},
        ]
        write_json_atomic(self._file(name, "segments"), self._segments[name])
        write_json_atomic(self._file(name, "job"), self._order(planned))
        pack.start(self._job(name))
        word = "continued" if (self.folder.run_dir(name) / "config.yaml").is_file() else "started"
        self.folder.event(word, run=name, **self.claims.owner)
        self.say(f"{self._clock()} {word} {name}")

    def _job(self, name: str) -> Job:
        command = [*self.command, str(self._file(name, "job"))]
        return Job(name, command, self.folder.log(name), self.shares[self.planned[name].method.name])

    def _order(self, planned: Planned) -> dict[str, Any]:
        """Return what the process of a run reads."""
        method = planned.method
        return {
            "parent": os.getpid(),
            "experiment": method.experiment,
            "overrides": list(method.overrides),
            "task": planned.task,
            "seed": planned.seed,
            "run_dir": str(self.folder.run_dir(planned.name)),
            "facts": str(self._file(planned.name, "facts")),
            "in_frames": {
                "training.total_timesteps": planned.frames,
                "training.evaluate.every_env_steps": method.evaluate.get("every_frames"),
                "training.checkpoint.every_env_steps": method.checkpoint.get("every_frames"),
            },
            "counts": {"training.evaluate.episodes": method.evaluate.get("episodes")},
            "final": dict(method.final) if method.final else None,
            "metric": method.score.metric,
            "weights": str(self.folder.weights / planned.name) if self.weights else None,
            "commit": self.commit,
        }

    def _ended(self, ended: Ended, *, stopping: bool) -> None:
        """Write the result of a process that has ended, and release its claim."""
        name = ended.job.name
        self._account(name)
        facts = self._facts(name)
        error = ""
        if ended.returncode == 0 and facts.get("finished"):
            status = DONE
        elif ended.returncode == STOPPED or stopping:
            status = PARTIAL
        else:
            status, error = FAILED, ended.error()
        result = self._write_result(name, status, error)
        again = status == FAILED and self._attempts[name] < 2 and bool(result["frames"])
        if status == DONE:
            self.summary.finished.append(name)
        elif status == PARTIAL and stopping:
            self.summary.stopped.append(name)
        elif status == FAILED and not again:
            self.summary.failed[name] = error
        shown = {
            DONE: f"finished {name}: score {number(result['score'])} at {short(result['frames'])} frames, "
            f"{duration(result['seconds'])}",
            PARTIAL: f"stopped {name} at {short(result['frames'])} frames",
            FAILED: f"failed {name} at {short(result['frames'])} frames: {error}"
            + ("; it is tried once more" if again else ""),
        }[status]
        self.say(f"{self._clock()} {shown}")
        self.folder.event(status, run=name, error=error or None, frames=result["frames"])
        self.claims.release(name)

    def _write_result(self, name: str, status: str, error: str = "") -> dict[str, Any]:
        result = build_result(
            self.suite,
            self.planned[name],
            self.folder.run_dir(name),
            status=status,
            facts=self._facts(name),
            segments=self._segments[name],
            error=error,
        )
        self.folder.write(result)
        return result

    def _facts(self, name: str) -> dict[str, Any]:
        file = self._file(name, "facts")
        with contextlib.suppress(LabError):
            if file.is_file():
                found = read_json(file)
                return found if isinstance(found, dict) else {}
        return {}

    def _file(self, name: str, kind: str) -> Path:
        return self.folder.runs / f"{name}.{kind}.json"

    # ---------------------------------------------------------------- time

    def _beat(self, pack: Pack) -> None:
        """Every few seconds: refresh the claims, and add the time since the last call to the running runs."""
        now = time.monotonic()
        if now - self._last_beat >= HEARTBEAT_SECONDS:
            self.claims.refresh()
            # Several GPUs have about equally many runs each.
            self._beside = len(pack.running) / len(pack.devices) if pack.devices else 0.0
            for name in pack.running:
                self._account(name)
            self._last_beat = now

    def _account(self, name: str) -> None:
        """Add the time since the last call to a run; a run beside n - 1 others takes an n-th of the GPU's time."""
        segment = self._segments[name][-1]
        passed = time.time() - segment["start"] - segment["seconds"]
        segment["seconds"] = round(segment["seconds"] + passed, 1)
        if self._beside:
            segment["gpu_seconds"] = round(segment["gpu_seconds"] + passed / max(1.0, self._beside), 2)
        write_json_atomic(self._file(name, "segments"), self._segments[name])

    def _progress(self, pack: Pack, waiting: Sequence[str]) -> None:
        now = time.monotonic()
        if now - self._last_progress < self.every:
            return
        self._last_progress = now
        rows = [self._describe(name) for name in pack.running]
        for name in pack.running:
            if (self.folder.run_dir(name) / "metrics.jsonl").is_file():
                self._write_result(name, PARTIAL)
        elsewhere = self.claims.others(waiting)
        done = sum(self._status(planned) == DONE for planned in self.planned.values())
        counts = f"done {done} of {len(self.planned)}, running {len(pack.running)}"
        if elsewhere:
            counts += f", on other machines {len(elsewhere)}"
        if self.summary.failed:
            counts += f", failed {len(self.summary.failed)}"
        self.say(f"{self._clock()} {counts} | " + " · ".join(rows))

    def _describe(self, name: str) -> str:
        planned = self.planned[name]
        file = self.folder.run_dir(name) / "metrics.jsonl"
        rows = read_jsonl(file) if file.is_file() else []
        frames = max((float(row.get("frames") or 0) for row in rows), default=0.0)
        share = f"{frames / planned.frames:.0%}" if planned.frames else short(frames)
        last: Mapping[str, Any] = next((r for r in reversed(rows) if "time/updates_per_second" in r), {})
        speed = f" {last['time/updates_per_second']:.0f}/s" if last else ""
        metric = f"eval/{planned.method.score.metric}"
        scores = [row[metric] for row in rows if metric in row]
        return f"{name} {share}{speed}" + (f" ({number(scores[-1])})" if scores else "")

    def _clock(self) -> str:
        return f"[{(time.monotonic() - self._begin) / 60:.1f} min]"

    # ---------------------------------------------------------------- start and end

    def _say_start(self) -> None:
        gpus = self.machine.gpus
        where = ", ".join(gpu.name for gpu in gpus) or f"{self.machine.cores} cores, no GPU"
        todo = sum(self._status(planned) != DONE for planned in self.planned.values())
        limit = "" if math.isinf(self.seconds) else f", for {duration(self.seconds)}"
        self.say(
            f"suite {self.suite.name}: {todo} of {len(self.planned)} runs to do, at most {self._at_once()} at a time"
            f"{' on each of' if len(gpus) > 1 else ' on'} {where}{limit}; results in {self.folder.path}"
        )

    def _at_once(self) -> int:
        return round(1.0 / min(self.shares.values(), default=1.0))

    def _stop(self, pack: Pack) -> None:
        running = pack.running
        if running:
            self.say(f"{self._clock()} stopping {len(running)} runs; they are saved and continue next time")

        def wait() -> None:
            self._beat(pack)
            time.sleep(POLL_SECONDS)

        for ended in pack.stop(wait):
            self._ended(ended, stopping=True)

    def _close(self) -> None:
        done_here = {*self.summary.finished, *self.summary.stopped, *self.summary.failed}
        rest = [
            name
            for name, planned in self.planned.items()
            if name not in done_here and self._status(planned) != DONE
        ]
        self.summary.elsewhere = self.claims.others(rest)
        self.summary.waiting = [name for name in rest if name not in self.summary.elsewhere]
        self.folder.event("end", finished=len(self.summary.finished), failed=len(self.summary.failed))
