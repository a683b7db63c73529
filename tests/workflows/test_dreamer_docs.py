"""docs/algorithms/dreamer.md matches the configs, and what it says about differences from the original is so."""

from __future__ import annotations

import itertools
import re
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from omegaconf import DictConfig, OmegaConf

from rl_lab.components.nn.actions import make_policy
from rl_lab.config.checks import CONFIG_FOLDER
from rl_lab.config.compose import compose_config
from rl_lab.records import ActMode
from tests.config.test_kept_configs import leaves
from tests.workflows.dreamer_case import CONTINUOUS, make_dreamer, vector_spec
from tests.workflows.test_tdmpc_docs import same

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "algorithms" / "dreamer.md").read_text()
TEXT = " ".join(PAGE.split())


@pytest.mark.parametrize(("column", "experiment"), [(0, "dreamer_atari"), (1, "dreamer_cartpole")])
def test_documented_values_match_configs(column: int, experiment: str):
    rows = re.findall(r"^\|[^|]+\| `([\w.]+)`[^|]* \| ([^|]+) \| ([^|]+) \|$", PAGE, re.M)
    assert len(rows) > 30
    config = compose_config([f"experiment={experiment}"])
    for key, *stated in rows:
        value, text = OmegaConf.select(config, key), stated[column].strip()
        assert text == "by size" or same(text, value), f"{key} is {value} in {experiment}, not {text}"


# Experiments by version, with the words that a cell uses for them.
VERSIONS = {
    "v1": {"DMC": ["v1_dmc_vision"]},
    "v2": {"Atari": ["v2_atari"], "Crafter": ["v2_crafter"], "DMC": ["v2_dmc_vision"]},
    "2023": {
        "Atari 100k": ["atari100k_2023"],
        "Crafter": ["crafter_2023"],
        "DMC": ["dmc_proprio_2023", "dmc_vision_2023"],
    },
    "2024": {
        "Atari": ["atari_2024"],
        "Atari 100k": ["atari100k_2024"],
        "DMC": ["dmc_proprio_2024", "dmc_vision_2024"],
    },
    "today": {
        "Atari": ["atari"],
        "Atari 100k": ["atari100k"],
        "Crafter": ["crafter"],
        "DMC": ["dmc_proprio", "dmc_vision"],
    },
}
ELSEWHERE = ("by size", "by experiment")  # the sizes' files, the table of experiments


@cache
def composed(name: str) -> DictConfig:
    config = compose_config([f"experiment=dreamer_{name}"])
    OmegaConf.set_struct(config, False)
    return config


def version_rows() -> list[tuple[list[str], list[str]]]:
    """Keys and cells (v1, v2, 2023, 2024, today) of the tables of versions; an empty cell is that of today."""
    text = PAGE.partition("\n## Versions")[2].partition("\n**Switches that no version uses.**")[0]
    rows = []
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| Switch"):
            _, keys, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            assert len(cells) == len(VERSIONS), line
            rows.append((re.findall(r"`([^`]+)`", keys), [cell or cells[-1] for cell in cells]))
    return rows


def by_experiment(cell: str, version: str) -> dict[str, str]:
    """The value that a cell states for each experiment: `Atari, Crafter 1; others 2`, or one for all."""
    names = sorted((*VERSIONS[version], "others"), key=len, reverse=True)
    named = rf"({'|'.join(names)})(?:, ({'|'.join(names)}))* (?!,)"
    if not re.match(named, cell):
        return {name: cell for found in VERSIONS[version].values() for name in found}
    stated: dict[str, str] = {}
    for part in cell.split("; "):
        match = re.match(rf"((?:(?:{'|'.join(names)})(?:, )?)+) (.+)$", part)
        assert match, f"{cell}: {part}"
        for word in match[1].split(", "):
            listed = VERSIONS[version].get(word, [])
            others = [name for found in VERSIONS[version].values() for name in found if name not in stated]
            stated |= dict.fromkeys(others if word == "others" else listed, match[2])
    assert set(stated) == {name for found in VERSIONS[version].values() for name in found}, cell
    return stated


