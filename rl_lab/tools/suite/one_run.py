"""The process of one run of a suite: train or continue, evaluate, export weights.

python -m rl_lab.tools.suite.one_run JOB.json

Facts about the run (command, commit, machine, final evaluation) go to the file that the job names; exit status
0: finished, STOPPED: a signal asked for a stop and the run is saved.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_lab.errors import LabError, RunLockedError
from rl_lab.tools.published import RETURN
from rl_lab.utils.files import read_json, write_json_atomic
from rl_lab.utils.stopping import STOPPED

LOCK_SECONDS = 90.0  # a run whose suite was killed needs this long to save and stop


def main(arguments: list[str]) -> int:
    from rl_lab.launch.pack import stop_with_parent

    job = read_json(Path(arguments[0]))
    stop_with_parent(int(job["parent"]))
    facts_file = Path(job["facts"])
    facts: dict[str, Any] = read_json(facts_file) if facts_file.is_file() else {}
    overrides = _overrides(job)
    facts |= _circumstances(job, overrides) | {"finished": False}
    write_json_atomic(facts_file, facts)
    budget = job["in_frames"]["training.total_timesteps"] or "phases"
    if facts.get("trained") != budget:
        facts.pop("final", None)  # of a smaller budget
        result = wait_for_lock(lambda: _train(overrides))
        if result.interrupted:
            return STOPPED
        facts |= {"trained": budget, "counters": result.counters}
        write_json_atomic(facts_file, facts)
    if job["final"] and "final" not in facts:
        facts["final"] = _evaluate(job)
        write_json_atomic(facts_file, facts)
    if job["weights"]:
        from rl_lab.tools.suite.weights import export_weights

        export_weights(Path(job["run_dir"]), Path(job["weights"]))
    facts["finished"] = True
    write_json_atomic(facts_file, facts)
    return 0


def _overrides(job: dict[str, Any]) -> list[str]:
    """Return all overrides of the run; budget and cadences in frames become decisions."""
    from rl_lab.config.compose import compose_config

    words = [
        f"experiment={job['experiment']}",
        *job["overrides"],
        f"environment.task={job['task']}",
        f"experiment.seed={job['seed']}",
        "logging.progress=plain",
        f"run_dir='{job['run_dir']}'",
    ]
    config = compose_config(words)
    repeat = int(config.environment.get("action_repeat") or 1)
    for key, frames in job["in_frames"].items():
        if frames is not None:
            words.append(f"{key}={max(1, int(frames) // repeat)}")
    return words + [f"{key}={count}" for key, count in job["counts"].items() if count is not None]


def _circumstances(job: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    from rl_lab.tools.doctor import commit, describe_machine

    shown = [word for word in overrides if not word.startswith(("run_dir=", "logging.progress="))]
    return {
        "command": " ".join(["rl-lab train", *shown]),
        "commit": commit() or job.get("commit"),
        "machine": describe_machine(),
    }


def _train(overrides: list[str]) -> Any:
    from rl_lab.config.compose import compose_config
    from rl_lab.training import train_config

    return train_config(compose_config(overrides), overrides)


def wait_for_lock(run: Callable[[], Any]) -> Any:
    """Run; while another process holds the run folder (it is saving and will end), try again."""
    limit = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return run()
        except RunLockedError:
            if time.monotonic() > limit:
                raise
            time.sleep(2.0)


def _evaluate(job: dict[str, Any]) -> dict[str, Any]:
    """Run new episodes of the trained agent."""
    from rl_lab.tools.evaluate import evaluate

    result = evaluate(
        job["run_dir"],
        episodes=int(job["final"]["episodes"]),
        envs=int(job["final"].get("envs") or 0) or None,
        video=False,
        seed=int(job["seed"]),
    )
    repeat = _action_repeat(Path(job["run_dir"]))
    keep = ("episodes", "step", "sample", "temperature", "seed", "returns", "lengths")
    found = {key: value for key, value in result.items() if key in keep or key.startswith("return_")}
    if "crafter_score" in result:
        found["crafter_score"] = result["crafter_score"]
    metric = str(job.get("metric", RETURN))
    if metric not in found:
        if f"log/{metric}" not in result:
            raise LabError(f"score.metric is {metric}, which episodes of {result['task']} do not log")
        found[metric] = result[f"log/{metric}"]
    return {**found, "frames": int(result["step"]) * repeat}


def _action_repeat(run_dir: Path) -> int:
    from rl_lab.run_folder import RunFolder

    return int(RunFolder(run_dir).load_spec().action_repeat)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LabError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    except MemoryError:
        print("error: out of memory: run fewer at once with --at-once", file=sys.stderr, flush=True)
        sys.exit(1)
    except Exception as error:
        import traceback

        from rl_lab.errors import unexpected

        traceback.print_exc()
        print(f"error: {unexpected(error)}", file=sys.stderr, flush=True)
        sys.exit(1)
