"""Sequences that run past the end of an episode: what is behind the end has no effect on training."""

import numpy as np
import pytest
import torch

from rl_lab.buffers.prioritized import PrioritizedReplay
from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.errors import ConfigError
from rl_lab.records import Batch
from rl_lab.workflows.tdmpc.losses import RealRows, mean_over, over_time, policy_loss
from tests.workflows.tdmpc_case import (
    EPISODIC,
    KINDS,
    changed_parts,
    first_version,
    hook_noise,
    make_batch,
    make_tdmpc,
    padded,
    parts_of,
    run_hook,
    weights,
)


def with_priorities(batch):
    generator = torch.Generator().manual_seed(5)
    for name in ("priority", "weight"):
        batch.columns[name] = torch.rand(batch.reward.shape, generator=generator) + 0.1
    return batch


def trained(kind, batches):
    """Weights, metrics and priorities after one update for each batch."""
    workflow = KINDS[kind]()
    results = [
        run_hook(workflow, "update", batch, seed=seed)
        for seed, batch in enumerate(batches(workflow, seed) for seed in range(3))
    ]
    return weights(workflow), results


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_without_ends_train_as_before(kind):
    """With every row real, the masked losses give the same bits as the losses without a mask."""

    def plain(workflow, seed):
        batch = make_batch(workflow, seed=seed)
        batch.columns["terminated"][:] = False
        return with_priorities(batch) if kind == "first_version" else batch

    def masked(workflow, seed):
        batch = plain(workflow, seed)
        return Batch(batch.columns, mask=torch.ones_like(batch.terminated))

    (before, old), (after, new) = trained(kind, plain), trained(kind, masked)
    assert changed_parts(before, after) == set()
    for left, right in zip(old, new, strict=True):
        assert left.metrics.keys() == right.metrics.keys()
        for name, value in left.metrics.items():
            assert torch.equal(value, right.metrics[name]), name
        for name, value in (left.write_back or {}).items():
            assert torch.equal(value, right.write_back[name])


@pytest.mark.parametrize("kind", ["state", "discrete", "episodic", "first_version"])
def test_rows_behind_an_end_have_no_effect(kind):
    def short(fill):
        def batch(workflow, seed):
            rows = workflow.settings.horizon + 1
            sequences = make_batch(workflow, seed=seed)
            sequences = with_priorities(sequences) if kind == "first_version" else sequences
            sequences.columns["terminated"][0, 1] = True
            return padded(sequences, (2, rows - 1, rows, 3), fill=fill)

        return batch

    (zeros, results), (others, again) = trained(kind, short(0.0)), trained(kind, short(1.0))
    assert changed_parts(zeros, others) == set()
    for left, right in zip(results, again, strict=True):
        for name, value in left.metrics.items():
            assert torch.equal(value, right.metrics[name]), name


def test_every_loss_of_an_ended_sequence_is_that_of_its_steps():
    """The losses of a sequence that ends after its first step, by hand: only t = 0 counts, over H = 3."""
    workflow = make_tdmpc(**EPISODIC)
    run_hook(workflow, "update")
    batch, noise = make_batch(workflow), hook_noise(workflow, "update")
    batch.columns["terminated"][:] = False
    batch.columns["terminated"][:, 1] = True
    short, *_ = workflow._model_losses(padded(batch, (2, 2, 2, 2)), noise)
    workflow.model_weights = workflow.model_weights * torch.tensor([1.0, 0.0, 0.0])
    first, latents, _, _ = workflow._model_losses(Batch(batch.columns), noise)
    for name in ("consistency", "reward", "value"):
        assert torch.allclose(short[name], first[name]), name
    ends = workflow.termination_head(latents[1:2])
    by_hand = workflow.termination_head.loss(ends, torch.ones(1, 4))[0] / 3
    assert torch.allclose(short["termination"], by_hand)


def test_loss_functions_by_hand():
    real = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    loss = torch.tensor([[4.0, 6.0], [2.0, 100.0]])
    assert over_time(loss, torch.tensor([0.5, 0.25]), real).tolist() == [2.5, 3.0]
    assert mean_over(loss, real).item() == 4.0
    zero = torch.zeros_like(loss)
    assert policy_loss(loss, zero, 0.5, torch.tensor([1.0, 0.5]), real).item() == pytest.approx(
        -(5 + 0.5) / 2
    )


def test_policy_is_not_trained_in_terminal_states():
    """Row 1 of the first sequence is terminal, row 2 is padding; a truncated last row counts."""
    workflow = make_tdmpc()
    batch = padded(make_batch(workflow), (2, 2, 4, 3))
    batch.columns["terminated"][:] = False
    batch.columns["terminated"][0, 1] = True
    rows = RealRows.of(batch)
    assert rows.states.t().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]]
    assert rows.steps.t().tolist() == [[1, 0, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]]
    assert RealRows.of(Batch(batch.columns)) is None