def without_effect(key: str, config: DictConfig) -> bool:
    """Whether a key is absent, or another key switches it off."""
    if OmegaConf.select(config, key) is None:
        return True
    rssm, critic, actor = config.components.rssm, config.controllers.critic, config.controllers.actor
    squared_error, no_slow_critic = (
        config.algorithm.size.bins == 0,
        not (critic.slow_targets or critic.slow_weight),
    )
    return {
        "components.rssm.std_form": rssm.latent != "gaussian",
        "components.rssm.min_std": rssm.latent != "gaussian",
        "components.rssm.unimix": rssm.latent == "gaussian",
        "components.rssm.action_layers": rssm.cell != "block_gru",
        "algorithm.size.blocks": rssm.cell != "block_gru",
        "algorithm.bias": "+" not in config.algorithm.layer,  # layers without a norm have one
        "components.reward_head.space": squared_error,
        "controllers.critic.space": squared_error,
        "algorithm.slow_critic_rate": no_slow_critic,
        "controllers.critic.slow_every": no_slow_critic,
        "controllers.actor.init_std": actor.distribution == "bounded_normal",
        "controllers.actor.unimix": actor.distribution == "tanh_normal",  # V1 has continuous actions only
    }.get(key, False)


def states(cell: str, key: str, config: DictConfig) -> bool:
    """Whether a cell has the value of a key."""
    if cell in ELSEWHERE:
        return key.startswith(("algorithm.size.", "components.")) or key == "algorithm.train_ratio"
    if cell == "-":
        return without_effect(key, config)
    value = OmegaConf.select(config, key)
    if key.endswith("._target_"):
        return str(value).rpartition(".")[2] == cell
    if cell.endswith(" / lr"):
        rate = OmegaConf.select(config, key.rpartition(".")[0]).lr
        return float(value) == pytest.approx(float(cell.removesuffix(" / lr")) / rate)
    if cell == "null" or value is None:
        return cell == "null" and value is None
    if OmegaConf.is_dict(value):
        return yaml.safe_load(cell) == OmegaConf.to_container(value)
    return same(cell, value)


@pytest.mark.parametrize("version", VERSIONS)
def test_table_of_versions(version: str):
    rows, column = version_rows(), list(VERSIONS).index(version)
    assert len(rows) > 70
    wrong = []
    for keys, cells in rows:
        for name, cell in by_experiment(cells[column], version).items():
            wrong += [
                f"{key} is {OmegaConf.select(composed(name), key)} in dreamer_{name}, not {cell}"
                for key in keys
                if not states(cell, key, composed(name))
            ]
    assert wrong == []


def test_table_of_versions_has_every_switch():
    """Each key of a version's file, and of its experiments, has a row."""
    rows = {key for keys, _ in version_rows() for key in keys}
    names = [f"algorithm/dreamer_{version}" for version in VERSIONS if version != "today"]
    names += [
        f"experiment/dreamer_{name}"
        for found in VERSIONS.values()
        for each in found.values()
        for name in each
    ]
    used = set()
    for name in names:
        file = OmegaConf.to_container(OmegaConf.load(CONFIG_FOLDER / f"{name}.yaml"))
        for section in ("algorithm", "components", "controllers", "optimizers"):
            used |= {key for key, _ in leaves(file.get(section, {}), section)}
    # The bias of a version is that of all layers; the base rate is that of the first optimizer; sizes have a base.
    beside = {
        "algorithm.learning_rate",
        "algorithm.grad_acc_steps",
        "algorithm.size.bin_limit",
        "algorithm.size.layers",
    }
    missing = {key for key in used - rows - beside if not key.startswith("algorithm.clip_norms.")}
    assert missing - {"components", "controllers", "optimizers", "algorithm"} == set()


def test_switches_that_no_version_uses():
    """The first value in the table is that of every version, if it has the key."""
    text = PAGE.partition("\n**Switches that no version uses.**")[2].partition("\n`slowtar`")[0]
    rows = re.findall(r"^\| (`[^|]+`) \| `[^|]+` \| ([\w.]+)[,:]? ?[^|]*\|$", text, re.M)
    assert len(rows) == 15
    names = [name for found in VERSIONS.values() for each in found.values() for name in each]
    for keys, default in rows:
        for key, name in itertools.product(re.findall(r"`([\w.]+)`", keys), names):
            optimizer = composed(name).optimizers.model._target_
            if not key.startswith("optimizers.") or optimizer.endswith("LaProp"):
                assert OmegaConf.select(composed(name), key, default="absent") != "absent"
                assert states(default, key, composed(name)), f"{key} in {name} is not {default}"


