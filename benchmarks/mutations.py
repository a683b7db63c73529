"""Mutated run folders: bytes, links and types of any file are changed, then a command reads the folder.

Each trial copies a small run, changes one to three files at random and runs one command on it in a process of its own.
Whatever was changed, the command must succeed or end with one sentence: no code of the folder runs, no file outside of
it changes, there is no traceback, no unexpected exception and no hang.

    rl-lab bench mutations --count 1000 --json docs/results/mutations.json
    rl-lab bench mutations --first 417 --count 1 --show        one trial again
    rl-lab bench mutations --each                              every file and folder, by each of bytes, links and types
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pickle
import random
import re
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

QUIET = ["logging.progress=off", "environment.workers=0", "environment.eval.workers=0"]
RUNS = {
    "replay": ["debug=tiny", "environment=dummy_discrete", "+buffers.replay.chunk_rows=8"],
    "episodes": ["debug=tiny", "environment=dummy_discrete", "buffer=episodes"],
}
STEPS, MORE = 24, 30
LIMIT = 90.0  # seconds of one command, on a busy machine
COMMANDS = ("load", "eval", "resume", "report", "play", "dream", "offline", "weights")
WEIGHTS = (6, 6, 6, 1, 3, 2, 4, 3)
CANARY = "canary_part"  # a module that writes a file when it is imported
WAYS = {
    "bytes": ("flip", "flip", "truncate", "grow", "empty", "garble", "zero", "delete", "huge line"),
    "links": ("link to a file", "link to a folder", "dangling link", "link to itself", "link to a device"),
    "types": ("folder", "file", "pipe", "socket"),
    "content": ("names", "names", "pickle", "json", "yaml"),
}


def run(argv: list[str]) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(prog="rl-lab bench mutations")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first trial, the seed of its choices"
    )
    parser.add_argument("--show", action="store_true", help="print what each trial did")
    parser.add_argument(
        "--each",
        action="store_true",
        help="one trial for every file and folder of both runs and each of bytes, links and types",
    )
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="rl_lab_mutations_") as place:
        trials = Trials(Path(place))
        results = []
        targets: list[Target | None] = [*trials.targets()] if args.each else [None] * args.count
        for number, target in enumerate(targets, start=args.first):
            result = trials.run(number, target)
            results.append(result)
            if args.show or result["problems"]:
                print(json.dumps(result), flush=True)
    rows = rows_of(results)
    if args.each:
        rows.insert(
            0,
            {
                "name": "targets: run, file or folder, kind of change",
                "value": len(targets),
                "unit": "targets",
            },
        )
    return rows


Target = tuple[str, str, str]  # run, path in it, kind of change


def rows_of(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the counts: trials, violations by kind, outcomes by kind of change and by command."""
    bad = [result for result in results if result["problems"]]
    rows = [
        {"name": "trials", "value": len(results), "unit": "trials"},
        {"name": "violations", "value": len(bad), "unit": "trials", "trials": [r["number"] for r in bad]},
        {"name": "slowest", "value": max(r["seconds"] for r in results), "unit": "s"},
    ]
    for field in ("kind", "command"):
        counts = Counter((result[field], result["outcome"]) for result in results)
        rows += [
            {"name": f"{field} {name}: {outcome}", "value": count, "unit": "trials"}
            for (name, outcome), count in sorted(counts.items())
        ]
    return rows


