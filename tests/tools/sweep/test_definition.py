"""What a sweep searches: words of the command line, files, and the errors of both."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from rl_lab.cli import main
from rl_lab.errors import ConfigError, LabError, MissingPackageError
from rl_lab.tools.sweep.command import add_arguments, build_definition, default_folder
from rl_lab.tools.sweep.definition import (
    Definition,
    Parameter,
    definition_from,
    parameter_from,
    read_definition,
    split_words,
    word_of,
)
from rl_lab.tools.sweep.runner import check_definition
from rl_lab.tools.sweep.study import SweepFolder, require_optuna

WORDS = ["+experiment=dreamer_cartpole", "algorithm.train_ratio=8,16", "a.b=interval(0.1,0.9)"]


def definition(*words: str, folder: Path = Path("none")) -> Definition:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return build_definition(parser.parse_args(list(words)), SweepFolder(folder))


def test_ranges_have_the_grammar_of_hydra():
    fixed, search = split_words(
        [
            "+experiment=x",
            "a=1,2,3",
            "b=interval(1,8)",
            "c=int(interval(1,8))",
            "d=tag(log,interval(1e-4,1e-2))",
            "e=range(1,9,2)",
            "f=true,null",
            "g=choice(adam,'my opt')",
            "+h=[1,2],[3]",
            "i=[1,2]",
        ]
    )
    assert fixed == ["+experiment=x", "i=[1,2]"]
    assert search["a"] == [1, 2, 3] and search["e"] == [1, 3, 5, 7] and search["f"] == [True, None]
    assert search["b"] == {"low": 1.0, "high": 8.0, "log": False} and isinstance(search["b"]["low"], float)
    assert search["c"] == {"low": 1, "high": 8, "log": False} and isinstance(search["c"]["low"], int)
    assert search["d"] == {"low": 1e-4, "high": 1e-2, "log": True}
    assert search["g"] == ["adam", "my opt"] and search["+h"] == ["[1, 2]", "[3]"]


def test_parameters_know_their_kind():
    assert parameter_from("a", {"low": 1, "high": 5}) == Parameter("a", "int", 1.0, 5.0)
    assert parameter_from("a", {"low": "1e-4", "high": 1, "log": True}).kind == "float"
    assert (
        parameter_from("a", {"low": 16, "high": 64, "step": 16}).describe()
        == "16 to 64 in steps of 16, integers"
    )
    assert parameter_from("a", [None, "x", 2]).describe() == "null, x, 2"
    assert [word_of(value) for value in (None, True, 1e-5, 3, "x")] == ["null", "true", "1e-05", "3", "x"]


@pytest.mark.parametrize(
    ("node", "says"),
    [
        ([1], "search.k has 1 values"),
        ([1, {"a": 2}], "is not text, a number, true, false or null"),
        ({"low": 2, "high": 1}, "low=2 must be below high=1"),
        ({"low": 0, "high": 1, "log": True}, "log needs low above 0"),
        ({"low": 0, "hihg": 1}, "search.k has an unknown key 'hihg'. Did you mean 'high'"),
        ({"low": 0, "high": "much"}, "search.k.high must be a number, not 'much'"),
        ({"low": 0, "high": 1, "step": 2}, "step=2 must be above 0 and fit into the range"),
        ("1 to 3", "search.k must be a list of values or"),
    ],
)
def test_bad_ranges_are_named(node, says: str):
    with pytest.raises(ConfigError) as error:
        parameter_from("k", node)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["+experiment=x"], "sweep: search is empty"),
        (["+experiment=x", "a=1,2", "a=3"], "a is both set and searched: remove a=3"),
        (["run_dir=/tmp/x", "a=1,2"], "run_dir=/tmp/x: the sweep sets run_dir for each run"),
        (["launch=pack", "a=1,2"], "launch=pack: the sweep sets launch"),
        (["a=1,2", "what"], "'what' is no key=value and no YAML file"),
        (["a=1,2", "--trials", "0"], "sweep: trials must be an integer of at least 1, not 0"),
        (["one.yaml", "two.yaml"], "two.yaml: one file describes a sweep"),
        ([], "none has no sweep to continue"),
    ],
)
def test_bad_commands_are_named(words: list[str], says: str):
    with pytest.raises(LabError) as error:
        definition(*words)
    assert says in str(error.value)


def test_a_file_and_words_are_joined(tmp_path: Path):
    file = tmp_path / "lr.yaml"
    file.write_text(
        "overrides: [+experiment=dreamer_cartpole]\n"
        "search: {a.b: {low: 1e-4, high: 1e-2, log: true}, c: [1, 2]}\ntrials: 7\npruner: none\n"
    )
    found = definition(str(file), "c=3,4", "d=5", "--trials", "9", "--seed", "2")
    assert found.trials == 9 and found.pruner == "none" and found.seed == 2
    assert found.overrides == ("+experiment=dreamer_cartpole", "d=5")
    assert {item.name: item.describe() for item in found.search} == {
        "a.b": "0.0001 to 0.01, logarithmic",
        "c": "3, 4",
    }
    assert default_folder([str(file)]).name == "lr" and default_folder(WORDS).name == "dreamer_cartpole"
    file.write_text("serach: {}\n")
    with pytest.raises(ConfigError, match=r"unknown key 'serach'\. Did you mean 'search'"):
        read_definition(file)
    file.write_text("[1")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_definition(file)


def test_a_folder_keeps_its_definition(tmp_path: Path):
    folder = SweepFolder(tmp_path / "s")
    first = definition(*WORDS, "c=tag(log,int(interval(1,64)))", folder=folder.path)
    folder.save(first)
    assert folder.load() == first == definition(folder=folder.path)
    folder.save(definition(*WORDS, "c=tag(log,int(interval(1,64)))", "--trials", "50", "--pruner", "none"))
    assert folder.load().trials == 50
    with pytest.raises(ConfigError, match=r"search.c.* choose another --folder"):
        folder.save(definition(*WORDS, "c=1,2"))
    with pytest.raises(ConfigError, match=r"metric: the sweep in .* has 'eval/return_mean', not 'x'"):
        folder.save(definition(*WORDS, "c=tag(log,int(interval(1,64)))", "--metric", "x"))


def test_words_of_a_trial():
    found = definition(*WORDS)
    assert found.words({"algorithm.train_ratio": 16, "a.b": 0.25})[1:] == [
        "algorithm.train_ratio=16",
        "a.b=0.25",
    ]
    assert definition_from(found.to_dict()) == found


def test_the_experiment_is_checked_before_the_first_trial():
    words = ["+experiment=dreamer_cartpole", "algorithm.learning_rate=tag(log,interval(1e-4,1e-2))"]
    assert check_definition(definition(*words)) == 12000
    with pytest.raises(ConfigError, match=r"algorithm\.learning_raet"):
        check_definition(definition(words[0], "algorithm.learning_raet=1,2"))
    off = [*words, "training.evaluate.every_env_steps=null"]
    with pytest.raises(ConfigError, match=r"training.evaluate.every_env_steps is null, so eval/return_mean"):
        check_definition(definition(*off))
    assert check_definition(definition(*off, "--metric", "collect/return_mean")) == 12000


def test_a_missing_package_is_one_line(monkeypatch, capsys, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingPackageError, match=r"rl-lab sweep needs Optuna: pip install .*\[optuna\]"):
        require_optuna()
    assert main(["sweep", "--folder", str(tmp_path / "x"), *WORDS]) == 1
    assert "rl-lab sweep needs Optuna" in capsys.readouterr().err and not (tmp_path / "x").exists()
