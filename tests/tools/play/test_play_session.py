from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rl_lab.buffers.offline import OfflineBuffer
from rl_lab.errors import LabError
from rl_lab.records import BatchSpec
from rl_lab.tools.play.commands import COMMANDS, Command, parse_command
from rl_lab.tools.play.episodes import read_video
from rl_lab.tools.play.frame import Panel, compose
from rl_lab.tools.play.launch import write_video
from rl_lab.tools.play.session import NEVER, PlaySession
from tests.counting_model import SHADE, SPEC, CountingEnv, CountingModel

Make = Callable[..., PlaySession]


def press(session: PlaySession, key: str) -> None:
    session.do(Command("key_down", key))
    session.do(Command("key_up", key))


def count(session: PlaySession) -> int:
    return int(session.current.obs["image"].flat[0]) // SHADE


def fields(session: PlaySession) -> dict[str, str]:
    return dict(session.header())


# --- Modes and control ---


def test_agent_in_real_environment(make_session: Make, clock):
    session = make_session(last=3, header=True)
    assert (session.mode, session.control, session.step, count(session)) == ("real", "agent", 0, 0)
    assert session.wait_seconds() == pytest.approx(1 / 15)
    clock.now += 0.07
    assert session.wait_seconds() == 0.0 and session.advance()
    assert (session.step, count(session), session.episode_return) == (1, 1, 1.0)
    shown = fields(session)
    assert {
        "step": "1",
        "action": "one",
        "reward": "1.000",
        "return": "1.000",
        "done": "no",
    }.items() <= shown.items()
    assert (shown["value"], shown["entropy"]) == ("0.500", "1.250")
    session.advance()
    session.advance()
    assert session.current.terminated and fields(session)["done"] == "terminated"
    assert session.wait_seconds() == pytest.approx(session.options.end_hold)
    session.advance()  # the next episode
    assert (session.step, session.episode_return, count(session)) == (0, 0.0, 0)


def test_user_steps_dream_by_key(make_session: Make, clock):
    session = make_session(mode="dream", control="human")
    start = count(session)
    assert start == 3  # four rows of the agent's warm-up
    assert session.waits_for_keys and session.wait_seconds() == NEVER and not session.advance()
    for _ in range(5):
        press(session, "ArrowUp")
    press(session, "ArrowRight")
    assert (session.step, count(session)) == (6, start + 11)
    session.do(Command("key_down", "ArrowRight"))  # held: one step now, more after a while
    assert session.step == 7
    clock.now += 0.1
    assert session.wait_seconds() == pytest.approx(0.2)
    clock.now += 0.21
    assert session.wait_seconds() == 0.0 and session.advance() and session.step == 8


def test_timed_steps_with_idle_action(make_session: Make, clock):
    session = make_session(mode="real", control="human", idle=True)
    assert not session.waits_for_keys
    session.advance()
    assert (session.step, count(session)) == (1, 0)  # nothing pressed: the idle action
    press(session, "ArrowUp")  # a tap between two steps
    assert session.step == 1
    session.advance()
    assert count(session) == 2
    session.advance()
    assert count(session) == 2
    session.do(Command("wait", True))
    assert session.waits_for_keys


def test_switching_modes(make_session: Make):
    session = make_session(mode="real", last=60)
    for _ in range(4):
        session.advance()
    session.do(Command("mode", "dream"))  # continues from the real environment
    assert session.mode == "dream" and count(session) == 4 and session.step == 0
    session.advance()
    session.do(Command("mode", "real"))  # which has waited
    assert session.mode == "real" and count(session) == 4
    session.do(Command("control", None))
    assert session.control == "human"
    press(session, "v")
    press(session, "v")
    assert session.mode == "both"
    press(session, "m")
    assert session.control == "agent"


def test_side_by_side_uses_same_actions(make_session: Make):
    session = make_session(mode="both", control="human", parts=True, last=90, horizon=5)
    for _ in range(3):
        press(session, "ArrowUp")
    assert [panel.title for panel in session.panels()] == ["real", "dream", "difference"]
    real, dream, gap = (panel.image for panel in session.panels())
    assert np.array_equal(real, dream) and not gap.any()
    extra = session.current.extra
    assert extra["error"] == 0.0 and extra["dream reward"] == 2.0 and extra["steps dreamed"] == 3.0
    for _ in range(3):
        press(session, "ArrowUp")
    assert session.current.extra["steps dreamed"] == 1.0  # the prediction restarted after the horizon of five
    session.do(Command("horizon", 2))
    assert session.both.horizon == 2


