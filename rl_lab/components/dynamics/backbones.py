"""Sequence backbones of token world models besides the transformer (`protocols.SequenceBackbone`).

GRU, LSTM, a selective state-space model and closed-form continuous-time cells have constant memory, no dropout
and no limit on the length; `PretrainedBackbone` is a language model of Hugging Face.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rl_lab.components.nn.transformer import init_token_network
from rl_lab.errors import ConfigError
from rl_lab.utils.device import product_dtype

State = dict[str, torch.Tensor]


def copy_state(state: State) -> State:
    return {name: value.clone() for name, value in state.items()}


class GRUBackbone(nn.Module):
    """GRU layers of width `dim`, then a norm."""

    seeds = 0

    def __init__(self, *, dim: int, layers: int = 2, length: int | None = None) -> None:
        super().__init__()
        self.dim = dim
        self.gru = nn.GRU(dim, dim, layers, batch_first=True)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor, seeds: torch.Tensor | None = None) -> torch.Tensor:
        """x: (B, T, dim) -> (B, T, dim)."""
        return self.norm(self.gru(x)[0])

    def init_state(self, size: int) -> State:
        weight = self.norm.weight
        return {"hidden": weight.new_zeros(size, self.gru.num_layers, self.dim)}

    def step(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """x: (B, T, dim) -> outputs (B, T, dim) and the new state."""
        out, hidden = self.gru(x, state["hidden"].transpose(0, 1).contiguous().to(x.dtype))
        return self.norm(out), {**state, "hidden": hidden.transpose(0, 1)}


class LSTMBackbone(nn.Module):
    """LSTM layers of width `dim`, then a norm."""

    seeds = 0

    def __init__(self, *, dim: int, layers: int = 2, length: int | None = None) -> None:
        super().__init__()
        self.dim = dim
        self.lstm = nn.LSTM(dim, dim, layers, batch_first=True)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor, seeds: torch.Tensor | None = None) -> torch.Tensor:
        """x: (B, T, dim) -> (B, T, dim)."""
        return self.norm(self.lstm(x)[0])

    def init_state(self, size: int) -> State:
        zeros = self.norm.weight.new_zeros(size, self.lstm.num_layers, self.dim)
        return {"hidden": zeros, "cell": zeros.clone()}

    def step(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """x: (B, T, dim) -> outputs (B, T, dim) and the new state."""
        before = tuple(state[key].transpose(0, 1).contiguous().to(x.dtype) for key in ("hidden", "cell"))
        out, (hidden, cell) = self.lstm(x, before)
        return self.norm(out), {**state, "hidden": hidden.transpose(0, 1), "cell": cell.transpose(0, 1)}


# --- Closed-form continuous-time cells ---


class CfCCell(nn.Module):
    """Closed-form continuous-time cell (Hasani et al. 2022), for steps of equal length.

    A shared layer reads input and state; two candidate states are mixed by a gate that stands for elapsed time:
    h' = (1 - g) · tanh(A z) + g · tanh(B z), g = sigmoid(C z).
    """

    def __init__(self, dim: int, units: int) -> None:
        super().__init__()
        self.shared = nn.Linear(2 * dim, units)
        self.heads = nn.Linear(units, 3 * dim)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """(B, dim), (B, dim) -> (B, dim)."""
        z = 1.7159 * torch.tanh(0.666 * self.shared(torch.cat([x, h.to(x.dtype)], -1)))
        first, second, gate = self.heads(z).chunk(3, -1)
        return torch.lerp(torch.tanh(first), torch.tanh(second), torch.sigmoid(gate))


class CfCBackbone(nn.Module):
    """Layers of closed-form continuous-time cells, then a norm. Tokens are read one after the other in training too.

    units: of the cells' shared layer; None: `dim`
    """

    seeds = 0

    def __init__(
        self, *, dim: int, layers: int = 2, units: int | None = None, length: int | None = None
    ) -> None:
        super().__init__()
        self.dim = dim
        self.cells = nn.ModuleList(CfCCell(dim, units or dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor, seeds: torch.Tensor | None = None) -> torch.Tensor:
        """x: (B, T, dim) -> (B, T, dim)."""
        return self.step(x, self.init_state(len(x)))[0]

    def init_state(self, size: int) -> State:
        return {"hidden": self.norm.weight.new_zeros(size, len(self.cells), self.dim)}

    def step(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """x: (B, T, dim) -> outputs (B, T, dim) and the new state."""
        hidden = []
        for number, cell in enumerate(self.cells):
            h, outputs = state["hidden"][:, number], []
            for part in x.unbind(1):
                h = cell(part, h)
                outputs.append(h)
            x = torch.stack(outputs, 1)
            hidden.append(h.float())
        return self.norm(x), {**state, "hidden": torch.stack(hidden, 1)}


# --- A state-space model ---


class SelectiveBlock(nn.Module):
    """x + a gated diagonal state-space layer of norm(x) whose time step, input and output depend on x.

    The layer of Mamba (Gu and Dao 2023): per channel, `states` values with h' = exp(-Δ a) h + Δ b x, y = c · h + d x,
    after a causal convolution over `kernel` tokens; Δ starts between 0.001 and 0.1, a at 1 … `states`.
    """

    def __init__(self, dim: int, expand: int, states: int, kernel: int) -> None:
        super().__init__()
        self.inner, self.states, self.kernel = expand * dim, states, kernel
        self.rank = max(dim // 16, 1)
        self.norm = nn.LayerNorm(dim)
        self.enter = nn.Linear(dim, 2 * self.inner)
        self.conv = nn.Conv1d(self.inner, self.inner, kernel, groups=self.inner)
        self.select = nn.Linear(self.inner, self.rank + 2 * states)
        self.delta = nn.Linear(self.rank, self.inner)
        self.log_decay = nn.Parameter(torch.arange(1.0, states + 1.0).log().repeat(self.inner, 1))
        self.skip = nn.Parameter(torch.ones(self.inner))
        self.leave = nn.Linear(self.inner, dim)
        steps = torch.exp(torch.rand(self.inner) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
        with torch.no_grad():
            self.delta.bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus

    def forward(
        self,
        x: torch.Tensor,  # (B, T, dim)
        h: torch.Tensor,  # (B, inner, states)
        window: torch.Tensor,  # (B, inner, kernel - 1): inputs of the convolution before x
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Outputs (B, T, dim), and h and window after them."""
        inputs, gate = self.enter(self.norm(x)).chunk(2, -1)
        joined = torch.cat([window.to(inputs.dtype), inputs.transpose(1, 2)], 2)
        u = F.silu(self.conv(joined).transpose(1, 2)).float()  # (B, T, inner)
        with torch.autocast(x.device.type, enabled=False):
            rank, b, c = self.select(u).split([self.rank, self.states, self.states], -1)
            delta = F.softplus(self.delta(rank)).unsqueeze(-1)  # (B, T, inner, 1)
            keep = torch.exp(-delta * self.log_decay.exp())
            added = delta * b.unsqueeze(2) * u.unsqueeze(-1)
            hidden = scan(keep, added, h.float())
            y = (hidden * c.unsqueeze(2)).sum(-1) + self.skip * u
        out = self.leave(y.to(gate.dtype) * F.silu(gate))
        return x + out, hidden[:, -1], joined[:, :, joined.shape[2] - self.kernel + 1 :].float()


