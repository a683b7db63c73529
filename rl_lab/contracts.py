"""Checks of the Protocols in `rl_lab.protocols`: one for each kind of part, which your tests can call.

    from rl_lab.contracts import check_quantizer

    def test_my_quantizer() -> None:
        check_quantizer(MyQuantizer(vocab=16, dim=4))

A check calls the part with small random tensors on the CPU and raises ContractError with what is wrong. It covers what
the callers rely on: methods, shapes and dtypes, randomness from the given generator only, no look at later rows, state
that can be saved and restored. Whether the maths is right is for the part's own tests.
"""

from __future__ import annotations

import inspect
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab import protocols
from rl_lab.errors import ContractError
from rl_lab.records import ActionSpec, ActMode, ArraySpec, Batch, BatchSpec, NoiseSpec, Spec

Tensors = Mapping[str, torch.Tensor]
FLOAT_TOLERANCE = 1e-4  # of the same numbers computed in another order

# ---------------------------------------------------------------- helpers


def _need(holds: Any, message: str) -> None:
    if not holds:
        raise ContractError(message)


def _name(part: object) -> str:
    return part.__name__ if isinstance(part, type) else type(part).__name__


def members(protocol: type) -> list[str]:
    """Names of the methods and attributes that a Protocol asks for."""
    names: dict[str, None] = {}
    for cls in protocol.__mro__:
        if getattr(cls, "_is_protocol", False) and cls.__module__ == protocols.__name__:
            own = [*inspect.get_annotations(cls), *vars(cls)]
            names |= dict.fromkeys(name for name in own if not name.startswith("_") or name == "__call__")
    return list(names)


def check_members(part: object, protocol: type) -> None:
    """Raise ContractError if the part lacks a method or an attribute of the Protocol."""
    missing = [name for name in members(protocol) if not hasattr(part, name)]
    _need(not missing, f"{_name(part)} lacks {', '.join(missing)}, which protocols.{protocol.__name__} has")


def _seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@contextmanager
def _no_global_randomness(what: str) -> Iterator[None]:
    """Raise ContractError if the block draws from torch's or NumPy's global generator."""
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    yield
    same = torch.equal(before, torch.get_rng_state())
    same = same and bool((numpy_before == np.random.get_state()[1]).all())  # type: ignore[index]
    _need(
        same,
        f"{what} draws from a global generator: use the one that it is given, so that runs can be repeated",
    )


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(_equal(first[key], second[key]) for key in first)
    if isinstance(first, np.ndarray):
        return bool(np.array_equal(first, second))
    return bool(torch.equal(first, second))


def _close(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.allclose(first.float(), second.float(), rtol=FLOAT_TOLERANCE, atol=FLOAT_TOLERANCE)


def _check_shape(value: Any, shape: tuple[int, ...], what: str) -> None:
    _need(isinstance(value, torch.Tensor), f"{what} must be a tensor, not {type(value).__name__}")
    _need(tuple(value.shape) == shape, f"{what} has shape {tuple(value.shape)} and must have {shape}")


def _check_rows(values: Any, count: int, what: str) -> None:
    """A dict of tensors whose first dimension is `count`."""
    _need(isinstance(values, Mapping), f"{what} must be a dict of tensors, not {type(values).__name__}")
    for key, value in values.items():
        _need(
            isinstance(value, torch.Tensor), f"{what}['{key}'] must be a tensor, not {type(value).__name__}"
        )
        _need(
            value.ndim > 0 and len(value) == count,
            f"{what}['{key}'] has shape {tuple(value.shape)}; its first dimension must be {count}",
        )


def _check_layout(state: Tensors, other: Tensors, what: str) -> None:
    layouts = [{key: (tuple(v.shape), v.dtype) for key, v in values.items()} for values in (state, other)]
    _need(
        layouts[0] == layouts[1],
        f"{what} changes its keys, shapes or dtypes: {layouts[0]}, then {layouts[1]}",
    )


def _copy(values: Tensors) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in values.items()}


