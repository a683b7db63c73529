"""Malformed configs: any words at all give a run of exactly what they say, or one clear message.

The test marked `learning` tries many more than the other; RL_LAB_EXAMPLES sets how many.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from rl_lab.cli import main
from rl_lab.config.checks import root_keys
from rl_lab.config.compose import compose_config
from rl_lab.errors import LabError
from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.training import train_config

MANY = int(os.environ.get("RL_LAB_EXAMPLES", "1000"))
SETTINGS = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}
BASES = {
    "random": [
        "experiment=random_cartpole",
        "debug=tiny",
        "environment=dummy_discrete",
        "environment.workers=0",
    ],
    "dreamer": [
        "experiment=dreamer_cartpole",
        "debug=tiny",
        "environment=dummy_discrete",
        "environment.workers=0",
    ],
}
QUIET = ["logging.progress=off", "logging.tensorboard=false"]
GOOD = [
    "1",
    "2",
    "3",
    "7",
    "0.5",
    "true",
    "false",
    "null",
    "cpu",
    "auto",
    "stop",
    "replay",
    "collect",
    "uniform",
]
WRONG = [
    *(
        "abc",
        "-1",
        "0",
        "1.5",
        "-0.5",
        "nan",
        "inf",
        "-inf",
        "[]",
        "{}",
        "[1,2]",
        "[[]]",
        "[{}]",
        "{a: 1}",
        "{a: {b: 2}}",
    ),
    *(
        "'${nope}'",
        "'${oc.env:NOT_SET_ANYWHERE}'",
        "'${add:1,x}'",
        "???",
        "..",
        "../../x",
        "a b",
        "x" * 400,
        "''",
        "' '",
    ),
    *("os.system", "builtins.eval", "rl_lab.nothing.Nothing", "torch.nn.Linear", "rl_lab.errors.LabError"),
]
BROKEN = [
    *(
        "[",
        "]",
        "{",
        "}",
        "'",
        '"',
        "=",
        ",",
        "${",
        "a=b",
        "@",
        "1,2",
        "\x00",
        "é",
        "!!python/object:os.system",
    )
]
GROUPS = [
    "experiment",
    "environment",
    "workflow",
    "buffer",
    "size",
    "debug",
    "components/encoder",
    "controller",
    "phases",
]


def known_paths(words: list[str]) -> list[str]:
    """Return all keys of a config as command-line paths."""
    found: list[str] = ["hydra.searchpath", "hydra.run.dir"]

    def walk(node: object, prefix: str) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in items:
            found.append(f"{prefix}{key}")
            walk(value, f"{prefix}{key}.")

    walk(OmegaConf.to_container(compose_config(words)), "")
    return sorted(found)


PATHS = {name: known_paths(words) for name, words in BASES.items()}


@st.composite
def overrides(draw: st.DrawFn, base: str) -> str:
    path = draw(st.sampled_from(PATHS[base]) | st.sampled_from(PATHS[base]) | st.sampled_from(GROUPS))
    slip, style = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    if slip == 0:
        at = draw(st.integers(0, len(path)))
        path = path[:at] + draw(st.sampled_from(["", "x", ".", "/", "@", " ", "__"])) + path[at + 1 :]
    value = draw(st.sampled_from(GOOD) | st.sampled_from(WRONG) | st.sampled_from(WRONG))
    if slip == 1:
        value = draw(st.sampled_from(BROKEN) | st.text(max_size=6))
    sign = draw(st.sampled_from(["+", "++", "~"])) if slip in (2, 3) else ""
    form = draw(st.sampled_from(["{0}{1}", "{1}={2}={2}", "={2}"])) if style == 0 else "{0}{1}={2}"
    return form.format(sign, path, value)


@st.composite
def mistakes(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Draw a base and one or two wrong overrides."""
    base = draw(st.sampled_from(list(BASES)))
    return base, draw(st.lists(overrides(base), min_size=1, max_size=2))


def words_of(base: str, more: list[str], folder: Path) -> list[str]:
    return [*BASES[base], *QUIET, f"output_root={folder}", *more]


@pytest.fixture
def few_actions(monkeypatch):
    """Stop runs after a few actions."""
    do = Orchestrator.run_action

    def counted(self, action, phase):
        do(self, action, phase)
        self.actions_done = getattr(self, "actions_done", 0) + 1
        self.interrupted = self.actions_done >= 12

    monkeypatch.setattr(Orchestrator, "run_action", counted)


