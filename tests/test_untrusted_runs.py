"""A run folder is data: a config that names anything but registered parts is refused before it is imported."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import rl_lab
from rl_lab.buffers.offline import OfflineBuffer
from rl_lab.cli import main
from rl_lab.config.checks import CONFIG_FOLDER
from rl_lab.config.compose import compose_config, to_plain
from rl_lab.config.trust import (
    UntrustedError,
    check_environment,
    check_parts,
    check_saved,
    is_registered,
    key_file,
    registered_targets,
)
from rl_lab.errors import LabError
from rl_lab.run_folder import RunFolder
from rl_lab.training import resume, train
from rl_lab.utils.checkpoint.manifest import read_manifest, write_manifest

QUIET = ["logging.progress=off", "logging.tensorboard=false"]
CANARY = """
import pathlib
pathlib.Path({mark!r}).write_text("imported")
import gymnasium
class Thing:
    def __init__(self, **options): pathlib.Path({mark!r}).write_text("called")
class Env(gymnasium.Env):
    def __init__(self, **options): pathlib.Path({mark!r}).write_text("called")
def call(*args, **options): pathlib.Path({mark!r}).write_text("called")
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trust") / "run"
    words = ["debug=tiny", "environment=dummy_discrete", *QUIET, "training.total_timesteps=20"]
    train("dreamer_cartpole", [*words, "training.evaluate.every_env_steps=10", f"run_dir={folder}"])
    return folder


@pytest.fixture
def stranger(trained: Path, tmp_path: Path) -> Path:
    """A run that another user made."""
    copy = Path(shutil.copytree(trained, tmp_path / "stranger", symlinks=True))
    (copy / "config" / "signature.json").unlink()
    return copy


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that the module `canary_part` writes as soon as it is imported or called."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "canary_part.py").write_text(CANARY.format(mark=str(tmp_path / "mark")))
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop("canary_part", None)
    return tmp_path / "mark"