class Trials:
    """Two trained runs, a folder that must not change, and trials on copies of them."""

    def __init__(self, place: Path) -> None:
        import rl_lab

        self.place = place
        self.mark = place / "mark"
        modules = place / "modules"
        modules.mkdir()
        text = f"open({str(self.mark)!r}, 'w').close()\ndef call(*a, **k): pass\nclass Env: pass\n"
        (modules / f"{CANARY}.py").write_text(text)
        sys.path.insert(0, str(modules))
        self.outside = place / "outside"
        (self.outside / "deep").mkdir(parents=True)
        for name in (
            "thesis.txt",
            "tail-000000000001.pt",
            "step_000000001.pt",
            "events.out.tfevents.1",
            "deep/a.png",
        ):
            (self.outside / name).write_text("years of work")
        for name, words in RUNS.items():
            with _silent():
                every = [f"training.{what}.every_env_steps=12" for what in ("checkpoint", "evaluate")]
                rest = [f"training.total_timesteps={STEPS}", f"run_dir={place / name}"]
                rl_lab.train("dreamer_cartpole", [*words, *QUIET, *every, *rest])
                _main(["eval", str(place / name), "--episodes", "1", "--no-video"])
                _main(["play", str(place / name), "--video", "--steps", "3"])

    def targets(self) -> list[Target]:
        """Return every file and folder of the runs with each kind of change that it can have."""
        return [
            (name, str(path.relative_to(self.place / name)), kind)
            for name in RUNS
            for path in sorted((self.place / name).rglob("*"))
            for kind in ("bytes", "links", "types")
            if kind != "bytes" or path.is_file()
        ]

    def run(self, number: int, target: Target | None = None) -> dict[str, Any]:
        """Run one trial; its number gives all its choices, but for the target if there is one."""
        choose = random.Random(number)
        name = target[0] if target else choose.choice(list(RUNS))
        copy = self.place / "trial" / "run"
        shutil.rmtree(copy.parent, ignore_errors=True)
        shutil.copytree(self.place / name, copy, symlinks=True)
        if choose.random() < 0.5 and not (target and target[1] == "config/signature.json"):
            (copy / "config" / "signature.json").unlink()  # it was made elsewhere
        kind = target[2] if target else choose.choice(list(WAYS))
        if target:
            done = [self.change(copy, kind, choose, copy / target[1])]
        else:
            done = [self.change(copy, kind, choose) for _ in range(choose.choice((1, 1, 1, 2, 3)))]
        if choose.random() < 0.4:
            vouch(copy)
        command = choose.choices(COMMANDS, WEIGHTS)[0]
        before, started = contents(self.outside), time.monotonic()
        code, output = self.in_process(command, copy)
        seconds = time.monotonic() - started
        problems = judge(code, output)
        if self.mark.exists():
            problems.append("code ran")
            self.mark.unlink()
        if contents(self.outside) != before or {p.name for p in copy.parent.iterdir()} - {"run", "out"}:
            problems.append("a file outside changed")
        outcome = "violation" if problems else "survived" if code == 0 else "one sentence"
        return {
            "number": number,
            "run": name,
            "kind": kind,
            "changes": done,
            "command": command,
            "outcome": outcome,
            "problems": problems,
            "seconds": round(seconds, 1),
            "output": output[-1500:] if problems else output.strip().splitlines()[-1:],
        }

    # ------------------------------------------------------------ changes

    def change(self, run: Path, kind: str, choose: random.Random, path: Path | None = None) -> str:
        way = choose.choice(WAYS[kind])
        if path is not None:
            pass
        elif way in ("names", "yaml"):
            path = run / "config.yaml"
        elif way == "pickle":
            path = choose.choice(
                sorted(p for p in run.rglob("*.pt") if p.is_file()) or [run / "metrics.jsonl"]
            )
        elif way == "json":
            path = choose.choice(sorted([*run.rglob("*.json"), run / "metrics.jsonl"]))
        else:
            everything = sorted(p for p in run.rglob("*") if kind != "bytes" or p.is_file())
            top = [
                run / n
                for n in (
                    "config.yaml",
                    "metrics.jsonl",
                    ".lock",
                    "checkpoints",
                    "checkpoints/replay",
                    "media",
                )
            ]
            top += [
                run / n
                for n in ("config/spec.json", "config/native.json", "code.txt", "report", "tensorboard")
            ]
            known = [p for p in top if os.path.lexists(p) and (kind != "bytes" or p.is_file())]
            path = choose.choice((known if choose.random() < 0.5 else everything) or [run / "nothing"])
        if not os.path.lexists(path):
            return f"{way}: {path.relative_to(run)} is gone"
        with contextlib.suppress(OSError, UnicodeDecodeError):
            self._apply(run, path, way, choose)
        return f"{way}: {path.relative_to(run)}"

    def _apply(self, run: Path, path: Path, way: str, choose: random.Random) -> None:
        if way in ("names", "yaml") and path.is_file():
            path.write_text(spoil_config(path.read_text(), way, choose))
        elif way == "pickle":
            path.write_bytes(pickle.dumps(Bomb(str(self.mark))))
        elif way == "json" and path.is_file():
            path.write_text(
                choose.choice(
                    ("[" * 50_000, "{}", "[]", "null", "1" * 10_000, '{"step": 1e999}\n', '"\\u001b[2J"')
                )
            )
        elif way in WAYS["bytes"]:
            if path.is_file():
                spoil_bytes(path, way, choose)
        else:
            kept = path.is_dir() and not path.is_symlink()
            if kept:
                shutil.rmtree(path)
            else:
                path.unlink()
            targets = {
                "link to a file": choose.choice(sorted(p for p in self.outside.iterdir() if p.is_file())),
                "link to a folder": self.outside,
                "dangling link": run / "nothing",
                "link to itself": path,
                "link to a device": Path("/dev/zero"),
            }
            if way in targets:
                path.symlink_to(targets[way])
            elif way == "folder":
                path.mkdir()
                (path / "x").write_text("x")
            elif way == "file":
                path.write_text("x")
            elif way == "pipe":
                os.mkfifo(path)
            elif way == "socket":
                here = os.getcwd()
                os.chdir(path.parent)  # names of sockets are short
                try:
                    socket.socket(socket.AF_UNIX).bind(path.name)
                finally:
                    os.chdir(here)

    # ------------------------------------------------------------ commands

    def in_process(self, command: str, run: Path) -> tuple[int, str]:
        """Run a command in a fork; returns its status (-9: it did not end in time) and what it printed."""
        end, begin = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(end)
            code = 99
            try:
                os.setsid()
                os.dup2(begin, 1)
                os.dup2(begin, 2)
                sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), line_buffering=True)
                sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), line_buffering=True)
                code = self.command(command, run)
                sys.stdout.flush()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(begin)
        text, deadline = b"", time.monotonic() + LIMIT
        while True:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([end], [], [], max(0.0, left))
            if not ready:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                os.close(end)
                return -9, text.decode(errors="replace") + "\nHANG"
            block = os.read(end, 1 << 16)
            if not block:
                break
            text += block
        os.close(end)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text.decode(errors="replace")

    def command(self, name: str, run: Path) -> int:
        out = run.parent / "out"
        words: dict[str, list[str]] = {
            "eval": ["eval", str(run), "--episodes", "1", "--no-video"],
            "resume": ["resume", str(run), f"training.total_timesteps={MORE}"],
            "report": ["report", str(run), "--out", str(out), "--keys", "collect/episodes"],
            "play": ["play", str(run), "--video", "--steps", "2"],
            "dream": ["report", str(run), "--dream", "--episodes", "1", "--out", str(out), "--horizon", "2"],
        }
        warnings.simplefilter("ignore")
        if name in words:
            return _main(words[name])
        return _as_command(lambda: self._call(name, run))

    def _call(self, name: str, run: Path) -> None:
        import numpy as np

        import rl_lab
        from rl_lab.buffers.offline import OfflineBuffer

        agent = rl_lab.load_agent(run if name == "load" else self.place / "replay")
        if name == "load":
            zeros = {key: np.zeros(spec.shape, spec.dtype) for key, spec in agent.spec.observations.items()}
            agent.act(zeros, scaled=True)
        elif name == "offline":
            OfflineBuffer(agent.spec.row_columns(), path=run, spec=agent.spec).describe()
        else:
            agent.load(run)


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (self.mark,)


