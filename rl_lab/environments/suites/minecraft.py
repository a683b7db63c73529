"""Suite `minecraft`: Minecraft through MineRL 0.4.4, with the flat action set and rewards of DreamerV3

    minecraft/diamond     12 milestones from a log to a diamond, +1 for the first of each in an episode
    minecraft/wood        +1 for every log
    minecraft/climb       the height that the player gains

Hafner et al. 2023, "Mastering Diverse Domains through World Models"; actions, rewards and settings as in
danijar/dreamerv3 @ e3f0224, embodied/envs/minecraft_flat.py. Observations: `image`, `inventory` (how many of each
item), `inventory_max` (the largest number of the episode so far), `equipped` (one-hot), `health`, `hunger`, `breath`.
Each step logs `log/achievement_<item>`, 1 when the item was obtained for the first time.

**Not run against the real one**: MineRL needs Java 8 and cannot be installed where RL Lab is tested. The adapter is
tested against a stand-in written from the source of MineRL 0.4.4; docs/howto/minecraft_dmlab.md says how to set it up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.environments.suites.base import SeededEnv
from rl_lab.errors import ConfigError, LabError, MissingPackageError, known_task, one_line

EXTRA = ""
HANDLES = frozenset({"size", "action_repeat", "time_limit"})
MODULE = "minerl"
SETUP = "scripts/setup/minecraft.sh installs MineRL and Java 8 (docs/howto/minecraft_dmlab.md)"
LENGTH = 36_000  # steps: 30 minutes
HEALTH_REWARD = 0.01  # for the complete health bar
PITCH_LIMIT = (-60, 60)  # degrees
STICKY_JUMP = 10  # steps for which a jump continues
STICKY_ATTACK = 30  # as long at the game's own break speed, off at a higher one
ENTRIES = ("forward", "back", "left", "right", "jump", "sneak", "attack")
CHOICES = ("place", "equip", "craft", "nearbyCraft", "nearbySmelt")
BASIC_ACTIONS: dict[str, dict[str, Any]] = {
    "noop": {},
    "attack": {"attack": 1},
    "turn_up": {"camera": (-15, 0)},
    "turn_down": {"camera": (15, 0)},
    "turn_left": {"camera": (0, -15)},
    "turn_right": {"camera": (0, 15)},
    "forward": {"forward": 1},
    "back": {"back": 1},
    "left": {"left": 1},
    "right": {"right": 1},
    "jump": {"jump": 1, "forward": 1},
    "place_dirt": {"place": "dirt"},
}
CRAFTING: dict[str, dict[str, Any]] = {
    "craft_planks": {"craft": "planks"},
    "craft_stick": {"craft": "stick"},
    "craft_crafting_table": {"craft": "crafting_table"},
    "place_crafting_table": {"place": "crafting_table"},
    "craft_wooden_pickaxe": {"nearbyCraft": "wooden_pickaxe"},
    "craft_stone_pickaxe": {"nearbyCraft": "stone_pickaxe"},
    "craft_iron_pickaxe": {"nearbyCraft": "iron_pickaxe"},
    "equip_stone_pickaxe": {"equip": "stone_pickaxe"},
    "equip_wooden_pickaxe": {"equip": "wooden_pickaxe"},
    "equip_iron_pickaxe": {"equip": "iron_pickaxe"},
    "craft_furnace": {"nearbyCraft": "furnace"},
    "place_furnace": {"place": "furnace"},
    "smelt_iron_ingot": {"nearbySmelt": "iron_ingot"},
}
MILESTONES = (
    "log",
    "planks",
    "stick",
    "crafting_table",
    "wooden_pickaxe",
    "cobblestone",
    "stone_pickaxe",
    "iron_ore",
    "furnace",
    "iron_ingot",
    "iron_pickaxe",
    "diamond",
)
ACTIONS = {"diamond": {**BASIC_ACTIONS, **CRAFTING}, "wood": BASIC_ACTIONS, "climb": BASIC_ACTIONS}


def tasks() -> list[str]:
    return list(ACTIONS)


def resolve(task: str) -> str:
    return known_task("minecraft", task, ACTIONS)


def make(
    task: str,
    *,
    render: bool = False,
    size: tuple[int, int] | None = None,
    action_repeat: int | None = None,
    time_limit: int | None = None,
    break_speed: float = 100.0,
) -> gymnasium.Env:
    """`break_speed`: how much faster blocks break than in the game, which then needs no sticky attack; 1: the game's"""
    if isinstance(break_speed, bool) or not isinstance(break_speed, int | float) or break_speed <= 0:
        raise ConfigError(f"environment.break_speed={break_speed!r} must be a number above 0")
    return MinecraftEnv(
        task,
        size=size or (64, 64),
        action_repeat=action_repeat or 1,
        time_limit=time_limit or LENGTH,
        break_speed=float(break_speed),
        render_mode="rgb_array" if render else None,
    )


