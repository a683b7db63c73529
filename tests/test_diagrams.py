"""The diagrams of the documentation: each is shown with words, as it is drawn now, and names only code that exists."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from rl_lab.buffers.batches import BatchStream
from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.environments.env_runner import EnvRunner
from rl_lab.environments.vector import VectorEnv
from rl_lab.orchestration.collector import ActRunner, Collector
from rl_lab.orchestration.evaluator import Evaluator
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.orchestration.updates import Capture, HookRunner, Storage
from rl_lab.records import Hook
from rl_lab.workflows.base import WorldModelWorkflow
from tests.test_imports import ALLOWED
from tests.test_imports import SHARED as MAY_ALL_IMPORT

ROOT = Path(__file__).parents[1]
CODE = (
    ActRunner,
    BatchStream,
    Capture,
    Collector,
    EnvRunner,
    Evaluator,
    Hook,
    HookRunner,
    PhaseScheduler,
    ReplayBuffer,
)
CLASSES = {cls.__name__: cls for cls in (*CODE, Storage, VectorEnv)} | {"workflow": WorldModelWorkflow}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("diagrams", ROOT / "scripts" / "dev" / "diagrams.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_diagram_is_shown_and_described(script):
    shown = {}
    for page in (ROOT / "docs").rglob("*.md"):
        for words, name in re.findall(r"!\[([^\]]*)\]\([./]*images/diagrams/(\w+)\.png\)", page.read_text()):
            shown[name] = words
    assert shown.keys() == script.DRAWN.keys()
    assert all(len(words.split()) > 20 for words in shown.values())


@pytest.fixture(scope="module")
def drawn(script: ModuleType, tmp_path_factory) -> tuple[Path, dict[str, list[tuple[str, str]]]]:
    """A folder with all diagrams, and title and text of the boxes of each."""
    folder, found = tmp_path_factory.mktemp("diagrams"), {}
    box = script.Canvas.box

    def record(self, place, title="", text="", **options):
        found[name].append((title, text))
        box(self, place, title, text, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.Canvas, "box", record)
        for name in script.DRAWN:
            found[name] = []
            script.draw(name, folder)
    return folder, found


def test_diagrams_are_those_that_the_script_draws(script, drawn):
    """Nearly: another version of matplotlib may move a pixel."""
    for name in script.DRAWN:
        pictures = []
        for folder in (drawn[0], script.FOLDER):
            with Image.open(folder / f"{name}.png") as image:
                assert image.width == round(144 * script.WIDTH)
                pictures.append(np.asarray(image.convert("L").resize((96, 96))).astype(float))
        assert np.abs(pictures[0] - pictures[1]).mean() < 1, f"{name}: make docs-images"


def test_names_in_the_diagrams_exist(drawn):
    """A title is Class.method, or Class with the method as the first word of the text."""
    found: set[tuple[str, str]] = set()
    for title, text in (*drawn[1]["loop"], *drawn[1]["step"]):
        name, _, method = title.partition(".")
        if name in CLASSES:
            found.add((name, method or re.split(r"\W", text)[0]))
        else:
            assert not re.search(r"[a-z][A-Z]|\w\.\w", title), f"{title} is not known"
    # Their texts begin with other words.
    words = {("ReplayBuffer", "rows"), ("ActRunner", "the"), ("Capture", "one")}
    assert words < found and {name for name, _ in found} == CLASSES.keys()
    for name, method in found - words:
        fields = getattr(CLASSES[name], "__dataclass_fields__", {})
        assert hasattr(CLASSES[name], method) or method in fields, f"{name}.{method}"


def test_diagram_of_imports_has_what_is_allowed(script):
    assert set(script.SHARED) == MAY_ALL_IMPORT
    for name, others in script.IMPORTS.items():
        assert set(others) == ALLOWED[name] - MAY_ALL_IMPORT, name
