"""State that can be saved and loaded as data, never as code.

`torch.load(weights_only=True)` runs nothing from the file, but takes only a few types. `to_saveable` finds out
when *saving*, with the key that is wrong, instead of leaving a checkpoint that cannot be read.
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
    """The same value with numpy turned into tensors and numbers; CheckpointError naming the key that cannot be.

    Kept as they are: None, numbers, text, tensors (detached; views are copied so that a slice does not
    drag its whole storage along), lists, tuples, dicts. Types are taken exactly: an enum or a named tuple is a
    class, and would need code to load.
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
        raise _refusal(path, value, "only numbers and bools of numpy can be saved")
    if kind in (list, tuple, dict, OrderedDict):
        if id(value) in parents:
            raise _refusal(path, value, "it contains itself")
        if len(parents) >= MAX_DEPTH:
            raise _refusal(path, value, f"it is nested more than {MAX_DEPTH} deep")
        return _container(value, path, (*parents, id(value)))
    raise _refusal(path, value, _advice(value))


def _container(value: Any, path: str, parents: tuple[int, ...]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_convert(item, f"{path}[{i}]", parents) for i, item in enumerate(value))
    result = type(value)()
    for key, item in value.items():
        result[_key(key, path)] = _convert(item, f"{path}.{key}" if path else str(key), parents)
    metadata = getattr(value, "_metadata", None)  # versions of modules, on what nn.Module.state_dict returns
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
        raise _refusal(path, value, f"arrays of dtype {value.dtype} cannot be tensors")
    try:
        # A copy: in the machine's byte order, contiguous, and writable.
        return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C", subok=False))
    except TypeError as error:  # longdouble and the like
        raise _refusal(path, value, str(error)) from None


def _advice(value: Any) -> str:
    if isinstance(value, (set, frozenset)):
        return "save a sorted list instead"
    if isinstance(value, (bytes, bytearray)):
        return "save a uint8 tensor or text instead"  # weights_only takes bytes, but not empty ones
    if callable(getattr(value, "state_dict", None)):
        return "save its state_dict() instead"
    if callable(getattr(value, "get_state", None)):
        return "save its get_state() instead"
    return "save numbers, text, tensors, lists or dicts instead"


def _refusal(path: str, value: Any, reason: str) -> CheckpointError:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return CheckpointError(f"cannot save '{path or 'state'}' ({name}): {reason}")


def load_data(path: Path, *, check_zip: bool = False) -> Any:
    """Content of a file that `torch.save` wrote, on the CPU; no code from the file is ever run.

    check_zip: verify the archive's own checksums, for files that no manifest vouches for.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    if not zipfile.is_zipfile(path):
        raise CheckpointError(f"{path} is not a checkpoint, or its end is missing: it is no zip archive")
    try:
        if check_zip:
            with zipfile.ZipFile(path) as archive:
                broken = archive.testzip()
            if broken is not None:
                raise CheckpointError(f"{path} is damaged: the checksum of '{broken}' in it is wrong")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's advice on TorchScript and pickle protocols
            return torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # damaged archives fail in many ways, torch's own among them
        raise CheckpointError(_load_failure(path, error)) from None


def _load_failure(path: Path, error: Exception) -> str:
    """One sentence instead of torch's, which advises to load the file with code."""
    text = str(error)
    wanted = sorted(set(re.findall(r"GLOBAL ([\w.]+)", text)))
    if wanted or "TorchScript" in text:
        what = ", ".join(wanted) or "TorchScript"
        return f"{path} is refused: it needs code to load ({what}), and checkpoints are data only"
    if isinstance(error, pickle.UnpicklingError):
        return f"{path} is refused: it is damaged, or holds more than plain data"
    return f"{path} cannot be read: it is damaged or no checkpoint ({type(error).__name__}: {text.strip()[:200]})"
