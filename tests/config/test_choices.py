"""A choice of a group replaces the part that an algorithm's file writes out; sizes belong to an algorithm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from rl_lab.build import build_parts
from rl_lab.config.checks import CONFIG_FOLDER
from rl_lab.config.compose import compose_config, known_choices, resolve_config
from rl_lab.config.multirun import multirun
from rl_lab.errors import ConfigError
from rl_lab.records import ActionSpec, ArraySpec, Spec
from rl_lab.training import RunResult

# group -> an experiment that has such a part, and where
PLACES = {
    "components/backbone": ("iris_catch", "components.world_model.backbone"),
    "components/decoder": ("dreamer_catch", "components.decoder"),
    "components/dynamics_model": ("tdmpc2_pendulum", "components.dynamics"),
    "components/encoder": ("dreamer_dmc_proprio_2023", "components.encoder"),
    "components/head": ("tdmpc2_cartpole", "components.termination_head"),
    "components/quantizer": ("iris_catch", "components.tokenizer.quantizer"),
    "components/reconstruction_loss": ("iris_catch", "components.tokenizer.losses.l1"),
    "components/representation_learner": ("dreamer_catch", "components.rssm"),
    "components/return_computer": ("dreamer_catch", "components.return_computer"),
    "components/task_embedding": ("tdmpc2_multitask", "components.task_embedding"),
    "components/tokenizer": ("iris_catch", "components.tokenizer"),
    "components/trunk": ("iris_catch", "controllers.actor_critic.trunk"),
    "components/world_model": ("delta_iris_catch", "components.world_model"),
    "controller": ("tdmpc2_cartpole", "controllers.policy"),
    "buffer": ("iris_catch", "buffers.replay"),
    "optimizers": ("tdmpc2_pendulum", "optimizers"),
    "workflow": ("iris_catch", "workflow"),
}
CHOICES = [(group, file.stem) for group in PLACES for file in sorted((CONFIG_FOLDER / group).glob("*.yaml"))]


def plain(config: Any, path: str = "") -> Any:
    node = OmegaConf.select(config, path) if path else config
    return OmegaConf.to_container(node) if OmegaConf.is_config(node) else node


def test_every_group_has_a_place():
    groups = {file.parent.relative_to(CONFIG_FOLDER).as_posix() for file in CONFIG_FOLDER.rglob("*.yaml")}
    others = {".", "algorithm", "debug", "environment", "experiment", "launch", "phases", "suite"}
    assert {group for group in groups if not group.startswith("size/")} - others == set(PLACES)


@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_choice_replaces_the_whole_part(group: str, name: str):
    experiment, place = PLACES[group]
    stored = name.startswith(("offline", "zarr"))
    own_place = {"buffer": "buffers.offline" if stored else place}.get(group, place)
    word = f"{group}={name}" if group in ("buffer", "optimizers", "workflow") else f"{group}@{place}={name}"
    config = compose_config([f"experiment={experiment}", ("+" if own_place != place else "") + word])
    expected = OmegaConf.load(CONFIG_FOLDER / group / f"{name}.yaml")
    assert isinstance(expected, DictConfig)
    chosen = plain(config, own_place)
    parts = {
        str(key)
        for key in ("quantizer", "losses", "backbone", "trunk")
        if "defaults" in expected and key in chosen
    }
    assert chosen.keys() - parts == expected.keys() - parts - {"defaults"}
    assert {key: chosen[key] for key in chosen.keys() - parts} == {
        key: plain(expected)[key] for key in chosen.keys() - parts
    }
    if parts:  # chosen by the part's own file
        alone = compose_config(["experiment=random_cartpole", f"+{group}@alone={name}"])
        assert chosen == plain(alone, "alone")


@pytest.mark.parametrize("name", known_choices("phases"))
def test_phases_can_be_chosen(name: str):
    config = compose_config(["experiment=dreamer_catch", f"phases={name}"])
    assert plain(config, "training.phases") == plain(
        OmegaConf.load(CONFIG_FOLDER / f"phases/{name}.yaml"), "phases"
    )


SPEC = Spec("image", {"image": ArraySpec((3, 8, 8), "uint8")}, ActionSpec("discrete", (), (3,)))
VECTOR = Spec("vector", {"vector": ArraySpec((4,), "float32")}, ActionSpec("discrete", (), (2,)))


@pytest.mark.parametrize(
    ("experiment", "spec", "word", "place", "kind"),
    [
        ("dreamer_cartpole", VECTOR, "components/encoder=dict", "encoder", "DictEncoder"),
        ("dreamer_cartpole", VECTOR, "components/return_computer=n_step", "return_computer", "NStepReturns"),
        ("iris_catch", SPEC, "components/return_computer=discounted", "return_computer", "DiscountedReturns"),
        (
            "iris_catch",
            SPEC,
            "components/quantizer@components.tokenizer.quantizer=ema",
            "tokenizer.quantizer",
            "EMAQuantizer",
        ),
    ],
)
def test_swapped_parts_are_built(experiment: str, spec: Spec, word: str, place: str, kind: str):
    config = resolve_config(compose_config([f"experiment={experiment}", "debug=tiny", word]), spec)
    part, _ = build_parts(config, spec, torch.device("cpu"))
    for name in place.split("."):
        part = getattr(part, name)
    assert type(part).__name__ == kind


def test_outer_and_inner_choice_in_any_order():
    words = ["components/quantizer@components.tokenizer.quantizer=fsq", "components/tokenizer=delta_iris"]
    for order in (words, words[::-1]):
        tokenizer = compose_config(["experiment=iris_catch", *order]).components.tokenizer
        assert tokenizer._target_.endswith("DeltaTokenizer")
        assert plain(tokenizer, "quantizer") == {
            "_target_": "rl_lab.components.nn.quantizers.FSQ",
            "levels": [8, 8, 8],
        }


def test_choice_without_a_place_is_an_error():
    with pytest.raises(ConfigError, match="components/decoder is not a known key"):
        compose_config(["experiment=iris_catch", "components/decoder=dict"])


# ---------------------------------------------------------------- defaults lists


def write(folder: Path, name: str, defaults: list[str], content: str = "") -> None:
    file = folder / "experiment" / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"  - {line}\n" for line in defaults)
    file.write_text(
        f"# @package _global_\ndefaults:\n{lines}  - _self_\nexperiment: {{name: mine}}\n{content}"
    )


# algorithm -> its parts, chosen one by one as experiments did before they stood in its file
ONE_BY_ONE = {
    "dreamer": [
        "/workflow: dreamer",
        "/components/encoder@components.encoder: dict",
        "/components/representation_learner@components.rssm: rssm",
        "/components/decoder@components.decoder: dict",
        "/components/head@components.reward_head: reward",
        "/components/head@components.continue_head: continue",
        "/components/return_computer@components.return_computer: td_lambda",
        "/controller@controllers.actor: dreamer_actor",
        "/controller@controllers.critic: dreamer_critic",
        "/optimizers: dreamer",
        "/buffer: world_model_sequence",
        "/phases: joint",
    ],
    "tdmpc2": [
        "/workflow: tdmpc",
        "/components/encoder@components.encoder: tdmpc_state",
        "/components/dynamics_model@components.dynamics: latent",
        "/components/head@components.reward_head: latent_reward",
        "/controller@controllers.critic: tdmpc_critic",
        "/controller@controllers.policy: tdmpc_policy",
        "/controller@controllers.planner: mpc_planner",
        "/optimizers: tdmpc",
        "/buffer: world_model_sequence",
        "/phases: seeded",
    ],
    "tdmpc": ["/buffer: prioritized"],
    "iris": [
        "/workflow: iris",
        "/components/tokenizer@components.tokenizer: iris",
        "/components/world_model@components.world_model: iris",
        "/components/return_computer@components.return_computer: td_lambda",
        "/controller@controllers.actor_critic: iris",
        "/optimizers: iris",
        "/phases: iris",
    ],
    "delta_iris": [
        "/workflow: iris",
        "/components/tokenizer@components.tokenizer: delta_iris",
        "/components/world_model@components.world_model: delta_iris",
        "/components/return_computer@components.return_computer: td_lambda",
        "/controller@controllers.actor_critic: delta_iris",
        "/optimizers: iris",
        "/phases: delta_iris",
    ],
    "og_wm": [
        "/workflow: og_wm",
        "/components/representation_learner@components.vae: conv_vae",
        "/components/dynamics_model@components.mdn_rnn: mdn_rnn",
        "/controller@controllers.controller: linear",
        "/controller@controllers.cma_es: cma_es",
        "/controller@controllers.explorer: explorer",
        "/optimizers: og_wm",
        "/buffer: world_model_sequence",
        "/phases: og_wm",
    ],
    "dreamer_mpc": ["/workflow: dreamer_mpc"],
    "diffusion_policy": ["/workflow: diffusion_policy"],
    "diffusion_policy_transformer": ["/workflow: diffusion_policy"],
    "behaviour_cloning": ["/workflow: behaviour_cloning"],
    "dreamer_v1": ["/buffer: world_model_sequence"],
    "dreamer_v2": ["/buffer: world_model_sequence"],
    "dreamer_2023": ["/buffer: world_model_sequence"],
    "dreamer_2024": ["/optimizers: dreamer", "/phases: joint"],
    "plan2explore": ["/buffer: world_model_sequence"],
}


def test_every_algorithm_is_listed():
    assert set(ONE_BY_ONE) == set(known_choices("algorithm"))


@pytest.mark.parametrize("algorithm", ONE_BY_ONE)
def test_parts_of_an_algorithm_are_those_of_the_groups(algorithm: str, tmp_path: Path):
    """An algorithm's file and the groups have each part twice: both are the same."""
    write(tmp_path, "short", [f"/algorithm: {algorithm}", "/environment: cartpole"])
    write(tmp_path, "long", [f"/algorithm: {algorithm}", *ONE_BY_ONE[algorithm], "/environment: cartpole"])
    short, long = (
        OmegaConf.to_container(compose_config([f"experiment={name}"], config_dirs=[tmp_path]), resolve=True)
        for name in ("short", "long")
    )
    assert short == long


