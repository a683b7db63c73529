"""Hashes of what a tiny seeded run of every experiment computes, to show that a change of the code changes no number.

    python scripts/dev/weights_hash.py --out before.json                   # the code of this checkout
    python scripts/dev/weights_hash.py --code ../other --out before.json   # the code of another checkout
    python scripts/dev/weights_hash.py --compare before.json               # 1 when a hash differs
    python scripts/dev/weights_hash.py --only iris_catch tdmpc_dmc --word training.fast_path=on

Every experiment trains on the CPU in a process of its own with one torch thread. The hash goes over the tensors and
numbers of components, controllers, optimizers, the workflow's own state and the counters of the newest checkpoint, by
key, dtype, shape and bytes: a renamed key counts as a difference. Logged metrics, generators, the collector and replay
are hashed apart; they are compared, too, and fail the comparison only with --strict. Two machines, or two versions of
torch, may give different hashes: compare on one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
# A few updates of every hook: debug=tiny makes one of some. A word for a key that an experiment lacks is left out of it.
WORDS = (
    "debug=tiny",
    "experiment.seed=0",
    "experiment.device=cpu",
    "training.total_timesteps=160",
    "algorithm.epochs.tokenizer_updates=2",
    "algorithm.epochs.world_model_updates=2",
    "algorithm.epochs.actor_critic_updates=2",
    "algorithm.stages.generations=3",
    "algorithm.stages.score_steps=120",
    "logging.progress=off",
    "logging.tensorboard=false",
)
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "SDL_VIDEODRIVER": "dummy",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
}
TRAINED = ("components", "controllers", "optimizers", "workflow_custom", "observation_statistics")
BESIDE = ("generators", "collector", "storage", "cadences")
MARK = "result: "


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the hashes here as JSON")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="hashes of an earlier run with --out")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these experiments only")
    parser.add_argument("--word", nargs="+", default=[], metavar="KEY=VALUE", help="more overrides, for all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--code", type=Path, default=CHECKOUT, help="the checkout whose rl_lab runs")
    parser.add_argument("--strict", action="store_true", help="what is hashed apart must be equal, too")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.code = options.code.resolve()
    if options.worker:
        print(MARK + json.dumps(hash_run(options.worker, options.code, options.word)))
        return 0
    names = experiments(options.code)
    unknown = sorted(set(options.only) - set(names))
    if unknown:
        parser.error(f"--only: no experiment is called {', '.join(unknown)}")
    earlier = json.loads(options.compare.read_text()) if options.compare else None
    names = options.only or names
    results = run_all(names, options)
    hashes = {"code": commit(options.code), "words": [*WORDS, *options.word], "experiments": results}
    if options.out:
        options.out.write_text(json.dumps(hashes, indent=1, sort_keys=True) + "\n")
    failed = [name for name in names if "failed" in results[name]]
    not_run = [name for name in names if "not_run" in results[name]]
    print(f"{len(names) - len(failed) - len(not_run)} hashed, {len(failed)} failed, {len(not_run)} not run")
    same = earlier is None or compare(earlier, hashes, everything=not options.only, strict=options.strict)
    return 0 if same and not failed else 1


def experiments(code: Path) -> list[str]:
    """Names of all experiments that the code ships."""
    files = sorted((code / "rl_lab").rglob("experiment/*.yaml"))
    if not files:
        raise SystemExit(f"{code}: no rl_lab with configs of experiments here; give a checkout with --code")
    return [file.stem for file in files]


def commit(code: Path) -> str:
    """The commit of a checkout, with a plus where files of the package were changed since."""
    git = ["git", "-C", str(code)]
    head = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "rl_lab"], capture_output=True, text=True).stdout
    return head + "+" * bool(changed)


# ---------------------------------------------------------------- one process for each experiment


def run_all(names: list[str], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    done = 0
    results: dict[str, dict[str, Any]] = {}

    def run_one(name: str) -> None:
        nonlocal done
        start = time.perf_counter()
        result = in_process(name, options)
        result["seconds"] = round(time.perf_counter() - start, 1)
        results[name] = result
        done += 1
        reason = result.get("failed") or result.get("not_run")
        outcome = f"{next(k for k in ('failed', 'not_run') if k in result)}: {reason}" if reason else ""
        outcome = outcome or f"{result['sha256'][:16]} {result['counters']}"
        print(f"[{done}/{len(names)}] {name} {result['seconds']} s: {outcome}", flush=True)

    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        list(pool.map(run_one, names))
    return results


def in_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """`hash_run` in a new process that imports the chosen checkout."""
    command = [sys.executable, "-P", __file__, "--worker", name, "--code", str(options.code)]
    command += ["--word", *options.word] if options.word else []
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(options.code)}
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    lines = [line for line in result.stdout.splitlines() if line.startswith(MARK)]
    if result.returncode or not lines:
        last = (result.stderr.strip() or result.stdout.strip() or "no output").splitlines()[-1]
        return {"failed": f"exit status {result.returncode}: {last}"}
    answer: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
    return answer


def hash_run(name: str, code: Path, words: list[str]) -> dict[str, Any]:
    """Train in ./run and hash its newest checkpoint."""
    import rl_lab

    if code not in Path(rl_lab.__file__).resolve().parents:
        raise SystemExit(f"rl_lab comes from {rl_lab.__file__}, not from {code}")
    from omegaconf import OmegaConf

    from rl_lab.config.compose import compose_config

    config = compose_config([f"experiment={name}", "debug=tiny"])
    if missing := sorted(OmegaConf.missing_keys(config)):
        return {"not_run": f"{', '.join(missing)} must be set"}
    known = [
        word
        for word in WORDS
        if not word.startswith("algorithm.") or OmegaConf.select(config, word.partition("=")[0]) is not None
    ]
    try:
        run = rl_lab.train(name, [*known, *words, "run_dir=run"])
    except Exception as error:  # by name: the class may move
        if type(error).__name__ == "MissingPackageError":
            return {"not_run": str(error)}
        raise
    return hash_checkpoint(Path(run.path))


# ---------------------------------------------------------------- hashing


def hash_checkpoint(run: Path) -> dict[str, Any]:
    """The hash of all that was trained, and of its parts, for a run folder's newest checkpoint."""
    import torch

    manifests = [json.loads(file.read_text()) for file in (run / "checkpoints").glob("step_*.json")]
    manifest = max(manifests, key=lambda manifest: manifest["step"])
    state = torch.load(run / "checkpoints" / manifest["state"]["file"], weights_only=True)
    phases = state["phase_state"]
    counters = {"totals": phases["totals"], "hook_calls": phases["hook_calls"]}
    parts = {"counters": digest(counters)}
    for group in TRAINED:
        node = state.get(group)
        members = node if isinstance(node, dict) else {"": node}
        parts |= {f"{group}.{key}".rstrip("."): digest(value) for key, value in members.items()}
    beside = {group: digest(state.get(group)) for group in BESIDE}
    beside["replay"] = digest(manifest["buffers"])
    beside["metrics"] = digest(metrics(run / "metrics.jsonl"))
    whole = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return {"sha256": whole, "parts": parts, "beside": beside, "counters": phases["hook_calls"]}


