"""Fault injection: a fault every 20 s for half an hour; only rows that were reported as lost may be missing.

The trainer runs in a separate process on `dummy/count`, whose rows are known (observation and reward of step
k are k), and its replay holds every row of the run, so that at the end the rows can be compared with the
counters. The faults alternate in a random order given by the seed:

    worker_kill     SIGKILL to an environment worker
    worker_hang     SIGSTOP to an environment worker
    disk_full       every write beyond a few bytes fails (RLIMIT_FSIZE, set externally), until a save fails
    truncated       kill -9 to the trainer; the newest checkpoint loses its second half; resume
    flipped         kill -9 to the trainer; one bit of a replay file changes; resume
    flipped_live    one bit of a replay file changes while the trainer runs
    sigterm         SIGTERM to the trainer; resume
    sigterm_hang    SIGTERM while every environment hangs: the trainer saves and ends within seconds; resume
    kill_hang       kill -9 to the trainer while every environment hangs: its workers end, too; resume
    evaluation      evaluation fails, until it was counted
    lock_deleted    the lock file is deleted, and a second trainer started: it is refused
    moved           the run folder is moved: the trainer saves there and ends; moved back; resume
    cwd_deleted     the trainer's current folder is deleted, and a worker killed
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

import rl_lab

ENVS, WORKERS = 4, 2
WORDS = (
    *("experiment=dreamer_cartpole", "debug=tiny", "environment=gym", "environment.task=dummy/count"),
    *("+environment.length=12", f"environment.num_envs={ENVS}", f"environment.workers={WORKERS}"),
    *("environment.timeout=12", "environment.restarts.limit=null", "environment.eval.workers=0"),
    *(
        "training.total_timesteps=100000000",
        "training.log.every_env_steps=40",
        "training.report.every_env_steps=400",
    ),
    *(
        "training.evaluate.every_env_steps=400",
        "training.checkpoint.every_env_steps=40",
        "logging.progress=off",
    ),
    *("buffers.replay.capacity=2000000", "+buffers.replay.chunk_rows=16"),
)
FAULTS = (
    *("worker_kill", "worker_hang", "disk_full", "truncated", "flipped", "flipped_live", "sigterm"),
    *("sigterm_hang", "kill_hang", "evaluation", "lock_deleted", "moved", "cwd_deleted"),
)
# For a trainer to save and end while an environment hangs; 5 s of it are the grace time. A machine on which n processes
# wait for each core gets n times as long.
LEAVE_S = 20.0
# Pattern of the trainer's message about each fault, which is required.
REPORTED = {
    "worker_kill": r"worker of environments .* was killed by SIGKILL: .*new seed",
    "worker_hang": r"worker of environments .* did not answer for .*new seed",
    "disk_full": r"checkpoint not saved, training continues",
    "truncated": r"CHECKPOINT DAMAGED",
    "flipped": r"CHECKPOINT DAMAGED|REPLAY DAMAGED",
    "flipped_live": r"changed after writing: written again",
    "sigterm": r"stopped and saved; continue with",
    "sigterm_hang": r"did not answer within 5 s of the request to stop|stopped and saved; continue with",
    "kill_hang": r"resumed at step",
    "evaluation": r"side jobs|evaluation failed at step|counted",
    "lock_deleted": r"is in use by",
    "moved": r"was moved to .* saved there, continue with",
    "cwd_deleted": r"worker of environments .* was killed by SIGKILL: .*new seed",
}
TIMEOUT_S = 240.0  # for a trainer to start or to print a message; the machine may be busy


class Trainer:
    """The training process: start, stop, output and workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.faults = folder.parent / "faults"  # files that make the environments hang or raise
        for name in ("train", "eval"):
            (self.faults / name).mkdir(parents=True, exist_ok=True)
        self.current = folder.parent / "current"  # the trainer's current folder
        self.rss: list[tuple[int, float]] = []  # stored steps, resident MiB of the trainer before a fault
        self.lines: list[str] = []
        self.starts = 0
        self.process: subprocess.Popen[str] | None = None
        self.known: dict[int, float] = {}  # pid -> start time of every process that belonged to it

    def start(self) -> None:
        self.current.mkdir(exist_ok=True)
        self.process = self.launch()
        self.starts += 1
        threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()

    def launch(self) -> subprocess.Popen[str]:
        """Start a process that trains in the run folder."""
        words = (
            *(f"+environment.faults={self.faults / 'train'}", f"run_dir={self.folder}"),
            f"+environment.eval.faults={self.faults / 'eval'}",
        )
        search = [str(Path(rl_lab.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(search)}
        return subprocess.Popen(
            [sys.executable, "-m", "rl_lab", "train", *WORDS, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environ},
            cwd=self.current,
        )

    def counted(self, name: str) -> float:
        """Return the last value of a metric, 0 without one."""
        lines = (self.folder / "metrics.jsonl").read_bytes().splitlines()
        values = [json.loads(line).get(name) for line in lines[-200:] if line.endswith(b"}")]
        return float(next((value for value in reversed(values) if value is not None), 0.0))

    def _read(self, stream: Any) -> None:
        for line in stream:
            self.lines.append(line.rstrip("\n"))

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def workers(self) -> list[psutil.Process]:
        """Return the environment workers: the children of the trainer's fork server."""
        try:
            helpers = psutil.Process(self.pid).children()
            found = [worker for helper in helpers for worker in helper.children()]
            for process in (*helpers, *found):
                self.known[process.pid] = process.create_time()
        except psutil.Error:
            return []
        return found

    def manifests(self) -> list[Path]:
        return sorted((self.folder / "checkpoints").glob("step_*.json"))

    def step(self) -> int:
        """Return the step of the newest checkpoint."""
        names = self.manifests()
        return int(names[-1].stem.removeprefix("step_")) if names else 0

    def wait_for(self, ready: Callable[[], Any], what: str) -> Any:
        """Wait until `ready()`; RuntimeError if the trainer ends or after a timeout."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (result := ready()):
            if self.process is None or self.process.poll() is not None:
                raise RuntimeError(f"the trainer ended while waiting for {what}: {self.lines[-5:]}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {what} within {TIMEOUT_S:g} s: {self.lines[-5:]}")
            time.sleep(0.05)
        return result

    def wait_until_running(self) -> None:
        """Wait until it has saved a checkpoint and all workers are running."""
        began = self.step()
        self.wait_for(
            lambda: self.step() > began and len(self.workers()) == WORKERS, "progress after a start"
        )

    def stop(self, number: int) -> int:
        self.workers()
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(TIMEOUT_S)

    def orphans(self) -> list[int]:
        """Return processes that outlived their trainer; they are killed after ten seconds."""
        left = []
        for pid, born in self.known.items():
            try:
                process = psutil.Process(pid)
                if process.create_time() == born:
                    process.wait(10)
            except psutil.TimeoutExpired:
                left.append(pid)
                os.kill(pid, signal.SIGKILL)
            except psutil.Error:
                pass
        self.known.clear()
        return left


# --- Faults: each returns its target ---


def worker_kill(trainer: Trainer, rng: random.Random) -> str:
    worker = rng.choice(trainer.wait_for(trainer.workers, "worker"))
    worker.kill()
    return f"worker {worker.pid}"


def worker_hang(trainer: Trainer, rng: random.Random) -> str:
    worker = rng.choice(trainer.wait_for(trainer.workers, "worker"))
    worker.suspend()
    return f"worker {worker.pid}"


def disk_full(trainer: Trainer, rng: random.Random) -> str:
    process, before = psutil.Process(trainer.pid), len(trainer.lines)
    limit = rng.choice((0, 4096, 20_000))
    process.rlimit(psutil.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        trainer.wait_for(lambda: find_line(trainer, REPORTED["disk_full"], before), "failed save")
    finally:
        process.rlimit(psutil.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return f"files of at most {limit} bytes"


def truncated(trainer: Trainer, rng: random.Random) -> str:
    trainer.stop(signal.SIGKILL)
    name = json.loads(trainer.manifests()[-1].read_text())["state"]["file"]
    file = trainer.folder / "checkpoints" / name
    os.truncate(file, file.stat().st_size // 2)
    return file.name


def flipped(trainer: Trainer, rng: random.Random) -> str:
    trainer.stop(signal.SIGKILL)
    names = sorted(json.loads(trainer.manifests()[-1].read_text())["buffers"]["replay"]["files"])
    return flip(trainer.folder / "checkpoints" / "replay" / "replay" / rng.choice(names), rng)


def flipped_live(trainer: Trainer, rng: random.Random) -> str:
    # Complete chunks: every later checkpoint contains them, so the next save must detect the change.
    names = sorted(json.loads(trainer.manifests()[-1].read_text())["buffers"]["replay"]["files"])
    chunks = [name for name in names if name.startswith("chunk-")]
    return flip(trainer.folder / "checkpoints" / "replay" / "replay" / rng.choice(chunks), rng)


def flip(file: Path, rng: random.Random) -> str:
    with open(file, "r+b") as stream:
        at = rng.randrange(file.stat().st_size)
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ (1 << rng.randrange(8))]))
    return f"{file.name} byte {at}"


def sigterm(trainer: Trainer, rng: random.Random) -> str:
    status = trainer.stop(signal.SIGTERM)
    if status != 0:
        raise RuntimeError(f"SIGTERM ended the trainer with status {status}: {trainer.lines[-5:]}")
    return "trainer"


def sigterm_hang(trainer: Trainer, rng: random.Random) -> str:
    (trainer.faults / "train" / "hang").touch()
    try:
        time.sleep(1.0)  # every environment has begun a step by now
        began = time.monotonic()
        sigterm(trainer, rng)
        took = time.monotonic() - began
    finally:
        (trainer.faults / "train" / "hang").unlink()
    load = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    if took > LEAVE_S * load:
        raise RuntimeError(f"the trainer ended {took:.1f} s after SIGTERM, with {load:.1f} processes a core")
    return f"trainer, which ended after {took:.1f} s, with {load:.1f} processes a core"


def kill_hang(trainer: Trainer, rng: random.Random) -> str:
    (trainer.faults / "train" / "hang").touch()
    try:
        time.sleep(1.0)
        trainer.stop(signal.SIGKILL)
        left = trainer.orphans()
    finally:
        (trainer.faults / "train" / "hang").unlink()
    if left:
        raise RuntimeError(f"{len(left)} processes outlived the trainer, their environments hang")
    return "trainer"


def evaluation(trainer: Trainer, rng: random.Random) -> str:
    before = trainer.counted("failures/evaluation")
    (trainer.faults / "eval" / "raise").touch()
    try:
        trainer.wait_for(lambda: trainer.counted("failures/evaluation") > before, "failed evaluation")
    finally:
        (trainer.faults / "eval" / "raise").unlink()
    trainer.lines.append(f"counted: {trainer.counted('failures/evaluation'):g} failed evaluations")
    return "evaluation"


def lock_deleted(trainer: Trainer, rng: random.Random) -> str:
    (trainer.folder / ".lock").unlink()
    second = trainer.launch()
    try:
        text, _ = second.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        second.kill()
        text, _ = second.communicate()
        raise RuntimeError(
            f"a second trainer was not refused within {TIMEOUT_S:g} s: {text[-500:]}"
        ) from None
    trainer.lines += text.splitlines()[-1:]
    if second.returncode != 1:
        raise RuntimeError(f"a second trainer was not refused: status {second.returncode}")
    trainer.wait_for((trainer.folder / ".lock").exists, "new lock file")
    return "second trainer"


def moved(trainer: Trainer, rng: random.Random) -> str:
    elsewhere = trainer.folder.with_name("elsewhere")
    trainer.workers()
    assert trainer.process is not None
    trainer.folder.rename(elsewhere)
    try:
        status = trainer.process.wait(TIMEOUT_S)
    finally:
        if trainer.folder.exists():
            raise RuntimeError("the trainer made its folder again")
        elsewhere.rename(trainer.folder)
    if status != 1:
        raise RuntimeError(f"the trainer ended with status {status}")
    return "run folder"


def cwd_deleted(trainer: Trainer, rng: random.Random) -> str:
    shutil.rmtree(trainer.current, ignore_errors=True)
    return worker_kill(trainer, rng)


def find_line(trainer: Trainer, pattern: str, since: int) -> str:
    return next((line for line in trainer.lines[since:] if re.search(pattern, line)), "")


# --- Run ---


def soak(folder: Path, minutes: float, every: float, seed: int) -> tuple[list[dict[str, Any]], Trainer]:
    """Inject faults until the time is over; returns the faults and the stopped trainer."""
    rng, trainer = random.Random(seed), Trainer(folder)
    events: list[dict[str, Any]] = []
    turns: list[str] = []
    trainer.start()
    try:
        trainer.wait_until_running()
        begin = time.monotonic()
        due = begin + every
        while due < begin + 60 * minutes:
            time.sleep(max(0.0, due - time.monotonic()))
            turns = turns or rng.sample(FAULTS, len(FAULTS))
            events.append({"seconds": round(time.monotonic() - begin, 1), "fault": turns.pop()})
            try:
                inject(trainer, events[-1], rng)
            except (
                RuntimeError,
                OSError,
                psutil.Error,
                subprocess.SubprocessError,
            ) as error:  # recorded as a violation; the run continues
                events[-1]["violation"] = f"{type(error).__name__}: {error}".replace(str(folder), "RUN")
                if trainer.process is None or trainer.process.poll() is not None:
                    trainer.start()
                    trainer.wait_until_running()
            events[-1]["recovered_s"] = round(time.monotonic() - begin - events[-1]["seconds"], 1)
            due = max(due + every, time.monotonic())
        sigterm(trainer, rng)
    finally:
        if trainer.process is not None and trainer.process.poll() is None:
            trainer.stop(signal.SIGKILL)
        trainer.orphans()
    return events, trainer


def inject(trainer: Trainer, event: dict[str, Any], rng: random.Random) -> None:
    """Inject one fault and wait until the run has saved again; adds the outcome to `event`."""
    name, since = event["fault"], len(trainer.lines)
    event["step"] = trainer.step()
    event["rss_mib"] = round(psutil.Process(trainer.pid).memory_info().rss / 2**20, 1)
    trainer.rss.append((event["step"], event["rss_mib"]))
    event["target"] = globals()[name](trainer, rng)
    if trainer.process is not None and trainer.process.poll() is not None:
        event["orphans"] = len(trainer.orphans())
        trainer.start()
    words = trainer.wait_for(lambda: find_line(trainer, REPORTED[name], since), f"message about {name}")
    event["announced"] = words.replace(str(trainer.folder), "RUN")
    trainer.wait_until_running()
    event["lost_rows"] = lost_rows(trainer.lines[since:])


def lost_rows(lines: list[str]) -> int:
    """Return the number of rows that a resume reported as lost."""
    texts = [line for line in lines if "REPLAY DAMAGED" in line]
    return sum(
        int(count.replace(",", "")) for text in texts for count in re.findall(r"\(([\d,]+) rows\)", text)
    )


# --- Audit ---


def audit(folder: Path, events: list[dict[str, Any]]) -> tuple[dict[str, float], list[str]]:
    """Return figures of the finished run and a list of violations."""
    import numpy as np
    import torch

    from rl_lab.agent import load_agent
    from rl_lab.utils.checkpoint.manager import CheckpointManager

    wrong: list[str] = []
    loaded = CheckpointManager(folder / "checkpoints", on_warning=wrong.append).load()
    assert loaded.manifest is not None
    totals = loaded.state["phase_state"]["totals"]
    meta = loaded.manifest["buffers"]["replay"]["meta"]
    parts = [
        torch.load(folder / "checkpoints/replay/replay" / name, weights_only=True)
        for name, *_ in meta["parts"]["fixed"]
    ]
    rows = {
        name: np.concatenate([part["columns"][name].numpy() for part in parts], axis=1)
        for name in ("obs/vector", "reward", "is_first", "terminated", "truncated")
    }
    count = rows["obs/vector"][..., 0]
    ended, cut = rows["terminated"] | rows["truncated"], rows["truncated"]
    lost = sum(event.get("lost_rows", 0) for event in events)
    wrong += [f"{event['fault']}: {event['violation']}" for event in events if "violation" in event]

    # The row of a step has its number, that of a reset 0; an episode truncated by a fault repeats its last
    # row.
    steps = int(((count > 0) | cut).sum())
    missing = int(totals["env_steps"]) - steps
    if not 0 <= missing <= lost:
        wrong.append(
            f"{totals['env_steps']} steps were counted and {steps} are stored; {lost} rows were reported as lost"
        )
    ends = int(totals["episodes"]) - int(ended.sum())
    if not 0 <= ends <= lost:
        wrong.append(f"{totals['episodes']} episodes were counted and {int(ended.sum())} are stored")
    follows = (count[:, 1:] == count[:, :-1] + 1) & ~cut[:, 1:]
    repeats = (count[:, 1:] == count[:, :-1]) & cut[:, 1:]
    begins = rows["is_first"][:, 1:] & (ended[:, :-1] | (lost > 0))
    broken = ~(follows | repeats | begins)
    if broken.any():
        wrong.append(f"{int(broken.sum())} rows do not follow from the previous row")
    if not np.array_equal(rows["reward"], np.where(cut, 0.0, count)):
        wrong.append("rewards do not match their rows")
    restarts = int(sum(loaded.state["collector"]["environment"]["restarts"].values()))
    cuts = int(cut.sum())
    if cuts > restarts * (ENVS // WORKERS):
        wrong.append(f"{cuts} episodes were truncated by {restarts} restarts")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    numbers = [line["step"] for line in lines]
    if numbers != sorted(numbers):
        wrong.append("metrics.jsonl is not in order")
    last = next(line for line in reversed(lines) if "collect/episodes" in line)
    if (last["step"], last["collect/episodes"]) != (totals["env_steps"], totals["episodes"]):
        wrong.append(
            f"the last metrics are of step {last['step']}, the last checkpoint of {totals['env_steps']}"
        )
    if last.get("collect/env_restarts") != restarts:
        wrong.append(f"metrics count {last.get('collect/env_restarts')} restarts, the checkpoint {restarts}")
    load_agent(folder).act(np.zeros(1, np.float32))
    figures = {"env_steps": totals["env_steps"], "episodes": totals["episodes"], "env_restarts": restarts}
    return {**figures, "cut_episodes": cuts, "lost_rows": lost, "missing_steps": missing}, wrong


def run(argv: list[str]) -> list[dict[str, Any]]:
    """Return rows: faults, starts, steps, restarts, lost rows; `soak/violations` must be 0."""
    parser = argparse.ArgumentParser(prog="rl-lab bench soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between faults")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order and targets of faults")
    parser.add_argument("--plot", type=Path, help="where to write a PNG")
    parser.add_argument("--folder", type=Path, help="keep the run here")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)) / "run"
        events, trainer = soak(folder, options.minutes, options.every, options.seed)
        figures, wrong = audit(folder, events)
        wrong += [
            f"{event['orphans']} processes outlived the trainer" for event in events if event.get("orphans")
        ]
        (folder / "output.txt").write_text("\n".join(trainer.lines))
    if options.plot is not None:
        plot(events, options.plot)
    kinds = [event["fault"] for event in events]
    figures |= memory(trainer.rss)
    rows: list[dict[str, Any]] = [
        {"name": "soak/faults", "value": len(events), "unit": "faults", "events": events},
        *({"name": f"soak/faults_{kind}", "value": kinds.count(kind), "unit": "faults"} for kind in FAULTS),
        {"name": "soak/starts", "value": trainer.starts, "unit": "starts"},
        *(
            {"name": f"soak/{name}", "value": value, "unit": name.split("_")[-1]}
            for name, value in figures.items()
        ),
        {"name": "soak/violations", "value": len(wrong), "unit": "violations", "what": wrong},
    ]
    return rows


def memory(rss: list[tuple[int, float]]) -> dict[str, float]:
    """Return the trainer's median resident MiB in the first and the last third of the faults, and its peak."""
    values = [mib for _, mib in rss]
    third = max(1, len(values) // 3)
    return {
        "rss_first_mib": statistics.median(values[:third]),
        "rss_last_mib": statistics.median(values[-third:]),
        "rss_peak_mib": max(values),
    }


def plot(events: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 3.4))
    minutes = [event["seconds"] / 60 for event in events]
    axis.plot(minutes, [event.get("step", 0) for event in events], color="0.7", zorder=0)
    for kind in FAULTS:
        chosen = [(m, event.get("step", 0)) for m, event in zip(minutes, events) if event["fault"] == kind]
        if chosen:
            axis.scatter(*zip(*chosen), s=18, label=kind)
    axis.set(xlabel="minutes", ylabel="steps saved", title="Faults during one run")
    axis.legend(fontsize=7, ncol=2)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    plt.close(figure)
