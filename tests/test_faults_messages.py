"""Every error is one message with a suggestion; the traceback is shown only with --debug."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rl_lab.cli import VERBS, main
from rl_lab.errors import LabError, install_line, one_line, unexpected

TINY = ["train", "debug=tiny", "logging.progress=off", "logging.tensorboard=false"]
PHASE = "training.phases=[{name: only, %s}]"

# Mistake -> (arguments, parts of the message).
MISTAKES = {
    "verb": (["trian"], ["no verb 'trian'", "Did you mean 'train'"]),
    "flag": (["train", "--multrun"], ["unrecognized", "Did you mean '--multirun'"]),
    "experiment": (
        [*TINY, "experiment=dreamer_cartpol"],
        ["experiment=dreamer_cartpol does not exist", "'dreamer_cartpole'"],
    ),
    "group": (
        [*TINY, "environment=cartpoel"],
        ["environment=cartpoel: no environment config has this name", "'cartpole'"],
    ),
    "key": (
        [*TINY, "training.total_timestep=9"],
        ["training.total_timestep is not a known key", "training.total_timesteps"],
    ),
    "new key": (
        [*TINY, "+training.total_timestep=9"],
        ["training.total_timestep is not a known key", "total_timesteps"],
    ),
    "no value": ([*TINY, "training.threads"], ["'training.threads' cannot be read as key=value"]),
    "integer": ([*TINY, "algorithm.batch_size=many"], ["algorithm.batch_size must be a", "not 'many'"]),
    "flag value": (
        [*TINY, "training.capture=flase"],
        ["training.capture must be true or false", "Did you mean 'false'"],
    ),
    "choice": (
        [*TINY, "training.on_save_failure=contine"],
        ["must be stop or continue", "Did you mean 'continue'"],
    ),
    "number": (
        [*TINY, "algorithm.entropy=high"],
        ["algorithm.entropy must be a number, such as", "not 'high'"],
    ),
    "part's value": (
        [*TINY, "components.rssm.deter=[1]"],
        ["components.rssm", "could not be built: TypeError"],
    ),
    "part's key": ([*TINY, "+components.rssm.detr=8"], ["takes no 'detr'", "Did you mean 'deter'"]),
    "interpolation": ([*TINY, "algorithm.batch_size=${nowhere}"], ["does not resolve", "nowhere"]),
    "hook": (
        [*TINY, PHASE % "workflow_hooks: [collect, updte]"],
        ["unknown hook 'updte'", "Did you mean 'update'"],
    ),
    "buffer": (
        [*TINY, PHASE % "buffer: reply, workflow_hooks: [collect]"],
        ["unknown buffer 'reply'", "'replay'"],
    ),
    "class": (
        [*TINY, "workflow._target_=rl_lab.workflows.dreamer.workflow.Dreamr"],
        ["cannot import", "Dreamr"],
    ),
    "shape": ([*TINY, "+_dims.observation=5"], ["_dims.observation is 5", "has 4"]),
    "parts that do not fit": ([*TINY, "environment=dummy_dict", "components/encoder=mlp"], ["encoder"]),
    "sequence": (
        [*TINY, "buffers.replay.capacity=4"],
        ["buffers.replay.capacity=4 is too small", "sequences of 5 rows", "at least 10"],
    ),
    "device": ([*TINY, "experiment.device=cuda:7"], ["experiment.device is 'cuda:7'", "use auto"]),
    "words of IRIS": (
        ["train", "env=atari", "params=atari", "env.train.id=BreakoutNoFrameskip-v4"],
        ["env=atari: the key is 'environment'. Use environment=atari"],
    ),
    "two wrong keys": (
        ["train", "trainin.total_timesteps=3", "common.device=cpu"],
        ["trainin.total_timesteps is not a known key. Did you mean 'training.total_timesteps'"],
    ),
    "environment": ([*TINY, "environment.task=CartPole-v7"], ["CartPole"]),
    "environments": ([*TINY, "environment.num_envs=none"], ["num_envs", "an integer"]),
    "evaluation's": ([*TINY, "environment.eval.num_envs=none"], ["num_envs", "an integer"]),
    "package": ([*TINY, "wandb.mode=offline"], ["wandb", "pip install"]),
    "folder": ([*TINY, "run_dir=/proc/nothing"], ["cannot create the run folder /proc/nothing"]),
    "checkpoint": ([*TINY, "load.path=nowhere.pt"], ["nowhere.pt: there is no checkpoint of that name"]),
    "run": (["resume", "nowhere"], ["nowhere is not a run"]),
    "sweep": (
        ["train", "-m", "debug=tiny", "training.thread=1,2"],
        ["training.thread is not a known key", "training.threads"],
    ),
}


@pytest.fixture
def without_wandb(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_error_is_one_message_with_suggestion(mistake: str, capfd, without_wandb):
    words, expected = MISTAKES[mistake]
    assert main(words) == 1
    text = capfd.readouterr().err
    assert text.count("error: ") == 1 and text.startswith("error: "), text
    assert "Traceback" not in text
    for part in expected:
        assert part in text, (part, text)
    assert list(Path("outputs").glob("*/*")) == [], "a mistake is no run"


def test_missing_suite_package_prints_install_command(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.split(".")[0] in ("crafter", "ale_py")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "crafter", None)
    assert main([*TINY, "environment=crafter", "components/encoder=dict"]) == 1
    text = capsys.readouterr().err
    assert "needs the package 'crafter'" in text and install_line("crafter") in text


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_has_debug_flag(verb: str, capsys):
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    assert "--debug" in capsys.readouterr().out
    words = [verb, *{"check": ["CartPole-v1"], "push": ["agent", "me/agent"]}.get(verb, []), "--no-such-flag"]
    with pytest.raises(LabError):
        main([*words, "--debug"])
    assert main(words) == 1
    assert "unrecognized arguments: --no-such-flag" in capsys.readouterr().err or verb == "bench"


def test_unexpected_error_is_one_message(monkeypatch, capsys):
    def fails(args):
        return {}["nothing"]

    monkeypatch.setattr("rl_lab.tools.doctor.main", fails)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().err
    assert "unexpected KeyError: 'nothing' (test_faults_messages.py, line" in text and "--debug" in text
    with pytest.raises(KeyError):
        main(["doctor", "--debug"])


def test_traceback_only_with_debug(tmp_path: Path):
    command = [sys.executable, "-m", "rl_lab", "train", "experiment=nothing"]
    plain, debugged = (
        subprocess.run([*command, *more], capture_output=True, text=True, cwd=tmp_path)
        for more in ([], ["--debug"])
    )
    assert plain.returncode == 1 and "Traceback" not in plain.stderr and plain.stderr.count("\n") == 1
    assert debugged.returncode == 1 and "Traceback" in debugged.stderr


def test_one_line_and_unexpected():
    assert one_line(ValueError()) == "ValueError"
    assert one_line(ValueError("\n  first\nsecond")) == "ValueError: first"
    assert len(one_line(ValueError("x" * 1000))) < 320
    assert (
        unexpected(ValueError("never raised"))
        == "unexpected ValueError: never raised; --debug shows the traceback"
    )
