"""Run what a documentation page shows: its shell commands, Python blocks and files, in order, in an empty folder.

Commands are shortened by documented means only: `debug=tiny` and few steps for training, `--episodes` and `--steps`
for the tools. `tests/docs_not_run.yaml` lists what is not run, with a reason for each.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import rl_lab
from rl_lab.cli import main
from rl_lab.environments import VectorEnv
from tests.config.stored_data import pusht_demonstrations
from tests.workflows.test_iris_pretrained import write_folder

ROOT = Path(__file__).resolve().parents[1]
NOT_RUN = yaml.safe_load((ROOT / "tests" / "docs_not_run.yaml").read_text())
# A fenced block, and before it the path of the file that it is, if the page names one.
BLOCK = re.compile(r"(?:^`([\w/.]+)`:\n\n)?^```(\w*)\n(.*?)^```", re.M | re.S)
EXAMPLE = re.compile(r"outputs/(?:multirun/)?2026-[\d-]+/[\d-]+")  # the runs that pages take as examples
LIMIT = 250  # seconds for a command in a process of its own
# Beside debug=tiny: no pictures of what the model predicts, no videos.
SHORT = ["training.report.every_env_steps=null", "training.evaluate.video=false"]
OWN = """from gymnasium.envs.classic_control import CartPoleEnv as MyEnv


def expert(obs):
    return int(obs[2] > 0)
