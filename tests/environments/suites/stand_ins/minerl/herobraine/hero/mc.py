"""herobraine/hero/mc.py: 392 item names of mc_constants.json (line 523); here those that the tasks need."""

ALL_ITEMS = [
    "air",
    "cobblestone",
    "crafting_table",
    "diamond",
    "dirt",
    "furnace",
    "iron_ingot",
    "iron_ore",
    "iron_pickaxe",
    "log",
    "log2",
    "planks",
    "stick",
    "stone_pickaxe",
    "wooden_pickaxe",
]
_KEYS = ("forward", "back", "left", "right", "jump", "sneak", "sprint", "attack", "use", "inventory", "drop")
INVERSE_KEYMAP = {name: str(number) for number, name in enumerate(_KEYS)}  # line 484: name -> key code