def obeyed_or_explained(mistake: tuple[str, list[str]], tmp_path: Path) -> None:
    base, more = mistake
    words = words_of(base, more, tmp_path / "outputs")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = compose_config(words)
            run = train_config(config, words, say=lambda text: None)
    except LabError as error:
        message = str(error)
        assert message.strip() and "Traceback" not in message.split("\n\n")[0], message
        return
    saved = OmegaConf.load(run.path / "config.yaml")
    last = {word.lstrip("+~").partition("=")[0]: word for word in more}  # of two words for one key it counts
    for word in last.values():
        check_obeyed(word, saved)


@settings(max_examples=15, **SETTINGS)
@given(mistake=mistakes())
def test_random_overrides_apply_or_fail_clearly(few_actions, tmp_path, mistake):
    obeyed_or_explained(mistake, tmp_path)


@pytest.mark.learning
@settings(max_examples=MANY, **SETTINGS)
@given(mistake=mistakes())
def test_many_random_overrides_apply_or_fail_clearly(few_actions, tmp_path, mistake):
    obeyed_or_explained(mistake, tmp_path)


def check_obeyed(word: str, saved: object) -> None:
    """Check that the saved config has the overridden value; groups and deletions are up to Hydra."""
    path, equals, value = word.lstrip("+").partition("=")
    section = path.partition(".")[0]
    if (
        not equals
        or word.startswith("~")
        or "/" in path
        or "@" in path
        or section in ("hydra", *GROUPS[:4], "size", "debug")
    ):
        return
    if "${" in value or "," in value or path in ("run_dir", "output_root") or section == "_dims":
        return
    try:
        asked = yaml.safe_load(value)
    except yaml.YAMLError:
        return
    got = OmegaConf.select(saved, path)  # type: ignore[arg-type]
    if isinstance(asked, str | int | float | bool) and not isinstance(got, dict):
        assert str(got).strip().lower() == str(asked).strip().lower() or got == asked, (word, got)


def test_unknown_keys_are_errors_in_closed_sections(tmp_path: Path):
    for section, keys in root_keys().items():
        if section in ("experiment", "training", "logging", "wandb", "load"):
            near = next(iter(keys))
            with pytest.raises(
                LabError, match=f"{section}.{near}x is not a known key.*Did you mean '{near}'"
            ):
                words = words_of("random", [f"+{section}.{near}x=1"], tmp_path)
                train_config(compose_config(words), words, say=lambda text: None)


MALFORMED = {
    "buffers=1": "buffers must be a mapping, not 1",
    "training=3": "training must be a mapping, not 3",
    "~training.capture": "training.capture is missing",
    "~training.checkpoint": "training.checkpoint.every_env_steps is missing",
    "~training.evaluate.episodes": "training.evaluate.episodes is missing",
    "+optimizers.model.lr.zz=.inf": "optimizers.model.lr must be a number of at least 0",
    "optimizers.model.lr=2020-01-01": "optimizers.model.lr must be a number of at least 0, not '2020-01-01'",
    "optimizers.model.modules.2=-0": "optimizers.model.modules must be a list of names",
    "environment.timeout=no": "environment.timeout must be a number above 0 or null, not 'no'",
    "environment.normalize_clip=''": "environment.normalize_clip must be a number above 0 or null, not ''",
    "environment.history_limit=true": "environment.history_limit must be an integer of at least 0",
    "algorithm.learning_rate=0": "algorithm.learning_rate must be a number above 0, not 0",
    "algorithm.learning_rate=-1": "algorithm.learning_rate must be a number above 0, not -1",
    "algorithm.learning_rate=${now:%Y}": "algorithm.learning_rate must be a number",
    "algorithm.discount_horizon=0": "algorithm.discount_horizon must be a number of at least 1, not 0",
    "algorithm.discount_horizon=-5": "algorithm.discount_horizon must be a number of at least 1, not -5",
    "algorithm.free_nats=-1": "algorithm.free_nats must be a number of at least 0, not -1",
    "training.phases.0.workflow_hooks.1.update=nan": "phase 'joint': the hook 'update' must have a mapping",
    "training.phases.0.workflow_hooks.1.update.replayed_steps_per_env_step=../..": (
        "phase 'joint', hook 'update': replayed_steps_per_env_step must be a number above 0, not '../..'"
    ),
}


@pytest.mark.parametrize("word", MALFORMED)
def test_known_malformed_overrides_name_their_key(word: str, tmp_path: Path, capsys) -> None:
    """Each of these once ended as an unexpected error, or trained with a number that makes no sense."""
    words = [*BASES["dreamer"], *QUIET, "environment.eval.workers=0", f"run_dir={tmp_path / 'run'}"]
    assert main(["train", *words, word]) == 1
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert error.startswith(f"error: {MALFORMED[word]}") and "unexpected" not in error
    assert not (tmp_path / "run").exists()
