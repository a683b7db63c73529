"""Conversion of state to types that `torch.load(weights_only=True)` accepts, and loading of such files.

`weights_only=True` runs no code from the file and accepts only a few types. `to_saveable` raises when
*saving*, with the key of the unsupported value, so that no unreadable checkpoint is written.
"""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.errors import CheckpointError

_PLAIN = (type(None), bool, int, float, complex, torch.Size, torch.dtype, torch.device)
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
MAX_DEPTH = 100  # the pickler itself recurses a few calls per level


def to_saveable(value: Any, path: str = "") -> Any:
    """Convert numpy values to tensors and numbers; CheckpointError with the key of an unsupported value.

    Unchanged: None, numbers, text, tensors (detached; views are copied so that a slice does not save its
    complete storage), lists, tuples, dicts. Subclasses such as enums and named tuples are refused: loading
    them needs code.
    """
    return _convert(value, path, ())


def _convert(value: Any, path: str, parents: tuple[int, ...]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is str:
        return _text(value, path)
    if kind in _TENSORS:
        return _tensor(value, path)
    if isinstance(value, np.ndarray):
        return _array(value, path)
    if isinstance(value, np.str_):
        return _text(str(value), path)
    if isinstance(value, np.generic):
        if value.dtype.kind in "biufc":
            return value.item()
        raise _refusal(path, value, "only numpy numbers and bools can be saved")
    if kind in (list, tuple, dict, OrderedDict):
        if id(value) in parents:
            raise _refusal(path, value, "it contains itself")
        if len(parents) >= MAX_DEPTH:
            raise _refusal(path, value, f"it is nested more than {MAX_DEPTH} levels deep")
        return _container(value, path, (*parents, id(value)))
    raise _refusal(path, value, _advice(value))


def _container(value: Any, path: str, parents: tuple[int, ...]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_convert(item, f"{path}[{i}]", parents) for i, item in enumerate(value))
    result = type(value)()
    for key, item in value.items():
        result[_key(key, path)] = _convert(item, f"{path}.{key}" if path else str(key), parents)
    metadata = getattr(value, "_metadata", None)  # module versions, set by nn.Module.state_dict
    if metadata is not None:
        result._metadata = _convert(metadata, f"{path}._metadata", parents)
    return result


def _key(key: Any, path: str) -> Any:
    if isinstance(key, np.generic):
        key = key.item()
    parts = key if type(key) is tuple else (key,)
    for part in parts:
        if type(part) not in (str, int, float, bool, type(None)):
            raise _refusal(path, key, "a key must be text or a number")
        if type(part) is str:
            _text(part, path)
    return key


def _text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _refusal(path, value, "it has lone surrogates, which cannot be encoded") from None
    return value


def _tensor(value: torch.Tensor, path: str) -> torch.Tensor:
    if value.device.type == "meta":
        raise _refusal(path, value, "a meta tensor has no data")
    tensor = value.detach()
    if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def _array(value: np.ndarray, path: str) -> torch.Tensor:
    if value.dtype.kind not in "biufc":
        raise _refusal(path, value, f"arrays of dtype {value.dtype} cannot be converted to tensors")
    try:
        # A copy in native byte order, contiguous and writable.
        return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C", subok=False))
    except TypeError as error:  # for example longdouble
        raise _refusal(path, value, str(error)) from None


def _advice(value: Any) -> str:
    if isinstance(value, (set, frozenset)):
        return "save a sorted list instead"
    if isinstance(value, (bytes, bytearray)):
        return "save a uint8 tensor or text instead"  # weights_only accepts bytes, but not empty ones
    if callable(getattr(value, "state_dict", None)):
        return "save its state_dict() instead"
    if callable(getattr(value, "get_state", None)):
        return "save its get_state() instead"
    return "save numbers, text, tensors, lists or dicts instead"


def _refusal(path: str, value: Any, reason: str) -> CheckpointError:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return CheckpointError(f"'{path or 'state'}' ({name}) cannot be saved: {reason}")


def load_data(path: Path, *, check_zip: bool = False) -> Any:
    """Load a file written by `torch.save` to the CPU; no code from the file is run.

    check_zip: verify the archive's own checksums, for files without a manifest.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    if not zipfile.is_zipfile(path):
        raise CheckpointError(f"{path} is not a zip archive: it is not a checkpoint, or its end is missing")
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(info.file_size for info in archive.infolist())
            if unpacked > path.stat().st_size:  # torch.save does not compress
                raise CheckpointError(
                    f"{path} is refused: it unpacks to {unpacked:,} bytes, but has {path.stat().st_size:,}"
                )
            broken = archive.testzip() if check_zip else None
        if broken is not None:
            raise CheckpointError(f"{path} is damaged: the checksum of '{broken}' in it is wrong")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's warnings about TorchScript and pickle protocols
            return torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # damaged archives raise many types of errors
        raise CheckpointError(_load_failure(path, error)) from None


def _load_failure(path: Path, error: Exception) -> str:
    """Return one sentence instead of torch's message, which advises to use weights_only=False."""
    text = str(error)
    wanted = sorted(set(re.findall(r"GLOBAL ([\w.]+)", text)))
    if wanted or "TorchScript" in text:
        what = ", ".join(wanted) or "TorchScript"
        return f"{path} is refused: it needs code to load ({what}), but checkpoints are data only"
    if isinstance(error, pickle.UnpicklingError):
        return f"{path} is refused: it is damaged or does not contain plain data only"
    reason = f"{type(error).__name__}: {text.strip()[:200]}"
    return f"{path} cannot be read: it is damaged or not a checkpoint ({reason})"