def random_array(spec: ArraySpec, *lead: int, generator: torch.Generator) -> torch.Tensor:
    """Random values of one array of a spec, (*lead, *shape)."""
    shape = (*lead, *spec.shape)
    if spec.dtype == "bool":
        return torch.rand(shape, generator=generator) < 0.5
    if spec.dtype == "uint8":
        return torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
    if spec.dtype.startswith(("int", "uint")):
        return torch.randint(0, 2, shape, generator=generator).to(getattr(torch, spec.dtype))
    return torch.randn(shape, generator=generator).to(getattr(torch, spec.dtype))


def random_actions(spec: ActionSpec, *lead: int, generator: torch.Generator) -> torch.Tensor:
    """Random actions in the stored form, (*lead, *shape)."""
    if spec.kind == "continuous":
        return torch.rand(*lead, *spec.shape, generator=generator) * 2.0 - 1.0
    drawn = [torch.randint(count, lead, generator=generator) for count in spec.choices]
    return torch.stack(drawn, -1) if spec.shape else drawn[0]


def random_batch(
    spec: Spec, size: int, rows: int, *, extras: Mapping[str, ArraySpec] | None = None, seed: int = 0
) -> Batch:
    """Random rows of one episode each, (size, rows, …). extras: columns that the policy stores."""
    generator = _seeded(seed)
    columns = {
        name: random_array(array, size, rows, generator=generator)
        for name, array in {**spec.row_columns(), **(extras or {})}.items()
    }
    columns["action"] = random_actions(spec.action, size, rows, generator=generator)
    for flag in ("terminated", "truncated", "is_first"):
        columns[flag] = torch.zeros(size, rows, dtype=torch.bool)
    return Batch(columns)


def _noise(specs: Mapping[str, NoiseSpec], name: str, *lead: int, seed: int = 0) -> torch.Tensor | None:
    if name not in specs:
        return None
    draw = torch.rand if specs[name].kind == "uniform" else torch.randn
    return draw(*lead, *specs[name].shape, generator=_seeded(seed))


# ---------------------------------------------------------------- acting


def check_policy(policy: protocols.Policy, spec: Spec, *, num_envs: int = 3) -> None:
    """Check `act` and `initial_policy_state` of a Policy, such as a workflow, on observations of `spec`."""
    check_members(policy, protocols.Policy)
    who = _name(policy)
    generator = _seeded(1)
    obs = {key: random_array(a, num_envs, generator=generator) for key, a in spec.observations.items()}
    initial = policy.initial_policy_state(num_envs)
    _check_rows(initial, num_envs, f"{who}.initial_policy_state({num_envs})")
    everywhere, nowhere = torch.ones(num_envs, dtype=torch.bool), torch.zeros(num_envs, dtype=torch.bool)

    def act(state: Tensors, is_first: torch.Tensor) -> tuple[torch.Tensor, Tensors, Tensors]:
        given = _copy(obs)
        with _no_global_randomness(f"{who}.act"):
            result = policy.act(given, _copy(state), is_first, ActMode(generator=_seeded()))
        _need(_equal(given, obs), f"{who}.act changes the observations that it is given")
        return result

    action, state, columns = act(initial, everywhere)
    check_actions(action, spec.action, num_envs, f"{who}.act: the action")
    _check_layout(initial, state, f"{who}: the policy state")
    _check_rows(columns, num_envs, f"{who}.act: the columns to store")
    declared = _declared_columns(policy)
    _need(
        set(columns) == set(declared),
        f"{who}.act returns the columns {sorted(columns)}, but policy_columns() declares {sorted(declared)}",
    )
    for key, array in declared.items():
        _check_shape(columns[key], (num_envs, *array.shape), f"{who}.act: the column '{key}'")
    again, state_again, _ = act(initial, everywhere)
    _need(
        _equal(action, again) and _equal(state, state_again),
        f"{who}.act: the same generator gives other actions",
    )
    _, later, _ = act(state, nowhere)
    fresh, fresh_state, _ = act(later, everywhere)
    _need(
        _equal(fresh, action) and _equal(fresh_state, state),
        f"{who}.act must ignore the policy state where is_first is True",
    )


def _declared_columns(policy: object) -> Mapping[str, ArraySpec]:
    columns: Mapping[str, ArraySpec] = getattr(policy, "policy_columns", dict)()
    return columns