def test_masked_losses_do_not_sync():
    """The meta device has no values: reading one on the host fails."""
    workflow = make_tdmpc(**EPISODIC)
    for module in (*parts_of(workflow).values(), workflow.action_encoder):
        module.to("meta")
    for name in ("discounts", "policy_weights", "model_weights"):
        setattr(workflow, name, getattr(workflow, name).to("meta"))
    batch = padded(make_batch(workflow), (2, 3, 4, 4))
    batch = Batch({k: v.to("meta") for k, v in batch.columns.items()}, mask=batch.mask.to("meta"))
    noise = {k: v.to("meta") for k, v in hook_noise(workflow, "update").items()}
    losses, _, error, _ = workflow._model_losses(batch, noise)
    assert {loss.shape for loss in losses.values()} == {(4,)} and error.shape == (4,)


# ---------------------------------------------------------------- sampling


def replay(workflow, *, lengths, prioritized=False):
    """One stream with finished episodes of these numbers of rows."""
    kind = PrioritizedReplay if prioritized else ReplayBuffer
    buffer = kind(workflow.spec.row_columns(), capacity=400, num_streams=1)
    rng = np.random.default_rng(0)
    for length in lengths:
        for row in range(length):
            buffer.add(
                {
                    "obs/vector": rng.normal(size=(1, 4)).astype(np.float32),
                    "action": rng.uniform(-1, 1, (1, 2)).astype(np.float32),
                    "reward": np.ones(1, np.float32),
                    "terminated": np.array([row == length - 1]),
                    "truncated": np.zeros(1, bool),
                    "is_first": np.array([row == 0]),
                }
            )
    return buffer


def ends_at(workflow, buffer, batches=40):
    """How often an episode ends at rows 1 to H of a sequence."""
    spec = workflow.hooks()["update"].batch
    generator = torch.Generator().manual_seed(0)
    drawn = [buffer.sample(spec, generator=generator) for _ in range(batches)]
    ended = torch.cat([batch.terminated for batch in drawn])
    assert not ended[:, 0].any()  # every sequence has a step
    return ended[:, 1:].float().mean(0)


def test_an_end_stands_at_every_step():
    lengths = [10] * 30
    pad = make_tdmpc(algorithm__batch_size=64)
    share = ends_at(pad, replay(pad, lengths=lengths))
    assert torch.allclose(
        share, torch.full((3,), 1 / 9), atol=0.02
    )  # nine starts in each episode of ten rows
    within = make_tdmpc(algorithm__batch_size=64, algorithm__boundary="within")
    share = ends_at(within, replay(within, lengths=lengths))
    assert share[:2].tolist() == [0.0, 0.0] and share[2].item() == pytest.approx(1 / 7, abs=0.02)


def test_short_episodes_can_be_trained_on():
    """Episodes of two rows hold no whole sequence, so the original never trains on them."""
    workflow = make_tdmpc()
    buffer = replay(workflow, lengths=[2] * 8)
    hook = workflow.hooks()["update"]
    batch = buffer.sample(hook.batch, generator=torch.Generator().manual_seed(0))
    assert batch.mask.sum(1).tolist() == [2, 2, 2, 2]
    assert torch.isfinite(run_hook(workflow, "update", batch).metrics["loss"])
    within = make_tdmpc(algorithm__boundary="within")
    assert not replay(within, lengths=[2] * 8).ready(within.hooks()["update"].batch)


def test_priorities_of_padded_sequences():
    """TD-MPC (2022): the priority of a sequence sums its real steps and is stored at its first row."""
    workflow = first_version(algorithm__batch_size=8)
    buffer = replay(workflow, lengths=[4, 9, 3, 2], prioritized=True)
    spec = workflow.hooks()["update"].batch
    generator = torch.Generator().manual_seed(0)
    for seed in range(4):
        batch = buffer.sample(spec, generator=generator)
        result = run_hook(workflow, "update", batch, seed=seed)
        priority = result.write_back["priority"]
        assert (priority > 0).all() and torch.isfinite(priority).all()
        buffer.write_back(batch.index, result.write_back, offset=0)
    assert not batch.mask.all()
    row, stored = batch.index.position[-1], buffer.read(0, 18)["priority"][0]
    assert stored[row].item() == pytest.approx((priority[-1, 0].item() + 1e-6) ** 0.6, rel=1e-4)


def test_report_and_dreams_use_real_rows():
    workflow = make_tdmpc()
    batch = make_batch(workflow)
    whole = workflow.report(Batch({key: value[2:3] for key, value in batch.columns.items()}))
    mixed = workflow.report(padded(batch, (2, 3, 4, 2), fill=7.0))
    assert mixed == pytest.approx(whole)
    start = workflow.dream_start(padded(batch, (2, 3, 4, 2), fill=7.0))["latent"]
    last = {"vector": torch.stack([batch["obs/vector"][b, n] for b, n in enumerate((1, 2, 3, 1))])}
    assert torch.allclose(start, workflow.encoder(last))


def test_boundary_setting():
    assert make_tdmpc().hooks()["update"].batch.boundary == "pad"
    with pytest.raises(ConfigError, match=r"algorithm\.boundary is 'cross'"):
        make_tdmpc(algorithm__boundary="cross")
