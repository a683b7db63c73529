"""`rl-lab export`: the folder acts as the run does, and what is in it; the agents that come with the package."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import rl_lab
from rl_lab.cli import main
from rl_lab.config.trust import UntrustedError
from rl_lab.errors import LabError
from rl_lab.hub import EXAMPLES, examples
from rl_lab.run_folder import RunFolder
from rl_lab.tools.export.command import LARGEST_EXAMPLE, export, without_paths
from rl_lab.utils.checkpoint.safetensors import read_tensors

TINY = ["debug=tiny", "logging.progress=off", "logging.tensorboard=false"]
TINY += ["training.evaluate.every_env_steps=null", "training.report.every_env_steps=null"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    return rl_lab.train("dreamer_bounce", [*TINY, "training.total_timesteps=60", f"run_dir={folder}"]).path


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    assert main(["export", str(run), "--episodes", "2", "--starts", "2", "--license", "mit"]) == 0
    return run / "export"


def acted(agent: rl_lab.Agent, steps: int = 25) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Actions, sampled, and the last policy state."""
    rng = np.random.default_rng(0)
    shape = agent.spec.observations["image"].shape
    agent.reset(3)
    images = rng.integers(0, 256, (steps, *shape), dtype=np.uint8)
    actions = [agent.act({"image": image}, sample=True, scaled=True) for image in images]
    assert agent._state is not None
    return np.stack(actions), agent._state


def test_same_actions_to_the_bit(run: Path, exported: Path):
    (before, state), (after, same) = acted(rl_lab.load_agent(run)), acted(rl_lab.load_agent(exported))
    np.testing.assert_array_equal(before, after)
    assert len(set(before.tolist())) > 1
    for name, value in state.items():
        assert torch.equal(value, same[name]), name


def test_bfloat16_halves_the_weights(run: Path, exported: Path, tmp_path: Path):
    found = export(run, tmp_path / "half", dtype="bfloat16", episodes=0, starts=0)
    assert found["bytes"] < 0.65 * (exported / "agent.safetensors").stat().st_size
    full, half = rl_lab.load_agent(run).workflow, rl_lab.load_agent(tmp_path / "half").workflow
    for before, after in zip(full.rssm.parameters(), half.rssm.parameters()):
        torch.testing.assert_close(before, after, rtol=2**-8, atol=1e-30)  # 8 bits of a mantissa
        assert after.dtype == torch.float32


def test_what_the_folder_has(run: Path, exported: Path):
    files = {file.relative_to(exported).as_posix() for file in exported.rglob("*") if file.is_file()}
    assert files == {
        *(
            "agent.safetensors",
            "config.yaml",
            "config/spec.json",
            "config/native.json",
            "config/signature.json",
        ),
        *("README.md", "scores.json", "dream.gif"),
        *("media/episodes/test/start_0.npz", "media/episodes/test/start_1.npz"),
    }
    config = (exported / "config.yaml").read_text()
    assert str(run) not in config and yaml.safe_load(config)["run_dir"] is None
    card = (exported / "README.md").read_text()
    facts = yaml.safe_load(card.split("---")[1])
    assert facts["library_name"] == "rl-lab" and facts["license"] == "mit"
    scores = json.loads((exported / "scores.json").read_text())
    assert scores["episodes"] == len(scores["returns"]) == 2
    value = facts["model-index"][0]["results"][0]["metrics"][0]["value"]
    assert value == f"{scores['return_mean']:.2f} +/- {scores['return_std']:.2f}"
    assert "![environment" in card and str(run) not in card
    names = set(read_tensors(exported / "agent.safetensors")[0])
    assert "components.rssm.posterior_out.weight" in names and not [n for n in names if "optimizer" in n]


