"""Replay context and write-back: the rows that provide the initial state and action, and the rows written."""

import pytest
import torch

from rl_lab.components.nn.categorical import one_hot
from rl_lab.records import ActMode, Batch
from tests.workflows.dreamer_case import CONTINUOUS, make_batch, make_dreamer, run_hook, vector_spec


def rows_of(columns, start, stop):
    return Batch({key: value[:, start:stop] for key, value in columns.items()})


@pytest.fixture
def stream():
    """A long stored stream with the posteriors of one pass over it as latents."""
    workflow = make_dreamer(algorithm__batch_length=4)
    columns = dict(make_batch(workflow, rows=12).columns)
    columns["is_first"][:, 0] = True
    noise = torch.rand(2, 12, workflow.rssm.stoch, generator=torch.Generator().manual_seed(5))
    previous = torch.cat([torch.zeros_like(columns["action"][:, :1]), columns["action"][:, :-1]], 1)
    embed = workflow.encoder({"vector": columns["obs/vector"]})
    with torch.no_grad():
        states, _ = workflow.rssm.observe_sequence(
            workflow.rssm.initial_state(2), previous, embed, columns["is_first"], noise
        )
    columns["deter"] = states["deter"]  # float32, to avoid rounding
    columns["stoch"] = states["stoch"].argmax(-1).to(torch.uint8)
    return workflow, columns, noise, states


def test_context_row_restores_stream_state(stream):
    workflow, columns, noise, states = stream
    for start in range(12 - 5 + 1):
        inferred, _ = workflow.infer(rows_of(columns, start, start + 5), noise[:, start + 1 : start + 5])
        for key in ("deter", "stoch"):
            assert torch.allclose(inferred[key], states[key][:, start + 1 : start + 5], atol=1e-5)


def test_context_row_gives_previous_action(stream):
    workflow, columns, noise, _ = stream
    columns["is_first"][:, 1:] = False
    batch = rows_of(columns, 2, 7)
    reference, _ = workflow.infer(batch, noise[:, 3:7])
    for row, matters in ((0, True), (4, False)):
        changed = {key: value.clone() for key, value in batch.columns.items()}
        changed["action"][:, row] = (changed["action"][:, row] + 1) % 3
        inferred, _ = workflow.infer(Batch(changed), noise[:, 3:7])
        assert torch.allclose(inferred["deter"], reference["deter"]) != matters


def test_context_observation_is_unused(stream):
    workflow, columns, _noise, _ = stream
    batch = rows_of(columns, 2, 7)
    reference = run_hook(workflow, "update_world_model", batch)
    again = make_dreamer(algorithm__batch_length=4)
    changed = {key: value.clone() for key, value in batch.columns.items()}
    changed["obs/vector"][:, 0] += 100.0
    changed["reward"][:, 0] += 100.0
    result = run_hook(again, "update_world_model", Batch(changed))
    assert torch.equal(result.metrics["loss"], reference.metrics["loss"])


def test_write_back_contains_new_posteriors(stream):
    workflow, columns, _, _ = stream
    hook = workflow.hooks()["update"]
    batch = rows_of(columns, 2, 7)
    twin = make_dreamer(algorithm__batch_length=4)
    result = run_hook(workflow, "update", batch)
    noise = torch.rand(hook.noise["posterior"].shape, generator=torch.Generator().manual_seed(0))
    expected, _ = twin.infer(batch, noise)  # `posterior` is the first noise drawn
    assert result.write_back["deter"].shape == (2, 4, 16)
    assert result.write_back["stoch"].shape == (2, 4, 3)
    assert result.write_back["stoch"].dtype == torch.uint8
    assert torch.allclose(result.write_back["deter"].float(), expected["deter"], atol=1e-2)
    assert torch.equal(one_hot(result.write_back["stoch"].long(), 4), expected["stoch"].detach())


def test_policy_columns_match_act_and_write_back():
    workflow = make_dreamer()
    declared = workflow.policy_columns()
    obs = {"vector": torch.randn(5, 4)}
    _, _, extras = workflow.act(
        obs, workflow.initial_policy_state(5), torch.ones(5, dtype=torch.bool), ActMode()
    )
    written = run_hook(workflow, "update").write_back
    assert set(declared) == set(extras) == set(written)
    for key, spec in declared.items():
        assert extras[key].shape == (5, *spec.shape)
        assert written[key].shape == (2, 5, *spec.shape)
        assert str(extras[key].dtype) == str(written[key].dtype) == f"torch.{spec.dtype}"


@pytest.mark.parametrize("action", [None, CONTINUOUS])
def test_acting_equals_sequence_inference(action):
    """`act` stores the latents that training computes; with one class they are deterministic."""
    spec = vector_spec(action) if action else vector_spec()
    workflow = make_dreamer(spec, algorithm__size__classes=1)
    generator = torch.Generator().manual_seed(0)
    state, rows = workflow.initial_policy_state(2), []
    for t in range(6):
        obs = torch.randn(2, 4, generator=generator)
        is_first = torch.tensor([t == 0, t in (0, 3)])
        mode = ActMode(generator=generator)
        taken, state, extras = workflow.act({"vector": obs}, state, is_first, mode)
        rows.append(
            {"obs/vector": obs, "action": taken, "is_first": is_first, "reward": torch.zeros(2), **extras}
        )
    columns = {key: torch.stack([row[key] for row in rows], 1) for key in rows[0]}
    states, _ = workflow.infer(Batch(columns), torch.rand(2, 5, 3))
    assert torch.allclose(states["deter"], columns["deter"][:, 1:].float(), atol=2e-2)


def test_no_context_starts_from_zeros():
    workflow = make_dreamer(algorithm__replay_context=0)
    assert workflow.policy_columns() == {}
    hook = workflow.hooks()["update"]
    assert (hook.batch.context, hook.batch.rows) == (0, 5)
    batch = make_batch(workflow)
    assert "deter" not in batch
    noise = torch.rand(2, 5, 3)
    states, _ = workflow.infer(batch, noise)
    batch.columns["is_first"] = batch.is_first.clone()
    batch.columns["is_first"][:, 0] = True
    again, _ = workflow.infer(batch, noise)
    assert torch.equal(states["deter"], again["deter"])
    assert run_hook(workflow, "update").write_back is None


def test_missing_latents_start_from_zeros():
    workflow = make_dreamer()
    batch = make_batch(workflow)
    plain = Batch({key: value for key, value in batch.columns.items() if key not in ("deter", "stoch")})
    assert run_hook(workflow, "update", plain).write_back is None


def test_interrupted_stream_ends_episode():
    """A row before an `is_first` row ends its episode, even without a flag."""
    workflow = make_dreamer()
    batch = make_batch(workflow)
    for flag in ("terminated", "truncated", "is_first"):
        batch.columns[flag].zero_()
    cut = Batch({key: value.clone() for key, value in batch.columns.items()})
    cut.columns["is_first"][:, 3] = True
    marked = Batch({key: value.clone() for key, value in cut.columns.items()})
    marked.columns["truncated"][:, 2] = True
    results = [
        run_hook(make_dreamer(), "update", b).metrics["controller/loss/replay_value"]
        for b in (batch, cut, marked)
    ]
    assert results[0] != results[1]
    assert results[1] == results[2]
