"""Recurrent state-space model of DreamerV3's 2025 version: a block GRU and a vector of categorical variables.

A state is `deter` (B, D), the recurrent state, and `stoch` (B, S, C), S one-hot variables of C classes. The
posterior depends on deter and the observation, the prior on deter only. Paper: Hafner et al. 2025, "Mastering
diverse control tasks through world models"; sizes, gate order and initialisation are from danijar/dreamerv3
(rssm.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from rl_lab.components.nn.actions import ActionEncoder
from rl_lab.components.nn.categorical import straight_through, unimix_probs
from rl_lab.components.nn.mlp import MLP, BlockLinear, Linear, RMSNorm
from rl_lab.components.representation_learners.encoders import dict_embed_dim
from rl_lab.components.representation_learners.rssm_fast import scan_posterior
from rl_lab.records import Spec


class BlockGRU(nn.Module):
    """GRU with block-diagonal weights and one hidden layer before the gates.

    Each block depends on its own part of the state, on the inputs, and on an embedding of the complete state.
    """

    def __init__(self, deter: int, hidden: int, *, inputs: int, blocks: int) -> None:
        super().__init__()
        self.blocks = blocks
        self.deter_in = MLP(deter, hidden, 1)
        self.layer = BlockLinear(deter + blocks * (hidden + inputs), deter, blocks=blocks)
        self.norm = RMSNorm(deter)
        self.gates = BlockLinear(deter, 3 * deter, blocks=blocks)

    def forward(self, deter: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        """deter: (B, D), inputs: (B, …) of `inputs` width together -> next deter (B, D)."""
        shared = torch.cat([self.deter_in(deter), *inputs], -1).unsqueeze(1).expand(-1, self.blocks, -1)
        memory = deter.unflatten(-1, (self.blocks, -1))  # (B, g, D/g)
        y = self.layer(torch.cat([memory, shared], -1))
        y = F.silu(self.norm(y.flatten(-2))).unflatten(-1, (self.blocks, -1))
        # Split within each block, not across the full width.
        reset, candidate, update = self.gates(y).chunk(3, -1)  # (B, g, D/g) each
        candidate = torch.tanh(torch.sigmoid(reset) * candidate)
        update = torch.sigmoid(update - 1.0)
        return torch.lerp(memory, candidate.to(memory.dtype), update.to(memory.dtype)).flatten(-2)


State = dict[str, torch.Tensor]


class RSSM(nn.Module):
    """Latent dynamics: `observe`, `observe_sequence`, `imagine_step`.

    embed_dim:     width of the encoder's output; None: that of a DictEncoder with `units`, `depth` and `keys`
    action_layers: normed layers of the action embedding; 0: the encoded action is the input of the recurrence
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
        unimix: float = 0.01,
        embed_dim: int | None = None,
        units: int = 0,
        depth: int = 0,
        keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.deter, self.stoch, self.classes = deter, stoch, classes
        self.unimix = unimix
        if embed_dim is None:
            embed_dim = dict_embed_dim(spec, units=units, depth=depth, keys=keys)
        self.embed_dim = embed_dim
        self.features = deter + stoch * classes
        self.action_encoder = ActionEncoder(spec.action)
        self.action_in = MLP(self.action_encoder.out_features, hidden, action_layers)
        self.stoch_in = MLP(stoch * classes, hidden, 1)
        self.gru = BlockGRU(deter, hidden, inputs=hidden + self.action_in.out_features, blocks=blocks)
        self.posterior_in = Linear(deter + self.embed_dim, hidden)
        self.posterior_norm = RMSNorm(hidden)
        self.posterior_out = Linear(hidden, stoch * classes)
        self.prior_net = MLP(deter, hidden, prior_layers, outputs=stoch * classes)

    def initial_state(self, batch_size: int) -> State:
        """Zeros: the state at the start of every episode."""
        zeros = self.posterior_norm.weight.new_zeros
        return {"deter": zeros(batch_size, self.deter), "stoch": zeros(batch_size, self.stoch, self.classes)}

    def feature(self, state: State) -> torch.Tensor:
        """Input of heads and policy: deter and stoch concatenated, (…, features)."""
        return torch.cat([state["deter"], state["stoch"].flatten(-2)], -1)

    def observe(
        self,
        state: State,
        action: torch.Tensor,  # (B, …) taken before this observation
        embed: torch.Tensor,  # (B, E)
        is_first: torch.Tensor,  # (B,) bool
        noise: torch.Tensor,  # (B, S) uniform
    ) -> tuple[State, torch.Tensor]:
        """One posterior step: the new state, and its log probabilities (B, S, C)."""
        sequence = (x.unsqueeze(1) for x in (action, embed, is_first, noise))
        states, log_probs = self.observe_sequence(state, *sequence)
        return {key: value.squeeze(1) for key, value in states.items()}, log_probs.squeeze(1)

    def observe_sequence(
        self,
        state: State,
        action: torch.Tensor,  # (B, T, …) taken before each observation
        embed: torch.Tensor,  # (B, T, E)
        is_first: torch.Tensor,  # (B, T) bool
        noise: torch.Tensor,  # (B, T, S) uniform
    ) -> tuple[State, torch.Tensor]:
        """Posterior states (B, T, …) after the given state, and their log probabilities (B, T, S, C).

        Where `is_first`, the state and the previous action are zeroed before the step.
        """
        keep = (~is_first).unsqueeze(-1).float()  # (B, T, 1)
        # Everything outside the recurrence is computed for all steps at once: the action embedding, and the
        # observation's part of the posterior's first layer, which is linear in (deter, embed).
        actions = self.action_in(self.action_encoder(action) * keep)
        from_deter, from_embed = self.posterior_in.weight.split([self.deter, self.embed_dim], 1)
        embeds = F.linear(embed, from_embed, self.posterior_in.bias)
        if self.fast:
            deter, stoch, prob = scan_posterior(self, state, keep.squeeze(-1), actions, embeds, noise)
            return {"deter": deter, "stoch": stoch}, prob.log()
        from_deter = from_deter.t()

        deter, stoch = state["deter"], state["stoch"].flatten(-2)
        deters, stochs, probs = [], [], []
        for keep_t, action_t, embed_t, noise_t in zip(*(x.unbind(1) for x in (keep, actions, embeds, noise))):
            deter = self._advance(deter * keep_t, stoch * keep_t, action_t)
            x = F.silu(self.posterior_norm(torch.addmm(embed_t, deter, from_deter)))
            probs_t = unimix_probs(self._group(self.posterior_out(x)), self.unimix)
            sample = straight_through(probs_t, noise_t)
            stoch = sample.flatten(-2)
            deters.append(deter)
            stochs.append(sample)
            probs.append(probs_t)
        states = {"deter": torch.stack(deters, 1), "stoch": torch.stack(stochs, 1)}
        return states, torch.stack(probs, 1).log()

    def imagine_step(self, state: State, action: torch.Tensor, noise: torch.Tensor) -> State:
        """One prior step: action (B, …), noise (B, S) uniform -> state (B, …)."""
        actions = self.action_in(self.action_encoder(action))
        deter = self._advance(state["deter"], state["stoch"].flatten(-2), actions)
        return {"deter": deter, "stoch": straight_through(self._prior_probs(deter), noise)}

    def prior(self, deter: torch.Tensor) -> torch.Tensor:
        """Log probabilities of stoch given deter: (…, D) -> (…, S, C)."""
        return self._prior_probs(deter).log()

    def _prior_probs(self, deter: torch.Tensor) -> torch.Tensor:
        return unimix_probs(self._group(self.prior_net(deter)), self.unimix)

    def _advance(self, deter: torch.Tensor, stoch: torch.Tensor, action_in: torch.Tensor) -> torch.Tensor:
        return self.gru(deter, self.stoch_in(stoch), action_in)

    def _group(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.unflatten(-1, (self.stoch, self.classes))
