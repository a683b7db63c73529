"""The real environment in place of a token world model: the upper bound of what a world model can give a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from rl_lab.components.dynamics.backbones import State
from rl_lab.components.dynamics.token_world_model import Outcome
from rl_lab.components.representation_learners.tokenizer import frame_key, to_frames
from rl_lab.errors import ConfigError, LabError
from rl_lab.records import Batch, Spec

NAMES = ("action", "reward", "terminated", "is_first")


class EnvironmentModel(nn.Module):
    """Environments of its own, which an imagined step really steps. It has no weights and is not trained.

    "Imagination" does not start from stored rows but goes on where the environments stand: `starts` replaces
    a batch by their last rows. Frames reach the policy through the tokenizer, as imagined ones do. Such steps
    are not counted as environment steps of the run. A time limit counts as an end.

    environment: creates N environments, `environment(num_envs=N)`
    """

    context, seeds, dreams = 1, 0, False
    on_host = True  # its steps cannot be captured

    def __init__(
        self,
        spec: Spec,
        environment: Callable[..., Any],
        *,
        tokens: int,
        vocab: int,
        blocks: int,
        code: int = 0,
    ) -> None:
        super().__init__()
        self.key, self.spec = frame_key(spec), spec
        self.tokens, self.vocab, self.blocks, self.code = tokens, vocab, blocks, code
        self._create, self._environment = environment, None
        self._rows: dict[str, np.ndarray] = {}  # the last rows of each environment, (N, rows, …)
        self._saved: Mapping[str, Any] | None = None

    @property
    def step_noise(self) -> int:
        return 1

    def compute_loss(self, *unused: Any) -> Any:
        raise ConfigError(
            "the phases have update_world_model, but the real environment is not trained: "
            "choose phases=iris_real_environment"
        )

    # ---------------------------------------------------------------- stepping

    def starts(self, batch: Batch) -> Batch:
        """The last rows of the environments, in the shape of `batch` (B, T): padded before an episode's start."""
        size, count = batch.reward.shape
        if self._environment is None:
            self._open(size, count)
        if self._rows["reward"].shape != (size, count):
            raise LabError(
                f"the real environment was started for batches of {self._rows['reward'].shape}, not {(size, count)}: "
                "algorithm.actor_critic.grad_acc_steps must be 1"
            )
        device = batch.reward.device
        columns = {name: torch.from_numpy(value.copy()).to(device) for name, value in self._rows.items()}
        mask = columns.pop("mask")
        return Batch(columns, mask=mask)

    def begin(
        self, tokenizer: Any, frames: torch.Tensor, action: torch.Tensor, frame: torch.Tensor | None = None
    ) -> State:
        """Start from the last of frames (B, T, C, H, W), which must be those of `starts`."""
        return {"frame": tokenizer.policy_view(frames[:, -1]) if frame is None else frame}

    def advance(
        self,
        tokenizer: Any,
        state: State,
        action: torch.Tensor,
        noise: torch.Tensor,
        features: Callable[[], torch.Tensor | None] | None = None,
    ) -> tuple[State, Outcome]:
        environment = self._environment
        if environment is None:
            raise LabError("the real environment cannot be dreamed: it does not start from stored rows")
        taken = action.cpu().numpy()
        environment.step_async(taken)
        obs, reward, terminated, truncated, _ = environment.step_wait()
        self._append(obs, taken, reward, terminated, environment.is_first)
        device = action.device
        frame = torch.from_numpy(np.array(obs[self.key])).to(device)
        ended = torch.from_numpy(np.array(terminated | truncated, bool)).to(device)
        outcome = Outcome(torch.from_numpy(np.array(reward, np.float32)).to(device), ended.float(), ended)
        return {"frame": tokenizer.policy_view(to_frames(frame))}, outcome

    def read_pending(self, state: State) -> State:
        return state

    def step(
        self, tokenizer: Any, state: State, action: torch.Tensor, noise: torch.Tensor
    ) -> tuple[State, Outcome]:
        return self.advance(tokenizer, state, action, noise)

    def full(self, state: State) -> torch.Tensor:
        return torch.zeros(len(state["frame"]), dtype=torch.bool, device=state["frame"].device)

    # ---------------------------------------------------------------- rows

    def _open(self, size: int, count: int) -> None:
        self._environment = environment = self._create(num_envs=size)
        if self._saved is not None:
            environment.set_state(self._saved["environment"])
            self._rows = {name: np.array(value) for name, value in self._saved["rows"].items()}
            self._saved = None
            return
        obs, _ = environment.reset()
        columns = self.spec.row_columns()
        self._rows = {
            name: np.zeros((size, count, *columns[name].shape), columns[name].dtype)
            for name in (f"obs/{self.key}", *NAMES)
        }
        self._rows["mask"] = np.zeros((size, count), bool)
        no = np.zeros(size, bool)
        self._append(obs, None, np.zeros(size, np.float32), no, ~no)

    def _append(
        self, obs: Mapping[str, Any], taken: Any, reward: Any, terminated: Any, is_first: np.ndarray
    ) -> None:
        """Add a row to each environment; earlier rows of another episode become padding.

        taken: the actions in the row before
        """
        rows = self._rows
        if taken is not None:
            rows["action"][:, -1] = taken
        for value in rows.values():
            value[:, :-1] = value[:, 1:].copy()
        rows["mask"][is_first] = False
        rows["mask"][:, -1] = True
        rows["action"][:, -1] = 0
        new = {f"obs/{self.key}": obs[self.key], "reward": reward, "terminated": terminated}
        for name, value in {**new, "is_first": is_first}.items():
            rows[name][:, -1] = value

    # ---------------------------------------------------------------- checkpoint

    def get_environment_state(self) -> dict[str, Any]:
        """What an exact resume needs; {} before the first step."""
        if self._environment is None:
            return dict(self._saved or {})
        rows = {name: torch.from_numpy(value.copy()) for name, value in self._rows.items()}
        return {"environment": self._environment.get_state(), "rows": rows}

    def set_environment_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the state when the environments are opened."""
        self._saved = dict(state) or None
