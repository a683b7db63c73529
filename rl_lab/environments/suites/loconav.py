"""Suite `loconav`: an ant that must find the goal of a maze (DeepMind Control's locomotion), with its camera and body

    loconav/ant_maze_s, ant_maze_m, ant_maze_l, ant_maze_xl, ant_maze_xxl, ant_empty

Hafner et al. 2022, "Deep Hierarchical Planning from Pixels" (Director); task and mazes as in danijar/dreamerv3 @
e3f0224, embodied/envs/loconav.py: 50 decisions a second, 60 seconds, no end before; reward 1 for every step from the
one in which the goal is touched. The start's direction is random. `log/coverage` is the number of square metres that
the ant entered in the episode.

    observe: both       the vectors of the body, and `image` (DreamerV3's preset)
             proprio, vision
    camera:  null       what the ant sees; 4: from above and behind, as in Director
"""

from __future__ import annotations

import re
from typing import Any

import gymnasium
import numpy as np

from rl_lab.environments.rendering import choose_renderer
from rl_lab.environments.suites.dmc import OBSERVE, ControlEnv
from rl_lab.errors import ConfigError, closest

EXTRA = "dmc"
HANDLES = frozenset({"size", "action_repeat", "time_limit"})
EGOCENTRIC = "walker/egocentric"
FREQUENCY = 50  # decisions per second
SECONDS = 60
# Rows of cells, from the top: `.` floor, digits and `*` walls (each with its colour), P the start, G the goal. Mazes
# without P and G have random ones. These are the published mazes: danijar/dreamerv3 (MIT).
MAPS = {
    "maze_s": (
        "......66666",
        "......6...6",
        "......6.G.6",
        "......6...6",
        "......5...4",
        "......5...4",
        "1111555...4",
        "1.........3",
        "1.P.......3",
        "1.........3",
        "11112223333",
    ),
    "maze_m": (
        "66668887777",
        "6.........7",
        "6.G.......7",
        "6.........7",
        "6665555...4",
        "......5...4",
        "1111555...4",
        "1.........3",
        "1.P.......3",
        "1.........3",
        "11112223333",
    ),
    "maze_l": (
        "88887776666...",
        "8.........6...",
        "8.G.......6...",
        "8.........6555",
        "8888777......5",
        "......7......5",
        "11111.7......5",
        "1...1.7999...5",
        "1...1....9...5",
        "1...111999...5",
        "2............4",
        "2....P.......4",
        "2............4",
        "22223333334444",
    ),
    "maze_xl": (
        "99999998888.44444",
        "9.........8.4...4",
        "9.......G.8.4...4",
        "9.........8.4...4",
        "6...7778888.5...3",
        "6...7.......5...3",
        "6...777555555...3",
        "5...............3",
        "5...............3",
        "5...............3",
        "5555444...666...3",
        "......4...6.6...3",
        "1111444...6.6...3",
        "1.........2.1...1",
        "1.P.......2.1...1",
        "1.........2.1...1",
        "11111112222.11111",
    ),
    "maze_xxl": (
        "7777***666***9999",
        "7...............9",
        "7.............G.9",
        "7...............9",
        "*...555******9999",
        "*...5............",
        "*...555******3333",
        "8...............3",
        "8...............3",
        "8...............3",
        "8888******444...*",
        "............4...*",
        "1111******444...*",
        "1...............2",
        "1.P.............2",
        "1...............2",
        "1111***666***2222",
    ),
    "empty": ("." * 17,) * 17,
}

# Colours of the walls 1 to 9: the first nine of matplotlib's `tab10`.
COLOURS = (
    (0.122, 0.467, 0.706),
    (1.000, 0.498, 0.055),
    (0.173, 0.627, 0.173),
    (0.839, 0.153, 0.157),
    (0.580, 0.404, 0.741),
    (0.549, 0.337, 0.294),
    (0.890, 0.467, 0.761),
    (0.498, 0.498, 0.498),
    (0.737, 0.741, 0.133),
)
GREY = (0.8, 0.8, 0.8)


def tasks() -> list[str]:
    return [f"ant_{name}" for name in MAPS]


