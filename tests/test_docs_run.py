"""The commands and Python blocks of the site's pages run (extras); what is not run is listed with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs_commands import (
    NOT_RUN,
    ROOT,
    SHORT,
    finished_run,
    matches,
    not_run,
    pages,
    run_page,
    shortened,
    steps,
    why_not,
)

OFF = "logging.progress=off"


def page_id(page: Path) -> str:
    return page.relative_to(ROOT / "docs").as_posix()


def test_list_of_what_is_not_run_is_up_to_date():
    """Every entry of docs_not_run.yaml begins something on its page, and no reason is without entries."""
    for reason, listed in NOT_RUN.items():
        assert listed, reason
        for name, entries in listed.items():
            found = [step for step in steps(ROOT / name) if step.kind != "file"]
            stale = [entry for entry in entries if not any(matches(step, entry) for step in found)]
            assert not stale, f"{name} has nothing that begins with {stale}: {reason}"


def test_most_commands_of_the_site_are_run():
    found = [(step, not_run(page)) for page in pages() for step in steps(page) if step.kind == "shell"]
    ran = [step for step, entries in found if why_not(step, entries) is None]
    assert len(ran) >= 0.7 * len(found), f"{len(ran)} of {len(found)}"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train size=1m", f"train size=1m debug=tiny {' '.join(SHORT)} {OFF}"),
        (
            "train training.evaluate.video=true",
            f"train training.evaluate.video=true debug=tiny {SHORT[0]} {OFF}",
        ),
        ("train debug=tiny", f"train debug=tiny {OFF}"),
        ("resume", "resume training.total_timesteps=110"),
        ("resume RUN training.total_timesteps=20000", "resume RUN training.total_timesteps=120"),
        ("eval RUN --episodes 100 --envs 16", "eval RUN --episodes 100 --envs 16 --episodes 2"),
        ("eval --checkpoint 20000", "eval --checkpoint 100 --episodes 2"),
        ("report --dream RUN --episodes 32", "report --dream RUN --episodes 2"),
        ("play RUN -w", "play RUN -w --steps 5"),
        ("list", "list"),
    ],
)
def test_commands_are_shortened(words: str, expected: str):
    assert " ".join(shortened(words.split())) == expected


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("example") / "run")


@pytest.mark.extras
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", pages(), ids=page_id)
def test_page_runs(page: Path, example: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.syspath_prepend(tmp_path)
    failures, _ = run_page(page, example)
    assert not failures, "\n".join(failures)