def check_actions(action: Any, spec: ActionSpec, count: int, what: str = "the action") -> None:
    """Check the form of actions (count, …): shape, dtype, and choices that exist."""
    _check_shape(action, (count, *spec.shape), what)
    if spec.kind == "continuous":
        _need(action.is_floating_point(), f"{what} must be float, not {action.dtype}")
        _need(bool(action.isfinite().all()), f"{what} is not finite")
        return
    _need(action.dtype == torch.int64, f"{what} must be int64, not {action.dtype}")
    choices = torch.tensor(spec.choices) if spec.shape else spec.choices[0]
    _need(bool(((action >= 0) & (action < choices)).all()), f"{what} has a choice outside of {spec.choices}")


def check_world_model(
    model: protocols.WorldModel, spec: Spec, *, batch: Batch | None = None, size: int = 2, rows: int = 4
) -> None:
    """Check a WorldModel: start after rows, act and step twice, decode.

    batch: the rows to start after, if they have columns that `spec` and `policy_columns()` do not name
    """
    check_members(model, protocols.WorldModel)
    who = _name(model)
    if batch is None:
        batch = random_batch(spec, size, rows, extras=_declared_columns(model))
    size = len(batch)

    def start(rows: Batch) -> dict[str, torch.Tensor]:
        with _no_global_randomness(f"{who}.dream_start"):
            return model.dream_start(rows, generator=_seeded())

    state = start(batch)
    _check_rows(state, size, f"{who}.dream_start: the state")
    other = Batch({**batch.columns, "action": batch.action.clone()}, mask=batch.mask)
    other.action[:, -1] = random_actions(spec.action, size, generator=_seeded(3))
    _need(
        _equal(state, start(other)),
        f"{who}.dream_start reads the action of the last row, which is not taken yet",
    )

    def step(state: Tensors) -> tuple[Any, ...]:
        with _no_global_randomness(f"{who}.dream_act"):
            action, acted = model.dream_act(_copy(state), ActMode(generator=_seeded(1)))
        with _no_global_randomness(f"{who}.dream_step"):
            following, outcome = model.dream_step(_copy(acted), action, generator=_seeded(2))
        return action, acted, following, outcome

    action, acted, following, outcome = step(state)
    check_actions(action, spec.action, size, f"{who}.dream_act: the action")
    _check_rows(acted, size, f"{who}.dream_act: the state")
    _check_rows(following, size, f"{who}.dream_step: the state")
    for name in ("reward", "terminated"):
        value = getattr(outcome, name)
        _check_shape(value, (size,), f"{who}.dream_step: {name}")
        _need(value.is_floating_point(), f"{who}.dream_step: {name} must be float, not {value.dtype}")
    ends = outcome.terminated
    _need(bool(((ends >= 0) & (ends <= 1)).all()), f"{who}.dream_step: terminated must be a probability")
    repeated = step(state)
    _need(
        _equal(action, repeated[0]) and _equal(following, repeated[2]),
        f"{who}: the same generators give another dream",
    )
    further = step(following)
    _check_layout(following, further[2], f"{who}: the state of a dream")
    shown = dict(outcome.obs)
    if isinstance(model, protocols.ObservationDecoder):
        shown |= model.dream_observation(following)
    for key, value in shown.items():
        _need(key in spec.observations, f"{who} decodes '{key}', which {spec.name} does not observe")
        _check_shape(value, (size, *spec.observations[key].shape), f"{who}: the decoded '{key}'")


# ---------------------------------------------------------------- replay