def test_the_folder_is_a_run_for_the_verbs(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    copy = Path(shutil.copytree(exported, tmp_path / "agent"))
    assert main(["eval", str(copy), "--episodes", "2", "--no-video"]) == 0
    assert main(["play", str(copy), "-w", "--video", "--steps", "3"]) == 0
    assert (
        main(["export", str(copy), "--out", str(tmp_path / "again"), "--episodes", "0", "--starts", "0"]) == 0
    )
    first, second = (read_tensors(f / "agent.safetensors")[0] for f in (exported, tmp_path / "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert "example://" not in capsys.readouterr().out


def test_a_dream_needs_no_environment(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As on a machine without the emulator: the dream starts from the recorded episodes."""
    from rl_lab.tools.play import launch

    def missing(*args: object, **options: object) -> None:
        raise LabError("the emulator is not installed")

    monkeypatch.setattr(launch, "build_evaluator", missing)
    said: list[str] = []
    parser = launch.argparse.ArgumentParser()
    from rl_lab.tools.play import add_arguments

    add_arguments(parser)
    args = parser.parse_args([str(exported), "-a", "--video", "--steps", "4"])
    assert launch.launch(args, said.append) == 0
    assert "the real environment is not available: the emulator is not installed" in said
    assert Path(said[-1]).is_file()


def test_a_strangers_folder_obeys_the_trust_rules(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    copy = Path(shutil.copytree(exported, tmp_path / "agent"))
    (copy / "config" / "signature.json").unlink()
    assert rl_lab.load_agent(copy).step == rl_lab.load_agent(exported).step  # registered parts only
    config = yaml.safe_load((copy / "config.yaml").read_text())
    own = config["components"]["encoder"]["_target_"]
    config["components"]["encoder"]["_target_"] = "canary.Part"
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    for verb in (lambda: rl_lab.load_agent(copy), lambda: export(copy, tmp_path / "out")):
        with pytest.raises(UntrustedError, match="this run was not made here"):
            verb()
    assert not (tmp_path / "out").exists()

    # With --trust it is exported, and stays what it was: not made here.
    module, _, name = own.rpartition(".")
    (tmp_path / "own_part.py").write_text(f"from {module} import {name} as Mine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config["components"]["encoder"]["_target_"] = "own_part.Mine"
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    export(copy, tmp_path / "out", trust=True, episodes=0, starts=0)
    assert rl_lab.load_agent(tmp_path / "out", trust=True).step == 60
    with pytest.raises(UntrustedError, match=r"own_part\.Mine"):
        rl_lab.load_agent(tmp_path / "out")


def test_paths_of_this_machine_stay_here():
    config = {"run_dir": "/home/me/run", "training": {"resume_path": "/a", "phases": [{"name": "x"}]}}
    config |= {"buffers": {"replay": {"path": "~/data", "capacity": 5}}, "load": {"path": "../other"}}
    assert without_paths(config) == {
        "run_dir": None,
        "training": {"resume_path": None, "phases": [{"name": "x"}]},
        "buffers": {"replay": {"path": None, "capacity": 5}},
        "load": {"path": None},
    }


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--episodes", "-1"], "^--episodes must be 0 or more"),
        (["--out", "{run}"], "is the run itself"),
        (["--out", "{run}/checkpoints"], "has other files"),
        (["--example", "a/b"], "^--example NAME"),
        (["--checkpoint", "99"], "no checkpoint '99'"),
    ],
)
def test_bad_input(run: Path, words: list[str], text: str, capsys: pytest.CaptureFixture):
    import re

    assert main(["export", str(run), *(word.format(run=run) for word in words)]) == 1
    error = capsys.readouterr().err.removeprefix("error: ")
    assert re.search(text, error), error


# --- Agents in the package ---


@pytest.mark.parametrize("name", examples())
def test_examples_are_small_and_dream(name: str):
    folder = RunFolder(EXAMPLES / name)
    assert folder.exported and folder.weights.stat().st_size <= LARGEST_EXAMPLE
    assert not (folder.path / "config" / "signature.json").exists()
    agent = rl_lab.load_agent(f"example://{name}")
    assert agent.workflow.can_dream and list((folder.path / "media/episodes/test").glob("start_*.npz"))
    assert (folder.path / "scores.json").is_file() and "/" not in str(agent.config.run_dir or "")
    # Of the longest recorded episode, also where others end after a few steps.
    with Image.open(folder.path / "dream.gif") as picture:
        assert picture.n_frames >= 5


def test_the_package_has_an_agent_and_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert len(examples()) >= 2
    monkeypatch.chdir(tmp_path)
    name = examples()[0]
    assert main(["play", f"example://{name}", "-w", "--video", "--steps", "3"]) == 0
    assert list(tmp_path.glob(f"{name}-output/media/recordings/*"))  # not in the package
    with pytest.raises(LabError, match=r"^example://nothing: .* Known: "):
        rl_lab.load_agent("example://nothing")
    with pytest.raises(LabError, match="is no address of an agent"):
        rl_lab.load_agent("ftp://a/b")