def test_experiment_overrides_what_its_base_has_inline(tmp_path: Path):
    """`override` works for a choice that no defaults list names, also twice, and next to an ordinary one."""
    overrides = [
        "override /environment: pendulum",
        "override /components/return_computer@components.return_computer: n_step",
        "override /phases: staged",
    ]
    write(tmp_path, "mine", ["dreamer_catch", *overrides], "components: {return_computer: {steps: 7}}")
    config = compose_config(["experiment=mine"], config_dirs=[tmp_path])
    assert plain(config, "components.return_computer") == {
        "_target_": "rl_lab.components.return_computers.n_step.NStepReturns",
        "steps": 7,
    }
    assert config.training.phases[0].name == "look_around"
    assert config.environment.task == "Pendulum-v1"
    write(tmp_path, "ours", ["mine", "override /phases: joint"])
    later = compose_config(["experiment=ours"], config_dirs=[tmp_path])
    assert [phase.name for phase in later.training.phases] == ["joint"]
    assert later.components.return_computer.steps == 7
    typed = compose_config(["experiment=ours", "phases=prefilled"], config_dirs=[tmp_path])
    assert [phase.name for phase in typed.training.phases] == ["seed", "joint"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("/recipe: dreamer", "recipe=dreamer does not exist: use `- /algorithm: dreamer`"),
        (
            "/size@algorithm.size: 12m",
            "size=12m does not exist. Did you mean /size@algorithm.size: dreamer/12m",
        ),
        ("override /tdmpc_size: 5m", "tdmpc_size"),
    ],
)
def test_former_groups_name_the_present_ones(line: str, sentence: str, tmp_path: Path):
    write(tmp_path, "former", ["/algorithm: dreamer", "/environment: cartpole", line])
    with pytest.raises(ConfigError, match=sentence):
        compose_config(["experiment=former"], config_dirs=[tmp_path])


