"""Recurrent state-space model of Dreamer; by default that of DreamerV3's 2025 version.

A state is `deter` (B, D), the recurrent state, and `stoch` (B, S, C), S one-hot variables of C classes, or (B, S, 1)
with Gaussian latents. The posterior depends on deter and the observation, the prior on deter only. Paper: Hafner et
al. 2025, "Mastering diverse control tasks through world models"; sizes, gate order and initialisation are from
danijar/dreamerv3 (rssm.py). The cells of earlier versions: danijar/dreamer models.py, danijar/dreamerv2
common/nets.py, danijar/dreamerv3 @ 8fa35f8 nets.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rl_lab.components.nn.actions import ActionEncoder
from rl_lab.components.nn.latents import make_latent, noise_spec
from rl_lab.components.nn.mlp import MLP, TODAY, BlockLinear, LayerNorm, LayerStyle, layer_style
from rl_lab.components.representation_learners.encoders import dict_embed_dim
from rl_lab.errors import ConfigError, require_choice
from rl_lab.records import NoiseSpec, Spec

CELLS = ("block_gru", "layer_norm_gru", "gru")
INITIAL_STATES = ("zeros", "learned")


class BlockGRU(nn.Module):
    """GRU with block-diagonal weights and `layers` hidden layers before the gates.

    Each block depends on its own part of the state, on the inputs, and on an embedding of the complete state.
    """

    def __init__(
        self, deter: int, hidden: int, *, inputs: int, blocks: int, layers: int = 1, style: LayerStyle = TODAY
    ) -> None:
        super().__init__()
        self.blocks, self.style = blocks, style
        self.deter_in = MLP(deter, hidden, 1, style=style)
        self.layer = BlockLinear(deter + blocks * (hidden + inputs), deter, blocks=blocks)
        self.norm = style.make_norm(deter)
        self.more: Any = nn.ModuleList(BlockLinear(deter, deter, blocks=blocks) for _ in range(layers - 1))
        self.more_norms: Any = nn.ModuleList(style.make_norm(deter) for _ in range(layers - 1))
        self.gates = BlockLinear(deter, 3 * deter, blocks=blocks)

    def forward(self, deter: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        """deter: (B, D), inputs: (B, …) of `inputs` width together -> next deter (B, D)."""
        shared = torch.cat([self.deter_in(deter), *inputs], -1).unsqueeze(1).expand(-1, self.blocks, -1)
        memory = deter.unflatten(-1, (self.blocks, -1))  # (B, g, D/g)
        y = self.layer(torch.cat([memory, shared], -1))
        y = self.style.activate(self.norm(y.flatten(-2))).unflatten(-1, (self.blocks, -1))
        for layer, norm in zip(self.more, self.more_norms):
            y = self.style.activate(norm(layer(y).flatten(-2))).unflatten(-1, (self.blocks, -1))
        # Split within each block, not across the full width.
        reset, candidate, update = self.gates(y).chunk(3, -1)  # (B, g, D/g) each
        candidate = torch.tanh(torch.sigmoid(reset) * candidate)
        update = torch.sigmoid(update - 1.0)
        return torch.lerp(memory, candidate.to(memory.dtype), update.to(memory.dtype)).flatten(-2)


class LayerNormGRU(nn.Module):
    """GRU with one LayerNorm over its three gates (DreamerV2, and DreamerV3 of 2023)."""

    def __init__(self, deter: int, inputs: int, *, style: LayerStyle) -> None:
        super().__init__()
        # As other layers with a norm: without a bias in the 2023 version.
        self.gates = LayerStyle("layer", "silu", style.init, style.bias).linear(deter + inputs, 3 * deter)
        self.norm = LayerNorm(3 * deter)

    def forward(self, deter: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """deter: (B, D), x: (B, inputs) -> next deter (B, D)."""
        reset, candidate, update = self.norm(self.gates(torch.cat([deter, x], -1)).float()).chunk(3, -1)
        candidate = torch.tanh(torch.sigmoid(reset) * candidate)
        return torch.lerp(deter, candidate, torch.sigmoid(update - 1.0))


class PlainGRU(nn.Module):
    """GRU as in Keras (DreamerV1): Glorot weights, orthogonal recurrent weights, zero biases."""

    def __init__(self, deter: int, inputs: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(inputs, deter)
        nn.init.xavier_uniform_(self.cell.weight_ih)
        nn.init.orthogonal_(self.cell.weight_hh)
        nn.init.zeros_(self.cell.bias_ih)
        nn.init.zeros_(self.cell.bias_hh)

    def forward(self, deter: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """deter: (B, D), x: (B, inputs) -> next deter (B, D)."""
        after: torch.Tensor = self.cell(x, deter.to(x.dtype))
        return after.float()


class JointInput(nn.Module):
    """One layer on latent and action together, before the recurrent cell (all versions before 2024)."""

    def __init__(self, stoch: int, action: int, hidden: int, *, style: LayerStyle) -> None:
        super().__init__()
        self.mlp = MLP(stoch + action, hidden, 1, style=style)

    def forward(self, stoch: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self.mlp(torch.cat([stoch, action], -1))


State = dict[str, torch.Tensor]


class RSSM(nn.Module):
    """Latent dynamics: `observe`, `observe_sequence`, `imagine_step`.

    embed_dim:     width of the encoder's output; None: that of a DictEncoder with `units`, `depth`, `keys`, `images`, `multipliers`
    cell:          block_gru (2024, today) | layer_norm_gru (v2, 2023) | gru (v1)
    blocks, action_layers, dynamics_layers: of block_gru. Normed layers of the action embedding (0: the encoded action is
                   the input) and before the gates (`dynlayers`)
    posterior_layers: normed layers of the posterior (`obslayers`)
    absolute:      the posterior depends on the observation alone, not on deter
    latent:        categorical | gaussian (v1), whose standard deviation has the form `std_form` and at least `min_std`
    initial:       zeros | learned (2023): the state at the start of an episode
    layer, init, bias: see LayerStyle
    """

    fast = False  # fused scan over a sequence (rssm_fast.py); see fast_path.py

    def __init__(
        self,
        *,
        spec: Spec,
        deter: int,
        hidden: int,
        stoch: int,
        classes: int,
        blocks: int = 8,
        prior_layers: int = 2,
        action_layers: int = 1,
        posterior_layers: int = 1,
        dynamics_layers: int = 1,
        absolute: bool = False,
        unimix: float = 0.01,
        embed_dim: int | None = None,
        units: int = 0,
        depth: int = 0,
        keys: Sequence[str] | None = None,
        images: str = "pooled",
        multipliers: Sequence[int] | None = None,
        cell: str = "block_gru",
        latent: str = "categorical",
        std_form: str = "softplus",
        min_std: float = 0.1,
        initial: str = "zeros",
        layer: str = "rms+silu",
        init: str = "fan_in",
        bias: bool = True,
    ) -> None:
        super().__init__()
        require_choice("components.rssm.cell", cell, CELLS)
        require_choice("components.rssm.initial", initial, INITIAL_STATES)
        for name, layers in (("posterior_layers", posterior_layers), ("dynamics_layers", dynamics_layers)):
            if layers < 1:
                raise ConfigError(f"components.rssm.{name} is {layers}: set it to 1 or more")
        if dynamics_layers > 1 and cell != "block_gru":
            raise ConfigError(
                f"components.rssm.dynamics_layers is {dynamics_layers}, but cell={cell} has no layers before its gates: "
                "set it to 1, or cell=block_gru"
            )
        self.deter, self.stoch, self.classes = deter, stoch, classes
        self.unimix, self.absolute = unimix, absolute
        self.latent = make_latent(latent, stoch, classes, unimix=unimix, std_form=std_form, min_std=min_std)
        self.cell, self.style = cell, layer_style(layer, init, bias)
        if embed_dim is None:
            embed_dim = dict_embed_dim(
                spec, units=units, depth=depth, keys=keys, images=images, multipliers=multipliers
            )
        self.embed_dim = embed_dim
        self.features = deter + stoch * classes
        self.action_encoder = ActionEncoder(spec.action)
        if cell == "block_gru":
            style = self.style
            self.action_in = MLP(self.action_encoder.out_features, hidden, action_layers, style=style)
            self.stoch_in = MLP(stoch * classes, hidden, 1, style=style)
            inputs = hidden + self.action_in.out_features
            self.gru: Any = BlockGRU(
                deter, hidden, inputs=inputs, blocks=blocks, layers=dynamics_layers, style=style
            )
        else:
            joint = JointInput(stoch * classes, self.action_encoder.out_features, hidden, style=self.style)
            self.joint_in = joint
            self.gru = (
                LayerNormGRU(deter, hidden, style=self.style)
                if cell == "layer_norm_gru"
                else PlainGRU(deter, hidden)
            )
        self.posterior_in = self.style.linear(self.embed_dim + (0 if absolute else deter), hidden)
        self.posterior_norm = self.style.make_norm(hidden)
        self.posterior_more = (
            MLP(hidden, hidden, posterior_layers - 1, style=self.style) if posterior_layers > 1 else None
        )
        self.posterior_out = self.style.output(hidden, self.latent.width)
        self.prior_net = MLP(deter, hidden, prior_layers, outputs=self.latent.width, style=self.style)
        self.initial = nn.Parameter(torch.zeros(deter)) if initial == "learned" else None

    @property
    def has_fast_form(self) -> bool:
        """Whether the fused scan and the fused imagination compute this model."""
        plain = self.latent.noise_kind == "uniform" and self.unimix > 0.0 and self.initial is None
        plain = plain and self.posterior_more is None and not self.absolute
        return isinstance(self.gru, BlockGRU) and not self.gru.more and self.style.fused and plain

    def noise_spec(self, *batch: int) -> NoiseSpec:
        """Random values of one state per element: (*batch, S)."""
        return noise_spec(self.latent, *batch)

    def draw_noise(self, *batch: int, generator: torch.Generator | None = None) -> torch.Tensor:
        draw = torch.randn if self.latent.noise_kind == "normal" else torch.rand
        return draw(*batch, self.stoch, generator=generator, device=self.posterior_out.weight.device)

    def initial_state(self, batch_size: int) -> State:
        """The state at the start of every episode: zeros, or learned."""
        zeros = self.posterior_out.weight.new_zeros
        if self.initial is not None:
            deter, stoch = self._learned_state()
            return {
                "deter": deter.expand(batch_size, -1),
                "stoch": stoch.expand(batch_size, -1, -1),
            }
        return {"deter": zeros(batch_size, self.deter), "stoch": zeros(batch_size, self.stoch, self.classes)}

    def _learned_state(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Deter (D,) and the prior's mode (S, C)."""
        assert self.initial is not None
        deter = torch.tanh(self.initial)
        statistics = self.latent.statistics(self.prior_net(deter.unsqueeze(0)))
        return deter, self.latent.mode(statistics).squeeze(0)

    def feature(self, state: State) -> torch.Tensor:
        """Input of heads and policy: deter and stoch concatenated, (…, features)."""
        return torch.cat([state["deter"], state["stoch"].flatten(-2)], -1)

    def observe(
        self,
        state: State,
        action: torch.Tensor,  # (B, …) taken before this observation
        embed: torch.Tensor,  # (B, E)
        is_first: torch.Tensor,  # (B,) bool
        noise: torch.Tensor,  # (B, S) as in `noise_spec`
    ) -> tuple[State, torch.Tensor]:
        """One posterior step: the new state, and its statistics (B, S, C) (see `latents.py`)."""
        sequence = (x.unsqueeze(1) for x in (action, embed, is_first, noise))
        states, statistics = self.observe_sequence(state, *sequence)
        return {key: value.squeeze(1) for key, value in states.items()}, statistics.squeeze(1)

    def observe_sequence(
        self,
        state: State,
        action: torch.Tensor,  # (B, T, …) taken before each observation
        embed: torch.Tensor,  # (B, T, E)
        is_first: torch.Tensor,  # (B, T) bool
        noise: torch.Tensor,  # (B, T, S) as in `noise_spec`
    ) -> tuple[State, torch.Tensor]:
        """Posterior states (B, T, …) after the given state, and their statistics: log probabilities (B, T, S, C),
        or mean and deviation (B, T, S, 2).

        Where `is_first`, the state becomes the initial one and the previous action zero before the step.
        """
        keep = (~is_first).unsqueeze(-1).float()  # (B, T, 1)
        # Everything outside the recurrence is computed for all steps at once: the action embedding, and the
        # observation's part of the posterior's first layer, which is linear in (deter, embed).
        actions = self._embed_action(self.action_encoder(action) * keep)
        width = self.posterior_in.in_features - self.embed_dim  # of deter; 0 with `absolute`
        from_deter, from_embed = self.posterior_in.weight.split([width, self.embed_dim], 1)
        embeds = F.linear(embed, from_embed, self.posterior_in.bias)
        if self.fast:
            from rl_lab.components.representation_learners.rssm_fast import scan_posterior

            deter, stoch, prob = scan_posterior(self, state, keep.squeeze(-1), actions, embeds, noise)
            return {"deter": deter, "stoch": stoch}, prob.log()
        from_deter = from_deter.t()
        start = None
        if self.initial is not None:
            deter, stoch = self._learned_state()
            start = (1.0 - keep) * deter, (1.0 - keep) * stoch.flatten()  # (B, T, D), (B, T, S·C)

        deter, stoch = state["deter"], state["stoch"].flatten(-2)
        deters, stochs, statistics = [], [], []
        for t, (keep_t, action_t, embed_t, noise_t) in enumerate(
            zip(*(x.unbind(1) for x in (keep, actions, embeds, noise)))
        ):
            deter, stoch = deter * keep_t, stoch * keep_t
            if start is not None:
                deter, stoch = deter + start[0][:, t], stoch + start[1][:, t]
            deter = self._advance(deter, stoch, action_t)
            x = embed_t if self.absolute else torch.addmm(embed_t, deter, from_deter)
            x = self.style.activate(self.posterior_norm(x))
            if self.posterior_more is not None:
                x = self.posterior_more(x)
            sample, found = self.latent.draw(self.posterior_out(x), noise_t)
            stoch = sample.flatten(-2)
            deters.append(deter)
            stochs.append(sample)
            statistics.append(found)
        states = {"deter": torch.stack(deters, 1), "stoch": torch.stack(stochs, 1)}
        return states, torch.stack(statistics, 1)

    def imagine_step(
        self, state: State, action: torch.Tensor, noise: torch.Tensor, *, encoded: bool = False
    ) -> State:
        """One prior step: action (B, …), noise (B, S) as in `noise_spec` -> state (B, …).

        encoded: the action is a vector (B, A), which may have a gradient, not an action as stored
        """
        actions = self._embed_action(action if encoded else self.action_encoder(action))
        deter = self._advance(state["deter"], state["stoch"].flatten(-2), actions)
        stoch, _ = self.latent.draw(self.prior_net(deter), noise)
        return {"deter": deter, "stoch": stoch}

    def prior(self, deter: torch.Tensor) -> torch.Tensor:
        """Statistics of stoch given deter: (…, D) -> (…, S, C), or (…, S, 2)."""
        return self.latent.statistics(self.prior_net(deter))

    def _embed_action(self, encoded: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.action_in(encoded) if self.cell == "block_gru" else encoded
        return embedded

    def _advance(self, deter: torch.Tensor, stoch: torch.Tensor, action_in: torch.Tensor) -> torch.Tensor:
        if isinstance(self.gru, BlockGRU):
            return self.gru.forward(deter, self.stoch_in(stoch), action_in)
        after: torch.Tensor = self.gru(deter, self.joint_in(stoch, action_in))
        return after
