from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from rl_lab.utils.checkpoint.saveable import to_saveable
from rl_lab.utils.seeding import Generators, derive_seed, seed_everything


def test_derived_seeds_are_stable_and_distinct():
    assert derive_seed(1, "a") == 294328509404019414  # the same on every machine: saved runs depend on it
    seeds = {
        derive_seed(*parts)
        for parts in [
            (1, "a"),
            ("1", "a"),
            (1, "a", ""),
            ("1a",),
            (1, "b"),
            (-1, "a"),
            (2**80,),
            ("a", 1),
            (),
        ]
    }
    assert len(seeds) == 9
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("part", [True, 1.0, None, np.int64(3)])
def test_derive_seed_argument_types(part):
    with pytest.raises(TypeError, match="str and int"):
        derive_seed(part)


def test_derive_seed_loads_no_torch(subprocess_env):
    code = "import sys, rl_lab.utils.seeding as s, rl_lab.utils.files; s.derive_seed(1); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=subprocess_env)
    assert done.stdout.strip() == "False", done.stderr


def test_generators_are_independent():
    draws = [
        torch.rand(4, generator=generator)
        for generator in (
            Generators(0).cpu("a"),
            Generators(0).cpu("b"),
            Generators(0).device("a"),
            Generators(0, rank=1).cpu("a"),
            Generators(1).cpu("a"),
        )
    ]
    assert len({tuple(draw.tolist()) for draw in draws}) == 5
    assert torch.equal(draws[0], torch.rand(4, generator=Generators(0).cpu("a")))


def everything(generators: Generators) -> list[float]:
    return [
        torch.rand((), generator=generators.cpu("sample")).item(),
        torch.rand((), generator=generators.device("collect")).item(),
        torch.rand(()).item(),
        float(np.random.standard_normal()),  # keeps a spare gaussian in the legacy state
        random.gauss(0, 1),  # so does Python's
        random.random(),
    ]


def test_state_round_trip_through_a_file(tmp_path):
    seed_everything(7)
    generators = Generators(7)
    everything(generators)
    torch.save(to_saveable(generators.get_state()), tmp_path / "state.pt")
    expected = [everything(generators) for _ in range(3)]

    seed_everything(99)
    other = Generators(7)
    other.set_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [everything(other) for _ in range(3)] == expected


def test_set_state_keeps_objects_and_restarts_unknown_generators():
    generators = Generators(3)
    sample, late = generators.cpu("sample"), None
    state = generators.get_state()
    late = generators.cpu("late")
    first = torch.rand(3, generator=late)
    torch.rand(5, generator=sample)
    generators.set_state(state)
    assert generators.cpu("sample") is sample and generators.cpu("late") is late
    assert torch.equal(torch.rand(3, generator=late), first)
    assert torch.equal(torch.rand(3, generator=sample), torch.rand(3, generator=Generators(3).cpu("sample")))


def test_states_of_other_device_restart():
    generators = Generators(3)
    first = torch.rand(2, generator=generators.device("act"))
    state = generators.get_state() | {
        "device_type": "cuda",
        "device": {"act": torch.zeros(16, dtype=torch.uint8)},
    }
    with pytest.warns(UserWarning, match="restart from the seed"):
        generators.set_state(state)
    assert torch.equal(torch.rand(2, generator=generators.device("act")), first)


def test_seed_everything_repeats():
    seed_everything(2**40 + 1)
    first = (random.random(), np.random.rand(), torch.rand(()).item())
    seed_everything(2**40 + 1)
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == first