def test_policy_state_includes_user_actions(make_session: Make):
    model = CountingModel()
    session = make_session(mode="real", control="human", model=model, last=60)
    press(session, "ArrowUp")
    session.do(Command("control", "agent"))
    session.advance()
    assert model.acted == [-1, 2, 1]  # it saw the reset, then your action 2, then its own 1


def test_panels_of_the_real_environment(make_session: Make):
    session = make_session()
    assert [panel.title for panel in session.panels()] == ["environment"]
    assert session.panels()[0].image.shape == (40, 60, 3)
    press(session, "'")
    shown = session.panels()
    assert [panel.title for panel in shown] == ["environment", "model input", "reconstruction"]
    assert np.array_equal(shown[1].image, shown[2].image)


@pytest.mark.parametrize("width", [40, 160, 500])
def test_header_fields_do_not_overlap(width: int):
    names = ("step", "action", "reward", "return", "value", "entropy", "done")
    texts = ("12345", "make stone pickaxe", "-0.125", "123.4", "1.234", "0.100", "terminated")
    panel = Panel("real", np.zeros((210, width, 3), np.uint8))
    plain = compose([panel], [(" ", " ")] * len(names))
    drawn = np.zeros(plain.shape[:2], int)
    for index, (name, text) in enumerate(zip(names, texts)):
        header = [(" ", " ")] * len(names)
        header[index] = (name, text)
        inked = (compose([panel], header) != plain).any(-1)
        assert inked.any() and not inked[:, -4:].any()  # drawn, and not cut by the border
        drawn += inked
    assert drawn.max() == 1


def test_pause_single_step_speed_horizon_reset(make_session: Make):
    session = make_session(mode="dream", ends=None)
    press(session, ".")
    assert session.paused and session.wait_seconds() == NEVER
    press(session, "n")
    press(session, "n")
    assert session.step == 2 and session.paused
    press(session, "]")
    assert session.horizon == 400 and session.dream.imagined.horizon == 400
    session.do(Command("horizon", 3))
    press(session, "=")
    assert session.fps == pytest.approx(22.5)
    session.do(Command("speed", 1e9))
    assert session.fps == 60
    press(session, ".")
    session.advance()
    assert session.current.truncated and fields(session)["done"] == "truncated"
    press(session, "Enter")
    assert session.step == 0 and not session.current.done


def test_paused_step_uses_held_key(make_session: Make):
    session = make_session(mode="dream", control="human")
    press(session, ".")
    session.do(Command("key_down", "ArrowUp"))
    assert session.step == 0
    press(session, "n")
    assert session.step == 1 and fields(session)["action"] == "two"
    session.do(Command("key_up", "ArrowUp"))
    press(session, "n")
    assert session.step == 1 and "hold a key" in session.message


def test_unavailable_modes(make_session: Make):
    session = make_session()
    session.do(Command("mode", "episodes"))
    assert session.mode == "real" and "no recorded episode" in session.message
    session.dream = None
    session.do(Command("mode", "dream"))
    assert "no world model" in session.message
    with pytest.raises(LabError, match="no recorded episode"):
        make_session(mode="episodes")


# --- Recording and replay ---


def test_recording_writes_video_and_episodes(make_session: Make, tmp_path: Path):
    session = make_session(last=4)
    session.advance()
    press(session, ",")
    for _ in range(7):  # to the end of this episode and into the next
        session.advance()
    assert session.status()["recording"]
    press(session, ",")
    video, *data = session.recordings.files
    assert video.suffix in (".mp4", ".gif") and [file.suffix for file in data] == [".npz", ".npz"]
    assert video.parent == tmp_path / "media" / "recordings"
    assert len(read_video(video)) == 8
    with np.load(data[0], allow_pickle=False) as first:
        assert first["observations"].shape == (4, 3, 8, 8) and first["actions"].tolist() == [1, 1, 1]
        assert first["terminated"].tolist() == [False, False, True]
    buffer = OfflineBuffer(SPEC.row_columns(), path=video.parent, spec=SPEC)
    import torch

    batch = buffer.sample(BatchSpec(8, 3, boundary="within"), generator=torch.Generator().manual_seed(0))
    assert (batch.obs["image"][:, :, 0, 0, 0].long().diff(dim=1) == SHADE).all()


