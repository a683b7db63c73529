"""Suite definitions: the YAML files in configs/suite, and the runs that they stand for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from rl_lab.config.compose import CONFIG_FOLDER, search_folders
from rl_lab.errors import ConfigError, closest, one_line, reject_unknown, require_choice
from rl_lab.tools.published import RETURN

# A suite has methods; a method is an experiment with overrides, on tasks × seeds, for a number of frames:
#
#   methods:
#     random:
#       title: random actions            # in tables
#       experiment: random_cartpole
#       overrides: []                    # of every run
#       tasks: [gym/CartPole-v1]         # environment.task
#       seeds: [1, 2, 3]
#       frames: 100000                   # environment frames: decisions × action repeat; null: the phases end it
#       evaluate: {every_frames: 25000, episodes: 10}
#       checkpoint: {every_frames: 25000}
#       final: {episodes: 20}            # new episodes after training; null: none
#       score: {from: eval}              # eval (last evaluation) | final | train (episodes of the last `window` frames)
#                                        # metric: a statistic of episodes (return_mean); last: number of evaluations
#       published: [random]              # agents of tools/published.yaml to compare with
#       each: {per_gpu: 4, gpu_gib: 8, host_gib: 6, cores: 2}     # what one run needs; per_gpu: at most

GROUP = "suite"
SCORES = ("eval", "final", "train")


@dataclass(frozen=True)
class Needs:
    """What one run needs; as many run at a time as the machine has."""

    per_gpu: int = 4  # runs at a time on one GPU, at most
    gpu_gib: float = 8.0
    host_gib: float = 6.0
    cores: float = 1.0


@dataclass(frozen=True)
class Score:
    """Which episodes make the score of a run."""

    source: str = "eval"
    window: int = 0  # frames; of source "train"
    metric: str = (
        RETURN  # the mean of this statistic over the episodes, as logged: eval/<metric>, collect/<metric>
    )
    last: int = 1  # evaluations; of source "eval"

    def describe(self) -> str:
        episodes = {
            "eval": f"the last {f'{self.last} evaluations' if self.last > 1 else 'evaluation'} during training",
            "final": "new episodes after training",
            "train": f"training episodes that ended in the last {self.window:,} frames",
        }[self.source]
        return episodes if self.metric == RETURN else f"{self.metric} of {episodes}"


@dataclass(frozen=True)
class Planned:
    """One run of a suite."""

    method: Method
    task: str
    seed: int
    frames: int | None

    @property
    def name(self) -> str:
        return f"{self.method.name}.{re.sub(r'[^A-Za-z0-9_-]+', '_', self.task)}.seed{self.seed}"


@dataclass(frozen=True)
class Method:
    """An experiment on tasks × seeds."""

    name: str
    experiment: str
    tasks: tuple[str, ...]
    seeds: tuple[int, ...]
    title: str = ""
    overrides: tuple[str, ...] = ()
    frames: int | None = None
    task_frames: Mapping[str, int] = field(default_factory=dict)  # tasks with another budget
    evaluate: Mapping[str, int] = field(default_factory=dict)  # every_frames, episodes
    checkpoint: Mapping[str, int] = field(default_factory=dict)  # every_frames
    final: Mapping[str, int] | None = None  # episodes
    score: Score = field(default_factory=Score)
    published: tuple[str, ...] = ()
    each: Needs = field(default_factory=Needs)

    def runs(self) -> list[Planned]:
        """Return the runs, all seeds of a task before the next task: a stopped suite has whole tasks."""
        return [
            Planned(self, task, seed, self.task_frames.get(task, self.frames))
            for task in self.tasks
            for seed in self.seeds
        ]

    def identity(self) -> dict[str, Any]:
        """Return what must be equal for two runs to count as seeds of one method."""
        return {"experiment": self.experiment, "overrides": list(self.overrides)}


@dataclass(frozen=True)
class Suite:
    """A benchmark: methods on tasks."""

    name: str
    text: str
    methods: tuple[Method, ...]

    def runs(self) -> list[Planned]:
        return [run for method in self.methods for run in method.runs()]

    def method(self, name: str) -> Method | None:
        return next((method for method in self.methods if method.name == name), None)

    def select(
        self,
        methods: Sequence[str] = (),
        tasks: Sequence[str] = (),
        seeds: Sequence[int] = (),
    ) -> list[Planned]:
        """Return the runs of these methods, tasks and seeds; none given: all."""
        for option, given, known in (
            ("--methods", methods, [method.name for method in self.methods]),
            ("--tasks", tasks, [task for method in self.methods for task in method.tasks]),
        ):
            for name in given:
                if name not in known:
                    raise ConfigError(f"{option} {name}: suite {self.name} has none.{closest(name, known)}")
        return [
            run
            for run in self.runs()
            if (not methods or run.method.name in methods)
            and (not tasks or run.task in tasks)
            and (not seeds or run.seed in seeds)
        ]


def suite_names(config_dirs: Sequence[Path | str] = ()) -> dict[str, Path]:
    """Return name -> file of every suite: ours, those of ./configs, and those of installed packages."""
    folders = [CONFIG_FOLDER, *search_folders(config_dirs)]
    return {file.stem: file for folder in folders for file in sorted((folder / GROUP).glob("*.yaml"))}


def load_suite(name: str, overrides: Sequence[str] = (), config_dirs: Sequence[Path | str] = ()) -> Suite:
    """Load a suite by name or by the path of a YAML file; `overrides` are added to every run."""
    file = Path(name)
    if file.suffix not in (".yaml", ".yml"):
        known = suite_names(config_dirs)
        if name not in known:
            raise ConfigError(f"suite {name} does not exist.{closest(name, known)}")
        file = known[name]
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read as YAML: {one_line(error)}") from error
    return parse_suite(file.stem, content, overrides)


def parse_suite(name: str, content: Any, overrides: Sequence[str] = ()) -> Suite:
    """Check the content of a suite file."""
    if not isinstance(content, Mapping) or not isinstance(content.get("methods"), Mapping):
        raise ConfigError(f"suite {name}: methods must be a mapping of name to experiment, tasks and seeds")
    reject_unknown(f"suite {name}", content, ("text", "methods"))
    methods = [
        _parse_method(f"suite {name}: methods.{key}", str(key), node, overrides)
        for key, node in content["methods"].items()
    ]
    return Suite(name, str(content.get("text") or ""), tuple(methods))


def _parse_method(where: str, name: str, node: Any, overrides: Sequence[str]) -> Method:
    if not isinstance(node, Mapping):
        raise ConfigError(f"{where} must be a mapping with experiment, tasks, seeds and frames")
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise ConfigError(f"{where}: a method's name has letters, digits, _ and - only")
    known = [item.name for item in fields(Method) if item.name not in ("name", "task_frames")]
    reject_unknown(where, node, known)
    for key in ("experiment", "tasks", "seeds"):
        if not node.get(key):
            raise ConfigError(f"{where}.{key} is missing: add it")
    frames = node.get("frames")
    task_frames: dict[str, int] = {}
    if isinstance(frames, Mapping):  # {default: 100000, dog_run: 60000}
        task_frames = {str(task): _count(f"{where}.frames.{task}", value) for task, value in frames.items()}
        frames = task_frames.pop("default", None)
    tasks = tuple(str(task) for task in node["tasks"])
    for task in task_frames:
        require_choice(f"{where}.frames: task", task, tasks)
    score = dict(node.get("score") or {"from": "eval"})
    reject_unknown(f"{where}.score", score, ("from", "window", "metric", "last"))
    require_choice(f"{where}.score.from", score.get("from"), SCORES)
    metric = score.get("metric", RETURN)
    if not isinstance(metric, str) or not metric:
        raise ConfigError(f"{where}.score.metric must be the name of a statistic of episodes, not {metric!r}")
    last = _count(f"{where}.score.last", score.get("last", 1))
    if last > 1 and score["from"] != "eval":
        raise ConfigError(f"{where}.score.last counts evaluations: it needs from: eval")
    if score["from"] == "train":
        _count(f"{where}.score.window", score.get("window"))
    final = node.get("final")
    if score["from"] == "final" and not final:
        raise ConfigError(f"{where}.score.from is final: add final: {{episodes: N}}")
    return Method(
        name=name,
        title=str(node.get("title") or name),
        experiment=str(node["experiment"]),
        overrides=(*map(str, node.get("overrides") or ()), *overrides),
        tasks=tasks,
        seeds=tuple(int(seed) for seed in node["seeds"]),
        frames=None if frames is None else _count(f"{where}.frames", frames),
        task_frames=task_frames,
        evaluate=_counts(f"{where}.evaluate", node.get("evaluate"), ("every_frames", "episodes")),
        checkpoint=_counts(f"{where}.checkpoint", node.get("checkpoint"), ("every_frames",)),
        final=_counts(f"{where}.final", final, ("episodes", "envs")) if final else None,
        score=Score(score["from"], int(score.get("window") or 0), metric, last),
        published=tuple(node.get("published") or ()),
        each=_needs(f"{where}.each", node.get("each") or {}),
    )


def _needs(where: str, node: Mapping[str, Any]) -> Needs:
    reject_unknown(where, node, [item.name for item in fields(Needs)])
    for key, value in node.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"{where}.{key} must be a number above 0, not {value!r}")
    return Needs(**node)


def _counts(where: str, node: Any, known: Sequence[str]) -> dict[str, int]:
    reject_unknown(where, node or {}, known)
    return {key: _count(f"{where}.{key}", value) for key, value in (node or {}).items()}


def _count(where: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 1:
        raise ConfigError(f"{where} must be an integer of at least 1, not {value!r}")
    return int(value)
