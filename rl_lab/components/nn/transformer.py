"""A causal transformer (pre-norm, GELU, as minGPT) with a key-value cache of fixed size.

The cache never grows or moves: each step runs the same kernels at the same addresses, so one CUDA graph can
capture an imagined rollout. The caller adds position embeddings.

On the fast path, training uses fused operations (`_fast_forward`), and the steps of a rollout use
`FrozenBlocks`, which `init_state` creates: such a rollout keeps the weights it started with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rl_lab.errors import ConfigError
from rl_lab.utils.device import product_dtype

# --- Cached steps without gradients ---

Affine = tuple[torch.Tensor, torch.Tensor]  # weight, bias
MOST_TOKENS = 2  # per step of FrozenBlocks; a longer context uses the plain implementation


def merged(layers: list[Any]) -> Affine:
    """Weight and bias of one linear layer that computes the concatenated outputs of several."""
    return torch.cat([layer.weight for layer in layers]), torch.cat([layer.bias for layer in layers])


class FrozenBlocks:
    """The current weights of a `Transformer`, merged and cast to `dtype` once: eight kernels per block."""

    @torch.no_grad()
    def __init__(self, blocks: Any, norm: Any, dtype: torch.dtype) -> None:
        def cast(weight: torch.Tensor, bias: torch.Tensor) -> Affine:
            return weight.detach().to(dtype), bias.detach().to(dtype)

        self.dtype = dtype
        self.products: list[tuple[Affine, Affine, Affine, Affine]] = []
        for block in blocks:
            a, enter, leave = block.attention, block.mlp[0], block.mlp[2]
            self.products.append(
                (
                    cast(*merged([a.query, a.key, a.value])),
                    cast(a.project.weight, a.project.bias),
                    cast(enter.weight, enter.bias),
                    cast(leave.weight, leave.bias),
                )
            )
        norms = [*(part for block in blocks for part in (block.norm1, block.norm2)), norm]
        self.norms = [(part.weight.detach(), part.bias.detach(), part.eps) for part in norms]

    @torch.no_grad()
    def step(
        self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, filled: torch.Tensor
    ) -> torch.Tensor:
        """x: (B, T ≤ MOST_TOKENS, D) -> (B, T, D); the cache (B, layers, heads, L, W) is written in place."""
        from rl_lab.components.kernels.attention import cached_attention
        from rl_lab.components.kernels.residual_norm import residual_norm_forward

        result = x.dtype
        x, h = residual_norm_forward(x, None, *self.norms[0], self.dtype)
        for n, (qkv, project, enter, leave) in enumerate(self.products):
            y = F.linear(cached_attention(F.linear(h, *qkv), keys[:, n], values[:, n], filled), *project)
            x, h = residual_norm_forward(x, y, *self.norms[2 * n + 1], self.dtype)
            y = F.linear(F.gelu(F.linear(h, *enter)), *leave)
            last = n + 1 == len(self.products)
            x, h = residual_norm_forward(x, y, *self.norms[2 * n + 2], result if last else self.dtype)
        return h.to(result)


# --- Dropout from seeds ---
# The mask is a hash of the seed and each element's index, so that a training step stays a pure function of
# its inputs and no large noise tensor is drawn.


def seed_word(seed: torch.Tensor) -> torch.Tensor:
    """Uniform in [0, 1), any shape -> int64, the seed of the dropout kernels."""
    return (seed.double() * 2**31).long()


def seeded_uniform(shape: tuple[int, ...], seed: torch.Tensor) -> torch.Tensor:
    """seed: 0-d uniform in [0, 1) -> uniform values of `shape`, deterministic in the seed."""
    from rl_lab.components.kernels.dropout import hashed_uniform

    return hashed_uniform(shape, seed_word(seed))


def seeded_dropout(
    x: torch.Tensor, rate: float, seed: torch.Tensor | None, *, fast: bool = False
) -> torch.Tensor:
    """Dropout of x with probability `rate`; x itself without a seed or if the rate is 0."""
    if seed is None or rate == 0.0:
        return x
    from rl_lab.components.kernels.dropout import SeededDropout, kept

    if fast and x.is_cuda:
        result: torch.Tensor = SeededDropout.apply(x, rate, seed_word(seed))
        return result
    return x * kept(tuple(x.shape), rate, seed_word(seed)).to(x.dtype)


def causal_softmax_dropout(
    scores: torch.Tensor, scale: float, rate: float, seed: torch.Tensor
) -> torch.Tensor:
    """dropout(softmax(scale · scores)) with a causal mask: (…, T, T) -> (…, T, T)."""
    length = scores.shape[-1]
    hidden = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
    weights = (scores * scale).masked_fill(hidden, -torch.inf).softmax(-1)
    return seeded_dropout(weights.to(scores.dtype), rate, seed)


# --- The network ---


def init_token_network(module: nn.Module, deviation: float = 0.02) -> None:
    """Normal weights and zero biases, as in minGPT. Never call it on a module with loaded weights."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=deviation)
        if isinstance(part, nn.Linear | nn.LayerNorm) and part.bias is not None:
            nn.init.zeros_(part.bias)
        if isinstance(part, nn.LayerNorm):
            nn.init.ones_(part.weight)


