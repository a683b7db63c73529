"""Runs a search of 12 trials that is killed twice on its way, and checks that nothing is lost or done twice.

    python scripts/dev/killed_sweep.py outputs/killed_sweep docs/results/sweep_cartpole.json
    python scripts/dev/killed_sweep.py outputs/killed_sweep docs/results/sweep_cartpole.json --picture   # also photograph

`rl-lab sweep` (extra optuna) searches the learning rate, the entropy and the train ratio of Dreamer on CartPole-v1. The
first kill is SIGKILL to the sweep and all of its trials, the second to the sweep alone, whose trials then save and end.
Each comes when a third or two thirds of the trials have ended and one that runs has saved. Then the same command
continues. At the end: are there 12 trials, each ended once, with the values from before the kills, and has each trial
every evaluation once? If not, the exit status is 1.

The JSON holds the trials, the moments of the kills and the importances. --picture: Chromium photographs the page, at
1280 pixels to docs/images/report/sweep.png and at 390 pixels to sweep_phone.png beside the page.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

WORDS = (
    "+experiment=dreamer_cartpole",
    "training.total_timesteps=2400",
    "training.evaluate.every_env_steps=400",
    "training.log.every_env_steps=400",
    "training.report.every_env_steps=null",
    "training.checkpoint.every_env_steps=200",
    "environment.workers=0",
    "logging.tensorboard=false",
    "algorithm.learning_rate=tag(log,interval(1e-4,1e-2))",
    "algorithm.entropy=tag(log,interval(3e-4,1e-1))",
    "algorithm.train_ratio=8,16,32",
)
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "report" / "sweep.png"
POLL_S = 0.5


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of the sweep; new")
    parser.add_argument("json", type=Path)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--startup", type=int, default=6)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--words", nargs="+", default=list(WORDS))
    parser.add_argument("--picture", action="store_true")
    args = parser.parse_args()
    if args.folder.exists():
        sys.exit(f"{args.folder} exists: a sweep that begins anew needs a new folder")
    from rl_lab.tools.doctor import commit

    began, state = time.monotonic(), commit() or None  # files may change while it runs
    first = [*args.words, "--trials", str(args.trials), "--startup", str(args.startup)]
    kills = []
    for number, (ended, group) in enumerate([(args.trials // 3, True), (2 * args.trials // 3, False)]):
        kills.append(run_until(args, first if number == 0 else [], ended, group, began))
        kills[-1]["trials"] = trials_of(args.folder)
        print(f"killed after {kills[-1]['seconds']} s: {kills[-1]['running']}", flush=True)
    with start(args, []) as last:
        status = last.wait()
    trials, best, importances = trials_of(args.folder, all_of_it=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = problems(args.folder, trials, [kill["trials"] for kill in kills], args.trials)
    found += [f"the last call ended with status {status}"] if status else []
    write(args, state, first, kills, trials, best, importances, found, used.ru_utime + used.ru_stime, began)
    print("\n".join(found) or f"{len(trials)} trials, none is lost or double")
    if args.picture:
        from report_images import photograph  # type: ignore[import-not-found]  # the file beside this one

        photograph(args.folder / "index.html", PICTURE, width=1280, height=1500)
        photograph(args.folder / "index.html", args.folder / "sweep_phone.png", width=390, height=1500)
    return 1 if found else 0


# --- The calls ---


def start(args: argparse.Namespace, words: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "rl_lab", "sweep", "--folder", str(args.folder), *words]
    with said(args.folder).open("ab") as output:
        return subprocess.Popen([*command, "--at-once", str(args.at_once)], stdout=output, stderr=output)


def said(folder: Path) -> Path:
    """The file with the output of all calls."""
    return folder.with_name(folder.name + "_output.txt")


def run_until(
    args: argparse.Namespace, words: Sequence[str], ended: int, with_trials: bool, began: float
) -> dict[str, Any]:
    """Start the sweep and kill it when that many trials have ended and one that runs has saved."""
    said(args.folder).parent.mkdir(parents=True, exist_ok=True)
    process = start(args, words)
    while True:
        if process.poll() is not None:
            sys.exit(f"the sweep ended with status {process.returncode}: {said(args.folder)}")
        running = children(process.pid)
        moment = {number: saved_step(args.folder, number) for number in running.values()}
        if len(begun(args.folder) - set(moment)) >= ended and any(moment.values()):
            break
        time.sleep(POLL_S)
    process.send_signal(signal.SIGKILL)
    for child in running if with_trials else ():
        os.kill(child, signal.SIGKILL)
    process.wait()
    for child in running:  # those of the second kill save first
        while Path(f"/proc/{child}").exists():
            time.sleep(0.1)
    return {
        "seconds": round(time.monotonic() - began, 1),
        "killed": "the sweep and its trials" if with_trials else "the sweep alone",
        "running": {
            str(number): {"saved_before": step, "saved_after": saved_step(args.folder, number)}
            for number, step in sorted(moment.items())
        },
    }


def children(process: int) -> dict[int, int]:
    """The process ids of the trials of a sweep, with their numbers."""
    found = {}
    for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_bytes().decode().strip("\0").split("\0")
        if words[-2:-1] == ["rl_lab.tools.sweep.one_trial"]:
            found[int(child)] = int(Path(words[-1]).stem)
    return found


def begun(folder: Path) -> set[int]:
    """The numbers of the trials that have been started."""
    return {int(file.stem) for file in folder.glob("logs/*.json")}


def saved_step(folder: Path, number: int) -> int:
    """The step of a trial's newest checkpoint, 0 without one."""
    files = (folder / "trials" / str(number) / "checkpoints").glob("step_*.json")
    return max((int(file.stem.removeprefix("step_")) for file in files), default=0)


