from __future__ import annotations

import numpy as np
import pytest
import torch

from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.buffers.samplers import UniformSampler
from rl_lab.errors import ConfigError
from rl_lab.records import BatchSpec
from tests.buffers.buffer_helpers import counter_buffer, counter_rows, episode_numbers, extend, seeded


def draw_starts(buffer: ReplayBuffer, spec: BatchSpec, batches: int) -> list[tuple[int, int]]:
    generator, starts = seeded(1), []
    for _ in range(batches):
        index = buffer.sample(spec, generator=generator).index
        starts += list(zip(index.stream.tolist(), index.position.tolist()))
    return starts


@pytest.mark.parametrize(
    ("boundary", "pad", "least", "needed"),
    [
        ("cross", "right", 1, 5),
        ("within", "right", 1, 5),
        ("pad", "right", 1, 1),
        ("pad", "right", 2, 2),
        ("pad", "left", 3, 3),
    ],
)
def test_uniform_over_allowed_starts(boundary: str, pad: str, least: int, needed: int) -> None:
    buffer = counter_buffer(75, per_stream=32, episode=11)
    spec = BatchSpec(size=64, length=5, boundary=boundary, pad=pad, least=least)
    numbers = episode_numbers(buffer)
    before = 5 - needed if pad == "left" else 0  # padding before the needed rows
    allowed = [
        (stream, buffer.oldest_position + step - before)
        for stream in range(2)
        for step in range(33 - needed)
        if boundary == "cross" or numbers[stream, step] == numbers[stream, step + needed - 1]
    ]
    if boundary == "pad":
        assert int(buffer.sample(spec, generator=seeded()).mask.sum(1).min()) >= least
    starts = draw_starts(buffer, spec, 200)
    counts = np.array([starts.count(start) for start in allowed])
    assert counts.sum() == len(starts)
    mean = len(starts) / len(allowed)
    chi_square = float(((counts - mean) ** 2 / mean).sum())
    degrees = len(allowed) - 1
    assert abs(chi_square - degrees) < 4 * np.sqrt(2 * degrees)  # four standard deviations


def test_rare_starts() -> None:
    buffer = counter_buffer(0, num_streams=1, per_stream=2000)
    rows = [counter_rows(1, position) for position in range(1900)]
    many = {name: np.stack([row[name] for row in rows], axis=1) for name in rows[0]}
    many["is_first"][:, 8:] = True  # only the first eight rows are a run of eight
    buffer.add(many)
    spec = BatchSpec(size=4, length=8, boundary="within")
    assert draw_starts(buffer, spec, 3) == [(0, 0)] * 12
    assert UniformSampler(buffer.ring, spec).available() == 1


def test_online_draws_new_segments_first() -> None:
    buffer = counter_buffer(0, num_streams=2, per_stream=64)
    spec = BatchSpec(size=3, length=4, context=1, sampler="online")
    assert not buffer.ready(spec)
    extend(buffer, 17)  # three complete segments of five rows in each stream, and two more rows
    first, second = draw_starts(buffer, spec, 1), draw_starts(buffer, spec, 1)
    assert first + second == [(0, 0), (1, 0), (0, 5), (1, 5), (0, 10), (1, 10)]
    uniform = BatchSpec(size=3, length=4, context=1)
    assert draw_starts(buffer, spec, 2) == draw_starts(buffer, uniform, 2)  # no new segment is left
    extend(buffer, 3)
    assert draw_starts(buffer, spec, 1)[:2] == [(0, 15), (1, 15)]


def test_online_drops_overwritten_segments() -> None:
    buffer = counter_buffer(0, num_streams=1, per_stream=16)
    spec = BatchSpec(size=4, length=4, sampler="online")
    buffer.make_batch(spec)
    extend(buffer, 30)  # holds 14 … 30
    assert draw_starts(buffer, spec, 1)[:3] == [(0, 16), (0, 20), (0, 24)]


def test_online_within_episodes() -> None:
    buffer = counter_buffer(0, num_streams=2, per_stream=64)
    spec = BatchSpec(size=8, length=4, boundary="within", sampler="online")
    buffer.make_batch(spec)
    extend(buffer, 30, episode=6)  # episodes of six rows in stream 0 and of seven in stream 1
    zero, one = [(0, start) for start in range(0, 30, 6)], [(1, start) for start in range(0, 28, 7)]
    by_arrival = sorted(zero + one, key=lambda item: (item[1], item[0]))
    assert draw_starts(buffer, spec, 1) == by_arrival[:8]


def test_undo_restores_queue() -> None:
    buffer = counter_buffer(0, num_streams=2, per_stream=64)
    spec = BatchSpec(size=3, length=5, sampler="online")
    buffer.make_batch(spec)
    extend(buffer, 12)
    generator = seeded()
    before = generator.get_state()
    batch = buffer.sample(spec, generator=generator)
    drawn = batch.index.position.clone()
    buffer.undo(spec)
    generator.set_state(before)
    assert torch.equal(buffer.sample(spec, generator=generator).index.position, drawn)


