"""The documentation is correct: links resolve, commands parse and compose, names exist."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

import rl_lab
from rl_lab.cli import VERBS
from rl_lab.config.checks import CONFIG_FOLDER
from rl_lab.config.compose import compose_config

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
DREAMER = ROOT / "docs" / "algorithms" / "dreamer.md"


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> Iterator[str]:
    """Fenced blocks of a page that are marked with one of the languages."""
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.M | re.S):
        if language in languages:
            yield text


def commands(page: Path) -> list[list[str]]:
    """Return the shell commands of a page as lists of words, without comments, with joined lines."""
    lines = [line for block in blocks(page, "bash", "sh") for line in block.replace("\\\n", " ").splitlines()]
    split = (shlex.split(line.removeprefix("$ "), comments=True) for line in lines)
    return [words for words in split if words]


def train_overrides(words: list[str]) -> tuple[list[str], list[str]]:
    """Return overrides and config folders of a train command; of a sweep the first value."""
    args = parse("train", words)
    overrides = [
        re.sub(r"=([\w.]+)(,[\w.]+)+$", r"=\1", word) if args.multirun else word for word in args.overrides
    ]
    return overrides, args.config_dir


def parse(verb: str, words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"rl-lab {verb}", exit_on_error=False)
    importlib.import_module(VERBS[verb][0]).add_arguments(parser)
    try:
        return parser.parse_args([word for word in words if word != "--debug"])
    except SystemExit as error:
        raise AssertionError(f"rl-lab {verb} does not take {words}") from error


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub creates for the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_resolve(page: Path):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page_id(page)} links to {target}"
        assert file.is_relative_to(ROOT), f"{page_id(page)} links out of the repository: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page_id(page)} links to {target}"


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=page_id)
def test_commands_exist_and_compose(page: Path, tmp_path: Path):
    """Check every verb, flag, config group, name and key in the commands, with the files that the page shows."""
    for path, _, block in re.findall(r"^`([\w/.]+)`:\n\n```(\w+)\n(.*?)^```", page.read_text(), re.M | re.S):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(block)
    for program, *words in commands(page):
        if program in ("python", "python3", "bash") or program.startswith(("./", "scripts/")):
            script = words.pop(0) if program in ("python", "python3", "bash") else program
            if script == "-m":
                assert words[0] in ("rl_lab", "pytest", "venv"), words
            else:
                assert (ROOT / script).is_file(), f"{page_id(page)} runs {script}"
            if script.endswith("train.py"):
                check_rl_lab(["train", *words])
        elif program == "make":
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
            assert [word for word in words if "=" not in word and word not in targets] == []
        elif program == "rl-lab":
            check_rl_lab(words)
        elif program == "torchrun":
            check_rl_lab(words[words.index("rl_lab") + 1 :])
        else:
            known = ("pip", "uv", "git", "cd", "pytest", "tensorboard", "pre-commit", "source", ".")
            assert program in known, program


def check_rl_lab(words: list[str]) -> None:
    verb = words[0]
    if verb.startswith("--"):
        assert verb in ("--help", "--version")
        return
    assert verb in VERBS, f"rl-lab {verb}"
    if verb == "train":
        overrides, folders = train_overrides(words[1:])
        config = compose_config(overrides, config_dirs=folders)
        assert config.training.phases, f"{words} has nothing to do"
    elif verb == "bench":
        assert len(words) == 1 or (ROOT / "benchmarks" / f"{words[1]}.py").is_file(), words
    else:
        parse(verb, words[1:])


@pytest.mark.parametrize("name", ["contracts.md", "howto/coming_from.md", "howto/new_algorithm.md"])
def test_dotted_paths_import(name: str):
    paths = set(re.findall(r"`(rl_lab(?:\.\w+)+)", (ROOT / "docs" / name).read_text()))
    for path in sorted(paths):
        assert resolves(path), f"docs/{name} names {path}"
    assert paths or name == "howto/new_algorithm.md"


def resolves(path: str) -> bool:
    """Return whether the longest module prefix of a dotted path imports and has the remaining attributes."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_architecture_names_every_folder_and_module():
    text = (ROOT / "docs" / "architecture.md").read_text()
    package = ROOT / "rl_lab"
    modules = {file.name for file in package.rglob("*.py") if file.name != "__init__.py"}
    # The kernels are one row: their file names are those of the operations.
    modules -= {file.name for file in (package / "components" / "kernels").glob("*.py")}
    folders = {f"{file.parent.name}/" for file in package.rglob("__init__.py")} - {"rl_lab/", "configs/"}
    missing = sorted(name for name in modules | folders if f"`{name}" not in text and f"/{name}" not in text)
    assert not missing, f"docs/architecture.md does not name {missing}"
    for name in re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", text):
        assert list(ROOT.rglob(f"rl_lab/**/{name}")) or list(ROOT.glob(f"tests/**/{name}")), name
    assert len(text.splitlines()) <= 150


# ---------------------------------------------------------------- the page about Dreamer


@cache
def dreamer_numbers() -> list[tuple[str, str, str]]:
    """Config key, published value and the default experiment's value, from the page's table."""
    rows = re.findall(r"^\|[^|]+\| `([\w.]+)` \| ([^|]+) \| ([^|]+) \|$", DREAMER.read_text(), re.M)
    assert len(rows) > 15
    return [(key, published.strip(), ours.strip()) for key, published, ours in rows]


def same(stated: str, value: object) -> bool:
    try:
        return float(stated) == float(value)  # type: ignore[arg-type]
    except ValueError:
        return stated == value


def test_dreamer_table_matches_configs():
    config = compose_config([])
    published = yaml.safe_load((CONFIG_FOLDER / "algorithm" / "dreamer.yaml").read_text())
    for key, stated, ours in dreamer_numbers():
        value = OmegaConf.select(config, key)
        assert value is not None and same(ours, value), f"{key} is {value} in dreamer_cartpole, not {ours}"
        original = OmegaConf.select(OmegaConf.create(published), key)
        if original is not None and stated != "by size":
            assert same(stated, original), (
                f"{key} is {original} in configs/algorithm/dreamer.yaml, not {stated}"
            )


def test_dreamer_metrics_are_logged(tmp_path: Path):
    """Every metric that the page explains appears in a run's metrics.jsonl."""
    words = [
        "debug=tiny",
        "training.total_timesteps=60",
        "training.evaluate.episodes=1",
        "environment.time_limit=5",
    ]
    words += ["training.evaluate.every_env_steps=20", "training.report.every_env_steps=20"]
    run = rl_lab.train(
        None, [*words, "logging.progress=off", "logging.tensorboard=false", f"run_dir={tmp_path / 'run'}"]
    )
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    logged = {key for line in lines for key in line}
    table = DREAMER.read_text().partition("## Reading the metrics")[2].partition("\n## ")[0]
    named = set(re.findall(r"`((?:train|controller|collect|eval|report)/[\w/]+)`", table))
    assert len(named) > 20
    assert named - logged == set()
