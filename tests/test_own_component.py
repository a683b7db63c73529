"""The encoder of docs/howto/own_component.md, extracted from the page: chosen by name, trained, evaluated."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import rl_lab
from rl_lab.config.compose import compose_config
from rl_lab.records import ActionSpec, ArraySpec, Spec

PAGE = Path(__file__).resolve().parents[1] / "docs" / "howto" / "own_component.md"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for path, text in re.findall(r"^`([\w/.]+)`:\n\n```\w+\n(.*?)^```", PAGE.read_text(), re.M | re.S):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_choice_replaces_the_encoder_and_trains(project: Path):
    config = compose_config(["components/encoder=sine", "components.encoder.frequencies=5"])
    assert set(config.components.encoder) == {"_target_", "units", "frequencies"}
    run = rl_lab.train(
        "dreamer_cartpole", ["components/encoder=sine", "debug=tiny", "logging.progress=off", "run_dir=run"]
    )
    assert run.counters["updates"] > 0
    assert rl_lab.evaluate("run", episodes=2, video=False)["episodes"] == 2


def test_encoder_on_leading_axes(project: Path):
    from my_parts import SineEncoder

    spec = Spec("x", {"vector": ArraySpec((3,), "float32")}, ActionSpec("discrete", (), (2,)))
    encoder = SineEncoder(spec=spec, units=8, frequencies=2)
    vector = torch.randn(4, 5, 3)
    assert encoder({"vector": vector}).shape == (4, 5, 8)
    inputs = torch.cat([vector, torch.sin(vector[..., None] * torch.tensor([1.0, 2.0])).flatten(-2)], -1)
    assert torch.equal(encoder({"vector": vector}), encoder.mlp(inputs))
