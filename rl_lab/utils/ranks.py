"""Ranks: the processes of one training run under torchrun, one for each GPU.

    torchrun --nproc-per-node 2 -m rl_lab train experiment=dreamer_atari

Every rank has environments, replay and random generators of its own, and the same weights: gradients and all
statistics over a batch are averaged over the ranks. Without torchrun every function here returns its argument.

Two kinds of exchange. Inside `joint()`, which only the steps of hooks enter, tensors are reduced on their device
(NCCL, also inside a CUDA graph; gloo on the CPU). Between actions the host exchanges counters and decisions with
`host_sum`, `gather` and `from_first`, so that all ranks take the same actions. What one rank does alone, such as an
evaluation, is outside `joint()` and waits for nobody.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rl_lab.errors import CheckpointError, ConfigError, LabError, one_line

T = TypeVar("T")
SILENCE_S = 15.0  # a rank whose watch thread has not written for so long is lost
EXIT_S = 5.0  # then the process ends even if its main thread waits for the lost rank
WAIT = datetime.timedelta(
    days=7
)  # of collectives: the others wait for an evaluation; lost ranks are found by Watch


class RankLostError(LabError):
    """Another rank ended or does not answer: this one cannot go on. quiet: another one says so."""

    def __init__(self, message: str, *, quiet: bool = False) -> None:
        super().__init__(message)
        self.quiet = quiet


class Ranks:
    """The place of this process among the ranks."""

    def __init__(self, rank: int, size: int, host: Any, watch: Watch | None) -> None:
        self.rank = rank
        self.size = size
        self.host = host  # a process group for values on the host
        self.watch = watch


_ranks: Ranks | None = None
_joint = False


def rank() -> int:
    return 0 if _ranks is None else _ranks.rank


def size() -> int:
    return 1 if _ranks is None else _ranks.size


def is_first() -> bool:
    """Whether this rank logs, evaluates and writes the checkpoint."""
    return rank() == 0


def own_seed() -> tuple[int, ...]:
    """What a rank adds to the parts of a seed; nothing on the first one."""
    return () if is_first() else (rank(),)


def joined() -> bool:
    """Whether torchrun started this process, with any number of ranks."""
    return _ranks is not None


def command(words: str) -> str:
    """The shell command for `rl-lab <words>` with as many ranks as now."""
    if size() == 1:
        return f"rl-lab {words}"
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size()))
    nodes = f"--nnodes {size() // here} " if size() > here else ""
    return f"torchrun {nodes}--nproc-per-node {here} -m rl_lab {words}"


# ---------------------------------------------------------------- tensors, inside the step of a hook


@contextlib.contextmanager
def joint() -> Iterator[None]:
    """Reduce over the ranks inside the block. All ranks enter it for the same step."""
    global _joint
    before, _joint = _joint, _ranks is not None
    try:
        yield
    finally:
        _joint = before


def active() -> bool:
    """Whether tensors are reduced over the ranks here."""
    return _joint


class _Mean(torch.autograd.Function):
    """Mean over the ranks. Its gradient is a mean, too: the ranks' gradients of the parameters are averaged later."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return _averaged(x)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return _averaged(gradients[0])


def _averaged(x: torch.Tensor) -> torch.Tensor:
    result = x.detach().clone(memory_format=torch.contiguous_format)
    _exchange(lambda group: dist.all_reduce(result), on_host=False)
    return result.div_(size())


def mean_over_ranks(x: torch.Tensor) -> torch.Tensor:
    """The mean of a tensor of every rank, with a gradient to each; `x` itself outside `joint()`."""
    if not _joint:
        return x
    return _Mean.apply(x) if x.requires_grad and torch.is_grad_enabled() else _averaged(x)


def count_over_ranks(count: torch.Tensor, least: float = 1.0) -> torch.Tensor:
    """Divisor of a masked sum: max(count, least), or each rank's equal share of that of all ranks.

    The mean over the ranks of sum / count_over_ranks(count) is the masked mean of the joint batch.
    """
    if not _joint:
        return count.clamp(min=least)
    return mean_over_ranks(count).clamp(min=least / size())


def rows_of_ranks(x: torch.Tensor) -> torch.Tensor:
    """The rows (first dimension) of all ranks, without gradient; `x` itself outside `joint()`."""
    if not _joint:
        return x
    x = x.detach().contiguous()
    parts = [torch.empty_like(x) for _ in range(size())]
    _exchange(lambda group: dist.all_gather(parts, x), on_host=False)
    return torch.cat(parts)


def clamp_mean(value: torch.Tensor, least: float) -> torch.Tensor:
    """max(mean, least) of a 0-d mean over the batch: whether it is clamped depends on the joint batch."""
    if not _joint:
        return value.clamp(min=least)
    low = mean_over_ranks(value.detach()) < least
    return torch.where(low, torch.full_like(value, least), value)


