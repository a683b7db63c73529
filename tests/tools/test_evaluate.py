"""`rl-lab eval`: determinism, results, videos and scores."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import rl_lab
from rl_lab.agent import describe_weights
from rl_lab.cli import main
from rl_lab.environments.make import env_factory
from rl_lab.errors import CheckpointError, ConfigError, LabError
from rl_lab.records import Episode
from rl_lab.tools.evaluate import (
    MOST_FRAMES,
    ActionLog,
    EpisodeVideo,
    LoggedEpisode,
    choose,
    episode_lines,
    evaluate,
    parse_changes,
    replay_episode,
    summary,
    with_header,
)
from rl_lab.tools.published import Task

QUIET = ["logging.progress=off", "logging.tensorboard=false"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A tiny trained run with two checkpoints and a best one."""
    folder = tmp_path_factory.mktemp("evaluate") / "run"
    words = ["debug=tiny", "training.total_timesteps=60", "training.checkpoint.keep=9", f"run_dir={folder}"]
    words += ["training.evaluate.every_env_steps=40", "training.evaluate.episodes=1"]
    rl_lab.train("dreamer_cartpole", words + QUIET)
    return folder


def test_same_seed_gives_same_files(run: Path, tmp_path: Path):
    texts = []
    for name in ("a", "b"):
        words = ["--episodes", "5", "--seed", "7", "--no-video", "--json", str(tmp_path / f"{name}.json")]
        assert main(["eval", str(run), *words]) == 0
        texts.append([(tmp_path / f"{name}.{kind}").read_bytes() for kind in ("json", "csv")])
    assert texts[0] == texts[1]
    other = evaluate(run, episodes=5, seed=8, json_file=str(tmp_path / "c.json"))
    assert other["returns"] != json.loads(texts[0][0])["returns"]


def test_weights_are_named_and_files_are_kept_apart(run: Path, capsys):
    steps = {}
    for checkpoint in ("last", "best"):
        assert main(["eval", str(run), "--episodes", "1", "--no-video", "--checkpoint", checkpoint]) == 0
        printed = capsys.readouterr().out
        result = json.loads((run / "report" / "eval.json").read_text())
        steps[checkpoint] = result["step"]
        own = run / "report" / f"eval_{result['step']:09d}_seed0.json"
        assert json.loads(own.read_text()) == result and f"json: {own}" in printed
        assert f"weights of step {result['step']:,}" in printed
        better = f"best.pt (step {steps['best']:,})" if "best" in steps else "best.pt (step"
        said = "which had the best evaluation in training" if result["step"] == steps.get("best") else better
        assert said in printed
        agent = rl_lab.load_agent(run, checkpoint=checkpoint)
        assert agent.weights in printed and agent.weights in repr(agent)
    assert len(list((run / "report").glob("eval_*_seed0.json"))) == len(set(steps.values()))
    assert describe_weights(None, 3) == "weights of step 3"


def test_table_json_csv_and_videos(run: Path, capsys):
    assert main(["eval", str(run), "--episodes", "5", "--envs", "2", "--deterministic"]) == 0
    printed = capsys.readouterr().out
    result = json.loads((run / "report" / "eval.json").read_text())
    assert result["num_envs"] == 2 and result["sample"] is False and len(result["returns"]) == 5
    returns = np.array(result["returns"])
    assert result["return_mean"] == pytest.approx(returns.mean()) and result["return_std"] == pytest.approx(
        returns.std()
    )
    assert result["return_median"] == np.median(returns)
    low, high = result["return_intervals"]["mean"]
    assert low <= result["return_mean"] <= high and result["interval_level"] == 0.95
    lines = list(csv.DictReader((run / "report" / "eval.csv").open()))
    assert [float(line["return"]) for line in lines] == result["returns"]
    assert [line["env"] for line in lines] == ["0", "1", "0", "1", "0"]
    for name in ("best", "median", "worst"):
        assert f"{name} episode: " in printed
        assert len(list((run / "media" / "episodes" / "test").glob(f"eval_{name}_*"))) == 1
    assert "IQM" in printed and "deterministic" in printed and "is not deterministic" not in printed


