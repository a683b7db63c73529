"""Suite `pusht`: push a T-shaped block onto its target with a round finger (Push-T, Chi et al. 2023)

    pusht/state        (5,): agent x, y, block x, y and angle in [0, 2π)
    pusht/keypoints    (20,): x and y of nine points of the block, then agent x, y (the paper's "state")
    pusht/pixels       `image` (3, 96, 96) and `agent_pos` (2,)

An action is the position in [0, 512]² that the agent moves to for 0.1 s. The reward is
min(coverage / 0.95, 1), where coverage is the part of the target's area that the block covers; the episode
terminates above 0.95 and is truncated after 300 steps. Three values are logged for each episode:
`log/max_reward` (the published score), `log/max_coverage` and `log/success`.

Same physics, drawing and random starts as gym-pusht 0.1.8 (huggingface/gym-pusht @ 5e2489b) and the authors' code
(real-stanford/diffusion_policy @ 5ba07ac); scripts/dev/compare_pusht.py compares them.
`reset(options={"state": …})` sets a state exactly. gym-pusht's `reset_to_state` sets the block's position before its
angle, which turns the block about its centre of mass and moves it by up to 90 px; random starts here do the same, so
that their distribution is the published one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.errors import MissingPackageError, install_line, known_task

if TYPE_CHECKING:
    import pygame

EXTRA = "pusht"
TASKS = ("state", "keypoints", "pixels")
MAX_STEPS = 300

SIDE = 512  # of the field, in pixels and in units of length
TIME_STEP = 0.01
STEPS_PER_ACTION = 10
STIFFNESS, DAMPING = 100.0, 20.0  # of the agent's PD controller
SUCCESS = 0.95  # coverage
GOAL = (256.0, 256.0, math.pi / 4)
AGENT_RADIUS = 15
IMAGE_SIDE = 96

Point = tuple[float, float]
# The block in its own coordinates: a bar and a stem, with their corners in pymunk's order, in which edges are drawn.
BAR: tuple[Point, ...] = ((-60, 0), (60, 0), (60, 30), (-60, 30))
STEM: tuple[Point, ...] = ((-15, 30), (15, 30), (15, 120), (-15, 120))
# Computed from `keypoint` and `state` of the 25,650 rows of pusht_cchi_v7_replay.zarr, where they agree to 0.03.
KEYPOINTS = np.array(
    [
        (9.268611, 90.022804),
        (-60.992165, -1.187175),
        (60.907116, -1.392866),
        (-0.270463, 25.543589),
        (-14.063669, 122.811290),
        (39.000347, 32.860786),
        (-39.954643, 32.734173),
        (-16.821692, 62.872383),
        (23.541050, -1.700141),
    ]
)


def tasks() -> list[str]:
    return list(TASKS)


def resolve(task: str) -> str:
    return known_task("pusht", task, TASKS)


def make(task: str, *, render: bool = False) -> gymnasium.Env:
    try:
        env = PushT(task, render_mode="rgb_array" if render else None)
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"pusht/{task} needs pymunk and pygame: {install_line(EXTRA)} ({error})"
        ) from error
    return gymnasium.wrappers.TimeLimit(env, MAX_STEPS)


def step_seconds(task: str) -> float:
    return 2e-3 if task == "pixels" else 4e-4


class PushT(gymnasium.Env):
    """Push-T on pymunk, drawn with pygame. `observe` is one of `TASKS`."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (as in Gymnasium)

    def __init__(self, observe: str = "state", *, render_mode: str | None = None) -> None:
        import pymunk

        self._pymunk = pymunk
        if observe == "pixels" or render_mode:
            if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
                os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # it draws to memory, without a display
            import pygame  # noqa: F401  (a missing package is reported here, not at the first frame)
        self.observe = observe
        self.render_mode = render_mode
        self.action_space = spaces.Box(0.0, float(SIDE), (2,), np.float32)
        self.observation_space = _observation_space(observe)
        self.best = 0.0  # the largest coverage of the episode

    # ---------------------------------------------------------------- episodes

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start from a random state, or exactly from `options["state"]`: agent x, y, block x, y, angle."""
        super().reset(seed=seed)
        self._build()
        state = None if options is None else options.get("state")
        if state is None:
            draw = self.np_random
            self._place_agent(float(draw.integers(50, 450)), float(draw.integers(50, 450)))
            # The published order: the angle turns the block about its centre of mass and moves its position.
            self.block.position = (float(draw.integers(100, 400)), float(draw.integers(100, 400)))
            self.block.angle = float(draw.uniform(-np.pi, np.pi))
        else:
            x, y, block_x, block_y, angle = (float(value) for value in state)
            self._place_agent(x, y)
            self.block.angle = angle
            self.block.position = (block_x, block_y)
        self.space.step(TIME_STEP)
        self.best = 0.0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        target_x, target_y = float(action[0]), float(action[1])
        agent = self.agent
        for _ in range(STEPS_PER_ACTION):
            (x, y), (speed_x, speed_y) = agent.position, agent.velocity
            agent.velocity = (
                speed_x + (STIFFNESS * (target_x - x) - DAMPING * speed_x) * TIME_STEP,
                speed_y + (STIFFNESS * (target_y - y) - DAMPING * speed_y) * TIME_STEP,
            )
            self.space.step(TIME_STEP)
        coverage = self.coverage()
        success = coverage > SUCCESS
        best, self.best = self.best, max(self.best, coverage)
        # Logged values are summed over an episode: increments of a maximum add up to it.
        info = {
            "coverage": coverage,
            "log/max_coverage": self.best - best,
            "log/max_reward": reward_of(self.best) - reward_of(best),
            "log/success": float(success),
        }
        return self._observation(), reward_of(coverage), success, False, info

    def coverage(self) -> float:
        """The part of the target's area that the block covers."""
        block = [self._corners(part) for part in (BAR, STEM)]
        return min(1.0, sum(overlap(goal, part) for goal in _GOAL_PARTS for part in block) / _GOAL_AREA)

    def state(self) -> np.ndarray:
        """Agent x, y, block x, y and angle in [0, 2π)."""
        return np.array(
            [*self.agent.position, *self.block.position, self.block.angle % (2 * math.pi)], np.float64
        )

    def _observation(self) -> Any:
        if self.observe == "state":
            return self.state().astype(np.float32)
        agent = np.array(self.agent.position)
        if self.observe == "keypoints":
            cos, sin = math.cos(self.block.angle), math.sin(self.block.angle)
            points = KEYPOINTS @ np.array([[cos, sin], [-sin, cos]]) + np.array(self.block.position)
            return np.concatenate([points.reshape(-1), agent]).astype(np.float32)
        return {"image": shrink(self.frame(), IMAGE_SIDE), "agent_pos": agent.astype(np.float32)}

    # ---------------------------------------------------------------- physics

    def _build(self) -> None:
        pymunk = self._pymunk
        self.space = pymunk.Space()
        self.space.gravity = (0, 0)
        self.space.damping = 0.0  # the block stops at once when nothing pushes it
        corners = [(5, 506), (5, 5), (506, 5), (506, 506)]
        ends = [(0, 1), (1, 2), (2, 3), (0, 3)]
        self.space.add(*(pymunk.Segment(self.space.static_body, corners[a], corners[b], 2) for a, b in ends))

        self.agent = pymunk.Body(body_type=pymunk.Body.KINEMATIC)
        self.agent.position = (256, 400)
        self.space.add(self.agent, pymunk.Circle(self.agent, AGENT_RADIUS))

        # As published: mass 1, and the moment of the bar counted twice.
        self.block = pymunk.Body(1, 2 * pymunk.moment_for_poly(1, list(BAR)))
        parts = [pymunk.Poly(self.block, list(part)) for part in (BAR, STEM)]
        self.block.center_of_gravity = (parts[0].center_of_gravity + parts[1].center_of_gravity) / 2
        self.block.position = (256, 300)
        self.space.add(self.block, *parts)

    def _place_agent(self, x: float, y: float) -> None:
        self.agent.position = (x, y)

    def _corners(self, part: Sequence[Point]) -> list[Point]:
        return _placed(part, (*self.block.position, self.block.angle))

    # ---------------------------------------------------------------- drawing

    def render(self) -> np.ndarray:
        """Return the field, (512, 512, 3) uint8."""
        return np.ascontiguousarray(self.frame())

    def frame(self) -> np.ndarray:
        import pygame

        surface = pygame.Surface((SIDE, SIDE), depth=32)
        surface.fill((255, 255, 255))
        for part in _GOAL_PARTS:
            pygame.draw.polygon(surface, pygame.Color("LightGreen"), [_pixel(point) for point in part])
        centre, blue = _pixel(self.agent.position), pygame.Color("RoyalBlue")
        pygame.draw.circle(surface, blue, centre, AGENT_RADIUS)
        pygame.draw.circle(surface, _lighter(blue), centre, AGENT_RADIUS - 4)
        gray = pygame.Color("LightSlateGray")
        for shape in (BAR, STEM):
            points = [_pixel(point) for point in self._corners(shape)]
            pygame.draw.polygon(surface, _lighter(gray), points)
            for start, end in zip(points, points[1:] + points[:1]):
                _thick_line(surface, gray, start, end)
        for start, end in (
            ((5, 506), (5, 5)),
            ((5, 5), (506, 5)),
            ((506, 5), (506, 506)),
            ((5, 506), (506, 506)),
        ):
            _thick_line(surface, pygame.Color("LightGray"), start, end)
        return pygame.surfarray.array3d(surface).swapaxes(0, 1)


