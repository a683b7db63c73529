from __future__ import annotations

import pytest
import torch

from rl_lab.records import Imagined
from rl_lab.workflows.base import DIM, imagined_report


def dream(cont: list[list[float]]) -> Imagined:
    """Two dreams of two steps, in which every step but the start brings a reward of 1 and every pixel is 100."""
    reward = torch.ones(2, 3)
    frames = torch.full((2, 3, 1, 4, 5), 100, dtype=torch.uint8)
    obs = {"image": frames, "vector": torch.zeros(2, 3, 7)}
    return Imagined({}, torch.zeros(2, 2), reward=reward, cont=torch.tensor(cont), obs=obs)


def test_dreams_lie_side_by_side_and_are_dark_once_they_have_ended():
    report = imagined_report(dream([[1.0, 1.0, 1.0], [1.0, 0.4, 1.0]]))
    assert report.keys() == {"imagination/image", "imagination_return"}
    film = report["imagination/image"]
    assert film.shape == (3, 1, 4, 10) and film.dtype == torch.uint8
    assert film[:, 0, 0, 0].tolist() == [100, 100, 100]
    assert film[:, 0, 0, 5].tolist() == [100, 100 // DIM, 100 // DIM]
    # One dream is paid twice; the other once, and then with the chance that it still goes on.
    assert report["imagination_return"] == pytest.approx((2.0 + 1.4) / 2)


def test_the_discount_is_no_end():
    report = imagined_report(dream([[0.5, 0.5, 0.5], [0.5, 0.5, 0.2]]), discount=0.5)
    assert report["imagination/image"][:, 0, 0, 0].tolist() == [100, 100, 100]
    assert report["imagination/image"][2, 0, 0, 5] == 100 // DIM
    assert report["imagination_return"] == pytest.approx(2.0)
