"""The part of a config that one rank builds (utils/ranks.py), and what is said when their number changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rl_lab.errors import ConfigError
from rl_lab.utils import ranks


def rank_config(config: DictConfig) -> DictConfig:
    """The config of this rank of several: its share of each batch, and its own folder of stored rows.

    training.global_batch: with `fixed` every key `batch_size` of `algorithm` is divided by the number of ranks
    """
    kind = config.training.get("global_batch", "fixed")
    mine = config.copy()
    OmegaConf.set_readonly(mine, False)
    for path in batch_sizes(OmegaConf.to_container(mine.algorithm)) if kind == "fixed" else ():
        size = int(OmegaConf.select(mine, path))
        if size % ranks.size():
            raise ConfigError(
                f"{path} is {size}, which {ranks.size()} ranks cannot share equally: change it, or set "
                "training.global_batch=scaled"
            )
        OmegaConf.update(mine, path, size // ranks.size())
    for node in mine.buffers.values() if not ranks.is_first() else ():
        if OmegaConf.is_dict(node) and node.get("folder"):
            node.folder = str(Path(str(node.folder)) / f"rank{ranks.rank()}")
    return mine


def batch_sizes(node: Any, path: str = "algorithm") -> Iterator[str]:
    """Yield the path of every number called `batch_size` in a plain config."""
    for key, value in node.items() if isinstance(node, Mapping) else ():
        if key == "batch_size" and isinstance(value, int):
            yield f"{path}.{key}"
        yield from batch_sizes(value, f"{path}.{key}")


def describe_ranks(config: DictConfig) -> str:
    """A sentence for the start of a run with several ranks."""
    size, kind = ranks.size(), config.training.get("global_batch", "fixed")
    batch = "each batch is shared by them" if kind == "fixed" else f"each batch is {size} times as large"
    envs = int(config.environment.get("num_envs", 1))
    return f"{size} ranks: {envs} environments and replay of its own in each; {batch}; counters are of all together"


def describe_change(saved: int) -> str:
    """A sentence about a run that was saved with another number of ranks."""
    size = ranks.size()
    text = f"resharded from {saved} to {size} ranks: "
    if size < saved:
        left = "rank" if saved - size == 1 else "ranks"
        which = ", ".join(str(number) for number in range(size, saved))
        return text + f"the replay and environments of {left} {which} are left out"
    which = ", ".join(f"{number} of rank {number % saved}" for number in range(saved, size))
    return (
        text
        + f"new ranks begin with a copy of the replay ({which}), with new environments and random numbers"
    )
