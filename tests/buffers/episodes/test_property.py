"""After any sequence of adds, draws, kills and resumes, EpisodeBuffer matches the reference model."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_lab.records import BatchSpec
from tests.buffers.episodes.reference import Model, assert_same_content, episode_buffer, rows_of, seeded

specs = st.builds(
    BatchSpec,
    size=st.just(6),
    length=st.integers(1, 6),
    context=st.integers(0, 2),
    boundary=st.sampled_from(["cross", "within", "pad"]),
    pad=st.sampled_from(["right", "left", "both"]),
    sampler=st.sampled_from(["uniform", "online", "episodes", "episodes:other", "ends"]),
)


def fits(spec: BatchSpec, with_open: bool) -> bool:
    if spec.sampler == "online":
        return spec.boundary != "pad" and with_open
    return spec.sampler == "uniform" or spec.boundary != "cross"


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_buffer_matches_reference(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        streams = data.draw(st.integers(1, 3), "streams")
        with_open = data.draw(st.booleans(), "open episodes count")
        capacity = data.draw(st.sampled_from([None, 25, 60]), "capacity")
        longest = data.draw(st.sampled_from([None, 7]), "longest")
        wanted = [
            s for s in data.draw(st.lists(specs, min_size=1, max_size=3), "specs") if fits(s, with_open)
        ]
        options = {
            "num_streams": streams,
            "capacity": capacity,
            "open_episodes": with_open,
            "max_episode_rows": longest,
            "cache_bytes": data.draw(st.sampled_from([0, 500, 1 << 20]), "cache"),
            "compression": data.draw(st.sampled_from(["zstd", "zlib", "none"]), "compression"),
            "chunk_bytes": 700,
        }
        buffer = episode_buffer(Path(folder) / "live", **options)
        model = Model(streams, capacity, with_open, longest or 10**9)
        for spec in wanted:
            buffer.make_batch(spec)
        generator = seeded(data.draw(st.integers(0, 99), "seed"))
        number = 0
        for turn in range(data.draw(st.integers(1, 8), "turns")):
            steps = data.draw(st.integers(1, 12), "steps")
            flags = data.draw(
                st.lists(st.integers(0, 9), min_size=streams * steps, max_size=streams * steps), "rows"
            )
            flags_ = np.array(flags).reshape(streams, steps)
            first, ended = flags_ == 0, flags_ == 1
            counts = number + np.arange(streams * steps).reshape(streams, steps)
            number += streams * steps
            buffer.add(rows_of(counts, first, ended))
            model.add(counts, first, ended)
            assert_same_content(buffer, model)
            what = data.draw(st.sampled_from(["go on", "go on", "resume", "kill", "close"]), "then")
            if what == "resume":
                saved = Path(folder) / f"checkpoint{turn}"
                entry, state = json.loads(json.dumps(buffer.checkpoint(saved))), buffer.get_state()
                buffer.add(rows_of(counts, first, ended))  # discarded by the restore
                buffer.restore(saved, entry)
                buffer.set_state(state)
            elif what in ("kill", "close"):
                if what == "close":
                    buffer.close()
                else:
                    buffer._store.stop_writing()
                    buffer._store._lock.release()
                buffer = episode_buffer(Path(folder) / "live", **options)
                model.lose_open()
            assert_same_content(buffer, model)
            for spec in wanted:
                starts = model.starts(spec)
                assert buffer.ready(spec) == bool(starts)
                if spec.sampler in ("uniform", "ends", "online"):
                    assert buffer._sampler(spec).available() == len(starts)
                if starts:
                    model.check(buffer.sample(spec, generator=generator), spec)
        buffer.close()
