"""herobraine/env_spec.py and env/_multiagent.py, env/_singleagent.py."""

import abc

import numpy as np
from minerl.herobraine.hero.spaces import Dict

BREAKS = {"": "log", "wooden_pickaxe": "cobblestone", "stone_pickaxe": "iron_ore", "iron_pickaxe": "diamond"}
# What is made -> what it costs, and how many it gives.
RECIPES = {
    "planks": ({"log": 1}, 4),
    "stick": ({"planks": 2}, 4),
    "crafting_table": ({"planks": 4}, 1),
    "wooden_pickaxe": ({"planks": 3, "stick": 2}, 1),
    "stone_pickaxe": ({"cobblestone": 3, "stick": 2}, 1),
    "furnace": ({"cobblestone": 8}, 1),
    "iron_ingot": ({"iron_ore": 1, "planks": 1}, 1),
    "iron_pickaxe": ({"iron_ingot": 3, "stick": 2}, 1),
}


class EnvSpec(abc.ABC):  # env_spec.py:20; its abstract methods are those of lines 74-206
    def __init__(self, name, max_episode_steps=None):
        self.name = name
        self.observables = self.create_observables()
        self.actionables = self.create_actionables()
        self.agent_start = self.create_agent_start()
        self.rewardables = self.create_rewardables()
        self.monitors = self.create_monitors()
        self.agent_handlers = self.create_agent_handlers()
        for method in ("server_initial_conditions", "server_world_generators", "server_decorators"):
            assert isinstance(getattr(self, f"create_{method}")(), list)
        assert isinstance(self.create_server_quit_producers(), list)
        names = [handler.to_string() for handler in self.observables]
        assert len(names) == len(set(names))  # env_spec.py:59

    def make(self, fake=False):  # env_spec.py:210
        return _SingleAgentEnv(self)

    @abc.abstractmethod
    def create_observables(self): ...

    @abc.abstractmethod
    def create_actionables(self): ...

    @abc.abstractmethod
    def create_rewardables(self): ...

    @abc.abstractmethod
    def create_agent_start(self): ...

    @abc.abstractmethod
    def create_agent_handlers(self): ...

    @abc.abstractmethod
    def create_monitors(self): ...

    @abc.abstractmethod
    def create_server_initial_conditions(self): ...

    @abc.abstractmethod
    def create_server_decorators(self): ...

    @abc.abstractmethod
    def create_server_world_generators(self): ...

    @abc.abstractmethod
    def create_server_quit_producers(self): ...

    @abc.abstractmethod
    def is_from_folder(self, *args): ...

    @abc.abstractmethod
    def determine_success_from_rewards(self, *args): ...

    @abc.abstractmethod
    def get_docstring(self): ...


class _SingleAgentEnv:
    """Old Gym: `reset() -> obs`, `step(action) -> obs, reward, done, info` (env/_singleagent.py:21-31)."""

    def __init__(self, spec):
        self.task = spec
        self.observation_space = Dict({h.to_string(): h.space for h in spec.observables})
        self.action_space = Dict({h.to_string(): h.space for h in spec.actionables})
        self.commands = []  # for tests
        self.fail_at = self.die_at = None
        self.done = True
        self._seed = None
        self.closed = False

    def seed(self, seed=None, seed_spaces=True):  # env/_multiagent.py:138-154
        assert isinstance(seed, int) or seed is None, "Seed must be an int!"
        self._seed = seed
        if seed_spaces:
            self.observation_space.seed(seed)

    def reset(self):  # env/_multiagent.py:448-499: the seed is forgotten afterwards
        self._random = np.random.RandomState(self._seed % 2**32 if self._seed is not None else None)
        self._seed = None
        self.counts = {name: 0 for name in self.observation_space["inventory"].spaces}
        self.near, self.held, self.height, self.life = set(), "", 64.0, 20.0
        self.steps, self.done = 0, False
        return self._observe()

    def step(self, action):
        if self.done:
            raise RuntimeError("Attempted to step an environment server with done=True")  # _multiagent.py:380
        unknown = set(action) ^ set(self.action_space.spaces)
        assert not unknown, f"entries {unknown}"
        for name, value in action.items():
            assert value in self.action_space[name], (name, value)
        self.commands.append(action)
        self.steps += 1
        if self.steps == self.fail_at:  # _multiagent.py:335-350: a random observation, reward 0, done
            self.done = True
            return self._observe(random=True), 0, True, {"error": "Connection timed out!"}
        self._act(action)
        self.done = self.steps == self.die_at
        if self.done:
            self.life = 0.0
        return self._observe(), 0.0, self.done, {}

    def close(self):
        self.closed = True

    def _act(self, action):
        if action["attack"]:
            self.counts[BREAKS[self.held]] += 1
        if action["jump"]:
            self.height += 1.0
        for entry, place in (("craft", ""), ("nearbyCraft", "crafting_table"), ("nearbySmelt", "furnace")):
            made = action[entry]
            if made != "none" and (not place or place in self.near):
                cost, gives = RECIPES[made]
                if all(self.counts[name] >= count for name, count in cost.items()):
                    for name, count in cost.items():
                        self.counts[name] -= count
                    self.counts[made] += gives
        if action["place"] != "none" and self.counts[action["place"]]:
            self.counts[action["place"]] -= 1
            self.near.add(action["place"])
        if action["equip"] != "none" and self.counts[action["equip"]]:
            self.held = action["equip"]

    def _observe(self, random=False):
        height, width, _ = self.observation_space["pov"].shape
        buffer = self._random.randint(0, 256, (height, width, 3)).astype(np.uint8)
        kind = "other" if random else self.held or "air"
        return {
            "pov": buffer[::-1, :, :],  # pov.py:62: not contiguous
            # inventory.py:86: arrays without dimensions
            "inventory": {name: np.array(count) for name, count in self.counts.items()},
            "equipped_items": {"mainhand": {"type": kind, "damage": np.array(0), "maxDamage": np.array(0)}},
            "location_stats": {"xpos": np.array(0.0), "ypos": np.array(self.height), "zpos": np.array(0.0)},
            "life_stats": {
                "is_alive": np.array(self.life > 0),
                "life": np.array(self.life),
                "food": np.array(20),
                "air": np.array(300),
            },
        }
