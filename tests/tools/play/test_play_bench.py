from __future__ import annotations

from pathlib import Path

import pytest

from rl_lab.tools.bench import run_benchmark


@pytest.mark.learning
def test_play_benchmark_of_the_checkout(trained: Path) -> None:
    result = run_benchmark(
        "play", ["--run", str(trained), "--seconds", "1", "--keys", "10", "--viewers", "3"]
    )
    rows = {row["name"]: row for row in result["rows"]}
    # The bars (15 frames/s, 10 with ten viewers) are for a quiet machine; a busy one gets room, a mistake does not.
    assert rows["play/dream_frames_per_second"]["value"] > 3
    assert rows["play/dream_frames_per_second"]["pixels"] == [(64, 64)]
    assert rows["play/3_viewers_slowest_frames_per_second"]["value"] > 3
    assert 0 < rows["play/input_to_frame_median_ms"]["value"] <= rows["play/input_to_frame_p95_ms"]["value"]
