"""The model M of World Models: an LSTM with a mixture density output (Ha and Schmidhuber 2018).

Each latent dimension has its own mixture, as in hardmaru/WorldModelsExperiments (rnn/rnn.py). The heads for
the reward (as in ctallec/world-models) and for the end of the episode (as in the original's Doom agent) make
it a complete environment model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from rl_lab.components.nn.actions import ActionEncoder
from rl_lab.records import Spec

State = dict[str, torch.Tensor]  # h, c: (N, units)


class LSTM(nn.LSTM):
    """One LSTM layer as TensorFlow's BasicLSTMCell: batch first, one bias, forget gate biased to 1.

    torch's second bias, which is redundant, is a buffer of zeros. `sequence` is one fused call (cuDNN on a
    GPU); `step` computes a single step with the same weights.
    """

    weight_ih_l0: torch.Tensor
    weight_hh_l0: torch.Tensor
    bias_ih_l0: torch.Tensor
    bias_hh_l0: torch.Tensor

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__(inputs, units, batch_first=True)
        zeros = torch.zeros_like(self.bias_hh_l0)
        del self.bias_hh_l0
        self.register_buffer("bias_hh_l0", zeros, persistent=False)
        self._init_flat_weights()
        # One bound for both: TensorFlow's cell has a single kernel of inputs + units by 4 · units.
        bound = math.sqrt(6.0 / (inputs + units + 4 * units))
        nn.init.uniform_(self.weight_ih_l0, -bound, bound)
        nn.init.uniform_(self.weight_hh_l0, -bound, bound)
        with torch.no_grad():
            self.bias_ih_l0.zero_()
            self.bias_ih_l0[units : 2 * units] = 1.0  # gates are input, forget, cell, output

    def initial_state(self, size: int) -> State:
        zeros = self.weight_hh_l0.new_zeros(size, self.hidden_size)
        return {"h": zeros, "c": zeros.clone()}

    def step(self, x: torch.Tensor, state: State) -> State:
        """x: (N, inputs) -> the next state."""
        h, c = torch.lstm_cell(
            x,
            (state["h"], state["c"]),
            self.weight_ih_l0,
            self.weight_hh_l0,
            self.bias_ih_l0,
            self.bias_hh_l0,
        )
        return {"h": h, "c": c}

    def sequence(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """x: (B, T, inputs) -> h after each step (B, T, units), and the last state."""
        out, (h, c) = self(x, (state["h"].unsqueeze(0), state["c"].unsqueeze(0)))
        return out, {"h": h.squeeze(0), "c": c.squeeze(0)}


HALF_LOG_TAU = 0.5 * math.log(2.0 * math.pi)


@dataclass
class Mixture:
    """Independent mixtures of K normals for D dimensions; each tensor is (…, D, K)."""

    log_weight: torch.Tensor  # normalised over K
    mean: torch.Tensor
    log_std: torch.Tensor

    @classmethod
    def from_raw(cls, raw: torch.Tensor, components: int) -> Mixture:
        """raw: (…, D · 3 · K), the output of a linear layer."""
        logit, mean, log_std = raw.float().unflatten(-1, (-1, 3, components)).unbind(-2)
        return cls(torch.log_softmax(logit, -1), mean, log_std)

    def log_prob(self, value: torch.Tensor) -> torch.Tensor:
        """value: (…, D) -> log density of each dimension, (…, D)."""
        scaled = (value.unsqueeze(-1) - self.mean) * torch.exp(-self.log_std)
        return torch.logsumexp(self.log_weight - 0.5 * scaled.square() - self.log_std - HALF_LOG_TAU, -1)

    def sample(
        self, uniform: torch.Tensor, normal: torch.Tensor, temperature: float | torch.Tensor = 1.0
    ) -> torch.Tensor:
        """uniform, normal: (…, D) -> (…, D).

        The logits of the weights are divided by the temperature, the standard deviations multiplied by its
        square root (World Models): near 0 this gives the mean of the likeliest component, above 1 it adds
        uncertainty.
        """
        weight = torch.softmax(self.log_weight / temperature, -1)
        # The first component whose cumulative weight reaches the uniform value; clamped, because rounding may
        # leave the last one below 1.
        index = (weight.cumsum(-1) < uniform.unsqueeze(-1)).sum(-1, keepdim=True)
        index = index.clamp(max=weight.shape[-1] - 1)
        mean = self.mean.gather(-1, index).squeeze(-1)
        std = self.log_std.gather(-1, index).squeeze(-1).exp()
        return mean + std * temperature**0.5 * normal


@dataclass
class Prediction:
    """Prediction of the next step."""

    latent: Mixture  # (…, D, K)
    reward: torch.Tensor | None  # (…), None if there is no head
    done_logit: torch.Tensor | None  # (…)


class MDNRNN(nn.Module):
    """h_{t+1} from (h_t, z_t, a_t); from h_{t+1} the mixture of z_{t+1}, its reward and termination."""

    def __init__(
        self,
        *,
        spec: Spec,
        latent: int = 32,
        hidden: int = 256,
        mixtures: int = 5,
        reward_head: bool = True,
        done_head: bool = True,
    ) -> None:
        super().__init__()
        self.latent = latent
        self.hidden = hidden
        self.mixtures = mixtures
        self.encode_action = ActionEncoder(spec.action)
        self.lstm = LSTM(latent + spec.action.size, hidden)
        self.to_mixture = nn.Linear(hidden, latent * 3 * mixtures)
        self.to_reward = nn.Linear(hidden, 1) if reward_head else None
        self.to_done = nn.Linear(hidden, 1) if done_head else None
        for head in (self.to_mixture, self.to_reward, self.to_done):
            if head is not None:
                nn.init.xavier_uniform_(head.weight)
                nn.init.zeros_(head.bias)

    # ---------------------------------------------------------------- recurrence

    def reset_state(self, size: int) -> State:
        """LSTM state before the first step of an episode: zeros h and c, (size, hidden)."""
        return self.lstm.initial_state(size)

    def observe(
        self,
        state: State,
        z: torch.Tensor,  # (N, latent)
        action: torch.Tensor,  # (N, …) as stored
        is_first: torch.Tensor | None = None,  # (N,) bool: rows that start an episode
    ) -> State:
        """LSTM state after z and the action; it is reset before the step where `is_first`."""
        if is_first is not None:
            keep = (~is_first).float().unsqueeze(-1)
            state = {key: value * keep for key, value in state.items()}
        return self.lstm.step(self._inputs(z, action), state)

    def observe_sequence(
        self,
        state: State,
        z: torch.Tensor,  # (B, T, latent)
        action: torch.Tensor,  # (B, T, …)
        is_first: torch.Tensor | None = None,  # (B, T) bool
    ) -> tuple[torch.Tensor, State]:
        """Hidden state h after each step (B, T, hidden), and the last state.

        Without `is_first` the sequence must be from one episode; one fused call then computes it.
        """
        if is_first is None:
            return self.lstm.sequence(self._inputs(z, action), state)
        outputs = []
        for t in range(z.shape[1]):
            state = self.observe(state, z[:, t], action[:, t], is_first[:, t])
            outputs.append(state["h"])
        return torch.stack(outputs, 1), state

    def _inputs(self, z: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return torch.cat([z, self.encode_action(action)], -1)

    # ---------------------------------------------------------------- prediction

    def predict(self, h: torch.Tensor) -> Prediction:
        """h: (…, hidden) after an action -> prediction of the next step."""
        return Prediction(
            latent=Mixture.from_raw(self.to_mixture(h), self.mixtures),
            reward=None if self.to_reward is None else self.to_reward(h).squeeze(-1).float(),
            done_logit=None if self.to_done is None else self.to_done(h).squeeze(-1).float(),
        )

    def losses(
        self,
        prediction: Prediction,  # (B, T)
        z: torch.Tensor,  # (B, T, latent) targets
        reward: torch.Tensor,  # (B, T)
        terminated: torch.Tensor,  # (B, T) bool
        *,
        done_weight: float,
    ) -> dict[str, torch.Tensor]:
        """Losses (B, T): mean negative log likelihood, squared reward error, weighted cross entropy."""
        losses = {"latent": -prediction.latent.log_prob(z).mean(-1)}
        if prediction.reward is not None:
            losses["reward"] = (prediction.reward - reward).square()
        if prediction.done_logit is not None:
            target = terminated.float()
            cross_entropy = F.binary_cross_entropy_with_logits(
                prediction.done_logit, target, reduction="none"
            )
            losses["done"] = cross_entropy * (1.0 + (done_weight - 1.0) * target)
        return losses
