"""What other packages add to the lab without a fork, found by their entry points.

    [project.entry-points."rl_lab.environments"]
    corridor = "lab_extension.corridor"          # suite -> adapter module (see environments/make.py)

    [project.entry-points."rl_lab.configs"]
    lab_extension = "lab_extension.configs"      # any name -> package with YAML files in our groups

Workflows, components and buffers need none: a config names them by `_target_`.
"""

from __future__ import annotations

import importlib.util
import warnings
from importlib.metadata import entry_points
from pathlib import Path

CONFIG_GROUP = "rl_lab.configs"


def config_folders() -> list[Path]:
    """Folders of configs that installed packages offer, in the order of their names."""
    folders: dict[Path, None] = {}
    for point in sorted(entry_points(group=CONFIG_GROUP), key=lambda point: point.name):
        try:
            spec = importlib.util.find_spec(point.value)
        except (ImportError, ValueError, AttributeError) as error:  # another package's fault is not ours
            spec, reason = None, f" ({error})"
        else:
            reason = ""
        if spec is None or not spec.submodule_search_locations:
            warnings.warn(
                f"the entry point '{point.name}' of group {CONFIG_GROUP} names '{point.value}', which is no package "
                f"that can be found{reason}: its configs are left out",
                stacklevel=2,
            )
            continue
        folders |= dict.fromkeys(Path(place).resolve() for place in spec.submodule_search_locations)
    return list(folders)