def change(run: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Edit the config of a run, and that in its manifests, as an attacker would."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    edit(config)
    (run / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    for file in (run / "checkpoints").glob("*.json"):
        manifest = read_manifest(file)
        manifest["info"]["config"] = config
        write_manifest(file, manifest)


def put(path: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    def edit(config: dict[str, Any]) -> None:
        *parents, key = path.split(".")
        for name in parents:
            config = config.setdefault(name, {})
        config[key] = value

    return edit


def part(target: str, **options: Any) -> dict[str, Any]:
    return {"_target_": target, **options}


MAKE = "rl_lab.environments.make.make_configured_env"
GOOD = "rl_lab.components.representation_learners.identity.IdentityRepresentation"
TARGETS = [
    "canary_part.Thing",
    "canary_part.call",
    "torch.utils.collect_env.run",
    "torch.hub.load",
    "torch.load",
    "torch.nn.Linear",
    "torch.optim.Optimizer",
    "torch.optim.lr_scheduler.LambdaLR",
    "torch.optim.adam.torch.load",
    "numpy.load",
    "rl_lab.utils.files.Path.write_text",
    "rl_lab.utils.files.shutil.copyfile",
    "rl_lab.utils.files.os.mkdir",
    "rl_lab.training.train",
    "rl_lab.cli.main",
    "rl_lab.__main__",
    "rl_lab.buffers.replay.ReplayBuffer.restore",
    "rl_lab.buffers.offline.OfflineBuffer.path",
    f"{GOOD}.__init__",
    "hydra.utils.get_method",
    "hydra.utils.instantiate",
    "omegaconf.OmegaConf.load",
    "gymnasium.make",
    "matplotlib.pyplot.savefig",
    "",
    "..",
    "rl_lab.components.representation_learners.identity.IdentityRepresentation ",
]
VECTORS = {
    **{f"target {name}": put("components.extra", part(name, command="touch x")) for name in TARGETS},
    "target of a list": put("components.extra", {"_target_": ["canary_part.Thing"]}),
    "target of a number": put("components.extra", {"_target_": 7}),
    "workflow": put("workflow._target_", "canary_part.Thing"),
    "controller": put("controllers.extra", part("canary_part.Thing")),
    "optimizer": put("optimizers.extra", part("canary_part.call", _partial_=True)),
    "buffer": put("buffers.replay._target_", "canary_part.Thing"),
    "sampler in a buffer": put("buffers.replay.samplers", {"x": part("canary_part.call", _partial_=True)}),
    "nested": put("components.extra", part(GOOD, deep=[{"deeper": part("canary_part.Thing")}])),
    "in algorithm": put("algorithm.extra", part("canary_part.Thing")),
    "in an unknown root key": put("anything", [part("canary_part.Thing")]),
    "args": put("components.extra", part(GOOD, _args_=[1])),
    "recursive": put("components.extra", part(GOOD, _recursive_=False)),
    "partial of functools": put("components.extra", part("functools.partial", _args_=["os.system"])),
    "interpolated target": put("components.extra", {"_target_": "${experiment.name}"}),
    "environment variable": put("experiment.name", "${oc.env:HOME}"),
    "decode": put("experiment.name", "${oc.decode:'1'}"),
    "escaped": put("experiment.name", "\\${oc.env:HOME}"),
    "missing": put("experiment.name", "???"),
    "escape sequence": put("experiment.name", "\x1b[2Jx"),
    "task that is a mapping": put("environment.task", part("canary_part.Env")),
    "environment of a part": put("components.extra", part(MAKE, environment={"task": "canary_part:Env"})),
    "task of a part": put(
        "components.extra", part(MAKE, environment={"task": "dummy/count"}, task="canary_part:Env")
    ),
    "evaluation task of a part": put(
        "components.extra",
        part(MAKE, environment={"task": "dummy/count", "eval": {"task": "canary_part:Env"}}),
    ),
    "no environment of a part": put("components.extra", part(MAKE, _partial_=True)),
    "model of a hub": put("components.extra", part(GOOD, model="stranger/model")),
    "weights of another file": put("components.extra", part(GOOD, path="/etc/passwd")),
}
ENVIRONMENTS = {
    "task": put("environment.task", "canary_part:Env"),
    "task with gym:": put("environment.task", "gym:canary_part:Env"),
    "task of the standard library": put("environment", {"task": "os:system", "command": "touch x"}),
    "evaluation task": put("environment.eval.task", "canary_part:Env"),
    "multitask": lambda config: config["environment"].update(
        suite="multitask", task="several", tasks=["dummy/count", "canary_part:Env"]
    ),
    "suite": put("environment.suite", "canary_part"),
    "task that is a list": put("environment.task", ["canary_part:Env"]),
    "path in an option": put("environment.xml_file", "/etc/passwd"),
    "mapping in an option": put("environment.make_kwargs", {"id": "canary_part:Env"}),
    "video folder": put("environment.eval.video_folder", "/tmp"),
    "log files": put("environment.log_files", "logs"),
    "workers": put("environment.workers", 100_000),
}


def verbs(run: Path) -> dict[str, list[str]]:
    """Every command that builds what a config names."""
    return {
        "eval": ["eval", str(run), "--episodes", "1", "--no-video"],
        "play": ["play", str(run), "--video", "--steps", "2"],
        "dream": ["report", str(run), "--dream", "--episodes", "1"],
        "resume": ["resume", str(run), "training.total_timesteps=26"],
        "checkpoint": ["eval", str(run / "checkpoints" / "last.pt"), "--episodes", "1"],
        "collect": ["collect", str(run), "--episodes", "1", "--envs", "1", "--out", str(run.parent / "data")],
        "export": ["export", str(run), "--episodes", "1", "--out", str(run.parent / "exported")],
    }


@pytest.mark.parametrize("name", VECTORS)
def test_unregistered_parts_are_refused_by_every_loader(
    name: str, stranger: Path, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(stranger, VECTORS[name])
    before = files(stranger)
    with pytest.raises(LabError, match=r"config\.yaml"):
        rl_lab.load_agent(stranger)
    for verb, words in verbs(stranger).items():
        assert main(words) == 1, verb
        error = capsys.readouterr().err
        assert error.startswith(f"error: {stranger / 'config.yaml'}") and error.count("\n") == 1, (
            verb,
            error,
        )
        assert "unexpected" not in error and "\x1b" not in error
    assert not mark.exists() and "canary_part" not in sys.modules
    assert files(stranger) == before


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_unregistered_environments_are_refused_by_every_loader(
    name: str, stranger: Path, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(stranger, ENVIRONMENTS[name])
    (
        stranger / "config" / "native.json"
    ).unlink()  # as an attacker would: it would be created to read its spaces
    for verb, words in verbs(stranger).items():
        if verb == "export":  # without its environment, which is not created: no scores, no recorded episodes
            assert main(words) == 0
            exported = stranger.parent / "exported"
            assert (exported / "agent.safetensors").exists() and not (exported / "scores.json").exists()
            assert not (exported / "media").exists()
            continue
        assert main(words) == 1, verb
        assert "config.yaml" in (error := capsys.readouterr().err) and "--trust" in error, verb
    agent = rl_lab.load_agent(stranger)  # acts without an environment
    agent._load_native = None
    assert not mark.exists() and "canary_part" not in sys.modules


def test_the_agent_of_an_unknown_environment_acts_but_does_not_create_it(stranger: Path, mark: Path) -> None:
    change(stranger, put("environment.task", "canary_part:Env"))
    for file in (stranger / "checkpoints").glob("*.json"):
        manifest = read_manifest(file)
        manifest["info"].pop("native", None)
        write_manifest(file, manifest)
    (stranger / "config" / "native.json").unlink()
    agent = rl_lab.load_agent(stranger)
    observation = {key: spec_zeros(spec) for key, spec in agent.spec.observations.items()}
    assert agent.act(observation, scaled=True) is not None
    with pytest.raises(LabError, match=r"cannot be created here .*config\.yaml"):
        agent.act(observation)
    assert not mark.exists() and "canary_part" not in sys.modules


def spec_zeros(spec: Any) -> Any:
    import numpy as np

    return np.zeros(spec.shape, spec.dtype)


def test_loaders_of_data_import_nothing(stranger: Path, mark: Path, trained: Path, tmp_path: Path) -> None:
    """Weights, replay and metrics of another run are read without its config."""
    for name in ("target canary_part.Thing", "workflow", "buffer"):
        change(stranger, VECTORS[name])
    agent = rl_lab.load_agent(trained)
    agent.load(stranger)
    agent.load(stranger / "checkpoints" / "last.pt")
    words = ["debug=tiny", "environment=dummy_discrete", *QUIET, "training.total_timesteps=16"]
    train("dreamer_cartpole", [*words, f"load.path={stranger}", f"run_dir={tmp_path / 'new'}"])
    OfflineBuffer(agent.spec.row_columns(), path=stranger, spec=agent.spec)
    assert main(["report", str(stranger), "--out", str(tmp_path / "out"), "--keys", "collect/episodes"]) == 0
    assert not mark.exists() and "canary_part" not in sys.modules


def test_manifest_does_not_name_what_is_imported(stranger: Path, mark: Path) -> None:
    """The config of a manifest is compared with config.yaml; only the latter has been checked."""
    for file in (stranger / "checkpoints").glob("*.json"):
        manifest = read_manifest(file)
        manifest["info"]["config"]["workflow"]["_target_"] = "canary_part.Thing"
        write_manifest(file, manifest)
    with pytest.warns(UserWarning, match="workflow._target_"):
        rl_lab.load_agent(stranger)
    with pytest.raises(LabError, match=r"workflow\._target_"):
        resume(stranger)
    assert not mark.exists()


def test_a_repeated_command_does_not_import_what_the_folder_names(stranger: Path, mark: Path) -> None:
    change(stranger, put("workflow._target_", "canary_part.Thing"))
    with pytest.raises(LabError, match="workflow"):
        train("dreamer_cartpole", ["debug=tiny", "environment=dummy_discrete", *QUIET, f"run_dir={stranger}"])
    assert not mark.exists() and "canary_part" not in sys.modules


def files(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


# ---------------------------------------------------------------- what stays possible


def test_a_run_of_registered_parts_is_loaded_from_anybody(
    stranger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rl_lab.load_agent(stranger).step == 20
    for words in (*list(verbs(stranger).values())[:2], verbs(stranger)["resume"]):
        assert main(words) == 0, capsys.readouterr().err
    assert not (stranger / "config" / "signature.json").exists()  # it was not made here


def test_trust_builds_own_classes_and_resume_remembers_it(stranger: Path, mark: Path) -> None:
    change(stranger, put("components.extra", part("canary_part.Thing")))
    with pytest.raises(UntrustedError, match=r"components\.extra\._target_ is 'canary_part\.Thing'.*--trust"):
        rl_lab.load_agent(stranger)
    assert rl_lab.load_agent(stranger, trust=True).step == 20 and mark.read_text() == "called"
    with pytest.raises(UntrustedError):
        rl_lab.load_agent(stranger)
    assert main(["resume", str(stranger), "--trust", "training.total_timesteps=26"]) == 0
    assert rl_lab.load_agent(stranger).step >= 26


OWN_PROJECT = """
import gymnasium, numpy as np
from rl_lab.workflows.random import RandomWorkflow
class Mine(RandomWorkflow):
    pass
class MyEnv(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 5
        return np.zeros(3, np.float32), {}
    def step(self, action):
        self.left -= 1
        return np.zeros(3, np.float32), 1.0, self.left == 0, False, {}
"""


def test_own_classes_need_no_trust_where_the_run_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_project.py").write_text(OWN_PROJECT)
    monkeypatch.syspath_prepend(str(tmp_path))
    run = tmp_path / "run"
    words = ["debug=tiny", *QUIET, "workflow._target_=my_project.Mine", "environment=gym"]
    words += ["environment.task=my_project:MyEnv", "training.total_timesteps=20", f"run_dir={run}"]
    assert main(["train", "+experiment=random_cartpole", *words]) == 0
    assert main(["train", "+experiment=random_cartpole", *words, "training.log.every_env_steps=5"]) == 0
    for command in verbs(run).values():
        if "--dream" not in command and "--video" not in command:
            assert main(command) == 0, capsys.readouterr().err
    assert rl_lab.load_agent(run).step >= 26
    moved = Path(shutil.move(run, tmp_path / "elsewhere"))
    assert rl_lab.load_agent(moved).step >= 26

    monkeypatch.setenv("RL_LAB_KEY_FILE", str(tmp_path / "other" / "run.key"))  # another user
    with pytest.raises(UntrustedError, match=r"workflow\._target_ is 'my_project\.Mine'"):
        rl_lab.load_agent(moved)
    assert not (tmp_path / "other").exists()  # loading makes no key


def test_signature_is_of_one_config_and_one_key(trained: Path, tmp_path: Path, monkeypatch) -> None:
    copy = RunFolder(shutil.copytree(trained, tmp_path / "copy", symlinks=True))
    copy.load_config()
    assert copy.trusted
    text = copy.config_file.read_text()
    copy.config_file.write_text(text.replace("seed: 0", "seed: 1", 1))
    copy.load_config()
    assert not copy.trusted
    copy.config_file.write_text(text)
    for content in ("", "[]", "{}", '{"config": 3}', '{"config": ["é", 3, ""]}', "[" * 10_000):
        (copy.path / "config" / "signature.json").write_text(content)
        copy.load_config()
        assert not copy.trusted
    shutil.copy(trained / "config" / "signature.json", copy.path / "config" / "signature.json")
    copy.load_config()
    assert copy.trusted
    monkeypatch.setenv("RL_LAB_KEY_FILE", str(tmp_path / "key"))
    (tmp_path / "key").write_bytes(b"0" * 32)
    (tmp_path / "key").chmod(0o644)  # others could have read it
    copy.sign()
    copy.load_config()
    assert not copy.trusted
    (tmp_path / "key").chmod(0o600)
    copy.sign()
    copy.load_config()
    assert copy.trusted


def test_key_is_private_and_training_does_not_need_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RL_LAB_KEY_FILE", str(tmp_path / "home" / "rl_lab" / "run.key"))
    words = ["debug=tiny", "environment=dummy_discrete", *QUIET, "training.total_timesteps=6"]
    train("random_cartpole", [*words, f"run_dir={tmp_path / 'run'}"])
    assert key_file().stat().st_mode & 0o777 == 0o600 and key_file().parent.stat().st_mode & 0o077 == 0
    assert len(key_file().read_bytes()) == 32 and len(list(key_file().parent.iterdir())) == 1
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RL_LAB_KEY_FILE", str(tmp_path / "file" / "run.key"))  # cannot be made
    train("random_cartpole", [*words, f"run_dir={tmp_path / 'unsigned'}"])
    assert not (tmp_path / "unsigned" / "config" / "signature.json").exists()
    assert rl_lab.load_agent(tmp_path / "unsigned").step == 6


def experiments() -> list[str]:
    return sorted(file.stem for file in (CONFIG_FOLDER / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("name", experiments())
def test_every_shipped_experiment_is_loaded_from_anybody(name: str) -> None:
    config = compose_config([f"experiment={name}"])
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(config)
    plain.pop("hydra", None)
    for node in plain["components"].values():  # a saved config is resolved
        for part in (node, node.get("environment") if isinstance(node, dict) else None):
            if isinstance(part, dict) and part.get("environment") == "${environment}":
                part["environment"] = to_plain(config.environment)
                part["seed"] = 0
    if name == "iris_gpt2_frozen":  # names a model on this machine or a hub, which is asked for
        with pytest.raises(UntrustedError, match=r"backbone\.path"):
            check_parts(plain)
        return
    check_parts(plain)
    environment = to_plain(config.environment)
    if environment.get("task") not in (None, "???"):
        check_environment({"environment": environment})


def test_registered_parts_are_named_as_configs_and_classes_name_them() -> None:
    assert len(registered_targets()) > 50
    for target in ("torch.optim.Adam", "torch.optim.adamw.AdamW", "torch.optim.SGD"):
        assert is_registered(target)
    assert is_registered("rl_lab.workflows.dreamer.DreamerWorkflow")
    assert is_registered("rl_lab.workflows.dreamer.workflow.DreamerWorkflow")  # where it is defined
    for target in ("rl_lab.workflows.dreamer.workflow.torch", "rl_lab.workflows.base.WorldModelWorkflow"):
        assert not is_registered(target)


def test_writing_elsewhere_on_resume_is_refused(stranger: Path, tmp_path: Path) -> None:
    change(stranger, put("buffers.replay.folder", str(tmp_path / "elsewhere")))
    with pytest.raises(UntrustedError, match=r"buffers\.replay\.folder"):
        resume(stranger, ["training.total_timesteps=26"])
    change(stranger, put("buffers.replay.folder", None))
    change(stranger, put("wandb.mode", "online"))
    with pytest.raises(UntrustedError, match=r"wandb\.mode is online"):
        resume(stranger, ["training.total_timesteps=26"])
    change(stranger, put("wandb.mode", "disabled"))
    change(stranger, put("launch", {"name": "ray", "address": "192.0.2.1:6379", "collectors": 1}))
    with pytest.raises(UntrustedError, match=r"launch\.name is 'ray'"):
        resume(stranger, ["training.total_timesteps=26"])
    assert resume(stranger, ["training.total_timesteps=26", "launch.name=single"]).counters["env_steps"] >= 26
    assert not (tmp_path / "elsewhere").exists()


def test_saved_configs_have_no_odd_keys() -> None:
    check_saved({"a": {"b": [1, None, "x\ny", 1.5]}, 3: "π"})
    for bad in ({"a": "${b}"}, {"${a}": 1}, {"a": ["???"]}, {None: 1}, {("a",): 1}, {"a": {"b\x07": 1}}):
        with pytest.raises(LabError):
            check_saved(bad)


def test_commands_inside_a_run_folder_do_not_import_its_files(stranger: Path, tmp_path: Path) -> None:
    """`cd RUN; rl-lab eval .`: neither this process nor its workers search the folder for modules."""
    import subprocess

    for name in ("multiprocessing", "imageio_ffmpeg", "wandb", "transformers", "canary_part"):
        (stranger / f"{name}.py").write_text(CANARY.format(mark=str(tmp_path / "mark")))
    change(stranger, put("environment.eval.workers", 1))
    code = "import sys; from rl_lab.cli import main; sys.exit(main(sys.argv[1:]))"
    environment = {**os.environ, "PYTHONPATH": str(Path(rl_lab.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "eval", ".", "--episodes", "1", "--envs", "2"],
        cwd=stranger,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "mark").exists()
    assert json.loads((stranger / "report" / "eval.json").read_text())["episodes"] == 1