# ---------------------------------------------------------------- sizes


SIZED = {
    "dreamer": "dreamer_catch",
    "tdmpc2": "tdmpc_dmc",
    "iris": "iris_catch",
    "delta_iris": "delta_iris_catch",
    "og_wm": "og_wm_catch",
    "dreamer_mpc": "dreamer_mpc_cartpole",
    "diffusion_policy": "diffusion_policy_lunarlander",
    "diffusion_policy_transformer": "diffusion_policy_transformer_pusht_state",
    "behaviour_cloning": "behaviour_cloning_lunarlander",
    "dreamer_v1": "dreamer_v1_dmc_vision",
    "dreamer_v2": "dreamer_v2_atari",
    "dreamer_2023": "dreamer_crafter_2023",
    "plan2explore": "plan2explore_dmc_vision",
}


@pytest.mark.parametrize("size", known_choices("size"))
def test_every_size_of_an_algorithm(size: str):
    algorithm, _, name = size.partition("/")
    config = compose_config([f"experiment={SIZED[algorithm]}", f"size={name}"])
    file = OmegaConf.load(CONFIG_FOLDER / f"size/{size}.yaml")
    if name != "tiny" and "defaults" in file:  # a preset: another size, and settings that go with it
        base = OmegaConf.load(CONFIG_FOLDER / f"{file.defaults[0].removeprefix('/')}.yaml")
        assert plain(config, "algorithm.size") == plain(base)
        assert config.algorithm.grad_acc_steps == file.algorithm.grad_acc_steps
    elif name != "tiny":
        assert plain(config, "algorithm.size") == plain(file)
    else:
        widths = plain(file, "algorithm.size") or {}
        assert {key: config.algorithm.size[key] for key in widths} == widths
        tiny = compose_config([f"experiment={SIZED[algorithm]}", "debug=tiny"])
        assert plain(tiny, "algorithm") == plain(config, "algorithm")


