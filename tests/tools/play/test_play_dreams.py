"""Rewinding and branching dreams, choosing starts, temperature, other weights, and the GIF of the last seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rl_lab
from rl_lab.environments.state_rendering import state_names
from rl_lab.environments.world_model_env import ImaginedEpisodes
from rl_lab.errors import LabError
from rl_lab.records import ActMode
from rl_lab.tools.play.commands import Command
from rl_lab.tools.play.episodes import read_video
from rl_lab.tools.play.frame import Frame, Panel, number, vector_image
from rl_lab.tools.play.history import History, Past
from rl_lab.tools.play.launch import build_session, options_from
from rl_lab.tools.play.library import Entry, Library, entries_of, runs_near
from rl_lab.tools.play.recording import Clip
from rl_lab.tools.play.session import NEVER, PlaySession
from rl_lab.tools.play.sources import Moment
from tests.counting_model import SPEC, CountingModel, rows
from tests.tools.play.test_play_command import parsed
from tests.tools.play.test_play_session import count, fields, press

Make = Callable[..., PlaySession]


# --- Rewind and branch ---


@pytest.mark.parametrize("grows", [False, True])
def test_dream_is_rewound_and_continued_otherwise(make_session: Make, grows: bool):
    session = make_session(mode="dream", control="human", model=CountingModel(grows=grows), ends=None)
    for _ in range(5):
        press(session, "ArrowUp")  # adds two each
    assert (session.step, count(session), session.episode_return) == (5, 13, 10.0)
    for _ in range(3):
        press(session, "Backspace")
    assert (session.step, count(session), session.episode_return) == (2, 7, 4.0)
    assert session.status()["dream"] == {"first": 0, "last": 5, "step": 2, "branches": 0, "temperature": None}
    assert not session.paused and "step 2 of 5" in session.message
    press(session, "Delete")  # forward again, along the same steps
    assert (session.step, count(session)) == (3, 9)
    press(session, "ArrowRight")  # adds one: another branch
    assert (session.step, count(session), session.episode_return) == (4, 10, 7.0)
    assert session.status()["dream"]["last"] == 4 and session.history.branches == 1
    session.do(Command("rewind", -100))
    assert (session.step, count(session)) == (0, 3)
    press(session, "\\")  # the same start again, from its rows
    assert (session.step, count(session), session.history.branches) == (0, 3, 0)


def test_rewound_step_is_the_step_of_a_dream_that_never_went_on():
    """A rewound model continues as one that stopped there, memory and horizon included."""
    straight, rewound = (
        ImaginedEpisodes(CountingModel(grows=True), SPEC, ends=None, horizon=6, flush_every=4)
        for _ in range(2)
    )
    for episodes in (straight, rewound):
        episodes.start(rows(1, 2))
        for _ in range(3):
            episodes.step(torch.tensor([1]))
    moment = rewound.get_state()
    for _ in range(3):
        rewound.step(torch.tensor([2]))
    rewound.set_state(moment)
    for action in (1, 0, 2):
        one, other = (episodes.step(torch.tensor([action])) for episodes in (straight, rewound))
        assert torch.equal(one.obs["image"], other.obs["image"]) and torch.equal(
            one.truncated, other.truncated
        )
    assert all(torch.equal(straight.state[name], rewound.state[name]) for name in straight.state)
    assert bool(one.truncated[0]) and moment.nbytes > 0


def test_ended_dream_can_be_rewound_and_timed_play_pauses(make_session: Make, clock):
    model = CountingModel({6: 1.0})
    session = make_session(mode="dream", control="human", idle=True, model=model)
    session.do(Command("key_down", "ArrowRight"))
    for _ in range(3):
        session.advance()
    assert session.current.terminated and "Backspace" in session.message
    assert session.wait_seconds() == pytest.approx(session.options.dream_end_hold)
    press(session, "Backspace")
    assert session.step == 2 and not session.current.done
    assert session.paused and session.wait_seconds() == NEVER  # time would go on at once
    session.do(Command("pause", False))
    session.advance()
    assert session.step == 3 and not session.current.done  # nothing held: it stays at five
    press(session, "Backspace")
    press(session, "Enter")
    assert not session.paused  # a new dream runs
    session.do(Command("pause", True))
    press(session, "Enter")
    assert session.paused  # unless it was paused by hand


def test_only_dreams_are_rewound(make_session: Make):
    session = make_session(mode="real", control="human")
    press(session, "ArrowUp")
    press(session, "Backspace")
    assert session.step == 1 and "only a dream can be rewound" in session.message
    press(session, "\\")
    assert "only a dream" in session.message


def test_rewound_recording_has_an_episode_for_each_branch(make_session: Make):
    session = make_session(mode="dream", control="human", ends=None)
    press(session, ",")
    for _ in range(3):
        press(session, "ArrowUp")
    session.do(Command("rewind", -2))
    for _ in range(2):
        press(session, "ArrowRight")
    press(session, ",")
    _, first, second = session.recordings.files
    with np.load(first) as one, np.load(second) as two:
        assert one["actions"].tolist() == [2, 2, 2] and two["actions"].tolist() == [1, 1]
        assert one["observations"][:, 0, 0, 0].tolist() == [30, 50, 70, 90]
        assert two["observations"][:, 0, 0, 0].tolist() == [50, 60, 70]


def test_history_forgets_the_oldest_steps_beyond_its_memory():
    dreams = ImaginedEpisodes(CountingModel(), SPEC, ends=None)
    dreams.start(rows(1))
    moment = Moment(dreams.get_state(), {})
    history = History(most_bytes=3 * moment.nbytes)
    for step in range(5):
        history.add(Past(moment, Frame({}), step, 0.0))
    assert (history.first, history.last, len(history)) == (2, 4, 3)
    assert history.move(-100).step == 2 and history.move(-1) is None
    history.clear()
    assert history.move(1) is None and (history.first, history.last) == (0, 0)


# --- Starts ---


def test_start_is_chosen_by_its_picture(make_session: Make):
    session = make_session(mode="real", last=60)
    press(session, "/")
    status = session.status()["starts"]
    assert status == {"kinds": ["real", "replay"], "kind": "real", "round": 1, "count": 8}
    assert session.mode == "dream" and session.wait_seconds() == NEVER
    assert "1 to 8" in session.prompt() and session.picks[0].png[1:4] == b"PNG"
    session.do(Command("starts", "replay"))
    assert session.status()["starts"]["round"] == 2 and session.picks[0].image.max() == 50
    press(session, "2")
    assert not session.picks and count(session) == 5 and session.step == 0
    press(session, "Enter")  # the next dream starts from the chosen kind, too
    assert count(session) == 5
    session.do(Command("starts", "episodes"))
    assert "no start states of that kind" in session.message
    press(session, "/")
    press(session, "/")  # and back
    assert not session.picks and session.message == ""


def test_dream_starts_at_the_shown_step_of_a_recording(make_session: Make, tmp_path: Path):
    session = make_session(last=7)
    for _ in range(3):
        press(session, ",")
        for _ in range(7):
            session.advance()
        press(session, ",")
        session.do(Command("reset"))
    session.do(Command("mode", "episodes"))
    press(session, "o")
    index = next(i for i, file in enumerate(session.episodes._files) if file.suffix == ".npz")
    session.do(Command("episode", index))
    session.do(Command("seek", 5))
    press(session, "d")
    assert session.mode == "dream" and count(session) == 5 and len(session.dream.start.reward[0]) == 4
    session.do(Command("mode", "episodes"))
    session.do(Command("seek", 100))
    press(session, "d")
    assert session.mode == "episodes" and "the episode ends here" in session.message


def test_dream_from_a_video_is_refused(make_session: Make, tmp_path: Path):
    session = make_session(last=60)
    session.advance()
    session.do(Command("clip", 1.0))
    (tmp_path / "media" / "episodes").mkdir(parents=True)
    (tmp_path / "media" / "recordings").rename(tmp_path / "media" / "episodes" / "test")
    session.do(Command("mode", "episodes"))
    session.advance()
    assert fields(session)["reward"] == "–"  # a video has none, which is not zero
    press(session, "d")
    assert session.mode == "episodes" and "is a video" in session.message


# --- Temperature ---


class Sampling(CountingModel):
    """Remembers how its actions were chosen, and has a temperature of its own."""

    temperature = 1.0

    def act(self, obs: Any, policy_state: Any, is_first: Any, mode: ActMode) -> Any:
        self.mode = mode
        return super().act(obs, policy_state, is_first, mode)

    def dream_act(self, state: Any, mode: ActMode) -> Any:
        self.mode = mode
        return super().dream_act(state, mode)


@pytest.mark.parametrize("mode", ["real", "dream"])
def test_temperature_of_the_agent_and_of_the_dream(make_session: Make, mode: str):
    model = Sampling()
    session = make_session(mode=mode, model=model, ends=None, last=60)
    session.advance()
    assert session.temperature == 0.0 and not model.mode.sample
    session.do(Command("temperature", 0.5))
    session.advance()
    session.advance()
    assert model.mode.sample and model.mode.temperature == 0.5 and session.status()["temperature"] == 0.5
    press(session, "F8")
    press(session, "F7")
    press(session, "F7")
    press(session, "F7")
    assert session.temperature == 0.0 and "most likely" in session.message
    session.do(Command("dream_temperature", 1.3))
    assert model.temperature == 1.3
    session.do(Command("mode", "dream"))
    assert session.status()["dream"]["temperature"] == 1.3


def test_dreams_without_a_temperature_say_so(make_session: Make):
    session = make_session(mode="dream")
    session.do(Command("dream_temperature", 1.3))
    assert "have no temperature" in session.message


# --- Other weights ---


@pytest.mark.filterwarnings("ignore:CHECKPOINT DAMAGED")
def test_session_switches_weights_and_keeps_playing(trained: Path, tmp_path: Path, monkeypatch):
    """A copy of the run stands for another run; a damaged one leaves the session as it was."""
    import shutil

    from rl_lab.agent import load_agent
    from rl_lab.run_folder import RunFolder

    root = tmp_path / "outputs" / "2026-11-16"
    for name in ("one", "two", "broken"):
        shutil.copytree(trained, root / name, symlinks=True)
    for file in (root / "broken" / "checkpoints").glob("step_*.pt"):
        file.write_bytes(b"damaged")
    monkeypatch.chdir(tmp_path)
    args = parsed(str(root / "one"), "-a", "--device", "cpu", "--seed", "1", "--ends", "never")
    session = build_session(load_agent(root / "one"), RunFolder(root / "one"), args, options_from(args))
    entries = session.library.entries
    assert entries[0].label.startswith("last, step 40") and {entry.run.name for entry in entries} == {
        "one",
        "two",
        "broken",
    }
    session.advance()
    session.do(Command("temperature", 0.75))
    first = session.real
    two = next(index for index, entry in enumerate(entries) if entry.run.name == "two")
    session.do(Command("weights", two))
    assert session.sources.about["run"] == "2026-11-16/two" and session.mode == "dream" and session.step == 0
    assert first.environment.closed and session.temperature == 0.75
    assert session.library.entries[session.library.current].run.name == "two"
    session.advance()
    assert session.step == 1
    broken = next(index for index, entry in enumerate(session.library.entries) if entry.run.name == "broken")
    session.do(Command("weights", broken))
    assert session.sources.about["run"] == "2026-11-16/two" and session.message
    session.advance()
    assert session.step == 2  # it goes on
    session.do(Command("weights", 999))
    assert "no number 999" in session.message
    press(session, "F10")
    assert session.sources.about["run"] != "2026-11-16/two" or "broken" in session.message
    session.close()


def test_exported_agent_is_chosen_in_the_list(trained: Path, tmp_path: Path, monkeypatch):
    """It has no checkpoints: its only weights are listed, those of the agents beside it, and the user's runs."""
    import shutil

    from rl_lab.agent import load_agent
    from rl_lab.run_folder import find_run

    shutil.copytree(trained, tmp_path / "outputs" / "2026-11-16" / "one", symlinks=True)
    monkeypatch.chdir(tmp_path)
    name = "example://bounce"
    args = parsed(name, "-w", "--device", "cpu", "--seed", "1")
    session = build_session(load_agent(name), find_run(name, tmp_path / "outputs"), args, options_from(args))
    assert session.library is not None

    def chosen() -> tuple[str, str]:
        entry = session.library.entries[session.library.current]
        return entry.run.name, entry.label

    assert chosen() == ("bounce", "bounce, step 8,000")
    names = [entry.run.name for entry in session.library.entries]
    assert {"boxing", "bounce", "catch", "obstacles", "one"} == set(names) and names[0] == "bounce"
    session.do(Command("weights", names.index("catch")))
    assert chosen() == ("catch", "catch, step 4,200") and session.sources.about["run"] == "agents/catch"
    session.do(Command("weights", None))
    assert chosen()[0] == "catch"  # it has no other weights
    shutil.copytree(find_run(name, tmp_path).path, tmp_path / "own")
    (tmp_path / "own" / "scores.json").write_text('{"step": "many"}')
    assert [entry.label for entry in entries_of(tmp_path / "own")] == ["own"]
    session.close()


