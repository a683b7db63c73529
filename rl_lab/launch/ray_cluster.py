"""Objects in other processes of a Ray cluster. The only module that knows Ray.

The callers know `Remote`: an object somewhere else whose methods are called one at a time. A lost process is a
ConnectionError, one that does not answer in time a TimeoutError.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from rl_lab.errors import ConfigError, LabError, MissingPackageError, install_line, one_line

STORE_BYTES = 256 * 2**20  # object store of a cluster that is started here: chunks and weights are small


def require_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when ray is imported
    try:
        import ray
    except ImportError as error:
        raise MissingPackageError(f"launch=ray needs Ray: {install_line('ray')}") from error
    return ray


class RayCluster:
    """A connection to a cluster; a cluster that it has started ends with it.

    address: host:port, "auto", or None for a cluster of this machine alone
    """

    def __init__(
        self, address: str | None = None, *, cpus: float = 1.0, say: Callable[[str], None] = print
    ) -> None:
        self.ray = require_ray()
        self.cpus = cpus
        self._started = not self.ray.is_initialized()
        if not self._started:  # by the calling program
            return
        options: dict[str, Any] = {"address": address}
        if address is None:
            options = {"address": "local", "object_store_memory": STORE_BYTES, "include_dashboard": False}
            options["num_cpus"] = max(os.cpu_count() or 1, 64)  # waiting collectors need no core of their own
        try:
            self.ray.init(
                **options, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False
            )
        except Exception as error:
            raise ConfigError(
                f"launch.address={address}: no Ray cluster can be reached there: {one_line(error)}; "
                "start one with `ray start --head`, or set launch.address=null"
            ) from error
        nodes = sum(bool(node["Alive"]) for node in self.ray.nodes())
        where = "started on this machine" if address is None else f"at {address}"
        say(f"Ray cluster {where}: {nodes} nodes, {self.ray.cluster_resources().get('CPU', 0):.0f} cores")

    def put(self, value: Any) -> Any:
        """Store a value once for all remote objects; return what to pass to their methods."""
        return self.ray.put(value)

    def start(self, path: str, options: Mapping[str, Any]) -> RayObject:
        """Create the object `module:Class` with these keyword arguments in a process of the cluster."""
        actor = self.ray.remote(_Host).options(
            num_cpus=self.cpus,
            num_gpus=0,
            scheduling_strategy="SPREAD",
            max_restarts=0,
        )
        return RayObject(self.ray, actor.remote(path, dict(options)))

    def close(self) -> None:
        if self._started:
            self._started = False
            with contextlib.suppress(Exception):
                self.ray.shutdown()


class _Host:
    """In the remote process: holds one object and calls its methods."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        module, _, name = path.partition(":")
        self._object = getattr(import_module(module), name)(**options)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._object, method)(*args)

    def place(self) -> tuple[str, int]:
        import ray

        return str(ray.get_runtime_context().get_node_id()), os.getpid()


class RayObject:
    """An object in a process of the cluster. Every `call` is followed by a `result`."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self._actor = actor
        self._waiting: list[Any] = []

    def call(self, method: str, *args: Any) -> None:
        """Begin a call; values of `RayCluster.put` are passed as what they stand for."""
        self._waiting.append(self._actor.call.remote(method, *args))

    def ready(self, seconds: float = 0.0) -> bool:
        """Wait for the result of the oldest call; return whether it has arrived, or can never arrive."""
        return bool(self._ray.wait([self._waiting[0]], timeout=seconds)[0])

    def result(self, seconds: float | None = None) -> Any:
        """Return the result of the oldest call; ConnectionError: it is lost, TimeoutError: it did not answer."""
        exceptions = self._ray.exceptions
        try:
            value = self._ray.get(self._waiting[0], timeout=seconds)
        except exceptions.GetTimeoutError as error:
            raise TimeoutError(f"did not answer for {seconds:g} s") from error
        except (exceptions.RayActorError, exceptions.ObjectLostError, exceptions.WorkerCrashedError) as error:
            raise ConnectionError(_why(error)) from error
        except exceptions.RayTaskError as error:
            del self._waiting[0]
            cause = getattr(error, "cause", None)
            if isinstance(cause, LabError):
                raise type(cause)(*cause.args) from error
            raise LabError(f"an object on the cluster raised {_why(error)}") from error
        del self._waiting[0]
        return value

    def kill(self) -> None:
        """End the process."""
        with contextlib.suppress(Exception):
            self._ray.kill(self._actor)

    def place(self) -> tuple[str, int]:
        """Return the id of its node and that of its process."""
        node, pid = self._ray.get(self._actor.place.remote(), timeout=60)
        return str(node), int(pid)


def _why(error: BaseException) -> str:
    """Return the last line of Ray's message that is not about how to find out more."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [
        line for line in lines if not line.startswith(("class_name", "actor_id", "namespace", "pid", "ip"))
    ]
    return (kept or [type(error).__name__])[-1].partition(" Worker exit type:")[0].rstrip(".")[:300]
