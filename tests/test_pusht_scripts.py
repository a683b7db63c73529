"""The scripts of Push-T: packed demonstrations hold the rows of the zarr folder; training in steps, then evaluation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rl_lab.buffers.offline import OfflineBuffer
from rl_lab.config.compose import compose_config
from rl_lab.environments import probe_spec
from tests.config.stored_data import pusht_demonstrations
from tests.loading import ROOT, load_script

pytest.importorskip("pymunk", reason="extra: pusht")
SCRIPT = ROOT / "scripts" / "diffusion_policy_pusht.sh"


def packed(folder: Path, task: str) -> Path:
    """Demonstrations as episode files, beside the zarr folder they are made of."""
    pusht_demonstrations(folder / "demos.zarr")
    load_script("dev/pack_pusht.py").main(folder / "demos.zarr", folder / "packed", task)
    return folder / "packed"


def call(*words: str | Path, python: Path | str = sys.executable) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": str(python), "PYTHONPATH": str(ROOT)}
    command = ["bash", str(SCRIPT), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)


@pytest.mark.parametrize("task", ["pixels", "keypoints"])
def test_packed_episodes_have_the_rows_of_the_zarr_folder(task: str, tmp_path: Path, capsys):
    folder, spec = packed(tmp_path, task), probe_spec(f"pusht/{task}")
    assert "packed: 2 episodes" in capsys.readouterr().out
    assert sorted(file.name for file in folder.iterdir()) == ["000.npz", "001.npz"]
    sources = load_script("dev/pack_pusht.py").SOURCES[task]
    rows = []
    for path, observations in ((tmp_path / "demos.zarr", sources), (folder, None)):
        buffer = OfflineBuffer(spec.row_columns(), path=path, spec=spec, observations=observations)
        rows.append(buffer.read(0, buffer.total_rows).columns)
    assert rows[0].keys() == rows[1].keys() and len(rows[0]["is_first"][0]) == 24 + 2
    for name, value in rows[0].items():
        torch.testing.assert_close(rows[1][name], value, rtol=0, atol=0, msg=name)
    assert rows[0]["action"].abs().max() > 0.9  # not the environment's units


RECORDER = '#!/usr/bin/env bash\nprintf "%s\\n" "$@" > "$RECORDED"\nexit "${STATUS:-0}"\n'


@pytest.mark.parametrize(
    ("algorithm", "task", "kind"),
    [
        ("diffusion_policy_transformer", "state", "packed"),
        ("diffusion_policy", "pixels", "demos.zarr"),
        ("behaviour_cloning", "state", "demos.zarr"),
        ("behaviour_cloning", "pixels", "packed"),
    ],
)
def test_words_of_the_script_compose(
    algorithm: str, task: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    demos = pusht_demonstrations(tmp_path / kind) if kind == "demos.zarr" else tmp_path / kind
    demos.mkdir(exist_ok=True)
    python = tmp_path / "python"
    python.write_text(RECORDER)
    python.chmod(0o755)
    monkeypatch.setenv("RECORDED", str(tmp_path / "words"))
    words = [f"task={task}", f"algorithm={algorithm}", "updates=7", "debug=tiny"]
    done = call("train", tmp_path / "run", demos, *words, python=python)
    assert done.returncode == 0, done.stderr
    train = (tmp_path / "words").read_text().splitlines()
    assert train[:3] == ["-m", "rl_lab", "train"]
    config = compose_config(train[3:])
    assert config.experiment.name == f"{algorithm}_pusht_{task}" and config.run_dir == str(tmp_path / "run")
    assert config.algorithm.updates == 7 and config.buffers.demonstrations.path == str(demos)
    assert (config.buffers.demonstrations.observations is None) == (kind == "packed")
    assert config.training.evaluate.every_updates is None
    for status, wanted in ((124, 0), (3, 1)):  # out of time, and an error
        monkeypatch.setenv("STATUS", str(status))
        done = call("train", tmp_path / "run", demos, *words, python=python)
        assert done.returncode == wanted


def test_missing_demonstrations_are_said(tmp_path: Path):
    for words, message in (
        (("train", tmp_path), "DEMOS is missing"),
        (("test", tmp_path), "test: train or evaluate"),
    ):
        done = call(*words)
        assert done.returncode == 1 and message in done.stderr


@pytest.mark.learning
@pytest.mark.parametrize("algorithm", ["diffusion_policy", "behaviour_cloning"])
def test_train_and_evaluate(algorithm: str, tmp_path: Path):
    run, demos = tmp_path / "run", packed(tmp_path, "keypoints")
    words = ["task=state", f"algorithm={algorithm}", "updates=3", "debug=tiny", "experiment.device=cpu"]
    for message in (
        "done: 0 steps and 3 updates",
        "nothing left to do",
    ):  # given again, it goes on where it was
        done = call("train", run, demos, "seconds=250", *words)
        assert done.returncode == 0 and message in done.stdout, done.stderr
    done = call("evaluate", run, "episodes=2")
    assert done.returncode == 0, done.stderr
    (file,) = (run / "report").glob("eval_*_seed100000.json")
    result = json.loads(file.read_text())
    assert result["task"] == "pusht/keypoints" and result["episodes"] == result["num_envs"] == 2
    assert 0 <= result["log/success"] <= 1 and 0 <= result["log/max_reward"] <= 1
    assert len(result["returns"]) == 2 and result["lengths"] == [20, 20]
    assert list((run / "media" / "episodes" / "test").glob("eval_best_*"))
