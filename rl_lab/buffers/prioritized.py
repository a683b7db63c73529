"""PrioritizedReplay: prioritised experience replay.

A sequence whose first trained row (the one after its context) is row i is drawn with probability P(i) =
p_i^alpha / Σ p^alpha, where the sum is over the n rows at which a sequence fits. The batch has the importance
weight (n · P(i))^-beta, divided by the largest of the batch, as column `weight` (B, T), equal in all rows of
a sequence.

The hook writes priorities back with `UpdateResult(write_back={"priority": value})`: (B, 1) for the first
trained row, or (B, length) for all rows. New rows get the largest stored priority, initially 1, so that they
are drawn soon. The column stores (p + epsilon)^alpha, computed once when p is written, so a resumed run draws
from the same values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.batches import allocate
from rl_lab.buffers.chunk_files import LostFile
from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.buffers.ring import Array, Ring, to_device
from rl_lab.buffers.samplers import SamplerFactory, UniformSampler
from rl_lab.errors import ConfigError
from rl_lab.records import ArraySpec, Batch, BatchSpec, RowIndex

PRIORITY, WEIGHT = "priority", "weight"
MAX_PRIORITY = 1e6  # larger and infinite priorities are clamped to it; NaN counts as 0


class PrioritizedReplay(ReplayBuffer):
    """ReplayBuffer with the additional sampler "prioritized" and a stored column `priority`.

    alpha:    exponent of the priorities; 0: uniform
    beta:     exponent of the importance weights; 1: full correction
    epsilon:  added to each priority, so that every row can be drawn
    columns, capacity, …: see ReplayBuffer
    """

    def __init__(
        self,
        columns: Mapping[str, ArraySpec],
        *,
        capacity: int,
        num_streams: int,
        alpha: float = 0.6,  # alpha and beta of TD-MPC v1 (nicklashansen/tdmpc cfgs)
        beta: float = 0.4,
        epsilon: float = 1e-6,
        device: torch.device | str = "cpu",
        storage: str = "auto",
        folder: Path | str | None = None,
        mutable: Sequence[str] = (),
        samplers: Mapping[str, SamplerFactory] | None = None,
        chunk_rows: int = 1024,
    ) -> None:
        if alpha < 0 or beta < 0 or epsilon <= 0:
            raise ConfigError(
                f"alpha and beta must be at least 0 and epsilon above 0, not {alpha}, {beta} and {epsilon}"
            )
        taken = next((name for name in (PRIORITY, WEIGHT) if name in columns), None)
        if taken is not None:
            raise ConfigError(f"column '{taken}' is reserved by the buffer: rename the workflow's column")
        self.alpha, self.beta, self.epsilon = float(alpha), float(beta), float(epsilon)
        self._first = (1.0 + self.epsilon) ** self.alpha  # stored priority of the first rows
        super().__init__(
            {**columns, PRIORITY: ArraySpec((), "float32")},
            capacity=capacity,
            num_streams=num_streams,
            device=device,
            storage=storage,
            folder=folder,
            mutable=(*mutable, PRIORITY),
            samplers={"prioritized": self._prioritized, **(samplers or {})},
            chunk_rows=chunk_rows,
        )

    def add(self, rows: Mapping[str, Array]) -> None:
        """Store rows; rows without a priority get the largest stored one."""
        if PRIORITY in rows:
            rows = {**rows, **self._scaled({PRIORITY: torch.as_tensor(rows[PRIORITY])})}
        elif "is_first" in rows:
            held = self._priorities.max()
            largest = torch.where(held > 0, held, self._first)
            rows = {**rows, PRIORITY: largest.expand(tuple(rows["is_first"].shape))}
        super().add(rows)

    def make_batch(self, spec: BatchSpec, *, device: torch.device | str | None = None) -> Batch:
        """As in ReplayBuffer, with `weight` (B, T) if the BatchSpec's sampler is "prioritized"."""
        if not isinstance(self._sampler(spec), PrioritizedSampler):
            return super().make_batch(spec, device=device)
        place = self.device if device is None else torch.device(device)
        pin = place.type == "cpu" and self.device.type == "cuda"
        return allocate({**self._columns.specs, WEIGHT: ArraySpec((), "float32")}, spec, place, pin)

    def restore(
        self, folder: Path, entry: Mapping[str, Any], *, skip_corrupt: bool = False
    ) -> list[LostFile]:
        lost = super().restore(folder, entry, skip_corrupt=skip_corrupt)
        for sampler in self._prioritized_samplers():
            sampler.rebuild()
        return lost

    def write_back(self, index: RowIndex, columns: Mapping[str, torch.Tensor], *, offset: int) -> None:
        """As in ReplayBuffer; negative and NaN priorities count as 0, and MAX_PRIORITY is the maximum."""
        super().write_back(index, self._scaled(columns), offset=offset)

    def write(self, position: int, columns: Mapping[str, torch.Tensor]) -> None:
        super().write(position, self._scaled(columns))
        if PRIORITY in columns:
            for sampler in self._prioritized_samplers():
                sampler.rebuild()

    def _fill(self, out: Batch, spec: BatchSpec, stream: Any, position: Any) -> None:
        stored = {name: value for name, value in out.columns.items() if name != WEIGHT}
        super()._fill(Batch(stored, out.index, out.mask), spec, stream, position)
        if WEIGHT in out.columns:
            weights = self._sampler(spec).weights  # type: ignore[attr-defined]
            out.columns[WEIGHT].copy_(weights[:, None].expand(-1, spec.rows))

    def _write_rows(self, index: RowIndex, columns: Mapping[str, torch.Tensor], offset: int) -> None:
        super()._write_rows(index, columns, offset)
        if PRIORITY in columns:
            count = columns[PRIORITY].shape[1]
            where = self._columns.held(index, offset, count, self.ring.oldest, self.ring.cursor)
            for sampler in self._prioritized_samplers():
                sampler.changed(where)

    def _scaled(self, columns: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Replace priorities by their stored form, which is finite and above 0."""
        if PRIORITY not in columns:
            return columns
        given = columns[PRIORITY].detach().float()
        finite = torch.nan_to_num(given, nan=0.0, posinf=MAX_PRIORITY).clamp(0.0, MAX_PRIORITY)
        return {**columns, PRIORITY: (finite + self.epsilon) ** self.alpha}

    @property
    def _priorities(self) -> torch.Tensor:
        return self._columns.rings[PRIORITY]

    def _prioritized(self, ring: Ring, spec: BatchSpec) -> PrioritizedSampler:
        return PrioritizedSampler(ring, spec, priorities=self._priorities, beta=self.beta)

    def _prioritized_samplers(self) -> list[PrioritizedSampler]:
        return [sampler for sampler in self._samplers.values() if isinstance(sampler, PrioritizedSampler)]


class PrioritizedSampler:
    """Draws starts by the priority of their first trained row.

    priorities: (N, capacity) the buffer's column on the storage device; 0 only where no row is stored
    """

    def __init__(self, ring: Ring, spec: BatchSpec, *, priorities: torch.Tensor, beta: float) -> None:
        if spec.boundary == "pad" and (spec.pad != "right" or spec.least <= spec.context):
            raise ConfigError(
                "sampler 'prioritized' pads only on the right, behind the context: "
                f"use pad 'right' and least {spec.context + 1} or more"
            )
        self._ring = ring
        self._needed, self._context = spec.stored_rows, spec.context
        self._one_episode = spec.boundary != "cross"
        self._uniform = UniformSampler(ring, spec)
        self._priorities = priorities
        self._beta = beta
        places = ring.num_streams * ring.capacity
        device = priorities.device
        self._tree = SumTree(places) if device.type == "cpu" else None
        self._sum = RunningSum(places, device) if self._tree is None else None
        self.weights: torch.Tensor | None = None  # (B,) importance weights of the last draw
        self.rebuild()

    def available(self) -> int:
        return self._uniform.available()

    def draw(self, count: int, generator: torch.Generator) -> tuple[Any, Any]:
        """Return streams and positions (B,): arrays, or tensors if the rows are on a device."""
        ring = self._ring
        uniforms = torch.rand(count, dtype=torch.float64, generator=generator)
        place: Any
        if self._tree is not None:
            place = self._tree.find(uniforms.numpy())
            probability = torch.from_numpy(self._tree.get(place) / self._tree.total)
        else:
            assert self._sum is not None
            place, probability = self._sum.find(to_device(uniforms, self._priorities.device))
        weights = (self.available() * probability) ** -self._beta
        self.weights = (weights / weights.max()).float()
        position = ring.oldest + (place % ring.capacity - ring.oldest) % ring.capacity
        return place // ring.capacity, position - self._context

    def undo(self) -> None:
        """Nothing to undo: a draw changes no state."""

    def on_add(self, position: int) -> None:
        """Remove the start whose first row was replaced; add the one whose last needed row is `position`."""
        ring = self._ring
        replaced = position - ring.capacity
        if replaced >= ring.first:
            self._set_all_streams(replaced + self._context, np.zeros(ring.num_streams, dtype=bool))
        start = position - self._needed + 1
        if start >= ring.oldest:
            fits = np.ones(ring.num_streams, dtype=bool)
            if self._one_episode:
                fits = ring.unbroken(
                    np.arange(ring.num_streams), np.full(ring.num_streams, start), self._needed
                )
            self._set_all_streams(start + self._context, fits)

    def changed(self, where: torch.Tensor) -> None:
        """Update the weights of places (K,) whose priorities were written; the spare place is ignored."""
        flat = self._priorities.view(-1)
        if self._tree is not None:
            place = np.unique(where.numpy())
            place = place[place < self._tree.size]
            # Only where a sequence fits; `on_add` sets the others later.
            place = place[self._tree.get(place) > 0]
            self._tree.set(place, flat[torch.from_numpy(place)].double().numpy())
        else:
            assert self._sum is not None
            fits = self._sum.weights[where] > 0
            new = flat[where.clamp(max=flat.shape[0] - 1)]
            self._sum.weights.index_copy_(0, where, torch.where(fits, new, 0.0))

    def rebuild(self) -> None:
        """Recompute all weights from the ring and the column."""
        ring = self._ring
        fits = np.zeros((ring.num_streams, ring.capacity), dtype=bool)
        start = np.arange(ring.oldest, ring.cursor - self._needed + 1)
        slot = (start + self._context) % ring.capacity
        last = (start + self._needed - 1) % ring.capacity
        fits[:, slot] = ring.age[:, last] >= self._needed - 1 if self._one_episode else True
        mask = to_device(torch.from_numpy(fits), self._priorities.device)
        weights = torch.where(mask, self._priorities, 0.0).view(-1)
        if self._tree is not None:
            self._tree.set_all(weights.double().numpy())
        else:
            assert self._sum is not None
            self._sum.weights[:-1].copy_(weights)

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.rebuild()

    def _set_all_streams(self, position: int, fits: np.ndarray) -> None:
        ring = self._ring
        slot = position % ring.capacity
        new = self._priorities[:, slot]
        if self._tree is not None:
            places = np.arange(ring.num_streams) * ring.capacity + slot
            self._tree.set(places, np.where(fits, new.double().numpy(), 0.0))
        else:
            assert self._sum is not None
            column = self._sum.weights[:-1].view(ring.num_streams, ring.capacity)[:, slot]
            if fits.all():
                column.copy_(new)
            elif fits.any():
                column.copy_(torch.where(to_device(torch.from_numpy(fits), new.device), new, 0.0))
            else:
                column.zero_()


# --- Weighted draws -----------------------------------------------------------------------------


class SumTree:
    """Weights of `size` places as the leaves of a binary tree, whose nodes are the sums of their children.

    It is used on the host: a change and a draw each follow one path, of length log2(size). A node is always
    computed from its children, so the tree depends only on the leaves and not on the order of the changes.
    """

    def __init__(self, size: int) -> None:
        self._leaves = 1 << max(0, (size - 1).bit_length())
        self._nodes = np.zeros(2 * self._leaves)  # node k has the children 2k and 2k+1; the root is node 1
        self.size = size

    @property
    def total(self) -> float:
        return float(self._nodes[1])

    def get(self, places: np.ndarray) -> np.ndarray:
        """Return the weights (K,) of places (K,)."""
        weights: np.ndarray = self._nodes[self._leaves + places]
        return weights

    def set(self, places: np.ndarray, weights: np.ndarray) -> None:
        """Set weights, which must not be negative. The last of equal places wins. places, weights: (K,)"""
        nodes = self._leaves + places
        self._nodes[nodes] = weights
        while len(nodes) and nodes[0] > 1:
            nodes = np.unique(nodes >> 1) if len(nodes) > 1 else nodes >> 1
            self._nodes[nodes] = self._nodes[2 * nodes] + self._nodes[2 * nodes + 1]

    def set_all(self, weights: np.ndarray) -> None:
        """Set all weights. weights: (size,)"""
        self._nodes[self._leaves : self._leaves + self.size] = weights
        level = self._leaves
        while level > 1:
            children = self._nodes[level : 2 * level]
            level //= 2
            self._nodes[level : 2 * level] = children[0::2] + children[1::2]

    def find(self, uniforms: np.ndarray) -> np.ndarray:
        """Map uniform random values (K,) in [0, 1) to places (K,), in proportion to the weights."""
        left_over = uniforms * self._nodes[1]
        nodes = np.ones(len(uniforms), dtype=np.int64)
        while nodes[0] < self._leaves if len(nodes) else False:
            nodes = 2 * nodes
            left = self._nodes[nodes]
            # Rounding must not select a place with weight 0, so a right child with sum 0 is never entered.
            right = (left_over >= left) & (self._nodes[nodes + 1] > 0)
            left_over = np.where(right, left_over - left, left_over)
            nodes += right
        return nodes - self._leaves


class RunningSum:
    """Weights of `size` places in one tensor on a device, and one spare place at the end that is never drawn.

    One cumulative sum replaces the tree, which would need a kernel launch for each level. It finds the same
    places as SumTree up to rounding, without a device synchronization.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.weights = torch.zeros(size + 1, dtype=torch.float32, device=device)

    def find(self, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map uniform random values (K,) float64 in [0, 1) to places (K,) and their probabilities (K,)."""
        sums = self.weights[:-1].cumsum(0, dtype=torch.float64)
        total = sums[-1]
        below = torch.nextafter(total, torch.zeros_like(total))
        places = torch.searchsorted(sums, torch.minimum(uniforms * total, below), right=True)
        return places, self.weights[places].double() / total