def _observation_space(observe: str) -> spaces.Space:
    def box(size: int, high: Any = float(SIDE)) -> spaces.Box:
        return spaces.Box(0.0, high, (size,), np.float32)

    if observe == "state":
        return box(5, np.array([SIDE, SIDE, SIDE, SIDE, 2 * np.pi], np.float32))
    if observe == "keypoints":
        return box(20)
    return spaces.Dict(
        {"image": spaces.Box(0, 255, (IMAGE_SIDE, IMAGE_SIDE, 3), np.uint8), "agent_pos": box(2)}
    )


def reward_of(coverage: float) -> float:
    return min(coverage / SUCCESS, 1.0)


# ---------------------------------------------------------------- geometry


def _placed(points: Sequence[Point], pose: tuple[float, float, float]) -> list[Point]:
    x, y, angle = pose
    cos, sin = math.cos(angle), math.sin(angle)
    return [(x + cos * px - sin * py, y + sin * px + cos * py) for px, py in points]


def area(polygon: Sequence[Point]) -> float:
    """The signed area (shoelace formula): positive if x turns to y."""
    return 0.5 * sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in zip(polygon, [*polygon[1:], *polygon[:1]]))


def overlap(one: Sequence[Point], other: Sequence[Point]) -> float:
    """The area of the intersection of two convex polygons (Sutherland and Hodgman 1974)."""
    sign = 1.0 if area(one) > 0 else -1.0
    left = list(other)
    for (x0, y0), (x1, y1) in zip(one, [*one[1:], *one[:1]]):
        if len(left) < 3:
            return 0.0
        # Positive on the inner side of the edge.
        sides = [sign * ((x1 - x0) * (y - y0) - (y1 - y0) * (x - x0)) for x, y in left]
        kept: list[Point] = []
        for k, (point, side) in enumerate(zip(left, sides)):
            before, side_before = left[k - 1], sides[k - 1]
            if (side >= 0) != (side_before >= 0):
                share = side_before / (side_before - side)
                kept.append(
                    (before[0] + share * (point[0] - before[0]), before[1] + share * (point[1] - before[1]))
                )
            if side >= 0:
                kept.append(point)
        left = kept
    return abs(area(left)) if len(left) > 2 else 0.0