def test_temperature(run: Path, tmp_path: Path, capsys):
    def returns(*words: str) -> list[float]:
        target = ["--json", str(tmp_path / "a.json"), "--no-video", "--episodes", "6"]
        assert main(["eval", str(run), *words, *target]) == 0
        return json.loads((tmp_path / "a.json").read_text())["returns"]

    plain = returns("--sample")
    assert returns("--sample", "--temperature", "1") == plain
    capsys.readouterr()
    assert returns("--sample", "--temperature", "0.001") != plain
    assert json.loads((tmp_path / "a.json").read_text())["temperature"] == 0.001
    assert "sampled actions at temperature 0.001" in capsys.readouterr().out
    cold = evaluate(run, episodes=6, sample=True, temperature=0.001, json_file=str(tmp_path / "b.json"))
    assert cold["returns"] == returns("--sample", "--temperature", "0.001")
    for words, message in (
        (["--deterministic", "--temperature", "0.5"], "needs sampled actions: add --sample"),
        (["--sample", "--temperature", "0"], "must be above 0"),
    ):
        assert main(["eval", str(run), *words, "--no-video"]) == 1
        assert message in capsys.readouterr().err


def test_any_checkpoint(run: Path, tmp_path: Path):
    steps = sorted(
        int(file.stem.removeprefix("step_").partition(".")[0])
        for file in (run / "checkpoints").glob("step_*.json")
    )
    first = evaluate(run, episodes=1, checkpoint=str(steps[0]), json_file=str(tmp_path / "a.json"))
    newest = evaluate(run, episodes=1, checkpoint="latest", json_file=str(tmp_path / "b.json"))
    assert first["step"] == steps[0] < newest["step"] == steps[-1]
    named = run / "checkpoints" / first["weights"]
    assert evaluate(named, episodes=1, json_file=str(tmp_path / "c.json"))["step"] == steps[0]
    assert (
        evaluate(run, episodes=1, checkpoint=str(named), json_file=str(tmp_path / "d.json"))["step"]
        == steps[0]
    )
    assert (
        evaluate(run, episodes=1, checkpoint="best", json_file=str(tmp_path / "e.json"))["checkpoint"]
        == "best"
    )
    with pytest.raises(CheckpointError, match=f"no checkpoint '123'.*step_{steps[0]:09d}"):
        evaluate(run, episodes=1, checkpoint="123")


def test_changed_environment_settings(run: Path, tmp_path: Path):
    result = evaluate(run, episodes=2, environment={"time_limit": 3}, json_file=str(tmp_path / "a.json"))
    assert result["lengths"] == [3, 3] and result["environment"] == {"time_limit": 3}
    with pytest.raises(ConfigError, match=r"was trained with vector \(4,\).*image"):
        evaluate(run, episodes=1, environment={"pixels": True, "size": 16})
    assert parse_changes(["a=1", "b=[x, 2]"]) == {"a": 1, "b": ["x", 2]}
    for wrong in ("novalue", "=3", "a={"):
        with pytest.raises(ConfigError, match="--env"):
            parse_changes([wrong])
    with pytest.raises(ConfigError, match="at least 1"):
        evaluate(run, episodes=0)


# --- Videos ---


def test_replayed_episode_is_identical():
    factory = env_factory("dummy/discrete", length=6)
    video = replay_episode(
        factory, "dummy", LoggedEpisode(env=1, number=2, actions=np.array([0, 1, 2])), seed=5
    )
    again = replay_episode(
        factory, "dummy", LoggedEpisode(env=1, number=2, actions=np.array([0, 1, 2])), seed=5
    )
    assert video.episode_return == again.episode_return and video.complete and video.fps == 10
    np.testing.assert_array_equal(video.frames, again.frames)
    assert video.frames.shape == (4, 32, 32, 3)
    assert np.isnan(video.rewards[0]) and video.rewards[1:].sum() == video.episode_return


@pytest.mark.parametrize(("size", "factor"), [((8, 8), 40), ((64, 16), 5), ((210, 160), 1), ((200, 300), 1)])
def test_videos_have_a_header_above_the_picture(size: tuple[int, int], factor: int):
    frames = np.random.default_rng(0).integers(0, 256, (3, *size, 3), np.uint8)
    video = EpisodeVideo(frames, np.array([np.nan, 1.0, -0.5]), 0.5, True, 10.0)
    shown = with_header(video, "best of 20: episode 7", 12002)
    height, width = size[0] * factor, size[1] * factor
    assert shown.shape[2] >= 320 and shown.shape[1] % 2 == shown.shape[2] % 2 == 0
    top, left = shown.shape[1] - height - 8, (shown.shape[2] - width) // 2
    pictures = shown[:, top : top + height, left : left + width]
    np.testing.assert_array_equal(pictures[:, ::factor, ::factor], frames)
    header = shown[:, : top - 24]  # without the title
    ink = (header != header[0, 0, 0]).any(-1)
    for number, (first, last) in enumerate(zip(range(0, 328, 82), range(82, 410, 82))):
        field = ink[:, :, first:last]
        assert field.any((1, 2)).all(), "every field has a name and a value"
        changes = [(field[0] != field[1]).any(), (field[1] != field[2]).any()]
        assert changes == [number < 3] * 2, "step, reward and return change, the checkpoint does not"


