from __future__ import annotations

import pytest
import torch

from rl_lab.records import Imagined
from rl_lab.workflows.base import DARKENING, imagined_report


def dream(cont: list[list[float]]) -> Imagined:
    """Two rollouts of two steps with a reward of 1 at each step but the start, and pixels of 100."""
    reward = torch.ones(2, 3)
    frames = torch.full((2, 3, 1, 4, 5), 100, dtype=torch.uint8)
    obs = {"image": frames, "vector": torch.zeros(2, 3, 7)}
    return Imagined({}, torch.zeros(2, 2), reward=reward, cont=torch.tensor(cont), obs=obs)


def test_rollouts_side_by_side_and_darkened_after_end():
    report = imagined_report(dream([[1.0, 1.0, 1.0], [1.0, 0.4, 1.0]]))
    assert report.keys() == {"imagination/image", "imagination_return"}
    video = report["imagination/image"]
    assert video.shape == (3, 1, 4, 10) and video.dtype == torch.uint8
    assert video[:, 0, 0, 0].tolist() == [100, 100, 100]
    assert video[:, 0, 0, 5].tolist() == [100, 100 // DARKENING, 100 // DARKENING]
    # One rollout gets both rewards; the other gets one, and the second times its probability of continuing.
    assert report["imagination_return"] == pytest.approx((2.0 + 1.4) / 2)


def test_discount_is_not_an_end():
    report = imagined_report(dream([[0.5, 0.5, 0.5], [0.5, 0.5, 0.2]]), discount=0.5)
    assert report["imagination/image"][:, 0, 0, 0].tolist() == [100, 100, 100]
    assert report["imagination/image"][2, 0, 0, 5] == 100 // DARKENING
    assert report["imagination_return"] == pytest.approx(2.0)
