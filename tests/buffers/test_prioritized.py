"""PrioritizedReplay: probabilities, importance weights, restore, and the sum tree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from rl_lab.buffers.prioritized import PrioritizedReplay, PrioritizedSampler, RunningSum, SumTree
from rl_lab.config.checks import CONFIG_FOLDER
from rl_lab.errors import ConfigError
from rl_lab.records import ArraySpec, BatchSpec
from tests.buffers.buffer_helpers import COLUMNS, assert_aligned, counter_rows, seeded


def prioritized(
    rows: int, *, per_stream: int = 32, num_streams: int = 2, episode: int = 0, **options: Any
) -> PrioritizedReplay:
    options = {"mutable": ("latent",), "chunk_rows": 8, **options}
    buffer = PrioritizedReplay(COLUMNS, capacity=num_streams * per_stream, num_streams=num_streams, **options)
    extend(buffer, rows, episode)
    return buffer


def extend(buffer: PrioritizedReplay, rows: int, episode: int = 0) -> None:
    for _ in range(rows):
        buffer.add(counter_rows(buffer.num_streams, buffer.total_rows, episode))


def write_priorities(buffer: PrioritizedReplay, first: int, values: list[float], stream: int = 0) -> None:
    """Write priorities back as a hook does."""
    from rl_lab.records import RowIndex

    index = RowIndex(torch.tensor([stream]), torch.tensor([first]))
    buffer.write_back(index, {"priority": torch.tensor([values])}, offset=0)


def chances(buffer: PrioritizedReplay, spec: BatchSpec) -> dict[tuple[int, int], float]:
    """Return (stream, start) -> probability, computed from priorities and episodes in a loop."""
    rows = buffer.read(buffer.oldest_position, buffer.total_rows - buffer.oldest_position)
    found = {}
    for stream in range(buffer.num_streams):
        for start in range(rows.reward.shape[1] - spec.stored_rows + 1):
            crosses = bool(rows.is_first[stream, start + 1 : start + spec.stored_rows].any())
            if not (crosses and spec.boundary != "cross"):
                found[stream, buffer.oldest_position + start] = float(
                    rows["priority"][stream, start + spec.context]
                )
    return {key: value / sum(found.values()) for key, value in found.items()}


def test_probabilities_and_weights() -> None:
    # Six rows and sequences of three: starts 0 to 3. Priorities 1, 4, 9, 16 with alpha ½ are weights 1 : 2 : 3 : 4.
    buffer = prioritized(6, num_streams=1, alpha=0.5, beta=1.0, epsilon=1e-12)
    write_priorities(buffer, 0, [1.0, 4.0, 9.0, 16.0, 1e4, 1e4])  # no sequence starts at the last two
    spec = BatchSpec(size=4000, length=3, sampler="prioritized")
    batch = buffer.sample(spec, generator=seeded(3))
    assert_aligned(batch)
    counts = np.bincount(batch.index.position.numpy(), minlength=6)
    assert counts[4:].sum() == 0
    expected = 4000 * np.array([0.1, 0.2, 0.3, 0.4])
    assert ((counts[:4] - expected) ** 2 / expected).sum() < 16.3  # chi-square, 3 degrees: 99.9 %
    # n P = 4 · (0.1, 0.2, 0.3, 0.4); weights 1 / (n P), over the largest: (1, 1/2, 1/3, 1/4).
    by_start = torch.tensor([1.0, 1 / 2, 1 / 3, 1 / 4])
    assert torch.allclose(batch["weight"], by_start[batch.index.position][:, None].expand(-1, 3), atol=1e-5)


def test_weights_with_beta_below_one() -> None:
    buffer = prioritized(6, num_streams=1, alpha=1.0, beta=0.4, epsilon=1e-12)
    write_priorities(buffer, 0, [1.0, 2.0, 3.0, 4.0])
    batch = buffer.sample(BatchSpec(size=64, length=3, sampler="prioritized"), generator=seeded())
    chance = torch.tensor([0.1, 0.2, 0.3, 0.4])[batch.index.position]
    weight = (4 * chance) ** -0.4
    assert torch.allclose(batch["weight"][:, 0], weight / weight.max(), atol=1e-5)


@pytest.mark.parametrize("boundary", ["cross", "within", "pad"])
@pytest.mark.parametrize("context", [0, 2])
def test_draws_follow_priorities(boundary: str, context: int) -> None:
    spec = BatchSpec(
        size=50, length=4, context=context, boundary=boundary, sampler="prioritized", least=context + 2
    )
    buffer = prioritized(0, num_streams=2, per_stream=16)
    generator, values = seeded(1), np.random.default_rng(2)
    buffer.make_batch(spec)
    for _ in range(11):  # 33 rows in rings of 16
        extend(buffer, 3, episode=7)
        if buffer.ready(spec):
            batch = buffer.sample(spec, generator=generator)
            fresh = torch.from_numpy(values.exponential(size=(50, 4)).astype(np.float32))
            buffer.write_back(batch.index, {"priority": fresh}, offset=context)
    expected = chances(buffer, spec)
    counts = dict.fromkeys(expected, 0)
    total = 400 * spec.size
    for _ in range(400):
        index = buffer.sample(spec, generator=generator).index
        for key in zip(index.stream.tolist(), index.position.tolist()):
            counts[key] += 1  # a KeyError means that the sequence does not fit
    statistic = sum((counts[key] - total * p) ** 2 / (total * p) for key, p in expected.items())
    degrees = len(expected) - 1
    assert abs(statistic - degrees) < 4 * np.sqrt(2 * degrees)


def test_new_rows_get_largest_priority() -> None:
    buffer = prioritized(3, num_streams=1, alpha=1.0, epsilon=1e-30)
    assert buffer.read(0, 3)["priority"].tolist() == [[1.0, 1.0, 1.0]]
    write_priorities(buffer, 0, [0.25, 0.5, 0.125])
    extend(buffer, 1)
    assert buffer.read(0, 4)["priority"].tolist() == [[0.25, 0.5, 0.125, 0.5]]
    write_priorities(buffer, 1, [7.0])
    extend(buffer, 2)
    assert buffer.read(3, 3)["priority"].tolist() == [[0.5, 7.0, 7.0]]


def test_stale_and_invalid_priorities() -> None:
    buffer = prioritized(20, num_streams=1, per_stream=8)
    spec = BatchSpec(size=200, length=2, sampler="prioritized")
    batch = buffer.sample(spec, generator=seeded())
    old = batch.index
    extend(buffer, 8)  # all drawn rows are overwritten
    buffer.write_back(old, {"priority": torch.full((200, 1), 1e5)}, offset=0)
    assert buffer.read(20, 8)["priority"].max() == pytest.approx(1.0)
    buffer.write_back(
        buffer.sample(spec, generator=seeded()).index,
        {"priority": torch.tensor([[float("nan")], [float("inf")]] * 100)},
        offset=0,
    )
    batch = buffer.sample(spec, generator=seeded(1))
    assert torch.isfinite(batch["weight"]).all() and (batch["weight"] > 0).all()
    assert_aligned(batch)


def test_restored_priorities(tmp_path: Path) -> None:
    spec = BatchSpec(size=6, length=3, context=1, boundary="within", sampler="prioritized")
    buffer, generator = prioritized(0), seeded(4)

    def live(which: PrioritizedReplay, gen: torch.Generator) -> list[Any]:
        extend(which, 2, episode=6)
        if not which.ready(spec):
            return []
        batch = which.sample(spec, generator=gen)
        which.write_back(batch.index, {"priority": torch.rand(6, 1, generator=gen) * 9}, offset=1)
        return [batch.index.stream.tolist(), batch.index.position.tolist(), batch["weight"].tolist()]

    for _ in range(25):
        live(buffer, generator)
    entry, state = json.loads(json.dumps(buffer.checkpoint(tmp_path))), buffer.get_state()
    twin, again = prioritized(0), seeded()
    twin.restore(tmp_path, entry)
    twin.set_state(state)
    again.set_state(generator.get_state())
    for _ in range(25):
        assert live(buffer, generator) == live(twin, again)


@pytest.mark.parametrize("boundary", ["within", "pad"])
def test_running_sum_matches_tree(boundary: str) -> None:
    """The running sum of the GPU path, run on the CPU, draws the same rows as the tree."""
    spec = BatchSpec(size=64, length=3, boundary=boundary, sampler="prioritized", least=2)
    tree, flat = prioritized(0), prioritized(0)
    sampler = flat._sampler(spec)
    assert isinstance(sampler, PrioritizedSampler)
    sampler._sum = RunningSum(flat.capacity, torch.device("cpu"))
    sampler._tree = None
    tree.make_batch(spec)
    mine, its = seeded(1), seeded(1)
    for turn in range(40):
        for buffer in (tree, flat):
            extend(buffer, 2, episode=9)
        if not tree.ready(spec):
            continue
        ours, theirs = tree.sample(spec, generator=mine), flat.sample(spec, generator=its)
        assert torch.equal(ours.index.position, theirs.index.position)
        assert torch.equal(ours.index.stream, theirs.index.stream)
        assert torch.allclose(ours["weight"], theirs["weight"], atol=1e-5)
        assert_aligned(ours)
        assert_aligned(theirs)  # its mask is computed from `is_first`, as on a GPU
        assert (ours.mask is None) or torch.equal(ours.mask, theirs.mask)
        value = (ours["obs/count"][:, :1] * 7 % 13 + turn).float()
        for buffer, batch in ((tree, ours), (flat, theirs)):
            buffer.write_back(batch.index, {"priority": value}, offset=0)


def test_errors() -> None:
    buffer = prioritized(10)
    with pytest.raises(ConfigError, match="use pad 'right' and least 1 or more"):
        buffer.ready(BatchSpec(size=2, length=3, boundary="pad", pad="left", sampler="prioritized"))
    with pytest.raises(ConfigError, match="least 2 or more"):
        buffer.ready(BatchSpec(size=2, length=3, context=1, boundary="pad", sampler="prioritized"))
    with pytest.raises(ConfigError, match="is reserved by the buffer"):
        PrioritizedReplay({**COLUMNS, "weight": ArraySpec((), "float32")}, capacity=8, num_streams=1)
    with pytest.raises(ConfigError, match="epsilon above 0"):
        prioritized(0, epsilon=0.0)
    uniform = buffer.sample(BatchSpec(size=2, length=3), generator=seeded())
    assert "weight" not in uniform and "priority" in uniform
    only = BatchSpec(size=2, length=3, sampler="prioritized", keys=("reward", "weight"))
    assert set(buffer.sample(only, generator=seeded())) == {"reward", "weight"}


def test_config_builds_buffer() -> None:
    config = OmegaConf.load(CONFIG_FOLDER / "buffer" / "prioritized.yaml")
    buffer = instantiate(config, columns=COLUMNS, num_streams=4, _convert_="object")
    assert (buffer.alpha, buffer.beta, buffer.epsilon) == (0.6, 0.4, 1e-6) and buffer.capacity == 1_000_000


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 1e-12, 0.5, 1.0, 3.0, 1e6]), min_size=1, max_size=40),
    changes=st.lists(st.tuples(st.integers(0, 39), st.sampled_from([0.0, 2.0, 1e-9])), max_size=10),
    numbers=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=30),
)
def test_tree_and_running_sum_match_linear_search(
    weights: list[float], changes: list[tuple[int, float]], numbers: list[float]
) -> None:
    tree, fresh = SumTree(len(weights)), SumTree(len(weights))
    tree.set_all(np.array(weights))
    for place, value in changes:
        if place < len(weights):
            weights[place] = value
            tree.set(np.array([place]), np.array([value]))
    fresh.set_all(np.array(weights))
    assert np.array_equal(tree._nodes, fresh._nodes)  # the tree depends only on the leaves
    if not tree.total:
        return
    flat = RunningSum(len(weights), torch.device("cpu"))
    flat.weights[:-1] = torch.tensor(weights)
    found = tree.find(np.array(numbers))
    its, chance = flat.find(torch.tensor(numbers, dtype=torch.float64))
    single = np.array(weights, dtype=np.float32).astype(np.float64)
    for number, place, other, p in zip(numbers, found, its.tolist(), chance.tolist()):
        assert weights[place] > 0 and weights[other] > 0
        sums = np.cumsum(weights)
        target, slack = number * sums[-1], 1e-9 * sums[-1]
        assert sums[place] - weights[place] - slack <= target <= sums[place] + slack
        assert sums[other] - weights[other] - 1e-6 * sums[-1] <= target <= sums[other] + 1e-6 * sums[-1]
        assert p == pytest.approx(single[other] / single.sum(), rel=1e-9)