def test_restored_state_continues() -> None:
    spec = BatchSpec(size=2, length=4, sampler="online")
    buffer, twin = counter_buffer(0), counter_buffer(0)
    buffer.make_batch(spec)
    extend(buffer, 18)
    draw_starts(buffer, spec, 1)
    extend(twin, 18)
    twin.set_state(buffer.get_state())  # before the twin has seen the spec
    for each in (buffer, twin):
        extend(each, 4)
    assert draw_starts(buffer, spec, 6) == draw_starts(twin, spec, 6)


def test_state_of_other_rows_is_dropped() -> None:
    spec = BatchSpec(size=2, length=4, sampler="online")
    buffer, fresh = counter_buffer(0), counter_buffer(0)
    buffer.make_batch(spec)
    extend(buffer, 30)
    fresh.set_state(buffer.get_state())  # weights were loaded, replay was not
    fresh.make_batch(spec)
    extend(fresh, 9)
    assert draw_starts(fresh, spec, 2) == [(0, 0), (1, 0), (0, 4), (1, 4)]


def test_custom_sampler() -> None:
    class Newest(UniformSampler):
        def draw(self, count: int, generator: torch.Generator) -> tuple[np.ndarray, np.ndarray]:
            return np.zeros(count, np.int64), np.full(count, self._ring.cursor - self._rows)

    buffer = counter_buffer(20, samplers={"newest": Newest})
    assert draw_starts(buffer, BatchSpec(size=2, length=3, sampler="newest"), 1) == [(0, 17)] * 2
    with pytest.raises(ConfigError, match="Did you mean 'newest'"):
        buffer.ready(BatchSpec(size=2, length=3, sampler="newst"))


def test_ends_sampler_moves_sequences_back_to_the_end() -> None:
    """Against a loop over all rows: each row stands for one draw."""
    buffer = counter_buffer(75, per_stream=32, episode=11)
    spec = BatchSpec(size=64, length=5, sampler="ends")
    numbers, oldest, rows = episode_numbers(buffer), buffer.oldest_position, 32
    expected: dict[tuple[int, int], int] = {}
    for stream in range(2):
        for step in range(rows):
            start = step
            own = numbers[stream, step]
            while (numbers[stream, max(start, 0) : start + 5] > own).any():
                start -= 1
            key = stream, oldest + min(max(start, 0), rows - 5)
            expected[key] = expected.get(key, 0) + 1
    assert max(expected.values()) == 5  # the last five rows of an episode have one sequence
    starts = draw_starts(buffer, spec, 200)
    assert set(starts) == set(expected)
    counts = np.array([starts.count(start) for start in expected])
    mean = np.array(list(expected.values())) * len(starts) / (2 * rows)
    chi_square = float(((counts - mean) ** 2 / mean).sum())
    degrees = len(expected) - 1
    assert abs(chi_square - degrees) < 4 * np.sqrt(2 * degrees)
    with pytest.raises(ConfigError, match="sampler 'ends' needs boundary 'cross'"):
        buffer.sample(BatchSpec(size=2, length=5, boundary="within", sampler="ends"), generator=seeded())


def test_first_draws_whole_episodes_equally_often() -> None:
    """Episodes of 1 to 9 rows: every sequence begins one, also a short one, and none lost its first row."""
    buffer = counter_buffer(0, num_streams=2, per_stream=24)
    rows = [counter_rows(2, position) for position in range(40)]
    many = {name: np.stack([row[name] for row in rows], axis=1) for name in rows[0]}
    many["is_first"][:] = False
    many["is_first"][0, [0, 5, 12, 18, 27, 36]] = True  # rows before 16 are overwritten
    many["is_first"][1, [0, 17, 18, 39]] = True
    buffer.add(many)
    spec = BatchSpec(size=60, length=6, boundary="pad", sampler="first")
    starts = draw_starts(buffer, spec, 30)
    begins = [(0, 18), (0, 27), (0, 36), (1, 17), (1, 18), (1, 39)]
    assert set(starts) == set(begins)
    assert min(starts.count(start) for start in begins) > 200  # of 300 each
    batch = buffer.sample(spec, generator=seeded(1))
    real = {start: int(count) for start, count in zip(draw_starts(buffer, spec, 1), batch.mask.sum(1))}
    assert {start: real[start] for start in begins} == dict(zip(begins, (6, 6, 4, 1, 6, 1)))
    whole = BatchSpec(size=60, length=6, boundary="within", sampler="first")
    assert set(draw_starts(buffer, whole, 5)) == {(0, 18), (0, 27), (1, 18)}
    with pytest.raises(
        ConfigError, match="sampler 'first' needs boundary 'within', or 'pad' with padding on the right"
    ):
        buffer.sample(BatchSpec(size=2, length=3, sampler="first"), generator=seeded())
