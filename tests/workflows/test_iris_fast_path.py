"""IRIS and Δ-IRIS: losses and gradient norms of the fast path equal those of the plain path."""

from __future__ import annotations

import pytest
import torch

from tests.workflows.iris_case import KINDS, PARTS, make_workflow, run_hook


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", PARTS)
def test_fast_update_equals_plain(kind: str, part: str):
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