def test_unrendered_environment_uses_image_observation(monkeypatch):
    from rl_lab.environments.suites import dummy

    monkeypatch.setattr(dummy.CueEnv, "render", lambda self: None)
    seen = replay_episode(
        env_factory("dummy/dict"), "dummy/dict", LoggedEpisode(0, 0, np.array([[0, 0]])), seed=1
    )
    assert seen.frames.shape == (2, 16, 16, 3)
    with pytest.raises(LabError, match="renders no frames"):
        replay_episode(
            env_factory("dummy/discrete"), "dummy/discrete", LoggedEpisode(0, 0, np.array([0])), seed=1
        )


def test_long_episodes_and_failures(monkeypatch):
    factory = env_factory("dummy/count", length=MOST_FRAMES + 50)
    video = replay_episode(
        factory, "count", LoggedEpisode(0, 0, np.zeros(MOST_FRAMES + 20, dtype=np.int64)), seed=1
    )
    assert len(video.frames) == MOST_FRAMES and not video.complete
    with pytest.raises(LabError, match="failed while the episode was replayed"):
        replay_episode(env_factory("dummy/discrete"), "dummy", LoggedEpisode(0, 0, np.array([["x"]])), seed=1)


def test_sys_exit_while_rendering(monkeypatch):
    from rl_lab.environments.suites import dummy

    monkeypatch.setattr(dummy.CueEnv, "render", lambda self: sys.exit(0))
    monkeypatch.setattr(dummy.CueEnv, "close", lambda self: sys.exit(0), raising=False)
    seen = replay_episode(
        env_factory("dummy/dict"), "dummy/dict", LoggedEpisode(0, 0, np.array([[0, 0]])), seed=1
    )
    assert seen.frames.shape == (2, 16, 16, 3)
    monkeypatch.setattr(dummy.CueEnv, "step", lambda self, action: sys.exit(0))
    with pytest.raises(LabError, match="dummy/dict failed while the episode was replayed: SystemExit: 0"):
        replay_episode(
            env_factory("dummy/dict"), "dummy/dict", LoggedEpisode(0, 0, np.array([[0, 0]])), seed=1
        )


def test_actions_are_logged_by_episode():
    log = ActionLog()
    rows = [  # two environments; the first one's first episode has two steps, its second one
        ([1, 5], [True, True], [False, False]),
        ([2, 6], [False, False], [False, False]),
        ([0, 7], [False, False], [True, False]),
        ([3, 8], [True, False], [False, False]),
        ([0, 0], [False, False], [True, True]),
    ]
    for action, first, ended in rows:
        log.add(
            {
                "action": np.array(action),
                "is_first": np.array(first),
                "terminated": np.array(ended),
                "truncated": np.zeros(2, bool),
            }
        )
    assert log.episode(0, 2).actions.tolist() == [1, 2]
    assert log.episode(1, 2).actions.tolist() == [5, 6, 7, 8]
    assert log.episode(2, 2).actions.tolist() == [3] and log.episode(2, 2).number == 1


def test_best_median_and_worst():
    episodes = [Episode(value, 1) for value in (3.0, 9.0, 1.0, 5.0, 7.0)]
    assert choose(episodes) == {"best": 1, "median": 3, "worst": 2}
    assert choose(episodes[:2]) == {"best": 1, "worst": 0} and choose(episodes[:1]) == {"best": 0}


# --- Scores ---


def test_atari_is_human_normalised():
    result = summary([Episode(14.6, 10), Episode(-20.7, 10)], Task("atari100k", "pong"), seed=0)
    scores = result["normalised"]
    assert scores["name"] == "human-normalised" and (scores["min"], scores["max"]) == (0.0, 1.0)
    assert scores["mean"] == pytest.approx(0.5) and (scores["zero_at"], scores["one_at"]) == (-20.7, 14.6)
    assert "normalised" in episode_lines([Episode(14.6, 10)], Task("atari", "pong")).splitlines()[0]
    assert "normalised" not in summary([Episode(1.0, 1)], Task("", "CartPole-v1"), seed=0)


def test_crafter_score_by_hand():
    """Two achievements, unlocked in all and in none of the episodes: exp((ln 101 + ln 1) / 2) - 1."""
    logs = [{"log/achievement_wake_up": 1.0, "log/achievement_collect_coal": 0.0, "log/x": 3.0}] * 2
    result = summary([Episode(1.0, 5, log=log) for log in logs], Task("crafter", "reward"), seed=0)
    assert result["crafter_score"] == pytest.approx(101**0.5 - 1)
    assert result["log/x"] == 3.0