def test_save_mode(make_session: Make):
    session = make_session(last=3, save=True)
    for _ in range(3):
        session.advance()
    assert session.asking and session.wait_seconds() == NEVER and not session.advance()
    press(session, "n")
    assert not session.asking and not session.recordings.files
    session.advance()
    for _ in range(3):
        session.advance()
    assert session.asking
    press(session, "y")
    video, data = session.recordings.files
    with np.load(data) as episode:
        assert len(episode["rewards"]) == 3 and episode["terminated"][-1]
    session.close()
    assert sorted(file.name for file in video.parent.iterdir()) == sorted(
        [video.name, data.name]
    )  # and nothing else
    assert session.real.environment.closed


def test_replaying_episodes(make_session: Make, tmp_path: Path, clock):
    session = make_session(last=6)
    write_video(session, steps=6)
    video, data = session.recordings.files
    (tmp_path / "media" / "episodes" / "test").mkdir(parents=True)
    (tmp_path / "media" / "episodes" / "train").mkdir(parents=True)
    data.rename(tmp_path / "media" / "episodes" / "test" / "a.npz")
    video.rename(tmp_path / "media" / "episodes" / "train" / f"b{video.suffix}")
    session.do(Command("mode", "episodes"))
    assert session.status()["episodes"] == {
        "split": "test",
        "name": "a.npz",
        "index": 0,
        "count": 1,
        "position": 0,
        "length": 7,
    }
    assert session.wait_seconds() > 0  # replay is timed, regardless of the control
    for _ in range(2):
        session.advance()
    assert (session.step, session.episode_return, count(session)) == (2, 2.0, 2)
    press(session, "PageUp")
    assert session.step == 6 and session.current.done
    press(session, "ArrowLeft")
    assert session.step == 5 and fields(session)["action"] == "one"
    press(session, " ")
    assert session.step == 0
    press(session, "t")
    assert session.status()["episodes"]["split"] == "train" and session.panels()[0].title == "video"
    assert fields(session)["return"] == "–"  # a video has no rewards
    press(session, "i")
    assert "no recorded episode" in session.message and session.episodes.split == "train"
    press(session, "Enter")
    session.do(Command("mode", "real"))
    assert session.mode == "real"


def test_damaged_video_raises(tmp_path: Path):
    for name in ("a.mp4", "b.gif"):
        (tmp_path / name).write_bytes(b"not a video")
        with pytest.raises(LabError, match=name):
            read_video(tmp_path / name)


# --- Commands ---


def test_commands_have_handlers_and_checks():
    for name in COMMANDS:
        assert hasattr(PlaySession, f"_do_{name}")
    assert parse_command({"do": "speed", "value": 1e9}) == Command("speed", 60.0)
    assert parse_command({"do": "key_down", "value": "W", "id": 3}) == Command("key_down", "w", 3)
    for bad in (
        None,
        [],
        {},
        {"do": 3},
        {"do": "__init__"},
        {"do": "speed"},
        {"do": "speed", "value": "fast"},
        {"do": "speed", "value": float("nan")},
        {"do": "key_down", "value": "x" * 40},
        {"do": "mode", "value": "elsewhere"},
        {"do": "pause", "value": 1},
        {"do": "reset", "value": {}},
        {"do": "pause", "id": -1},
        {"do": "horizon", "value": 10**400},
    ):
        assert parse_command(bad) is None, bad


def test_acknowledgement_follows_the_step(make_session: Make):
    session = make_session(mode="real", control="human", idle=True)
    session.do(Command("key_down", "ArrowUp", id=5))
    assert session.acknowledged == 0  # the step with its effect has not been made
    session.advance()
    assert session.acknowledged == 5
    session.do(Command("pause", None, id=6))
    assert session.acknowledged == 6


def test_environment_without_rendering(make_session: Make, monkeypatch):
    def no_render(self: CountingEnv) -> np.ndarray:
        raise LabError("renders no frames")

    monkeypatch.setattr(CountingEnv, "frame", no_render)
    session = make_session()
    assert session.panels()[0].image.shape == (8, 8, 3)  # the observation is shown instead
