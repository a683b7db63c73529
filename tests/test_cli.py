"""Commands of the command line."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import rl_lab
from rl_lab.cli import main
from rl_lab.components.representation_learners.rssm import RSSM
from rl_lab.errors import LabError
from tests.same_run import stopped_at

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """One tiny trained run, shared by the tests."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = [
        "train",
        "+experiment=dreamer_cartpole",
        "debug=tiny",
        f"run_dir={folder}",
        "logging.progress=off",
    ]
    assert main(words) == 0
    return folder


def test_run_folder_layout(run: Path):
    for name in (
        "config.yaml",
        "config/spec.json",
        "code.txt",
        "metrics.jsonl",
        "checkpoints/last.pt",
        "media/episodes/train",
        "media/episodes/test",
        "media/episodes/imagination",
        "media/reconstructions",
        "media/recordings",
        "tensorboard",
        "scripts/play.sh",
        "scripts/resume.sh",
        "scripts/eval.py",
    ):
        assert (run / name).exists(), name
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all({"step", "frames", "updates"} <= set(line) for line in lines)
    prefixes = {key.split("/")[0] for line in lines for key in line if "/" in key}
    assert {"collect", "train", "controller", "eval", "time", "workflow"} <= prefixes


def test_debug_tiny_is_fast(tmp_path: Path):
    """The target is 20 s on an idle machine for the complete command; tests share the machine."""
    command = [sys.executable, "-m", "rl_lab", "train", "+experiment=dreamer_cartpole", "debug=tiny"]
    start = time.perf_counter()
    result = subprocess.run([*command, f"run_dir={tmp_path / 'run'}"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert time.perf_counter() - start < 40
    assert "done: " in result.stdout


def test_eval_is_deterministic(run: Path, tmp_path: Path, capsys):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        assert main(["eval", str(run), "--episodes", "4", "--seed", "3", "--json", str(file)]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    result = json.loads(files[0].read_text())
    assert len(result["returns"]) == 4
    assert result["return_mean"] == pytest.approx(np.mean(result["returns"]))
    assert "over 4 episodes" in capsys.readouterr().out


def test_eval_script_and_best_checkpoint(run: Path):
    """It runs by itself, and with a Python that has no rl_lab (-I ignores PYTHONPATH, -S the site packages)."""
    command = ["./scripts/eval.py", "--episodes", "2", "--checkpoint", "best", "--no-video"]
    result = subprocess.run(command, cwd=run, capture_output=True, text=True)
    assert result.returncode == 0 and "over 2 episodes" in result.stdout, result.stderr
    command = [sys.executable, "-IS", "scripts/eval.py", "--help"]
    result = subprocess.run(command, cwd=run, capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.startswith("usage: rl-lab eval"), result.stderr


def test_report_list_and_doctor(run: Path, capsys):
    assert main(["report", str(run)]) == 0
    assert (run / "report" / "index.html").stat().st_size > 10_000
    assert main(["list", "experiments"]) == 0
    assert "dreamer_cartpole" in capsys.readouterr().out
    assert main(["doctor"]) == 0


def test_cfg_job_prints_dims(capsys):
    assert main(["train", "+experiment=dreamer_cartpole", "--cfg", "job", "--package", "_global_"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["_dims"] == {"action": 2, "observation": 4}
    assert main(["train", "--cfg", "job", "--resolve", "--package", "algorithm"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["batch_size"] == 16


def test_overrides_stand_before_and_after_options(capsys):
    words = ["train", "+experiment=dreamer_cartpole", "--cfg", "job", "experiment.seed=4", "-p", "experiment"]
    assert main([*words, "experiment.name=mine"]) == 0
    assert {"seed": 4, "name": "mine"}.items() <= yaml.safe_load(capsys.readouterr().out).items()


def test_resume_prints_changes_and_refuses_unsafe_keys(run: Path, capsys):
    assert main(["resume", str(run), "training.total_timesteps=110", "logging.progress=plain"]) == 0
    assert "training.total_timesteps: 100 -> 110" in capsys.readouterr().out
    assert main(["resume", str(run), "algorithm.batch_size=3"]) == 1
    assert "cannot become 3 on resume" in capsys.readouterr().err
    assert main(["resume", str(run), "algorithm.batch_sise=3"]) == 1
    assert main(["resume", str(run.parent / "nowhere")]) == 1
    # The folder of another run: the message starts with what tells it, and says how much more differs.
    assert main(["train", "experiment=random_cartpole", f"run_dir={run}"]) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(
        "error: experiment.name was 'dreamer_cartpole' in this run and cannot become 'random"
    )
    assert (
        "(and workflow._target_, " in message and "more differ)" in message and "another run_dir" in message
    )


def test_end_of_a_run_is_said_once(tmp_path: Path, capsys, monkeypatch):
    words = ["train", "debug=tiny", "logging.progress=off", f"run_dir={tmp_path / 'run'}"]
    with stopped_at(monkeypatch, 40):
        assert main(words) == 0
    shown = capsys.readouterr().out
    assert "stopped and saved; continue with: rl-lab resume" in shown and "done:" not in shown
    assert main([*words, "experiment.seed=1", f"run_dir={tmp_path / 'new'}", "experiment.device=cuda:7"]) == 1
    shown = capsys.readouterr().out
    assert f"run folder: {tmp_path / 'new'}" in shown and not (tmp_path / "new").exists()
    assert f"the run failed before it stored anything: removed {tmp_path / 'new'}" in shown


def test_errors_are_one_message(capsys, tmp_path: Path):
    for words, expected in (
        (["trian"], "Did you mean 'train'"),
        (["train", "experiment=dreamer_cartpol"], "dreamer_cartpole"),
        (["train", "debug=tiny", "experiment.device=cuda:7"], "CUDA devices"),
        (
            ["train", "debug=tiny", "experiment.device=xla"],
            "must be auto, cpu, cuda, cuda:N or mps, not 'xla'",
        ),
        (
            ["train", "debug=tiny", "experiment.device=meta"],
            "must be auto, cpu, cuda, cuda:N or mps, not 'meta'",
        ),
        (["train", "debug=tiny", "experiment.device=tpu"], "there is no torch-xla for torch 2.11"),
        (["train", "debug=tiny", "environment.task=CartPole-v7"], "CartPole"),
        (["train", "debug=tiny", "components/encoder=mlp", "environment=dummy_dict"], "encoder"),
        (["train", "debug=tiny", "training.phases=[{name: x, workflow_hooks: [colect]}]"], "collect"),
        (["train", "debug=tiny", "training.precision=float8"], "float32"),
        (["play"], "has no run"),
        (["bench", "nothing"], "nothing"),
        (["report", str(tmp_path)], "run"),
    ):
        assert main([*words]) == 1, words
        captured = capsys.readouterr()
        assert expected in captured.err, (words, captured.err)
        assert "Traceback" not in captured.err


def test_tensorfloat32_applies_to_updates_only(tmp_path: Path, monkeypatch):
    found = set()
    forward = RSSM.observe_sequence

    def watched(self, *inputs):
        if torch.is_grad_enabled():  # an update, not acting
            found.add(torch.backends.cuda.matmul.allow_tf32)
        return forward(self, *inputs)

    monkeypatch.setattr(RSSM, "observe_sequence", watched)
    before = torch.backends.cuda.matmul.allow_tf32
    for choice, on in (("tensorfloat32", True), ("float32", before)):
        found.clear()
        words = ["debug=tiny", f"training.precision={choice}", "logging.progress=off"]
        assert main(["train", *words, f"run_dir={tmp_path / choice}"]) == 0
        assert found == {on}
        assert torch.backends.cuda.matmul.allow_tf32 == before


def test_native_crash_prints_traceback(tmp_path: Path):
    crash = "import ctypes\nctypes.string_at(0)\n"
    (tmp_path / "crashing.py").write_text("def make(**options):\n    " + crash.replace("\n", "\n    "))
    words = [
        "train",
        "environment.task=crashing:make",
        f"run_dir={tmp_path / 'run'}",
        "environment.workers=0",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "rl_lab", *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode < 0 and "Fatal Python error" in done.stderr and "crashing.py" in done.stderr


def test_closed_stdout_is_not_an_error(capsys, monkeypatch):
    command = [sys.executable, "-m", "rl_lab", "list"]
    listing = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert listing.stdout is not None
    listing.stdout.close()
    _, errors = listing.communicate(timeout=60)
    assert (listing.returncode, errors) == (0, "")

    def broken(arguments) -> int:
        raise BrokenPipeError("a worker's end is gone")

    monkeypatch.setattr("rl_lab.tools.listing.main", broken)
    assert main(["list"]) == 1
    assert "a worker's end is gone" in capsys.readouterr().err


def test_stdout_is_line_buffered(monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    script = "import time; from rl_lab.cli import main; main(['--version']); time.sleep(60)"
    talking = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert talking.stdout is not None
    try:
        readable, _, _ = select.select([talking.stdout], [], [], 30)
        assert readable and talking.stdout.readline().strip() == rl_lab.__version__
    finally:
        talking.kill()
        talking.wait()
        talking.stdout.close()


def test_multirun_trains_every_combination(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "rl_lab", "train", "-m", "+experiment=random_cartpole", "debug=tiny"]
    result = subprocess.run(
        [*command, "experiment.seed=0,1", "hydra.sweep.dir=sweep", "logging.progress=off"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert sorted(path.parent.name for path in tmp_path.glob("sweep/*/config.yaml")) == ["0", "1"]
    seeds = {
        yaml.safe_load(path.read_text())["experiment"]["seed"]
        for path in tmp_path.glob("sweep/*/config.yaml")
    }
    assert seeds == {0, 1}


def test_checkout_scripts_run(tmp_path: Path):
    command = [
        sys.executable,
        str(ROOT / "scripts" / "train.py"),
        "+experiment=random_cartpole",
        "debug=tiny",
    ]
    result = subprocess.run(
        [*command, f"run_dir={tmp_path / 'run'}"], capture_output=True, text=True, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr


def test_loaded_agent_needs_no_environment(run: Path):
    agent = rl_lab.load_agent(run)
    action = agent.act(np.zeros(4, dtype=np.float32))
    assert int(action) in (0, 1)
    agent.act(np.ones(4, dtype=np.float32))
    agent._generator.manual_seed(0)  # its memory is drawn: the same noise for the same episode
    assert agent.act(np.zeros((4,), dtype=np.float32), is_first=True) == action
    agent.reset()
    assert agent.act(np.zeros((3, 4), dtype=np.float32)).shape == (3,)
    with pytest.raises(LabError, match="shape"):
        agent.act(np.zeros(5, dtype=np.float32))


def test_second_process_is_refused(run: Path, capsys):
    from rl_lab.utils.files import RunLock

    with RunLock(run):
        assert main(["resume", str(run), "training.total_timesteps=220"]) == 1
    assert "error" in capsys.readouterr().err


def test_resume_extends_finished_run(tmp_path: Path):
    words = ["debug=tiny", "logging.progress=off", "logging.tensorboard=false", f"run_dir={tmp_path / 'run'}"]
    assert (
        rl_lab.train("dreamer_cartpole", [*words, "training.total_timesteps=60"]).counters["env_steps"] >= 60
    )
    assert main(["resume", str(tmp_path / "run"), "training.total_timesteps=120"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] >= 120


def test_load_path_loads_weights(run: Path, tmp_path: Path, capsys):
    from rl_lab.utils.checkpoint.manager import CheckpointManager

    words = ["train", "debug=tiny", "training.total_timesteps=6", "logging.progress=off"]
    words += [f"load.path={run}", "load.components=[encoder]", "experiment.seed=9"]
    words += ["training.phases=[{name: collect, workflow_hooks: [collect]}]"]
    assert main([*words, f"run_dir={tmp_path / 'part'}"]) == 0
    # Nothing is updated: what was loaded is what is saved.
    loaded = CheckpointManager(tmp_path / "part" / "checkpoints").load().state["components"]
    source = CheckpointManager.load_file(run, weights=True).state["components"]
    weight = next(iter(source["encoder"]))
    assert (loaded["encoder"][weight] == source["encoder"][weight]).all()
    other = next(key for key, value in source["rssm"].items() if value.dim() > 1)
    assert not (loaded["rssm"][other] == source["rssm"][other]).all()
    assert main([*words, "load.components=[encodr]", f"run_dir={tmp_path / 'wrong'}"]) == 1
    assert "encoder" in capsys.readouterr().err
    assert main([*words, "algorithm.size.units=12", f"run_dir={tmp_path / 'shape'}"]) == 1
    assert "shape" in capsys.readouterr().err


def test_phases_staged_trains(tmp_path: Path):
    words = ["debug=tiny", "phases=staged", "logging.progress=off", f"run_dir={tmp_path / 'run'}"]
    words += ["training.phases.0.duration_steps=60", "training.phases.1.duration_updates=5"]
    words += ["training.phases.2.duration_updates=5", "training.total_timesteps=80"]
    assert rl_lab.train("dreamer_cartpole", words).counters["updates"] >= 10