class MinecraftEnv(SeededEnv):
    """One game with discrete actions. A world is generated for each episode."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012 (as in Gymnasium)

    def __init__(
        self,
        task: str,
        *,
        break_speed: float,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.task = task
        self.action_names = tuple(ACTIONS[task])
        self._attack_steps = STICKY_ATTACK if break_speed == 1.0 else 0
        self._game = _create(self.size, break_speed)
        observed = self._game.observation_space
        # Oak logs and the logs of acacia and dark oak are one item.
        self.items = tuple(name for name in _names(observed["inventory"]) if name != "log2")
        self.equipment = tuple(str(name) for name in observed["equipped_items"]["mainhand"]["type"].values)
        self._check_items()
        self.action_space = spaces.Discrete(len(self.action_names))
        count = spaces.Box(0.0, np.inf, (len(self.items),), np.float32)
        share = spaces.Box(0.0, np.inf, (1,), np.float32)  # above 1 after a golden apple
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, self._image.shape, np.uint8),
                "inventory": count,
                "inventory_max": count,
                "equipped": spaces.Box(0.0, 1.0, (len(self.equipment),), np.float32),
                "health": share,
                "hunger": share,
                "breath": share,
            }
        )

    def _start(self, seed: int) -> dict[str, Any]:
        self._game.seed(seed, seed_spaces=False)  # MineRL forgets it afterwards
        raw = self._game.reset()
        self._pitch = self._attacking = self._jumping = 0
        self._most = np.zeros(len(self.items), np.float32)
        self._obs = self._observe(raw)
        self._begun: set[str] = {name for name in self.items if self._counts[name] > 0}
        self._last_health, self._last_height, self._logs = self._health, self._height, self._counts["log"]
        return self._obs

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        command = self._command(self.action_names[int(action)])
        following = (
            {name: 0 for name in ENTRIES} | {name: "none" for name in CHOICES} | {"camera": (0.0, 0.0)}
        )
        following |= {name: command[name] for name in ("attack", "forward", "back", "left", "right")}
        self._elapsed += 1
        for number in range(self.action_repeat):
            raw, _, done, info = self._game.step(_copy(command if number == 0 else following))
            if info and "error" in info:  # the connection was lost, and the observation is a random one
                return self._obs, 0.0, False, True, {"log/connection_lost": 1.0}
            if done:
                break
        self._obs = self._observe(raw)
        reward, log = self._reward()
        return self._obs, reward, bool(done), self.at_limit and not done, log

    def close(self) -> None:
        self._game.close()

    def _observe(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        counts = {name: float(value) for name, value in raw["inventory"].items()}
        counts["log"] += counts.pop("log2")
        self._counts = counts
        inventory = np.array([counts[name] for name in self.items], np.float32)
        self._most = np.maximum(self._most, inventory)
        equipped = np.zeros(len(self.equipment), np.float32)
        equipped[self.equipment.index(str(raw["equipped_items"]["mainhand"]["type"]))] = 1.0
        life = raw["life_stats"]
        self._health = float(life["life"]) / 20
        self._height = float(raw["location_stats"]["ypos"])
        self._image = np.ascontiguousarray(raw["pov"])  # MineRL's is a mirrored view of a buffer
        return {
            "image": self._image,
            "inventory": inventory,
            "inventory_max": self._most.copy(),
            "equipped": equipped,
            "health": np.array([self._health], np.float32),
            "hunger": np.array([float(life["food"]) / 20], np.float32),
            "breath": np.array([float(life["air"]) / 300], np.float32),
        }

    def _reward(self) -> tuple[float, dict[str, float]]:
        reward = HEALTH_REWARD * (self._health - self._last_health)
        if self.task == "climb":
            reward += self._height - self._last_height
        elif self.task == "wood":
            reward += max(0.0, self._counts["log"] - self._logs)
        log: dict[str, float] = {}
        for name in MILESTONES:
            first = self._counts[name] > 0 and name not in self._begun
            log[f"log/achievement_{name}"] = float(first)
            if first and self.task == "diamond":
                reward += 1.0
        self._begun |= {name for name in MILESTONES if self._counts[name] > 0}
        self._last_health, self._last_height, self._logs = self._health, self._height, self._counts["log"]
        return reward, log

    def _command(self, name: str) -> dict[str, Any]:
        """Return the complete action of MineRL, with attacks and jumps that continue and a limited pitch."""
        command: dict[str, Any] = {key: 0 for key in ENTRIES} | {key: "none" for key in CHOICES}
        command |= {"camera": (0, 0), **ACTIONS[self.task][name]}
        if command["attack"]:
            self._attacking = self._attack_steps
        if self._attacking > 0:
            command |= {"attack": 1, "jump": 0}
            self._attacking -= 1
        if command["jump"]:
            self._jumping = STICKY_JUMP
        if self._jumping > 0:
            command |= {"jump": 1, "forward": 1}
            self._jumping -= 1
        up, side = command["camera"]
        if not PITCH_LIMIT[0] <= self._pitch + up <= PITCH_LIMIT[1]:
            up = 0
        self._pitch += up
        command["camera"] = (float(up), float(side))
        return command

    def _check_items(self) -> None:
        missing = [name for name in MILESTONES if name not in self.items]
        if missing:
            raise LabError(
                f"minecraft/{self.task}: this MineRL has no item {', '.join(missing)}: use {SETUP}"
            )


def step_seconds(task: str) -> float:
    return 50e-3


def _copy(command: dict[str, Any]) -> dict[str, Any]:
    return {**command, "camera": np.array(command["camera"], np.float32)}


def _names(space: Any) -> list[str]:
    return list(space.spaces)


def _create(size: tuple[int, int], break_speed: float) -> Any:
    """Return MineRL's environment, of old Gym: `reset() -> obs`, `step() -> obs, reward, done, info`."""
    for alias, kind in (("float", float), ("int", int), ("bool", bool)):
        if not hasattr(np, alias):
            setattr(np, alias, kind)  # MineRL 0.4.4 was written for an older numpy
    try:
        from minerl.herobraine.env_spec import EnvSpec
        from minerl.herobraine.hero import handlers, mc
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"minecraft needs the package '{error.name}', which is not installed: {SETUP}"
        ) from error

    class FlatSpec(EnvSpec):
        """What the player sees and can do."""

        def create_agent_start(self) -> list[Any]:
            return [handlers.AgentStartBreakSpeedMultiplier(break_speed)]

        def create_observables(self) -> list[Any]:
            return [
                handlers.POVObservation((size[1], size[0])),
                handlers.FlatInventoryObservation(mc.ALL_ITEMS),
                handlers.EquippedItemObservation(mc.ALL_ITEMS, _default="air", _other="other"),
                handlers.ObservationFromCurrentLocation(),
                handlers.ObservationFromLifeStats(),
            ]

        def create_actionables(self) -> list[Any]:
            keys = [handlers.KeybasedCommandAction(name, mc.INVERSE_KEYMAP[name]) for name in ENTRIES]
            items, other = ["none", *mc.ALL_ITEMS], {"_other": "none", "_default": "none"}
            return [
                *keys,
                handlers.CameraAction(),
                handlers.PlaceBlock(items, **other),
                handlers.EquipAction(items, **other),
                handlers.CraftAction(items, **other),
                handlers.CraftNearbyAction(items, **other),
                handlers.SmeltItemNearby(items, **other),
            ]

        def create_server_world_generators(self) -> list[Any]:
            return [handlers.DefaultWorldGenerator(force_reset=True)]

        def create_server_quit_producers(self) -> list[Any]:
            return [handlers.ServerQuitWhenAnyAgentFinishes()]

        def create_server_initial_conditions(self) -> list[Any]:
            return [
                handlers.TimeInitialCondition(allow_passage_of_time=True, start_time=0),
                handlers.SpawningInitialCondition(allow_spawning=True),
            ]

        def create_agent_handlers(self) -> list[Any]:
            return []

        def create_rewardables(self) -> list[Any]:
            return []

        def create_monitors(self) -> list[Any]:
            return []

        def create_server_decorators(self) -> list[Any]:
            return []

        def is_from_folder(self, folder: str) -> bool:
            return False

        def determine_success_from_rewards(self, rewards: list) -> bool:
            return True

        def get_docstring(self) -> str:
            return ""

    try:
        return FlatSpec(name="RLLabMinecraft-v0").make()
    except Exception as error:  # Java, the display, or a game that does not start: all kinds
        raise LabError(f"minecraft does not start: {one_line(error)}. {SETUP}") from error
