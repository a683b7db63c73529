from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from rl_lab.errors import LabError
from rl_lab.tools import listing


def run_list(capsys, *arguments: str) -> str:
    parser = argparse.ArgumentParser()
    listing.add_arguments(parser)
    assert listing.main(parser.parse_args(arguments)) == 0
    return capsys.readouterr().out


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_every_shipped_config_is_listed_once(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = [file.relative_to(listing.PACKAGED) for file in listing.PACKAGED.rglob("*.yaml")]
    in_groups = [file for file in files if len(file.parts) > 1]
    folders = {group: kind for kind, (group, _) in listing.GROUPS.items()}
    for file in in_groups:
        assert file.parts[0] in folders, f"{file} is in a group that `rl-lab list` does not show"
    for group, kind in folders.items():
        entries, _ = listing.list_kind(kind)
        expected = sorted(
            file.relative_to(group).with_suffix("").as_posix() for file in in_groups if file.parts[0] == group
        )
        assert sorted(entry.name for entry in entries) == expected
        printed = run_list(capsys, kind).partition("suites:")[0]
        for entry in entries:
            assert entry.text and not entry.text.startswith("no description"), (
                f"{kind} {entry.name} says nothing"
            )
            assert printed.count(f"  {entry.name} ") == 1


def test_user_configs_are_listed(capsys, tmp_path: Path, monkeypatch) -> None:
    write(tmp_path / "configs", "experiment/mine.yaml", "# @package _global_\n\n# My own idea.\nx: 1\n")
    write(tmp_path / "more", "experiment/other.yaml", "# @package _global_\n_target_: my.Thing\n")
    write(tmp_path / "more", "components/encoder/plain.yaml", "x: 1\n")
    monkeypatch.chdir(tmp_path)
    printed = run_list(capsys, "--config-dir", "more")
    assert "mine" in printed and "My own idea." in printed and "configs/experiment/mine.yaml" in printed
    assert "my.Thing" in printed
    assert "encoder/plain" in printed and "no description" in printed
    # The same folder, named twice, is shown once.
    printed = run_list(capsys, "experiments", "--config-dir", "configs")
    assert printed.count("My own idea.") == 1


def test_unknown_folder_raises(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="there is no such folder"):
        listing.config_folders([tmp_path / "absent"])


def test_suites_show_state_or_install_command(capsys, monkeypatch) -> None:
    printed = run_list(capsys, "environments")
    lines = {line.split()[0]: line for line in printed.partition("suites:")[2].splitlines()[1:]}
    assert "ready" in lines["dummy"] and "gym" in lines
    assert "57: alien, amidar, …" in lines["atari"] and " box2d " in lines["carracing"]
    monkeypatch.setitem(sys.modules, "minerl", None)  # not installed, and no stand-in either
    monkeypatch.setattr(listing, "find", lambda requirement: [listing_package(requirement.name)])
    rows = {suite: (state, extra, text) for suite, state, extra, _, text in listing.describe_suites()}
    assert rows["gym"] == ("missing", "classic", listing.install_line("classic"))
    assert rows["dummy"][:2] == ("ready", "-")
    assert rows["minecraft"][:2] == ("missing", "-") and "scripts/setup/minecraft.sh" in rows["minecraft"][2]


def test_suite_tasks(capsys, monkeypatch) -> None:
    assert run_list(capsys, "--suite", "carracing").split() == ["continuous", "discrete"]
    with pytest.raises(
        LabError, match=r"--suite atari10k: there is no such suite\. Did you mean 'atari100k'"
    ):
        listing.tasks_of("atari10k")
    monkeypatch.setitem(sys.modules, "minerl", None)  # not installed, and no stand-in either
    monkeypatch.setattr(listing, "find", lambda requirement: [listing_package(requirement.name)])
    monkeypatch.setattr(listing, "_tasks", lambda module: [])  # as a suite whose package is missing
    with pytest.raises(LabError, match=r"--suite minigrid: the suite lists no tasks: pip install .*minigrid"):
        listing.tasks_of("minigrid")


def listing_package(name: str):
    from rl_lab.tools.doctor import Package

    return Package(name, None, "", False)


def test_benchmarks_are_listed(capsys) -> None:
    printed = run_list(capsys, "benchmarks")
    assert "loop" in printed and "Overhead of the training loop" in printed
