"""A missing optimizer is an error: the workflow would count updates without training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import rl_lab
from rl_lab.build import assemble_workflow
from rl_lab.config.checks import CONFIG_FOLDER
from rl_lab.errors import ConfigError
from tests.workflows import dreamer_case, iris_case, og_wm_case, tdmpc_case

TDMPC = OmegaConf.load(CONFIG_FOLDER / "optimizers/tdmpc.yaml")
THREE = OmegaConf.load(CONFIG_FOLDER / "optimizers/dreamer_2023.yaml")


def without(optimizers: Any, *names: str) -> Any:
    return OmegaConf.masked_copy(optimizers, [name for name in optimizers if name not in names])


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "dreamer": (
        lambda: dreamer_case.make_dreamer(optimizers={}),
        r"optimizers\.model is missing: no optimizer trains encoder, rssm, .*, critic \(optimizers found: none\)",
    ),
    "dreamer with one of three": (
        lambda: dreamer_case.make_dreamer(optimizers=without(THREE, "actor")),
        r"optimizers\.model\.modules: no optimizer trains actor \(optimizers found: model, critic\)",
    ),
    "tdmpc without model": (
        lambda: tdmpc_case.make_tdmpc(optimizers=without(TDMPC, "model")),
        r"optimizers\.model is missing: no optimizer trains dynamics, reward_head, critic .*found: encoder\)",
    ),
    "tdmpc without encoder": (
        lambda: tdmpc_case.make_tdmpc(optimizers=without(TDMPC, "encoder")),
        r"optimizers\.model\.modules: no optimizer trains encoder \(optimizers found: model\)",
    ),
    "tdmpc without policy": (
        lambda: tdmpc_case.make_tdmpc(optimizers=without(TDMPC, "policy")),
        r"optimizers\.policy is missing and this workflow needs it: .* Known: encoder, model",
    ),
    "iris": (
        lambda: iris_case.make_workflow("iris", "~optimizers.world_model"),
        r"optimizers\.world_model is missing and this workflow needs it: .* Known: actor_critic, tokenizer",
    ),
    "iris with another part": (
        lambda: iris_case.make_workflow("iris", "optimizers.tokenizer.modules=[world_model]"),
        r"optimizers\.tokenizer\.modules: no optimizer trains tokenizer",
    ),
    "og_wm": (
        lambda: og_wm_case.make_workflow(optimizers={}),
        r"optimizers\.vae is missing and this workflow needs it: .* Known: none",
    ),
    "null": (
        lambda: og_wm_case.make_workflow(optimizers__vae=None),
        r"optimizers\.vae is None: it must be a mapping",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_missing_optimizer_is_an_error(case: str):
    make, message = CASES[case]
    with pytest.raises(ConfigError, match=f"^{message}"):
        make()


def test_acting_needs_no_optimizer():
    config = dreamer_case.dreamer_config(optimizers={})
    workflow = assemble_workflow(config, dreamer_case.vector_spec(), torch.device("cpu"), optimizers=False)
    assert workflow.optimizers == []


def test_error_before_run_folder_is_created(tmp_path: Path):
    words = ["experiment=dreamer_cartpole", "debug=tiny", "~optimizers.model", f"run_dir={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match=r"^optimizers\.model is missing: "):
        rl_lab.train(None, words, say=lambda _: None)
    assert not (tmp_path / "run").exists()
