"""Opening HDF5 files and reading arrays from them, with one sentence for a damaged file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.buffers.formats.episode import MissingKeyError
from rl_lab.errors import ConfigError

# Bytes. HDF5's own limit, 32 MiB of the file, takes 37 kB of memory for every episode that is read.
METADATA_CACHE = 1 << 21


def open_hdf5(path: Path, mode: str = "r") -> Any:
    """Return an h5py.File; ConfigError if it cannot be read."""
    import h5py

    if mode != "r":
        return _with_small_cache(h5py.File(path, mode))
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: the data set is incomplete")
    try:
        return _with_small_cache(h5py.File(path, "r"))
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"{path} cannot be read: it is damaged or not an HDF5 file ({_first_line(error)})"
        ) from None


def _with_small_cache(file: Any) -> Any:
    """Limit what HDF5 keeps of groups and arrays that were used before, so that memory is flat."""
    settings = file.id.get_mdc_config()
    settings.set_initial_size = True
    settings.initial_size = settings.min_size = METADATA_CACHE // 2
    settings.max_size = METADATA_CACHE
    file.id.set_mdc_config(settings)
    return file


def array_at(group: Any, name: str) -> np.ndarray:
    """Return the array of a name; ConfigError if it is missing, no array, or damaged."""
    import h5py

    found = group.get(name)
    if found is None:
        raise MissingKeyError(f"'{name}' is missing; there are {', '.join(sorted(group)) or 'no arrays'}")
    if not isinstance(found, h5py.Dataset):
        raise ConfigError(f"'{name}' is a group, not an array")
    try:
        return np.asarray(found[()])
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"'{name}' cannot be read: the file is damaged ({_first_line(error)})") from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
