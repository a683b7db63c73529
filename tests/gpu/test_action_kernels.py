"""On a GPU: kernels of continuous actions against their plain forms."""

from __future__ import annotations

import pytest
import torch

from rl_lab.components.kernels.sampling import limit_action, sample_normal

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 6), (300, 1), (4, 7, 38)])
def test_actions_and_their_limit(dtype: torch.dtype, shape: tuple[int, ...]):
    torch.manual_seed(0)
    raw = (torch.randn(*shape[:-1], 2 * shape[-1]) * 2.0).to(dtype).cuda()
    noise = torch.randn(shape).cuda()
    results = []
    for on in (False, True):
        action = sample_normal(raw, noise, 0.1, 1.0, 0.7, fast=on)
        results.append((action, limit_action(action * 2.0, dtype, fast=on)))
    torch.testing.assert_close(
        results[1], results[0], rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5
    )