def test_sizes_are_inherited():
    """TD-MPC is based on TD-MPC2, and Dreamer with a planner on Dreamer."""
    assert compose_config(["experiment=tdmpc_dmc", "size=19m"]).algorithm.size.units == 1024
    assert compose_config(["experiment=dreamer_mpc_cartpole", "size=12m"]).algorithm.size.deter == 2048
    tiny = compose_config(["experiment=dreamer_mpc_cartpole", "size=12m", "debug=tiny"]).algorithm
    assert (tiny.size.deter, tiny.plan.samples) == (16, 8)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["experiment=iris_catch", "size=12m"],
            "size=12m does not exist for iris. Known: atari, catch, tiny",
        ),
        (["size=13m"], "size=13m does not exist for dreamer. Did you mean .*'12m'"),
        (["experiment=tdmpc_dmc", "size=6m"], "does not exist for tdmpc. .*19m_mt30"),
        (["experiment=tdmpc_dmc", "tdmpc_size=5m"], "tdmpc_size=5m: use size=5m"),
    ],
)
def test_unknown_size_is_an_error(words: list[str], sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        compose_config(words)


def test_debug_knows_no_algorithm():
    """A debug run of a workflow without a size `tiny` keeps its own numbers."""
    content = OmegaConf.load(CONFIG_FOLDER / "debug" / "tiny.yaml")
    assert set(content) == {"environment", "training", "debug"}


def test_sweep_over_algorithms_has_sizes_of_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    seen = []

    def record(config: Any, overrides: list[str], **options: Any) -> RunResult:
        seen.append(
            (
                config.experiment.name,
                config.algorithm.size.units,
                config.components.encoder._target_,
                overrides,
            )
        )
        return RunResult(tmp_path, interrupted=False)

    monkeypatch.setattr("rl_lab.training.train_config", record)
    words = ["experiment=dreamer_catch,tdmpc2_pendulum", "size=1m", "components/encoder=mlp"]
    multirun([*words, f"hydra.sweep.dir='{tmp_path}'"])
    assert [(name, units, target.rpartition(".")[2]) for name, units, target, _ in seen] == [
        ("dreamer_catch", 64, "MLPEncoder"),
        ("tdmpc2_pendulum", 384, "MLPEncoder"),
    ]
    assert seen[1][3] == ["experiment=tdmpc2_pendulum", "size=1m", "components/encoder=mlp"]
