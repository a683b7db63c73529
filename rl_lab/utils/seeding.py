"""Seeds and named random generators.

Every consumer of random numbers has its own generator, named for its purpose, so that one more draw in one
place does not change the others. torch and numpy are imported inside functions: worker processes and the
command line need only `derive_seed`.
"""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rl_lab.errors import CheckpointError

if TYPE_CHECKING:
    import torch


def derive_seed(*parts: str | int) -> int:
    """Derive a seed in [0, 2**63) from strings and integers: the same on every machine, Python and run.

    `derive_seed(1, "ab")`, `derive_seed("1", "ab")` and `derive_seed(1, "a", "b")` all differ.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, (str, int)):
            raise TypeError(f"derive_seed takes str and int parts, not {type(part).__name__}: {part!r}")
        text = str(part).encode()
        digest.update(f"{'s' if isinstance(part, str) else 'i'}{len(text)}:".encode() + text)
    return int.from_bytes(digest.digest(), "big") >> 1


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's global generators (all devices)."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy's legacy generator takes 32 bits
    torch.manual_seed(seed)


class Generators:
    """Named `torch.Generator`s of one run and rank, made on first use.

    `cpu(name)` and `device(name)` are different streams, on a CPU run too.
    """

    def __init__(self, seed: int, rank: int = 0, device: torch.device | str = "cpu") -> None:
        import torch

        self.seed = seed
        self.rank = rank
        self.torch_device = torch.device(device)
        self._cpu: dict[str, torch.Generator] = {}
        self._device: dict[str, torch.Generator] = {}

    def cpu(self, name: str) -> torch.Generator:
        """Return the generator of that name on the CPU, for draws that the host reads."""
        import torch

        if name not in self._cpu:
            self._cpu[name] = torch.Generator().manual_seed(self._cpu_seed(name))
        return self._cpu[name]

    def device(self, name: str) -> torch.Generator:
        """Return the generator of that name on the training device."""
        import torch

        if name not in self._device:
            self._device[name] = torch.Generator(self.torch_device).manual_seed(self._device_seed(name))
        return self._device[name]

    def get_state(self) -> dict[str, Any]:
        """Return the states by name and those of the global generators; only tensors, numbers and strings."""
        return {
            "cpu": {name: generator.get_state() for name, generator in self._cpu.items()},
            "device": {name: generator.get_state().cpu() for name, generator in self._device.items()},
            "device_type": self.torch_device.type,
            "global": global_state(self.torch_device),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `get_state`. Generator objects already in use stay the same objects.

        A generator that is not in the state restarts from its seed. States from another type of device cannot
        be used: those generators restart from their seeds, with a warning.
        """
        same_device = state["device_type"] == self.torch_device.type
        if not same_device and state["device"]:
            warnings.warn(
                f"random states were saved on '{state['device_type']}', but this run is on "
                f"'{self.torch_device.type}': device generators restart from the seed",
                stacklevel=2,
            )
        for name in {*self._cpu, *state["cpu"]}:
            if name in state["cpu"]:
                self.cpu(name).set_state(state["cpu"][name].cpu())
            else:
                self.cpu(name).manual_seed(self._cpu_seed(name))
        for name in {*self._device, *state["device"]}:
            if same_device and name in state["device"]:
                self.device(name).set_state(state["device"][name].cpu())
            else:
                self.device(name).manual_seed(self._device_seed(name))
        set_global_state(state["global"], self.torch_device)

    def _cpu_seed(self, name: str) -> int:
        return derive_seed(self.seed, self.rank, name)

    def _device_seed(self, name: str) -> int:
        return derive_seed(self.seed, self.rank, name, "device")


def global_state(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return the states of the global generators of Python, numpy and torch (CPU, and a GPU `device`)."""
    import numpy as np
    import torch

    numpy_state: Any = np.random.get_state()
    if numpy_state[0] != "MT19937":
        raise CheckpointError(
            f"numpy's global generator is {numpy_state[0]}, whose state cannot be saved: keep the default "
            "MT19937 and use numpy.random.default_rng for others"
        )
    version, words, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": {
            "words": torch.tensor(numpy_state[1].astype(np.int64)),
            "position": int(numpy_state[2]),
            "has_gauss": int(numpy_state[3]),
            "gauss": float(numpy_state[4]),
        },
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
    }
    device = torch.device(device)
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device).cpu()
    elif device.type == "mps":
        state["mps"] = torch.mps.get_rng_state().cpu()
    return state


def set_global_state(state: Mapping[str, Any], device: torch.device | str = "cpu") -> None:
    """Restore the result of `global_state`."""
    import numpy as np
    import torch

    torch.set_rng_state(state["torch"].cpu())
    kept = state["numpy"]
    words = kept["words"].cpu().numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, kept["position"], kept["has_gauss"], kept["gauss"]))
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    device = torch.device(device)
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
    elif device.type == "mps" and "mps" in state:
        torch.mps.set_rng_state(state["mps"].cpu())