def judge(code: int, output: str) -> list[str]:
    """Return what is wrong with the end of a command."""
    lines = [line for line in output.splitlines() if line.strip()]
    problems = []
    if code == -9 and output.endswith("HANG"):
        problems.append("hang")
    elif code not in (0, 1):
        problems.append(f"status {code}")
    if "Traceback (most recent" in output:
        problems.append("traceback")
    if code == 1:
        errors = [line for line in lines if line.startswith("error: ")]
        if len(errors) != 1:
            problems.append(f"{len(errors)} sentences")
        elif re.search(r"\bunexpected \w+(Error|Exception)\b", errors[0]):
            problems.append("unexpected")
    if "\x1b" in output:
        problems.append("escape sequence")
    return problems


def spoil_bytes(path: Path, way: str, choose: random.Random) -> None:
    data = bytearray(path.read_bytes())
    at = int(choose.random() * len(data))
    if way == "flip" and data:
        for _ in range(choose.choice((1, 1, 3, 20))):
            data[int(choose.random() * len(data))] ^= 1 << choose.randrange(8)
    elif way == "truncate":
        del data[at:]
    elif way == "grow":
        data += choose.randbytes(choose.choice((1, 50, 5000)))
    elif way == "empty":
        data.clear()
    elif way == "garble":
        data[:] = choose.randbytes(len(data))
    elif way == "zero":
        data[at : at + 64] = bytes(len(data[at : at + 64]))
    elif way == "huge line":
        data[at:at] = b"9" * 200_000
    elif way == "delete":
        path.unlink()
        return
    path.write_bytes(data)


