"""The notebooks run from the first cell to the last, in a folder of their own (extras)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebooks_are_stored_without_output(file: Path):
    cells = json.loads(file.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code and cells[0]["cell_type"] == "markdown"
    assert not [cell for cell in code if cell["outputs"] or cell["execution_count"] is not None]
    text = "".join("".join(cell["source"]) for cell in cells)
    assert "rl-lab-wm[" in text and "install rl-lab[" not in text and "hosted.place()" in text


@pytest.mark.extras
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebook_runs(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("RL_LAB_QUICK", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("RL_LAB_KEY_FILE", str(tmp_path / "run.key"))
    notebook = nbformat.read(file, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=280, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    images = [output for output in outputs if "image/png" in output.get("data", {})]
    assert images or file.stem == "own_environment"
    assert list((tmp_path / "outputs").glob("*/*/config.yaml"))