def check_sampler(
    sampler: protocols.Sampler | protocols.EpisodeSampler,
    *,
    starts: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
    count: int = 16,
) -> None:
    """Check a Sampler that has something to draw.

    starts: which of K drawn pairs are allowed, (K,) bool
    """
    check_members(sampler, protocols.Sampler)
    who = _name(sampler)
    _need(sampler.available() > 0, f"{who}.available() is 0: give the check a sampler with starts to draw")

    def draw(seed: int) -> tuple[np.ndarray, np.ndarray]:
        with _no_global_randomness(f"{who}.draw"):
            found = sampler.draw(count, _seeded(seed))
        for value in found:
            ok = isinstance(value, np.ndarray) and value.shape == (count,) and value.dtype == np.int64
            _need(ok, f"{who}.draw({count}) must return two int64 arrays of shape ({count},)")
        return found

    before = sampler.get_state()
    first = draw(0)
    if starts is not None:
        allowed = starts(*first)
        _need(bool(np.all(allowed)), f"{who}.draw returns a start that is not allowed: {first}")
    sampler.undo()
    again = draw(0)
    _need(
        all(np.array_equal(a, b) for a, b in zip(first, again)),
        f"{who}: after undo() the same draw gives other starts",
    )
    _saveable(before, f"{who}.get_state()")
    sampler.set_state(before)
    again = draw(0)
    _need(
        all(np.array_equal(a, b) for a, b in zip(first, again)),
        f"{who}: set_state() does not restore its draws",
    )


def _saveable(state: Any, what: str) -> None:
    from rl_lab.errors import CheckpointError
    from rl_lab.utils.checkpoint.saveable import to_saveable

    try:
        to_saveable(state)
    except CheckpointError as error:
        raise ContractError(f"{what} cannot be part of a checkpoint: {error}") from error


def check_buffer(
    make: Callable[[], protocols.Buffer],
    *,
    spec: BatchSpec | None = None,
    num_streams: int = 2,
    rows: int = 40,
    episode: int = 8,
    mutable: str = "",
) -> None:
    """Check a Buffer with a float column `reward` and a column `is_first`: store, sample, undo, save and restore.

    make:    returns a new, empty buffer each time; it holds at least `rows` rows of each of `num_streams`
    spec:    what is sampled
    episode: rows of an episode
    mutable: a column (float, one number a row) that `write_back` may change
    """
    spec = spec or BatchSpec(size=6, length=3, boundary="within")
    buffer = make()
    check_members(buffer, protocols.Buffer)
    who = _name(buffer)
    columns = buffer.columns
    _need({"reward", "is_first"} <= set(columns), f"{who}: the check needs the columns reward and is_first")
    _need(not buffer.ready(spec), f"{who} is ready while it is empty")
    _need(buffer.shortage(spec), f"{who}.shortage must say why nothing can be drawn")
    _fill(buffer, columns, num_streams, rows, episode)
    _need(buffer.total_rows - buffer.oldest_position >= 1, f"{who} holds no rows after {rows} were added")
    _need(buffer.ready(spec) and not buffer.shortage(spec), f"{who} is not ready after {rows} rows")
    _need(isinstance(buffer.describe(), str), f"{who}.describe() must be a line of text")

    def sample(source: protocols.Buffer, seed: int, out: Batch | None = None) -> Batch:
        with _no_global_randomness(f"{who}.sample"):
            batch = source.sample(spec, generator=_seeded(seed), out=out)
        return Batch(_copy(batch.columns), batch.index, None if batch.mask is None else batch.mask.clone())

    batch = sample(buffer, 0)
    for name, value in batch.columns.items():  # also columns of the sampler, such as weights
        shape = columns[name].shape if name in columns else tuple(value.shape[2:])
        _check_shape(value, (spec.size, spec.rows, *shape), f"{who}.sample: the column '{name}'")
    real = torch.ones(spec.size, spec.rows, dtype=torch.bool) if batch.mask is None else batch.mask
    pairs = real[:, 1:] & real[:, :-1]
    steps = batch.reward[:, 1:] - batch.reward[:, :-1]
    _need(
        bool((steps[pairs] == 1).all()),
        f"{who}.sample: the rows of a sequence are not consecutive rows of a stream",
    )
    if spec.boundary != "cross":
        _need(not bool((batch.is_first[:, 1:] & pairs).any()), f"{who}.sample crosses the end of an episode")
    _need(batch.index is not None, f"{who}.sample must set batch.index")
    buffer.undo(spec)
    _need(
        _equal(batch.columns, sample(buffer, 0).columns),
        f"{who}: after undo() the same draw gives another batch",
    )
    out = buffer.make_batch(spec)
    addresses = {name: value.data_ptr() for name, value in out.columns.items()}
    filled = buffer.sample(spec, generator=_seeded(1), out=out)
    same = filled is out and addresses == {name: value.data_ptr() for name, value in out.columns.items()}
    _need(same, f"{who}.sample(out=…) must fill the tensors of `out`")
    if mutable:
        _check_write_back(buffer, spec, mutable, who)
    with tempfile.TemporaryDirectory() as folder:
        state, entry = buffer.get_state(), buffer.checkpoint(Path(folder))
        _saveable(state, f"{who}.get_state()")
        _need({"files", "meta"} <= set(entry), f"{who}.checkpoint must return files and meta")
        restored = make()
        restored.restore(Path(folder), entry)
        restored.set_state(state)
        _need(restored.total_rows == buffer.total_rows, f"{who}.restore does not restore all rows")
        expected, found = sample(buffer, 2), sample(restored, 2)
        _need(_equal(expected.columns, found.columns), f"{who}: a restored buffer samples other rows")
    for part in (buffer, restored):
        getattr(part, "close", lambda: None)()


