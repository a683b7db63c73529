"""herobraine/hero/handlers: the ones that the adapter names, with their entry and its space."""

import numpy as np
from minerl.herobraine.hero import spaces
from minerl.herobraine.hero.spaces import Box, Dict, Discrete, Enum


class _Handler:
    def __init__(self, name, space=None):
        self.name, self.space = name, space

    def to_string(self):
        return self.name


def POVObservation(
    video_resolution,
):  # agent/observations/pov.py:44: (width, height), the space is (height, width, 3)
    assert isinstance(video_resolution, tuple)
    return _Handler("pov", Box(0, 255, [*video_resolution[::-1], 3], np.uint8))


def FlatInventoryObservation(
    item_list,
):  # agent/observations/inventory.py:66: sorted, no entry for other items
    return _Handler("inventory", Dict({name: Box(0, 2304, (), np.int32) for name in sorted(item_list)}))


def EquippedItemObservation(
    items, _default, _other
):  # agent/observations/equipped_item.py:46-50: both are appended
    names = list(items)
    names += [name for name in (_other, _default) if name not in names]
    kinds = {"type": Enum(*names, default=_default), "damage": Box(-1, 1562), "maxDamage": Box(-1, 1562)}
    return _Handler("equipped_items", Dict({"mainhand": Dict(kinds)}))


def ObservationFromCurrentLocation():  # agent/observations/location_stats.py
    return _Handler(
        "location_stats", Dict({name: Box(-640000.0, 640000.0) for name in ("xpos", "ypos", "zpos")})
    )


def ObservationFromLifeStats():  # agent/observations/lifestats.py:68, 93, 130; mc.py:488-491
    limits = {"is_alive": 1, "life": 20, "food": 20, "air": 300}
    return _Handler("life_stats", Dict({name: Box(0, limit) for name, limit in limits.items()}))


def KeybasedCommandAction(command, *keys):  # agent/actions/keyboard.py:66
    assert len(keys) == 1 and isinstance(keys[0], str)
    return _Handler(command, Discrete(2))


def CameraAction():  # agent/actions/camera.py:23: degrees (pitch, yaw)
    return _Handler("camera", Box(-180, 180, [2], np.float32))


def _item_action(name):  # agent/action.py:29-40
    def create(items, _default="none", _other="other"):
        assert not any("#" in item for item in items)  # agent/action.py:165
        return _Handler(name, spaces.Enum(*dict.fromkeys([*items, _other, _default]), default=_default))

    return create


PlaceBlock = _item_action("place")
EquipAction = _item_action("equip")
CraftAction = _item_action("craft")
CraftNearbyAction = _item_action("nearbyCraft")
SmeltItemNearby = _item_action("nearbySmelt")


class AgentStartBreakSpeedMultiplier(_Handler):  # agent/start.py:122
    def __init__(self, multiplier=1.0):
        super().__init__(f"agent_start_break_speed_multiplier({multiplier})")
        self.multiplier = multiplier


def DefaultWorldGenerator(force_reset=True, generator_options="{}"):  # server/world.py:16
    assert force_reset, "the adapter wants a new world in each episode"
    return _Handler("default_world_generator")


def ServerQuitWhenAnyAgentFinishes():
    return _Handler("server_quit_when_any_agent_finishes")


def TimeInitialCondition(allow_passage_of_time, start_time=None):
    return _Handler("time_initial_condition")


def SpawningInitialCondition(allow_spawning):
    return _Handler("spawning_initial_condition")