def digest(node: Any) -> str:
    """SHA-256 over every leaf, sorted by its path."""
    total = hashlib.sha256()
    for path, leaf in sorted(leaves(node)):
        total.update(f"{path}\0{leaf}\0".encode())
    return total.hexdigest()


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Path and text of every leaf; of a tensor dtype, shape and the hash of its bytes."""
    import torch

    if isinstance(node, torch.Tensor):
        data = node.detach().cpu().contiguous().reshape(-1).clone().view(torch.uint8).numpy().tobytes()
        yield path, f"{node.dtype} {tuple(node.shape)} {hashlib.sha256(data).hexdigest()}"
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from leaves(value, f"{path}/{key}")
        if not node:
            yield path, "{}"
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from leaves(value, f"{path}/{index}")
        if not node:
            yield path, "[]"
    else:
        yield path, repr(node)


def metrics(file: Path) -> list[dict[str, Any]]:
    """Logged rows without what depends on the clock or the machine."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [
        {key: value for key, value in row.items() if not key.startswith("time") and "second" not in key}
        for row in rows
    ]


# ---------------------------------------------------------------- comparing


def compare(earlier: dict[str, Any], now: dict[str, Any], *, everything: bool, strict: bool) -> bool:
    """Print what differs; whether all is the same. everything: experiments that only one side has differ, too."""
    if earlier["words"] != now["words"]:
        print(f"the overrides differ: {earlier['words']} and {now['words']}")
        return False
    before, after = earlier["experiments"], now["experiments"]
    different = []
    for name in sorted(before.keys() | after.keys() if everything else after):
        first, second = before.get(name), after.get(name)
        if first is None or second is None:
            different.append(name)
            print(f"{name}: only {'now' if first is None else 'before'}")
        elif "sha256" not in first or "sha256" not in second:
            one_failed = first.get("sha256") != second.get("sha256") or "failed" in second
            different += [name] if one_failed else []
            print(f"{name}: nothing to compare: {without_hashes(first)} before, {without_hashes(second)} now")
        else:
            parts, beside = (changed(first[kind], second[kind]) for kind in ("parts", "beside"))
            if parts:
                print(f"{name}: differs in {', '.join(parts)}")
            if beside:
                print(f"{name}: differs beside the weights in {', '.join(beside)}")
            different += [name] if parts or (strict and beside) else []
    print(f"compared with {earlier['code']}: {len(different)} differ: {' '.join(different) or 'none'}")
    return not different


def changed(first: dict[str, str], second: dict[str, str]) -> list[str]:
    return [key for key in sorted(first.keys() | second.keys()) if first.get(key) != second.get(key)]


def without_hashes(result: dict[str, Any]) -> str:
    return result.get("failed") or result.get("not_run") or "hashed"


if __name__ == "__main__":
    sys.exit(main())
