"""IRIS and Δ-IRIS with fast forms give the plain numbers: losses and the gradient's size, dreams among what they rest on."""

from __future__ import annotations

import pytest
import torch
from iris_case import KINDS, PARTS, make_workflow, run_hook


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", PARTS)
def test_updates(kind: str, part: str):
    found = []
    for choice in ("on", "off"):
        workflow = make_workflow(kind, f"training.fast_path={choice}")
        assert workflow.fast == (choice == "on")
        found.append(run_hook(workflow, f"update_{part}").metrics)
    quick, plain = found
    assert quick.keys() == plain.keys() and "grad_norm" in plain
    for name, value in plain.items():
        difference = f"{name}: {quick[name]} {value}"
        torch.testing.assert_close(quick[name], value, atol=1e-5, rtol=1e-4, msg=difference)
