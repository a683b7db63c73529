"""Presets of IRIS that need a file, continuous actions, the real environment as a world model; exact resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rl_lab
from rl_lab.build import assemble_workflow
from rl_lab.config.compose import compose_config, resolve_config
from rl_lab.errors import ConfigError, LabError
from rl_lab.records import ActionSpec, ActMode, ArraySpec, Batch, Spec
from rl_lab.training import resume
from rl_lab.utils.checkpoint.manager import CheckpointManager
from tests.same_run import assert_same, stopped_at
from tests.workflows.iris_case import SIDE, make_workflow
from tests.workflows.test_iris_variants import BACKBONE, CRITIC, LOSS, QUANTIZER

QUIET = ["logging.progress=off", "logging.tensorboard=false", "debug=tiny", "environment.workers=0"]
SILENT = ["training.evaluate.every_env_steps=null", "training.report.every_env_steps=null"]


def newest(folder: Path) -> dict[str, Any]:
    return CheckpointManager(folder / "checkpoints").load().state


@pytest.fixture(scope="module")
def catch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run on Catch, whose tokenizer other runs load."""
    path = tmp_path_factory.mktemp("catch") / "run"
    rl_lab.train("iris_catch", [*QUIET, *SILENT, "training.total_timesteps=80", f"run_dir={path}"])
    return path


# ---------------------------------------------------------------- presets that need a file


def test_pretrained_tokenizer_stays_while_collecting(catch: Path, tmp_path: Path):
    """The preset's phases on another game: the tokenizer is the loaded one to the end, the rest trains."""
    preset = compose_config(["experiment=iris_pretrained_tokenizer", f"load.path={catch}"])
    assert list(preset.load.components) == ["tokenizer"]
    assert all("tokenizer" in phase.freeze for phase in preset.training.phases)
    words = [
        *QUIET,
        *SILENT,
        "phases=iris_frozen_tokenizer",
        "environment.cells=8",
        "training.total_timesteps=80",
    ]
    words += [f"load.path={catch}", "load.components=[tokenizer]", f"run_dir={tmp_path / 'run'}"]
    run = rl_lab.train("iris_catch", words)
    assert run.counters["updates"] > 0 and run.counters["env_steps"] == 80
    before, after = newest(catch)["components"], newest(tmp_path / "run")["components"]
    assert_same(before["tokenizer"], after["tokenizer"])
    assert any(not torch.equal(value, after["world_model"][k]) for k, value in before["world_model"].items())


def test_tokenizer_of_another_game_is_tuned(catch: Path, tmp_path: Path):
    """Without the frozen phases it is trained on."""
    words = [
        *QUIET,
        *SILENT,
        "environment.cells=8",
        "training.total_timesteps=60",
        f"run_dir={tmp_path / 'run'}",
    ]
    rl_lab.train("iris_catch", [*words, f"load.path={catch}", "load.components=[tokenizer]"])
    before = newest(catch)["components"]["tokenizer"]
    after = newest(tmp_path / "run")["components"]["tokenizer"]
    changed = [key for key, value in before.items() if not torch.equal(value, after[key])]
    assert changed and before.keys() == after.keys()
    assert all(float((after[key] - before[key]).abs().max()) < 0.05 for key in changed)  # it began with them


def test_gpt2_preset(tmp_path: Path):
    pytest.importorskip("transformers")
    from tests.workflows.test_iris_pretrained import write_folder

    write_folder(tmp_path / "gpt2")
    spec = Spec("x", {"image": ArraySpec((3, 64, 64), "uint8")}, ActionSpec("discrete", (), (3,)))
    words = ["experiment=iris_gpt2_frozen", "debug=tiny", "experiment.device=cpu", "algorithm.blocks=6"]
    words.append(f"components.world_model.backbone.path={tmp_path / 'gpt2'}")
    assert compose_config(["experiment=iris_gpt2_frozen"]).algorithm.size.dim == 768
    workflow = assemble_workflow(resolve_config(compose_config(words), spec), spec, torch.device("cpu"))
    names = [name for name, _ in workflow.world_model.backbone.model.named_parameters()]
    assert names and all("ln_" in name for name in names)