def _fill(
    buffer: protocols.Buffer, columns: Mapping[str, ArraySpec], num_streams: int, rows: int, episode: int
) -> None:
    """Rows whose reward counts up in each stream, with an episode every `episode` rows."""
    generator = _seeded()
    for step in range(rows):
        row: dict[str, Any] = {
            name: random_array(array, num_streams, generator=generator).numpy()
            for name, array in columns.items()
            if array.dtype != "bfloat16"
        }
        row |= {
            name: torch.zeros(num_streams, *array.shape)
            for name, array in columns.items()
            if array.dtype == "bfloat16"
        }
        ends = np.full(num_streams, (step + 1) % episode == 0)
        row["reward"] = (1000.0 * np.arange(num_streams) + step).astype(np.float32)
        row["is_first"] = np.full(num_streams, step % episode == 0)
        row |= {
            name: ends & (name == "terminated") for name in ("terminated", "truncated") if name in columns
        }
        buffer.add(row)


def _check_write_back(buffer: protocols.Buffer, spec: BatchSpec, column: str, who: str) -> None:
    one = replace(spec, size=1)
    batch = buffer.sample(one, generator=_seeded(4))
    assert batch.index is not None
    new = torch.full((1, spec.length), 7.0)
    buffer.write_back(batch.index, {column: new}, offset=spec.context)
    buffer.undo(one)
    again = buffer.sample(one, generator=_seeded(4))
    written, real = again[column][:, spec.context :].float(), again.mask
    kept = written if real is None else written[real[:, spec.context :]]
    _need(bool((kept == 7.0).all()), f"{who}.write_back does not change the sampled rows")


# ---------------------------------------------------------------- components


def check_return_computer(computer: protocols.ReturnComputer, *, size: int = 3, rows: int = 9) -> None:
    """Check a ReturnComputer: shapes, which rows a return may depend on, and where episodes end."""
    who = _name(computer)
    generator = _seeded()
    reward, value = (torch.randn(size, rows, generator=generator) for _ in range(2))
    cont = torch.rand(size, rows, generator=generator)
    never = torch.zeros(size, rows, dtype=torch.bool)
    returns = computer(reward, cont, value)
    _check_shape(returns, (size, rows - 1), f"{who}: the returns")
    _need(_close(returns, computer(reward, cont, value, last=never)), f"{who}: last=None must be as nowhere")
    half = rows // 2
    early = [part.clone() for part in (reward, cont, value)]
    for part in early:
        part[:, : half + 1] += 1.0
    _need(_close(returns[:, half:], computer(*early)[:, half:]), f"{who}: a return depends on earlier rows")
    ended = cont.clone()
    ended[:, half] = 0.0
    _need(
        _close(computer(reward, ended, value)[:, half - 1], reward[:, half]),
        f"{who}: where cont is 0, the return must be the reward alone",
    )
    last = never.clone()
    last[:, half] = True
    late = [part.clone() for part in (reward, cont, value)]
    for part in late:
        part[:, half + 1 :] += 1.0
    before = [computer(*parts, last=last)[:, :half] for parts in ((reward, cont, value), late)]
    _need(_close(*before), f"{who}: a return depends on rows after `last`, which are of another episode")
    _need(
        _close(computer(reward[:1], cont[:1], value[:1]), returns[:1]),
        f"{who}: the rows of a batch are not independent",
    )