def test_list_of_weights_and_runs(trained: Path, tmp_path: Path):
    assert entries_of(trained)[0].checkpoint == "last"
    assert entries_of(trained)[0].to_dict()["task"] == "minigrid/Empty-5x5"
    assert runs_near(trained.resolve(), tmp_path) == [trained.resolve()]
    library = Library(trained.resolve(), "step_000000040", tmp_path, lambda entry: entry)
    assert library.next_in_run() == (library.current + 1) % len(library.entries)
    assert library.next_run() == 0 and isinstance(library.open(0), Entry)
    with pytest.raises(LabError, match="no number -1"):
        library.open(-1)
    empty = tmp_path / "runs" / "empty"
    empty.mkdir(parents=True)
    (empty / "config.yaml").write_text("")
    assert entries_of(empty) == [] and empty not in runs_near(trained.resolve(), tmp_path)


def test_session_without_a_library_says_so(make_session: Make):
    session = make_session()
    press(session, "F9")
    assert "no other checkpoints" in session.message
    press(session, "F10")
    assert "no other runs" in session.message


# --- GIF of the last seconds ---


def test_gif_has_the_last_seconds(make_session: Make):
    session = make_session(mode="real", last=60, header=True)
    for _ in range(40):
        session.advance()
    session.do(Command("clip", 2.0))
    (file,) = session.recordings.files
    frames = read_video(file)
    assert file.suffix == ".gif" and len(frames) == 30 and file.name in session.message
    shades = frames[:, 60, 60, 0].astype(int)  # the picture becomes brighter with the count
    assert (np.diff(shades)[:10] >= 0).all() and shades[-1] > shades[0]