"""


@dataclass(frozen=True)
class Step:
    """A file to write, a shell command, or a Python block."""

    kind: str
    text: str
    path: str = ""

    @property
    def name(self) -> str:
        """The command on one line, or the first line of code."""
        if self.kind == "python":
            return next(line for line in self.text.splitlines() if line.strip())
        return self.text


def steps(page: Path) -> Iterator[Step]:
    for path, language, text in BLOCK.findall(page.read_text()):
        if path:
            yield Step("file", text, path)
        elif language == "python":
            yield Step("python", text)
        elif language in ("bash", "sh"):
            for line in text.replace("\\\n", " ").splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                if words:
                    yield Step("shell", shlex.join(words))


def not_run(page: Path) -> dict[str, str]:
    """Beginnings of the commands and code of a page that are not run, with the reason."""
    entries: dict[str, str] = {}
    for reason, pages in NOT_RUN.items():
        entries |= dict.fromkeys(pages.get(page.relative_to(ROOT).as_posix(), ()), reason)
    return entries


def matches(step: Step, entry: str) -> bool:
    return step.name == entry[:-1] if entry.endswith("$") else step.name.startswith(entry)


def why_not(step: Step, entries: dict[str, str]) -> str | None:
    return next((reason for entry, reason in entries.items() if matches(step, entry)), None)


def pages() -> list[Path]:
    """The pages of the site with something to run; README.md has its own test."""
    found = sorted((ROOT / "docs").rglob("*.md"))
    return [page for page in found if any(step.kind != "file" for step in steps(page))]


def run_page(page: Path, run: Path) -> tuple[list[str], dict[str, float]]:
    """Run a page in the current folder: what failed, and the seconds of each step. `run` is a finished run."""
    entries, namespace = not_run(page), {"__name__": "page"}
    failures, seconds, modules = [], {}, {*sys.modules}
    make_stand_ins(page.read_text(), run)
    for step in steps(page):
        if why_not(step, entries):
            continue
        start = time.monotonic()
        try:
            run_step(step, namespace)
        except (Exception, SystemExit) as error:
            failures.append(f"{step.name}\n    {type(error).__name__}: {error}")
        if step.kind != "file":
            seconds[step.name] = time.monotonic() - start
    for value in namespace.values():
        if isinstance(value, VectorEnv):
            value.close()
    gc.collect()
    for name in {*sys.modules} - modules:  # `my_env` of one page is not that of another
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(Path.cwd())):
            del sys.modules[name]
    return failures, seconds


def run_step(step: Step, namespace: dict[str, Any]) -> None:
    if step.kind == "file":
        Path(step.path).parent.mkdir(parents=True, exist_ok=True)
        Path(step.path).write_text(shorter(step.text) if step.path.endswith(".yaml") else step.text)
    elif step.kind == "python":
        exec(_here(step.text), namespace)
    else:
        run_command(shlex.split(_here(step.text)))


def _here(text: str) -> str:
    """Absolute folders of the page inside the current folder; the example run for a path that is a placeholder."""
    here = str(Path.cwd())
    text = text.replace("path/to/checkpoint.pt", "outputs/2026-01-01/00-00-00/checkpoints/last.pt")
    return re.sub(r"(?<![\w.])/(tmp|data|shared)/", rf"{here}/\1/", text).replace("$PWD", here)


def make_stand_ins(text: str, run: Path) -> None:
    """What the page takes for granted: runs, also for commands that take the newest, and files of others."""
    examples = {*EXAMPLE.findall(text)}
    if all("multirun" in name for name in examples):
        examples.add("outputs/2026-01-01/00-00-00")
    for name in examples:
        for folder in [f"{name}/0", f"{name}/1"] if "multirun" in name else [name]:
            shutil.copytree(run, folder, dirs_exist_ok=True)
    if "my_module" in text:
        Path("my_module.py").write_text(OWN)
    if "my_env:" in text:
        page = ROOT / "docs" / "howto" / "own_environment.md"
        run_step(next(step for step in steps(page) if step.path == "my_env.py"), {})
    if "pusht_cchi_v7_replay.zarr" in text:
        pusht_demonstrations(Path("pusht_cchi_v7_replay.zarr"))
    if "/data/gpt2" in text:
        write_folder(Path("data/gpt2"), positions=1024)
    if "datasets/held_out" in text:
        words = ["collect", "random", "--task", "CartPole-v1", "--episodes", "2", "--out", "held_out"]
        assert main([*words, "--workers", "0"]) == 0
    for name in ("DOWNLOADED_RUN", "outputs/carracing/evolve"):
        if name in text:
            shutil.copytree(run, name)


# ---------------------------------------------------------------- commands


def run_command(words: list[str]) -> None:
    program, *rest = words
    if program == "rl-lab":
        rest = shortened(rest)
        if {"--web", "--serve"} & {*rest}:
            _serve([sys.executable, "-m", "rl_lab", *rest, "--port", "0"])
        else:
            code = main(rest)
            assert code == 0, f"exit status {code}"
    elif program == "tensorboard":
        _serve([sys.executable, "-m", "tensorboard.main", *rest, "--port", "0"])
    else:
        _process(words)


def shortened(words: list[str]) -> list[str]:
    """The words after `rl-lab` with fewer steps and episodes."""
    verb, *rest = words
    if verb == "train":
        rest = [shorter(word) for word in rest]
        if "debug=tiny" not in rest:
            rest += ["debug=tiny", *(word for word in SHORT if not named(rest, word))]
        rest.append("logging.progress=off")
    elif verb == "resume":  # a run of 100 steps; a page may lengthen it twice
        steps = 120 if named(rest, "training.total_timesteps=") else 110
        rest = [word for word in rest if not word.startswith("training.total_timesteps=")]
        rest.append(f"training.total_timesteps={steps}")
    elif verb == "play" and "--web" not in rest:
        rest += ["--steps", "5"]
    elif verb == "collect" and "--recordings" not in rest:
        rest += ["--episodes", "12"]
    elif verb in ("eval", "export"):
        rest = [re.sub(r"^20000$", "100", word) for word in rest]  # the checkpoint of the last step
        rest += ["--episodes", "2"]
    elif verb == "bench" and "--formats" in rest:
        rest += ["--sizes", "400", "--length", "100", "--batches", "2"]
    elif verb == "report" and "--dream" in rest:
        rest = [re.sub(r"^\d+$", "2", word) for word in rest]
    return [verb, *rest]


def shorter(text: str) -> str:
    """Text of a config, or an override, with few updates and steps in each phase."""
    text = re.sub(r"\b(algorithm\.updates=|duration_updates: )\d{2,}", r"\g<1>3", text)
    return re.sub(r"\bduration_steps: \d{3,}", "duration_steps: 24", text)


def named(words: list[str], word: str) -> bool:
    """Whether the words set the key of `word` themselves."""
    return any(other.startswith(word.partition("=")[0] + "=") for other in words)


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def _process(words: list[str]) -> None:
    """A program of the checkout, or another one, in a process of its own."""
    if "scripts/train.py" in words:
        words = [*words[:2], *shortened(["train", *words[2:]])[1:]]
    if "scripts/play.sh" in words:
        words += ["--steps", "5"]
    words = [str(ROOT / word) if word.startswith("scripts/") else word for word in words]
    done = subprocess.run(words, env=_environment(), capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, f"exit status {done.returncode}: {(done.stdout + done.stderr)[-1500:]}"


def _serve(words: list[str]) -> None:
    """Start a server, fetch its page, and end it."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words, env=_environment(), stdout=pipe, stderr=subprocess.STDOUT, text=True
    ) as server:
        try:
            assert server.stdout is not None
            said = []
            for line in server.stdout:
                said.append(line)
                found = re.search(r"http://[^\s]+", line)
                if found:
                    break
            else:
                raise AssertionError(f"no address: {''.join(said)[-1500:]}")
            address = found[0].replace("0.0.0.0", "127.0.0.1")
            assert b"<title>" in urllib.request.urlopen(address, timeout=30).read()
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()  # TensorBoard may hang when it is asked to end right after its start


def finished_run(folder: Path) -> Path:
    """The run that stands for the examples of the pages, trained and evaluated."""
    rl_lab.train("dreamer_cartpole", ["debug=tiny", "logging.progress=off", f"run_dir={folder}"])
    rl_lab.evaluate(folder, episodes=2, video=True)
    return folder


if __name__ == "__main__":  # python -m tests.docs_commands [PAGE…]: what fails, and how long each step takes
    import tempfile

    chosen = [Path(name).resolve() for name in sys.argv[1:]] or pages()
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        example = finished_run(Path(work) / "example")
        for page in chosen:
            place = Path(work) / page.stem
            place.mkdir()
            sys.path.insert(0, str(place))
            before = sum(os.times()[:4])
            with contextlib.chdir(place):
                failures, seconds = run_page(page, example)
            used = sum(os.times()[:4]) - before
            took = [f"{took:7.1f} s  {name}" for name, took in seconds.items()]
            took += [f"FAILED {failure[:1800]}" for failure in failures]
            head = f"#### {page.relative_to(ROOT)}: {sum(seconds.values()):.1f} s, {used:.1f} s of CPU"
            print("\n".join([head, *took]), file=sys.stderr, flush=True)
