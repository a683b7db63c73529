"""A batch speaks one convention: rows with singular names, or transitions with plural names."""

from __future__ import annotations

import pytest
import torch

from rl_lab.errors import BatchNameError, LabError
from rl_lab.records import Batch, Transitions


def make_rows(size: int = 3, rows: int = 5) -> Batch:
    count = torch.arange(size * rows).view(size, rows)
    never = torch.zeros(size, rows, dtype=torch.bool)
    return Batch(
        {
            "obs/vector": count.float().unsqueeze(-1),
            "action": count,
            "reward": count.float(),
            "terminated": count % rows == rows - 1,
            "truncated": never,
            "is_first": never.clone(),
            "latent": count.float(),
        }
    )


def test_reward_and_rewards_are_of_different_steps() -> None:
    rows = make_rows()
    plain = rows.transitions()
    assert torch.equal(plain["rewards"], rows["reward"][:, 1:])
    assert torch.equal(plain.actions, rows.action[:, :-1])
    assert torch.equal(plain["terminated"], rows.terminated[:, 1:])
    assert torch.equal(plain["dones"], plain["terminated"] | plain["truncated"])
    assert torch.equal(plain["next_observations"], rows.obs["vector"][:, 1:])
    assert torch.equal(plain["latent"], rows["latent"][:, :-1])  # stored with the observation
    assert plain.rows is rows and plain.transitions() is plain


def test_length_is_the_number_of_sequences() -> None:
    rows = make_rows(size=3)
    for batch in (rows, rows.transitions()):
        assert len(batch) == 3
        assert len(batch.keys()) == len(list(batch)) == len(dict(batch)) == len(batch.items())
        assert next(iter(batch.values())) is batch[next(iter(batch))]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("rewards", r"use batch.transitions\(\)\['rewards'\], or the row's batch\['reward'\]"),
        ("observations", r"use batch.transitions\(\)\['observations'\], or the row's batch\['obs/…'\]"),
        ("dones", r"use batch.transitions\(\)\['dones'\]$"),
        ("rewad", "Did you mean 'reward'"),
    ],
)
def test_rows_refuse_names_of_transitions(name: str, hint: str) -> None:
    rows = make_rows()
    with pytest.raises(BatchNameError, match=hint) as by_key:
        rows[name]
    with pytest.raises(BatchNameError, match=hint):
        getattr(rows, name)
    assert isinstance(by_key.value, LabError) and str(by_key.value).startswith(f"batch['{name}']")
    assert name not in rows and not hasattr(rows, name) and rows.get(name) is None


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("reward", r"use batch\['rewards'\], or batch.rows.reward for the rows"),
        ("obs", r"use batch\['observations'\], or batch.rows.obs for the rows"),
        ("obs/vector", r"use batch\['observations'\], or batch.rows\['obs/vector'\] for the rows"),
        ("is_first", "use batch.rows.is_first for the rows"),
        ("mask", "use batch.rows.mask for the rows"),
        ("reweards", "Did you mean 'rewards'"),
    ],
)
def test_transitions_refuse_names_of_rows(name: str, hint: str) -> None:
    plain = make_rows().transitions()
    with pytest.raises(BatchNameError, match=hint):
        plain[name]
    with pytest.raises(BatchNameError, match=hint):
        getattr(plain, name)
    assert name not in plain and not hasattr(plain, name)


def test_several_observations_are_a_dict() -> None:
    rows = make_rows()
    both = Batch({**rows.columns, "obs/image": torch.zeros(3, 5, 3, 2, 2, dtype=torch.uint8)})
    plain = Transitions(both)
    assert plain["observations"].keys() == {"vector", "image"}
    assert plain["observations"]["image"].shape == (3, 4, 3, 2, 2)
