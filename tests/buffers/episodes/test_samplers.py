"""Samplers of EpisodeBuffer: probabilities, counts per consumer, padding, ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_lab.buffers.episodes.buffer import EpisodeBuffer
from rl_lab.buffers.episodes.samplers import EndsSampler, EpisodeCountSampler
from rl_lab.errors import ConfigError
from rl_lab.records import BatchSpec
from tests.buffers.episodes.reference import add_episodes, episode_buffer, seeded

LENGTHS = [12, 5, 30, 8]
STARTS = [0, 12, 17, 47, 55]  # positions at which they begin
COUNTED = BatchSpec(size=16, length=4, boundary="within", sampler="episodes")


def filled(folder: Path, lengths: list[int] = LENGTHS, **samplers: object) -> EpisodeBuffer:
    options = {}
    if samplers:
        options["samplers"] = {
            name: (lambda episodes, spec, kind=kind, given=given: kind(episodes, spec, **given))
            for name, (kind, given) in samplers.items()
        }
    buffer = episode_buffer(folder, num_streams=1, **options)
    add_episodes(buffer, lengths)
    return buffer


def draw(buffer: EpisodeBuffer, spec: BatchSpec, batches: int, seed: int = 1) -> Counter[int]:
    """Return the number of draws of each start position."""
    generator, found = seeded(seed), Counter()
    for _ in range(batches):
        found.update(buffer.sample(spec, generator=generator).index.position.tolist())
    return found


def close_to(found: Counter[int], expected: dict[int, float]) -> bool:
    """Check that counts follow the probabilities: chi-square within four standard deviations."""
    total = sum(found.values())
    assert set(found) <= set(expected)
    statistic = sum((found[key] - total * p) ** 2 / (total * p) for key, p in expected.items())
    degrees = len(expected) - 1
    return abs(statistic - degrees) < 4 * np.sqrt(2 * degrees)


# ---------------------------------------------------------------- uniform


@pytest.mark.parametrize(
    ("boundary", "pad", "least"),
    [
        ("cross", "right", 1),
        ("within", "right", 1),
        ("pad", "right", 1),
        ("pad", "left", 1),
        ("pad", "right", 2),
        ("pad", "left", 3),
    ],
)
def test_uniform_over_starts(tmp_path: Path, boundary: str, pad: str, least: int) -> None:
    buffer = filled(tmp_path)
    add_episodes(buffer, [7], end=False)  # the open one counts as well
    spec = BatchSpec(size=50, length=6, boundary=boundary, pad=pad, least=least)
    borders, end = [*STARTS], 62
    if boundary == "cross":
        allowed = list(range(end - 5))
    elif boundary == "within":
        allowed = [p for a, b in zip(borders, [*borders[1:], end]) for p in range(a, b - 5)]
    else:
        before = 6 - least if pad == "left" else 0
        episodes = zip(borders, [*borders[1:], end])
        allowed = [p - before for a, b in episodes for p in range(a, b - least + 1)]
        assert int(buffer.sample(spec, generator=seeded()).mask.sum(1).min()) >= least
    assert buffer._sampler(spec).available() == len(allowed)
    assert close_to(draw(buffer, spec, 200), dict.fromkeys(allowed, 1 / len(allowed)))


def test_pad_both(tmp_path: Path) -> None:
    buffer = filled(tmp_path, [5])
    spec = BatchSpec(size=64, length=4, boundary="pad", pad="both")
    # Row r, and 0 to 3 rows before it: start r - k. Starts -3 … 4 have 1 2 3 4 4 3 2 1 … of 20 pairs, as 5 rows allow.
    pairs = Counter(row - before for row in range(5) for before in range(4))
    found = draw(buffer, spec, 100)
    assert close_to(found, {start: count / 20 for start, count in pairs.items()})
    batch = buffer.sample(spec, generator=seeded())
    for start, mask in zip(batch.index.position.tolist(), batch.mask.tolist()):
        assert mask == [0 <= start + t < 5 for t in range(4)]


@pytest.mark.parametrize(
    ("pad", "mask"),
    [
        # An episode of 3 rows and windows of 4, for anchor rows 0, 1, 2.
        ("right", {0: [1, 1, 1, 0], 1: [1, 1, 0, 0], 2: [1, 0, 0, 0]}),
        ("left", {-3: [0, 0, 0, 1], -2: [0, 0, 1, 1], -1: [0, 1, 1, 1]}),
    ],
)
def test_padding_masks(tmp_path: Path, pad: str, mask: dict[int, list[int]]) -> None:
    buffer = filled(tmp_path, [3])
    spec = BatchSpec(size=32, length=3, context=1, boundary="pad", pad=pad)
    batch = buffer.sample(spec, generator=seeded())
    assert set(batch.index.position.tolist()) == set(mask)
    for b, start in enumerate(batch.index.position.tolist()):
        assert batch.mask[b].int().tolist() == mask[start]
        assert batch["obs/count"][b].tolist() == [
            start + t if real else 0 for t, real in enumerate(mask[start])
        ]
        assert batch.is_first[b].tolist() == [start + t == 0 for t in range(4)]


# ---------------------------------------------------------------- counts


def test_count_probabilities(tmp_path: Path) -> None:
    buffer = filled(tmp_path, [12, 5, 30, 8, 3], episodes=(EpisodeCountSampler, {"alpha": 2.0}))
    sampler = buffer._sampler(COUNTED)
    sampler.counts.stored()[:] = [0, 1, 3, 0, 0]
    # (1+0)^-2, (1+1)^-2, (1+3)^-2, (1+0)^-2 = 1, 1/4, 1/16, 1; the last one has too few rows. Sum 2.3125.
    episodes, chances = sampler.probabilities()
    assert episodes.tolist() == [0, 1, 2, 3, 4, -1]
    assert chances == pytest.approx([1 / 2.3125, 0.25 / 2.3125, 0.0625 / 2.3125, 1 / 2.3125, 0, 0])
    crafter = EpisodeCountSampler(buffer._episodes, replace(COUNTED, sampler="episodes:c"), alpha=5.0)
    crafter.counts.stored()[:] = [1, 0, 2, 0, 0]
    weights = np.array([2.0**-5, 1, 3.0**-5, 1, 0, 0])
    assert crafter.probabilities()[1] == pytest.approx(weights / weights.sum())


def test_alpha_0_is_uniform_over_episodes(tmp_path: Path) -> None:
    buffer = filled(tmp_path, episodes=(EpisodeCountSampler, {"alpha": 0.0}))
    found = draw(buffer, replace(COUNTED, size=50), 200)
    # Each episode has 1/4, divided equally among its rows - 3 starts.
    expected = {
        start + k: 1 / 4 / (rows - 3) for start, rows in zip(STARTS, LENGTHS) for k in range(rows - 3)
    }
    assert close_to(found, expected)


def test_prefer_late(tmp_path: Path) -> None:
    """stops = min(L, t + 1 + U{0 … 5}) for t in U{0 … L-1}; L is the number of actions of the episode."""
    buffer = filled(tmp_path, [10], episodes=(EpisodeCountSampler, {"prefer_late": True}))
    spec = BatchSpec(size=64, length=6, boundary="pad", pad="left", sampler="episodes")
    # Row 9 has the end and no action. Worked by hand for last rows 0 … 8, of 9 × 6 pairs: 5 is as in uniform
    # sampling, early ones rarer, and the last one is 3.5 times as likely.
    pairs = {0: 1, 1: 2, 2: 3, 3: 4, 4: 5, 5: 6, 6: 6, 7: 6, 8: 21}
    assert sum(pairs.values()) == 54
    found = draw(buffer, spec, 100)
    assert close_to(found, {row - 5: count / 54 for row, count in pairs.items()})
    batch = buffer.sample(spec, generator=seeded())
    assert batch.mask[:, -1].all() and not batch.terminated[:, -1].any()


def test_prefer_late_in_open_and_shortest_episodes(tmp_path: Path) -> None:
    buffer = filled(tmp_path, [1], episodes=(EpisodeCountSampler, {"prefer_late": True, "alpha": 0.0}))
    add_episodes(buffer, [3], end=False)
    spec = BatchSpec(size=64, length=2, boundary="pad", pad="left", sampler="episodes")
    # The first has one row. Of the open one, which starts at position 1, every row can be the last: 1 of 6
    # pairs, 2 of 6, and 3 of 6.
    expected = {-1: 1 / 2, 0: 1 / 12, 1: 2 / 12, 2: 3 / 12}
    assert close_to(draw(buffer, spec, 50), expected)


@pytest.mark.parametrize(("boundary", "pad"), [("pad", "both"), ("pad", "right"), ("within", "right")])
def test_prefer_late_needs_left_padding(tmp_path: Path, boundary: str, pad: str) -> None:
    spec = BatchSpec(size=16, length=4, boundary=boundary, pad=pad, sampler="episodes")
    plain, late = (
        draw(
            filled(tmp_path / str(on), episodes=(EpisodeCountSampler, {"prefer_late": on})),
            spec,
            5,
        )
        for on in (False, True)
    )
    assert plain == late


def test_new_episodes_catch_up(tmp_path: Path) -> None:
    buffer = filled(tmp_path, episodes=(EpisodeCountSampler, {"alpha": 5.0}))
    draw(buffer, COUNTED, 50)
    counts = buffer._sampler(COUNTED).counts
    before = counts.stored().copy()
    assert before.sum() == 50 * 16 and before.max() - before.min() < 40  # 200 each
    add_episodes(buffer, [10])
    draw(buffer, COUNTED, 5)
    assert counts.stored()[4] > 60  # of 80 draws
    # At first (1/1)^5 against 4 × (1/201)^5 is almost certain.
    draw(buffer, COUNTED, 60)
    after = counts.stored()
    assert after.sum() == 115 * 16 and after.max() - after.min() < 60


def test_consumers_have_separate_counts(tmp_path: Path) -> None:
    buffer = filled(tmp_path)
    tokenizer, model = (replace(COUNTED, sampler=f"episodes:{name}") for name in ("tokenizer", "model"))
    other_shape = replace(model, size=4, length=2)
    draw(buffer, tokenizer, 3)
    draw(buffer, model, 5)
    draw(buffer, other_shape, 2)  # the same consumer with another batch
    counts = {name: c.stored().sum() for name, c in buffer._episodes.counts.items()}
    assert counts == {"episodes:tokenizer": 48, "episodes:model": 88}
    assert buffer._sampler(model).counts is buffer._sampler(other_shape).counts
    # Counts are separate: the tokenizer's draws do not depend on the model's.
    alone = filled(tmp_path / "alone")
    assert draw(alone, tokenizer, 3) + draw(alone, tokenizer, 4, seed=2) == draw(
        filled(tmp_path / "again"), tokenizer, 3
    ) + draw(buffer, tokenizer, 4, seed=2)


def test_closed_episode_keeps_count(tmp_path: Path) -> None:
    buffer = episode_buffer(tmp_path, num_streams=1)
    add_episodes(buffer, [9])
    add_episodes(buffer, [6], end=False)
    draw(buffer, COUNTED, 4)
    counts = buffer._sampler(COUNTED).counts
    opened = int(counts.open[0])
    assert 0 < opened < 64 and counts.stored().tolist() == [64 - opened]
    add_episodes(buffer, [5])  # a new episode: the open one is closed
    assert counts.stored().tolist() == [64 - opened, opened, 0] and counts.open.tolist() == [0]


def test_counts_of_deleted_episodes(tmp_path: Path) -> None:
    buffer = episode_buffer(tmp_path, num_streams=1, capacity=30)
    add_episodes(buffer, [10, 10, 10])
    draw(buffer, COUNTED, 10)
    counts = buffer._sampler(COUNTED).counts
    kept = counts.stored().tolist()[2:]
    add_episodes(buffer, [10, 10])
    assert counts.stored().tolist() == [*kept, 0, 0]


def test_uncounted_batches(tmp_path: Path) -> None:
    buffer = filled(tmp_path, episodes=(EpisodeCountSampler, {"alpha": 1.0, "uncounted": 3}))
    draw(buffer, COUNTED, 3)
    counts = buffer._sampler(COUNTED).counts
    assert counts.stored().sum() == 0
    draw(buffer, COUNTED, 2)
    assert counts.stored().sum() == 32


def test_undo_restores_counts(tmp_path: Path) -> None:
    buffer = filled(tmp_path)
    draw(buffer, COUNTED, 3)
    counts, generator = buffer._sampler(COUNTED).counts, seeded(9)
    before, state = counts.stored().copy(), generator.get_state()
    first = buffer.sample(COUNTED, generator=generator)["obs/count"].clone()
    buffer.undo(COUNTED)
    assert (counts.stored() == before).all()
    generator.set_state(state)
    assert torch.equal(buffer.sample(COUNTED, generator=generator)["obs/count"], first)


# ---------------------------------------------------------------- ends


def test_ends_share(tmp_path: Path) -> None:
    buffer = filled(tmp_path, ends=(EndsSampler, {"share": 0.3}))
    add_episodes(buffer, [9], end=False)
    add_episodes(buffer, [9])  # episode 4 has no end
    spec = BatchSpec(size=50, length=6, boundary="within", sampler="ends")
    lengths, ended = [*LENGTHS, 9, 9], [0, 2, 3, 5]  # episode 1 has too few rows
    starts = np.cumsum([0, *lengths])[:-1]
    choices = sum(max(0, rows - 5) for rows in lengths)
    expected = {
        int(start) + k: 0.7 / choices for start, rows in zip(starts, lengths) for k in range(max(0, rows - 5))
    }
    for number in ended:
        expected[int(starts[number]) + lengths[number] - 6] += 0.3 / len(ended)
    assert sum(expected.values()) == pytest.approx(1)
    assert close_to(draw(buffer, spec, 400), expected)


@pytest.mark.parametrize("pad", ["right", "left", "both"])
def test_ends_with_padding(tmp_path: Path, pad: str) -> None:
    buffer = filled(tmp_path, [4, 9], ends=(EndsSampler, {"share": 1.0}))
    spec = BatchSpec(size=32, length=6, boundary="pad", pad=pad, sampler="ends")
    batch = buffer.sample(spec, generator=seeded())
    short = 0 if pad == "right" else -2  # where a window of 6 begins that holds the end of an episode of 4
    assert set(batch.index.position.tolist()) == {short, 4 + 9 - 6}
    assert (batch.terminated.sum(1) == 1).all()
    last = batch.terminated.int().argmax(1)
    assert last.tolist() == [5 if position != 0 else 3 for position in batch.index.position.tolist()]


def test_pad_both_with_least(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pad 'both' needs least 1, not 2"):
        filled(tmp_path).ready(BatchSpec(size=8, length=4, boundary="pad", pad="both", least=2))


def test_ends_without_finished_episodes(tmp_path: Path) -> None:
    buffer = episode_buffer(tmp_path, num_streams=1)
    add_episodes(buffer, [20], end=False)
    spec = BatchSpec(size=8, length=4, boundary="within", sampler="ends")
    assert buffer.sample(spec, generator=seeded()).index.position.max() <= 16


def test_invalid_settings(tmp_path: Path) -> None:
    for kind, given in ((EndsSampler, {"share": 1.5}), (EpisodeCountSampler, {"alpha": -1.0})):
        with pytest.raises(ConfigError, match=r"not (1\.5|-1)"):
            filled(tmp_path / kind.__name__, it=(kind, given)).ready(replace(COUNTED, sampler="it"))


# ---------------------------------------------------------------- first


def test_first_begins_episodes_equally_often(tmp_path: Path) -> None:
    """Also the open episode, and with padding those that are shorter than the sequence."""
    buffer = filled(tmp_path)
    padded = BatchSpec(size=16, length=10, boundary="pad", sampler="first")
    starts = dict.fromkeys(draw(buffer, padded, 100), 1 / len(draw(buffer, padded, 100)))
    assert set(STARTS[:4]) <= set(starts) <= set(STARTS)
    assert close_to(draw(buffer, padded, 100, seed=2), starts)
    mask = buffer.sample(padded, generator=seeded(1)).mask
    assert set(mask.sum(1).tolist()) <= {10, 5, 8, *range(1, 10)} and bool(mask[:, 0].all())
    within = replace(padded, boundary="within")
    assert set(draw(buffer, within, 100)) == {0, 17}  # 12 and 30 rows
    with pytest.raises(ConfigError, match="sampler 'first' needs boundary 'within', or 'pad'"):
        buffer.sample(replace(padded, pad="left"), generator=seeded())
