"""Running means of metrics (`MetricMeter`) and wall time by section (`Stopwatch`) between two log lines."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


PREFIXES = ("collect/", "train/", "controller/", "eval/", "workflow/", "time/", "report/")


def prefixed(metrics: Mapping[str, Any], default_prefix: str) -> dict[str, Any]:
    """Add the default prefix to every key that has none of PREFIXES."""
    default = default_prefix.rstrip("/") + "/"
    return {key if key.startswith(PREFIXES) else default + key: value for key, value in metrics.items()}


class MetricMeter:
    """Running means of metrics that may be on a device, without a synchronization per call.

    The tensors of one call are stacked to one vector and added to a sum on their device: two small kernels
    for any number of metrics. Calls with the same keys share a sum. Only `drain` transfers to the host.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[str, ...], _Group] = {}
        self._floats: dict[str, list[float]] = {}  # key -> [sum, count]
        # Sums of a checkpoint, by keys; they become a group when the device is known.
        self._restored: dict[tuple[str, ...], tuple[int, list[float]]] = {}

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add one value per key: 0-d tensors (any device, any dtype), numpy scalars or numbers."""
        import torch

        names: list[str] = []
        tensors: list[torch.Tensor] = []
        for key, value in metrics.items():
            if isinstance(value, torch.Tensor):
                names.append(key)
                tensors.append(value)
            else:
                entry = self._floats.setdefault(key, [0.0, 0.0])
                entry[0] += float(value)
                entry[1] += 1.0
        if not tensors:
            return
        group = self._groups.get(tuple(names))
        if group is None:
            group = self._groups[tuple(names)] = _Group(names, tensors)
            if tuple(names) in self._restored:
                group.set_sums(*self._restored.pop(tuple(names)))
        group.add(tensors)

    def get_state(self) -> dict[str, Any]:
        """Return the sums since the last drain. Synchronizes."""
        groups = [
            {"names": list(group.names), "count": group.count, "sums": group.total.tolist()}
            for group in self._groups.values()
            if group.count
        ]
        groups += [
            {"names": list(names), "count": count, "sums": list(sums)}
            for names, (count, sums) in self._restored.items()
        ]
        return {"floats": {key: list(entry) for key, entry in self._floats.items()}, "groups": groups}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue with the sums of `get_state`."""
        self._groups.clear()
        self._floats = {key: [float(value) for value in entry] for key, entry in state["floats"].items()}
        self._restored = {
            tuple(group["names"]): (int(group["count"]), [float(value) for value in group["sums"]])
            for group in state["groups"]
        }

    def drain(self) -> dict[str, float]:
        """Return the mean of each key since the last drain; keys without a value are left out.

        Synchronizes.
        """
        import torch

        totals: dict[str, list[float]] = {key: [*entry] for key, entry in self._floats.items()}
        self._floats.clear()
        for names, (count, saved) in self._restored.items():
            for key, value in zip(names, saved):
                entry = totals.setdefault(key, [0.0, 0.0])
                entry[0] += value
                entry[1] += count
        self._restored.clear()
        filled = [group for group in self._groups.values() if group.count]
        for device in {group.total.device for group in filled}:
            here = [group for group in filled if group.total.device == device]
            sums = iter(torch.cat([group.total for group in here]).tolist())
            for group in here:
                for key in group.names:
                    entry = totals.setdefault(key, [0.0, 0.0])
                    entry[0] += next(sums)
                    entry[1] += group.count
                group.clear()
        return {key: total / count for key, (total, count) in totals.items()}


class _Group:
    """Sums of metrics that are always added in the same call."""

    def __init__(self, names: list[str], tensors: list[torch.Tensor]) -> None:
        import torch

        for name, tensor in zip(names, tensors):
            if tensor.numel() != 1:
                raise ValueError(
                    f"metric '{name}' has shape {tuple(tensor.shape)}: reduce it to a scalar first"
                )
        self.names = names
        self.count = 0
        device = tensors[0].device
        # float64 keeps long sums accurate; MPS does not support it.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self.total = torch.zeros(len(names), dtype=dtype, device=device)

    def add(self, tensors: list[torch.Tensor]) -> None:
        import torch

        device = self.total.device
        with torch.no_grad():
            if not all(t.dtype is torch.float32 and t.dim() == 0 and t.device == device for t in tensors):
                tensors = [tensor.to(device, torch.float32).reshape(()) for tensor in tensors]
            self.total += torch.stack(tensors)
        self.count += 1

    def set_sums(self, count: int, sums: list[float]) -> None:
        import torch

        self.total.copy_(torch.tensor(sums, dtype=self.total.dtype))
        self.count = count

    def clear(self) -> None:
        self.total.zero_()
        self.count = 0


# --- Timing ---


class Section:
    """Context manager that times one named section of code; not re-entrant. It costs two clock reads."""

    __slots__ = ("_start", "calls", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds += perf_counter() - self._start
        self.calls += 1


class Stopwatch:
    """Sums seconds by section.

        with watch("env_wait"):
            ...
        watch.drain()  # {"time/env_wait_ms": 1.3, "time/env_wait_share": 0.2}

    On a GPU a section measures host time: queued kernels count where the host synchronizes.
    """

    def __init__(self) -> None:
        self._sections: dict[str, Section] = {}
        self._since = perf_counter()

    def __call__(self, name: str) -> Section:
        section = self._sections.get(name)
        if section is None:
            section = self._sections[name] = Section()
        return section

    def drain(self) -> dict[str, float]:
        """Return mean milliseconds per call and share of the wall time since the last drain, by section."""
        now = perf_counter()
        wall = max(now - self._since, 1e-9)
        metrics: dict[str, float] = {}
        for name, section in self._sections.items():
            if section.calls:
                metrics[f"time/{name}_ms"] = 1000.0 * section.seconds / section.calls
                metrics[f"time/{name}_share"] = section.seconds / wall
            section.seconds, section.calls = 0.0, 0
        self._since = now
        return metrics
