"""Facts about this machine and this code that results are kept with. The host's name is left out on purpose."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from rl_lab.utils.install import PACKAGE, checkout


def commit() -> str:
    """Commit of the checkout, with `-dirty` behind it when files differ from it; "" without a checkout."""
    if checkout() is None:
        return ""
    revision = _git("rev-parse", "HEAD")
    if not revision:
        return ""
    return revision + ("-dirty" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*arguments: str) -> str:
    try:
        result = subprocess.run(
            ["git", "-C", str(PACKAGE.parent), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cpus() -> int:
    """Cores that this process may use, which in a container is often fewer than there are."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            count = min(count, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return count


def memory_bytes() -> tuple[int, int]:
    """Memory in all and free to use, within the container's limit; zeros when it cannot be told."""
    try:
        import psutil
    except ImportError:
        return 0, 0
    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return total, available
    return min(total, limit), min(available, max(limit - used, 0))


def describe_machine() -> dict[str, Any]:
    """What a benchmark's numbers depend on. Loads torch when it is there."""
    facts: dict[str, Any] = {
        "cpu": cpu_model(),
        "cpus": usable_cpus(),
        "gpu": None,
        "memory_gib": round(memory_bytes()[0] / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": None,
        "torch_threads": None,
    }
    try:
        import torch
    except ImportError:
        return facts
    facts |= {"torch": str(torch.__version__), "torch_threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name(0)
    return facts