# ---------------------------------------------------------------- continuous actions

CONTINUOUS = Spec("arm", {"image": ArraySpec((3, SIDE, SIDE), "uint8")}, ActionSpec("continuous", (2,)))


def continuous_batch(rows: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    no = torch.zeros(2, rows, dtype=torch.bool)
    columns = {
        "obs/image": torch.randint(0, 256, (2, rows, 3, SIDE, SIDE), generator=generator).to(torch.uint8),
        "action": torch.randn(2, rows, 2, generator=generator),
        "reward": torch.randn(2, rows, generator=generator).sign(),
        "terminated": no,
        "truncated": no.clone(),
        "is_first": no.clone(),
    }
    return Batch(columns, mask=torch.ones(2, rows, dtype=torch.bool))


@pytest.mark.parametrize("kind", ["iris", "delta_iris"])
def test_continuous_actions(kind: str):
    words = [
        f"experiment={kind}_catch",
        "debug=tiny",
        "experiment.device=cpu",
        "algorithm.world_model.batch_length=4",
    ]
    words += ["algorithm.size.levels=4", "algorithm.size.tokens=4"] if kind == "iris" else []
    workflow = assemble_workflow(
        resolve_config(compose_config(words), CONTINUOUS), CONTINUOUS, torch.device("cpu")
    )
    assert workflow.world_model.action_table.weight.shape == (workflow.world_model.dim, 2)
    scalars = {"entropy": torch.tensor(0.01), "learning_rate_scale": torch.tensor(1.0)}
    for hook in workflow.hooks().values():
        noise = {
            key: torch.randn(item.shape) if item.kind == "normal" else torch.rand(item.shape)
            for key, item in hook.noise.items()
        }
        metrics = hook.step(continuous_batch(hook.batch.rows), scalars, noise).metrics
        assert all(bool(torch.isfinite(value)) for value in metrics.values())
    batch = continuous_batch(3)
    generator = torch.Generator().manual_seed(0)
    state = workflow.dream_start(batch)
    for _ in range(4):
        action, state = workflow.dream_act(state, ActMode(sample=True, generator=generator))
        assert action.shape == (2, 2)
        state, _ = workflow.dream_step(state, action, generator=generator)
    mode = ActMode(sample=True, epsilon=0.5, generator=generator)
    obs = {"image": batch.obs["image"][:, 0]}
    action, _, _ = workflow.act(obs, workflow.initial_policy_state(2), torch.ones(2, dtype=torch.bool), mode)
    assert action.shape == (2, 2)
    table = workflow.world_model.action_table
    torch.testing.assert_close(table(torch.full((1, 2), 9.0)), table(torch.ones(1, 2)))  # limited


# ---------------------------------------------------------------- the real environment

REAL = ["components/world_model@components.world_model=real_environment"]
REAL += ["optimizers=iris_without_world_model", "phases=iris_real_environment"]


def test_real_environment_steps_itself():
    """Rewards and ends of imagined steps are those that the environment gives for these actions."""
    words = ["experiment=iris_catch", "debug=tiny", "experiment.device=cpu", *REAL]
    config = compose_config(words)
    from rl_lab.run_environments import environment_spec

    spec = environment_spec(config)
    workflow = assemble_workflow(resolve_config(config, spec), spec, torch.device("cpu"))
    assert set(workflow.hooks()) == {"update_tokenizer", "update_actor_critic"}
    model, rows = workflow.world_model, torch.zeros(2, 3)
    empty = Batch({"reward": rows, "is_first": rows.bool(), "terminated": rows.bool()})
    start = model.starts(empty)
    assert start.mask.tolist() == [[False, False, True]] * 2
    state, rewards = model.begin(workflow.tokenizer, start.obs["image"].float() / 255, start.action), []
    for _ in range(8):
        state, outcome = model.advance(
            workflow.tokenizer, state, torch.ones(2, dtype=torch.int64), torch.zeros(2, 1)
        )
        rewards.append(outcome.reward)
    assert {-1.0, 0.0, 1.0} >= set(torch.stack(rewards).flatten().tolist())
    assert float(torch.stack(rewards).abs().sum()) > 0  # balls landed
    again = model.starts(empty)
    assert again.mask.all() and again.action[:, :-1].eq(1).all() and not again.action[:, -1].any()
    with pytest.raises(LabError, match="cannot start from stored rows"):
        workflow.dream_start(start)
    with pytest.raises(ConfigError, match="phases=iris_real_environment"):
        model.compute_loss()


# ---------------------------------------------------------------- resume

VARIANTS = {
    "real_environment": REAL,
    "state_space": [
        f"{BACKBONE}=state_space",
        "components/world_model@components.world_model=iris_frame_at_once",
    ],
    "hinge_gan": [
        f"+{LOSS}=hinge_gan",
        "components.tokenizer.losses.more.channels=4",
        "components.tokenizer.losses.more.layers=1",
        f"{QUANTIZER}=residual",
        "components.tokenizer.quantizer.codes=4",
        f"+components.tokenizer.critic={CRITIC}",
    ],
}
VARIANTS["state_space"].reverse()  # the world model first: its file names a backbone


@pytest.mark.parametrize("name", VARIANTS)
def test_resumed_variants_are_exact(name: str, tmp_path: Path, monkeypatch):
    words = [*QUIET, *SILENT, *VARIANTS[name], "training.total_timesteps=120"]
    rl_lab.train("iris_catch", [*words, f"run_dir={tmp_path / 'full'}"])
    with stopped_at(monkeypatch, 90):  # in the middle of an epoch
        half = rl_lab.train("iris_catch", [*words, f"run_dir={tmp_path / 'half'}"])
    assert half.interrupted
    resume(tmp_path / "half")
    states = [newest(tmp_path / run) for run in ("full", "half")]
    assert_same(*states)
    assert states[0]["phase_state"]["hook_calls"]["update_actor_critic"] > 0


# ---------------------------------------------------------------- diffusers


@pytest.mark.extras
def test_diffusers_tokenizer(tmp_path: Path):
    """A folder of `VQModel` as tokenizer: the same reconstruction, fixed or trained on."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.VQModel(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        latent_channels=4,
        num_vq_embeddings=16,
        norm_num_groups=4,
    )
    model.save_pretrained(tmp_path / "vq")
    words = [
        "components/tokenizer=diffusers",
        f"components.tokenizer.path={tmp_path / 'vq'}",
        "algorithm.size.tokens=64",
    ]
    fixed = make_workflow("iris", *words, "optimizers=iris_without_tokenizer")
    assert set(fixed.hooks()) == {"update_world_model", "update_actor_critic"}
    frame = torch.rand(2, 3, SIDE, SIDE)
    with torch.no_grad():
        wanted = model(frame * 2 - 1).sample / 2 + 0.5
        found = fixed.tokenizer.policy_view(frame)
    torch.testing.assert_close(found, wanted.clamp(0, 1), atol=1e-5, rtol=1e-4)
    from tests.workflows.test_iris_variants import updated

    updated("iris", *words, "components.tokenizer.trained=true")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        make_workflow("iris", words[0], f"components.tokenizer.path={tmp_path}", words[2])


@pytest.mark.parametrize(
    ("experiment", "temperature"),
    [("iris_atari100k", 0.5), ("delta_iris_atari100k", 1.0), ("delta_iris_crafter", 1.0)],
)
def test_evaluations_have_the_authors_temperature(experiment: str, temperature: float):
    """eloialonso/iris config/trainer.yaml: 0.5; vmicheli/delta-iris config: 1."""
    evaluate = compose_config([f"experiment={experiment}"]).training.evaluate
    assert evaluate.sample and evaluate.temperature == temperature
