"""When each phase of a run was active, from its config and its metrics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rl_lab.run_folder import RunFolder
from rl_lab.tools.report import command as report
from rl_lab.tools.report import timeline
from rl_lab.tools.report.interactive import charts_of
from rl_lab.tools.report.runs import RunData, load_runs
from rl_lab.tools.report.timeline import Timeline, bars, ink_on, phase_colors, phases_of, timeline_of
from tests.tools.conftest import write_phases

MakeRun = Callable[..., Path]

STAGED = """[{name: random, duration_steps: 4000, workflow_hooks: [{collect: {policy: random}}]},
  {name: off, duration_updates: 0, workflow_hooks: [update]},
  {name: model, type: offline, duration_updates: 500, workflow_hooks: [{update: {repeat: 200}}]},
  {repeat: 30, phases: [{name: joint, duration_cycles: 1, workflow_hooks: [collect, update]},
    {name: actor, type: offline, duration_updates: 5, workflow_hooks: [update_controller]}]},
  {name: test, type: eval_only, workflow_hooks: [{evaluate: {episodes: 10}}]}]"""
# Both begin at step 4,000: the phase `model` takes no steps.
BEGINS = [
    (0, 1),
    (4000, 2),
    (4000, 3),
    *((4200 + 200 * number, 4 + number) for number in range(59)),
    (20_000, 63),
]


def load(*folders: Path) -> list[RunData]:
    return load_runs([RunFolder(folder) for folder in folders])


def test_phases_in_words():
    group = {"repeat": 3, "phases": [{"name": "a", "duration_updates": 5, "type": "offline"}, {"name": "b"}]}
    phases = [{"name": "off", "duration_steps": 0}, {"name": "c", "duration_steps": 1000}, group]
    found = [(phase.name, phase.type, phase.duration) for phase in phases_of(phases)]
    assert found == [
        ("c", "online", "1,000 steps"),
        ("a", "offline", "3 × 5 updates"),
        ("b", "online", "3 × to the end"),
    ]
    hooks = [
        "collect",
        {"collect": {"env_steps": 256, "policy": "random"}},
        {"update": {"repeat": 2000}},
        {"update": {"replayed_steps_per_env_step": 0.5, "max_burst": None}},
        {"evaluate": {"every_updates": 1, "episodes": 20}},
    ]
    nodes = [
        {"name": "encode", "type": "offline"},
        {"name": "test", "type": "eval_only", "workflow_hooks": hooks},
        {"name": "both", "duration_steps": 1e6, "duration_cycles": 1},
    ]
    encode, test, both = phases_of(nodes)
    assert (encode.duration, test.duration, both.duration) == (
        "until it is done",
        "once",
        "1,000,000 steps or 1 cycle",
    )
    assert test.hooks == (
        "collect",
        "collect (256 steps, policy random)",
        "2,000 × update",
        "update (0.5 replayed steps per environment step)",
        "evaluate (every 1 update, 20 episodes)",
    )


def test_timeline_of_a_run(make_run: MakeRun):
    (run,) = load(write_phases(make_run(media=False), STAGED, BEGINS))
    found = timeline_of(run)
    assert [phase.name for phase in found.phases] == ["random", "model", "joint", "actor", "test"]
    names = [tuple(phase.name for phase in span.phases) for span in found.spans]
    assert names == [("random",), ("model",), ("joint", "actor"), ("test",)], "the group is one bar"
    random, model, group, test = found.spans
    assert (random.begin["step"], random.end["step"], random.end["updates"]) == (0, 4000, 2000)
    assert random.begin["seconds"] == 0 and random.end["seconds"] == pytest.approx(20 * 3.1)
    assert model.begin == model.end == group.begin and group.times == 30
    assert (group.end["step"], test.begin["step"]) == (20_000, 20_000)
    joint, actor = found.totals[2:4]
    assert (joint["step"], actor["step"]) == (200 * 30, 16_000 - 200 * 30)
    facts = group.facts()
    assert {"joint: online, 30 × 1 cycle", "  collect", "  update_controller", "step 4,000 to 20,000"} <= set(
        facts
    )
    # Fewer repetitions are bars of their own; one phase again and again is one bar.
    few = STAGED.replace("repeat: 30", "repeat: 2")
    begins = [(0, 1), (4000, 2), (4000, 3), (8000, 4), (12_000, 5), (16_000, 6), (20_000, 7)]
    alone = "[{repeat: 9, phases: [{name: joint, duration_cycles: 1, workflow_hooks: [collect]}]}]"
    two, again = load(
        write_phases(make_run(media=False), few, begins),
        write_phases(make_run(media=False), alone, [(1000 * number, 1 + number) for number in range(9)]),
    )
    labels = [span.phases[0].name for span in timeline_of(two).spans]
    assert labels == ["random", "model", "joint", "actor", "joint", "actor", "test"]
    (span,) = timeline_of(again).spans
    assert (span.times, span.begin["step"], span.end["step"]) == (9, 0, 20_000)


def test_a_phase_that_has_not_begun_took_nothing(make_run: MakeRun):
    (run,) = load(write_phases(make_run(media=False), STAGED, BEGINS[:1]))
    found = timeline_of(run)
    assert [span.phases[0].name for span in found.spans] == ["random"] and found.totals[0]["step"] == 20_000
    assert all(np.isnan(value) for total in found.totals[1:] for value in total.values())


@pytest.mark.parametrize(
    "phases",
    [
        "[{name: joint}]",
        "5",
        "[1, 2]",
        "[{name: a}, {repeat: x, phases: [{name: b}]}]",
        "[{name: a}, {phases: 3}]",
        "[{name: a, workflow_hooks: [{a: 1, b: 2}]}, {name: b}]",
        "[{name: a}, {name: b}]",  # metrics.jsonl has a third
        "[{name: a}, {repeat: 1000000000, phases: [{name: b, duration_steps: 0}]}, {name: c}]",
    ],
)
def test_no_timeline(make_run: MakeRun, phases: str):
    """One phase, or phases that this version cannot have written."""
    (run,) = load(write_phases(make_run(media=False, lines=5), phases, [(0, 1), (4000, 3)]))
    assert timeline_of(run) == Timeline()


def test_page_without_a_timeline(make_run: MakeRun):
    """Of a run that did not log its phases, as before 2026-11-19."""
    folder = write_phases(make_run(media=False, lines=5), STAGED, [])
    page = report.write_report([folder])[0].read_text()
    assert 'id="phases"' not in page and not (folder / "report" / "phases.png").exists()


def test_bars_are_never_too_thin_to_be_seen(make_run: MakeRun):
    (run,) = load(write_phases(make_run(media=False), STAGED, BEGINS))
    found = timeline_of(run)
    (over_steps,), (over_time,) = bars([found], "step"), bars([found], "seconds")
    thin = timeline.THIN * 20_000
    expected = [(0, 4000), (4000, thin), (4000 + thin, 16_000 - thin), (20_000, thin)]
    np.testing.assert_allclose(over_steps, expected)
    assert over_time[0][1] == pytest.approx(62.0)


def test_colors():
    many = Timeline(list(phases_of([{"name": str(number)} for number in range(20)])))
    colors = phase_colors([many])
    assert len(set(colors.values())) == 20 and colors["0"] == "#0072B2"
    assert ink_on("#0072B2") == "#ffffff" != ink_on("#E69F00")


def test_page_has_pictures_and_tables(make_run: MakeRun, tmp_path: Path):
    folders = [write_phases(make_run(media=False, seed=seed), STAGED, BEGINS) for seed in (0, 1)]
    folders.append(
        write_phases(make_run("c", media=False, name="other"), STAGED.replace("4000", "5000"), BEGINS[:3])
    )
    plain = make_run("d", media=False, name="one_phase")
    index, *pictures = report.write_report(
        [*folders, plain], out=tmp_path / "all", keys=["train/loss/reward"]
    )
    with Image.open(tmp_path / "all" / "phases.png") as image:
        height = image.height
        assert image.width > 1000 and np.asarray(image.convert("L")).std() > 10
    assert tmp_path / "all" / "phases.png" in pictures
    page = index.read_text()
    section = page[page.index('id="phases"') :].partition("</section>")[0]
    assert section.count("<table>") == 2, "seeds of one list of phases share a table"
    for text in (
        "mean of 2 runs",
        "30 × 1 cycle",
        "200 × update",
        "eval_only",
        "5,000 steps",
        "thin line",
        "take turns",
    ):
        assert text in section, text
    report.write_report(folders[:1], out=tmp_path / "one", keys=["train/loss/reward"])
    with Image.open(tmp_path / "one" / "phases.png") as image:
        assert image.height < height, "a row for each run"
    data = charts_of(load(*folders, plain)).data
    assert [len(run["phases"]) for run in data["runs"]] == [4, 4, 3, 0]
    assert data["runs"][0]["phases"][2]["names"] == ["joint", "actor"]
    assert list(data["phaseColors"]) == ["random", "model", "joint", "actor", "test"]