@torch.no_grad()
def average_over_ranks_(tensors: Sequence[torch.Tensor]) -> None:
    """Average tensors of one dtype in place, in one exchange; nothing outside `joint()`."""
    if not _joint or not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    _exchange(lambda group: dist.all_reduce(flat), on_host=False)
    flat.div_(size())
    parts = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(list(tensors), [part.view(t.shape) for part, t in zip(parts, tensors)])


@torch.no_grad()
def extremes_over_ranks_(low: torch.Tensor, high: torch.Tensor) -> None:
    """Set limits to the lowest and highest of all ranks, in place."""
    if _joint:
        _exchange(lambda group: dist.all_reduce(low, op=dist.ReduceOp.MIN), on_host=False)
        _exchange(lambda group: dist.all_reduce(high, op=dist.ReduceOp.MAX), on_host=False)


# ---------------------------------------------------------------- values of the host, between actions


def host_sum(values: Sequence[float]) -> list[float]:
    """The sum over the ranks of each value; exact for integers below 2**53."""
    if size() == 1:
        return [float(value) for value in values]
    total = torch.tensor(values, dtype=torch.float64)
    _exchange(lambda group: dist.all_reduce(total, group=group))
    return list(total.tolist())


def all_ranks(flag: bool) -> bool:
    return bool(host_sum([not flag])[0] == 0.0)


def any_rank(flag: bool) -> bool:
    return bool(host_sum([flag])[0] > 0.0)


def gather(value: T) -> list[T]:
    """The value of every rank, on every rank. Values pass between the processes of one run only."""
    if size() == 1:
        return [value]
    values: list[Any] = [None] * size()
    _exchange(lambda group: dist.all_gather_object(values, value, group=group))
    return values


def gather_on_first(value: T) -> list[T]:
    """The value of every rank, on the first one; [] on the others."""
    if size() == 1:
        return [value]
    values: list[Any] = [None] * size() if is_first() else []
    _exchange(lambda group: dist.gather_object(value, values if is_first() else None, dst=0, group=group))
    return values


def from_first(function: Callable[[], T]) -> T:
    """The result of a function that only the first rank calls. If it fails there, the others end quietly."""
    if size() == 1:
        return function()
    found: list[Any] = [None, None]
    error: Exception | None = None
    if is_first():
        try:
            found[1] = function()
        except Exception as raised:
            error, found[0] = raised, one_line(raised)
    _exchange(lambda group: dist.broadcast_object_list(found, src=0, group=group))
    if error is not None:
        raise error
    if found[0] is not None:
        raise RankLostError(f"rank 0 failed: {found[0]}", quiet=True)
    return found[1]


def together(function: Callable[[], T]) -> list[T]:
    """The results of a function that every rank calls; CheckpointError on all if it fails with one on any."""
    if size() == 1:
        return [function()]
    try:
        outcome: tuple[Any, str] = (function(), "")
    except CheckpointError as error:
        outcome = (None, str(error))
    outcomes = gather(outcome)
    for number, (_, failure) in enumerate(outcomes):
        if failure:
            raise CheckpointError(failure if number == 0 else f"rank {number}: {failure}")
    return [result for result, _ in outcomes]


def mean_of_dicts(values: dict[str, float]) -> dict[str, float]:
    """The mean of each key over the ranks that have it, in the order of the first rank."""
    if size() == 1:
        return values
    every = gather(values)
    keys = dict.fromkeys(key for each in every for key in each)
    found = {key: [each[key] for each in every if key in each] for key in keys}
    return {key: sum(items) / len(items) for key, items in found.items()}


def same_weights(modules: Sequence[torch.nn.Module]) -> None:
    """Give every rank the parameters and buffers of the first one."""
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    for tensor in tensors if size() > 1 else ():
        value = tensor.detach().contiguous()
        _exchange(partial(_broadcast, value), on_host=False)
        tensor.data.copy_(value)


def _broadcast(value: torch.Tensor, group: Any) -> None:
    dist.broadcast(value, src=0, group=group)


def _exchange(function: Callable[[Any], Any], *, on_host: bool = True) -> None:
    assert _ranks is not None
    try:
        function(_ranks.host if on_host else None)
    except RuntimeError as error:  # the connection to another rank was closed
        raise lost(error) from None


# ---------------------------------------------------------------- joining