def spoil_config(text: str, way: str, choose: random.Random) -> str:
    """Replace one value of the config by a name, a path or an expression, or add a part."""
    import yaml

    bombs = (
        "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b]\nd: [*c,*c,*c]\n",
        "deep: " + "[" * 3000 + "]" * 3000 + "\n",
        "x: !!python/object/apply:os.system ['true']\n",
        "? [a, b]\n: c\n",
        "~: 1\n",
    )
    if way == "yaml":
        return choose.choice((text + choose.choice(bombs), choose.choice(bombs) + text, "- 1\n", "1", ""))
    try:
        config = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        return text
    places = list(_leaves(config)) if isinstance(config, dict) else []
    if not places:
        return text
    node, key = choose.choice(places)
    values = (
        f"{CANARY}:Env",
        f"{CANARY}.call",
        {"_target_": f"{CANARY}.call"},
        {"_target_": "functools.partial", "_args_": [{"_target_": f"{CANARY}.call"}]},
        "${oc.env:HOME}",
        "../../../../etc/passwd",
        "/etc/passwd",
        "\x1b[2J\x07",
        "<script>alert(1)</script>",
        -1,
        10**12,
        float("nan"),
        None,
        [],
        {},
        True,
        "???",
    )
    if choose.random() < 0.3:
        group = choose.choice(
            ("components", "controllers", "optimizers", "buffers", "environment", "algorithm")
        )
        if isinstance(config.get(group), dict):
            config[group][choose.choice(("extra", "_target_", "task"))] = choose.choice(values)
    else:
        node[key] = choose.choice(values)
    return yaml.safe_dump(config, sort_keys=False)


def _leaves(node: Any) -> list[tuple[Any, Any]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    found = []
    for key, value in items:
        found += _leaves(value) if isinstance(value, (dict, list)) and value else [(node, key)]
    return found


def vouch(run: Path) -> None:
    """Write the sizes and checksums of the changed files into the manifests, and the config, as an attacker would."""
    import yaml

    from rl_lab.errors import LabError
    from rl_lab.utils.checkpoint.manifest import read_manifest, write_manifest
    from rl_lab.utils.files import crc32_of

    for file in (run / "checkpoints").glob("*.json"):
        with contextlib.suppress(
            OSError, LabError, ValueError, KeyError, TypeError, yaml.YAMLError, RecursionError
        ):
            manifest = read_manifest(file)
            entries = [(manifest["state"], file.parent / manifest["state"]["file"])]
            for name, entry in manifest["buffers"].items():
                for part, facts in entry["files"].items():
                    entries.append((facts, file.parent / "replay" / name / part))
            for facts, path in entries:
                if path.is_file():
                    facts |= {"bytes": path.stat().st_size, "crc32": crc32_of(path)}
            text = (run / "config.yaml").read_text() if (run / "config.yaml").is_file() else ""
            config = yaml.safe_load(text) if "&a" not in text else None
            if isinstance(config, dict):
                manifest["info"]["config"] = config
            write_manifest(file, manifest)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in sorted(folder.rglob("*"))
    }


def _main(words: list[str]) -> int:
    from rl_lab.cli import main

    return main(words)


def _as_command(call: Callable[[], None]) -> int:
    from rl_lab.errors import LabError
    from rl_lab.utils.untrusted import printable

    try:
        call()
    except LabError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 1
    return 0


@contextlib.contextmanager
def _silent() -> Any:
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