State = dict[str, torch.Tensor]
SEEDS_PER_BLOCK = 3  # dropout of the attention weights, of the attention's output, of the MLP's output
# Attribute of a cache's key tensor, so that it follows the tensor through every dict. A copied state lacks it
# and uses the plain implementation.
FROZEN = "frozen_blocks"


class SelfAttention(nn.Module):
    """Causal self-attention over a sequence (B, T, D), or over a partly filled cache."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        if dim % heads:
            raise ConfigError(
                f"transformer dim={dim} cannot be split into {heads} heads: choose a number of heads that divides it"
            )
        self.heads, self.rate = heads, dropout
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.project = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, seeds: torch.Tensor | None = None) -> torch.Tensor:
        """x: (B, T, D) -> (B, T, D). seeds: (2,) for dropout."""
        q, k, v = self._split(x)
        if seeds is None or self.rate == 0.0:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:  # dropout of torch's attention would use torch's global generator
            scale = q.shape[-1] ** -0.5
            out = causal_softmax_dropout(q @ k.transpose(-2, -1), scale, self.rate, seeds[0]) @ v
        return seeded_dropout(self._merge(out), self.rate, None if seeds is None else seeds[1])

    def before_dropout(self, x: torch.Tensor, word: torch.Tensor | None) -> torch.Tensor:
        """As `forward` with one product for q, k and v, without output dropout. word: from `seed_word`."""
        qkv = F.linear(x, *merged([self.query, self.key, self.value]))
        if word is not None:
            from rl_lab.components.kernels.attention import causal_attention

            result: torch.Tensor = self.project(causal_attention(qkv, self.heads, self.rate, word))
            return result
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self._merge(F.scaled_dot_product_attention(q, k, v, is_causal=True))

    def step(
        self,
        x: torch.Tensor,  # (B, T, D)
        keys: torch.Tensor,  # (B, heads, L, D / heads), written in place
        values: torch.Tensor,
        place: torch.Tensor,  # (B, T) int64: cache positions of the new tokens
        hidden: torch.Tensor,  # (B, 1, T, L) bool: cache positions that each new token must not attend to
    ) -> torch.Tensor:
        q, k, v = self._split(x)
        index = place[:, None, :, None].expand(k.shape)
        keys.scatter_(2, index, k.to(keys.dtype))
        values.scatter_(2, index, v.to(values.dtype))
        out = F.scaled_dot_product_attention(q.to(keys.dtype), keys, values, attn_mask=~hidden)
        return self._merge(out.to(x.dtype))

    def _split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )

    def _merge(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(x.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.rate = dropout
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = SelfAttention(dim, heads, dropout)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor, seeds: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), None if seeds is None else seeds[:2])
        return x + seeded_dropout(self.mlp(self.norm2(x)), self.rate, None if seeds is None else seeds[2])

    def step(
        self,
        x: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        place: torch.Tensor,
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        x = x + self.attention.step(self.norm1(x), keys, values, place, hidden)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """The default `SequenceBackbone` (components/dynamics/backbones.py).

    dim:     width of embeddings and outputs
    length:  size of the cache: the maximum context in tokens
    dropout: of embeddings, attention and block outputs; only if seeds are passed
    """

    fast = False  # fused training step, merged weights in rollouts; see fast_path.py

    def __init__(self, *, dim: int, layers: int, heads: int, length: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dim, self.heads, self.length, self.rate = dim, heads, length, dropout
        self.blocks: Any = nn.ModuleList(Block(dim, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        init_token_network(self)
        self.seeds = 1 + SEEDS_PER_BLOCK * layers if dropout > 0.0 else 0

    def forward(self, x: torch.Tensor, seeds: torch.Tensor | None = None) -> torch.Tensor:
        """x: (B, T, dim) -> (B, T, dim). seeds: (self.seeds,) uniform, for dropout; None: no dropout."""
        use = seeds if self.seeds else None
        x = seeded_dropout(x, self.rate, None if use is None else use[0], fast=self.fast)
        if self.fast and len(self.blocks):
            return self._fast_forward(x, None if use is None else seed_word(use))
        for n, block in enumerate(self.blocks):
            begin = 1 + SEEDS_PER_BLOCK * n
            x = block(x, None if use is None else use[begin : begin + SEEDS_PER_BLOCK])
        return self.norm(x)

    def _fast_forward(self, x: torch.Tensor, words: torch.Tensor | None) -> torch.Tensor:
        """The blocks, with dropout, residual and norm fused. words: the seeds as integers."""
        from rl_lab.components.kernels.residual_norm import residual_norm

        dtype = product_dtype(x.device)
        h = self.blocks[0].norm1(x).to(dtype)
        for n, block in enumerate(self.blocks):
            begin = 1 + SEEDS_PER_BLOCK * n
            drop = [None] * SEEDS_PER_BLOCK if words is None else [*words[begin : begin + SEEDS_PER_BLOCK]]
            last = n + 1 == len(self.blocks)
            norm, after = block.norm2, self.norm if last else self.blocks[n + 1].norm1
            y = block.attention.before_dropout(h, drop[0])
            x, h = residual_norm(x, y, norm.weight, norm.bias, norm.eps, dtype, self.rate, drop[1])
            y, dtype = block.mlp(h), x.dtype if last else dtype
            x, h = residual_norm(x, y, after.weight, after.bias, after.eps, dtype, self.rate, drop[2])
        return h

    def init_state(self, size: int) -> State:
        """An empty cache for `size` sequences; the first axis of every tensor is the batch."""
        device = self.norm.weight.device
        shape = (size, len(self.blocks), self.heads, self.length, self.dim // self.heads)
        dtype = product_dtype(device)
        keys = torch.zeros(shape, dtype=dtype, device=device)
        if self.fast and not torch.is_grad_enabled():
            setattr(keys, FROZEN, FrozenBlocks(self.blocks, self.norm, dtype))
        return {
            "keys": keys,
            "values": torch.zeros(shape, dtype=dtype, device=device),
            "filled": torch.zeros(size, dtype=torch.int64, device=device),
        }

    def step(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """T more tokens (B, T, dim) -> outputs (B, T, dim) and the new state. The cache is written in place.

        The caller must start a new state before `length` tokens are exceeded; further tokens overwrite the
        last position.
        """
        filled, after = state["filled"], {**state, "filled": state["filled"] + x.shape[1]}
        frozen = getattr(state["keys"], FROZEN, None) if self.fast and not torch.is_grad_enabled() else None
        if frozen is not None and x.shape[1] <= MOST_TOKENS:
            return frozen.step(x, state["keys"], state["values"], filled), after
        place = filled[:, None] + torch.arange(x.shape[1], device=x.device)
        place = place.clamp(max=self.length - 1)
        hidden = (torch.arange(self.length, device=x.device) > place[..., None]).unsqueeze(1)
        for n, block in enumerate(self.blocks):
            x = block.step(x, state["keys"][:, n], state["values"][:, n], place, hidden)
        return self.norm(x), after