def check_planning_model(
    model: protocols.PlanningModel,
    latent: Any,  # (R, …), or a dict of them
    action_size: int,
    *,
    horizon: int = 3,
) -> None:
    """Check a PlanningModel from R latents: next, reward, value, policy, and the abilities that it has."""
    from rl_lab.components.controllers.mpc_planner import stack, trajectory_values

    check_members(model, protocols.PlanningModel)
    who = _name(model)
    count = len(next(iter(latent.values()))) if isinstance(latent, Mapping) else len(latent)
    noise: Mapping[str, NoiseSpec] = getattr(model, "noise", {})
    width, dtype = getattr(model, "action_width", None) or action_size, getattr(model, "dtype", torch.float32)
    actions = torch.zeros(count, horizon, width, dtype=dtype)
    actions[..., :action_size] = (
        torch.rand(count, horizon, action_size, generator=_seeded()) * 2.0 - 1.0
    ).to(dtype)

    def layout(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: tuple(part.shape) for key, part in value.items()}
        return tuple(value.shape)

    latents = [latent]
    with torch.no_grad(), _no_global_randomness(who):
        for t in range(horizon):
            latents.append(model.next(latents[-1], actions[:, t], _noise(noise, "next", count, seed=t)))
            _need(layout(latents[-1]) == layout(latent), f"{who}.next must return latents of the same form")
        following = stack(latents[1:])
        asks = getattr(model, "rewards_on_arrival", True) or isinstance(model, protocols.TerminatingModel)
        reward = model.reward(stack(latents[:-1]), actions, following if asks else None)
        _check_shape(reward, (count, horizon), f"{who}.reward")
        value_noise = _noise(noise, "value", count)
        _check_shape(model.value(latents[-1], value_noise), (count,), f"{who}.value")
        proposal = model.policy(latent, _noise(noise, "policy", count))
        _check_shape(proposal, (count, action_size), f"{who}.policy")
        if isinstance(model, protocols.TerminatingModel):
            alive = model.alive(following)
            _check_shape(alive, (count, horizon), f"{who}.alive")
            _need(bool(((alive >= 0) & (alive <= 1)).all()), f"{who}.alive must be a probability")
        if isinstance(model, protocols.ReturnModel):
            weight = torch.rand(count, horizon + 1, generator=_seeded(1))
            found = model.returns(latent, actions[..., :action_size], weight, value_noise)
            slow = trajectory_values(model, latent, actions, weight=weight, value_noise=value_noise)
            _need(_close(found, slow), f"{who}.returns differs from the sum of its rewards and its value")


def check_tokenizer(tokenizer: protocols.Tokenizer, spec: Spec, *, size: int = 2, rows: int = 3) -> None:
    """Check a Tokenizer of the image observation `tokenizer.key` of `spec`."""
    check_members(tokenizer, protocols.Tokenizer)
    who = _name(tokenizer)
    _need(
        tokenizer.key in spec.observations,
        f"{who}.key is '{tokenizer.key}', which {spec.name} does not observe",
    )
    batch = random_batch(spec, size, rows)
    images = batch.obs[tokenizer.key].float() / 255.0
    frame, previous, action = images[:, 1], images[:, 0], batch.action[:, 0]
    with torch.no_grad(), _no_global_randomness(who):
        tokens = tokenizer.encode(frame, previous, action)
        _check_shape(tokens, (size, tokenizer.num_tokens), f"{who}.encode")
        _check_tokens(tokens, tokenizer.vocab, f"{who}.encode")
        shown = tokenizer.decode(tokens, previous, action)
        _check_shape(shown, tuple(frame.shape), f"{who}.decode")
        _need(bool(((shown >= 0) & (shown <= 1)).all()), f"{who}.decode must return pixels in [0, 1]")
        features = tokenizer.frame_features(previous)
        with_features = tokenizer.decode(tokens, previous, action, features)
        _need(
            _close(shown, with_features),
            f"{who}.decode: features of the previous frame must not change the result",
        )
        view = tokenizer.policy_view(frame)
        _check_shape(view, tuple(frame.shape), f"{who}.policy_view")
        if not tokenizer.contextual:
            alone = tokenizer.decode(tokenizer.encode(frame))
            _need(
                _close(shown, alone),
                f"{who} is not contextual, but depends on the previous frame or the action",
            )
    noise = torch.rand(tokenizer.noise_size(size, rows), generator=_seeded(2))
    before = _weights(tokenizer)
    with _no_global_randomness(f"{who}.compute_loss"):
        loss, metrics = tokenizer.compute_loss(batch, noise, learn=False)
    _need(_equal(before, _weights(tokenizer)), f"{who}.compute_loss(learn=False) changes the tokenizer")
    _check_loss(tokenizer, loss, metrics, who)
    with _no_global_randomness(f"{who}.compute_loss"):
        tokenizer.compute_loss(batch, noise)