def resolve(task: str) -> str:
    """Return the name of the maze."""
    if task not in tasks():
        hint = " The quadruped is not included: use the ant." if task.startswith("quadruped_") else ""
        raise ConfigError(f"no task 'loconav/{task}'.{closest(task, tasks())}{hint}")
    return task.removeprefix("ant_")


def make(
    task: str,
    *,
    render: bool = False,
    size: tuple[int, int] | None = None,
    action_repeat: int | None = None,
    time_limit: int | None = None,
    observe: str = "both",
    camera: int | str | None = None,
    keys: str = "",
    fast_render: bool = False,
) -> gymnasium.Env:
    """`keys`: regular expression; only vectors whose name has a match are observed."""
    if observe not in OBSERVE:
        raise ConfigError(f"environment.observe={observe!r}:{closest(str(observe), OBSERVE)}")
    try:
        re.compile(keys)
    except re.error as error:
        raise ConfigError(f"environment.keys={keys!r} is not a regular expression: {error}") from error
    choose_renderer(needed=render or observe != "proprio")
    return AntMaze(
        lambda: load_maze(task),
        observe=observe,
        size=size or (64, 64),
        action_repeat=action_repeat or 1,
        time_limit=time_limit,
        camera=EGOCENTRIC if camera is None else camera,
        fast_render=fast_render,
        own_random=True,  # it chooses the floor's texture with numpy's global generator
        keys=keys,
        render_mode="rgb_array" if render else None,
    )


class AntMaze(ControlEnv):
    """Adds `log/coverage`."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        result = super().reset(seed=seed, options=options)
        self._visited = {self._place()}
        return result

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        place = self._place()
        info["log/coverage"] = float(place not in self._visited)
        self._visited.add(place)
        return obs, reward, terminated, truncated, info

    def _place(self) -> tuple[int, int]:
        """Return the position of the ant, rounded to metres."""
        x, y, _ = self._env.physics.named.data.xpos["walker/torso"]
        return round(float(x)), round(float(y))


def load_maze(name: str) -> Any:
    """Return the dm_control environment of a maze."""
    import labmaze
    from dm_control import composer, mjcf
    from dm_control.locomotion.arenas import labmaze_textures, mazes
    from dm_control.locomotion.props import target_sphere
    from dm_control.locomotion.tasks import random_goal_maze
    from dm_control.locomotion.walkers import ant

    class PlainWall(labmaze_textures.WallTextures):
        """One colour for a whole wall."""

        def _build(self, color: tuple[float, ...]) -> None:
            self._mjcf_root = mjcf.RootElement(model="labmaze_style_01")
            self._textures = [
                self._mjcf_root.asset.add(
                    "texture", type="2d", name="wall", builtin="flat", rgb1=color, width=100, height=100
                )
            ]

    class TouchedGoal(random_goal_maze.RepeatSingleGoalMaze):
        """Goes on after the goal was touched, and rewards every step from then on."""

        def after_step(self, physics: Any, random_state: Any) -> None:
            random_goal_maze.NullGoalMaze.after_step(self, physics, random_state)
            self._rewarded_this_step = self._target.activated

    colours = {"*": GREY, **{str(number): colour for number, colour in enumerate(COLOURS, start=1)}}
    maze = labmaze.FixedMazeWithRandomGoals(
        entity_layer="".join(row.replace(".", " ") + "\n" for row in MAPS[name]), num_spawns=1, num_objects=1
    )
    arena = mazes.MazeWithTargets(
        maze,
        xy_scale=1.2,
        z_height=2.0,
        aesthetic="default",
        wall_textures={wall: PlainWall(colour) for wall, colour in colours.items()},
        name="maze",
    )
    task = TouchedGoal(
        walker=ant.Ant(),
        maze_arena=arena,
        target=target_sphere.TargetSphere(radius=1.2, height_above_ground=0.0),
        max_repeats=1,
        randomize_spawn_rotation=True,
        target_reward_scale=1.0,
        aliveness_threshold=-1.0,  # never ends
        contact_termination=False,
        physics_timestep=min(1 / FREQUENCY / 4, 0.02),
        control_timestep=1 / FREQUENCY,
    )
    return composer.Environment(
        task=task,
        time_limit=SECONDS,
        random_state=np.random.RandomState(0),
        strip_singleton_obs_buffer_dim=True,
    )


def step_seconds(task: str) -> float:
    return 20e-3