def test_clip_keeps_one_layout_within_its_memory(tmp_path: Path, monkeypatch):
    clip = Clip()
    assert clip.save(tmp_path / "none", 5.0, 15.0) is None
    small, large = (Panel("real", np.zeros((side, side, 3), np.uint8)) for side in (10, 20))
    for panel in (small, small, large):
        clip.add([panel], [])
    assert len(clip) == 1  # the other size began anew
    monkeypatch.setattr("rl_lab.tools.play.recording.CLIP_BYTES", 3 * large.image.nbytes)
    for _ in range(9):
        clip.add([large], [])
    assert len(clip) == 3


# --- Pictures of states ---


def test_dream_of_cartpole_is_drawn_by_its_renderer(tmp_path: Path):
    pytest.importorskip("pygame")
    from rl_lab.agent import load_agent
    from rl_lab.run_folder import RunFolder

    run = tmp_path / "outputs" / "2026-11-16" / "cartpole"
    quiet = ["logging.progress=off", "logging.tensorboard=false", "training.total_timesteps=40"]
    rl_lab.train(None, ["debug=tiny", *quiet, f"run_dir={run}"], say=lambda text: None)
    args = parsed(str(run), "-w", "--device", "cpu", "--seed", "1", "--ends", "never", "--context", "3")
    session = build_session(load_agent(run), RunFolder(run), args, options_from(args))
    try:
        (dream,) = session.panels()
        assert dream.title == "dream" and dream.image.shape == (400, 600, 3)
        press(session, "'")
        assert [panel.title for panel in session.panels()] == ["start", "dream", "dream values"]
        start, _, values = (panel.image for panel in session.panels())
        assert np.array_equal(start, session.real.rendered())  # the same state in the environment itself
        assert values.shape[1] == 480
        session.do(Command("mode", "both"))
        assert [panel.title for panel in session.panels()] == ["real", "dream", "dream minus real"]
        session.do(Command("mode", "real"))
        assert session.panels()[1].title == "model input"
        press(session, "ArrowLeft")
        assert fields(session)["action"] == "left" and "← → to play" in session.prompt()
    finally:
        session.close()


def test_state_without_a_renderer_is_shown_as_bars_beside_the_environment(make_session: Make):
    session = make_session(mode="both", last=60)
    real, both = session.real, session.both
    vector = {"vector": np.array([0.5, -2.0], np.float32)}
    real.observation = lambda: vector  # type: ignore[method-assign]
    both._predicted = {"vector": np.array([1.5, -2.0], np.float32)}
    titles = [panel.title for panel in both.panels(True)]
    assert titles == ["real", "real values", "dream values", "dream minus real"]


# --- Bars ---


def test_bars_have_names_numbers_and_a_scale():
    values = np.array([-2.0, 0.0, 3.0, 0.1], np.float32)
    names = state_names("CartPole-v1", {"vector": values})
    plain, named = vector_image(values, [" "] * 4), vector_image(values, names)
    assert named.shape[1] == 480 and not np.array_equal(plain, named)
    assert not np.array_equal(vector_image(values, names), vector_image(values * 2, names))
    assert vector_image(np.full(3, np.nan, np.float32)).shape[2] == 3 and number(float("nan")) == "–"
    assert vector_image(np.zeros(100, np.float32)).shape[0] > 256  # a grid, and how many there are
