"""M of World Models: an LSTM that predicts the next latent as a mixture of normals (Ha and Schmidhuber 2018).

Every latent dimension has a mixture of its own, as in hardmaru/WorldModelsExperiments (rnn/rnn.py). The heads for the
reward (as in ctallec/world-models) and for the episode's end (as in the original's Doom part) make it a world to act in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from rl_lab.components.nn.action_encoder import ActionEncoder
from rl_lab.components.nn.lstm import LSTM, State
from rl_lab.components.nn.mixture import Mixture
from rl_lab.records import Spec


@dataclass
class Prediction:
    """What M expects to arrive next."""

    latent: Mixture  # (…, D, K)
    reward: torch.Tensor | None  # (…), None without the head
    done_logit: torch.Tensor | None  # (…)


class MDNRNN(nn.Module):
    """Memory h_{t+1} from (h_t, z_t, a_t); from it the mixture of z_{t+1}, the reward and the end that come with it."""

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

    # ---------------------------------------------------------------- memory

    def reset_state(self, size: int) -> State:
        """Memory before an episode's first step: h and c, (size, hidden), zero."""
        return self.lstm.initial_state(size)

    def observe(
        self,
        state: State,
        z: torch.Tensor,  # (N, latent)
        action: torch.Tensor,  # (N, …) as stored
        is_first: torch.Tensor | None = None,  # (N,) bool: rows that begin an episode
    ) -> State:
        """Memory after seeing z and doing the action; where `is_first`, what was before is forgotten."""
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
        """Memory after each step, (B, T, hidden), and the last state.

        Without `is_first` the sequence lies in one episode, and one fused call does it all.
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
        """h: (…, hidden), memory after an action -> what comes next."""
        return Prediction(
            latent=Mixture.from_raw(self.to_mixture(h), self.mixtures),
            reward=None if self.to_reward is None else self.to_reward(h).squeeze(-1).float(),
            done_logit=None if self.to_done is None else self.to_done(h).squeeze(-1).float(),
        )

    def losses(
        self,
        prediction: Prediction,  # (B, T)
        z: torch.Tensor,  # (B, T, latent), what came
        reward: torch.Tensor,  # (B, T)
        terminated: torch.Tensor,  # (B, T) bool
        *,
        done_weight: float,
    ) -> dict[str, torch.Tensor]:
        """Negative log likelihood (mean over latent dimensions), squared reward error, weighted cross entropy: (B, T)."""
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
