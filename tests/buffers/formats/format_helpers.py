"""Random episodes of several kinds of environments, and the comparison of two data sets bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.buffers.formats.dataset import Dataset, create_dataset
from rl_lab.buffers.formats.episode import PlainEpisode
from rl_lab.records import ActionSpec, ArraySpec, Spec

VECTOR, IMAGE = ArraySpec((3,), "float32"), ArraySpec((3, 16, 8), "uint8")
DISCRETE = ActionSpec("discrete", (), choices=(4,))
TORQUE = ActionSpec("continuous", (2,), low=(-2.0, 0.0), high=(2.0, 4.0))
SPECS = {
    "vector": Spec("toy", {"vector": VECTOR}, DISCRETE),
    "image": Spec("camera", {"image": IMAGE}, TORQUE),
    "both": Spec("robot", {"image": IMAGE, "vector": VECTOR}, TORQUE),
}


def episode(spec: Spec, steps: int, seed: int, *, terminated: bool = True) -> PlainEpisode:
    random = np.random.default_rng(seed)
    observations: dict[str, np.ndarray] = {}
    for name, each in spec.observations.items():
        shape = (steps + 1, *each.shape)
        if each.dtype == "uint8":
            observations[name] = random.integers(0, 256, shape, dtype=np.uint8)
        else:
            observations[name] = random.standard_normal(shape).astype(np.float32)
    if spec.action.kind == "continuous":
        actions = random.uniform(-1, 1, (steps, *spec.action.shape)).astype(np.float32)
    else:
        actions = random.integers(0, spec.action.choices[0], steps)
    end = np.arange(steps) == steps - 1
    return PlainEpisode(
        observations,
        actions,
        random.standard_normal(steps).astype(np.float32),
        end & terminated,
        end & (not terminated),
    )


def episodes(spec: Spec, lengths: tuple[int, ...] = (5, 1, 9)) -> list[PlainEpisode]:
    return [episode(spec, steps, k, terminated=k % 2 == 0) for k, steps in enumerate(lengths)]


def write(
    path: Path, spec: Spec, format: str, items: list[PlainEpisode] | None = None, **options: Any
) -> Path:
    with create_dataset(path, spec, format, {"source": "test"}, **options) as writer:
        for each in items if items is not None else episodes(spec):
            writer.add(each)
        return writer.finish()


def assert_equal(a: PlainEpisode, b: PlainEpisode, *, but: tuple[str, ...] = ()) -> None:
    """Every array has the same type, shape and bits. but: observations that may differ"""
    assert sorted(a.observations) == sorted(b.observations)
    pairs = {name: (a.observations[name], b.observations[name]) for name in a.observations if name not in but}
    for key in ("actions", "rewards", "terminated", "truncated"):
        pairs[key] = getattr(a, key), getattr(b, key)
    for name, (left, right) in pairs.items():
        assert (left.dtype, left.shape) == (right.dtype, right.shape), name
        assert left.tobytes() == right.tobytes(), name


def assert_same(dataset: Dataset, expected: list[PlainEpisode], **options: Any) -> None:
    assert dataset.lengths.tolist() == [len(each) for each in expected]
    for read, given in zip(dataset, expected):
        assert_equal(read, given, **options)
