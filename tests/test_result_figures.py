"""The figures of the documentation: each has its data, and is drawn from it."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
# Drawn by other commands, as dreamer_original_* by compare_original.py: rl-lab bench backbones and tokenizers,
# scripts/og_wm_dream.sh.
OTHERS = {
    "iris_backbones_catch",
    "iris_tokenizers_catch",
    "backbones",
    "tokenizers",
    "og_wm_take_cover_short",
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "result_figures", ROOT / "scripts" / "dev" / "result_figures.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["result_figures"] = module  # its dataclasses need it
    spec.loader.exec_module(module)
    return module


def test_every_figure_of_the_results_has_its_data(script):
    shown = {name for page in PAGES for name in re.findall(r"results/(\w+)\.png", page.read_text())}
    drawn = {*script.FIGURES, script.DEMO, script.SPEEDS}
    unknown = {name for name in shown - drawn - OTHERS if not name.startswith("dreamer_original_")}
    assert unknown == set()
    for name, panels in script.FIGURES.items():
        assert (RESULTS / f"{name}.png").is_file()
        for panel in panels:
            assert (RESULTS / f"{panel.name}.csv").is_file() and (RESULTS / f"{panel.name}.json").is_file()


def test_values_of_one_frame_are_averaged(script):
    rows = [
        {"frames": "8", "r": "2"},
        {"frames": "4", "r": "1"},
        {"frames": "8", "r": "4"},
        {"frames": "9", "r": ""},
    ]
    curve = script.column(rows, "r")
    assert np.array_equal(curve.x, [4, 8]) and np.array_equal(curve.y, [1, 3])


def test_figures_are_drawn(script, tmp_path, capsys):
    script.draw(tmp_path / "a.png", script.FIGURES["tdmpc2_dog_run"])
    script.draw_demo(tmp_path / "b.png")
    script.draw_speeds(tmp_path / "c.png")
    script.draw_curricula(tmp_path / "d.png")
    assert "drawn: " in capsys.readouterr().out
    for name in ("a.png", "b.png", "c.png", "d.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