_GOAL_PARTS = [_placed(part, GOAL) for part in (BAR, STEM)]
_GOAL_AREA = sum(abs(area(part)) for part in _GOAL_PARTS)


# ---------------------------------------------------------------- images


def _pixel(point: Any) -> tuple[int, int]:
    return round(point[0]), round(point[1])


def _lighter(color: pygame.Color) -> tuple[int, int, int]:
    red, green, blue = (round(min(1.2 * value, 255.0)) for value in (color.r, color.g, color.b))
    return red, green, blue


def _thick_line(surface: Any, color: Any, start: tuple[int, int], end: tuple[int, int]) -> None:
    """A line of width 4 with round ends."""
    import pygame

    pygame.draw.line(surface, color, start, end, 4)
    along = (end[0] - start[0], end[1] - start[1])
    length = math.hypot(*along)
    if not length:
        return
    # The rounded normal of the published drawing; it uses |dx| and |dy|.
    normal_x, normal_y = round(abs(along[1]) * 2 / length), round(abs(along[0]) * 2 / length)
    corners = [(start, -1), (start, 1), (end, 1), (end, -1)]
    pygame.draw.polygon(
        surface, color, [(x + side * normal_x, y + side * normal_y) for (x, y), side in corners]
    )
    for point in (start, end):
        pygame.draw.circle(surface, color, point, 2)


def shrink(frame: np.ndarray, side: int) -> np.ndarray:
    """(H, H, 3) -> (side, side, 3) uint8: bilinear at the centres of the pixels, without antialiasing.

    That is OpenCV's `resize`, with which the published images were made.
    """
    low, weight = _taps(frame.shape[0], side)
    rows = frame[low].astype(np.int32) * (2048 - weight)[:, None, None]
    rows += frame[low + 1].astype(np.int32) * weight[:, None, None]
    image = rows[:, low] * (2048 - weight)[:, None] + rows[:, low + 1] * weight[:, None]
    return ((image + (1 << 21)) >> 22).astype(np.uint8)


def _taps(size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Index of the lower of two pixels, and 2048 times the weight of the upper one, for each output pixel."""
    place = (np.arange(side) + 0.5) * (size / side) - 0.5
    low = np.clip(np.floor(place).astype(np.int64), 0, size - 2)
    return low, np.rint((place - low) * 2048).astype(np.int32)