def _check_tokens(tokens: torch.Tensor, vocab: int, what: str) -> None:
    _need(tokens.dtype == torch.int64, f"{what}: tokens must be int64, not {tokens.dtype}")
    _need(bool(((tokens >= 0) & (tokens < vocab)).all()), f"{what}: a token is not one of 0 … {vocab - 1}")


def _weights(part: object) -> dict[str, torch.Tensor]:
    return _copy(part.state_dict()) if isinstance(part, torch.nn.Module) else {}


def _check_loss(part: object, loss: protocols.TotalLoss, metrics: Tensors, who: str) -> None:
    total = loss.loss_total
    number = float(total.detach())
    _check_shape(total, (), f"{who}.compute_loss: loss_total")
    _need(math.isfinite(number), f"{who}.compute_loss: loss_total is {number}")
    for name, value in metrics.items():
        _check_shape(value, (), f"{who}.compute_loss: the metric '{name}'")
        _need(not value.requires_grad, f"{who}.compute_loss: the metric '{name}' must be detached")
    total.backward()
    if isinstance(part, torch.nn.Module):
        trained = [p for p in part.parameters() if p.requires_grad]
        _need(any(p.grad is not None for p in trained), f"{who}.compute_loss: no parameter gets a gradient")


def check_quantizer(quantizer: protocols.Quantizer, *, count: int = 20) -> None:
    """Check a Quantizer: codes that exist, straight-through gradients, learning in `learn` only."""
    check_members(quantizer, protocols.Quantizer)
    who = _name(quantizer)
    vectors = torch.randn(count, quantizer.dim, generator=_seeded()).requires_grad_()
    before = _weights(quantizer)
    with _no_global_randomness(who):
        found = quantizer(vectors)
    _check_shape(found.tokens, (count,), f"{who}: the tokens")
    _check_tokens(found.tokens, quantizer.vocab, who)
    _check_shape(found.vectors, (count, quantizer.dim), f"{who}: the quantized vectors")
    _check_shape(found.loss, (count,), f"{who}: the loss")
    for name, value in found.metrics.items():
        _check_shape(value, (), f"{who}: the metric '{name}'")
        _need(not value.requires_grad, f"{who}: the metric '{name}' must be detached")
    embedded = quantizer.embed(found.tokens)
    _need(
        _close(found.vectors.detach(), embedded.detach()),
        f"{who}.embed(tokens) must give the quantized vectors",
    )
    _check_shape(quantizer.embed(found.tokens.view(-1, 2)), (count // 2, 2, quantizer.dim), f"{who}.embed")
    (gradient,) = torch.autograd.grad(found.vectors.sum(), vectors)
    _need(bool(gradient.abs().sum() > 0), f"{who}: no gradient reaches the vectors (straight through)")
    _need(_equal(before, _weights(quantizer)), f"{who} changes its codes outside of learn()")
    noise = torch.rand(quantizer.noise_size(count), generator=_seeded(1))
    mask = torch.arange(count) % 2 == 0
    with _no_global_randomness(f"{who}.learn"):
        quantizer.learn(vectors.detach(), found.tokens, mask, noise)
    after = quantizer(vectors).tokens
    _check_tokens(after, quantizer.vocab, f"{who} after learn()")


def check_backbone(backbone: protocols.SequenceBackbone, *, size: int = 2, length: int = 6) -> None:
    """Check a SequenceBackbone: causal, and the same numbers step by step as for the complete sequence."""
    check_members(backbone, protocols.SequenceBackbone)
    who = _name(backbone)
    x = torch.randn(size, length, backbone.dim, generator=_seeded())
    with torch.no_grad(), _no_global_randomness(who):
        y = backbone(x)
        _check_shape(y, (size, length, backbone.dim), f"{who}: the output")
        half = length // 2
        changed = x.clone()
        changed[:, half:] += 1.0
        _need(
            _close(y[:, :half], backbone(changed)[:, :half]),
            f"{who} is not causal: it reads later embeddings",
        )
        state = backbone.init_state(size)
        _check_rows(state, size, f"{who}.init_state")
        found = []
        pieces = [x[:, :2], *x[:, 2:].split(1, 1)]
        for piece in pieces:
            out, state = backbone.step(piece, state)
            found.append(out)
        _check_rows(state, size, f"{who}.step: the state")
        _need(_close(torch.cat(found, 1), y), f"{who}.step gives other outputs than the complete sequence")
        _need(_close(backbone(x[:1]), y[:1]), f"{who}: the sequences of a batch are not independent")
        if backbone.seeds:
            seeds = torch.arange(backbone.seeds)
            _need(
                _close(backbone(x, seeds), backbone(x, seeds)), f"{who}: the same seeds give another dropout"
            )


# ---------------------------------------------------------------- evolution


def check_evolvable(
    step: protocols.Evolvable,
    spec: Spec,
    *,
    phase: Mapping[str, Any] | None = None,
    batch: Batch | None = None,
) -> None:
    """Check the step of an EvolveHook: ask, act, tell, and the abilities that it has.

    phase: what `begin` gets; batch: what `evaluate` gets, of an evolution that dreams
    """
    check_members(step, protocols.Evolvable)
    who = _name(step)
    _need(step.episodes_per_candidate >= 1, f"{who}.episodes_per_candidate must be at least 1")
    if isinstance(step, protocols.PhasedEvolution):
        step.begin(phase or {"name": "evolve", "type": "online", "progress": 0.0, "iteration": 0, "set": {}})
    candidates = step.ask()
    _need(
        candidates.ndim == 2 and len(candidates) > 0,
        f"{who}.ask must return (P, D), not {tuple(candidates.shape)}",
    )
    _need(_equal(candidates, step.ask()), f"{who}.ask must return the same candidates until tell is called")
    count = len(candidates)
    if isinstance(step, protocols.DreamEvolution) and step.dreams:
        _need(batch is not None, f"{who} dreams: give the check the batch that `evaluate` gets")
        assert batch is not None
        with _no_global_randomness(f"{who}.evaluate"):
            fitness, dreamed = step.evaluate(candidates, batch, _seeded())
        _check_shape(fitness, (count,), f"{who}.evaluate: the fitness")
        _need(dreamed > 0, f"{who}.evaluate must return the number of imagined steps")
    else:
        obs = {key: random_array(a, count, generator=_seeded(1)) for key, a in spec.observations.items()}
        state, is_first = step.initial_policy_state(count), torch.ones(count, dtype=torch.bool)
        _check_rows(state, count, f"{who}.initial_policy_state")
        with torch.no_grad(), _no_global_randomness(f"{who}.act"):
            action, after = step.act(candidates, obs, state, is_first, ActMode(generator=_seeded()))
        check_actions(action, spec.action, count, f"{who}.act: the action")
        _check_rows(after, count, f"{who}.act: the state")
        fitness = torch.arange(count, dtype=torch.float32)
    metrics = step.tell(candidates, fitness)
    _need(isinstance(metrics, Mapping), f"{who}.tell must return metrics, not {type(metrics).__name__}")
    for name, value in metrics.items():
        _need(isinstance(value, int | float), f"{who}.tell: the metric '{name}' must be a number")
    _need(step.ask().shape[1] == candidates.shape[1], f"{who}.ask: the size of a candidate changes")