def scan(keep: torch.Tensor, added: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """h[t] = keep[t] · h[t-1] + added[t] with h[-1] = first: (B, T, …), (B, T, …), (B, …) -> (B, T, …).

    log2(T) rounds, in each of which every step absorbs twice as many before it.
    """
    added = torch.cat([(added[:, 0] + keep[:, 0] * first).unsqueeze(1), added[:, 1:]], 1)
    reach, length = 1, keep.shape[1]
    while reach < length:
        added = torch.cat([added[:, :reach], added[:, reach:] + keep[:, reach:] * added[:, :-reach]], 1)
        keep = torch.cat([keep[:, :reach], keep[:, reach:] * keep[:, :-reach]], 1)
        reach *= 2
    return added


class StateSpaceBackbone(nn.Module):
    """Selective state-space blocks (`SelectiveBlock`), then a norm."""

    seeds = 0

    def __init__(
        self,
        *,
        dim: int,
        layers: int = 2,
        expand: int = 2,
        states: int = 4,
        kernel: int = 4,
        length: int | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.blocks: Any = nn.ModuleList(SelectiveBlock(dim, expand, states, kernel) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor, seeds: torch.Tensor | None = None) -> torch.Tensor:
        """x: (B, T, dim) -> (B, T, dim)."""
        return self.step(x, self.init_state(len(x)))[0]

    def init_state(self, size: int) -> State:
        block, count = self.blocks[0], len(self.blocks)
        zeros = self.norm.weight.new_zeros
        return {
            "hidden": zeros(size, count, block.inner, block.states),
            "window": zeros(size, count, block.inner, block.kernel - 1),
        }

    def step(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """x: (B, T, dim) -> outputs (B, T, dim) and the new state."""
        hidden, windows = [], []
        for number, block in enumerate(self.blocks):
            x, h, window = block(x, state["hidden"][:, number], state["window"][:, number])
            hidden.append(h)
            windows.append(window)
        return self.norm(x), {**state, "hidden": torch.stack(hidden, 1), "window": torch.stack(windows, 1)}


# --- Pretrained language models ---


class PretrainedBackbone(nn.Module):
    """A `SequenceBackbone` on top of a language model of Hugging Face, or of one with random weights as a control.

    path:        folder or name on the hub (see `language_model.load_language_model`, also for `weights`,
                 `revision`, `positions` and `layers`)
    dim, length: width of the embeddings and longest sequence, as for every backbone
    trained:     norms, frozen, last, lora or all (see `language_model.choose_trained`, also for `last`, `rank`)

    Its inputs are embeddings. If the widths differ, a linear layer on each side maps between them. The model
    adds its own position embeddings, which it was trained with, to those of the world model.
    """

    seeds = 0  # dropout is disabled

    def __init__(
        self,
        *,
        dim: int,
        length: int,
        path: Path | str,
        trained: str = "norms",
        last: int = 1,
        rank: int = 8,
        weights: str = "pretrained",
        revision: str | None = None,
        positions: bool = True,
        layers: int | None = None,
    ) -> None:
        super().__init__()
        from rl_lab.components.dynamics.language_model import choose_trained, load_language_model

        self.dim, self.length = dim, length
        self.model = load_language_model(
            path, weights=weights, revision=revision, positions=positions, layers=layers
        )
        config = self.model.config
        limit = getattr(config, "max_position_embeddings", None)
        if limit is not None and length > limit:
            raise ConfigError(
                f"{path} reads {limit} tokens, but the world model's sequence has {length}: lower algorithm.blocks"
            )
        width = int(config.hidden_size)
        self.layers, heads = int(config.num_hidden_layers), int(config.num_attention_heads)
        self.heads = int(getattr(config, "num_key_value_heads", None) or heads)
        self.head_width = int(getattr(config, "head_dim", None) or width // heads)
        self.enter, self.leave = (
            nn.Identity() if dim == width else nn.Linear(*shape) for shape in ((dim, width), (width, dim))
        )
        for part in (self.enter, self.leave):  # only the new layers are initialised
            init_token_network(part)
        choose_trained(self.model, trained, last=last, rank=rank)

    def train(self, mode: bool = True) -> PretrainedBackbone:
        super().train(mode)
        self.model.eval()  # dropout would use torch's global generator
        return self

    def forward(self, x: torch.Tensor, seeds: torch.Tensor | None = None) -> torch.Tensor:
        """x: (B, T, dim) -> (B, T, dim)."""
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        output = self.model(inputs_embeds=self.enter(x), position_ids=positions, use_cache=False)
        return self.leave(output.last_hidden_state)

    def init_state(self, size: int) -> State:
        """An empty cache for `size` sequences; the first axis of every tensor is the batch."""
        device = next(self.model.buffers(), next(self.model.parameters(), torch.empty(0))).device
        shape = (size, self.layers, self.heads, self.length, self.head_width)
        dtype = product_dtype(device)
        return {
            "keys": torch.zeros(shape, dtype=dtype, device=device),
            "values": torch.zeros(shape, dtype=dtype, device=device),
            "filled": torch.zeros(size, dtype=torch.int64, device=device),
        }

    def step(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """T more tokens (B, T, dim) -> outputs (B, T, dim) and the new state; writes the cache in place."""
        filled = state["filled"]
        positions = filled[:, None] + torch.arange(x.shape[1], device=x.device)
        positions = positions.clamp(max=self.length - 1)
        visible = torch.arange(self.length, device=x.device) <= positions[..., None]  # (B, T, L)
        output = self.model(
            inputs_embeds=self.enter(x),
            position_ids=positions,
            attention_mask=visible.unsqueeze(1),
            past_key_values=FixedSizeCache(state["keys"], state["values"], positions),
            use_cache=True,
        )
        return self.leave(output.last_hidden_state), {**state, "filled": filled + x.shape[1]}


class FixedSizeCache:
    """Key-value cache of fixed size with the interface of transformers' `Cache`."""

    is_compileable = False

    def __init__(
        self,
        keys: torch.Tensor,  # (B, layers, heads, L, head width)
        values: torch.Tensor,
        positions: torch.Tensor,  # (B, T) of the new tokens
    ) -> None:
        self.keys, self.values, self.positions = keys, values, positions

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *unused: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New keys and values (B, heads, T, head width) -> all of that layer (B, heads, L, …)."""
        index = self.positions[:, None, :, None].expand(keys.shape)
        result = []
        for new, all_layers in ((keys, self.keys), (values, self.values)):
            layer = all_layers[:, layer_idx]
            layer.scatter_(2, index, new.to(layer.dtype))
            result.append(layer.to(new.dtype))
        return result[0], result[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: `position_ids` and `attention_mask` describe the past, which differs between sequences."""
        return 0
