"""Observation statistics: correct, resumable, and frozen in evaluation."""

import io

import numpy as np
import pytest
import torch

from rl_lab.environments import make_env
from rl_lab.environments.normalizer import ObservationNormalizer
from rl_lab.errors import CheckpointError, ConfigError
from rl_lab.records import ArraySpec
from tests.environments.test_vector import roll

SPEC = {
    "vector": ArraySpec((3,), "float32"),
    "map": ArraySpec((2, 2), "float32"),
    "image": ArraySpec((1, 4, 4), "uint8"),
}


def batches(rng, sizes):
    for size in sizes:
        yield {
            "vector": (rng.normal(size=(size, 3)) * [1, 1e3, 0] + [0, 1e6, 7]).astype(np.float32),
            "map": rng.normal(size=(size, 2, 2)).astype(np.float32),
            "image": rng.integers(0, 255, (size, 1, 4, 4)).astype(np.uint8),
        }


def test_matches_mean_and_variance_of_all_rows():
    normalizer = ObservationNormalizer(SPEC, clip=None)
    seen = list(batches(np.random.default_rng(0), [1, 1, 8, 3, 8, 200]))
    for batch in seen:
        normalizer.update(batch)
    assert normalizer.count == 221
    together = {name: np.concatenate([batch[name] for batch in seen]) for name in SPEC}
    for name in ("vector", "map"):
        everything = together[name].astype(np.float64)
        np.testing.assert_allclose(normalizer.mean[name], everything.mean(0), rtol=1e-12)
        np.testing.assert_allclose(normalizer.variance(name), everything.var(0), rtol=1e-9, atol=1e-12)
        expected = (everything - everything.mean(0)) / np.sqrt(everything.var(0) + 1e-8)
        got = normalizer(together)[name]
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
        assert got.dtype == np.float32
    assert not normalizer(together)["vector"][:, 2].any()  # a constant value becomes 0
    assert normalizer(seen[0])["image"] is seen[0]["image"]


def test_clip_frozen_and_row_mask():
    normalizer = ObservationNormalizer(SPEC, clip=1.5)
    one, two = batches(np.random.default_rng(1), [50, 50])
    normalizer.update(one, np.arange(50) < 20)
    np.testing.assert_allclose(normalizer.mean["map"], one["map"][:20].astype(np.float64).mean(0))
    assert abs(normalizer(two)["map"]).max() == 1.5
    normalizer.update(one, np.zeros(50, bool))
    normalizer.frozen = True
    normalizer.update(two)
    assert normalizer.count == 20


def test_state_is_exact_and_checked():
    normalizer, copy = ObservationNormalizer(SPEC), ObservationNormalizer(SPEC)
    one, two = batches(np.random.default_rng(1), [5, 7])
    normalizer.update(one)
    file = io.BytesIO()
    torch.save(normalizer.get_state(), file)
    file.seek(0)
    copy.set_state(torch.load(file, weights_only=True))
    for each in (normalizer, copy):
        each.update(two)
    np.testing.assert_array_equal(normalizer(two)["vector"], copy(two)["vector"])
    other = ObservationNormalizer({"vector": ArraySpec((4,), "float32")})
    with pytest.raises(CheckpointError, match="observation statistics"):
        other.set_state(normalizer.get_state())


@pytest.mark.parametrize(("workers", "new_workers"), [(0, 0), (2, 0)])
@pytest.mark.parametrize("copy", [True, False])
def test_vector_environment_and_resume(workers, new_workers, copy):
    options = {"num_envs": 3, "copy": copy, "normalize_observations": True}
    with (
        make_env("dummy/dict", workers=0, num_envs=3, seed=2) as plain,
        make_env("dummy/dict", workers=workers, seed=2, **options) as env,
        make_env("dummy/dict", workers=new_workers, seed=9, **options) as other,
    ):
        raw, seen = roll(plain, 30), []
        env.reset()
        for step in range(31):
            everything = np.concatenate([row["vector"] for row in raw[: step + 1]]).astype(np.float64)
            expected = (raw[step]["vector"] - everything.mean(0)) / np.sqrt(everything.var(0) + 1e-8)
            now = env.last_obs
            np.testing.assert_allclose(now["vector"], np.clip(expected, -10, 10), atol=2e-4)
            np.testing.assert_array_equal(now["image"], raw[step]["image"])
            seen.append({name: value.copy() for name, value in now.items()})
            if step == 17:
                assert other.set_state(env.get_state()) == []
                np.testing.assert_array_equal(other.last_obs["vector"], now["vector"])
            if step < 30:
                env.step(_actions(plain, step))
        for step in range(17, 30):
            other.step(_actions(plain, step))
            for name, value in seen[step + 1].items():
                np.testing.assert_array_equal(other.last_obs[name], value)
        with make_env(
            "dummy/dict", workers=0, seed=2, observation_statistics=env.normalizer.get_state(), **options
        ) as lent:
            before = lent.normalizer.get_state()
            lent.reset()
            lent.step(_actions(plain, 0))
            assert lent.normalizer.get_state()["count"] == before["count"] == 31 * 3
            want = (raw[1]["vector"] - env.normalizer.mean["vector"]) / np.sqrt(
                env.normalizer.variance("vector") + 1e-8
            )
            np.testing.assert_allclose(lent.last_obs["vector"], want, atol=1e-5)


def _actions(env, step, seed=3):
    """The actions that `roll` takes at that step."""
    rng = np.random.default_rng(seed)
    spec = env.spec.action
    for _ in range(step + 1):
        actions = rng.integers(0, np.array(spec.choices).reshape(spec.shape), (env.num_envs, *spec.shape))
    return actions


def test_resume_needs_same_setting():
    with (
        make_env("dummy/count", 1, workers=0, normalize_observations=True) as env,
        make_env("dummy/count", 1) as other,
    ):
        env.reset(), other.reset()
        with pytest.raises(CheckpointError, match="normalize_observations must be true"):
            other.set_state(env.get_state())
        with pytest.raises(CheckpointError, match="normalize_observations must be false"):
            env.set_state(other.get_state())


def test_settings_are_checked():
    for options in ({"normalize_observations": 3}, {"normalize_observations": True, "normalize_clip": 0}):
        with pytest.raises(ConfigError, match="normalize_observations"):
            make_env("dummy/count", 1, **options)
