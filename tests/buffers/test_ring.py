from __future__ import annotations

import numpy as np
import pytest

from rl_lab.buffers.ring import Ring


def slow_starts(firsts: list[np.ndarray], capacity: int, rows: int) -> set[tuple[int, int]]:
    """Return the starts inside one episode, checked one by one."""
    cursor, oldest = len(firsts), max(0, len(firsts) - capacity)
    return {
        (stream, start)
        for stream in range(len(firsts[0]))
        for start in range(oldest, cursor - rows + 1)
        if not any(firsts[p][stream] for p in range(start + 1, start + rows))
    }


@pytest.mark.parametrize("rows", [1, 2, 5, 9])
def test_unbroken_starts_and_count(rows: int) -> None:
    rng = np.random.default_rng(rows)
    ring, firsts = Ring(3, 12), []
    assert ring.unbroken_count(rows) == 0
    for _ in range(50):
        first = rng.random(3) < 0.2
        ring.advance(first)
        firsts.append(first)
        truth = slow_starts(firsts, 12, rows)
        assert set(zip(*(a.tolist() for a in ring.unbroken_starts(rows)))) == truth
        assert ring.unbroken_count(rows) == len(truth)


def test_rebuilt_ring_matches_original() -> None:
    rng = np.random.default_rng(0)
    ring, firsts = Ring(2, 10), []
    for _ in range(37):
        firsts.append(rng.random(2) < 0.15)
        ring.advance(firsts[-1])
    copy = Ring(2, 10)
    copy.unbroken_count(4)
    copy.rebuild(ring.cursor, np.stack(firsts[-10:], axis=1))
    for _ in range(12):
        assert copy.oldest == ring.oldest and copy.stored == ring.stored
        assert copy.unbroken_count(4) == ring.unbroken_count(4)
        assert [a.tolist() for a in copy.unbroken_starts(4)] == [a.tolist() for a in ring.unbroken_starts(4)]
        first = rng.random(2) < 0.15
        ring.advance(first)
        copy.advance(first)