@contextlib.contextmanager
def join(device: str) -> Iterator[None]:
    """Join the ranks that torchrun started, if it started this process. device: `experiment.device`."""
    global _ranks
    if "TORCHELASTIC_RUN_ID" not in os.environ or _ranks is not None:
        yield
        return
    if device.startswith("cuda:") and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1:
        raise ConfigError(
            f"experiment.device is {device}, but torchrun gives each rank its own GPU: set it to auto"
        )
    cuda = device in ("auto", "cuda") and torch.cuda.is_available()
    store, number, count = next(iter(dist.rendezvous("env://")))
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=store, rank=number, world_size=count, timeout=WAIT
    )
    host = dist.new_group(backend="gloo", timeout=WAIT) if cuda else dist.group.WORLD
    watch = Watch(dist.PrefixStore("rl_lab", store.clone()), number, count) if count > 1 else None
    _ranks = Ranks(number, count, host, watch)
    try:
        yield
        if count > 1:
            _exchange(lambda group: dist.barrier(group=group))
    except BaseException as error:
        if watch is not None:
            watch.say_why(error)
        _ranks = None  # other ranks may never answer: the process group is left as it is
        if isinstance(error, RankLostError) and error.quiet:
            raise SystemExit(1) from None
        raise
    if watch is not None:
        watch.close()
    dist.destroy_process_group()
    _ranks = None


# ---------------------------------------------------------------- ranks that end


class Watch:
    """Finds out which rank ended, by signs of life in the store of torchrun and by process ids on this machine."""

    def __init__(self, store: Any, number: int, count: int) -> None:
        self.store = store
        self.number = number
        self.others = [other for other in range(count) if other != number]
        self.on_lost: Callable[[RankLostError], str] = str  # what is printed if the main thread cannot
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._beats = {other: (-1, time.monotonic()) for other in self.others}
        store.set(f"process/{number}", f"{os.getpid()} {socket.gethostname()}")
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._ended.set()

    def say_why(self, error: BaseException) -> None:
        """Tell the others why this rank ends; "" if it only follows another one."""
        self._ended.set()
        why = "" if isinstance(error, RankLostError) else one_line(error)
        with contextlib.suppress(Exception):
            self.store.set(f"ended/{self.number}", why)

    def culprit(self) -> tuple[int, str] | None:
        """The rank that ended first, as far as can be seen, and what is known about it."""
        gone: list[tuple[int, str]] = []
        with self._lock:
            for other in self.others:
                if self.store.check([f"ended/{other}"]):
                    why = self.store.get(f"ended/{other}").decode()
                    if why:
                        return other, f"failed: {why}"
                    continue
                if not self.store.check([f"process/{other}"]):
                    continue
                process, _, host = self.store.get(f"process/{other}").decode().partition(" ")
                beat = self.store.add(f"alive/{other}", 0)
                before, since = self._beats[other]
                if beat != before:
                    self._beats[other] = (beat, time.monotonic())
                elif time.monotonic() - since > SILENCE_S:
                    gone.append(
                        (other, f"(process {process} on {host}) has not answered for {SILENCE_S:g} s")
                    )
                if host == socket.gethostname() and _is_gone(int(process)):
                    gone.insert(0, (other, f"(process {process} on {host}) ended"))
        return gone[0] if gone else None

    def _run(self) -> None:
        while not self._ended.wait(1.0):
            try:
                self.store.add(f"alive/{self.number}", 1)
                found = self.culprit()
            except Exception:  # torchrun itself has ended: it stops all ranks
                return
            if found is not None and not self._ended.wait(EXIT_S):
                # The main thread has not noticed: it waits for the lost rank, perhaps on the device.
                if self.number == min({self.number, *self.others} - {found[0]}):
                    print(
                        f"error: {self.on_lost(RankLostError(_sentence(*found)))}",
                        file=sys.stderr,
                        flush=True,
                    )
                os._exit(1)


def lost(error: BaseException) -> RankLostError:
    """The error for a failed exchange, quiet on all ranks but the lowest that is left."""
    watch = _ranks.watch if _ranks is not None else None
    if watch is None:
        return RankLostError(f"the ranks cannot exchange data: {one_line(error)}")
    deadline = time.monotonic() + SILENCE_S + 2.0
    found = None
    while found is None and time.monotonic() < deadline:
        with contextlib.suppress(Exception):
            found = watch.culprit()
        time.sleep(0.1)
    if found is None:
        return RankLostError(f"the ranks cannot exchange data, and all of them answer: {one_line(error)}")
    speaks = watch.number == min({watch.number, *watch.others} - {found[0]})
    return RankLostError(_sentence(*found), quiet=not speaks)


def on_lost(describe: Callable[[RankLostError], str]) -> None:
    """Set what is printed about a lost rank if the main thread cannot: a function of the error."""
    if _ranks is not None and _ranks.watch is not None:
        _ranks.watch.on_lost = describe


def _sentence(number: int, what: str) -> str:
    return f"rank {number} {what}: all ranks stop"


def _is_gone(process: int) -> bool:
    """Whether a process of this machine has ended, or is only waited for by its parent."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return os.path.isdir("/proc/self")
    except OSError:
        return False