def test_presets_say_what_the_paper_has():
    """The train ratio of Atari 100k, what is not plotted; the 2024 presets have the agent of 2024."""
    said = {path.stem: path.read_text() for path in (CONFIG_FOLDER / "experiment").glob("dreamer_*.yaml")}
    assert "ratio 128" in said["dreamer_atari100k"]
    assert compose_config(["experiment=dreamer_atari100k"]).algorithm.train_ratio == 256
    for task in ("dmc_proprio", "dmc_vision"):
        assert "Not what the paper plots" in said[f"dreamer_{task}"]
    for task in ("atari", "atari100k", "dmc_proprio", "dmc_vision"):  # the agent of 2024, too
        now, of_2024 = (compose_config([f"experiment=dreamer_{task}{suffix}"]) for suffix in ("", "_2024"))
        for config, unimix, first in ((now, 0.0, "predicted"), (of_2024, 0.01, "real")):
            assert (config.controllers.actor.unimix, config.algorithm.first_continue) == (unimix, first)
    assert "norms and the latents' softmax are in float32 (the original: bfloat16)" in TEXT


def test_deter_is_float32_and_stored_as_bfloat16():
    workflow = make_dreamer(training__precision="bfloat16")
    obs = {"vector": torch.randn(3, 4)}
    mode = ActMode(generator=torch.Generator().manual_seed(0))
    _, state, columns = workflow.act(
        obs, workflow.initial_policy_state(3), torch.ones(3, dtype=torch.bool), mode
    )
    assert state["deter"].dtype == torch.float32 and columns["deter"].dtype == torch.bfloat16
    assert workflow.policy_columns()["stoch"].dtype == "uint8"
    assert "`deter` is float32 in the scan, in imagination and when acting" in TEXT


def test_policy_deviation_shares_the_output_layer_and_is_bounded():
    """Adaptive clipping sees mean and deviation as one tensor; bounds 0.1 and 1."""
    actor = make_dreamer(vector_spec(CONTINUOUS)).actor
    outputs = {
        tuple(p.shape) for p in actor.parameters() if p.ndim == 2 and p.shape[0] == 2 * CONTINUOUS.shape[0]
    }
    assert len(outputs) == 1
    policy = make_policy(CONTINUOUS)
    raw = torch.cat([torch.zeros(2, 2), torch.tensor([[-50.0, 50.0]] * 2)], -1)
    samples = torch.stack(
        [policy.sample(raw, torch.full((2, 2), 1.0)), policy.sample(raw, torch.zeros(2, 2))]
    )
    assert torch.allclose(samples[0] - samples[1], torch.tensor([0.1, 1.0]).expand(2, 2), atol=1e-4)
    assert "`controllers.actor.min_std` (null: 0.1) and `max_std` (1)" in TEXT
    narrow = make_policy(CONTINUOUS, min_std=0.2, max_std=0.5)
    spread = narrow.sample(raw, torch.full((2, 2), 1.0)) - narrow.sample(raw, torch.zeros(2, 2))
    assert torch.allclose(spread, torch.tensor([0.2, 0.5]).expand(2, 2), atol=1e-4)


@pytest.mark.parametrize(
    "words",
    [
        "The output layers of heads and policy have float32 weights",  # test_heads.py
        "Rows of resets do not count as steps for the train ratio",  # test_collector.py
        "Online sequences start at the first row of a stream",  # test_samplers.py
        "sequences of the prefill phase are not queued",
        "Crafter's worlds and Atari's sticky actions do not depend on earlier episodes",
        "their current categorical head ignores it",
        "DreamerV2 3.8, PPO 2.9, Rainbow 2.5",
    ],
)
def test_other_differences_are_told(words: str):
    assert words in TEXT
