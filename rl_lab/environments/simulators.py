"""CartPole and Catch as tensor operations over N environments, for the suite `tensor`."""

from __future__ import annotations

import math

import torch

from rl_lab.environments.tensor_env import Tensors, TensorSimulator
from rl_lab.records import ActionSpec, ArraySpec

# CartPole-v1 of Gymnasium: Barto, Sutton and Anderson 1983.
GRAVITY, CART_MASS, POLE_MASS, HALF_LENGTH, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
X_LIMIT, ANGLE_LIMIT = 2.4, 12 * 2 * math.pi / 360


class CartPole(TensorSimulator):
    """CartPole-v1: 500 steps with reward 1; equal to Gymnasium's step for step, in float64."""

    time_limit = 500

    def __init__(self, num_envs: int, device: torch.device | str = "cpu") -> None:
        self.num_envs, self.device = num_envs, torch.device(device)
        self.observations = {"state": ArraySpec((4,), "float32")}
        self.action = ActionSpec("discrete", (), (2,))
        self.variables = torch.zeros(num_envs, 4, dtype=torch.float64, device=self.device)

    def start(self, which: torch.Tensor, generator: torch.Generator) -> None:
        drawn = torch.rand(self.variables.shape, generator=generator, dtype=torch.float64, device=self.device)
        self.variables.copy_(torch.where(which[:, None], drawn * 0.1 - 0.05, self.variables))

    def step(self, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, speed, angle, spin = self.variables.unbind(1)
        force = torch.where(action == 1, FORCE, -FORCE).to(torch.float64)
        cos, sin = angle.cos(), angle.sin()
        mass, moment = CART_MASS + POLE_MASS, POLE_MASS * HALF_LENGTH
        push = (force + moment * spin.square() * sin) / mass
        turn = (GRAVITY * sin - cos * push) / (HALF_LENGTH * (4.0 / 3.0 - POLE_MASS * cos.square() / mass))
        pull = push - moment * turn * cos / mass
        following = [
            x + SECONDS * speed,
            speed + SECONDS * pull,
            angle + SECONDS * spin,
            spin + SECONDS * turn,
        ]
        self.variables.copy_(torch.stack(following, dim=1))
        fallen = (self.variables[:, 0].abs() > X_LIMIT) | (self.variables[:, 2].abs() > ANGLE_LIMIT)
        return torch.ones(self.num_envs, device=self.device), fallen

    def observe(self) -> Tensors:
        return {"state": self.variables.float()}

    def state(self) -> Tensors:
        return {"variables": self.variables}


class Catch(TensorSimulator):
    """Catch from pixels: the game and the picture of `dummy/catch`, with balls from another generator.

    cells: side length of the grid; side: of the image, in pixels; length: balls of an episode
    """

    COLOURS = (
        (16, 16, 32),
        (80, 170, 255),
        (240, 200, 60),
    )  # background, paddle, ball: those of `dummy.Catch`

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        cells: int = 8,
        side: int = 64,
        length: int = 3,
    ) -> None:
        self.num_envs, self.device = num_envs, torch.device(device)
        self.cells, self.length = cells, length
        self.observations = {"image": ArraySpec((3, side, side), "uint8")}
        self.action = ActionSpec("discrete", (), (3,))
        # Columns: the ball's row and column, the paddle's column, balls that have fallen, the next ball's column.
        self.game = torch.zeros(num_envs, 5, dtype=torch.int64, device=self.device)
        self._pixel = torch.arange(side, device=self.device) * cells // side  # pixel -> cell
        self._colours = torch.tensor(self.COLOURS, dtype=torch.uint8, device=self.device)

    def start(self, which: torch.Tensor, generator: torch.Generator) -> None:
        columns = torch.randint(
            self.cells, (self.num_envs, 2), generator=generator, dtype=torch.int64, device=self.device
        )
        first = torch.zeros_like(self.game)
        first[:, 1], first[:, 2] = columns[:, 0], self.cells // 2
        self.game.copy_(torch.where(which[:, None], first, self.game))
        self.game[:, 4] = columns[:, 1]

    def step(self, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        row, column, paddle, fallen, following = self.game.unbind(1)
        paddle = (paddle + action - 1).clamp(0, self.cells - 1)
        row = row + 1
        landed = row == self.cells - 1
        caught = column == paddle
        reward = torch.where(landed, torch.where(caught, 1.0, -1.0), 0.0)
        fallen = fallen + landed
        again = landed & (fallen < self.length)  # the last ball stays in the picture
        row, column = torch.where(again, 0, row), torch.where(again, following, column)
        self.game.copy_(torch.stack([row, column, paddle, fallen, following], dim=1))
        return reward, fallen >= self.length

    def observe(self) -> Tensors:
        row, column, paddle, _, _ = self.game.unbind(1)
        down, right = self._pixel[None, :, None], self._pixel[None, None, :]
        paddles = (down == self.cells - 1) & (right == paddle[:, None, None])
        balls = (down == row[:, None, None]) & (right == column[:, None, None])
        kind = torch.where(balls, 2, paddles.long())  # (N, side, side)
        return {"image": self._colours[kind].permute(0, 3, 1, 2).contiguous()}

    def state(self) -> Tensors:
        return {"game": self.game}


SIMULATORS = {"cartpole": CartPole, "catch": Catch}