# --- What is in the folder ---


def trials_of(folder: Path, all_of_it: bool = False) -> Any:
    """The rows of all trials; with `all_of_it` also the best one's number and the importances."""
    from rl_lab.tools.sweep.study import SweepFolder, Trials

    sweep = SweepFolder(folder)
    definition = sweep.load()
    assert definition is not None
    study = Trials(sweep, definition)
    rows = [
        {
            "number": trial.number,
            "state": trial.state.name.lower(),
            "value": trial.value,
            "steps": max(trial.intermediate_values, default=0),
            "evaluations": {str(step): value for step, value in sorted(trial.intermediate_values.items())},
            "values": trial.params,
            "calls": calls(sweep.log(trial.number)),
        }
        for trial in study.all()
    ]
    if not all_of_it:
        return rows
    best = study.best
    return rows, None if best is None else best.number, study.importances()


def calls(log: Path) -> list[str]:
    """How each process of a trial began: where its run was continued from, by the trial's own output."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return [line.partition(" from ")[0] for line in lines if line.startswith("resumed at step")]


def problems(
    folder: Path,
    trials: Sequence[Mapping[str, Any]],
    before: Iterable[Sequence[Mapping[str, Any]]],
    count: int,
) -> list[str]:
    """What was lost or done twice. before: the trials at each kill."""
    found = []
    if [trial["number"] for trial in trials] != list(range(count)):
        found.append(f"trials {[trial['number'] for trial in trials]} instead of 0 to {count - 1}")
    found += [
        f"trial {trial['number']} is {trial['state']}"
        for trial in trials
        if trial["state"] not in ("complete", "pruned")
    ]
    now = {trial["number"]: trial for trial in trials}
    for earlier in before:
        for trial in earlier:
            ended = ("state", "value", "evaluations") if trial["state"] in ("complete", "pruned") else ()
            for key in ("values", *ended):
                if now.get(trial["number"], {}).get(key) != trial[key]:
                    found.append(f"trial {trial['number']}: its {key} changed after a kill")
    runs = {int(run.name) for run in (folder / "trials").iterdir()}
    if runs != set(now):
        found.append(f"run folders {sorted(runs)}")
    for number, trial in now.items():
        file = folder / "trials" / str(number) / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
        steps = Counter(str(row["step"]) for row in rows if "eval/return_mean" in row)
        if dict(steps) != dict.fromkeys(trial["evaluations"], 1):
            found.append(f"trial {number}: evaluations {dict(steps)} in its run, {trial['evaluations']} told")
    return found


def write(
    args: argparse.Namespace,
    state: str | None,
    first: Sequence[str],
    kills: list[dict[str, Any]],
    trials: Sequence[Mapping[str, Any]],
    best: int | None,
    importances: Mapping[str, float],
    found: Sequence[str],
    cpu_s: float,
    began: float,
) -> None:
    from rl_lab.tools.doctor import describe_machine
    from rl_lab.utils.files import write_json_atomic

    for kill in kills:
        kill["ended"] = [trial["number"] for trial in kill["trials"] if trial["state"] != "running"]
        del kill["trials"]
    words = shlex.join(["rl-lab", "sweep", "--folder", "FOLDER", *first, "--at-once", str(args.at_once)])
    result = {
        "benchmark": "killed_sweep",
        "commit": state,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "load_average": round(os.getloadavg()[0], 1),
        "command": shlex.join(["python", "scripts/dev/killed_sweep.py", "FOLDER", *sys.argv[2:]]),
        "sweep": words,
        "continued_by": f"rl-lab sweep --folder FOLDER --at-once {args.at_once}",
        "wall_s": round(time.monotonic() - began, 1),
        "cpu_s": round(cpu_s, 1),  # without the processes of the trials that were killed
        "kills": kills,
        "problems": list(found),
        "best": best,
        "importances": importances,
        "trials": list(trials),
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(args.json, result)
    print(args.json)


if __name__ == "__main__":
    sys.exit(main())
